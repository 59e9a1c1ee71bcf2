"""Split-KV attention of few queries over a KV cache, for decoding: memory-bound, so it is built around loads.

A thread block processes up to 8 rows (queries x heads of one KV head) of one sequence over one split of its keys
(splits.py); a wide one several such row blocks, for which it reads the keys once. The warps of a split find the keys
(decode_loads.py) and stream tiles of 16, in turn, through private pipeline stages (tile.py). Their sums, at the end,
are added in order through shared memory. A sequence of one split is then complete; of several, combine.py combines the
normalised partial results. Where a launch has about as many sequences as the GPU has SMs, a block processes all splits
of a sequence, a group of warps each, and combines them itself, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, pdl, portable, ptx

from . import scores, splits
from .constants import BLOCK_ROWS, INT4_PAGE, TILE_KEYS
from .decode_epilogue import DecodeEpilogue, Results, Rows, WarpSums
from .decode_loads import DecodeLoads, Pages, Split
from .formats import stored_type
from .parameters import DecodeScalars, DecodeTensors
from .scores import LOG2_E
from .tile import ScoreScales, VisibleWords, WarpTiles

split_keys = portable.compiled(splits.split_keys)


class SeenKeys(NamedTuple):
    """The keys of a sequence that the rows of a block see: those from start to end - 1, or a part of them."""

    held: Int32  # keys that the pages hold
    prefix: Int32  # all rows see the keys below it,
    all_first: Int32  # and those from all_first to all_last - 1
    all_last: Int32
    oldest: Int32  # the position of query 0
    start: Int32
    end: Int32


class Scoring(NamedTuple):
    """How products of queries and keys become base-2 scores, but for the queries' own scales."""

    sVisible: cute.Tensor  # of each row block, laid out by VisibleWords
    scale: Float32
    softcap: Float32  # 0: none


class TailSource(NamedTuple):
    """What the scores of an unfinished page are computed from."""

    row: Any  # what the format's tail_of returns; None without a tail
    rows_ptr: Any  # what its tail_memory returns


class Loads(NamedTuple):
    """What the main loop loads, and where from and to."""

    shared: cute.Tensor  # dynamic shared memory of the block: the stages of all warps
    stages: Int32  # the warp's first stage
    rPages: Any  # page of each look-up of the lane, for the prologue's steps and the next
    rOffsets: Any  # offsets of each step in flight
    pages: Pages
    base: Any  # what cache_base of the tiles returns
    split: Split


