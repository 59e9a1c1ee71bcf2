"""Appends new keys and values to a cache: as they are, or as FP8 codes of x / scale, saturating.

Launched before decode.py where a call appends. A block takes one new token, a thread eight elements at a time. The
launch is latency-bound: length, table entry and row are dependent loads. bf16 and fp16 rows keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, pdl, ptx

from .formats import stored_type
from .parameters import AppendScalars, AppendTensors

VECTOR = 8  # elements


class Fp8Format(NamedTuple):
    """A format of codes of eight bits."""

    mantissa_bits: int
    exponent_bias: int
    largest: float


FP8_FORMATS = {"e4m3": Fp8Format(3, 7, 448.0), "e5m2": Fp8Format(2, 15, 57344.0)}


@dataclass(frozen=True)
class Append:
    """One compiled variant, for bf16 and fp16."""

    codes: str  # what the caches hold: "" for the dtype itself, "e4m3", "e5m2"
    threads: int
    pdl: bool
    by_bits: bool  # round to codes without the instruction, which sm_80 and sm_86 lack

    def arguments(self, dtype: type[cutlass.Numeric]) -> tuple[Any, ...]:
        """Arguments to compile with."""
        batch, queries, head_dim, blocks, page, kv_heads = (cute.sym_int() for _ in range(6))
        stored = stored_type(self.codes or "same", dtype)
        unit = numeric.vector_elements(stored)
        new = [arguments.strided(dtype, batch, queries, kv_heads, head_dim, unit=8) for _ in range(2)]
        caches = [arguments.strided(stored, blocks, page, kv_heads, head_dim, unit=unit) for _ in range(2)]
        scales = [arguments.any_strides(Float32, cute.sym_int()) for _ in range(2)]
        tensors = AppendTensors(*new, *caches, *lengths_and_table(batch), *scales)
        return (*tensors, *parameters.compile_time(AppendScalars), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(AppendTensors._fields))
        tensors, scalars = AppendTensors(*given[:num_tensors]), AppendScalars(*given[num_tensors:-1])
        self.kernel(tensors, scalars).launch(
            grid=[tensors.mNewK.shape[1], tensors.mNewK.shape[0], 1],
            block=[self.threads, 1, 1],
            stream=given[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, tensors: AppendTensors, scalars: AppendScalars):
        mNewK, mNewV, mK, mV, mLengths, mTable, mKScale, mVScale = tensors
        tid, _, _ = cute.arch.thread_idx()
        token, sequence, _ = cute.arch.block_idx()
        heads, head_dim = mNewK.shape[2], mNewK.shape[3]
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        page, offset = slot_of(
            mTable, scalars.has_block_table, sequence, mLengths[sequence], token, mK.shape[0], mK.shape[1]
        )
        if page >= 0:
            for i in cutlass.range(tid, heads * (head_dim // VECTOR), self.threads, unroll=1):
                head, dim = i // (head_dim // VECTOR), i % (head_dim // VECTOR) * VECTOR
                source = (sequence, token, head, dim)
                target = (page, offset, head, dim)
                k_scale = Float32(1.0)
                v_scale = Float32(1.0)
                if scalars.k_scale_heads > 0:
                    k_scale = mKScale[cutlass.select_(scalars.k_scale_heads > 1, head, Int32(0))]
                if scalars.v_scale_heads > 0:
                    v_scale = mVScale[cutlass.select_(scalars.v_scale_heads > 1, head, Int32(0))]
                self.copy(mNewK, mK, source, target, k_scale, scalars.is_bf16)
                self.copy(mNewV, mV, source, target, v_scale, scalars.is_bf16)

    @cute.jit
    def copy(self, mNew, mCache, source, target, scale, is_bf16):
        """Eight elements."""
        words = ptx.load_global(address(mNew, source, 2), 4)
        to = address(mCache, target, 1 if cutlass.const_expr(self.codes) else 2)
        if cutlass.const_expr(self.codes):
            pairs = []
            for word in cutlass.range_constexpr(4):
                low, high = unpack_either(words[word], is_bf16)
                pairs.append(self.round_pair(low / scale, high / scale))
            ptx.store_global(to, [pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)])
        else:
            ptx.store_global(to, words)

    @cute.jit
    def round_pair(self, low: Float32, high: Float32) -> Uint32:
        """Two codes."""
        if cutlass.const_expr(self.by_bits):
            return self.round_by_bits(low) | (self.round_by_bits(high) << 8)
        else:
            return ptx.pack_fp8(low, high, self.codes)

    @cute.jit
    def round_by_bits(self, x: Float32) -> Uint32:
        """To nearest even, saturating. Subnormal codes count units in the last place."""
        mantissa_bits, bias, largest = cutlass.const_expr(FP8_FORMATS[self.codes])
        drop = cutlass.const_expr(23 - mantissa_bits)
        bits = ptx.float_as_int(x)
        magnitude = ptx.int_as_float(bits & 0x7FFFFFFF)
        capped = ptx.float_as_int(ptx.fmin(magnitude, Float32(largest)))
        code = ((capped + ((1 << drop - 1) - 1) + ((capped >> drop) & 1)) >> drop) - ((127 - bias) << mantissa_bits)
        anchor = cutlass.const_expr(2.0 ** (24 - bias - mantissa_bits))  # its last place is that of subnormal codes
        subnormal = ptx.float_as_int(magnitude + anchor) - ptx.float_as_int(Float32(anchor))
        code = cutlass.select_(magnitude < 2.0 ** (1 - bias), subnormal, code)
        code = cutlass.select_((bits & 0x7FFFFFFF) > 0x7F800000, Int32(0x7F), code)
        return Uint32(code | ((bits >> 24) & 0x80))


def lengths_and_table(batch: Any) -> tuple[Any, Any]:
    """mLengths and mTable to compile with."""
    return arguments.any_strides(Int32, batch), arguments.any_strides(Int32, cute.sym_int(), cute.sym_int())


@cute.jit
def slot_of(mTable, has_block_table, sequence, length, token, num_blocks, page_size):
    """Page and offset of a sequence's new key number ``token``; page -1 where there is none."""
    key = Int64(length) + token
    entry = key // page_size
    page = Int32(-1)
    if length >= 0:
        if has_block_table != 0:
            if entry < mTable.shape[1]:
                page = mTable[sequence, Int32(entry)]
        elif entry == 0:
            page = sequence
    page = cutlass.select_(page < num_blocks, page, Int32(-1))
    return page, Int32(key % page_size)


@cute.jit
def unpack_either(pair: Uint32, is_bf16: Int32):
    """Two bf16 or two fp16 as float32."""
    as_bf16, as_f16 = ptx.unpack_f32x2(pair, "bf16"), ptx.unpack_f32x2(pair, "f16")
    return [cutlass.select_(is_bf16 != 0, one, other) for one, other in zip(as_bf16, as_f16, strict=True)]


@cute.jit
def address(mX, at, element_bytes: cutlass.Constexpr) -> Int64:
    """The address of mX[at]; the last dimension is contiguous."""
    offset = Int64(at[-1])
    for i in cutlass.range_constexpr(len(at) - 1):
        offset += Int64(at[i]) * mX.stride[i]
    return mX.iterator.toint() + offset * element_bytes
