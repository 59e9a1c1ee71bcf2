"""Writes new keys and values into a cache of INT8 or INT4 codes, with their scales: bit for bit what reference.py does.

Launched before decode.py where a call appends. INT8: a warp takes a row, that is one token's key or value of one head.
INT4 after KIVI: a block takes a sequence and KV head. Values are quantised a warp a row. Keys wait in the tail until
their page of 64 is whole; the call that fills it quantises it: each warp holds eight rows, a lane two channels of them,
and the warps' ranges meet in shared memory. A page takes 128 D bytes of tail and new keys and gives 32 D of codes: 8
sequences of 8 heads of 128 that finish a page at once move 1.3 MB, 0.3 us and a launch of 0.55. Measured on one H200
(results/h200_quantised_designs.json): 64 new tokens of 8 heads of 128 take 3.1 us as INT8 and 3.0 as INT4, of which
length, table and row, read one after the other, are most; 8 pages filled at once 6.5 us, an eighth of what bytes allow:
16 true divisions a thread, twice. A sequence fills a page with every 64th token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import pdl, ptx

from .append import VECTOR, address, slot_of, unpack_either

PAGE = 64
WARPS = 8
LARGEST = 7.5 * 65504  # what the largest scale of INT4 spans to each side


class Int8Call(NamedTuple):
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
    bf16: Int32


class Int4Call(NamedTuple):
    """The same; scales and zeros of keys are per channel of a page, those of values per token."""

    mNewK: cute.Tensor
    mNewV: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mLengths: cute.Tensor
    mTable: cute.Tensor
    mKScale: cute.Tensor
    mKZero: cute.Tensor
    mVScale: cute.Tensor
    mVZero: cute.Tensor
    mTail: cute.Tensor
    mSequences: cute.Tensor
    paged: Int32
    bf16: Int32


@dataclass(frozen=True)
class AppendInt8:
    """Heads of up to 256 dims, a multiple of 8."""

    dependent_launch: bool

    @cute.jit
    def __call__(self, *given):
        """Given: a call's fields, and the stream."""
        call = Int8Call(*given[:-1])
        self.kernel(call).launch(
            grid=[call.mNewK.shape[1], call.mNewK.shape[0], 1],
            block=[32 * WARPS, 1, 1],
            stream=given[-1],
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, call: Int8Call):
        tid, _, _ = cute.arch.thread_idx()
        token, sequence, _ = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        blocks, size = call.mK.shape[0], call.mK.shape[1]
        if cutlass.const_expr(self.dependent_launch):
            pdl.wait()
            pdl.trigger()
        page, offset = slot_of(call.mTable, call.paged, sequence, call.mLengths[sequence], token, blocks, size)
        if page >= 0:
            for head in cutlass.range(warp, call.mNewK.shape[2], WARPS, unroll=1):
                source, target = (sequence, token, head), (page, offset, head)
                self.write(call.mNewK, call.mK, call.mKScale, source, target, call.bf16, lane)
                self.write(call.mNewV, call.mV, call.mVScale, source, target, call.bf16, lane)

    @cute.jit
    def write(self, mNew, mCache, mScale, source, target, bf16, lane):
        """A row. Sizes are compared as integers: a NaN is larger than any number, and inf does not count."""
        there = lane * VECTOR < mNew.shape[3]
        at = cutlass.select_(there, lane * VECTOR, Int32(0))  # lanes past the row read its start, which it has anyway
        values = load_row(mNew, (*source, at), bf16)
        largest = Int32(0)
        for i in cutlass.range_constexpr(VECTOR):
            size = ptx.float_as_int(values[i]) & 0x7FFFFFFF
            largest = cutlass.max(largest, cutlass.select_(size == 0x7F800000, Int32(0), size))
        for distance in cutlass.range_constexpr(5):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1 << distance))
        scale = cutlass.select_(largest == 0, Float32(1.0), ptx.int_as_float(largest) / Float32(127.0))
        codes = [Uint32(0)] * 2
        for i in cutlass.range_constexpr(VECTOR):
            code = cutlass.max(cutlass.min(ptx.float_to_int_rn(values[i] / scale), 127), -127)
            codes[i // 4] |= Uint32(code & 0xFF) << (8 * (i % 4))
        if there:
            ptx.store_global(address(mCache, (*target, lane * VECTOR), 1), codes)
        if lane == 0:
            ptx.store_global(address(mScale, target, 4), [Uint32(ptx.float_as_int(scale))])


@dataclass(frozen=True)
class AppendInt4:
    """Heads of up to 256 dims, a multiple of 64; up to 64 new tokens."""

    dependent_launch: bool

    @cute.jit
    def __call__(self, *given):
        """Given: a call's fields, and the stream."""
        call = Int4Call(*given[:-1])
        self.kernel(call).launch(
            grid=[call.mNewK.shape[2], call.mNewK.shape[0], 1],
            block=[32 * WARPS, 1, 1],
            stream=given[-1],
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, call: Int4Call):
        tid, _, _ = cute.arch.thread_idx()
        head, sequence, _ = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        tokens, size = call.mNewK.shape[1], call.mNewK.shape[3]
        sLow, sHigh = [
            cute.make_tensor(cute.arch.alloc_smem(Float32, 64 * WARPS, alignment=16), 64 * WARPS) for _ in range(2)
        ]
        if cutlass.const_expr(self.dependent_launch):
            pdl.wait()
            pdl.trigger()
        row = call.mSequences[sequence]
        length = call.mLengths[sequence]
        known = row >= 0 and row < call.mTail.shape[0]
        length = cutlass.select_(known, length, Int32(-1))
        for token in cutlass.range(warp, tokens, WARPS, unroll=1):
            page, offset = self.slot(call, sequence, length, token)
            if page >= 0:
                self.write_value(call, (sequence, token, head), (page, offset, head), lane)

        # The page that the sequence stands in, if its last row is among the new ones.
        held = length % PAGE
        whole, _ = self.slot(call, sequence, length, PAGE - 1 - held)
        if length < 0 or held + tokens < PAGE:
            whole = Int32(-1)
        if whole >= 0:
            for first in cutlass.range(0, size, 64, unroll=1):
                self.write_page(call, (sequence, head, row, held), whole, first, sLow, sHigh, warp, lane)
        cute.arch.sync_threads()  # the tail was read
        for token in cutlass.range(warp, tokens, WARPS, unroll=1):
            page, offset = self.slot(call, sequence, length, token)
            if page >= 0 and (whole < 0 or held + token >= PAGE) and lane * VECTOR < size:
                words = ptx.load_global(address(call.mNewK, (sequence, token, head, lane * VECTOR), 2), 4)
                ptx.store_global(address(call.mTail, (row, offset, head, lane * VECTOR), 2), words)

    @cute.jit
    def slot(self, call: Int4Call, sequence, length, token):
        return slot_of(call.mTable, call.paged, sequence, length, token, call.mK.shape[0], PAGE)

    @cute.jit
    def write_value(self, call: Int4Call, source, target, lane):
        """A row of values: one scale and zero."""
        there = lane * VECTOR < call.mNewV.shape[3]
        at = cutlass.select_(there, lane * VECTOR, Int32(0))
        values = [clamp(x) for x in load_row(call.mNewV, (*source, at), call.bf16)]
        low, high = values[0], values[0]
        for i in cutlass.range_constexpr(1, VECTOR):
            low, high = ptx.fmin_nan(low, values[i]), ptx.fmax_nan(high, values[i])
        for distance in cutlass.range_constexpr(5):
            low = ptx.fmin_nan(low, cute.arch.shuffle_sync_bfly(low, 1 << distance))
            high = ptx.fmax_nan(high, cute.arch.shuffle_sync_bfly(high, 1 << distance))
        pair, scale, zero = code_of(low, high)
        codes = Uint32(0)
        for i in cutlass.range_constexpr(VECTOR):
            codes |= encode(values[i], scale, zero) << (4 * i)
        if there:
            ptx.store_global(address(call.mV, (*target, lane * (VECTOR // 2)), 1), [codes])
        if lane == 0:
            ptx.store_global_b16(address(call.mVScale, target, 2), pair)
            ptx.store_global_b16(address(call.mVZero, target, 2), pair >> 16)

    @cute.jit
    def write_page(self, call: Int4Call, place, page, first, sLow, sHigh, warp, lane):
        """64 channels of a page of keys: rows below ``held`` from the tail, the others new."""
        sequence, head, tail_row, held = place
        channel = first + 2 * lane
        values = []
        for i in cutlass.range_constexpr(WARPS):
            row = warp * WARPS + i
            from_tail = address(call.mTail, (tail_row, row, head, channel), 2)
            from_new = address(call.mNewK, (sequence, cutlass.max(row - held, 0), head, channel), 2)
            word = ptx.load_global(cutlass.select_(row < held, from_tail, from_new), 1)[0]
            values.append([clamp(x) for x in unpack_either(word, call.bf16)])
        for k in cutlass.range_constexpr(2):
            low, high = values[0][k], values[0][k]
            for i in cutlass.range_constexpr(1, WARPS):
                low, high = ptx.fmin_nan(low, values[i][k]), ptx.fmax_nan(high, values[i][k])
            sLow[warp * 64 + 2 * lane + k] = low
            sHigh[warp * 64 + 2 * lane + k] = high
        cute.arch.sync_threads()
        found = []
        for k in cutlass.range_constexpr(2):
            low, high = sLow[2 * lane + k], sHigh[2 * lane + k]
            for i in cutlass.range_constexpr(1, WARPS):
                low = ptx.fmin_nan(low, sLow[i * 64 + 2 * lane + k])
                high = ptx.fmax_nan(high, sHigh[i * 64 + 2 * lane + k])
            found.append(code_of(low, high))
        cute.arch.sync_threads()
        if warp == 0:
            for i, mX in enumerate((call.mKScale, call.mKZero)):
                pair = ptx.prmt(found[0][0], found[1][0], (0x5410, 0x7632)[i])
                ptx.store_global(address(mX, (page, head, channel), 2), [pair])
        for i in cutlass.range_constexpr(WARPS):
            codes = [encode(values[i][k], found[k][1], found[k][2]) for k in range(2)]
            to = address(call.mK, (page, warp * WARPS + i, head, channel // 2), 1)
            ptx.store_global_b8(to, codes[0] | codes[1] << 4)


@cute.jit
def load_row(mNew, at, bf16):
    """A lane's eight elements of a row as float32."""
    words = ptx.load_global(address(mNew, at, 2), 4)
    return [x for word in words for x in unpack_either(word, bf16)]


@cute.jit
def clamp(x: Float32) -> Float32:
    return ptx.fmin_nan(ptx.fmax_nan(x, Float32(-LARGEST)), Float32(LARGEST))


@cute.jit
def code_of(low: Float32, high: Float32):
    """Scale and zero of a range as a pair of f16, and each as float32."""
    by_range = (high - low) / Float32(15.0)
    by_zero = ptx.fmax(*(ptx.int_as_float(ptx.float_as_int(x) & 0x7FFFFFFF) for x in (low, high))) * 2.0**-15
    rounded, _ = ptx.unpack_f32x2(ptx.pack_f32x2(ptx.fmax(by_range, by_zero), Float32(0.0), "f16"), "f16")
    scale = cutlass.select_(rounded == 0.0, Float32(1.0), rounded)
    pair = ptx.pack_f32x2(scale, (0.0 - low) / scale, "f16")
    _, zero = ptx.unpack_f32x2(pair, "f16")
    return pair, scale, zero


@cute.jit
def encode(x: Float32, scale: Float32, zero: Float32) -> Uint32:
    return Uint32(cutlass.max(cutlass.min(ptx.float_to_int_rn(x / scale + zero), 15), 0))
