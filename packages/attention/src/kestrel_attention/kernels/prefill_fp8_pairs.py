"""Attention of many FP8 queries over FP8 keys for heads of more than 64: e4m3 products of two tiles at a time.

As prefill_fp8.py, but for the order of a consumer's work. Weights are relative to 2^-7 times a base: a power of two
near the largest weight so far, which moves only where a weight would exceed e4m3. wgmma adds up the products of two
tiles with values. Consumers take turns, so that one multiplies while another computes weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import hopper, ptx

from . import scores
from .prefill_base import Sums, Visible, Work, bits_below, once_if
from .prefill_fp8 import KIND, PrefillFp8
from .prefill_hopper_producer import Pipe

TILES = 2  # whose products wgmma adds up
SLACK = 1.75  # a weight may exceed 2^7 by so many powers of two: e4m3 reaches 2^8.8
ROUNDING = 1.5 * 2**23  # added and subtracted, it rounds to an integer


@dataclass(frozen=True)
class PrefillFp8Pairs(PrefillFp8):
    """One compiled variant."""

    @property
    def weight_exponent(self) -> float:
        return 7.0  # weights below 2^-17 become 0

    @cute.jit
    def main_loop(self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, lane):
        """Add the tiles of a work item to sums: S of tile n is computed together with P V of tile n - 1.

        A thread issues an instruction in some four cycles whatever it is, so few instructions are what counts: bases
        move rarely, and the products of TILES tiles are added to sums at a time.
        """
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 8, Uint32)
        rTile = cute.make_rmem_tensor(self.head_dim // 2, Float32)  # the products of some tiles
        rHigh = cute.make_rmem_tensor(2, Float32)  # the thread's largest score of each row
        rFactor = cute.make_rmem_tensor(2, Float32)
        # All rows see the tiles from ``first`` to ``last`` - 1, and those below ``prefix``. Values that come out of a
        # shuffle are not computed again for each tile.
        first = cute.arch.shuffle_sync((visible.first + self.key_tile - 1) // self.key_tile, 0)
        last = cute.arch.shuffle_sync(visible.last // self.key_tile, 0)
        prefix = cute.arch.shuffle_sync(visible.prefix // self.key_tile, 0)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        stage, parity, sExists = self.place_of_tile(pipe, used)
        hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.fence_keys()
        self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
        hopper.wgmma_wait(0)
        self.order(rScore)
        self.release(pipe.keys_empty, stage, lane)
        self.cap(rScore, scalars.softcap, work.softmax_scale)
        self.mask(rScore, sExists, visible, scalars, self.tile_at(work, Int32(0)) * self.key_tile, lane)
        self.find_highest(rScore, rHigh)
        self.move_base(rHigh, sums.rMax, rFactor, scale)
        self.weigh(rScore, sums, scale, Int32(0))
        self.pack(rScore, rP)
        rTile.fill(0.0)
        keep = Int32(0)  # whether rTile has products that are to stay
        n = Int32(1)
        while n < work.num_tiles:
            last_stage, last_parity = stage, parity
            stage, parity, sExists = self.place_of_tile(pipe, used + n)
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
            self.fence_keys()
            self.take_turn(warpgroup)
            self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
            tile = self.tile_at(work, n)
            changed = Int32(0)
            for _ in cutlass.range(ptx.opaque(Int32(1)), unroll=1):  # keeps this ahead of the wait for scores
                missing = ptx.load_shared(sExists + 4 * (lane % self.warps), 1)[0] != self.all_rows
                unseen = (tile < first or tile >= last) and tile >= prefix
                changed = once_if(cute.arch.vote_any_sync(missing or unseen or scalars.softcap > 0.0))
            hopper.mbarrier_wait(pipe.values_full + 8 * last_stage, last_parity)
            sV = pipe.values + last_stage * self.tile_bytes
            self.start_output(sV, rP, rTile, keep)
            self.pass_turn(warpgroup)
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(pipe.keys_empty, stage, lane)
            for _ in cutlass.range(ptx.opaque(changed), unroll=1):
                self.cap(rScore, scalars.softcap, work.softmax_scale)
                self.hide_words(rScore, sExists, visible, scalars, tile * self.key_tile, lane)
            self.find_highest(rScore, rHigh)
            exceeds = False
            for r in cutlass.range_constexpr(2):
                exceeds = exceeds or ptx.fma(rHigh[r], scale[r], -sums.rMax[r]) > SLACK
            moved = once_if(cute.arch.vote_any_sync(exceeds))
            for _ in cutlass.range(ptx.opaque(moved), unroll=1):
                self.move_base(rHigh, sums.rMax, rFactor, scale)
                for r in cutlass.range_constexpr(2):
                    sums.rSum[r] *= rFactor[r]
                self.rescale(sums.rOut, rFactor)
            for zero in cutlass.range(ptx.opaque(Int32(1)), unroll=1):  # keeps the exponentials ahead of the wait
                self.weigh(rScore, sums, scale, zero)
            hopper.wgmma_wait(0)
            self.order(rTile)
            self.release(pipe.values_empty, last_stage, lane)
            for _ in cutlass.range(ptx.opaque(moved), unroll=1):
                self.rescale(rTile, rFactor)
            self.pack(rScore, rP)
            keep = cutlass.select_(n % TILES == 0, Int32(0), Int32(1))
            for _ in cutlass.range(ptx.opaque(1 - keep), unroll=1):
                self.add_products(rTile, sums.rOut)
            n += 1
        hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
        self.start_output(pipe.values + stage * self.tile_bytes, rP, rTile, keep)
        hopper.wgmma_wait(0)
        self.order(rTile)
        self.release(pipe.values_empty, stage, lane)
        self.add_products(rTile, sums.rOut)

    def place_of_tile(self, pipe: Pipe, at):
        """Stage and parity of a warpgroup's tile ``at``, and where the words of its keys that exist are."""
        at = Uint32(at)
        ring = Int32(at % (2 * self.num_stages))
        return Int32(at % self.num_stages), Int32(at // self.num_stages & 1), pipe.exists + 4 * self.warps * ring

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
        high = [[-Float32.inf] * 2 for _ in range(2)]
        for n in cutlass.range_constexpr(self.key_tile // 8):
            for r in cutlass.range_constexpr(2):
                i = cutlass.const_expr(4 * n + 2 * r)
                high[r][n % 2] = ptx.fmax(high[r][n % 2], ptx.fmax(rScore[i], rScore[i + 1]))
        for r in cutlass.range_constexpr(2):
            rHigh[r] = ptx.fmax(*high[r])

    @cute.jit
    def move_base(self, rHigh, rMax, rFactor, scale):
        """Move the bases of rows whose largest score exceeds them by SLACK; the factors of their sums so far.

        Bases are integers, so neither the rounding of weights nor that of sums depends on them.
        """
        for r in cutlass.range_constexpr(2):
            highest = rHigh[r]
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 1))
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 2))
            exceeds = ptx.fma(highest, scale[r], -rMax[r]) > SLACK
            base = ptx.fma(highest, scale[r], Float32(ROUNDING)) - ROUNDING
            rFactor[r] = cutlass.select_(exceeds, ptx.exp2_approx(rMax[r] - base), Float32(1.0))
            rMax[r] = cutlass.select_(exceeds, base, rMax[r])

    @cute.jit
    def rescale(self, rOut, rFactor):
        for i in cutlass.range_constexpr(self.head_dim // 2):
            rOut[i] *= rFactor[i // 2 % 2]

    @cute.jit
    def log2_unit(self, base, scale):
        """The binary logarithm of the unit of a row's sums; sums.rMax has bases."""
        return cutlass.select_(base == -Float32.inf, Float32(0.0), base - self.weight_exponent)

    @cute.jit
    def weigh(self, rScore, sums: Sums, scale, zero):
        """Scores become weights, and are added to the sums.

        zero: a 0 of the loop around it, out of which the compiler moves what does not depend on it.
        """
        for r in cutlass.range_constexpr(2):
            unit = self.log2_unit(sums.rMax[r], scale[r])
            base = ptx.int_as_float(ptx.float_as_int(-unit) ^ zero)
            totals = [sums.rSum[r], Float32(0.0)]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    weight = ptx.exp2_approx(ptx.fma(rScore[i], scale[r], base))
                    totals[e] += weight
                    rScore[i] = weight
            sums.rSum[r] = totals[0] + totals[1]

    @cute.jit
    def add_products(self, rTile, rOut):
        for i in cutlass.range_constexpr(self.head_dim // 2):
            rOut[i] += rTile[i]

    @cute.jit
    def start_output(self, sV: Int32, rP, rTile, keep):
        """Start the products of weights with values; keep 0: in place of what rTile has."""
        count = cutlass.const_expr(self.head_dim // 2)
        of_values = hopper.descriptor(sV, self.key_tile, 0)
        hopper.wgmma_fence()
        found = [rTile[i] for i in range(count)]
        for k in cutlass.range_constexpr(self.key_tile // 32):
            a = [rP[4 * k + i] for i in range(4)]
            if cutlass.const_expr(k == 0):
                found = hopper.wgmma_if(found, count, a, of_values, KIND, keep)
            else:
                found = hopper.wgmma(found, count, a, of_values + 2 * k, KIND)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rTile[i] = found[i]
