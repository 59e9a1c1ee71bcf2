# mypy: ignore-errors
"""Hopper's warpgroup matrix products, mbarriers and register reallocation as single PTX instructions (sm_90a).

Shared memory is addressed by 32-bit addresses. Matrix operands there are column blocks: rows of ``block_bytes`` (32, 64
or 128), swizzled over that many bytes, one block after the other.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from .ptx import assemble

_SWIZZLE = {128: 1, 64: 2, 32: 3}


def swizzle(block_bytes: int, row):
    """The XOR of the 16-byte units of a row in a column block."""
    return {128: row & 7, 64: row >> 1 & 3, 32: row >> 2 & 1}[block_bytes]


def descriptor(address: Int32, block_bytes: int, block_stride: int) -> Int64:
    """The descriptor of an operand that starts at ``address``, for both majors; block_stride: bytes between blocks."""
    fixed = _SWIZZLE[block_bytes] << 62 | (8 * block_bytes >> 4) << 32 | (block_stride >> 4) << 16
    fixed -= 1 << 64 if fixed >> 63 else 0
    return Int64(fixed) | Int64((address & 0x3FFFF) >> 4)


def _wgmma(d, count, a, b, kind, transposed_b, loc, ip):
    """One wgmma of 64 rows, 2 ``count`` columns and 32 bytes of K; d None: the products alone."""
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
def mbarrier_wait(address: Int32, parity: Int32, *, loc=None, ip=None) -> None:
    """Wait until the phase of this parity has completed."""
    text = "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra WAIT; DONE: }"
    assemble(text, "r,r,~{memory}", [Int32(address), Int32(parity)], [], True, loc, ip)
