"""Writes new keys and values into their slots of a cache, as they are or as e4m3: code = x / scale, saturating.

Launched before decode.py where a call appends. A block takes one new token, a thread eight elements at a time: a token
of Hk heads of D dims is 4 Hk D elements moved, nothing next to the launch: 64 tokens of 8 heads of 128 in bf16 are 0.5
MB, 0.1 us. bf16 and f16 rows keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import ptx

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


@dataclass(frozen=True)
class Append:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    codes: str  # what the caches hold: "" for the dtype itself, "e4m3"
    threads: int
    dependent_launch: bool
    bit_trick: bool  # round to e4m3 without the instruction, which sm_80 and sm_86 lack

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
        paged, k_scale_heads, v_scale_heads = call[8:]
        tid, _, _ = cute.arch.thread_idx()
        token, sequence, _ = cute.arch.block_idx()
        heads, size = mNewK.shape[2], mNewK.shape[3]
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        length = mLengths[sequence]
        key = Int64(length) + token
        entry = key // mK.shape[1]
        offset = key % mK.shape[1]
        page = Int32(-1)
        if length >= 0:
            if paged != 0:
                if entry < mTable.shape[1]:
                    page = mTable[sequence, Int32(entry)]
            elif entry == 0:
                page = sequence
        if page >= 0 and page < mK.shape[0]:
            for i in cutlass.range(tid, heads * (size // VECTOR), self.threads, unroll=1):
                head, dim = i // (size // VECTOR), i % (size // VECTOR) * VECTOR
                source = (sequence, token, head, dim)
                target = (page, Int32(offset), head, dim)
                k_scale = Float32(1.0)
                v_scale = Float32(1.0)
                if k_scale_heads > 0:
                    k_scale = mKScale[cutlass.select_(k_scale_heads > 1, head, Int32(0))]
                if v_scale_heads > 0:
                    v_scale = mVScale[cutlass.select_(v_scale_heads > 1, head, Int32(0))]
                self.copy(mNewK, mK, source, target, k_scale)
                self.copy(mNewV, mV, source, target, v_scale)

    @cute.jit
    def copy(self, mNew, mCache, source, target, scale):
        """Eight elements."""
        words = ptx.load_words(self.address(mNew, source, 2), 4)
        to = self.address(mCache, target, 1 if cutlass.const_expr(self.codes) else 2)
        if cutlass.const_expr(self.codes):
            kind = cutlass.const_expr("bf16" if self.dtype is cutlass.BFloat16 else "f16")
            pairs = []
            for word in cutlass.range_constexpr(4):
                low, high = ptx.unpack_pair(words[word], kind)
                pairs.append(self.round(low / scale, high / scale))
            ptx.store_words(to, [pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)])
        else:
            ptx.store_words(to, words)

    @cute.jit
    def round(self, low: Float32, high: Float32) -> Uint32:
        """Two e4m3 codes."""
        if cutlass.const_expr(self.bit_trick):
            return self.round_one(low) | (self.round_one(high) << 8)
        else:
            return ptx.pack_e4m3(low, high)

    @cute.jit
    def round_one(self, x: Float32) -> Uint32:
        """To nearest even, saturating. Below 2^-6 codes count 2^-9, the last place of a number near 2^14."""
        bits = ptx.bits_of(x)
        size = ptx.float_of(bits & 0x7FFFFFFF)
        most = ptx.bits_of(ptx.minimum(size, Float32(448.0)))
        code = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - (120 << 3)
        small = ptx.bits_of(size + 16384.0) - ptx.bits_of(Float32(16384.0))
        code = cutlass.select_(size < 2.0**-6, small, code)
        code = cutlass.select_((bits & 0x7FFFFFFF) > 0x7F800000, Int32(0x7F), code)
        return Uint32(code | ((bits >> 24) & 0x80))

    @cute.jit
    def address(self, mX, at, element: cutlass.Constexpr) -> Int64:
        offset = Int64(0)
        for i in cutlass.range_constexpr(3):
            offset += Int64(at[i]) * mX.stride[i]
        return mX.iterator.toint() + (offset + at[3]) * element
