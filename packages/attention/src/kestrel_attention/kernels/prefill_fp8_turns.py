"""Attention of many FP8 queries over FP8 keys for heads of more than 64: consumers in turn, and bases that rarely move.

As prefill_fp8.py, but for the order of a consumer's work. Weights are relative to 2^-7 times a base: a power of two
near the largest weight so far, which moves only where a weight would exceed e4m3. Consumers take turns, so that one
multiplies while another computes weights. What a thread does for a tile is one long chain, so all that can be known
earlier fills the gaps of the exponentials: addresses and barriers of the next tile, sums, and codes of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import hopper, ptx

from . import scores
from .prefill_base import bits_below, once_if
from .prefill_fp8 import PrefillFp8
from .prefill_types import Pipe, Sums, Visible, Work

SLACK = 1.75  # a weight may exceed 2^7 by so many powers of two: e4m3 reaches 2^8.8
ROUNDING = 1.5 * 2**23  # added and subtracted, it rounds to an integer


@dataclass(frozen=True)
class PrefillFp8Turns(PrefillFp8):
    """One compiled variant."""

    @property
    def weight_exponent(self) -> float:
        return 7.0  # weights below 2^-17 become 0

    @cute.jit
    def main_loop(self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, lane):
        """Add the tiles of a work item to sums: S of tile n is computed together with P V of tile n - 1."""
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 8, Uint32)
        rTile = cute.make_rmem_tensor(self.head_dim // 2, Float32)  # P V of one tile
        rHigh = cute.make_rmem_tensor(2, Float32)  # the thread's largest score of each row
        rFactor = cute.make_rmem_tensor(2, Float32)
        # All rows see the tiles from ``first`` to ``last`` - 1, and those below ``prefix``. Values that come out of a
        # shuffle are not computed again for each tile.
        first = cute.arch.shuffle_sync((visible.first + self.key_tile - 1) // self.key_tile, 0)
        last = cute.arch.shuffle_sync(visible.last // self.key_tile, 0)
        prefix = cute.arch.shuffle_sync(visible.prefix // self.key_tile, 0)
        scale = cute.arch.shuffle_sync(scale[0], 0)
        sQ = cute.arch.shuffle_sync(sQ, 0)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        sK, full, parity, sExists = self.place_of_tile(pipe, used)
        hopper.mbarrier_wait(full, parity)
        self.fence_keys()
        self.start_scores(sQ, sK, rScore)
        hopper.wgmma_wait(0)
        self.order(rScore)
        self.release(full + self.keys_empty, Int32(0), lane)
        self.cap(rScore, scalars.softcap, work.softmax_scale)
        self.mask(rScore, sExists, visible, scalars, self.tile_at(work, Int32(0)) * self.key_tile, lane)
        self.find_highest(rScore, rHigh)
        self.scale_scores(rScore, sums.rMax, scale)
        self.move_base(rScore, rHigh, sums.rMax, rFactor, scale)
        self.weigh(rScore, sums)
        self.pack(rScore, rP)
        n = Int32(1)
        next_sK, next_full, next_parity, next_exists = self.place_of_tile(pipe, used + n)
        keys_ready, values_ready = Int32(0), Int32(0)
        changes = self.changes(scalars, self.tile_at(work, n), first, last, prefix)
        while n < work.num_tiles:
            last_sK, last_full, last_parity = sK, full, parity
            sK, full, parity, sExists = next_sK, next_full, next_parity, next_exists
            for _ in cutlass.range(ptx.opaque(1 - keys_ready), unroll=1):
                hopper.mbarrier_wait(full, parity)
            self.fence_keys()
            missing = ptx.load_shared(sExists + 4 * (lane % self.warps), 1)[0] != self.all_rows
            self.take_turn(warpgroup)
            self.start_scores(sQ, sK, rScore)
            for _ in cutlass.range(ptx.opaque(1 - values_ready), unroll=1):
                hopper.mbarrier_wait(last_full + self.values_full, last_parity)
            self.start_part(0, last_sK + self.num_stages * self.tile_bytes, rP, rTile)
            self.pass_turn(warpgroup)
            changed = Int32(0)
            for _ in cutlass.range(ptx.opaque(Int32(1)), unroll=1):  # keeps this ahead of the wait for scores
                changed = once_if(cute.arch.vote_any_sync(missing or changes != 0))
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(full + self.keys_empty, Int32(0), lane)
            for _ in cutlass.range(ptx.opaque(changed), unroll=1):
                self.cap(rScore, scalars.softcap, work.softmax_scale)
                self.hide_words(rScore, sExists, visible, scalars, self.tile_at(work, n) * self.key_tile, lane)
            self.find_highest(rScore, rHigh)
            exceeds = False
            for r in cutlass.range_constexpr(2):
                exceeds = exceeds or ptx.fma(rHigh[r], scale, -sums.rMax[r]) > SLACK
            moved = once_if(cute.arch.vote_any_sync(exceeds))
            self.scale_scores(rScore, sums.rMax, scale)
            for _ in cutlass.range(ptx.opaque(moved), unroll=1):
                self.move_base(rScore, rHigh, sums.rMax, rFactor, scale)
                for r in cutlass.range_constexpr(2):
                    sums.rSum[r] *= rFactor[r]
                self.rescale(sums.rOut, rFactor)
            hopper.wgmma_wait(0)  # of the whole warpgroup, so in no branch of a warp
            self.order(rTile)
            self.release(last_full + self.values_empty, Int32(0), lane)
            for _ in cutlass.range(ptx.opaque(moved), unroll=1):
                self.rescale(rTile, rFactor)
            # Exponentials leave room for what the next tile needs.
            zero = ptx.opaque(Int32(0))
            next_sK, next_full, next_parity, next_exists = self.place_of_tile(pipe, used + n + 1 + zero)
            keys_ready = hopper.mbarrier_ready(next_full, next_parity)
            values_ready = hopper.mbarrier_ready(full + self.values_full, parity)
            changes = self.changes(scalars, self.tile_at(work, n + 1 + zero), first, last, prefix)
            self.weigh(rScore, sums)
            self.pack(rScore, rP)
            self.add_products(rTile, sums.rOut)
            n += 1
        hopper.mbarrier_wait(full + self.values_full, parity)
        self.start_part(0, sK + self.num_stages * self.tile_bytes, rP, rTile)
        hopper.wgmma_wait(0)
        self.order(rTile)
        self.release(full + self.values_empty, Int32(0), lane)
        self.add_products(rTile, sums.rOut)

    @cute.jit
    def changes(self, scalars, tile, first, last, prefix):
        """Whether scores of a tile whose keys exist are capped or hidden."""
        unseen = (tile < first or tile >= last) and tile >= prefix
        return cutlass.select_(unseen or scalars.softcap > 0.0, Int32(1), Int32(0))

    def place_of_tile(self, pipe: Pipe, at):
        """A warpgroup's tile ``at``: its keys, their full barrier and its parity, and the words of keys that exist.

        Values, and other barriers, are at constant distances.
        """
        at = Uint32(at)
        ring = Int32(at % (2 * self.num_stages))
        stage = Int32(at % self.num_stages)
        sK, full = pipe.keys + stage * self.tile_bytes, pipe.keys_full + 8 * stage
        return sK, full, Int32(at // self.num_stages & 1), pipe.exists + 4 * self.warps * ring

    @property
    def keys_empty(self) -> int:
        """Of a stage, its distance from the full barrier of keys."""
        return 8 * self.num_stages

    @property
    def values_full(self) -> int:
        return 16 * self.num_stages

    @property
    def values_empty(self) -> int:
        return 24 * self.num_stages

    @cute.jit
    def hide_words(self, rScore, sExists: Int32, visible: Visible, scalars, first_key, lane):
        """Set hidden scores to -inf, those of one word of keys after the other, for which few registers suffice."""
        for h in cutlass.range_constexpr(self.key_tile // 32):
            for zero in cutlass.range(ptx.opaque(Int32(1)), unroll=1):
                exists = ptx.load_shared(sExists + 4 * h, 1)[0]
                g, t = lane // 4, lane % 4
                base = first_key + 2 * t + zero + 32 * h
                for r in cutlass.range_constexpr(2):
                    start, end = scores.window(visible.position + zero + (g + 8 * r), scalars, visible.held)
                    seen = bits_below(end - base) & ~bits_below(start - base) | bits_below(visible.prefix - base)
                    self.keep_seen(rScore, r, h, seen & (exists >> Uint32(2 * t + zero)))

    @cute.jit
    def find_highest(self, rScore, rHigh):
        high = [[ptx.fmax(rScore[4 * n + 2 * r], rScore[4 * n + 2 * r + 1]) for n in range(2)] for r in range(2)]
        for n in cutlass.range_constexpr(2, self.key_tile // 8):
            for r in cutlass.range_constexpr(2):
                i = cutlass.const_expr(4 * n + 2 * r)
                high[r][n % 2] = ptx.fmax(high[r][n % 2], ptx.fmax(rScore[i], rScore[i + 1]))
        for r in cutlass.range_constexpr(2):
            rHigh[r] = ptx.fmax(*high[r])

    @cute.jit
    def scale_scores(self, rScore, rMax, scale):
        """Scores become binary logarithms of weights."""
        offset = [-self.log2_unit(rMax[r], scale) for r in range(2)]
        for i in cutlass.range_constexpr(self.key_tile // 2):
            rScore[i] = ptx.fma(rScore[i], scale, offset[i // 2 % 2])

    @cute.jit
    def move_base(self, rScore, rHigh, rMax, rFactor, scale):
        """Move the bases of rows whose largest score exceeds them by SLACK; the factors of their sums so far.

        Bases are integers, so the rounding of weights and sums does not depend on them. rScore: of scale_scores.
        """
        for r in cutlass.range_constexpr(2):
            highest = rHigh[r]
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 1))
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 2))
            exceeds = ptx.fma(highest, scale, -rMax[r]) > SLACK
            base = ptx.fma(highest, scale, Float32(ROUNDING)) - ROUNDING
            base = cutlass.select_(exceeds, base, rMax[r])
            rFactor[r] = cutlass.select_(exceeds, ptx.exp2_approx(rMax[r] - base), Float32(1.0))
            shift = self.log2_unit(rMax[r], scale) - self.log2_unit(base, scale)
            rMax[r] = base
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    rScore[4 * n + 2 * r + e] += shift

    @cute.jit
    def rescale(self, rOut, rFactor):
        for i in cutlass.range_constexpr(self.head_dim // 2):
            rOut[i] *= rFactor[i // 2 % 2]

    @cute.jit
    def log2_unit(self, base, scale):
        """The binary logarithm of the unit of a row's sums; sums.rMax has bases."""
        return cutlass.select_(base == -Float32.inf, Float32(0.0), base - self.weight_exponent)

    @cute.jit
    def weigh(self, rScore, sums: Sums):
        """Binary logarithms of weights become weights, and are added to the sums."""
        for r in cutlass.range_constexpr(2):
            totals = [sums.rSum[r], Float32(0.0)]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    rScore[i] = ptx.exp2_approx(rScore[i])
                    totals[e] += rScore[i]
            sums.rSum[r] = totals[0] + totals[1]

    @cute.jit
    def add_products(self, rTile, rOut):
        for i in cutlass.range_constexpr(self.head_dim // 2):
            rOut[i] += rTile[i]
