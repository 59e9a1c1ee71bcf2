"""Attention of many queries, for prompts: dense, packed, and over paged or contiguous caches; compute-bound.

A thread block takes a tile of queries of one head, 16 or 32 rows a warp, and visits the tiles of 64 keys that any of
them sees. cp.async fills one pipeline stage of keys and values while mma.sync works on the other; the lanes of a warp
look up the pages of the rows that it loads. Scores, weights and sums stay in registers (FlashAttention-2, arXiv
2307.08691). Blocks with most keys start first. A row's result does not depend on the tile that it is in: a tile whose
keys it does not see leaves its sums as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, pdl, ptx

from . import scores
from .formats import E4m3, E5m2
from .parameters import PrefillScalars, PrefillTensors
from .scores import LOG2_E, RESCALE_SLACK


class Keys(NamedTuple):
    """Where a sequence's keys and values lie."""

    table: Int64  # address of its row of the block table
    table_stride: Int64
    table_width: Int32
    has_block_table: Int32
    block: Int32  # that holds all keys where there is no table
    first_slot: Int32  # of its first key there
    num_blocks: Int32
    page_size: Int32
    multiplier: Uint32  # key // page_size is key * multiplier >> shift
    shift: Int32
    held: Int32  # keys that exist
    strides: Any  # of blocks and slots of K, of blocks and slots of V, in 16 bytes
    key_base: Int64  # address of the KV head
    value_base: Int64
    head_dim: Int32


class Visible(NamedTuple):
    """Which keys the rows of a warp see."""

    first: Int32  # all rows see the keys from first to last - 1, where these exist
    last: Int32
    prefix: Int32  # and those below it
    end: Int32  # no row sees a key from here on
    position: Int32  # of the warp's row 0
    held: Int32


class Scales(NamedTuple):
    """What a head's products are multiplied with."""

    query_signs: Uint32  # flips the signs of two queries
    softmax_scale: Float32  # positive, with the scales of FP8 queries and keys; with a soft cap, times 2 / softcap
    v_scale: Float32


