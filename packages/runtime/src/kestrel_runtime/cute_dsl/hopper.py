# mypy: ignore-errors
"""Hopper's warpgroup matrix products, mbarriers, TMA and register reallocation as single PTX instructions (sm_90a).

Shared memory is addressed by 32-bit addresses. Matrix operands there are column blocks: rows of ``block_bytes`` (32, 64
or 128), swizzled over that many bytes, one block after the other.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import cute as _cute_ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from .ptx import assemble

_SWIZZLE = {128: 1, 64: 2, 32: 3}  # the field of a descriptor, by bytes of the swizzle


def swizzle(block_bytes: int, row):
    """The XOR of the 16-byte units of a row in a column block."""
    return {128: row & 7, 64: row >> 1 & 3, 32: row >> 2 & 1}[block_bytes]


def descriptor(address: Int32, block_bytes: int, block_stride: int) -> Int64:
    """The wgmma descriptor of an operand at ``address``, K-major or MN-major; block_stride: bytes between blocks."""
    # In 16 bytes: the address (bits 0-13), the strides of column blocks (16-29) and of groups of 8 rows (32-45).
    fixed = _SWIZZLE[block_bytes] << 62 | (8 * block_bytes >> 4) << 32 | (block_stride >> 4) << 16
    fixed -= 1 << 64 if fixed >> 63 else 0
    return Int64(fixed) | Int64((address & 0x3FFFF) >> 4)


def _wgmma(d, count, a, b, kind, transposed_b, loc, ip):
    """One wgmma of 64 rows, 2 ``count`` columns and 32 bytes of K; with d None, nothing is accumulated."""
    registers = ", ".join(f"${i}" for i in range(count))
    first = 2 * count if d is not None else count
    in_shared = not isinstance(a, (list, tuple))
    if in_shared:
        a_text, operands, constraints, after = f"${first}", [Int64(a)], ["l"], ", 0"
    else:
        a_text = "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"
        operands, constraints, after = [Uint32(x) for x in a], ["r"] * 4, ""
    b_text = f"${first + len(operands)}"
    of_bytes = kind in ("e4m3", "e5m2")  # whose operands are always K-major
    elements, majors = (32, "") if of_bytes else (16, f"{after}, {int(transposed_b)}")
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, {int(d is not None)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{elements}.f32.{kind}.{kind} "
        f"{{{registers}}}, {a_text}, {b_text}, p, 1, 1{majors};}}"
    )
    tied = [] if d is None else [Float32(x) for x in d]
    constraints = ["=f"] * count + [str(i) for i in range(len(tied))] + constraints + ["l"]
    values = [*tied, *operands, Int64(b)]
    return [Float32(x) for x in assemble(text, ",".join(constraints), values, [T.f32()] * count, True, loc, ip)]


@dsl_user_op
def wgmma(d, count: cutlass.Constexpr, a, b: Int64, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """Start d += a b', both K-major: ``count`` registers of d (None: of zeros), a descriptor or four registers."""
    return _wgmma(d, count, a, b, kind, False, loc, ip)


