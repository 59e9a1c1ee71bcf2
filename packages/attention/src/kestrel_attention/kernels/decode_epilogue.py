"""The epilogue of decode.py: adds the sums of the warps of a split, in order, and stores results or partial results.

Warps store their sums to shared memory, over their pipeline stages. The warps of a split then add them up in units of
32 dims. A block with several splits combines them as combine.py does.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import numeric, ptx

from .constants import BLOCK_ROWS
from .scores import LOG2_E, add_sink
from .tile import WarpTiles


class Rows(NamedTuple):
    """The rows of a block: queries x heads of one KV head of one sequence."""

    sequence: Int32
    kv_head: Int32
    first: Int32
    count: Int32
    group_size: Int32
    inverse_group_size: Float32


class WarpSums(NamedTuple):
    """The sums of each warp, in shared memory."""

    sOut: cute.Tensor  # [warp][tile of 16 dims][row even or odd][lane][2 dims], as the registers lie
    sMax: cute.Tensor
    sSum: cute.Tensor


class Results(NamedTuple):
    """Where results and partial results go, and what applies to results alone."""

    mOut: cute.Tensor
    mLse: cute.Tensor
    mPartialOut: cute.Tensor
    mPartialLse: cute.Tensor
    mVScale: cute.Tensor
    v_scale_heads: Int32
    mSinks: cute.Tensor
    has_sinks: Int32


class DecodeEpilogue:
    """The part of Decode, which declares these fields, that follows the main loop."""

    dtype: type[cutlass.Numeric]
    splits_per_block: int
    tiles: WarpTiles

    @property
    def units_per_warp(self) -> int:
        """Units of 32 dims of the even or of the odd rows that a warp reduces."""
        return -(-self.tiles.head_dim // 16 // self.tiles.warps)

    @cute.jit
    def query_of(self, row: Int32, rows: Rows) -> Int32:
        """The query of a row: row // group_size by the reciprocal, exact for the few rows of a call."""
        return Int32((Float32(row) + 0.5) * rows.inverse_group_size)

    @cute.jit
    def store_warp_sums(self, rOut, rMax, rSum, sums: WarpSums, rows: Rows, warp, lane):
        """Store the sums of a warp to shared memory, over its stages, which are free by then."""
        g, t = lane // 4, lane % 4
        for odd in cutlass.range_constexpr(2):
            total = rSum[odd]
            for distance in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, 4 << distance)
            if g == 0:
                sums.sMax[warp * BLOCK_ROWS + 2 * t + odd] = rMax[odd]
                sums.sSum[warp * BLOCK_ROWS + 2 * t + odd] = total
            self.tiles.dequantise_output(rOut, rSum, odd)
            if self.row_of(2 * t + odd) < rows.count:
                at = Int32(sums.sOut.iterator.toint()) + warp * self.tiles.warp_bytes + odd * 512 + lane * 16
                for pair in cutlass.range_constexpr(self.tiles.head_dim // 32):
                    four = [ptx.float_as_int(rOut[8 * pair + odd + 2 * k]) for k in range(4)]
                    ptx.store_shared(at + pair * 1024, four)

    @cute.jit
    def epilogue(self, sums: WarpSums, num_splits, partial, rows: Rows, results: Results, extra, warp, lane):
        """Add the sums of the warps of a split in order, and store the result or the partial result."""
        sOut, sMax, sSum = sums
        warps = cutlass.const_expr(self.tiles.warps)
        first_warp, warp_in_split = warp // warps * warps, warp % warps
        g, t = lane // 4, lane % 4
        v_scale = Float32(1.0)
        if results.v_scale_heads > 0:
            v_scale = results.mVScale[cutlass.select_(results.v_scale_heads > 1, rows.kv_head, Int32(0))]

        # A unit is 32 dims of the even or of the odd rows, four of each lane; the warps take units in turn.
        odd = warp % 2
        row = 2 * t + odd
        largest = -Float32.inf
        for w in cutlass.range_constexpr(warps):
            largest = ptx.fmax(largest, sMax[(first_warp + w) * BLOCK_ROWS + row])
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        weights = [ptx.exp2_approx(sMax[(first_warp + w) * BLOCK_ROWS + row] - base) for w in range(warps)]
        total = Float32(0.0)
        for w in cutlass.range_constexpr(warps):
            total = ptx.fma(weights[w], sSum[(first_warp + w) * BLOCK_ROWS + row], total)
        factor = cutlass.select_(total == 0.0, Float32(0.0), v_scale / total)
        lse = largest * (1.0 / LOG2_E) + ptx.log2_approx(total) * (1.0 / LOG2_E)
        rOut = cute.make_rmem_tensor(4 * self.units_per_warp, Float32)
        rOut.fill(0.0)
        if self.row_of(row) < rows.count:
            for n in cutlass.range_constexpr(self.units_per_warp):
                pair = (n * warps + warp_in_split) // 2
                if pair < self.tiles.head_dim // 32:
                    at = Int32(sOut.iterator.toint()) + first_warp * self.tiles.warp_bytes
                    at = at + (pair * 2 + odd) * 512 + lane * 16
                    for w in cutlass.range_constexpr(warps):
                        four = ptx.load_shared(at + w * self.tiles.warp_bytes, 4)
                        for k in cutlass.range_constexpr(4):
                            rOut[4 * n + k] = ptx.fma(weights[w], ptx.int_as_float(Int32(four[k])), rOut[4 * n + k])
                    for k in cutlass.range_constexpr(4):
                        rOut[4 * n + k] = rOut[4 * n + k] * factor
        if cutlass.const_expr(self.tiles.folded):
            for k in cutlass.range_constexpr(4 * self.units_per_warp):
                rOut[k] += cute.arch.shuffle_sync_bfly(rOut[k], 2)
        whole = num_splits == 1
        writes = row < rows.count
        if cutlass.const_expr(self.splits_per_block > 1):
            lse = self.combine_splits(rOut, lse, sOut, row, warp, lane)
            whole = first_warp == 0
            writes = writes and whole
        if writes:
            packed_row = rows.first + row
            query = self.query_of(packed_row, rows)
            head = rows.kv_head * rows.group_size + packed_row - query * rows.group_size
            if whole and results.has_sinks != 0:
                share, lse = add_sink(lse, results.mSinks[head])
                for k in cutlass.range_constexpr(4 * self.units_per_warp):
                    rOut[k] = rOut[k] * share
            partial_row = partial * BLOCK_ROWS + row
            if g == 0 and warp_in_split < 2:
                if whole:
                    results.mLse[rows.sequence, head, query] = lse
                else:
                    results.mPartialLse[partial_row] = lse
            mOut = results.mOut
            head_dim = mOut.shape[3]
            out_row = ((Int64(rows.sequence) * mOut.shape[1] + query) * mOut.shape[2] + head) * head_dim
            out_address = mOut.iterator.toint() + 2 * out_row
            partial_address = results.mPartialOut.iterator.toint() + 4 * Int64(partial_row) * head_dim
            parts = cutlass.const_expr(self.tiles.dims_of_pair)
            for n in cutlass.range_constexpr(self.units_per_warp):
                pair = (n * warps + warp_in_split) // 2
                for part in cutlass.range_constexpr(parts):
                    dim = self.tiles.output_dim(pair, part, g)
                    if pair < self.tiles.head_dim // 32 and dim < head_dim:
                        four = [rOut[4 * n + k] for k in range(4)]
                        own = cutlass.const_expr(slice(4 // parts * part, 4 // parts * (part + 1)))
                        if whole:
                            words = cutlass.const_expr(slice(2 // parts * part, 2 // parts * (part + 1)))
                            ptx.store_global(out_address + 2 * dim, self.rounded(four, extra)[words])
                        else:
                            ptx.store_global(partial_address + 4 * dim, [ptx.float_as_int(x) for x in four[own]])

    @cute.jit
    def rounded(self, four, extra):
        """Four elements of the result, as two words."""
        words = []
        for k in cutlass.range_constexpr(2):
            low, high = four[2 * k], four[2 * k + 1]
            if cutlass.const_expr(extra is None):
                words.append(ptx.pack_f32x2(low, high, numeric.ptx_name(self.dtype)))
            else:
                as_bf16, as_f16 = ptx.pack_f32x2(low, high, "bf16"), ptx.pack_f32x2(low, high, "f16")
                words.append(cutlass.select_(extra.is_bf16 != 0, as_bf16, as_f16))
        return words

    @cute.jit
    def combine_splits(self, rOut, lse, sOut, row, warp, lane):
        """Combine the block's splits into rOut of the first, as combine.py does; returns the LSE."""
        warps, units = cutlass.const_expr((self.tiles.warps, self.units_per_warp))
        count = cutlass.const_expr(self.splits_per_block * BLOCK_ROWS)
        sLse = cute.make_tensor(cute.arch.alloc_smem(Float32, count, alignment=16), count)
        at = Int32(sOut.iterator.toint()) + warp * self.tiles.warp_bytes
        at = at + self.tiles.head_dim * BLOCK_ROWS * 4 + lane * 16
        for n in cutlass.range_constexpr(units):
            ptx.store_shared(at + n * 512, [ptx.float_as_int(rOut[4 * n + k]) for k in range(4)])
        if lane // 4 == 0 and warp % warps < 2:
            sLse[warp // warps * BLOCK_ROWS + row] = lse
        cute.arch.sync_threads()
        if warp < warps:
            largest = -Float32.inf
            for s in cutlass.range_constexpr(self.splits_per_block):
                largest = ptx.fmax(largest, sLse[s * BLOCK_ROWS + row])
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            total = Float32(0.0)
            rOut.fill(0.0)
            for s in cutlass.range_constexpr(self.splits_per_block):
                weight = ptx.exp2_approx((sLse[s * BLOCK_ROWS + row] - base) * LOG2_E)
                total += weight
                for n in cutlass.range_constexpr(units):
                    four = ptx.load_shared(at + s * warps * self.tiles.warp_bytes + n * 512, 4)
                    for k in cutlass.range_constexpr(4):
                        rOut[4 * n + k] = ptx.fma(weight, ptx.int_as_float(Int32(four[k])), rOut[4 * n + k])
            factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
            for k in cutlass.range_constexpr(4 * units):
                rOut[k] = ptx.fma(rOut[k], factor, Float32(0.0))
            lse = base + ptx.log2_approx(total) * (1.0 / LOG2_E)
        return lse
