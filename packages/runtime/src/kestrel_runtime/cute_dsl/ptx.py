# mypy: ignore-errors
"""Single PTX instructions as functions on 32-bit registers.

A register holds one 32-bit value, two 16-bit floats or four 8-bit codes. Memory instructions are volatile, so that
they are issued in the order in which they are written.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def assemble(text, constraints, operands, results, volatile, loc, ip):
    """Emit inline PTX; returns its results, one MLIR value for each type in ``results``."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    if not results:
        llvm.inline_asm(None, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)
        return []
    if len(results) == 1:
        return [llvm.inline_asm(results[0], values, text, constraints, has_side_effects=volatile, loc=loc, ip=ip)]
    struct = llvm.StructType.get_literal(results)
    packed = llvm.inline_asm(struct, values, text, constraints, has_side_effects=volatile, loc=loc, ip=ip)
    return [llvm.extractvalue(kind, packed, [i], loc=loc, ip=ip) for i, kind in enumerate(results)]


def _vector(words: int, first: int) -> tuple[str, str]:
    """The vector suffix of a load or store of so many registers, and its operand."""
    registers = ", ".join(f"${first + i}" for i in range(words))
    return (f".v{words}", f"{{{registers}}}") if words > 1 else ("", registers)


# -- global memory ----------------------------------------------------------------------------------------------------