@dataclass(frozen=True)
class Decode(DecodeLoads, DecodeEpilogue):
    """One compiled variant."""

    dtype: type[cutlass.Numeric]  # of queries and results: BFloat16 or Float16
    splits_per_block: int  # 1, or the most splits that a sequence of the launch has
    tiles: WarpTiles
    ctas_per_sm: int  # that the register count must allow
    pdl: bool
    copies_queries: bool = False  # to shared memory, as they are; otherwise each warp loads them into registers

    @property
    def warps(self) -> int:
        return self.splits_per_block * self.tiles.warps

    @property
    def block_rows(self) -> int:
        return BLOCK_ROWS * self.tiles.row_blocks

    @property
    def shared_bytes(self) -> int:
        """The stages of the warps; after the main loop, their sums."""
        return self.warps * self.tiles.warp_bytes

    @property
    def shared_carveout(self) -> int:
        """Percent of a multiprocessor's 228 KB that its CTAs need as shared memory; the rest is L1."""
        tiles = self.tiles
        block = 2048 + self.shared_bytes + self.warps * 2 * self.block_rows * 4
        block += tiles.row_blocks * tiles.queries_in_shared * tiles.operand_words * 128
        block += tiles.format.tail * (INT4_PAGE + BLOCK_ROWS) * 2 * tiles.head_dim
        return min(100, -(-100 * self.ctas_per_sm * block // (228 * 1024)))

    # -- host -----------------------------------------------------------------------------------------------------

    def arguments(self, cache: str) -> tuple[Any, ...]:
        """Arguments to compile with: DecodeTensors, DecodeScalars, those of the cache format, and the stream."""
        batch, queries, heads, head_dim, blocks, page, kv_heads = (cute.sym_int() for _ in range(7))
        stored = stored_type(cache, self.dtype)
        width = cute.sym_int() if cache == "int4" else head_dim
        mK, mV = (
            arguments.strided(stored, blocks, page, kv_heads, width, unit=numeric.vector_elements(stored))
            for _ in range(2)
        )
        mKScale, mVScale = (arguments.any_strides(Float32, cute.sym_int()) for _ in range(2))
        tensors = DecodeTensors(
            mQ=arguments.strided(self.dtype, batch, queries, heads, head_dim, unit=8),
            mK=mK,
            mV=mV,
            mLengths=arguments.any_strides(Int32, batch),
            mTable=arguments.any_strides(Int32, cute.sym_int(), cute.sym_int()),
            mKScale=mKScale,
            mVScale=mVScale,
            mPrefix=arguments.any_strides(Int32, cute.sym_int()),
            mSinks=arguments.any_strides(Float32, cute.sym_int()),
            mOut=arguments.contiguous(self.dtype, batch, queries, heads, head_dim),
            mLse=arguments.contiguous(Float32, batch, heads, queries),
            mPartialOut=arguments.contiguous(Float32, cute.sym_int64()),
            mPartialLse=arguments.any_strides(Float32, cute.sym_int()),
            mNumSplits=arguments.any_strides(Int32, cute.sym_int()),
        )
        extra: tuple[Any, ...] = ()
        if self.tiles.format.extra is not None:
            by_name: dict[str, Any] = {"is_bf16": Int32(0)}
            if cache == "int8":
                names = "mKeyScale", "mValueScale"
                by_name |= {name: arguments.any_strides(Float32, blocks, page, kv_heads) for name in names}
            elif cache == "int4":
                by_name |= int4_tensors(self.dtype, batch, blocks, page, kv_heads, head_dim)
            extra = self.tiles.format.extra(**by_name)
        return (*tensors, *parameters.compile_time(DecodeScalars), *extra, arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(DecodeTensors._fields))
        num_known = cutlass.const_expr(num_tensors + len(DecodeScalars._fields))
        tensors, scalars = DecodeTensors(*given[:num_tensors]), DecodeScalars(*given[num_tensors:num_known])
        extra = None
        if cutlass.const_expr(self.tiles.format.extra is not None):
            extra = self.tiles.format.extra(*given[num_known:-1])
        batch, queries, _, _ = tensors.mQ.shape
        blocks = cute.ceil_div(queries * scalars.group_size, self.block_rows)
        self.kernel(tensors, scalars, extra).launch(
            grid=[tensors.mK.shape[2], blocks if self.splits_per_block > 1 else scalars.num_splits * blocks, batch],
            block=[32 * self.warps, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=self.ctas_per_sm,
            smem=self.shared_bytes,
            preferred_smem_carveout=self.shared_carveout,
            use_pdl=self.pdl,
        )

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, tensors: DecodeTensors, scalars: DecodeScalars, extra):
        mQ, mK, mV = tensors.mQ, tensors.mK, tensors.mV
        tid, _, _ = cute.arch.thread_idx()
        kv_head, split_idx, sequence = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        queries, group_size = mQ.shape[1], scalars.group_size
        first_row = Int32(0)
        if cutlass.const_expr(self.splits_per_block > 1):
            first_row = split_idx * BLOCK_ROWS
            split_idx = warp // self.tiles.warps
        elif queries * group_size > self.block_rows:
            first_row = (Uint32(split_idx) // Uint32(scalars.num_splits)).to(Int32) * self.block_rows
            split_idx = (Uint32(split_idx) % Uint32(scalars.num_splits)).to(Int32)
        num_rows = cutlass.min(queries * group_size - first_row, self.block_rows)
        row_block = sequence * (mK.shape[2] * ((queries * group_size + BLOCK_ROWS - 1) // BLOCK_ROWS))
        row_block += first_row // BLOCK_ROWS * mK.shape[2] + kv_head
        rows = Rows(sequence, kv_head, first_row, num_rows, group_size, scalars.inverse_group_size)
        # Loads that do not depend on the length come first: the queries, and the pages that a full sequence starts at.
        pages = self.pages_of(tensors, scalars, extra, sequence, kv_head, lane)
        base = self.tiles.cache_base(mK, mV, extra, kv_head, lane)
        length_address = tensors.mLengths.iterator.toint() + 4 * Int64(sequence) * tensors.mLengths.stride[0]
        expected_start = scalars.expected_start + split_idx * scalars.expected_split_keys
        tile_idx = warp % self.tiles.warps * self.tiles.warp_stride
        steps = cutlass.const_expr(self.tiles.steps_ahead + 1)
        rPages = [cute.make_rmem_tensor(self.tiles.lookups, Int32) for _ in range(steps)]
        parts = [self.row_block_of(rows, j) for j in range(self.tiles.row_blocks)]
        rQ = [cute.make_rmem_tensor(self.tiles.query_words, Uint32) for _ in parts]
        step = cutlass.const_expr(self.tiles.step_tiles)
        entries = [self.table_entries(pages, expected_start, tile_idx + i * step, lane) for i in range(steps)]
        query_addresses = [self.query_address(mQ, part, lane) for part in parts]
        if cutlass.const_expr(self.pdl):
            self.wait_and_trigger(scalars, length_address, query_addresses, entries, warp, lane)
        length = Int32(ptx.load_global(length_address, 1)[0])
        for i in cutlass.range_constexpr(steps):
            self.load_pages(rPages[i], pages, entries[i], scalars.capacity)
        prefix = scalars.prefix_len
        if scalars.has_prefix_lens != 0:
            prefix = tensors.mPrefix[sequence]
        if cutlass.const_expr(not self.copies_queries):
            for j in cutlass.range_constexpr(self.tiles.row_blocks):
                self.load_queries(mQ, rQ[j], query_addresses[j], parts[j].count, lane)
        tail_row = None
        if cutlass.const_expr(self.tiles.format.tail):
            length, tail_row = self.tiles.format.tail_of(extra, sequence, kv_head, length, scalars.appended)

        seen = self.seen_keys(scalars, rows, length, prefix, queries)
        start, end = seen.start, seen.end
        granularity = cutlass.const_expr(self.tiles.format.split_granularity)
        visited = cutlass.max(end - start, 0)
        keys = cutlass.max(visited, 1)  # of a split
        if scalars.num_splits > 1:
            rule = splits.SplitRule(*(getattr(scalars, field) for field in splits.SplitRule._fields))
            keys = split_keys(visited, rule, granularity, cutlass.select_, Int64, divide)
            start = start + split_idx * keys
            end = cutlass.min(end, start + keys)
        if cutlass.const_expr(self.splits_per_block > 1) or split_idx == 0 or start < end:
            # The first loads start before anything else is computed.
            if start != expected_start:
                for i in cutlass.range_constexpr(steps):
                    self.load_pages(rPages[i], pages, self.table_entries(pages, start, tile_idx + i * step, lane), end)
            copied = [None for _ in parts]
            if cutlass.const_expr(self.copies_queries):
                for j in cutlass.range_constexpr(self.tiles.row_blocks):
                    copied[j] = self.copy_queries(mQ, query_addresses[j], parts[j].count, warp, lane)
                ptx.cp_async_commit()
            shared = cute.arch.get_dyn_smem(Float32, alignment=128)
            stages = self.stages_of(shared, warp)
            split = Split(start, end, (cutlass.max(end - start, 0) + TILE_KEYS - 1) // TILE_KEYS)
            tail_ptr = None
            if cutlass.const_expr(self.tiles.format.tail):
                tail_ptr = self.tiles.format.tail_memory(self.tiles)
                self.tiles.format.load_tail(self.tiles, tail_ptr, tail_row, query_addresses[0], start, end, warp, lane)
            rOffsets = self.prologue(stages, rPages, pages, base, split, tile_idx, lane)

            num_splits = Int32(1)
            if visited > keys:
                num_splits = divide(visited + keys - 1, keys)
            if cutlass.const_expr(self.tiles.row_blocks == 1):
                if split_idx == 0 and tid == 0 and scalars.num_splits > self.splits_per_block:
                    tensors.mNumSplits[row_block] = num_splits
            else:
                if split_idx == 0 and tid * BLOCK_ROWS < num_rows and scalars.num_splits > 1:
                    tensors.mNumSplits[row_block + tid * mK.shape[2]] = num_splits
            words = cutlass.const_expr(VisibleWords.COUNT * self.tiles.row_blocks)
            sVisible = cute.make_tensor(cute.arch.alloc_smem(Int32, words, alignment=16), words)
            all_rows, partial = queries * group_size, row_block * scalars.num_splits + split_idx
            partial_stride = mK.shape[2] * scalars.num_splits
            self.write_visible(sVisible, scalars, rows, seen, all_rows, num_splits, partial, partial_stride, tid)
            k_scale = Float32(1.0)
            if scalars.k_scale_heads > 0:
                k_scale = tensors.mKScale[cutlass.select_(scalars.k_scale_heads > 1, kv_head, Int32(0))]
            scale, softcap = scalars.softmax_scale * k_scale * LOG2_E, scalars.softcap * LOG2_E
            results = Results(
                tensors.mOut,
                tensors.mLse,
                tensors.mPartialOut,
                tensors.mPartialLse,
                tensors.mVScale,
                scalars.v_scale_heads,
                tensors.mSinks,
                scalars.has_sinks,
            )
            loads = Loads(shared, stages, rPages, rOffsets, pages, base, split)
            scoring, tail_source = Scoring(sVisible, scale, softcap), TailSource(tail_row, tail_ptr)
            self.attend(
                copied if self.copies_queries else rQ, loads, rows, scoring, results, extra, tail_source, warp, lane
            )

    @cute.jit
    def stages_of(self, shared, warp):
        """The address of a warp's first stage."""
        return Int32(shared.toint()) + warp * self.tiles.warp_bytes

    @cute.jit
    def row_block_of(self, rows: Rows, j):
        """The rows of row block j of a thread block: BLOCK_ROWS, or fewer."""
        if cutlass.const_expr(self.tiles.row_blocks == 1):
            return rows
        else:
            count = cutlass.max(cutlass.min(rows.count - j * BLOCK_ROWS, BLOCK_ROWS), 0)
            first = cutlass.select_(count > 0, rows.first + j * BLOCK_ROWS, rows.first)  # of no rows, any that exists
            return rows._replace(first=first, count=count)

    @cute.jit
    def wait_and_trigger(self, scalars: DecodeScalars, length_address, query_addresses, entries, warp, lane):
        """The PDL wait, after all addresses of the first loads are computed and their lines prefetched into L2."""
        ready = length_address
        for address in query_addresses:
            ready = ready | address
        for i in cutlass.range_constexpr(len(entries)):
            for _, entry_address in entries[i]:
                ready = ready | entry_address
        if warp == 0:
            for address in query_addresses:
                ptx.prefetch_l2(address)
            if lane == 0:
                ptx.prefetch_l2(length_address)
        if scalars.has_block_table != 0 and entries[0][0][0] < scalars.capacity:
            ptx.prefetch_l2(entries[0][0][1])
        pdl.wait_after(ready)
        pdl.trigger()

    @cute.jit
    def seen_keys(self, scalars: DecodeScalars, rows: Rows, length, prefix, queries):
        """The keys that any row of the block sees. length: of the sequence, without the keys that the call appends."""
        appended = scalars.appended
        length = cutlass.select_(length < 0, Int32(0), cutlass.min(length, 0x7FFFFFFF - appended) + appended)
        held = cutlass.min(length, scalars.capacity)
        prefix = cutlass.min(prefix, held)
        oldest = length - queries  # the position of query 0
        start, all_last = scores.window(oldest + self.query_of(rows.first, rows), scalars, held)
        all_first, end = scores.window(oldest + self.query_of(rows.first + rows.count - 1, rows), scalars, held)
        if prefix > 0:
            start = Int32(0)
            end = cutlass.max(end, prefix)
        granularity = cutlass.const_expr(self.tiles.format.split_granularity)
        if cutlass.const_expr(granularity > TILE_KEYS):
            start = start // granularity * granularity
        return SeenKeys(held, prefix, all_first, all_last, oldest, start, end)

    @cute.jit
    def write_visible(
        self,
        sVisible,
        scalars: DecodeScalars,
        rows: Rows,
        seen: SeenKeys,
        all_rows,
        num_splits,
        partial,
        partial_stride,
        tid,
    ):
        """Write VisibleWords of each row block. all_rows: queries x heads of the KV head."""
        if tid < self.block_rows:
            row = cutlass.min(rows.first + self.row_of(tid), all_rows - 1)
            first, last = scores.window(seen.oldest + self.query_of(row, rows), scalars, seen.held)
            at, row_block = Int32(0), Int32(0)
            if cutlass.const_expr(self.tiles.row_blocks > 1):
                row_block = tid // BLOCK_ROWS
                at = row_block * VisibleWords.COUNT
                tid = tid % BLOCK_ROWS
            sVisible[at + VisibleWords.ROWS + 2 * tid] = first
            sVisible[at + VisibleWords.ROWS + 2 * tid + 1] = last
            if tid == 0:
                sVisible[at + VisibleWords.FIRST] = seen.all_first
                sVisible[at + VisibleWords.LAST] = seen.all_last
                sVisible[at + VisibleWords.PREFIX] = seen.prefix
                sVisible[at + VisibleWords.NUM_SPLITS] = num_splits
                sVisible[at + VisibleWords.PARTIAL] = partial + row_block * partial_stride

    @cute.jit
    def attend(
        self,
        rQ,
        loads: Loads,
        rows: Rows,
        scoring: Scoring,
        results: Results,
        extra,
        tail_source: TailSource,
        warp,
        lane,
    ):
        """The rows of a block over one split."""
        row_blocks = cutlass.const_expr(self.tiles.row_blocks)
        given, sQ, tail = [], [], None
        if cutlass.const_expr(self.copies_queries):
            ptx.cp_async_wait(self.tiles.num_stages)  # the copies of the stages are the newest groups
        for j in cutlass.range_constexpr(row_blocks):
            row_scale = Float32(1.0)
            if cutlass.const_expr(not self.copies_queries):
                rTerms = None
                if cutlass.const_expr(self.tiles.format.integer_queries):
                    rTerms = cute.make_rmem_tensor(self.tiles.operand_words, Uint32)
                row_scale = self.convert_queries(rQ[j], rTerms, extra)
            row_scales = [cute.arch.shuffle_sync(row_scale, lane % 4 * 8 + 4 * e) for e in range(2)]
            scales = [scores.finite(scoring.scale * row_scale) for row_scale in row_scales]
            given.append(ScoreScales(self.visible_of(scoring.sVisible, j), scales, scoring.softcap))
            if cutlass.const_expr(self.tiles.format.tail):
                inverse = [ptx.int_as_float((254 << 23) - ptx.float_as_int(row_scale)) for row_scale in row_scales]
                source = tail_source
                tail = self.tiles.format.park_tail(source.row, source.rows_ptr, inverse, extra.is_bf16, warp, lane)
            operand = rTerms if cutlass.const_expr(self.tiles.format.integer_queries) else rQ[j]
            sQ.append(self.share_queries(operand, j % self.tiles.warps, warp, lane))
        cute.arch.sync_threads()
        count = cutlass.const_expr(self.warps * self.block_rows)
        sMax = cute.make_tensor(cute.arch.alloc_smem(Float32, count, alignment=16), count)
        sSum = cute.make_tensor(cute.arch.alloc_smem(Float32, count, alignment=16), count)
        sums = WarpSums(cute.make_tensor(loads.shared, self.shared_bytes // 4), sMax, sSum)
        state = self.tiles.format.step_state(self.tiles, self.warps, warp, lane)
        self.main_loop(sQ, loads, given, sums, rows, state, tail, warp, lane)
        cute.arch.sync_threads()
        if cutlass.const_expr(row_blocks == 1):
            self.store_results(Int32(0), scoring.sVisible, sums, rows, results, extra, warp, lane)
        else:
            for j in cutlass.range((rows.count + BLOCK_ROWS - 1) // BLOCK_ROWS, unroll=1):
                self.store_results(j, scoring.sVisible, sums, rows, results, extra, warp, lane)

    @cute.jit
    def store_results(self, j, sVisible, sums: WarpSums, rows: Rows, results: Results, extra, warp, lane):
        """The epilogue of one row block."""
        sVisible = self.visible_of(sVisible, j)
        num_splits, partial = sVisible[VisibleWords.NUM_SPLITS], sVisible[VisibleWords.PARTIAL]
        own, rows = self.sums_of(sums, j), self.row_block_of(rows, j)
        self.epilogue(own, num_splits, partial, rows, results, extra, warp, lane)

    @cute.jit
    def visible_of(self, sVisible, j):
        """The VisibleWords of row block j."""
        if cutlass.const_expr(self.tiles.row_blocks == 1):
            return sVisible
        else:
            return cute.make_tensor(sVisible.iterator + j * VisibleWords.COUNT, VisibleWords.COUNT)

    @cute.jit
    def sums_of(self, sums: WarpSums, j):
        """The sums of row block j."""
        if cutlass.const_expr(self.tiles.row_blocks == 1):
            return sums
        else:
            count = cutlass.const_expr(self.warps * BLOCK_ROWS)
            sMax, sSum = [cute.make_tensor(x.iterator + j * count, count) for x in (sums.sMax, sums.sSum)]
            sOut = cute.make_tensor(sums.sOut.iterator + j * (self.tiles.sums_bytes // 4), self.shared_bytes // 4)
            return WarpSums(sOut, sMax, sSum)

    @cute.jit
    def share_queries(self, rQ, storing_warp: cutlass.Constexpr, warp, lane):
        """The queries in shared memory where registers do not hold them; the caller synchronises."""
        if cutlass.const_expr(not self.tiles.queries_in_shared or self.copies_queries):
            return rQ
        else:
            fours = cutlass.const_expr(self.tiles.operand_words // 4)
            words = cute.arch.alloc_smem(Uint32, self.tiles.operand_words * 32, alignment=16)
            sQ = cute.make_tensor(words + lane * 4, cute.make_layout((4, fours), stride=(1, 128)))
            if warp == storing_warp:
                for i in cutlass.range_constexpr(fours):
                    cute.autovec_copy(cute.local_tile(rQ, (4,), (i,)), sQ[None, i])
            return sQ

    @cute.jit
    def prologue(self, stages, rPages, pages: Pages, base, split: Split, tile_idx, lane):
        """Fill the stages of a warp; returns the offsets of its first steps and registers for one more."""
        tiles = self.tiles
        rOffsets = [cute.make_rmem_tensor(tiles.offset_words, Uint32) for _ in range(tiles.steps_ahead + 1)]
        for i in cutlass.range_constexpr(tiles.num_stages):
            step, slice_idx = i // (2 * tiles.slices), i % (2 * tiles.slices)
            first_tile = tile_idx + step * tiles.step_tiles
            if cutlass.const_expr(slice_idx == 0):
                self.locate_keys(rPages[step], rOffsets[step], pages, split, first_tile, lane)
            stage_ptr = stages + i * tiles.stage_bytes
            tiles.load(slice_idx, stage_ptr, rOffsets[step], base, first_tile, split.num_tiles, lane)
        return rOffsets

    @cute.jit
    def main_loop(self, sQ, loads: Loads, scoring, sums: WarpSums, rows: Rows, state, tail, warp, lane):
        """The sums over a warp's tiles. A stage that was used is refilled with the slice ``num_stages`` further on.

        sQ, scoring: of each row block.
        """
        stages, pages, base, split = loads.stages, loads.pages, loads.base, loads.split
        rOffsets = loads.rOffsets
        tiles = self.tiles
        steps_ahead, num_stages, slices_per_step = tiles.steps_ahead, tiles.num_stages, 2 * tiles.slices
        row_blocks = range(tiles.row_blocks)
        rOut = [cute.make_rmem_tensor(4 * tiles.output_tiles, Float32) for _ in row_blocks]
        rMax = [cute.make_rmem_tensor(2, Float32) for _ in row_blocks]  # of rows 2t and 2t + 1
        rSum = [cute.make_rmem_tensor(tiles.format.sum_words, Float32) for _ in row_blocks]
        rScore = [cute.make_rmem_tensor(4 * tiles.tiles_per_step, Float32) for _ in row_blocks]
        rStart = [cute.make_rmem_tensor(2, Float32) for _ in row_blocks]
        rNextPages = loads.rPages[steps_ahead]
        for j in cutlass.range_constexpr(tiles.row_blocks):
            rStart[j].fill(0.0)
            rOut[j].fill(0.0)
            rMax[j].fill(-Float32.inf)
            rSum[j].fill(0.0)
        stage_ptr = stages
        tile_idx = warp % tiles.warps * tiles.warp_stride
        while tile_idx < split.num_tiles:
            next_tile = tile_idx + steps_ahead * tiles.step_tiles
            self.locate_keys(rNextPages, rOffsets[steps_ahead], pages, split, next_tile, lane)
            entries = self.table_entries(pages, split.start, tile_idx + (steps_ahead + 1) * tiles.step_tiles, lane)
            self.load_pages(rNextPages, pages, entries, split.end)
            sStepQ, step_scoring = [], []
            for j in cutlass.range_constexpr(tiles.row_blocks):
                scaled, page_scale = tiles.format.scale_queries(tiles, sQ[j], stage_ptr, rStart[j], state)
                of_step = scoring[j]
                if cutlass.const_expr(page_scale is not None):
                    if cutlass.const_expr(tail is not None):  # whose scores have no such factor
                        in_tail = split.start + tile_idx * TILE_KEYS >= tail.first_key
                        page_scale = cutlass.select_(in_tail, Float32(1.0), page_scale)
                    of_step = of_step._replace(scales=[scale * page_scale for scale in of_step.scales])
                sStepQ.append(scaled)
                step_scoring.append(of_step)
                for i in cutlass.range_constexpr(4 * tiles.tiles_per_step):
                    rScore[j][i] = rStart[j][i % 2]
            for slice_idx in cutlass.range_constexpr(slices_per_step):
                ptx.cp_async_wait(num_stages - 1)
                cute.arch.sync_warp()
                if cutlass.const_expr(slice_idx < tiles.slices):
                    tiles.mma_keys(slice_idx, stage_ptr, sStepQ, rScore, tile_idx, split.num_tiles, lane)
                    if cutlass.const_expr(tail is not None):
                        tiles.format.mma_tail(tiles, tail, rScore[0], split.start + tile_idx * TILE_KEYS, lane)
                else:
                    if cutlass.const_expr(slice_idx == tiles.slices):
                        tiles.softmax_step(
                            rScore, rOffsets[0], rMax, rSum, rOut, step_scoring, split.start, tile_idx, stage_ptr, lane
                        )
                    value_slice = cutlass.const_expr(slice_idx - tiles.slices)
                    tiles.mma_values(value_slice, stage_ptr, rScore, rOffsets[0], rOut, tile_idx, split.num_tiles, lane)
                cute.arch.sync_warp()
                step, refill = (slice_idx + num_stages) // slices_per_step, (slice_idx + num_stages) % slices_per_step
                refill_tile = tile_idx + step * tiles.step_tiles
                tiles.load(refill, stage_ptr, rOffsets[step], base, refill_tile, split.num_tiles, lane)
                last_stage = stages + (num_stages - 1) * tiles.stage_bytes
                stage_ptr = cutlass.select_(stage_ptr == last_stage, stages, stage_ptr + tiles.stage_bytes)
            for i in cutlass.range_constexpr(steps_ahead):
                for k in cutlass.range_constexpr(tiles.offset_words):
                    rOffsets[i][k] = rOffsets[i + 1][k]
            tile_idx += tiles.step_tiles
        for j in cutlass.range_constexpr(tiles.row_blocks):
            own = self.sums_of(sums, j)
            self.store_warp_sums(rOut[j], rMax[j], rSum[j], own, self.row_block_of(rows, j), warp, lane)


def divide(a: Int32, b: Int32) -> Int32:
    """a // b of non-negative integers."""
    return ptx.div_u32(Uint32(a), Uint32(b)).to(Int32)


def int4_tensors(dtype: Any, batch: Any, blocks: Any, page: Any, kv_heads: Any, head_dim: Any) -> dict[str, Any]:
    """The tensors of Int4Extra to compile with, by name."""
    channels = [arguments.strided(cutlass.Float16, blocks, kv_heads, head_dim, unit=8) for _ in range(2)]
    tokens = [arguments.any_strides(cutlass.Float16, blocks, page, kv_heads) for _ in range(2)]
    return {
        **dict(zip(("mKeyScale", "mKeyZero"), channels, strict=True)),
        **dict(zip(("mValueScale", "mValueZero"), tokens, strict=True)),
        "mTail": arguments.strided(dtype, cute.sym_int(), page, kv_heads, head_dim, unit=8),
        "mSequences": arguments.any_strides(Int32, batch),
    }
