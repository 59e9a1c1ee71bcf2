"""Appends new keys and values to a cache of INT8 or INT4 codes, with their scales, bit for bit as reference.py does.

Launched before decode.py where a call appends. INT8: a warp quantises the key or the value of one token and head.
INT4 after KIVI: a block takes a sequence and KV head; a warp quantises a row of values. Keys are kept in the tail until
their page of 64 is complete, and the call that fills a page quantises it: each warp holds eight rows, a lane two
channels of them, and the ranges of the warps are reduced in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import arguments, parameters, pdl, ptx

from .append import VECTOR, address, lengths_and_table, slot_of, unpack_either
from .constants import INT4_PAGE
from .decode import int4_tensors
from .parameters import AppendInt4Tensors, AppendIntegerScalars, AppendTensors

WARPS = 8
LARGEST = 7.5 * 65504  # to which values saturate: the largest scale in fp16 spans so much to each side
CHANNELS = 64  # of a page that a block quantises at once


class AppendIntegers:
    """What the two formats share: one launch, with a grid and a number of tensors of their own."""

    pdl: bool
    tensors: type

    def grid(self, mNewK) -> list[Any]:
        raise NotImplementedError

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(self.tensors._fields))
        tensors, scalars = self.tensors(*given[:num_tensors]), AppendIntegerScalars(*given[num_tensors:-1])
        self.kernel(tensors, scalars).launch(
            grid=self.grid(tensors.mNewK), block=[32 * WARPS, 1, 1], stream=given[-1], use_pdl=self.pdl
        )

    def compile_with(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*tensors, *parameters.compile_time(AppendIntegerScalars), arguments.torch_stream())

    def lane_and_warp(self):
        tid, _, _ = cute.arch.thread_idx()
        return tid % 32, cute.arch.make_warp_uniform(tid // 32)

    def wait_and_trigger(self):
        if self.pdl:
            pdl.wait()
            pdl.trigger()


@dataclass(frozen=True)
class AppendInt8(AppendIntegers):
    """Heads of up to 256 dims, a multiple of 8."""

    pdl: bool

    tensors = AppendTensors

    def arguments(self, dtype: type[cutlass.Numeric]) -> tuple[Any, ...]:
        """Arguments to compile with."""
        batch, queries, head_dim, blocks, page, kv_heads = (cute.sym_int() for _ in range(6))
        new = [arguments.strided(dtype, batch, queries, kv_heads, head_dim, unit=8) for _ in range(2)]
        caches = [arguments.strided(cutlass.Int8, blocks, page, kv_heads, head_dim, unit=16) for _ in range(2)]
        scales = [arguments.any_strides(Float32, blocks, page, kv_heads) for _ in range(2)]
        return self.compile_with(AppendTensors(*new, *caches, *lengths_and_table(batch), *scales))

    def grid(self, mNewK) -> list[Any]:
        """A block for each token of each sequence."""
        return [mNewK.shape[1], mNewK.shape[0], 1]

    @cute.kernel
    def kernel(self, tensors: AppendTensors, scalars: AppendIntegerScalars):
        lane, warp = self.lane_and_warp()
        token, sequence, _ = cute.arch.block_idx()
        self.wait_and_trigger()
        page, offset = slot_of(
            tensors.mTable,
            scalars.has_block_table,
            sequence,
            tensors.mLengths[sequence],
            token,
            tensors.mK.shape[0],
            tensors.mK.shape[1],
        )
        if page >= 0:
            for head in cutlass.range(warp, tensors.mNewK.shape[2], WARPS, unroll=1):
                source, target = (sequence, token, head), (page, offset, head)
                self.write(tensors.mNewK, tensors.mK, tensors.mKScale, source, target, scalars.is_bf16, lane)
                self.write(tensors.mNewV, tensors.mV, tensors.mVScale, source, target, scalars.is_bf16, lane)

    @cute.jit
    def write(self, mNew, mCache, mScale, source, target, is_bf16, lane):
        """One row. Magnitudes are compared as integers: a NaN exceeds any number, and inf counts as 0."""
        inside, values = load_row(mNew, source, is_bf16, lane)
        largest = Int32(0)
        for i in cutlass.range_constexpr(VECTOR):
            magnitude = ptx.float_as_int(values[i]) & 0x7FFFFFFF
            largest = cutlass.max(largest, cutlass.select_(magnitude == 0x7F800000, Int32(0), magnitude))
        largest = reduce_warp(largest, cutlass.max)
        scale = cutlass.select_(largest == 0, Float32(1.0), ptx.int_as_float(largest) / Float32(127.0))
        codes = [Uint32(0)] * 2
        for i in cutlass.range_constexpr(VECTOR):
            code = cutlass.max(cutlass.min(ptx.float_to_int_rn(values[i] / scale), 127), -127)
            codes[i // 4] |= Uint32(code & 0xFF) << (8 * (i % 4))
        if inside:
            ptx.store_global(address(mCache, (*target, lane * VECTOR), 1), codes)
        if lane == 0:
            ptx.store_global(address(mScale, target, 4), [Uint32(ptx.float_as_int(scale))])


@dataclass(frozen=True)
class AppendInt4(AppendIntegers):
    """Heads of up to 256 dims, a multiple of 64; up to 64 new tokens."""

    pdl: bool

    tensors = AppendInt4Tensors

    def arguments(self, dtype: type[cutlass.Numeric]) -> tuple[Any, ...]:
        """Arguments to compile with."""
        batch, queries, head_dim, blocks, page, kv_heads = (cute.sym_int() for _ in range(6))
        new = [arguments.strided(dtype, batch, queries, kv_heads, head_dim, unit=8) for _ in range(2)]
        width = cute.sym_int()
        caches = [arguments.strided(cutlass.Uint8, blocks, page, kv_heads, width, unit=16) for _ in range(2)]
        mLengths, mTable = lengths_and_table(batch)
        scales = {
            name.replace("Key", "K").replace("Value", "V"): tensor
            for name, tensor in int4_tensors(dtype, batch, blocks, page, kv_heads, head_dim).items()
        }
        return self.compile_with(AppendInt4Tensors(*new, *caches, mLengths=mLengths, mTable=mTable, **scales))

    def grid(self, mNewK) -> list[Any]:
        """A block for each KV head of each sequence."""
        return [mNewK.shape[2], mNewK.shape[0], 1]

    @cute.kernel
    def kernel(self, tensors: AppendInt4Tensors, scalars: AppendIntegerScalars):
        lane, warp = self.lane_and_warp()
        head, sequence, _ = cute.arch.block_idx()
        tokens, head_dim = tensors.mNewK.shape[1], tensors.mNewK.shape[3]
        words = cutlass.const_expr(CHANNELS * WARPS)
        sLow, sHigh = [cute.make_tensor(cute.arch.alloc_smem(Float32, words, alignment=16), words) for _ in range(2)]
        self.wait_and_trigger()
        tail_row = tensors.mSequences[sequence]
        length = tensors.mLengths[sequence]
        known = tail_row >= 0 and tail_row < tensors.mTail.shape[0]
        length = cutlass.select_(known, length, Int32(-1))
        for token in cutlass.range(warp, tokens, WARPS, unroll=1):
            page, offset = self.slot(tensors, scalars, sequence, length, token)
            if page >= 0:
                self.write_value(tensors, scalars, (sequence, token, head), (page, offset, head), lane)

        # The page that the sequence ends in, if its last row is among the new ones.
        held = length % INT4_PAGE
        complete, _ = self.slot(tensors, scalars, sequence, length, INT4_PAGE - 1 - held)
        if length < 0 or held + tokens < INT4_PAGE:
            complete = Int32(-1)
        if complete >= 0:
            for first in cutlass.range(0, head_dim, CHANNELS, unroll=1):
                rows = (sequence, head, tail_row, held)
                self.write_page(tensors, scalars, rows, complete, first, sLow, sHigh, warp, lane)
        cute.arch.sync_threads()  # the tail has been read
        for token in cutlass.range(warp, tokens, WARPS, unroll=1):
            page, offset = self.slot(tensors, scalars, sequence, length, token)
            if page >= 0 and (complete < 0 or held + token >= INT4_PAGE) and lane * VECTOR < head_dim:
                row = ptx.load_global(address(tensors.mNewK, (sequence, token, head, lane * VECTOR), 2), 4)
                ptx.store_global(address(tensors.mTail, (tail_row, offset, head, lane * VECTOR), 2), row)

    @cute.jit
    def slot(self, tensors: AppendInt4Tensors, scalars: AppendIntegerScalars, sequence, length, token):
        num_blocks = tensors.mK.shape[0]
        return slot_of(tensors.mTable, scalars.has_block_table, sequence, length, token, num_blocks, INT4_PAGE)

    @cute.jit
    def write_value(self, tensors: AppendInt4Tensors, scalars: AppendIntegerScalars, source, target, lane):
        """One row of values: one scale and zero."""
        inside, row = load_row(tensors.mNewV, source, scalars.is_bf16, lane)
        values = [clamp(x) for x in row]
        low, high = range_of(values)
        low, high = reduce_warp(low, ptx.fmin_nan), reduce_warp(high, ptx.fmax_nan)
        pair, scale, zero = scale_and_zero(low, high)
        codes = Uint32(0)
        for i in cutlass.range_constexpr(VECTOR):
            codes |= encode(values[i], scale, zero) << (4 * i)
        if inside:
            ptx.store_global(address(tensors.mV, (*target, lane * (VECTOR // 2)), 1), [codes])
        if lane == 0:
            ptx.store_global_b16(address(tensors.mVScale, target, 2), pair)
            ptx.store_global_b16(address(tensors.mVZero, target, 2), pair >> 16)

    @cute.jit
    def write_page(
        self, tensors: AppendInt4Tensors, scalars: AppendIntegerScalars, rows, page, first, sLow, sHigh, warp, lane
    ):
        """CHANNELS channels of a page of keys: rows below ``held`` from the tail, the others new."""
        sequence, head, tail_row, held = rows
        channel = first + 2 * lane
        values = []
        for i in cutlass.range_constexpr(WARPS):
            row = warp * WARPS + i
            from_tail = address(tensors.mTail, (tail_row, row, head, channel), 2)
            from_new = address(tensors.mNewK, (sequence, cutlass.max(row - held, 0), head, channel), 2)
            word = ptx.load_global(cutlass.select_(row < held, from_tail, from_new), 1)[0]
            values.append([clamp(x) for x in unpack_either(word, scalars.is_bf16)])
        for k in cutlass.range_constexpr(2):
            low, high = range_of([pair[k] for pair in values])
            sLow[warp * CHANNELS + 2 * lane + k] = low
            sHigh[warp * CHANNELS + 2 * lane + k] = high
        cute.arch.sync_threads()
        found = []
        for k in cutlass.range_constexpr(2):
            low, high = sLow[2 * lane + k], sHigh[2 * lane + k]
            for i in cutlass.range_constexpr(1, WARPS):
                low = ptx.fmin_nan(low, sLow[i * CHANNELS + 2 * lane + k])
                high = ptx.fmax_nan(high, sHigh[i * CHANNELS + 2 * lane + k])
            found.append(scale_and_zero(low, high))
        cute.arch.sync_threads()
        if warp == 0:
            for i, mX in enumerate((tensors.mKScale, tensors.mKZero)):
                pair = ptx.prmt(found[0][0], found[1][0], (0x5410, 0x7632)[i])
                ptx.store_global(address(mX, (page, head, channel), 2), [pair])
        for i in cutlass.range_constexpr(WARPS):
            codes = [encode(values[i][k], found[k][1], found[k][2]) for k in range(2)]
            to = address(tensors.mK, (page, warp * WARPS + i, head, channel // 2), 1)
            ptx.store_global_b8(to, codes[0] | codes[1] << 4)


@cute.jit
def load_row(mNew, source, is_bf16, lane):
    """Whether a lane has a part of a row, and its eight elements as float32; lanes past the row load its start."""
    inside = lane * VECTOR < mNew.shape[3]
    at = cutlass.select_(inside, lane * VECTOR, Int32(0))
    words = ptx.load_global(address(mNew, (*source, at), 2), 4)
    return inside, [x for word in words for x in unpack_either(word, is_bf16)]


def range_of(values: list[Float32]) -> tuple[Float32, Float32]:
    """The smallest and the largest; NaN if one of them is NaN."""
    low, high = values[0], values[0]
    for x in values[1:]:
        low, high = ptx.fmin_nan(low, x), ptx.fmax_nan(high, x)
    return low, high


def reduce_warp(x: Any, operation: Callable[[Any, Any], Any]) -> Any:
    """A reduction over the lanes of a warp."""
    for distance in range(5):
        x = operation(x, cute.arch.shuffle_sync_bfly(x, 1 << distance))
    return x


@cute.jit
def clamp(x: Float32) -> Float32:
    return ptx.fmin_nan(ptx.fmax_nan(x, Float32(-LARGEST)), Float32(LARGEST))


@cute.jit
def scale_and_zero(low: Float32, high: Float32):
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
