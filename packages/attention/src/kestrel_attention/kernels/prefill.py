"""Attention of many queries, for prompts: dense, packed, and over paged or contiguous caches; compute-bound.

A thread block processes a tile of queries of one head, 16 or 32 rows per warp, and visits the tiles of 64 keys that
any of them sees. cp.async fills one pipeline stage of keys and values while mma.sync works on the other; the lanes of a
warp look up the pages of the rows that it loads. Scores, weights and sums stay in registers (FlashAttention-2, arXiv
2307.08691). Blocks with the most keys start first. A row's result does not depend on its tile: a tile whose keys the
row does not see leaves its sums unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import numeric, pdl, ptx

from . import scores
from .constants import PAST_ALL_BLOCKS, WORK_COUNT
from .formats import E4m3, E5m2
from .parameters import PrefillScalars, PrefillTensors
from .prefill_base import PrefillBase, divide, once_if
from .prefill_types import Keys, OutputRows, Results, Sums, Visible, Work
from .scores import LOG2_E, RESCALE_SLACK

# Parameters of prefill_hopper.py alone. Their number moves ptxas: with these the kernel spills on sm_100.
TENSORS_OF_SPLITS = ("mNumSplits", "mWorks")
SCALARS_OF_SPLITS = (
    "has_device_numbers",
    "split_blocks",
    "partials_of_row",
    "partials_of_sequence",
    "section_multiplier",
    "section_shift",
    "head_multiplier",
    "head_shift",
)


@dataclass(frozen=True)
class Prefill(PrefillBase):
    """One compiled variant."""

    queries_in_registers: bool  # else read again for each tile of keys
    ctas_per_sm: int  # that the register count must allow
    by_bits: bool  # codes become f16 without the instruction, which sm_80 and sm_86 lack
    output_in_shared: bool  # where results go waits in shared memory, and takes no registers in the main loop

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def block_rows(self) -> int:
        return self.warps * self.warp_rows

    @property
    def query_bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        """Of a tile's keys and values as they are stored."""
        return 2 * self.key_tile * self.stored_units * 16

    @property
    def first_stage(self) -> int:
        """Offset of the stages in shared memory: behind the tile that codes become."""
        return 2 * self.tile_bytes if self.codes else 0

    @property
    def query_offset(self) -> int:
        """Of the queries in shared memory: where they go to registers, in what is not in use until then."""
        if self.queries_in_registers:
            return 0 if self.codes else (self.num_stages - 1) * self.stage_bytes
        return self.first_stage + self.num_stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return max(self.first_stage + self.num_stages * self.stage_bytes, self.query_offset + self.query_bytes)

    # -- host -----------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillTensors._fields))
        tensors, scalars = PrefillTensors(*given[:num_tensors]), PrefillScalars(*given[num_tensors:-2])
        batch = given[-2]
        heads = tensors.mQ.shape[2]
        section = scalars.section_heads
        works = tensors.mWorks.iterator.toint()
        tensors = tensors._replace(**dict.fromkeys(TENSORS_OF_SPLITS))
        scalars = scalars._replace(**dict.fromkeys(SCALARS_OF_SPLITS))
        row_blocks = cute.ceil_div(scalars.max_queries, self.block_rows)
        grid = [section * row_blocks, heads // section, batch]
        if scalars.listed_works > 0:
            grid = [section * scalars.listed_works, Int32(1), Int32(1)]
        self.kernel(tensors, scalars, works, row_blocks, batch).launch(
            grid=grid,
            block=[32 * self.warps, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=self.ctas_per_sm,
            smem=self.shared_bytes,
            preferred_smem_carveout=min(100, -(-100 * self.ctas_per_sm * (2048 + self.shared_bytes) // (228 * 1024))),
            use_pdl=self.pdl,
        )

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, tensors: PrefillTensors, scalars: PrefillScalars, works: Int64, row_blocks: Int32, batch: Int32):
        tid, _, _ = cute.arch.thread_idx()
        in_section, section, sequence = cute.arch.block_idx()
        longest_first = divide(in_section, scalars.section_heads)
        head = in_section - longest_first * scalars.section_heads
        row_block = row_blocks - 1 - longest_first
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        if scalars.listed_works > 0:
            row_block = Int32(PAST_ALL_BLOCKS)
            if longest_first < Int32(ptx.load_global(works + 4 * WORK_COUNT, 1)[0]):
                at = self.listed(works, scalars, longest_first, head, Int32(0))
                sequence, head, row_block = at.sequence, at.head, at.row_block
        else:
            head += section * scalars.section_heads
        kv_head = divide(head, scalars.group_size)
        if scalars.packed_queries != 0 and row_block == 0:  # ahead of the rest, which needs the registers
            self.clear_around(tensors, scalars, sequence, batch, head, tid)

        keys, length = self.keys_of(tensors, scalars, sequence, kv_head)
        first_row = row_block * self.block_rows
        work, query = self.work_of(tensors, scalars, sequence, head, kv_head, first_row, self.block_rows, keys, length)
        if work.rows > 0:
            self.attend(tensors, scalars, keys, work, query)

    @cute.jit
    def attend(self, tensors, scalars, keys: Keys, work: Work, query: Int64):
        """Attention of one block of rows. query: the address of its first row."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        prefix_tiles, gap, num_tiles = work.prefix_tiles, work.gap, work.num_tiles
        visible = self.visible_to_warp(scalars, keys, work, warp)
        shared = Int32(cute.arch.get_dyn_smem(Float32, alignment=1024).toint())
        words = cutlass.const_expr(self.num_stages * self.warps)
        sExists = Int32(cute.arch.alloc_smem(Uint32, words + 3, alignment=16).toint())
        sOutput = sExists + 4 * words
        if cutlass.const_expr(self.output_in_shared):
            self.keep_output(sOutput, work, tid)

        rOut = cute.make_rmem_tensor(self.row_tiles * self.head_dim // 2, Float32)
        rMax = cute.make_rmem_tensor(2 * self.row_tiles, Float32)
        rSum = cute.make_rmem_tensor(2 * self.row_tiles, Float32)
        sums = Sums(rOut, rMax, rSum)
        rScore = cute.make_rmem_tensor(self.row_tiles * self.key_tile // 2, Float32)
        rQ = cute.make_rmem_tensor(self.row_tiles * self.head_dim // 4, Uint32)
        rPage = cute.make_rmem_tensor(1, Int32)
        rOut.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)

        sQ = shared + self.query_offset
        self.load_queries(tensors.mQ, sQ, query, work.rows, tid)
        ptx.cp_async_commit()
        tile = cutlass.select_(prefix_tiles > 0, Int32(0), gap)
        if num_tiles > 0:
            self.look_up(rPage, keys, tile, warp, lane)
            self.load_tile(shared + self.first_stage, sExists, rPage, keys, tile, warp, lane)
        ptx.cp_async_commit()
        next_tile = cutlass.select_(prefix_tiles > 1, Int32(1), 1 + gap)
        if num_tiles > 1:
            self.look_up(rPage, keys, next_tile, warp, lane)
        if cutlass.const_expr(self.queries_in_registers):
            ptx.cp_async_wait(1)
            cute.arch.sync_threads()
            self.read_all_queries(sQ, rQ, work.query_signs, warp, lane)

        scale = cutlass.select_(scalars.softcap > 0.0, Float32(1.0), work.softmax_scale * LOG2_E)
        stage = Int32(0)
        n = Int32(0)
        while n < num_tiles:
            ptx.cp_async_wait(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.codes):
                stored = shared + self.first_stage + stage * self.stage_bytes
                self.decode_tile(stored, shared, scalars.codes_are_e5m2, warp, lane)
            next_stage = cutlass.select_(stage == self.num_stages - 1, Int32(0), stage + 1)
            if n + 1 < num_tiles:
                to = shared + self.first_stage + next_stage * self.stage_bytes
                self.load_tile(to, sExists + next_stage * (4 * self.warps), rPage, keys, next_tile, warp, lane)
            ptx.cp_async_commit()
            after_next = n + 2 + cutlass.select_(n + 2 < prefix_tiles, Int32(0), gap)
            if n + 2 < num_tiles:
                self.look_up(rPage, keys, after_next, warp, lane)
            if cutlass.const_expr(self.codes):
                cute.arch.sync_threads()
            first_key = tile * self.key_tile
            if first_key < visible.end:
                sK = shared
                if cutlass.const_expr(not self.codes):
                    sK = shared + stage * self.stage_bytes
                self.mma_keys(sQ, sK, rQ, rScore, work.query_signs, warp, lane)
                self.cap(rScore, scalars.softcap, [work.softmax_scale] * 2)
                self.mask(rScore, sExists + stage * (4 * self.warps), visible, scalars, first_key, lane)
                self.softmax(rScore, sums, scale)
                self.mma_values(sK + self.tile_bytes, rScore, rOut, lane)
            tile = next_tile
            next_tile = ptx.opaque(after_next)  # saves registers
            stage = next_stage
            n += 1
        ptx.cp_async_wait(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(not self.codes):  # the number of the warp takes no register in the main loop
            tid = ptx.opaque(tid)
            lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        at = OutputRows(block=work.out_block, first_row=work.out_row, head=work.head)
        if cutlass.const_expr(self.output_in_shared):
            at = self.output_rows(sOutput)
        results = Results(sums, [scale] * 2, work.v_scale, at, work.rows)
        self.epilogue(tensors, scalars, results, shared, warp, lane)

    @cute.jit
    def keep_output(self, sOutput: Int32, work: Work, tid):
        """Store where results go in shared memory."""
        if tid == 0:
            for i, word in enumerate((work.out_block, work.out_row, work.head)):
                ptx.store_shared(sOutput + 4 * i, [Uint32(word)])

    @cute.jit
    def output_rows(self, sOutput: Int32) -> OutputRows:
        """What keep_output has stored."""
        return OutputRows(*(Int32(ptx.load_shared(sOutput + 4 * i, 1)[0]) for i in range(3)))

    @cute.jit
    def visible_to_warp(self, scalars, keys: Keys, work: Work, warp):
        """The keys that the rows of a warp see."""
        held, prefix = keys.held, work.prefix
        warp_position = work.position + warp * self.warp_rows
        _, all_last = scores.window(warp_position, scalars, held)
        all_first, warp_end = scores.window(warp_position + self.warp_rows - 1, scalars, held)
        return Visible(all_first, all_last, prefix, cutlass.max(warp_end, prefix), warp_position, held)

    # -- loads ----------------------------------------------------------------------------------------------------

    @cute.jit
    def load_queries(self, mQ, sQ: Int32, query: Int64, rows, tid):
        """Start loading the block's rows; zeros past the last row and the last dim."""
        count = cutlass.const_expr(self.block_rows * self.units)
        threads = cutlass.const_expr(32 * self.warps)
        for i in cutlass.range_constexpr(-(-count // threads)):
            index = tid + i * threads
            row, unit = index // self.units, index % self.units
            exists = row < rows and 8 * unit < mQ.shape[3]
            source = query + 2 * Int64(cutlass.min(row, rows - 1)) * mQ.stride[1] + 16 * unit
            to = sQ + row * self.row_bytes + (unit ^ self.swizzle(row)) * 16
            if cutlass.const_expr(count % threads == 0):
                ptx.cp_async(to, source, 16, cutlass.select_(exists, Int32(16), Int32(0)))
            else:
                if index < count:
                    ptx.cp_async(to, source, 16, cutlass.select_(exists, Int32(16), Int32(0)))

    @cute.jit
    def load_tile(self, stage: Int32, sExists: Int32, rPage, keys: Keys, tile, warp, lane):
        """Start loading a tile's keys and values, of which each warp has its rows; zeros for those that do not exist.

        sExists: a word of each warp, with a bit for each of its rows.
        """
        found = self.locate(keys, rPage, tile, warp, lane)
        if lane == 0:
            ptx.store_shared(sExists + 4 * warp, [found.exists])
        units, row_bytes = cutlass.const_expr((self.stored_units, 16 * self.stored_units))
        lanes = cutlass.const_expr(1 << (units - 1).bit_length())  # of a row; those past its end load nothing
        lane = ptx.opaque(lane)  # addresses are computed for each tile, and take no registers in between
        row, unit = lane // lanes, lane % lanes
        wanted = cutlass.select_(16 // self.stored_bytes * unit < keys.head_dim, found.exists >> Uint32(row), Uint32(0))
        to = stage + (warp * self.loaded_rows + row) * row_bytes
        swizzled = unit if cutlass.const_expr(self.codes) else unit ^ self.swizzle(row)
        for of_values in cutlass.range_constexpr(2):
            base = (keys.value_base if cutlass.const_expr(of_values) else keys.key_base) + 16 * unit
            offset = found.value if cutlass.const_expr(of_values) else found.key
            for i in cutlass.range_constexpr(self.loaded_rows * lanes // 32):
                more = cutlass.const_expr(i * (32 // lanes))  # has no bit of row: the swizzle of both is that of each
                swizzle = cutlass.const_expr(0 if self.codes else self.swizzle(more))
                at = cute.arch.shuffle_sync(offset, row + more)
                source = base + Int64(at) * 16
                valid = cutlass.select_((wanted & (1 << more)) != 0, Int32(16), Int32(0))
                there = to + (swizzled ^ swizzle) * 16 + (of_values * self.stage_bytes // 2 + more * row_bytes)
                if cutlass.const_expr(lanes == units):
                    ptx.cp_async(there, source, 16, valid)
                else:
                    if unit < units:
                        ptx.cp_async(there, source, 16, valid)

    @cute.jit
    def decode_tile(self, stage: Int32, tile: Int32, e5m2: Int32, warp, lane):
        """Convert the codes of a stage to the dtype, exactly; each warp converts the rows that it has loaded."""
        if e5m2 != 0:
            self.decode_rows(stage, tile, E5m2(), warp, lane)
        else:
            self.decode_rows(stage, tile, E4m3(self.by_bits), warp, lane)

    @cute.jit
    def decode_rows(self, stage: Int32, tile: Int32, codes: cutlass.Constexpr, warp, lane):
        lanes = cutlass.const_expr(self.stored_units)  # of a row, a power of two
        lane = ptx.opaque(lane)  # as in load_tile
        row, unit = lane // lanes, lane % lanes
        stage = stage + (warp * self.loaded_rows + row) * (16 * lanes) + 16 * unit
        tile = tile + (warp * self.loaded_rows + row) * self.row_bytes
        second = unit >> 2 & 1  # lanes that store together hit 32 banks
        at = 2 * unit ^ self.swizzle(row) ^ second
        for of_values in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.loaded_rows * lanes // 32):
                more = cutlass.const_expr(i * (32 // lanes))
                offset = cutlass.const_expr(of_values * self.stage_bytes // 2 + more * 16 * lanes)
                halves = []
                loaded = ptx.load_shared(stage + offset, 4)
                for word in cutlass.range_constexpr(4):
                    for pair in codes.to_f16(loaded[word]):
                        halves.append(self.from_f16(pair))
                to = tile + cutlass.const_expr(of_values * self.tile_bytes + more * self.row_bytes)
                there = at ^ self.swizzle(more)
                one = [cutlass.select_(second != 0, halves[4 + k], halves[k]) for k in range(4)]
                other = [cutlass.select_(second != 0, halves[k], halves[4 + k]) for k in range(4)]
                ptx.store_shared(to + there * 16, one)
                ptx.store_shared(to + (there ^ 1) * 16, other)

    # -- matrix products ------------------------------------------------------------------------------------------

    @cute.jit
    def fragment(self, first_row: cutlass.Constexpr, unit: cutlass.Constexpr, across: cutlass.Constexpr, lane) -> Int32:
        """Offset of the row that a lane addresses for ldmatrix.x4 of 16 rows x 2 units from ``first_row`` and ``unit``.

        across: the matrices go along the units first, else along the rows.
        """
        matrix, in_matrix = lane // 8, lane % 8
        half, side = (matrix // 2, matrix % 2) if cutlass.const_expr(across) else (matrix % 2, matrix // 2)
        row = half * 8 + in_matrix
        low = cutlass.const_expr(unit & self.swizzle_mask)
        swizzled = low ^ (side ^ self.swizzle(row))
        return row * self.row_bytes + swizzled * 16 + cutlass.const_expr(first_row * self.row_bytes + (unit - low) * 16)

    @cute.jit
    def read_queries(self, sQ: Int32, m: cutlass.Constexpr, k: cutlass.Constexpr, signs: Uint32, warp, lane):
        """A of row tile m and dims 16 k.."""
        at = sQ + warp * (self.warp_rows * self.row_bytes) + self.fragment(16 * m, 2 * k, False, lane)
        words = ptx.ldmatrix_x4(at)
        return self.signed(words, signs)

    @cute.jit
    def read_all_queries(self, sQ: Int32, rQ, signs: Uint32, warp, lane):
        """The A operands of all dims, into registers."""
        for k in cutlass.range_constexpr(self.head_dim // 16):
            for m in cutlass.range_constexpr(self.row_tiles):
                words = self.read_queries(sQ, m, k, signs, warp, lane)
                for i in cutlass.range_constexpr(4):
                    rQ[(k * self.row_tiles + m) * 4 + i] = words[i]

    @cute.jit
    def mma_keys(self, sQ: Int32, sK: Int32, rQ, rScore, signs: Uint32, warp, lane):
        """Scores: element 4 (8 m + n) + i is that of row g + i // 2 * 8 of row tile m, key 8 n + 2 t + i % 2."""
        kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
        rScore.fill(0.0)
        for k in cutlass.range_constexpr(self.head_dim // 16):
            a = []
            for m in cutlass.range_constexpr(self.row_tiles):
                if cutlass.const_expr(self.queries_in_registers):
                    a.append([rQ[(k * self.row_tiles + m) * 4 + i] for i in range(4)])
                else:
                    a.append(self.read_queries(sQ, m, k, signs, warp, lane))
            for pair in cutlass.range_constexpr(self.key_tile // 16):
                b = ptx.ldmatrix_x4(sK + self.fragment(16 * pair, 2 * k, True, lane))
                for m in cutlass.range_constexpr(self.row_tiles):
                    for half in cutlass.range_constexpr(2):
                        at = cutlass.const_expr(4 * (m * self.key_tile // 8 + 2 * pair + half))
                        c = [rScore[at + i] for i in range(4)]
                        c = ptx.mma_m16n8k16(a[m], (b[2 * half], b[2 * half + 1]), c, kind)
                        for i in cutlass.range_constexpr(4):
                            rScore[at + i] = c[i]

    @cute.jit
    def mma_values(self, sV: Int32, rScore, rOut, lane):
        """Add weights times values to rOut, whose elements lie as those of rScore, with dims for keys."""
        kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
        for k in cutlass.range_constexpr(self.key_tile // 16):
            a = []
            for m in cutlass.range_constexpr(self.row_tiles):
                at = cutlass.const_expr(4 * (m * self.key_tile // 8 + 2 * k))
                a.append([ptx.pack_f32x2(rScore[at + 2 * i], rScore[at + 2 * i + 1], kind) for i in range(4)])
            for pair in cutlass.range_constexpr(self.head_dim // 16):
                b = ptx.ldmatrix_x4_trans(sV + self.fragment(16 * k, 2 * pair, False, lane))
                for m in cutlass.range_constexpr(self.row_tiles):
                    for half in cutlass.range_constexpr(2):
                        at = cutlass.const_expr(4 * (m * self.head_dim // 8 + 2 * pair + half))
                        c = [rOut[at + i] for i in range(4)]
                        c = ptx.mma_m16n8k16(a[m], (b[2 * half], b[2 * half + 1]), c, kind)
                        for i in cutlass.range_constexpr(4):
                            rOut[at + i] = c[i]

    # -- softmax --------------------------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, rScore, sums: Sums, scale: Float32):
        """Turn scores into weights exp2(scale (score - base)); the base is near the largest score so far."""
        rOut, rMax, rSum = sums
        rows = cutlass.const_expr(2 * self.row_tiles)
        largest, exceeds = [], []
        for r in cutlass.range_constexpr(rows):
            highest = rMax[r]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                at = cutlass.const_expr(4 * (r // 2 * self.key_tile // 8 + n) + r % 2 * 2)
                highest = ptx.fmax(highest, ptx.fmax(rScore[at], rScore[at + 1]))
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 1))
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 2))
            largest.append(highest)
            exceeds.append((highest - rMax[r]) * scale > RESCALE_SLACK)
        any_exceeds = exceeds[0]
        for r in cutlass.range_constexpr(rows - 1):
            any_exceeds = any_exceeds | exceeds[r + 1]
        for _ in cutlass.range(once_if(cute.arch.vote_any_sync(any_exceeds)), unroll=1):
            for r in cutlass.range_constexpr(rows):
                exceed = (largest[r] - rMax[r]) * scale > RESCALE_SLACK
                factor = ptx.exp2_approx((rMax[r] - largest[r]) * scale)
                factor = cutlass.select_(exceed, factor, Float32(1.0))
                rMax[r] = cutlass.select_(exceed, largest[r], rMax[r])
                rSum[r] *= factor
                for n in cutlass.range_constexpr(self.head_dim // 8):
                    at = cutlass.const_expr(4 * (r // 2 * self.head_dim // 8 + n) + r % 2 * 2)
                    rOut[at] *= factor
                    rOut[at + 1] *= factor
        for r in cutlass.range_constexpr(rows):
            base = cutlass.select_(rMax[r] == -Float32.inf, Float32(0.0), -(rMax[r] * scale))
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    at = cutlass.const_expr(4 * (r // 2 * self.key_tile // 8 + n) + r % 2 * 2 + e)
                    weight = ptx.exp2_approx(ptx.fma(rScore[at], scale, base))
                    rSum[r] += weight
                    rScore[at] = weight
