"""The consumers' loop over tiles of keys in prefill_hopper.py.

S of one tile is computed together with P V of the tile before. What a thread computes for a tile is a chain, about as
long as the products. So nothing is in it that can be known earlier, or fits into the gaps of the exponentials.
Weights are relative to a base of their row, at first its largest score. It moves where their sum in a thread and tile
shows that one of them grew too large; only then the largest score is searched. So a row's bits depend on its own
scores alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import hopper, ptx

from . import scores
from .constants import WARPGROUP_ROWS
from .prefill_base import bits_below, once_if
from .prefill_hopper_producer import HopperProducer
from .prefill_types import Pipe, Sums, Visible, Work

TURN_BARRIER = 8  # the first of the named barriers for turns, one for each consumer warpgroup


@dataclass(frozen=True)
class HopperLoop(HopperProducer):
    """The loop, and what it does with scores and weights."""

    @property
    def queries_in_registers(self) -> bool:
        """Queries are operands in registers, not in shared memory, which takes a third of the reads for scores."""
        return self.head_dim == 128 and not self.codes

    @property
    def lazy_rescale(self) -> bool:
        """Weights are relative to the base of the tiles before, which rarely moves; else each tile searches its own."""
        return not self.codes or self.head_dim <= 128

    @property
    def most_of_tile(self) -> float:
        """A thread's sum of the weights of a row in a tile, from which on its base moves: none of them is larger."""
        return 2.0 ** (self.rescale_slack + self.weight_exponent)

    @cute.jit
    def main_loop(self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, lane):
        """Add the tiles of a work item to sums: S of tile n is computed together with P V of tile n - 1."""
        rOut = sums.rOut
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 4, Uint32)
        rFactor = cute.make_rmem_tensor(2, Float32)
        rTile = cute.make_rmem_tensor(2, Float32)  # the sums of one tile
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        hidden_first = self.skip_first(pipe, scalars, work, used, warpgroup, lane)
        at = used + hidden_first
        stage, parity = at % self.num_stages, at // self.num_stages & 1
        queries = self.load_queries(sQ, lane)
        hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.fence_copies()
        self.start_scores(queries, pipe.keys + stage * self.tile_bytes, rScore)
        tile = self.tile_at(work, hidden_first)
        plain = self.plain_tiles(scalars, visible)
        changes = self.foresee(pipe, scalars, visible, plain, tile, at, lane)
        hopper.wgmma_wait(0)
        self.order(rScore)
        self.release(pipe.keys_empty, stage, lane)
        self.change(pipe, scalars, visible, work, rScore, tile, at, changes, lane)
        if cutlass.const_expr(self.lazy_rescale):  # as for rows that see no key before a later tile: bits are the same
            rTile.fill(0.0)
            self.scale_scores(rScore, sums, scale)
            self.move_bases(rScore, sums, rTile, scale)
            self.weigh_by_last_base(rScore, rP, sums, rTile, scale)
            for r in cutlass.range_constexpr(2):
                sums.rSum[r] += rTile[r]
        else:
            self.update_base(rScore, sums, rFactor, scale)
            self.weigh(rScore, sums, rFactor, scale)
            self.pack(rScore, rP)
        n = hidden_first + 1
        seen = self.seen_tiles(scalars, work, warpgroup)
        if cutlass.const_expr(self.skips_first):
            seen = cutlass.max(seen, n)
        while n < seen:
            last_stage, last_parity = stage, parity
            at = used + n
            stage, parity = at % self.num_stages, at // self.num_stages & 1
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
            self.fence_copies()
            self.take_turn(warpgroup)
            self.start_scores(queries, pipe.keys + stage * self.tile_bytes, rScore)
            tile = self.tile_at(work, n)
            changes = self.foresee(pipe, scalars, visible, plain, tile, at, lane)
            hopper.mbarrier_wait(pipe.values_full + 8 * last_stage, last_parity)
            self.fence_copies()
            self.start_output(pipe.values + last_stage * self.tile_bytes, rP, rOut)
            self.pass_turn(warpgroup)
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(pipe.keys_empty, stage, lane)
            self.change(pipe, scalars, visible, work, rScore, tile, at, changes, lane)
            if cutlass.const_expr(self.lazy_rescale):
                self.scale_scores(rScore, sums, scale)
                hopper.wgmma_wait(0)
                self.order(rOut)
                self.release(pipe.values_empty, last_stage, lane)
                self.weigh_lazily(rScore, rP, sums, rTile, scale)
            else:
                self.update_base(rScore, sums, rFactor, scale)
                hopper.wgmma_wait(0)
                self.order(rOut)
                self.release(pipe.values_empty, last_stage, lane)
                if cutlass.const_expr(self.head_dim > 128):
                    self.rescale(rOut, rFactor)
                self.weigh(rScore, sums, rFactor, scale)
                self.pack(rScore, rP)
                if cutlass.const_expr(self.head_dim <= 128):
                    self.rescale(rOut, rFactor)
            n += 1
        self.leave_queries(pipe, lane)
        hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
        self.fence_copies()
        self.start_output(pipe.values + stage * self.tile_bytes, rP, rOut)
        if cutlass.const_expr(self.skips):
            for _ in cutlass.range(work.num_tiles - seen, unroll=1):
                self.take_turn(warpgroup)
                self.pass_turn(warpgroup)
        hopper.wgmma_wait(0)
        self.order(rOut)
        self.release(pipe.values_empty, stage, lane)
        if cutlass.const_expr(self.skips):
            while n < work.num_tiles:
                self.skip_tile(pipe, used + n, lane)
                n += 1

    @cute.jit
    def leave_queries(self, pipe: Pipe, lane):
        """The warp has computed all scores of its queries."""
        if cutlass.const_expr(self.early_queries):
            self.release(pipe.queries_empty, Int32(0), lane)

    @property
    def capped_at_once(self) -> int:
        return 32

    @cute.jit
    def skip_tile(self, pipe: Pipe, at, lane):
        """Wait for the keys and values of a tile, and release them unread."""
        stage, parity = at % self.num_stages, at // self.num_stages & 1
        hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.release(pipe.keys_empty, stage, lane)
        hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
        self.release(pipe.values_empty, stage, lane)

    @property
    def skips_first(self) -> bool:
        """Warpgroups skip the first tiles of a work too."""
        return False

    @cute.jit
    def skip_first(self, pipe: Pipe, scalars, work: Work, used, warpgroup, lane):
        """Release the first tiles of a work of which no row of the warpgroup sees a key, but not all; their number."""
        first = Int32(0)
        if cutlass.const_expr(self.skips_first):
            queries = Int32(WARPGROUP_ROWS) >> work.pack_shift
            key, _ = scores.window(work.position + warpgroup * queries, scalars, work.held)
            hidden = key // self.key_tile - work.gap - work.first_tile
            hidden = cutlass.select_(work.prefix_tiles > 0, Int32(0), hidden)
            first = cute.arch.make_warp_uniform(cutlass.max(cutlass.min(hidden, work.num_tiles - 1), 0))
            n = Int32(0)
            while n < first:
                self.skip_tile(pipe, used + n, lane)
                self.take_turn(warpgroup)
                self.pass_turn(warpgroup)
                n += 1
        return first

    @property
    def skips(self) -> bool:
        """Warpgroups skip the last tiles of a work where none of their own rows sees a key of them.

        There are at most two, so the others wait for no stage that a warpgroup waiting for its turn has not released.
        """
        return self.block_rows > self.key_tile

    @cute.jit
    def seen_tiles(self, scalars, work: Work, warpgroup):
        """The tiles of a work without its last ones of which no row of the warpgroup sees a key; at least one."""
        seen = work.num_tiles
        if cutlass.const_expr(self.skips):
            queries = Int32(WARPGROUP_ROWS) >> work.pack_shift
            _, last = scores.window(work.position + (warpgroup + 1) * queries - 1, scalars, work.held)
            end = (last + self.key_tile - 1) // self.key_tile - work.gap
            end = cutlass.max(end, work.prefix_tiles) - work.first_tile
            seen = cutlass.max(cutlass.min(seen, end), 1)
        return cute.arch.make_warp_uniform(seen)

    @cute.jit
    def take_turn(self, warpgroup):
        """Wait until the warpgroup before this one has started its products."""
        if cutlass.const_expr(self.turns):
            hopper.named_barrier(TURN_BARRIER + warpgroup, 256)

    @cute.jit
    def pass_turn(self, warpgroup):
        """Let the next warpgroup start its products."""
        if cutlass.const_expr(self.turns):
            following = cutlass.select_(warpgroup + 1 < self.consumers, warpgroup + 1, Int32(0))
            hopper.named_barrier_arrive(TURN_BARRIER + following, 256)

    @property
    def keeps_scores(self) -> bool:
        """Scores stay unscaled until weights are computed: heads of up to 128 dims, keys of 16 bits."""
        return self.lazy_rescale and self.head_dim <= 128 and not self.codes

    @cute.jit
    def plain_tiles(self, scalars, visible: Visible):
        """Tile ranges in which no score changes: from the first number to the second, and below the third."""
        found = [Int32(0)] * 3
        if cutlass.const_expr(self.keeps_scores):
            capped = scalars.softcap > 0.0
            first = (visible.first + (self.key_tile - 1)) // self.key_tile
            last = cutlass.select_(capped, Int32(0), visible.last // self.key_tile)
            prefix = cutlass.select_(capped, Int32(0), visible.prefix // self.key_tile)
            found = [cute.arch.make_warp_uniform(x) for x in (first, last, prefix)]
        return found

    @cute.jit
    def foresee(self, pipe: Pipe, scalars, visible: Visible, plain, tile, at, lane):
        """What is known of a tile's changes before its scores are computed: trip counts of loops. It needs full keys.

        The vote keeps the compiler from computing it behind the scores.
        """
        if cutlass.const_expr(self.keeps_scores):
            first, last, prefix = plain
            ring = pipe.exists + 4 * self.warps * (at % (2 * self.num_stages))
            exists = ptx.load_shared(ring + 4 * (lane % self.warps), 1)[0]
            missing = cute.arch.vote_any_sync(exists != self.all_rows)
            seen = (tile >= first and tile < last) or tile < prefix
            return [once_if(missing or not seen)]
        else:
            return self.changes_of(pipe, scalars, visible, tile, at, lane)

    @cute.jit
    def changes_of(self, pipe: Pipe, scalars, visible: Visible, tile, at, lane):
        """What the scores of a tile need, as trip counts of two loops: hide_last, change_scores, or neither."""
        each = cutlass.const_expr(self.loaded_rows)
        first_key = tile * self.key_tile
        loader = lane % self.warps
        exists = ptx.load_shared(pipe.exists + 4 * self.warps * (at % (2 * self.num_stages)) + 4 * loader, 1)[0]
        held = bits_below(visible.held - first_key - each * loader)
        unseen = first_key < visible.first or first_key + self.key_tile > visible.last
        unseen = unseen and first_key + self.key_tile > visible.prefix
        changed = cute.arch.vote_any_sync(exists != self.all_rows or unseen or scalars.softcap > 0.0)
        gaps = exists != (held & self.all_rows) or visible.prefix > 0
        rare = cute.arch.vote_any_sync(gaps or scalars.softcap > 0.0 or scalars.window_left >= 0)
        return once_if(changed and not rare), once_if(changed and rare)

    @cute.jit
    def change(self, pipe, scalars, visible: Visible, work: Work, rScore, tile, at, changes, lane):
        """Cap scores, and hide those of keys that a row does not see, as foresee() has found."""
        if cutlass.const_expr(self.keeps_scores):
            for _ in cutlass.range(changes[0], unroll=1):
                kinds = self.changes_of(pipe, scalars, visible, tile, at, lane)
                self.change_tile(pipe, scalars, visible, work, rScore, tile, at, *kinds, lane)
        else:
            self.change_tile(pipe, scalars, visible, work, rScore, tile, at, *changes, lane)

    @cute.jit
    def change_tile(self, pipe, scalars, visible: Visible, work: Work, rScore, tile, at, hidden, rare, lane):
        """The same, as changes_of has found."""
        for zero in cutlass.range(hidden, unroll=1):
            self.hide_last(rScore, visible, scalars, tile * self.key_tile, lane, zero)
        for _ in cutlass.range(rare, unroll=1):
            self.change_scores(pipe, scalars, visible, work, rScore, tile, at, lane)

    @cute.jit
    def hide_last(self, rScore, visible: Visible, scalars, first_key, lane, zero):
        """Set the scores of keys behind the last that a row sees to -inf. zero: as in hide()."""
        g, t = lane // 4, lane % 4
        for r in cutlass.range_constexpr(2):
            _, last = scores.window(visible.position + zero + (g + 8 * r), scalars, visible.held)
            last = last - first_key - 2 * t
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    rScore[i] = cutlass.select_(last > 8 * n + e, rScore[i], -Float32.inf)

    @cute.jit
    def change_scores(self, pipe: Pipe, scalars, visible: Visible, work: Work, rScore, tile, at, lane):
        """Cap the scores of a tile, and hide those of keys that a row does not see."""
        self.cap(rScore, scalars.softcap, work.softmax_scale)
        exists = pipe.exists + 4 * self.warps * (at % (2 * self.num_stages))
        self.mask(rScore, exists, visible, scalars, tile * self.key_tile, lane)

    @cute.jit
    def fence_copies(self):
        """Make the producer's cp.async copies visible to wgmma. Others are by TMA, or fenced by the producer."""
        if cutlass.const_expr(not self.codes and not self.boxes):
            hopper.fence_proxy_async()

    @cute.jit
    def release(self, barriers: Int32, stage, lane):
        if lane == 0:
            hopper.mbarrier_arrive(barriers + 8 * stage)

    @cute.jit
    def order(self, registers):
        """Keep the compiler from moving uses of these registers above this point."""
        count = cutlass.const_expr(cute.size(registers))
        found = hopper.ordered([registers[i] for i in range(count)])
        for i in cutlass.range_constexpr(count):
            registers[i] = found[i]

    @cute.jit
    def load_queries(self, sQ: Int32, lane):
        """Queries as start_scores takes them: where they are, or registers."""
        queries = sQ
        if cutlass.const_expr(self.queries_in_registers):
            queries = cute.make_rmem_tensor(self.head_dim // 4, Uint32)
            warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % 128 // 32)
            for k in cutlass.range_constexpr(self.head_dim // 16):
                at = self.place_of(WARPGROUP_ROWS, 16 * warp + lane % 16, 2 * k + lane // 16)
                words = ptx.ldmatrix_x4(sQ + at)
                for i in cutlass.range_constexpr(4):
                    queries[4 * k + i] = words[i]
        return queries

    @cute.jit
    def start_scores(self, queries, sK: Int32, rScore):
        of_keys = hopper.descriptor(sK, self.block_bytes, 0)
        if cutlass.const_expr(not self.queries_in_registers):
            queries = hopper.descriptor(queries, self.block_bytes, 0)
        hopper.wgmma_fence()
        found = self.multiply_keys(None, queries, of_keys, range(self.row_bytes // 32))
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(self.key_tile // 2):
            rScore[i] = found[i]

    def multiply_keys(self, found, queries, of_keys, steps: range):
        """Add the products of steps of 32 bytes of queries and keys to scores (None: zeros).

        queries: a descriptor, or registers; of_keys: a descriptor.
        """
        for k in steps:
            block, step = divmod(32 * k, self.block_bytes)
            if self.queries_in_registers:
                a = [queries[4 * k + i] for i in range(4)]
            else:
                a = queries + (block * (WARPGROUP_ROWS * self.block_bytes) + step) // 16
            b = of_keys + (block * (self.key_tile * self.block_bytes) + step) // 16
            found = hopper.wgmma(found, self.key_tile // 2, a, b, self.product_kind)
        return found

    @cute.jit
    def start_output(self, sV: Int32, rP, rOut):
        count = cutlass.const_expr(self.output_dims // 2)
        of_values = hopper.descriptor(sV, self.block_bytes, self.key_tile * self.block_bytes)
        hopper.wgmma_fence()
        found = [rOut[i] for i in range(count)]
        for k in cutlass.range_constexpr(self.key_tile // 16):
            a = [rP[4 * k + i] for i in range(4)]
            found = hopper.wgmma_transposed(found, count, a, of_values + k * self.block_bytes, self.product_kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rOut[i] = found[i]

    @cute.jit
    def pack(self, rScore, rP):
        for i in cutlass.range_constexpr(self.key_tile // 4):
            rP[i] = ptx.pack_f32x2(rScore[2 * i], rScore[2 * i + 1], self.product_kind)

    @cute.jit
    def softmax(
        self, pipe: Pipe, scalars, visible: Visible, work: Work, rScore, sums: Sums, rFactor, scale, tile, at, lane
    ):
        """Turn scores into weights exp2(scale (score - base)); rFactor rescales the previous sums and results.

        tile: of keys; at: how many tiles the warpgroup has visited before it.
        """
        self.rebase(pipe, scalars, visible, work, rScore, sums, rFactor, scale, tile, at, lane)
        self.weigh(rScore, sums, rFactor, scale)

    @cute.jit
    def rebase(
        self, pipe: Pipe, scalars, visible: Visible, work: Work, rScore, sums: Sums, rFactor, scale, tile, at, lane
    ):
        """The first half of softmax: mask scores, and update the base."""
        self.change_scores(pipe, scalars, visible, work, rScore, tile, at, lane)
        self.update_base(rScore, sums, rFactor, scale)

    @cute.jit
    def update_base(self, rScore, sums: Sums, rFactor, scale):
        """Raise the base of the weights to the largest score; rFactor, of the sums so far."""
        rMax = sums.rMax
        for r in cutlass.range_constexpr(2):
            some = [rMax[r], rMax[r]]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                i = cutlass.const_expr(4 * n + 2 * r)
                some[n % 2] = ptx.fmax(some[n % 2], ptx.fmax(rScore[i], rScore[i + 1]))
            highest = ptx.fmax(some[0], some[1])
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 1))
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 2))
            exceed = (highest - rMax[r]) * scale[r] > self.rescale_slack
            factor = ptx.exp2_approx((rMax[r] - highest) * scale[r])
            rFactor[r] = cutlass.select_(exceed, factor, Float32(1.0))
            rMax[r] = cutlass.select_(exceed, highest, rMax[r])

    @cute.jit
    def weigh(self, rScore, sums: Sums, rFactor, scale):
        """The second half: scores become weights, and are added to the sums."""
        rMax, rSum = sums.rMax, sums.rSum
        for r in cutlass.range_constexpr(2):
            base = -self.log2_unit(rMax[r], scale[r])
            totals = [rSum[r] * rFactor[r], Float32(0.0)]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    weight = ptx.exp2_approx(ptx.fma(rScore[i], scale[r], base))
                    totals[e] += weight
                    rScore[i] = weight
            rSum[r] = totals[0] + totals[1]

    @cute.jit
    def scale_scores(self, rScore, sums: Sums, scale):
        """Turn scores into base-2 logarithms of weights, unless they stay unscaled."""
        for r in cutlass.range_constexpr(2):
            base = -self.log2_unit(sums.rMax[r], scale[r])
            for n in cutlass.range_constexpr(0 if self.keeps_scores else self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    rScore[i] = ptx.fma(rScore[i], scale[r], base)

    @cute.jit
    def weigh_lazily(self, rScore, rP, sums: Sums, rTile, scale):
        """Weigh a tile by the bases before it, and again by its own where one must move; add up its weights."""
        tries = Int32(0)
        while tries < 2:
            moves = self.weigh_by_last_base(rScore, rP, sums, rTile, scale)
            tries = cutlass.select_(moves, tries + 1, Int32(2))
            for _ in cutlass.range(once_if(tries == 1), unroll=1):
                self.move_bases(rScore, sums, rTile, scale)
        for r in cutlass.range_constexpr(2):
            sums.rSum[r] += rTile[r]

    @cute.jit
    def weigh_by_last_base(self, rScore, rP, sums: Sums, rTile, scale):
        """Weights in rP and their sums in rTile; whether a base of the warp's rows must move.

        Fewer scores than a tile has are those of its last keys.
        """
        count = cutlass.const_expr(cute.size(rScore) // 4)
        skipped = cutlass.const_expr(self.key_tile // 8 - count)
        bases = [-self.log2_unit(sums.rMax[r], scale[r]) for r in range(2)]
        totals = [Float32(0.0)] * 4
        for n in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                pair = [rScore[4 * n + 2 * r + e] for e in range(2)]
                if cutlass.const_expr(self.keeps_scores):
                    pair = [ptx.fma(x, scale[r], bases[r]) for x in pair]
                pair = [ptx.exp2_approx(x) for x in pair]
                for e in cutlass.range_constexpr(2):
                    totals[2 * r + e] += pair[e]
                rP[2 * (n + skipped) + r] = ptx.pack_f32x2(pair[0], pair[1], self.product_kind)
        moves = False
        for r in cutlass.range_constexpr(2):
            rTile[r] = totals[2 * r] + totals[2 * r + 1]
            moves = moves or rTile[r] > self.most_of_tile or sums.rMax[r] == -Float32.inf
        return cute.arch.vote_any_sync(moves)

    @cute.jit
    def move_bases(self, rScore, sums: Sums, rTile, scale):
        """Raise the bases of rows that need it to their largest scores, and rescale their sums."""
        for r in cutlass.range_constexpr(2):
            moves = rTile[r] > self.most_of_tile or sums.rMax[r] == -Float32.inf
            in_row = cutlass.select_(moves, Int32(1), Int32(0))
            highest = -Float32.inf
            for n in cutlass.range_constexpr(cute.size(rScore) // 4):
                i = cutlass.const_expr(4 * n + 2 * r)
                highest = ptx.fmax(highest, ptx.fmax(rScore[i], rScore[i + 1]))
            for distance in cutlass.range_constexpr(1, 3):  # lanes of the row
                in_row = in_row | cute.arch.shuffle_sync_bfly(in_row, distance)
                highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, distance))
            before = sums.rMax[r]
            base, factor, shift = before, Float32(1.0), Float32(0.0)
            if cutlass.const_expr(self.keeps_scores):
                base = cutlass.select_(in_row != 0, highest, before)
                factor = ptx.exp2_approx((before - base) * scale[r])
                factor = cutlass.select_(before == base, Float32(1.0), factor)
            else:
                moves = in_row != 0 and highest > -Float32.inf
                unit = self.log2_unit(before, scale[r])
                base = cutlass.select_(moves, (highest + unit) * ptx.rcp_approx(scale[r]), before)
                shift = cutlass.select_(moves, self.log2_unit(base, scale[r]) - unit, Float32(0.0))
                factor = ptx.exp2_approx(cutlass.select_(before == -Float32.inf, Float32(0.0), -shift))
            sums.rMax[r] = base
            sums.rSum[r] *= factor
            for i in cutlass.range_constexpr(self.output_dims // 4):
                sums.rOut[4 * (i // 2) + 2 * r + i % 2] *= factor
            for n in cutlass.range_constexpr(0 if self.keeps_scores else self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    rScore[4 * n + 2 * r + e] -= shift

    @cute.jit
    def rescale(self, rOut, rFactor):
        needed = cute.arch.vote_any_sync(rFactor[0] != 1.0 or rFactor[1] != 1.0)
        for _ in cutlass.range(once_if(needed), unroll=1):
            for i in cutlass.range_constexpr(self.output_dims // 2):
                rOut[i] *= rFactor[i // 2 % 2]