@dsl_user_op
def wgmma_transposed(d, count: cutlass.Constexpr, a, b: Int64, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """Start d += a b of a [64, 16] K-major, and b [16, 2 count] whose rows lie in shared memory."""
    return _wgmma(d, count, a, b, kind, True, loc, ip)


@dsl_user_op
def wgmma_fence(*, loc=None, ip=None) -> None:
    """Order accesses to registers before the matrix products that follow."""
    assemble("wgmma.fence.sync.aligned;", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def wgmma_commit(*, loc=None, ip=None) -> None:
    """Commit the matrix products since the last commit as one group."""
    assemble("wgmma.commit_group.sync.aligned;", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def wgmma_wait(pending: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Wait until at most ``pending`` groups are in flight."""
    assemble(f"wgmma.wait_group.sync.aligned {pending};", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def ordered(values, *, loc=None, ip=None):
    """The same floats. The compiler moves no use of the results above this point."""
    count = len(values)
    constraints = ["=f"] * count + [str(i) for i in range(count)]
    results = assemble("", ",".join(constraints), [Float32(x) for x in values], [T.f32()] * count, True, loc, ip)
    return [Float32(x) for x in results]


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None) -> None:
    """Make completed writes to shared memory visible to matrix products."""
    assemble("fence.proxy.async.shared::cta;", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def registers_down(count: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Reduce the registers of each thread of this warpgroup to ``count``."""
    assemble(f"setmaxnreg.dec.sync.aligned.u32 {count};", "", [], [], True, loc, ip)


@dsl_user_op
def registers_up(count: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Raise the registers of each thread of this warpgroup to ``count``."""
    assemble(f"setmaxnreg.inc.sync.aligned.u32 {count};", "", [], [], True, loc, ip)


@dsl_user_op
def named_barrier(barrier: Int32, threads: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Wait until ``threads`` threads have arrived at a barrier; barrier 0 is that of the thread block."""
    assemble(f"bar.sync $0, {threads};", "r,~{memory}", [Int32(barrier)], [], True, loc, ip)


@dsl_user_op
def named_barrier_arrive(barrier: Int32, threads: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Arrive at a barrier and go on; ``threads`` counts those that wait for it too."""
    assemble(f"bar.arrive $0, {threads};", "r,~{memory}", [Int32(barrier)], [], True, loc, ip)


@dsl_user_op
def mbarrier_init(address: Int32, arrivals: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Initialise an mbarrier (8 bytes) whose phases complete after ``arrivals`` arrivals."""
    text = f"mbarrier.init.shared::cta.b64 [$0], {arrivals};"
    assemble(text, "r,~{memory}", [Int32(address)], [], True, loc, ip)


@dsl_user_op
def mbarrier_arrive(address: Int32, *, loc=None, ip=None) -> None:
    """Arrive once."""
    assemble("mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}", [Int32(address)], [], True, loc, ip)


@dsl_user_op
def mbarrier_arrive_after_copies(address: Int32, *, loc=None, ip=None) -> None:
    """Arrive once, when all cp.async copies that this thread has issued are complete."""
    text = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    assemble(text, "r,~{memory}", [Int32(address)], [], True, loc, ip)


@dsl_user_op
def mbarrier_arrive_expecting(address: Int32, count: Int32, *, loc=None, ip=None) -> None:
    """Arrive once; the phase also waits for ``count`` bytes of bulk copies."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    assemble(text, "r,r,~{memory}", [Int32(address), Int32(count)], [], True, loc, ip)


@dsl_user_op
def mbarrier_wait(address: Int32, parity: Int32, *, loc=None, ip=None) -> None:
    """Wait until the phase of this parity has completed."""
    text = "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra WAIT; DONE: }"
    assemble(text, "r,r,~{memory}", [Int32(address), Int32(parity)], [], True, loc, ip)


@dsl_user_op
def mbarrier_ready(address: Int32, parity: Int32, *, loc=None, ip=None) -> Int32:
    """1 if the phase of this parity has completed, else 0."""
    text = "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; selp.s32 $0, 1, 0, p;}"
    operands = [Int32(address), Int32(parity)]
    return Int32(assemble(text, "=r,r,r,~{memory}", operands, [T.i32()], True, loc, ip)[0])


# -- tensor memory access (TMA) ---------------------------------------------------------------------------------------


def tensor_map(tensor, box: tuple[int, ...], block_bytes: int):
    """A TMA atom, made on the host, that copies boxes of a tensor of four dimensions to swizzled column blocks.

    The tensor's first dimension is contiguous, and ``block_bytes`` long in a box; other strides are multiples of 16
    bytes. load_box() takes coordinates in the order of the dimensions; elements outside the tensor become zeros.
    """
    swizzled = cute.make_swizzle({128: 3, 64: 2, 32: 1}[block_bytes], 4, 3)
    strides, stride = [], 1
    for size in box:
        strides.append(stride)
        stride *= size
    plain = cute.make_layout(box, stride=tuple(strides))
    layout = cute.make_composed_layout(swizzled, 0, plain)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)[0]


@dsl_user_op
def tensor_map_address(atom, *, loc=None, ip=None) -> Int64:
    """The address of the tensor map of an atom that is a kernel argument."""
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    kind = _cute_ir.PtrType.get(cute_nvgpu.TmaDescriptorTiledType.get(), cute.AddressSpace.generic, 64)
    pointer = cute_nvgpu.get_tma_desc_addr(kind, executable, loc=loc, ip=ip)
    return pointer.toint()


@dsl_user_op
def prefetch_tensor_map(tensor_map: Int64, *, loc=None, ip=None) -> None:
    """Fetch a tensor map ahead of its first use."""
    assemble("prefetch.tensormap [$0];", "l", [Int64(tensor_map)], [], True, loc, ip)


@dsl_user_op
def load_box(to: Int32, tensor_map: Int64, coordinates, barrier: Int32, *, loc=None, ip=None) -> None:
    """Start copying a box of four dimensions to shared memory; its bytes arrive at the mbarrier."""
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$2, $3, $4, $5}], [$6];"
    )
    operands = [Int32(to), Int64(tensor_map), *(Int32(c) for c in coordinates), Int32(barrier)]
    assemble(text, "r,l,r,r,r,r,r,~{memory}", operands, [], True, loc, ip)