@dataclass(frozen=True)
class Prefill:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]  # BFloat16 or Float16
    head_dim: int  # that is computed, a multiple of 16; a smaller one is padded
    key_tile: int  # keys of a tile: 32 or 64
    warps: int
    row_tiles: int  # of 16 rows, of a warp
    num_stages: int
    queries_in_registers: bool  # else read again for each tile of keys
    ctas_per_sm: int  # that the register count must allow
    pdl: bool
    codes: bool  # keys and values are FP8 codes, which become the dtype on their way from a stage to the tile
    by_bits: bool  # codes become f16 without the instruction, which sm_80 and sm_86 lack

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def warp_rows(self) -> int:
        return 16 * self.row_tiles

    @property
    def block_rows(self) -> int:
        return self.warps * self.warp_rows

    @property
    def units(self) -> int:
        """Of 16 bytes, in a row."""
        return self.head_dim // 8

    @property
    def row_bytes(self) -> int:
        return 2 * self.head_dim

    @property
    def loaded_rows(self) -> int:
        """Of a tile of keys, by one warp."""
        return self.key_tile // self.warps

    @property
    def tile_bytes(self) -> int:
        return self.key_tile * self.row_bytes

    @property
    def query_bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @property
    def stored_bytes(self) -> int:
        """Of an element of keys and values in memory."""
        return 1 if self.codes else 2

    @property
    def stored_units(self) -> int:
        """Of 16 bytes, in a row of keys or values in memory and in a stage."""
        return self.units // 2 if self.codes else self.units

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

    @property
    def swizzle_mask(self) -> int:
        """The bits of a unit that the swizzle changes: rows that are read together hit 32 banks."""
        return {0: 7, 4: 3}.get(self.units % 8, 1)

    # -- host -----------------------------------------------------------------------------------------------------

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with: PrefillTensors, PrefillScalars, and the stream."""
        head_dim, heads, kv_heads = (cute.sym_int() for _ in range(3))
        blocks, queries, kv_blocks, page = (cute.sym_int() for _ in range(4))
        stored, unit = (cutlass.Uint8, 16) if self.codes else (self.dtype, 8)
        mK, mV = (arguments.strided(stored, kv_blocks, page, kv_heads, head_dim, unit=unit) for _ in range(2))
        starts, lengths, prefix = ([arguments.any_strides(Int32, cute.sym_int()) for _ in range(2)] for _ in range(3))
        tensors = PrefillTensors(
            mQ=arguments.strided(self.dtype, blocks, queries, heads, head_dim, unit=8),
            mK=mK,
            mV=mV,
            mStartQ=starts[0],
            mStartK=starts[1],
            mLengths=lengths[0],
            mTable=arguments.any_strides(Int32, cute.sym_int(), cute.sym_int()),
            mPrefix=prefix[0],
            mSinks=arguments.any_strides(Float32, cute.sym_int()),
            mQScale=arguments.any_strides(Float32, cute.sym_int()),
            mKScale=arguments.any_strides(Float32, cute.sym_int()),
            mVScale=arguments.any_strides(Float32, cute.sym_int()),
            mOut=arguments.strided(self.dtype, blocks, queries, heads, head_dim, unit=8),
            mLse=arguments.contiguous(Float32, blocks, heads, queries, align=None),
        )
        return (*tensors, *parameters.compile_time(PrefillScalars), Int32(1), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillTensors._fields))
        tensors, scalars = PrefillTensors(*given[:num_tensors]), PrefillScalars(*given[num_tensors:-2])
        batch = given[-2]
        heads = tensors.mQ.shape[2]
        section = scalars.section_heads
        row_blocks = cute.ceil_div(scalars.max_queries, self.block_rows)
        self.kernel(tensors, scalars, row_blocks, batch).launch(
            grid=[section * row_blocks, heads // section, batch],
            block=[32 * self.warps, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=self.ctas_per_sm,
            smem=self.shared_bytes,
            preferred_smem_carveout=min(100, -(-100 * self.ctas_per_sm * (2048 + self.shared_bytes) // (228 * 1024))),
            use_pdl=self.pdl,
        )

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, tensors: PrefillTensors, scalars: PrefillScalars, row_blocks: Int32, batch: Int32):
        mQ, mK, mV = tensors.mQ, tensors.mK, tensors.mV
        tid, _, _ = cute.arch.thread_idx()
        in_section, section, sequence = cute.arch.block_idx()
        longest_first = divide(in_section, scalars.section_heads)
        head = section * scalars.section_heads + in_section - longest_first * scalars.section_heads
        row_block = row_blocks - 1 - longest_first
        kv_head = divide(head, scalars.group_size)
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()

        # The sequence: num_rows queries from row first_query of a block of mQ, and its keys.
        query_block, first_query, num_queries = sequence, Int32(0), scalars.max_queries
        if scalars.packed_queries != 0:
            query_block = Int32(0)
            first_query = tensors.mStartQ[sequence]
            num_queries = tensors.mStartQ[sequence + 1] - first_query
        length = scalars.max_keys
        block, first_slot, page_size = sequence, Int32(0), mK.shape[1]
        held = scalars.max_keys
        if scalars.key_starts != 0:
            start = tensors.mStartK[sequence]
            length = tensors.mStartK[sequence + 1] - start
            if scalars.key_starts == 1:
                block, first_slot = Int32(0), start
                held = cutlass.min(held, page_size - start)
        if scalars.has_lengths != 0:
            given = tensors.mLengths[sequence]
            if scalars.key_starts == 1:
                given = cutlass.min(given, length)
            appended = scalars.appended
            length = cutlass.select_(given < 0, given, cutlass.min(given, 0x7FFFFFFF - appended) + appended)
        held = cutlass.max(cutlass.min(held, length), 0)
        num_rows = cutlass.min(num_queries, cutlass.min(scalars.max_queries, mQ.shape[1] - first_query))
        if first_query < 0:
            num_rows = Int32(0)
        if first_slot < 0:
            held = Int32(0)
        prefix = scalars.prefix_len
        if scalars.has_prefix_lens != 0:
            prefix = tensors.mPrefix[sequence]
        prefix = cutlass.max(cutlass.min(prefix, held), 0)

        first_row = row_block * self.block_rows
        if first_row < num_rows:
            element = cutlass.const_expr(self.stored_bytes)
            strides = [Uint32(mX.stride[i] // (16 // element)) for mX in (mK, mV) for i in range(2)]
            head_bytes = element * Int64(kv_head)
            keys = Keys(
                table=tensors.mTable.iterator.toint() + 4 * Int64(sequence) * tensors.mTable.stride[0],
                table_stride=tensors.mTable.stride[1],
                table_width=tensors.mTable.shape[1],
                has_block_table=scalars.has_block_table,
                block=block,
                first_slot=first_slot,
                num_blocks=mK.shape[0],
                page_size=page_size,
                multiplier=scalars.page_multiplier,
                shift=scalars.page_shift,
                held=held,
                strides=strides,
                key_base=mK.iterator.toint() + head_bytes * mK.stride[2],
                value_base=mV.iterator.toint() + head_bytes * mV.stride[2],
                head_dim=mQ.shape[3],
            )
            query = Int64(query_block) * mQ.stride[0] + Int64(first_query + first_row) * mQ.stride[1]
            query = mQ.iterator.toint() + 2 * (query + Int64(head) * mQ.stride[2])
            rows = cutlass.min(num_rows - first_row, self.block_rows)
            position = length - num_queries + first_row  # of the block's first row
            row_of_out = first_query + first_row
            at_out = (query_block, row_of_out, head)
            self.attend(
                tensors,
                scalars,
                self.scales(tensors, scalars, head, kv_head),
                keys,
                prefix,
                query,
                rows,
                position,
                at_out,
            )
        if scalars.packed_queries != 0 and row_block == 0:
            # Rows that no sequence has: before the first, after this one.
            total = mQ.shape[1]
            if sequence == 0:
                self.clear_rows(tensors, Int32(0), cutlass.min(first_query, total), head, tid)
            behind = total
            if sequence + 1 < batch:
                behind = cutlass.min(first_query + num_queries, total)
            from_row = cutlass.max(first_query, 0) + cutlass.max(num_rows, 0)
            self.clear_rows(tensors, from_row, behind, head, tid)

    @cute.jit
    def scales(self, tensors: PrefillTensors, scalars: PrefillScalars, head, kv_head):
        """The scales of a head."""
        signs, softmax_scale, v_scale = scalars.query_signs, scalars.softmax_scale, Float32(1.0)
        if cutlass.const_expr(self.codes):
            product = Float32(1.0)
            if scalars.q_scale_heads > 0:
                product *= tensors.mQScale[cutlass.select_(scalars.q_scale_heads > 1, head, Int32(0))]
            if scalars.k_scale_heads > 0:
                product *= tensors.mKScale[cutlass.select_(scalars.k_scale_heads > 1, kv_head, Int32(0))]
            if scalars.v_scale_heads > 0:
                v_scale = tensors.mVScale[cutlass.select_(scalars.v_scale_heads > 1, kv_head, Int32(0))]
            signs = signs ^ cutlass.select_(product < 0.0, Uint32(0x80008000), Uint32(0))
            softmax_scale = ptx.fmax(
                softmax_scale * cutlass.select_(product < 0.0, -product, product), Float32(2.0**-126)
            )
        return Scales(signs, softmax_scale, v_scale)

    @cute.jit
    def clear_rows(self, tensors: PrefillTensors, first, end, head, tid):
        """Zeros, and an LSE of -inf, for packed rows first to end - 1 of a head."""
        mOut = tensors.mOut
        row = first
        while row < end:
            address = mOut.iterator.toint() + 2 * (Int64(row) * mOut.stride[1] + Int64(head) * mOut.stride[2])
            if 8 * tid < mOut.shape[3]:
                ptx.store_global(address + 16 * tid, [Uint32(0)] * 4)
            if tid == 0:
                tensors.mLse[0, head, row] = -Float32.inf
            row += 1

    @cute.jit
    def attend(self, tensors, scalars, scales: Scales, keys: Keys, prefix, query: Int64, rows, position, at_out):
        """One block. query: address of its first row; position: of that row; at_out: block, row, head of results."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        held = keys.held

        # The keys that any row sees: those below the prefix, and those from start to end - 1.
        start, _ = scores.window(position, scalars, held)
        _, end = scores.window(position + rows - 1, scalars, held)
        prefix_tiles = (prefix + self.key_tile - 1) // self.key_tile
        start_tile = cutlass.max(start // self.key_tile, prefix_tiles)
        gap = start_tile - prefix_tiles
        num_tiles = prefix_tiles + cutlass.max((end + self.key_tile - 1) // self.key_tile - start_tile, 0)

        warp_position = position + warp * self.warp_rows
        _, all_last = scores.window(warp_position, scalars, held)
        all_first, warp_end = scores.window(warp_position + self.warp_rows - 1, scalars, held)
        visible = Visible(all_first, all_last, prefix, cutlass.max(warp_end, prefix), warp_position, held)

        shared = Int32(cute.arch.get_dyn_smem(Float32, alignment=1024).toint())
        words = cutlass.const_expr(self.num_stages * self.warps)
        sExists = Int32(cute.arch.alloc_smem(Uint32, words, alignment=16).toint())

        rOut = cute.make_rmem_tensor(self.row_tiles * self.head_dim // 2, Float32)
        rMax = cute.make_rmem_tensor(2 * self.row_tiles, Float32)
        rSum = cute.make_rmem_tensor(2 * self.row_tiles, Float32)
        rScore = cute.make_rmem_tensor(self.row_tiles * self.key_tile // 2, Float32)
        rQ = cute.make_rmem_tensor(self.row_tiles * self.head_dim // 4, Uint32)
        rPage = cute.make_rmem_tensor(1, Int32)
        rOut.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)

        sQ = shared + self.query_offset
        self.load_queries(tensors.mQ, sQ, query, rows, tid)
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
            for k in cutlass.range_constexpr(self.head_dim // 16):
                for m in cutlass.range_constexpr(self.row_tiles):
                    words = self.read_queries(sQ, m, k, scales.query_signs, warp, lane)
                    for i in cutlass.range_constexpr(4):
                        rQ[(k * self.row_tiles + m) * 4 + i] = words[i]

        scale = cutlass.select_(scalars.softcap > 0.0, Float32(1.0), scales.softmax_scale * LOG2_E)
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
                self.mma_keys(sQ, sK, rQ, rScore, scales.query_signs, warp, lane)
                self.cap(rScore, scalars.softcap, scales.softmax_scale)
                self.mask(rScore, sExists + stage * (4 * self.warps), visible, scalars, first_key, lane)
                self.softmax(rScore, rMax, rSum, rOut, scale)
                self.mma_values(sK + self.tile_bytes, rScore, rOut, lane)
            tile = next_tile
            next_tile = after_next
            stage = next_stage
            n += 1
        ptx.cp_async_wait(0)
        cute.arch.sync_threads()
        self.epilogue(tensors, scalars, scales.v_scale, rOut, rMax, rSum, scale, shared, rows, at_out, warp, lane)

    # -- loads ----------------------------------------------------------------------------------------------------

    def swizzle(self, row):
        """The XOR of a row's units in shared memory."""
        return {7: row & 7, 3: row >> 1 & 3, 1: row >> 2 & 1}[self.swizzle_mask]

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
    def entry_and_slot(self, keys: Keys, key: Int32):
        """The table entry of a key and its slot in the page; exact for keys below 2^31."""
        entry = Uint32((Uint64(Uint32(key)) * Uint64(keys.multiplier)) >> Uint64(keys.shift))
        return entry, Uint32(key) - entry * Uint32(keys.page_size)

    @cute.jit
    def look_up(self, rPage, keys: Keys, tile, warp, lane):
        """Start loading the block of the key of a tile that a lane looks up; -1 where there is none."""
        key = tile * self.key_tile + warp * self.loaded_rows + lane % self.loaded_rows
        if keys.has_block_table != 0:
            entry, _ = self.entry_and_slot(keys, key)
            exists = key < keys.held and Int32(entry) < keys.table_width
            rPage[0] = Int32(ptx.load_global_if(exists, keys.table + 4 * Int64(entry) * keys.table_stride, -1))
        else:
            rPage[0] = cutlass.select_(key < keys.held, keys.block, Int32(-1))

    @cute.jit
    def load_tile(self, stage: Int32, sExists: Int32, rPage, keys: Keys, tile, warp, lane):
        """Start loading a tile's keys and values, of which each warp has its rows; zeros for those that do not exist.

        sExists: a word of each warp, with a bit for each of its rows.
        """
        key = tile * self.key_tile + warp * self.loaded_rows + lane % self.loaded_rows
        slot = Uint32(key + keys.first_slot)
        if keys.has_block_table != 0:
            _, slot = self.entry_and_slot(keys, key)
        exists = rPage[0] >= 0 and rPage[0] < keys.num_blocks
        block = cutlass.select_(exists, Uint32(rPage[0]), Uint32(0))
        slot = cutlass.select_(exists, slot, Uint32(0))
        key_offset = block * keys.strides[0] + slot * keys.strides[1]
        value_offset = block * keys.strides[2] + slot * keys.strides[3]
        bits = Uint32(cute.arch.vote_ballot_sync(exists)) & cutlass.const_expr((1 << self.loaded_rows) - 1)
        if lane == 0:
            ptx.store_shared(sExists + 4 * warp, [bits])
        units, row_bytes = cutlass.const_expr((self.stored_units, 16 * self.stored_units))
        lanes = cutlass.const_expr(1 << (units - 1).bit_length())  # of a row; those past its end load nothing
        lane = ptx.opaque(lane)  # addresses are computed for each tile, and take no registers in between
        row, unit = lane // lanes, lane % lanes
        wanted = cutlass.select_(16 // self.stored_bytes * unit < keys.head_dim, bits >> Uint32(row), Uint32(0))
        to = stage + (warp * self.loaded_rows + row) * row_bytes
        swizzled = unit if cutlass.const_expr(self.codes) else unit ^ self.swizzle(row)
        for of_values in cutlass.range_constexpr(2):
            base = (keys.value_base if cutlass.const_expr(of_values) else keys.key_base) + 16 * unit
            offset = value_offset if cutlass.const_expr(of_values) else key_offset
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
        """The codes of a stage as the dtype, exactly; each warp takes the rows that it has loaded."""
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

    @cute.jit
    def from_f16(self, pair: Uint32) -> Uint32:
        """Two f16 as the dtype, where it holds them."""
        if cutlass.const_expr(self.dtype is cutlass.Float16):
            return pair
        else:
            low, high = ptx.unpack_f32x2(pair, "f16")
            return ptx.pack_f32x2(low, high, "bf16")

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
        return [word ^ signs for word in words]

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
    def cap(self, rScore, softcap: Float32, softmax_scale: Float32):
        """The soft cap. Eight scores an iteration, and then the scores rotate: few registers are in use at once."""
        count = cutlass.const_expr(self.row_tiles * self.key_tile // 2)
        base2_cap, scale = softcap * LOG2_E, softmax_scale * LOG2_E
        iterations = ptx.opaque(cutlass.select_(softcap > 0.0, Int32(count // 8), Int32(0)))
        for _ in cutlass.range(iterations, unroll=1):
            capped = [scores.soft_cap_inline(rScore[i] * scale, base2_cap) for i in range(8)]
            for i in cutlass.range_constexpr(count - 8):
                rScore[i] = rScore[i + 8]
            for i in cutlass.range_constexpr(8):
                rScore[count - 8 + i] = capped[i]

    @cute.jit
    def mask(self, rScore, sExists: Int32, visible: Visible, scalars, first_key, lane):
        """-inf for keys of a tile that do not exist or that a row does not see."""
        words = [ptx.load_shared(sExists + 4 * i, 1)[0] for i in range(self.warps)]
        per_word = cutlass.const_expr(32 // self.loaded_rows)
        exists, all_exist = [], Uint32(0xFFFFFFFF)
        for h in cutlass.range_constexpr(self.key_tile // 32):
            word = words[h * per_word]
            for i in cutlass.range_constexpr(per_word - 1):
                word = word | (words[h * per_word + i + 1] << ((i + 1) * self.loaded_rows))
            exists.append(word)
            all_exist = all_exist & word
        unseen = first_key < visible.first or first_key + self.key_tile > visible.last
        unseen = unseen and first_key + self.key_tile > visible.prefix
        for zero in cutlass.range(once_if(unseen or all_exist != 0xFFFFFFFF), unroll=1):
            g, t = lane // 4, lane % 4
            before = first_key + 2 * t + zero  # what follows is not computed ahead, in registers
            for r in cutlass.range_constexpr(2 * self.row_tiles):
                first, last = scores.window(visible.position + zero + (g + 8 * r), scalars, visible.held)
                for h in cutlass.range_constexpr(self.key_tile // 32):
                    base = before + 32 * h
                    seen = bits_below(last - base) & ~bits_below(first - base) | bits_below(visible.prefix - base)
                    seen = seen & (exists[h] >> Uint32(2 * t + zero))
                    for n in cutlass.range_constexpr(4):
                        for e in cutlass.range_constexpr(2):
                            at = cutlass.const_expr(4 * (r // 2 * self.key_tile // 8 + 4 * h + n) + r % 2 * 2 + e)
                            bit = cutlass.const_expr(1 << (8 * n + e))
                            rScore[at] = cutlass.select_((seen & bit) != 0, rScore[at], -Float32.inf)

    @cute.jit
    def softmax(self, rScore, rMax, rSum, rOut, scale: Float32):
        """Scores become weights exp2(scale (score - base)), where the base is near the largest score so far."""
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

    # -- epilogue -------------------------------------------------------------------------------------------------

    @cute.jit
    def epilogue(self, tensors, scalars, v_scale, rOut, rMax, rSum, scale, shared: Int32, rows, at_out, warp, lane):
        """Store the LSE and, through shared memory, the normalised rows."""
        kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
        mOut = tensors.mOut
        block, first_row, head = at_out
        g, t = lane // 4, lane % 4
        shared = shared + warp * (self.warp_rows * self.row_bytes)
        sink = -Float32.inf
        if scalars.has_sinks != 0:
            sink = tensors.mSinks[head] * LOG2_E
        for r in cutlass.range_constexpr(2 * self.row_tiles):
            total = rSum[r]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            base = cutlass.select_(rMax[r] == -Float32.inf, Float32(0.0), rMax[r] * scale)
            share = Float32(1.0)
            if scalars.has_sinks != 0:
                highest = cutlass.select_(rMax[r] == -Float32.inf, sink, ptx.fmax(base, sink))
                highest = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
                share = ptx.exp2_approx(base - highest)
                total = total * share + ptx.exp2_approx(sink - highest)
                base = highest
            factor = cutlass.select_(total == 0.0, Float32(0.0), v_scale * (share / total))
            row = g + 8 * r
            warp_row = warp * self.warp_rows + row
            if t == 0 and warp_row < rows:
                tensors.mLse[block, head, first_row + warp_row] = (base + ptx.log2_approx(total)) * (1.0 / LOG2_E)
            for n in cutlass.range_constexpr(self.head_dim // 8):
                at = cutlass.const_expr(4 * (r // 2 * self.head_dim // 8 + n) + r % 2 * 2)
                word = ptx.pack_f32x2(rOut[at] * factor, rOut[at + 1] * factor, kind)
                ptx.store_shared(shared + row * self.row_bytes + (n ^ self.swizzle(row)) * 16 + 4 * t, [word])
        cute.arch.sync_warp()
        base_row = Int64(block) * mOut.stride[0] + Int64(head) * mOut.stride[2]
        count = cutlass.const_expr(self.warp_rows * self.units)
        for i in cutlass.range_constexpr(-(-count // 32)):
            index = lane + 32 * i
            row, unit = index // self.units, index % self.units
            warp_row = warp * self.warp_rows + row
            if warp_row < rows and 8 * unit < mOut.shape[3]:
                words = ptx.load_shared(shared + row * self.row_bytes + (unit ^ self.swizzle(row)) * 16, 4)
                to = base_row + Int64(first_row + warp_row) * mOut.stride[1] + 8 * unit
                ptx.store_global(mOut.iterator.toint() + 2 * to, words)


def once_if(condition) -> Int32:
    """How often a loop runs that stands for a branch, which the compiler would turn into predicated instructions."""
    return ptx.opaque(cutlass.select_(condition, Int32(1), Int32(0)))


def bits_below(count: Int32) -> Uint32:
    """The lowest ``count`` bits: none of a negative count, all from 32 on."""
    some = (Uint32(1) << Uint32(count & 31)) - 1
    return cutlass.select_(count < 0, Uint32(0), cutlass.select_(count > 31, Uint32(0xFFFFFFFF), some))


def divide(a: Int32, b: Int32) -> Int32:
    """a // b of non-negative integers."""
    return ptx.div_u32(Uint32(a), Uint32(b)).to(Int32)
