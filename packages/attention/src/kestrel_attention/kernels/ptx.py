"""Single PTX instructions that the kernels of this family are made of, on plain 32-bit registers.

A register holds one 32-bit value, two 16-bit floats or four codes. Loads are volatile, so that they are issued in the
order in which they are written.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _assemble(text, constraints, operands, results, volatile, loc, ip):
    """The values of an instruction: one value or a list."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    if not results:
        llvm.inline_asm(None, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)
        return []
    if len(results) == 1:
        return [llvm.inline_asm(results[0], values, text, constraints, has_side_effects=volatile, loc=loc, ip=ip)]
    struct = llvm.StructType.get_literal(results)
    packed = llvm.inline_asm(struct, values, text, constraints, has_side_effects=volatile, loc=loc, ip=ip)
    return [llvm.extractvalue(kind, packed, [i], loc=loc, ip=ip) for i, kind in enumerate(results)]


@dsl_user_op
def load_words(address: Int64, words: cutlass.Constexpr, *, loc=None, ip=None):
    """``words`` (1, 2 or 4) registers from global memory, past L1: a cache row is used once."""
    registers = ", ".join(f"${i}" for i in range(words))
    shape = f".v{words}" if words > 1 else ""
    registers = f"{{{registers}}}" if words > 1 else registers
    text = f"ld.global.L1::no_allocate{shape}.b32 {registers}, [${words}];"
    found = _assemble(text, ",".join(["=r"] * words) + ",l", [address], [T.i32()] * words, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def load_if(
    exists: Boolean, address: Int64, otherwise: cutlass.Constexpr, bits: cutlass.Constexpr = 32, *, loc=None, ip=None
) -> Uint32:
    """32 or 16 bits from global memory, or ``otherwise``; nothing waits for them here."""
    text = f"{{.reg .pred p; setp.ne.s32 p, $1, 0; mov.b32 $0, $3; @p ld.global.L1::no_allocate.u{bits} $0, [$2];}}"
    operands = [Int32(exists), Int64(address), Int32(otherwise)]
    return Uint32(_assemble(text, "=&r,r,l,n", operands, [T.i32()], True, loc, ip)[0])


@dsl_user_op
def prefetch(address: Int64, *, loc=None, ip=None) -> None:
    """Bring a line into L2; returns no data."""
    _assemble("prefetch.global.L2 [$0];", "l", [address], [], True, loc, ip)


@dsl_user_op
def permute(a: Uint32, b: Uint32, selector: Int32, *, loc=None, ip=None) -> Uint32:
    """Four of the eight bytes of a (0 to 3) and b (4 to 7), the first in the lowest digit of the selector."""
    operands = [Uint32(a), Uint32(b), Int32(selector)]
    return Uint32(_assemble("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", operands, [T.i32()], False, loc, ip)[0])


@dsl_user_op
def e4m3_to_halves(word: Uint32, *, loc=None, ip=None):
    """Four e4m3 codes as two registers of two fp16 each; exact. Needs sm_89."""
    text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    low, high = _assemble(text, "=r,=r,r", [word], [T.i32()] * 2, False, loc, ip)
    return Uint32(low), Uint32(high)


@dsl_user_op
def half_pair(instruction: cutlass.Constexpr, a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """An instruction on two pairs of 16-bit floats."""
    operands = [Uint32(a), Uint32(b)]
    return Uint32(_assemble(f"{instruction} $0, $1, $2;", "=r,r,r", operands, [T.i32()], False, loc, ip)[0])


@dsl_user_op
def half_fma(a: Uint32, b: Uint32, c: Uint32, *, loc=None, ip=None) -> Uint32:
    """a b + c of pairs of f16, rounded once."""
    operands = [Uint32(a), Uint32(b), Uint32(c)]
    return Uint32(_assemble("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", operands, [T.i32()], False, loc, ip)[0])


@dsl_user_op
def pack_pair(low: Float32, high: Float32, kind: cutlass.Constexpr, *, loc=None, ip=None) -> Uint32:
    """Two float32 rounded to bf16 or f16 (``kind``) in one register."""
    text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    return Uint32(_assemble(text, "=r,f,f", [Float32(low), Float32(high)], [T.i32()], False, loc, ip)[0])


@dsl_user_op
def unpack_pair(pair: Uint32, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """The two 16-bit floats of a register as float32; exact."""
    if kind == "bf16":
        text = "{shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;}"
    else:
        text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    if kind == "bf16":
        low, high = _assemble(text, "=r,=r,r", [Uint32(pair)], [T.i32()] * 2, False, loc, ip)
        return (Float32(llvm.bitcast(T.f32(), value, loc=loc, ip=ip)) for value in (low, high))
    low, high = _assemble(text, "=f,=f,r", [Uint32(pair)], [T.f32()] * 2, False, loc, ip)
    return Float32(low), Float32(high)


@dsl_user_op
def mma(a, b, c, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """m16n8k16 on bf16 or f16: a (4 registers) times b (2) plus c (4 float32); returns 4 float32."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [Uint32(x) for x in (*a, *b)] + [Float32(x) for x in c]
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return [Float32(x) for x in _assemble(text, constraints, operands, [T.f32()] * 4, False, loc, ip)]


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2 to the x, to about 2 units in the last place."""
    return Float32(_assemble("ex2.approx.ftz.f32 $0, $1;", "=f,f", [Float32(x)], [T.f32()], False, loc, ip)[0])


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    """The binary logarithm, -inf for 0."""
    return Float32(_assemble("lg2.approx.f32 $0, $1;", "=f,f", [Float32(x)], [T.f32()], False, loc, ip)[0])


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger; of a number and NaN the number."""
    operands = [Float32(a), Float32(b)]
    return Float32(_assemble("max.f32 $0, $1, $2;", "=f,f,f", operands, [T.f32()], False, loc, ip)[0])


@dsl_user_op
def minimum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller; of a number and NaN the number."""
    operands = [Float32(a), Float32(b)]
    return Float32(_assemble("min.f32 $0, $1, $2;", "=f,f,f", operands, [T.f32()], False, loc, ip)[0])


@dsl_user_op
def bits_of(x: Float32, *, loc=None, ip=None) -> Int32:
    """A float's bits."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(x: Int32, *, loc=None, ip=None) -> Float32:
    """The float of these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def pack_fp8(low: Float32, high: Float32, kind: cutlass.Constexpr, *, loc=None, ip=None) -> Uint32:
    """Two float32 as e4m3 or e5m2 codes in the low 16 bits, saturating; NaN stays NaN. Needs sm_89."""
    text = f"{{.reg .b16 p; cvt.rn.satfinite.{kind}x2.f32 p, $2, $1; cvt.u32.u16 $0, p;}}"
    return Uint32(_assemble(text, "=r,f,f", [Float32(low), Float32(high)], [T.i32()], False, loc, ip)[0])


@dsl_user_op
def store_words(address: Int64, words, *, loc=None, ip=None) -> None:
    """1, 2 or 4 registers to global memory."""
    count = len(words)
    registers = ", ".join(f"${i + 1}" for i in range(count))
    text = f"st.global.v{count}.b32 [$0], {{{registers}}};" if count > 1 else "st.global.b32 [$0], $1;"
    _assemble(text, ",".join(["l"] + ["r"] * count), [address, *(Uint32(x) for x in words)], [], True, loc, ip)


@dsl_user_op
def divide(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """a / b; volatile, so that it stays in the branch that needs it."""
    return Uint32(_assemble("div.u32 $0, $1, $2;", "=r,r,r", [Uint32(a), Uint32(b)], [T.i32()], True, loc, ip)[0])


@dsl_user_op
def transpose(pair: Uint32, *, loc=None, ip=None) -> Uint32:
    """An 8 x 8 matrix of 16-bit numbers, two in each lane, transposed over the warp."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(_assemble(text, "=r,r", [Uint32(pair)], [T.i32()], True, loc, ip)[0])


@dsl_user_op
def copy_to_shared(to: Int32, address: Int64, size: cutlass.Constexpr, there=None, *, loc=None, ip=None) -> None:
    """Start copying 4, 8 or 16 bytes from global to shared memory; of which only so many are there, and then zeros."""
    kind = "cg" if size == 16 else "ca"
    operands = [Int32(to), Int64(address)] + ([] if there is None else [Int32(there)])
    text = f"cp.async.{kind}.shared.global [$0], [$1], {size}{'' if there is None else ', $2'};"
    _assemble(text, "r,l" if there is None else "r,l,r", operands, [], True, loc, ip)


@dsl_user_op
def commit_copies(*, loc=None, ip=None) -> None:
    """The copies started since the last time are a group."""
    _assemble("cp.async.commit_group;", "", [], [], True, loc, ip)


@dsl_user_op
def wait_for_copies(pending: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Until no more than so many of this thread's groups are under way."""
    _assemble(f"cp.async.wait_group {pending};", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def load_shared(address: Int32, words: cutlass.Constexpr, *, loc=None, ip=None):
    """``words`` (1, 2 or 4) registers from shared memory."""
    registers = ", ".join(f"${i}" for i in range(words))
    shape = f".v{words}" if words > 1 else ""
    registers = f"{{{registers}}}" if words > 1 else registers
    text = f"ld.shared{shape}.b32 {registers}, [${words}];"
    found = _assemble(text, ",".join(["=r"] * words) + ",r", [Int32(address)], [T.i32()] * words, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def store_shared(address: Int32, words, *, loc=None, ip=None) -> None:
    """1, 2 or 4 registers to shared memory."""
    count = len(words)
    registers = ", ".join(f"${i + 1}" for i in range(count))
    shape = f".v{count}" if count > 1 else ""
    registers = f"{{{registers}}}" if count > 1 else registers
    text = f"st.shared{shape}.b32 [$0], {registers};"
    _assemble(text, ",".join(["r"] * (count + 1)), [Int32(address), *(Uint32(x) for x in words)], [], True, loc, ip)


@dsl_user_op
def log2_normal(x: Float32, *, loc=None, ip=None) -> Float32:
    """The binary logarithm; of numbers below the smallest normal one -inf."""
    return Float32(_assemble("lg2.approx.ftz.f32 $0, $1;", "=f,f", [Float32(x)], [T.f32()], False, loc, ip)[0])


@dsl_user_op
def load_transposed(address: Int32, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit numbers from shared memory; lane l says where row l % 8 of matrix l // 8 lies.

    Lane (g, t) is given column g of each, rows 2t and 2t + 1.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    found = _assemble(text, "=r,=r,=r,=r,r", [Int32(address)], [T.i32()] * 4, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def least(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller; NaN if one of them is."""
    operands = [Float32(a), Float32(b)]
    return Float32(_assemble("min.NaN.f32 $0, $1, $2;", "=f,f,f", operands, [T.f32()], False, loc, ip)[0])


@dsl_user_op
def most(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger; NaN if one of them is."""
    operands = [Float32(a), Float32(b)]
    return Float32(_assemble("max.NaN.f32 $0, $1, $2;", "=f,f,f", operands, [T.f32()], False, loc, ip)[0])


@dsl_user_op
def round_even(x: Float32, *, loc=None, ip=None) -> Int32:
    """The nearest integer, of two the even one, saturating; 0 for NaN."""
    return Int32(_assemble("cvt.rni.s32.f32 $0, $1;", "=r,f", [Float32(x)], [T.i32()], False, loc, ip)[0])


@dsl_user_op
def store_half(address: Int64, word: Uint32, *, loc=None, ip=None) -> None:
    """The low 16 bits to global memory."""
    text = "{.reg .b16 x; cvt.u16.u32 x, $1; st.global.b16 [$0], x;}"
    _assemble(text, "l,r", [Int64(address), Uint32(word)], [], True, loc, ip)


@dsl_user_op
def store_byte(address: Int64, word: Uint32, *, loc=None, ip=None) -> None:
    """The low 8 bits to global memory."""
    _assemble("st.global.b8 [$0], $1;", "l,r", [Int64(address), Uint32(word)], [], True, loc, ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once: the same wherever it stands."""
    operands = [Float32(a), Float32(b), Float32(c)]
    return Float32(_assemble("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", operands, [T.f32()], False, loc, ip)[0])


@dsl_user_op
def wait_for_launch_before(known: Int64, *, loc=None, ip=None) -> None:
    """Wait until the launch before this one has ended. ``known`` is not 0; what it is made of is worked out by then."""
    text = "{.reg .pred p; setp.ne.s64 p, $0, 0; @p griddepcontrol.wait;}"
    _assemble(text, "l,~{memory}", [Int64(known)], [], True, loc, ip)