@dsl_user_op
def load_global(address: Int64, words: cutlass.Constexpr, *, loc=None, ip=None):
    """``words`` (1, 2 or 4) registers from global memory, not kept in L1."""
    suffix, registers = _vector(words, 0)
    text = f"ld.global.L1::no_allocate{suffix}.b32 {registers}, [${words}];"
    found = assemble(text, ",".join(["=r"] * words) + ",l", [address], [T.i32()] * words, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def load_global_if(predicate: Boolean, address: Int64, otherwise: cutlass.Constexpr, *, loc=None, ip=None) -> Uint32:
    """32 bits from global memory where the predicate holds, else ``otherwise``; a predicated load, no branch."""
    text = "{.reg .pred p; setp.ne.s32 p, $1, 0; mov.b32 $0, $3; @p ld.global.L1::no_allocate.u32 $0, [$2];}"
    operands = [Int32(predicate), Int64(address), Int32(otherwise)]
    return Uint32(assemble(text, "=&r,r,l,n", operands, [T.i32()], True, loc, ip)[0])


@dsl_user_op
def prefetch_l2(address: Int64, *, loc=None, ip=None) -> None:
    """Prefetch a line into L2."""
    assemble("prefetch.global.L2 [$0];", "l", [address], [], True, loc, ip)


@dsl_user_op
def store_global(address: Int64, words, *, loc=None, ip=None) -> None:
    """1, 2 or 4 registers to global memory."""
    suffix, registers = _vector(len(words), 1)
    text = f"st.global{suffix}.b32 [$0], {registers};"
    assemble(text, ",".join(["l"] + ["r"] * len(words)), [address, *(Uint32(x) for x in words)], [], True, loc, ip)


@dsl_user_op
def store_global_b16(address: Int64, word: Uint32, *, loc=None, ip=None) -> None:
    """The low 16 bits of a register to global memory."""
    text = "{.reg .b16 x; cvt.u16.u32 x, $1; st.global.b16 [$0], x;}"
    assemble(text, "l,r", [Int64(address), Uint32(word)], [], True, loc, ip)


@dsl_user_op
def store_global_b8(address: Int64, word: Uint32, *, loc=None, ip=None) -> None:
    """The low 8 bits of a register to global memory."""
    assemble("st.global.b8 [$0], $1;", "l,r", [Int64(address), Uint32(word)], [], True, loc, ip)


@dsl_user_op
def atomic_add(address: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """Add to a 32-bit integer in global memory, and return what it was."""
    operands = [Int64(address), Int32(value)]
    text = "atom.global.add.u32 $0, [$1], $2;"
    return Int32(assemble(text, "=r,l,r,~{memory}", operands, [T.i32()], True, loc, ip)[0])


# -- shared memory ----------------------------------------------------------------------------------------------------


@dsl_user_op
def load_shared(address: Int32, words: cutlass.Constexpr, *, loc=None, ip=None):
    """``words`` (1, 2 or 4) registers from shared memory."""
    suffix, registers = _vector(words, 0)
    text = f"ld.shared{suffix}.b32 {registers}, [${words}];"
    found = assemble(text, ",".join(["=r"] * words) + ",r", [Int32(address)], [T.i32()] * words, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def store_shared(address: Int32, words, *, loc=None, ip=None) -> None:
    """1, 2 or 4 registers to shared memory."""
    suffix, registers = _vector(len(words), 1)
    text = f"st.shared{suffix}.b32 [$0], {registers};"
    assemble(text, ",".join(["r"] * (len(words) + 1)), [Int32(address), *(Uint32(x) for x in words)], [], True, loc, ip)


@dsl_user_op
def atomic_add_shared(address: Int32, value: Int32, *, loc=None, ip=None) -> Int32:
    """Add to a 32-bit integer in shared memory, and return what it was."""
    operands = [Int32(address), Int32(value)]
    text = "atom.shared.add.u32 $0, [$1], $2;"
    return Int32(assemble(text, "=r,r,r,~{memory}", operands, [T.i32()], True, loc, ip)[0])


@dsl_user_op
def cp_async(shared: Int32, address: Int64, size: cutlass.Constexpr, valid=None, *, loc=None, ip=None) -> None:
    """Start copying 4, 8 or 16 bytes from global to shared memory; of these the first ``valid``, then zeros."""
    kind = "cg" if size == 16 else "ca"
    operands = [Int32(shared), Int64(address)] + ([] if valid is None else [Int32(valid)])
    text = f"cp.async.{kind}.shared.global [$0], [$1], {size}{'' if valid is None else ', $2'};"
    assemble(text, "r,l" if valid is None else "r,l,r", operands, [], True, loc, ip)


@dsl_user_op
def cp_async_commit(*, loc=None, ip=None) -> None:
    """Make a group of this thread's copies since the last commit."""
    assemble("cp.async.commit_group;", "", [], [], True, loc, ip)


@dsl_user_op
def cp_async_wait(pending: cutlass.Constexpr, *, loc=None, ip=None) -> None:
    """Wait until at most ``pending`` of this thread's groups are incomplete."""
    assemble(f"cp.async.wait_group {pending};", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def ldmatrix_x4(address: Int32, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit elements from shared memory; lane l addresses row l % 8 of matrix l // 8.

    Lane (g, t) = 4 g + t receives row g of each matrix, columns 2t and 2t + 1.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    found = assemble(text, "=r,=r,=r,=r,r", [Int32(address)], [T.i32()] * 4, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def ldmatrix_x4_trans(address: Int32, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit elements from shared memory; lane l addresses row l % 8 of matrix l // 8.

    Lane (g, t) = 4 g + t receives column g of each matrix, rows 2t and 2t + 1.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    found = assemble(text, "=r,=r,=r,=r,r", [Int32(address)], [T.i32()] * 4, True, loc, ip)
    return [Uint32(value) for value in found]


@dsl_user_op
def stmatrix_x4(address: Int32, words, *, loc=None, ip=None) -> None:
    """Four 8 x 8 matrices of 16-bit elements to shared memory; lane l addresses row l % 8 of matrix l // 8.

    Lane (g, t) = 4 g + t holds row g of each matrix, columns 2t and 2t + 1. Needs sm_90.
    """
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    operands = [Int32(address), *(Uint32(x) for x in words)]
    assemble(text, "r,r,r,r,r,~{memory}", operands, [], True, loc, ip)


# -- matrices in registers --------------------------------------------------------------------------------------------


@dsl_user_op
def mma_m16n8k16(a, b, c, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """a (4 registers) times b (2) plus c (4 float32), for ``kind`` bf16 or f16; returns 4 float32."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [Uint32(x) for x in (*a, *b)] + [Float32(x) for x in c]
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return [Float32(x) for x in assemble(text, constraints, operands, [T.f32()] * 4, False, loc, ip)]


@dsl_user_op
def movmatrix_trans(pair: Uint32, *, loc=None, ip=None) -> Uint32:
    """Transpose an 8 x 8 matrix of 16-bit elements, two in each lane, across the warp."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(assemble(text, "=r,r", [Uint32(pair)], [T.i32()], True, loc, ip)[0])


# -- bits and integers ------------------------------------------------------------------------------------------------


@dsl_user_op
def prmt(a: Uint32, b: Uint32, selector: Int32, *, loc=None, ip=None) -> Uint32:
    """Four of the eight bytes of a (0 to 3) and b (4 to 7), the first in the lowest digit of the selector."""
    operands = [Uint32(a), Uint32(b), Int32(selector)]
    return Uint32(assemble("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", operands, [T.i32()], False, loc, ip)[0])


@dsl_user_op
def opaque(x: Int32, *, loc=None, ip=None) -> Int32:
    """x, of which the compiler knows nothing."""
    return Int32(assemble("mov.b32 $0, $1;", "=r,r", [Int32(x)], [T.i32()], True, loc, ip)[0])


@dsl_user_op
def div_u32(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """a / b; volatile, so that it stays in the branch that needs it."""
    return Uint32(assemble("div.u32 $0, $1, $2;", "=r,r,r", [Uint32(a), Uint32(b)], [T.i32()], True, loc, ip)[0])


@dsl_user_op
def float_as_int(x: Float32, *, loc=None, ip=None) -> Int32:
    """The bits of a float."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def int_as_float(x: Int32, *, loc=None, ip=None) -> Float32:
    """The float of these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


# -- conversions ------------------------------------------------------------------------------------------------------


@dsl_user_op
def pack_f32x2(low: Float32, high: Float32, kind: cutlass.Constexpr, *, loc=None, ip=None) -> Uint32:
    """Two float32 rounded to bf16 or f16 (``kind``) in one register."""
    text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    return Uint32(assemble(text, "=r,f,f", [Float32(low), Float32(high)], [T.i32()], False, loc, ip)[0])


@dsl_user_op
def unpack_f32x2(pair: Uint32, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """The two bf16 or f16 (``kind``) of a register as float32; exact."""
    if kind == "bf16":
        text = "{shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;}"
        low, high = assemble(text, "=r,=r,r", [Uint32(pair)], [T.i32()] * 2, False, loc, ip)
        return (Float32(llvm.bitcast(T.f32(), value, loc=loc, ip=ip)) for value in (low, high))
    text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    low, high = assemble(text, "=f,=f,r", [Uint32(pair)], [T.f32()] * 2, False, loc, ip)
    return Float32(low), Float32(high)


@dsl_user_op
def e4m3x4_to_f16x4(word: Uint32, *, loc=None, ip=None):
    """Four e4m3 codes as two registers of two f16 each; exact. Needs sm_89."""
    text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    low, high = assemble(text, "=r,=r,r", [word], [T.i32()] * 2, False, loc, ip)
    return Uint32(low), Uint32(high)


@dsl_user_op
def pack_fp8(low: Float32, high: Float32, kind: cutlass.Constexpr, *, loc=None, ip=None) -> Uint32:
    """Two float32 as e4m3 or e5m2 codes (``kind``) in the low 16 bits, saturating; NaN stays NaN. Needs sm_89."""
    text = f"{{.reg .b16 p; cvt.rn.satfinite.{kind}x2.f32 p, $2, $1; cvt.u32.u16 $0, p;}}"
    return Uint32(assemble(text, "=r,f,f", [Float32(low), Float32(high)], [T.i32()], False, loc, ip)[0])


@dsl_user_op
def pack_e4m3x4(a: Float32, b: Float32, c: Float32, d: Float32, *, loc=None, ip=None) -> Uint32:
    """Four float32 as e4m3 codes, the first in the lowest byte, saturating; NaN stays NaN. Needs sm_89."""
    text = "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
    text += "mov.b32 $0, {l, h};}"
    operands = [Float32(x) for x in (a, b, c, d)]
    return Uint32(assemble(text, "=r,f,f,f,f", operands, [T.i32()], False, loc, ip)[0])


@dsl_user_op
def float_to_int_rn(x: Float32, *, loc=None, ip=None) -> Int32:
    """The nearest integer, ties to even, saturating; 0 for NaN."""
    return Int32(assemble("cvt.rni.s32.f32 $0, $1;", "=r,f", [Float32(x)], [T.i32()], False, loc, ip)[0])


# -- floats -----------------------------------------------------------------------------------------------------------


@dsl_user_op
def packed(instruction: cutlass.Constexpr, *operands: Uint32, loc=None, ip=None) -> Uint32:
    """An instruction on pairs of 16-bit floats, for example ``packed("mul.rn.f16x2", a, b)``."""
    registers = ", ".join(f"${i}" for i in range(len(operands) + 1))
    constraints = ",".join(["=r"] + ["r"] * len(operands))
    values = [Uint32(operand) for operand in operands]
    return Uint32(assemble(f"{instruction} {registers};", constraints, values, [T.i32()], False, loc, ip)[0])


def _float(instruction, operands, loc, ip) -> Float32:
    registers = ", ".join(f"${i}" for i in range(len(operands) + 1))
    constraints = ",".join(["=f"] + ["f"] * len(operands))
    values = [Float32(operand) for operand in operands]
    return Float32(assemble(f"{instruction} {registers};", constraints, values, [T.f32()], False, loc, ip)[0])


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once; never contracted with what surrounds it."""
    return _float("fma.rn.f32", (a, b, c), loc, ip)


@dsl_user_op
def fmax(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger; of a number and NaN the number."""
    return _float("max.f32", (a, b), loc, ip)


@dsl_user_op
def fmin(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller; of a number and NaN the number."""
    return _float("min.f32", (a, b), loc, ip)


@dsl_user_op
def fmax_nan(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger; NaN if one of them is NaN."""
    return _float("max.NaN.f32", (a, b), loc, ip)


@dsl_user_op
def fmin_nan(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller; NaN if one of them is NaN."""
    return _float("min.NaN.f32", (a, b), loc, ip)


@dsl_user_op
def exp2_approx(x: Float32, *, loc=None, ip=None) -> Float32:
    """2 to the x, to about 2 ulp."""
    return _float("ex2.approx.ftz.f32", (x,), loc, ip)


@dsl_user_op
def rcp_approx(x: Float32, *, loc=None, ip=None) -> Float32:
    """1 / x, to about 1 ulp."""
    return _float("rcp.approx.ftz.f32", (x,), loc, ip)


@dsl_user_op
def log2_approx(x: Float32, *, loc=None, ip=None) -> Float32:
    """The binary logarithm; -inf for 0."""
    return _float("lg2.approx.f32", (x,), loc, ip)


@dsl_user_op
def log2_approx_ftz(x: Float32, *, loc=None, ip=None) -> Float32:
    """The binary logarithm; -inf for 0 and for subnormal numbers."""
    return _float("lg2.approx.ftz.f32", (x,), loc, ip)
