"""Writes new keys and values into their slots of a cache: as they are, or as FP8 codes of x / scale, saturating.

Launched before decode.py where a call appends. A block takes one new token, a thread eight elements at a time: a token
of Hk heads of D dims is 4 Hk D elements moved, nothing next to the launch: 64 tokens of 8 heads of 128 in bf16 are 0.5
MB, 0.1 us and a launch of 0.55. Measured on one H200: 2.1 us, 2.7 as FP8 (results/h200_quantised_designs.json), a third
and a quarter of that: length, table and row are read one after the other. bf16 and f16 rows keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import pdl, ptx

VECTOR = 8  # elements


class Call(NamedTuple):
    """What a launch is given, in the entry point's order."""

    mNewK: cute.Tensor
    mNewV: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mLengths: cute.Tensor
    mTable: cute.Tensor
    mKScale: cute.Tensor
    mVScale: cute.Tensor
    paged: Int32
    k_scale_heads: Int32
    v_scale_heads: Int32
    bf16: Int32  # 1: new rows are bf16; 0: fp16


class Format(NamedTuple):
    """Of codes of eight bits."""

    name: str
    mantissa: int  # bits
    bias: int
    largest: float


FORMATS = {"e4m3": Format("e4m3", 3, 7, 448.0), "e5m2": Format("e5m2", 2, 15, 57344.0)}


@dataclass(frozen=True)
class Append:
    """One compiled variant, for bf16 and fp16."""

    codes: str  # what the caches hold: "" for the dtype itself, "e4m3", "e5m2"
    threads: int
    dependent_launch: bool
    bit_trick: bool  # round to codes without the instruction, which sm_80 and sm_86 lack

    @cute.jit
    def __call__(self, *given):
        """Given: a Call's fields, and the stream."""
        call = Call(*given[:-1])
        self.kernel(call).launch(
            grid=[call.mNewK.shape[1], call.mNewK.shape[0], 1],
            block=[self.threads, 1, 1],
            stream=given[-1],
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, call: Call):
        mNewK, mNewV, mK, mV, mLengths, mTable, mKScale, mVScale = call[:8]
        paged, k_scale_heads, v_scale_heads, bf16 = call[8:]
        tid, _, _ = cute.arch.thread_idx()
        token, sequence, _ = cute.arch.block_idx()
        heads, size = mNewK.shape[2], mNewK.shape[3]
        if cutlass.const_expr(self.dependent_launch):
            pdl.wait()
            pdl.trigger()
        page, offset = slot_of(mTable, paged, sequence, mLengths[sequence], token, mK.shape[0], mK.shape[1])
        if page >= 0:
            for i in cutlass.range(tid, heads * (size // VECTOR), self.threads, unroll=1):
                head, dim = i // (size // VECTOR), i % (size // VECTOR) * VECTOR
                source = (sequence, token, head, dim)
                target = (page, offset, head, dim)
                k_scale = Float32(1.0)
                v_scale = Float32(1.0)
                if k_scale_heads > 0:
                    k_scale = mKScale[cutlass.select_(k_scale_heads > 1, head, Int32(0))]
                if v_scale_heads > 0:
                    v_scale = mVScale[cutlass.select_(v_scale_heads > 1, head, Int32(0))]
                self.copy(mNewK, mK, source, target, k_scale, bf16)
                self.copy(mNewV, mV, source, target, v_scale, bf16)

    @cute.jit
    def copy(self, mNew, mCache, source, target, scale, bf16):
        """Eight elements."""
        words = ptx.load_global(address(mNew, source, 2), 4)
        to = address(mCache, target, 1 if cutlass.const_expr(self.codes) else 2)
        if cutlass.const_expr(self.codes):
            pairs = []
            for word in cutlass.range_constexpr(4):
                low, high = unpack_either(words[word], bf16)
                pairs.append(self.round(low / scale, high / scale))
            ptx.store_global(to, [pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)])
        else:
            ptx.store_global(to, words)

    @cute.jit
    def round(self, low: Float32, high: Float32) -> Uint32:
        """Two codes."""
        if cutlass.const_expr(self.bit_trick):
            return self.round_one(low) | (self.round_one(high) << 8)
        else:
            return ptx.pack_fp8(low, high, self.codes)

    @cute.jit
    def round_one(self, x: Float32) -> Uint32:
        """To nearest even, saturating. Below the smallest normal number codes count its last place."""
        _, mantissa, bias, largest = cutlass.const_expr(FORMATS[self.codes])
        drop = cutlass.const_expr(23 - mantissa)
        bits = ptx.float_as_int(x)
        size = ptx.int_as_float(bits & 0x7FFFFFFF)
        most = ptx.float_as_int(ptx.fmin(size, Float32(largest)))
        code = ((most + ((1 << drop - 1) - 1) + ((most >> drop) & 1)) >> drop) - ((127 - bias) << mantissa)
        count_from = cutlass.const_expr(2.0 ** (24 - bias - mantissa))  # whose last place is that of small codes
        small = ptx.float_as_int(size + count_from) - ptx.float_as_int(Float32(count_from))
        code = cutlass.select_(size < 2.0 ** (1 - bias), small, code)
        code = cutlass.select_((bits & 0x7FFFFFFF) > 0x7F800000, Int32(0x7F), code)
        return Uint32(code | ((bits >> 24) & 0x80))


@cute.jit
def slot_of(mTable, paged, sequence, length, token, blocks, size):
    """Page and offset of the new key so many after the sequence's last; page -1 where there is none."""
    key = Int64(length) + token
    entry = key // size
    page = Int32(-1)
    if length >= 0:
        if paged != 0:
            if entry < mTable.shape[1]:
                page = mTable[sequence, Int32(entry)]
        elif entry == 0:
            page = sequence
    page = cutlass.select_(page < blocks, page, Int32(-1))
    return page, Int32(key % size)


@cute.jit
def unpack_either(pair: Uint32, bf16: Int32):
    """Two bf16 or two fp16 as float32."""
    as_bf16, as_f16 = ptx.unpack_f32x2(pair, "bf16"), ptx.unpack_f32x2(pair, "f16")
    return [cutlass.select_(bf16 != 0, one, other) for one, other in zip(as_bf16, as_f16, strict=True)]


@cute.jit
def address(mX, at, element: cutlass.Constexpr) -> Int64:
    """Of mX[at], the last dimension being contiguous; elements of so many bytes."""
    offset = Int64(at[-1])
    for i in cutlass.range_constexpr(len(at) - 1):
        offset += Int64(at[i]) * mX.stride[i]
    return mX.iterator.toint() + offset * element
