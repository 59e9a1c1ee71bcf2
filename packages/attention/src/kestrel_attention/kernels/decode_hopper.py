"""Decode of 16 or 32 rows on Hopper: keys and dims are the 64 rows of warpgroup products (wgmma), queries the columns.

Tiles are of 64 keys, 16 of each warp of a warpgroup. S' = K Q' and O' = V' P' take keys and values from registers, as
mma.sync does, and queries and weights from shared memory. A warpgroup has one base of its weights, so that it holds
results once: 32 dims in each warp. The warps agree on that base by a barrier that also says whether any score rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from kestrel_runtime.cute_dsl import hopper, ptx

from .constants import BLOCK_ROWS, TILE_KEYS
from .decode import Decode, Loads, Pages, Scoring, TailSource
from .decode_epilogue import Results, Rows
from .decode_loads import Split
from .scores import LOG2_E, RESCALE_SLACK, add_sink, finite, soft_cap
from .tile import ScoreScales, VisibleWords, WarpTiles

WARPGROUP_WARPS = 4
BLOCK_BYTES = 128  # of a row of a column block of queries or weights


@dsl_user_op
def stmatrix_x4_trans(address: Int32, words, *, loc=None, ip=None) -> None:
    """Four 8 x 8 matrices of 16-bit elements to shared memory; lane l addresses row l % 8 of matrix l // 8.

    Lane (g, t) = 4 g + t holds column g of each matrix, rows 2t and 2t + 1.
    """
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    ptx.assemble(text, "r,r,r,r,r,~{memory}", [Int32(address), *(Uint32(x) for x in words)], [], True, loc, ip)


@dsl_user_op
def any_of_barrier(barrier: Int32, threads: cutlass.Constexpr, value: Int32, *, loc=None, ip=None) -> Int32:
    """Wait until ``threads`` threads have arrived at a barrier; 1 if the value of one of them is not 0."""
    text = f"{{.reg .pred p, q; setp.ne.s32 q, $2, 0; bar.red.or.pred p, $1, {threads}, q; selp.s32 $0, 1, 0, p;}}"
    found = ptx.assemble(text, "=r,r,r,~{memory}", [Int32(barrier), Int32(value)], [T.i32()], True, loc, ip)
    return Int32(found[0])


@dataclass(frozen=True)
class WideTiles(WarpTiles):
    """Tiles of a warpgroup: 16 keys of each warp. Heads of 128."""

    key_stages: int = 0

    @property
    def value_stages(self) -> int:
        return self.num_stages - self.key_stages

    @property
    def warp_bytes(self) -> int:
        """A warp's share of the stages of its warpgroup; after the main loop, of its sums."""
        stages = (self.key_stages + self.value_stages) * self.stage_bytes
        return max(stages, self.row_blocks * self.sums_bytes // WARPGROUP_WARPS)

    @property
    def steps_ahead(self) -> int:
        return max(self.key_stages, self.value_stages - 1)

    @property
    def rows(self) -> int:
        return self.row_blocks * BLOCK_ROWS

    @property
    def weight_bytes(self) -> int:
        """Of the weights of 64 keys, in two terms."""
        return 2 * self.rows * BLOCK_BYTES

    @property
    def query_bytes(self) -> int:
        return self.rows * self.head_dim * 2

    @property
    def groups_behind(self) -> tuple[int, int]:
        """How many later groups of copies may be in flight when a step's keys, and its values, must have arrived."""
        order = [
            {(what, i)} for i in range(8) for what in "kv" if i < (self.key_stages, self.value_stages)[what == "v"]
        ]

        def behind(wanted):
            return len(order) - 1 - next(i for i, group in enumerate(order) if wanted in group)

        keys, values = 99, 99
        for s in range(16):
            keys = min(keys, behind(("k", s)))
            key, value = ("k", s + self.key_stages), ("v", s - 1 + self.value_stages)
            values = min(values, behind(("v", s)))
            order += [{key}, {("v", s + 1)}] if self.value_stages == 1 else [{key, value} if s else {key}]
        return keys, values

    def swizzle(self, of_values: bool, row):
        if of_values and self.units > 8:
            return row, row & 7
        return super().swizzle(of_values, row)

    @cute.jit
    def key_operands(self, stage_ptr, lane):
        """A of each product of 16 dims of a warp's keys."""
        words = cutlass.const_expr(self.key_bytes // 4)
        found = []
        for c in cutlass.range_constexpr(self.key_chunks):
            loaded = self.read_keys(stage_ptr, c, 0, lane)
            for i in cutlass.range_constexpr(self.key_products):
                found.append(self.format.key_operand(loaded, 0, words, i))
        return found

    @cute.jit
    def value_operands(self, part_ptr, w, lane):
        """A of the two products with 16 keys of a warp's 32 dims."""
        g, t = lane // 4, lane % 4
        if cutlass.const_expr(self.format.bits == 8):
            at = part_ptr + 2 * t * self.row_bytes + ((w * 32 + g * 4) ^ (t * 32))
            words = [ptx.load_shared(at + (k % 2 + k // 2 * 8) * self.row_bytes, 1)[0] for k in range(4)]
            return [self.format.value_operand(words, i) for i in range(2)]
        else:
            row = lane // 16 * 8 + lane % 8
            unit = 4 * w + lane // 8 % 2
            found = []
            for m in cutlass.range_constexpr(2):
                at = part_ptr + row * self.row_bytes + ((unit + 2 * m) ^ (lane % 8)) * 16
                found.append(ptx.ldmatrix_x4_trans(at))
            return found


@dataclass(frozen=True)
class DecodeWide(Decode):
    """One compiled variant."""

    tiles: WideTiles

    @property
    def warpgroups(self) -> int:
        return self.warps // WARPGROUP_WARPS

    @property
    def shared_bytes(self) -> int:
        """Stages, then weights of each warpgroup, then queries; aligned to 1024 bytes."""
        tiles = self.tiles
        return 1024 + self.warps * tiles.warp_bytes + self.warpgroups * tiles.weight_bytes + tiles.query_bytes

    @property
    def shared_carveout(self) -> int:
        block = 3072 + self.shared_bytes + self.warps * 2 * self.block_rows * 4
        return min(100, -(-100 * self.ctas_per_sm * block // (228 * 1024)))

    @cute.jit
    def stages_of(self, shared, warp):
        return (Int32(shared.toint()) + 1023) // 1024 * 1024 + warp * self.tiles.warp_bytes

    @cute.jit
    def region_of(self, stages, warp):
        """Of a warpgroup: from the address of a warp's share."""
        return stages - warp % WARPGROUP_WARPS * self.tiles.warp_bytes

    @cute.jit
    def prologue(self, stages, rPages, pages: Pages, base, split: Split, tile_idx, lane):
        tiles = self.tiles
        w = tile_idx % WARPGROUP_WARPS
        region = stages - w * tiles.warp_bytes
        rOffsets = [cute.make_rmem_tensor(tiles.offset_words, Uint32) for _ in range(tiles.steps_ahead + 1)]
        for step in cutlass.range_constexpr(max(tiles.key_stages, tiles.value_stages)):
            tile = tile_idx + step * tiles.step_tiles
            self.locate_keys(rPages[step], rOffsets[step], pages, split, tile, lane)
            if cutlass.const_expr(step < tiles.key_stages):
                self.load_keys(self.key_part(region, step, w), rOffsets[step], base, tile, split, lane)
                ptx.cp_async_commit()
            if cutlass.const_expr(step < tiles.value_stages):
                self.load_values(self.value_part(region, step, w), rOffsets[step], base, tile - w, split, lane)
                ptx.cp_async_commit()
        return rOffsets

    @cute.jit
    def key_part(self, region, stage, w):
        return region + (stage * WARPGROUP_WARPS + w) * self.tiles.stage_bytes

    @cute.jit
    def value_part(self, region, stage, w):
        return region + ((self.tiles.key_stages + stage) * WARPGROUP_WARPS + w) * self.tiles.stage_bytes

    @cute.jit
    def load_keys(self, part, rOffset, base, tile, split: Split, lane):
        if tile < split.num_tiles:
            self.tiles.load_tile(0, 0, part, rOffset, base, lane)

    @cute.jit
    def load_values(self, part, rOffset, base, first_tile, split: Split, lane):
        """Zeros where a key does not exist, also past the last tile of the warpgroup's 64 keys."""
        if first_tile < split.num_tiles:
            self.tiles.load_tile(1, 0, part, rOffset, base, lane)

    @cute.jit
    def attend(
        self, rQ, loads: Loads, rows: Rows, scoring: Scoring, results: Results, extra, tail: TailSource, warp, lane
    ):
        tiles = self.tiles
        region = self.region_of(loads.stages, warp)
        after = loads.stages - warp * tiles.warp_bytes + self.warps * tiles.warp_bytes
        weights = after + warp // WARPGROUP_WARPS * tiles.weight_bytes
        queries = after + self.warpgroups * tiles.weight_bytes
        given = []
        g, t = lane // 4, lane % 4
        for j in cutlass.range_constexpr(tiles.row_blocks):
            row_scale = self.convert_queries(rQ[j], None, extra)
            row_scales = [cute.arch.shuffle_sync(row_scale, t * 8 + 4 * e) for e in range(2)]
            scales = [finite(scoring.scale * x) for x in row_scales]
            given.append(ScoreScales(self.visible_of(scoring.sVisible, j), scales, scoring.softcap))
            if warp == j:
                for m in cutlass.range_constexpr(tiles.query_words):
                    product = cutlass.const_expr(m // 4 * 2 + m % 4 // 2)
                    unit = cutlass.const_expr(product % 4 * 2 + m % 2)
                    at = queries + product // 4 * (tiles.rows * BLOCK_BYTES) + (8 * j + g) * BLOCK_BYTES
                    ptx.store_shared(at + (unit ^ g) * 16 + 4 * t, [rQ[j][m]])
        hopper.fence_proxy_async()
        cute.arch.sync_threads()
        count = cutlass.const_expr(self.warps * self.block_rows)
        sMax = cute.make_tensor(cute.arch.alloc_smem(Float32, count, alignment=16), count)
        sSum = cute.make_tensor(cute.arch.alloc_smem(Float32, count, alignment=16), count)
        self.wide_loop(region, weights, queries, loads, given, sMax, sSum, warp, lane)
        cute.arch.sync_threads()
        self.wide_epilogue(
            loads.stages - warp * tiles.warp_bytes, sMax, sSum, scoring, rows, results, extra, warp, lane
        )

    @cute.jit
    def wide_loop(self, region, weights, queries, loads: Loads, scoring, sMax, sSum, warp, lane):
        tiles, base, split = self.tiles, loads.base, loads.split
        rOffsets, ahead = loads.rOffsets, self.tiles.steps_ahead
        row_blocks, kind = tiles.row_blocks, tiles.format.kind
        columns = cutlass.const_expr(4 * row_blocks)  # registers of one product
        w, barrier = warp % WARPGROUP_WARPS, 1 + warp // WARPGROUP_WARPS
        g, t = lane // 4, lane % 4
        keys_behind, values_behind = tiles.groups_behind
        rOut = [cute.make_rmem_tensor(8, Float32) for _ in range(row_blocks)]
        rMax = [cute.make_rmem_tensor(2, Float32) for _ in range(row_blocks)]
        rSum = [cute.make_rmem_tensor(2, Float32) for _ in range(row_blocks)]
        rScore = [cute.make_rmem_tensor(4, Float32) for _ in range(row_blocks)]
        for j in cutlass.range_constexpr(row_blocks):
            rOut[j].fill(0.0)
            rMax[j].fill(-Float32.inf)
            rSum[j].fill(0.0)
        rNextPages = loads.rPages[ahead]
        of_queries = hopper.descriptor(queries, BLOCK_BYTES, 0)
        of_weights = hopper.descriptor(weights, BLOCK_BYTES, 0)
        matrix, row = lane // 8, lane % 8
        store_at = weights + (matrix // 2 * 8 + row) * BLOCK_BYTES + ((2 * w + matrix % 2) ^ row) * 16
        first_tile = warp - w
        key_stage, value_stage, last_value_stage = Int32(0), Int32(0), Int32(0)
        while first_tile < split.num_tiles:
            tile_idx = first_tile + w
            # Scores
            ptx.cp_async_wait(keys_behind)
            cute.arch.sync_warp()
            key_part = self.key_part(region, key_stage, w)
            operands = tiles.key_operands(key_part, lane)
            cute.arch.sync_warp()
            hopper.wgmma_fence()
            found = None
            for p in cutlass.range_constexpr(len(operands)):
                b = of_queries + (p // 4 * (tiles.rows * BLOCK_BYTES) + p % 4 * 32) // 16
                found = hopper.wgmma(found, columns, operands[p], b, kind)
            hopper.wgmma_commit()
            hopper.wgmma_wait(0)
            found = hopper.ordered(found)
            for j in cutlass.range_constexpr(row_blocks):
                for i in cutlass.range_constexpr(4):
                    rScore[j][i] = found[4 * j + i] * scoring[j].scales[i % 2]
            if scoring[0].softcap > 0.0:
                for j in cutlass.range_constexpr(row_blocks):
                    for i in cutlass.range_constexpr(4):
                        rScore[j][i] = soft_cap(rScore[j][i], scoring[0].softcap)
            tiles.mask(rScore, rOffsets[0], scoring, split.start + tile_idx * TILE_KEYS, lane)
            largest, rises = [], False
            for j in cutlass.range_constexpr(row_blocks):
                of_rows = [ptx.fmax(rMax[j][e], ptx.fmax(rScore[j][e], rScore[j][2 + e])) for e in range(2)]
                largest.append(of_rows)
                above = of_rows[0] > rMax[j][0] + RESCALE_SLACK or of_rows[1] > rMax[j][1] + RESCALE_SLACK
                rises = above if cutlass.const_expr(j == 0) else rises or above
            # A barrier: all warps have read the values and the weights of the step before.
            if any_of_barrier(barrier, 128, cutlass.select_(rises, Int32(1), Int32(0))) != 0:
                self.rescale_warpgroup(largest, rMax, rSum, rOut, sMax, barrier, warp, lane)
            self.store_weights(rScore, rMax, rSum, store_at)
            hopper.fence_proxy_async()
            ptx.cp_async_wait(values_behind)
            hopper.named_barrier(barrier, 128)
            # Copies start behind the fence, which may wait for those before it.
            self.look_up(loads, rNextPages, rOffsets, tile_idx, lane)
            self.refill_keys(key_part, rOffsets, base, tile_idx, split, lane)
            if cutlass.const_expr(tiles.value_stages > 1):
                self.refill_values(region, last_value_stage, rOffsets, base, first_tile, w, split, lane)
            ptx.cp_async_commit()
            # Results
            values = [[rOut[j][4 * m + i] for j in range(row_blocks) for i in range(4)] for m in range(2)]
            part = self.value_part(region, value_stage, 0)
            operands = []
            if cutlass.const_expr(
                tiles.value_stages == 1
            ):  # all warps read the values before the next ones replace them
                for k in cutlass.range_constexpr(4):
                    operands.append(tiles.value_operands(part + k * tiles.stage_bytes, w, lane))
                hopper.named_barrier(barrier, 128)
                to = self.value_part(region, 0, w)
                self.load_values(to, rOffsets[1], base, first_tile + tiles.step_tiles, split, lane)
                ptx.cp_async_commit()
            for k in cutlass.range_constexpr(4):
                if cutlass.const_expr(tiles.value_stages > 1):
                    operands.append(tiles.value_operands(part + k * tiles.stage_bytes, w, lane))
                hopper.wgmma_fence()
                for term in cutlass.range_constexpr(2):
                    b = of_weights + (term * tiles.rows * BLOCK_BYTES + k * 32) // 16
                    for m in cutlass.range_constexpr(2):
                        values[m] = hopper.wgmma(values[m], columns, operands[k][m], b, kind)
            hopper.wgmma_commit()
            for i in cutlass.range_constexpr(ahead):
                for k in cutlass.range_constexpr(tiles.offset_words):
                    rOffsets[i][k] = rOffsets[i + 1][k]
            last_value_stage = value_stage
            key_stage = cutlass.select_(key_stage == tiles.key_stages - 1, Int32(0), key_stage + 1)
            value_stage = cutlass.select_(value_stage == tiles.value_stages - 1, Int32(0), value_stage + 1)
            hopper.wgmma_wait(0)
            for m in cutlass.range_constexpr(2):
                values[m] = hopper.ordered(values[m])
                for j in cutlass.range_constexpr(row_blocks):
                    for i in cutlass.range_constexpr(4):
                        rOut[j][4 * m + i] = values[m][4 * j + i]
            first_tile += tiles.step_tiles
        # Sums: rows of all dims, four adjacent ones in a unit whose place depends on the row.
        ptx.cp_async_wait(0)
        hopper.named_barrier(barrier, 128)
        for j in cutlass.range_constexpr(row_blocks):
            for e in cutlass.range_constexpr(2):
                total = rSum[j][e]
                for distance in cutlass.range_constexpr(3):
                    total += cute.arch.shuffle_sync_bfly(total, 4 << distance)
                of_row = 8 * j + 2 * t + e
                if g == 0:
                    sMax[warp * self.block_rows + of_row] = rMax[j][e]
                    sSum[warp * self.block_rows + of_row] = total
                to = region + of_row * (4 * tiles.head_dim)
                if cutlass.const_expr(tiles.format.bits == 8):
                    four = [ptx.float_as_int(rOut[j][2 * i + e]) for i in range(4)]
                    ptx.store_shared(to + ((8 * w + g) ^ (2 * t)) * 16, four)
                else:
                    for i in cutlass.range_constexpr(4):
                        unit = 8 * w + 2 * i + g // 4
                        word = [ptx.float_as_int(rOut[j][2 * i + e])]
                        ptx.store_shared(to + (unit ^ (2 * t)) * 16 + g % 4 * 4, word)

    @cute.jit
    def look_up(self, loads: Loads, rNextPages, rOffsets, tile_idx, lane):
        """Locate the keys of the furthest step that is loaded, and start looking up those of the one behind."""
        tiles, ahead = self.tiles, self.tiles.steps_ahead
        next_tile = tile_idx + ahead * tiles.step_tiles
        self.locate_keys(rNextPages, rOffsets[ahead], loads.pages, loads.split, next_tile, lane)
        entries = self.table_entries(loads.pages, loads.split.start, next_tile + tiles.step_tiles, lane)
        self.load_pages(rNextPages, loads.pages, entries, loads.split.end)

    @cute.jit
    def refill_keys(self, part, rOffsets, base, tile_idx, split: Split, lane):
        tiles = self.tiles
        tile = tile_idx + tiles.key_stages * tiles.step_tiles
        self.load_keys(part, rOffsets[tiles.key_stages], base, tile, split, lane)

    @cute.jit
    def refill_values(self, region, last_stage, rOffsets, base, first_tile, w, split: Split, lane):
        """Of the stage that the step before has read; not in the first step."""
        tiles = self.tiles
        if first_tile >= self.warps:
            tile = first_tile + (tiles.value_stages - 1) * tiles.step_tiles
            part = self.value_part(region, last_stage, w)
            self.load_values(part, rOffsets[tiles.value_stages - 1], base, tile, split, lane)

    @cute.jit
    def store_weights(self, rScore, rMax, rSum, at):
        """Scores become weights, which are added to the sums and stored as two terms: 8 x 8 matrices, transposed."""
        tiles, kind = self.tiles, self.tiles.format.kind
        terms = [[], []]
        for j in cutlass.range_constexpr(tiles.row_blocks):
            base = [cutlass.select_(rMax[j][e] == -Float32.inf, Float32(0.0), rMax[j][e]) for e in range(2)]
            for half in cutlass.range_constexpr(2):
                x, y = [ptx.exp2_approx(rScore[j][2 * half + e] - base[e]) for e in range(2)]
                rSum[j][0] += x
                rSum[j][1] += y
                pair = ptx.pack_f32x2(x, y, kind)
                low, high = ptx.unpack_f32x2(pair, kind)
                terms[0].append(pair)
                terms[1].append(ptx.pack_f32x2(x - low, y - high, kind))
        for term in cutlass.range_constexpr(2):
            for two in cutlass.range_constexpr(tiles.row_blocks // 2):
                to = at + (term * tiles.rows + 16 * two) * BLOCK_BYTES
                stmatrix_x4_trans(to, terms[term][4 * two : 4 * two + 4])

    @cute.jit
    def rescale_warpgroup(self, largest, rMax, rSum, rOut, sMax, barrier, warp, lane):
        """Make the largest score of all warps the base, and rescale the sums so far to it."""
        g, t = lane // 4, lane % 4
        for j in cutlass.range_constexpr(self.tiles.row_blocks):
            for e in cutlass.range_constexpr(2):
                highest = largest[j][e]
                for distance in cutlass.range_constexpr(3):
                    highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 4 << distance))
                if g == 0:
                    sMax[warp * self.block_rows + 8 * j + 2 * t + e] = highest
        hopper.named_barrier(barrier, 128)
        for j in cutlass.range_constexpr(self.tiles.row_blocks):
            for e in cutlass.range_constexpr(2):
                highest = rMax[j][e]
                for other in cutlass.range_constexpr(WARPGROUP_WARPS):
                    first = warp // WARPGROUP_WARPS * WARPGROUP_WARPS + other
                    highest = ptx.fmax(highest, sMax[first * self.block_rows + 8 * j + 2 * t + e])
                new = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
                factor = ptx.exp2_approx(rMax[j][e] - new)
                rSum[j][e] *= factor
                for i in cutlass.range_constexpr(4):
                    rOut[j][2 * i + e] *= factor
                rMax[j][e] = highest

    @cute.jit
    def wide_epilogue(self, stages, sMax, sSum, scoring: Scoring, rows: Rows, results: Results, extra, warp, lane):
        """Add the sums of the warpgroups in order, a row in each warp, and store results or partial results."""
        tiles = self.tiles
        v_scale = Float32(1.0)
        if results.v_scale_heads > 0:
            v_scale = results.mVScale[cutlass.select_(results.v_scale_heads > 1, rows.kv_head, Int32(0))]
        row = warp
        while row < rows.count:
            sVisible = self.visible_of(scoring.sVisible, row // BLOCK_ROWS)
            num_splits, partial = sVisible[VisibleWords.NUM_SPLITS], sVisible[VisibleWords.PARTIAL]
            largest = -Float32.inf
            for wg in cutlass.range_constexpr(self.warpgroups):
                largest = ptx.fmax(largest, sMax[wg * WARPGROUP_WARPS * self.block_rows + row])
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            total, four = Float32(0.0), [Float32(0.0)] * 4
            for wg in cutlass.range_constexpr(self.warpgroups):
                weight = ptx.exp2_approx(sMax[wg * WARPGROUP_WARPS * self.block_rows + row] - base)
                for w in cutlass.range_constexpr(WARPGROUP_WARPS):
                    total = ptx.fma(weight, sSum[(wg * WARPGROUP_WARPS + w) * self.block_rows + row], total)
                at = stages + wg * (WARPGROUP_WARPS * tiles.warp_bytes) + row * (4 * tiles.head_dim)
                words = ptx.load_shared(at + (lane ^ (row // 2 % 4 * 2)) * 16, 4)
                four = [ptx.fma(weight, ptx.int_as_float(Int32(words[k])), four[k]) for k in range(4)]
            factor = cutlass.select_(total == 0.0, Float32(0.0), v_scale / total)
            lse = largest * (1.0 / LOG2_E) + ptx.log2_approx(total) * (1.0 / LOG2_E)
            four = [x * factor for x in four]
            packed_row = rows.first + row
            query = self.query_of(packed_row, rows)
            head = rows.kv_head * rows.group_size + packed_row - query * rows.group_size
            partial_row = partial * BLOCK_ROWS + row % BLOCK_ROWS
            mOut = results.mOut
            if num_splits == 1:
                if results.has_sinks != 0:
                    share, lse = add_sink(lse, results.mSinks[head])
                    four = [x * share for x in four]
                out_row = ((Int64(rows.sequence) * mOut.shape[1] + query) * mOut.shape[2] + head) * tiles.head_dim
                ptx.store_global(mOut.iterator.toint() + 2 * (out_row + 4 * lane), self.rounded(four, extra))
                if lane == 0:
                    results.mLse[rows.sequence, head, query] = lse
            else:
                address = results.mPartialOut.iterator.toint() + 4 * (Int64(partial_row) * tiles.head_dim + 4 * lane)
                ptx.store_global(address, [ptx.float_as_int(x) for x in four])
                if lane == 0:
                    results.mPartialLse[partial_row] = lse
            row += self.warps
