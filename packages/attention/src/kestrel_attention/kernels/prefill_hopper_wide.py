"""Attention of many queries for heads of more than 256 dims on Hopper: both consumer warpgroups have the same queries.

Each computes the scores and weights of every second tile of keys, and the products of all weights with its half of the
dims of values. Weights and the bases that they are relative to go through shared memory. So one warpgroup computes
weights while the scores of the next tile are multiplied for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import hopper, ptx

from .constants import WARPGROUP_ROWS
from .prefill_base import once_if
from .prefill_hopper_wide_producer import PARTS, TURNS, WideProducer
from .prefill_types import Pipe, Sums, Visible, Work

HALVES = 2  # of the dims of values, a consumer warpgroup each
SHARED_BARRIER = 1  # a named barrier of all consumers
WEIGHTS_BARRIER = 2  # the first of the named barriers for weights, one for each warpgroup that computes them
OWN_BARRIER = 4  # the first of those of a warpgroup
STATISTICS_BYTES = 4 * WARPGROUP_ROWS  # a float of each row


@dataclass(frozen=True)
class PrefillHopperWide(WideProducer):
    """One compiled variant."""

    @property
    def output_dims(self) -> int:
        return self.head_dim // HALVES

    @property
    def skips(self) -> bool:
        return False

    @property
    def key_readers(self) -> int:
        return 1

    @property
    def weight_bytes(self) -> int:
        """Of the weights of a tile: rows of 128 bytes."""
        return WARPGROUP_ROWS * 2 * self.key_tile

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + HALVES * (self.weight_bytes + 2 * STATISTICS_BYTES)

    def first_dim(self):
        """Of the warp's half of the results."""
        return (cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1) * self.output_dims

    @cute.jit
    def consume(self, tensors, scalars, pipe: Pipe, warpgroup, *_):
        """Both warpgroups have the rows of the first."""
        WideProducer.consume(self, tensors, scalars, pipe, Int32(0))

    @cute.jit
    def flip_signs(self, sQ: Int32, signs, warpgroup):
        thread = cute.arch.thread_idx()[0] - 128
        for _ in cutlass.range(once_if(signs != 0), unroll=1):
            for i in cutlass.range_constexpr(self.query_bytes // (16 * 256)):
                to = sQ + 16 * (thread + 256 * i)
                ptx.store_shared(to, self.signed(ptx.load_shared(to, 4), signs))
            hopper.fence_proxy_async()
            hopper.named_barrier(Int32(SHARED_BARRIER), 256)

    @cute.jit
    def main_loop(self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, lane):
        """Add the tiles of a work item to sums. n: the warpgroup's last tile whose scores have been started."""
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rFactor = cute.make_rmem_tensor(2, Float32)
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) - 4
        half = warp // 4
        row = 16 * (warp % 4) + lane // 4
        n = half
        if n < work.num_tiles:
            self.start_scores_of(pipe, sQ, used + n, rScore)
            tile = self.tile_at(work, n)
            hidden, rare = self.changes_of(pipe, scalars, visible, tile, used + n, lane)
            self.finish_scores(pipe, rScore, 0, lane)
            if n > 0:
                self.add_others(pipe, sums, rFactor, scale, used, half, row)
                self.finish_output(pipe, sums, 0, lane)
            self.change_tile(pipe, scalars, visible, work, rScore, tile, used + n, hidden, rare, lane)
            self.update_base(rScore, sums, rFactor, scale)
            self.weigh(rScore, sums, rFactor, scale)
            while n + HALVES < work.num_tiles:  # nothing is in flight where an iteration starts
                self.add_own(pipe, rScore, sums, rFactor, used + n, half, row, lane)
                self.start_scores_of(pipe, sQ, used + n + HALVES, rScore)
                self.finish_output(pipe, sums, PARTS, lane)
                self.add_others(pipe, sums, rFactor, scale, used + n + 1, half, row)
                n += HALVES
                tile = self.tile_at(work, n)
                hidden, rare = self.changes_of(pipe, scalars, visible, tile, used + n, lane)
                self.finish_scores(pipe, rScore, PARTS, lane)
                self.change_tile(pipe, scalars, visible, work, rScore, tile, used + n, hidden, rare, lane)
                self.update_base(rScore, sums, rFactor, scale)
                self.weigh(rScore, sums, rFactor, scale)
                self.finish_output(pipe, sums, 0, lane)
            self.add_own(pipe, rScore, sums, rFactor, used + n, half, row, lane)
            self.finish_output(pipe, sums, 0, lane)
            n += 1
        else:
            n = Int32(0)
        self.leave_queries(pipe, lane)
        if n < work.num_tiles:
            self.add_others(pipe, sums, rFactor, scale, used + n, half, row)
            self.finish_output(pipe, sums, 0, lane)
        self.exchange_sums(pipe, sums, half, row, lane)

    @cute.jit
    def add_own(self, pipe, rScore, sums: Sums, rFactor, at, half, row, lane):
        """Start the products of the warpgroup's own tile."""
        self.store_weights(pipe, rScore, sums, half, row, lane)
        hopper.named_barrier_arrive(WEIGHTS_BARRIER + half, 256)
        hopper.named_barrier(OWN_BARRIER + half, 128)
        self.rescale(sums.rOut, rFactor)
        self.start_products(pipe, at, half, half, sums.rOut)

    @cute.jit
    def add_others(self, pipe, sums: Sums, rFactor, scale, at, half, row):
        """Start the products of a tile whose weights the other warpgroup has computed."""
        other = 1 - half
        hopper.named_barrier(WEIGHTS_BARRIER + other, 256)
        bases = self.statistics(pipe, 0, other, row)
        for r in cutlass.range_constexpr(2):
            base = ptx.int_as_float(Int32(ptx.load_shared(bases + 32 * r, 1)[0]))
            factor = ptx.exp2_approx((sums.rMax[r] - base) * scale[r])
            rFactor[r] = cutlass.select_(base != sums.rMax[r], factor, Float32(1.0))
            sums.rMax[r] = base
            sums.rSum[r] = sums.rSum[r] * rFactor[r]
        self.rescale(sums.rOut, rFactor)
        self.start_products(pipe, at, other, half, sums.rOut)

    def statistics(self, pipe: Pipe, kind: int, half, row):
        """Where the base (kind 0) or the sum (1) of a row is that a warpgroup has computed."""
        return pipe.codes + HALVES * self.weight_bytes + (HALVES * kind + half) * STATISTICS_BYTES + 4 * row

    @cute.jit
    def start_scores_of(self, pipe: Pipe, sQ: Int32, at, rScore):
        """Start the scores of a tile, part by part: two groups of products."""
        sK = cute.arch.make_warp_uniform(ptx.opaque(pipe.keys))  # or descriptors of the only stage take registers
        of_queries = hopper.descriptor(sQ, self.block_bytes, 0)
        of_keys = hopper.descriptor(sK, self.block_bytes, 0)
        steps = cutlass.const_expr(self.row_bytes // 32 // PARTS)
        found = None
        for part in cutlass.range_constexpr(PARTS):
            hopper.mbarrier_wait(self.full_keys(pipe, at, part), at // TURNS & 1)
            hopper.wgmma_fence()
            found = self.multiply_keys(found, of_queries, of_keys, range(part * steps, (part + 1) * steps))
            hopper.wgmma_commit()
        for i in cutlass.range_constexpr(self.key_tile // 2):
            rScore[i] = found[i]

    @cute.jit
    def finish_scores(self, pipe: Pipe, rScore, behind: cutlass.Constexpr, lane):
        """Wait for scores; ``behind``: groups of products that were started later."""
        for part in cutlass.range_constexpr(PARTS):
            hopper.wgmma_wait(behind + PARTS - 1 - part)
            self.release(pipe.keys_empty, part, lane)
        self.order(rScore)

    @cute.jit
    def start_products(self, pipe: Pipe, at, computed, half, rOut):
        """Start the products of the weights that a warpgroup has computed: a group for each part of the values."""
        count = cutlass.const_expr(self.output_dims // 2)
        sV = pipe.values + half * (self.row_blocks // HALVES * self.key_tile * self.block_bytes)
        of_values = hopper.descriptor(sV, self.block_bytes, self.key_tile * self.block_bytes)
        of_weights = hopper.descriptor(pipe.codes + computed * self.weight_bytes, 128, 0)
        of_part = cutlass.const_expr(self.key_tile // 16 // PARTS)
        found = [rOut[i] for i in range(count)]
        for part in cutlass.range_constexpr(PARTS):
            hopper.mbarrier_wait(pipe.values_full + 8 * part, at & 1)
            hopper.wgmma_fence()
            for k in cutlass.range_constexpr(part * of_part, (part + 1) * of_part):
                b = of_values + k * self.block_bytes
                found = hopper.wgmma_transposed(found, count, of_weights + 2 * k, b, self.product_kind)
            hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rOut[i] = found[i]

    @cute.jit
    def finish_output(self, pipe: Pipe, sums: Sums, behind: cutlass.Constexpr, lane):
        """Wait for products with values; ``behind``: groups of products that were started later."""
        for part in cutlass.range_constexpr(PARTS):
            hopper.wgmma_wait(behind + PARTS - 1 - part)
            self.release(pipe.values_empty, part, lane)
        self.order(sums.rOut)

    @cute.jit
    def store_weights(self, pipe: Pipe, rScore, sums: Sums, half, row, lane):
        """Store the warp's weights and their bases, for both warpgroups."""
        t = lane % 4
        to = pipe.codes + half * self.weight_bytes + row * 128 + 4 * t
        bases = self.statistics(pipe, 0, half, row)
        for r in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(self.key_tile // 8):
                i = cutlass.const_expr(4 * n + 2 * r)
                word = ptx.pack_f32x2(rScore[i], rScore[i + 1], self.product_kind)
                ptx.store_shared(to + 1024 * r + (n ^ (row & 7)) * 16, [word])
            if t == 0:
                ptx.store_shared(bases + 32 * r, [Uint32(ptx.float_as_int(sums.rMax[r]))])
        hopper.fence_proxy_async()

    @cute.jit
    def exchange_sums(self, pipe: Pipe, sums: Sums, half, row, lane):
        """The sums of all keys, in the first lane of four."""
        rSum = sums.rSum
        mine, other = (self.statistics(pipe, 1, x, row) for x in (half, 1 - half))
        for r in cutlass.range_constexpr(2):
            total = rSum[r]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            rSum[r] = total
            if lane % 4 == 0:
                ptx.store_shared(mine + 32 * r, [Uint32(ptx.float_as_int(total))])
        hopper.named_barrier(Int32(SHARED_BARRIER), 256)
        for r in cutlass.range_constexpr(2):
            total = rSum[r] + ptx.int_as_float(Int32(ptx.load_shared(other + 32 * r, 1)[0]))
            rSum[r] = cutlass.select_(lane % 4 == 0, total, Float32(0.0))
        hopper.named_barrier(Int32(SHARED_BARRIER), 256)  # the sums of the next work go there
