"""Attention of few queries over a KV cache: each warp streams its own keys through shared memory.

Built for decoding, one query per sequence and 1 to 8 query heads per KV head. A sequence of L keys moves 2 L Hk D
elements of cache and takes 4 L H D operations: memory decides. 4.3 TB/s with 0.8 us of latency are 26 KB under way in
each multiprocessor; the slots of its warps hold 96 to 192 KB.

Work: a block takes up to 8 rows (queries x heads of one KV head) of one sequence, and one chunk of its keys. The chunk
is a function of the length that the sequence has on the device, and of arguments of the call. Tiles of 16 keys are
dealt into shares; a warp takes one share, or several one after the other, and waits for no other warp before the end.
There the shares meet in shared memory and are added in their order. A sequence of one chunk is then done; of several,
the chunks' normalised sums go to memory and combine.py joins them. Where as many sequences as multiprocessors are cut
into few chunks a block takes them all, a group of warps each, and joins them itself, with the same bits.

What a warp does with a tile is in tile.py. Scales of codes go into the scores and the result; bf16 queries over codes
are brought to f16's range by a power of two per row. What was predicted and measured is in the family's README.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from kestrel_runtime.cute_dsl import pdl, ptx

from .tile import ROWS, TILE, Tiles

LOG2_E = math.log2(math.e)


class Tensors(NamedTuple):
    """What a launch reads and writes; tensors that a call does not have stand for nothing, and any other is there."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mLengths: cute.Tensor
    mTable: cute.Tensor
    mKScale: cute.Tensor
    mVScale: cute.Tensor
    mPrefix: cute.Tensor
    mOut: cute.Tensor
    mLse: cute.Tensor
    mPartOut: cute.Tensor
    mPartLse: cute.Tensor
    mChunks: cute.Tensor


class Numbers(NamedTuple):
    """The arguments of a launch that are on the host."""

    paged: Int32
    room: Int32
    added: Int32
    page_inverse: Uint32
    page_shift: Int32
    group: Int32
    per_group: Float32
    k_scale_heads: Int32
    v_scale_heads: Int32
    prefix_given: Int32
    prefix: Int32
    left: Int32
    right: Int32
    scale: Float32  # with a soft cap, times 2 / softcap
    softcap: Float32
    whole: Int32  # sequences of so many keys are one chunk
    shorter: Int32  # keys of a chunk at least, of sequences of up to ``middle``
    middle: Int32
    shortest: Int32  # of longer ones
    most: Int32  # chunks
    slots: Int32  # chunks that a launch has blocks for
    guessed: Int32  # keys of a chunk of a sequence that fills its table
    guessed_start: Int32  # the first key that it sees


@dataclass(frozen=True)
class Decode:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]  # of queries and results: BFloat16 or Float16
    tiles: Tiles
    groups: int  # of warps, each with a chunk; one, or as many as the sequences of a launch may have chunks
    residents: int  # blocks that registers must allow on a multiprocessor
    dependent_launch: bool

    @property
    def warps(self) -> int:
        """Each with a share of its group's keys."""
        return self.groups * self.tiles.shares

    @property
    def shared_bytes(self) -> int:
        """The warps' slots; where these are used no more, their sums, and behind them a group's."""
        return self.warps * self.tiles.ring_bytes

    @property
    def units(self) -> int:
        """Of 32 dims of the even or of the odd rows, that a warp joins."""
        return -(-self.tiles.size // 16 // self.tiles.shares)

    @property
    def carveout(self) -> int:
        """Percent of a multiprocessor's 228 KB that the resident blocks need as shared memory; the rest is L1."""
        tiles = self.tiles
        block = 2048 + self.shared_bytes + self.warps * 2 * ROWS * 4
        block += tiles.queries_in_shared * tiles.query_words * 128
        return min(100, -(-100 * self.residents * block // (228 * 1024)))

    # -- host -----------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *given):
        """Given: the fields of Tensors, those of Numbers, more for some caches, and the stream."""
        count = cutlass.const_expr(len(Tensors._fields))
        both = cutlass.const_expr(count + len(Numbers._fields))
        tensors, numbers = Tensors(*given[:count]), Numbers(*given[count:both])
        more = None
        if cutlass.const_expr(self.tiles.cache.more is not None):
            more = self.tiles.cache.more(*given[both:-1])
        batch, queries, _, _ = tensors.mQ.shape
        blocks = cute.ceil_div(queries * numbers.group, ROWS)
        self.kernel(tensors, numbers, more).launch(
            grid=[tensors.mK.shape[2], blocks if self.groups > 1 else numbers.slots * blocks, batch],
            block=[32 * self.warps, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=self.residents,
            smem=self.shared_bytes,
            preferred_smem_carveout=self.carveout,
            use_pdl=self.dependent_launch,
        )

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, tensors: Tensors, n: Numbers, more):
        mQ, mK, mV, mLengths, mTable, mKScale, mVScale, mPrefix, mOut, mLse, mPartOut, mPartLse, mChunks = tensors
        tid, _, _ = cute.arch.thread_idx()
        kv_head, slot, sequence = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        queries = mQ.shape[1]
        first_row = Int32(0)
        if cutlass.const_expr(self.groups > 1):
            first_row = slot * ROWS
            slot = warp // self.tiles.shares
        elif queries * n.group > ROWS:
            first_row = (Uint32(slot) // Uint32(n.slots)).to(Int32) * ROWS
            slot = (Uint32(slot) % Uint32(n.slots)).to(Int32)
        rows = cutlass.min(queries * n.group - first_row, ROWS)
        block = sequence * (mK.shape[2] * ((queries * n.group + ROWS - 1) // ROWS))  # a number for these rows
        block += first_row // ROWS * mK.shape[2] + kv_head
        place = (sequence, kv_head, first_row, rows, n.group, n.per_group)
        # What does not depend on the length is asked for first: queries, and the first pages where it is known which.
        units = cutlass.const_expr(128 // mK.element_type.width)  # elements in 16 bytes, the unit of offsets
        strides = [Uint32(mX.stride[i] // units) for mX in (mK, mV) for i in range(2)]
        table = mTable.iterator.toint() + 4 * Int64(sequence) * mTable.stride[0]
        pages = (
            table,
            mTable.stride[1],
            sequence,
            n.paged,
            mK.shape[0],
            mK.shape[1],
            (n.page_inverse, n.page_shift),
            strides,
            self.tiles.cache.scales_at(more, self.tiles, kv_head, lane),
        )
        caches = self.tiles.addresses(mK, mV, more, kv_head, lane)
        length_at = mLengths.iterator.toint() + 4 * Int64(sequence) * mLengths.stride[0]
        guess = n.guessed_start + slot * n.guessed  # where the chunk starts, if the sequence fills its table
        x = warp % self.tiles.shares * self.tiles.share_tiles  # the first tile of the warp's share
        rPage = [cute.make_rmem_tensor(self.tiles.lookups, Int32) for _ in range(self.tiles.ahead + 1)]
        rQ = cute.make_rmem_tensor(self.tiles.query_words, Uint32)
        steps = cutlass.const_expr(self.tiles.ahead + 1)
        entries = [self.entries(pages, guess, x + i * self.tiles.step, lane) for i in range(steps)]
        query_at = self.query_row(mQ, place, lane)
        if cutlass.const_expr(self.dependent_launch):
            known = length_at | query_at
            for i in cutlass.range_constexpr(steps):
                for _, at in entries[i]:
                    known = known | at
            if warp == 0:
                ptx.prefetch_l2(query_at)
                if lane == 0:
                    ptx.prefetch_l2(length_at)
            if n.paged != 0 and entries[0][0][0] < n.room:
                ptx.prefetch_l2(entries[0][0][1])
            pdl.wait_after(known)
            pdl.trigger()
        length = Int32(ptx.load_global(length_at, 1)[0])
        for i in cutlass.range_constexpr(steps):
            self.look_up(rPage[i], pages, entries[i], n.room)
        prefix = n.prefix
        if n.prefix_given != 0:
            prefix = mPrefix[sequence]
        self.load_queries(mQ, rQ, query_at, rows, lane)
        tail = None
        if cutlass.const_expr(self.tiles.cache.tail):
            length, tail = self.tiles.cache.tail_of(more, sequence, kv_head, length, n.added)
            tail = (*tail, query_at, more.bf16)

        # The keys that any row sees: from start to end - 1. This block's chunk of them.
        length = cutlass.select_(length < 0, Int32(0), cutlass.min(length, 0x7FFFFFFF - n.added) + n.added)
        held = cutlass.min(length, n.room)
        prefix = cutlass.min(prefix, held)
        oldest = length - queries  # where query 0 stands
        start, all_last = self.seen(oldest + self.divide(first_row, n.per_group), n.left, n.right, held)
        all_first, end = self.seen(oldest + self.divide(first_row + rows - 1, n.per_group), n.left, n.right, held)
        if prefix > 0:
            start = Int32(0)
            end = cutlass.max(end, prefix)
        grain = cutlass.const_expr(self.tiles.cache.grain)
        if cutlass.const_expr(grain > TILE):
            start = start // grain * grain
        visited = cutlass.max(end - start, 0)
        chunk = cutlass.max(visited, 1)
        if n.slots > 1:
            chunk = self.chunk(visited, n)
            start = start + slot * chunk
            end = cutlass.min(end, start + chunk)
        if cutlass.const_expr(self.groups > 1) or slot == 0 or start < end:
            # Its first keys and values are asked for before anything else is worked out.
            if start != guess:
                for i in cutlass.range_constexpr(steps):
                    self.look_up(rPage[i], pages, self.entries(pages, start, x + i * self.tiles.step, lane), end)
            shared = cute.arch.get_dyn_smem(Float32, alignment=128)
            ring = Int32(shared.toint()) + warp * self.tiles.ring_bytes
            span = start, end, (cutlass.max(end - start, 0) + TILE - 1) // TILE
            rAt = self.ask(ring, rPage, pages, caches, span, x, lane)

            chunks = Int32(1)
            if visited > chunk:
                chunks = ptx.div_u32(Uint32(visited + chunk - 1), Uint32(chunk)).to(Int32)
            if slot == 0 and tid == 0 and n.slots > self.groups:
                mChunks[block] = chunks
            # Rows see keys from first to last - 1, and below prefix; all of them from all_first to all_last - 1.
            sSeen = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * ROWS + 5, alignment=16), 2 * ROWS + 5)
            if tid < ROWS:
                row = cutlass.min(first_row + tid, queries * n.group - 1)
                first, last = self.seen(oldest + self.divide(row, n.per_group), n.left, n.right, held)
                sSeen[4 + 2 * tid] = first
                sSeen[4 + 2 * tid + 1] = last
                if tid == 0:
                    sSeen[0] = all_first
                    sSeen[1] = all_last
                    sSeen[2] = prefix
                    sSeen[3] = chunks
                    sSeen[4 + 2 * ROWS] = block * n.slots + slot
            k_scale = Float32(1.0)
            if n.k_scale_heads > 0:
                k_scale = mKScale[cutlass.select_(n.k_scale_heads > 1, kv_head, Int32(0))]
            how = sSeen, n.scale * k_scale * LOG2_E, n.softcap * LOG2_E
            results = (mOut, mLse, mPartOut, mPartLse, mVScale, n.v_scale_heads)
            loads = shared, ring, rPage, rAt, pages, caches, span
            self.attend(rQ, loads, place, how, results, more, tail, warp, lane)

    @cute.jit
    def chunk(self, visited: Int32, n) -> Int32:
        """The keys of a chunk of a sequence of which so many are seen."""
        grain = cutlass.const_expr(self.tiles.cache.grain)
        least = cutlass.select_(visited <= n.middle, n.shorter, n.shortest)
        least = cutlass.select_(visited <= n.whole, n.whole, least)
        if visited > Int64(least) * n.most:
            even = ptx.div_u32(Uint32(visited + n.most - 1), Uint32(n.most)).to(Int32)
            least = (even + grain - 1) // grain * grain
        return least

    @cute.jit
    def divide(self, row: Int32, per_group: Float32) -> Int32:
        """The query of a row: row / group for the few rows that there are, by the reciprocal."""
        return Int32((Float32(row) + 0.5) * per_group)

    @cute.jit
    def seen(self, position: Int32, left: Int32, right: Int32, held: Int32):
        """The keys in the window of a query at this position."""
        first, last = Int32(0), held
        if left >= 0:
            first = cutlass.min(cutlass.max(position - left, 0), held)
        if right >= 0:
            last = cutlass.select_(position < held, cutlass.max(cutlass.min(position + right + 1, held), 0), held)
        return first, last

    @cute.jit
    def ask(self, ring, rPage, pages, caches, span, x, lane):
        """Start loading a warp's first pieces; returns where the keys of its first steps lie, and room for one more."""
        start, end, tiles = span
        own = self.tiles
        rAt = [cute.make_rmem_tensor(own.located_words, Uint32) for _ in range(own.ahead + 1)]
        for i in cutlass.range_constexpr(own.slots):
            at, piece = i // (2 * own.pieces), i % (2 * own.pieces)
            if cutlass.const_expr(piece == 0):
                self.locate(rPage[at], rAt[at], pages, start, end, x + at * own.step, lane)
            own.load(piece, ring + i * own.slot_bytes, rAt[at], caches, x + at * own.step, tiles, lane)
        return rAt

    @cute.jit
    def attend(self, rQ, loads, place, how, results, more, tail, warp, lane):
        """One block's rows over one chunk of keys."""
        shared = loads[0]
        sSeen, scale, cap = how
        row_scale = self.narrow_queries(rQ, more)
        row_scales = [cute.arch.shuffle_sync(row_scale, lane % 4 * 8 + 4 * e) for e in range(2)]
        scales = [scale * row_scale for row_scale in row_scales]
        if cutlass.const_expr(tail is not None):
            inverse = [ptx.int_as_float((254 << 23) - ptx.float_as_int(row_scale)) for row_scale in row_scales]
            tail = self.tiles.cache.park_tail(tail, inverse, warp, lane)
        sQ = rQ
        if cutlass.const_expr(self.tiles.queries_in_shared):
            words = cute.arch.alloc_smem(Uint32, self.tiles.query_words * 32, alignment=16)
            sQ = cute.make_tensor(words + lane * 4, cute.make_layout((4, self.tiles.query_words // 4), stride=(1, 128)))
            if warp == 0:
                for i in cutlass.range_constexpr(self.tiles.query_words // 4):
                    cute.autovec_copy(cute.local_tile(rQ, (4,), (i,)), sQ[None, i])
        cute.arch.sync_threads()
        sums = cutlass.const_expr(self.warps * ROWS)
        sMax = cute.make_tensor(cute.arch.alloc_smem(Float32, sums, alignment=16), sums)
        sSum = cute.make_tensor(cute.arch.alloc_smem(Float32, sums, alignment=16), sums)
        # Sums, [share][tile of 16 dims][row even or odd][lane][2 dims]: as the registers lie
        sOut = cute.make_tensor(shared, self.shared_bytes // 4)
        meeting = (sOut, sMax, sSum)
        state = self.tiles.cache.step_state(self.tiles, self.warps, warp, lane)
        self.take_share(sQ, loads, (sSeen, scales, cap), meeting, place, state, tail, warp, lane)
        cute.arch.sync_threads()
        self.join(meeting, (sSeen[3], sSeen[4 + 2 * ROWS]), place, results, more, warp, lane)

    @cute.jit
    def take_share(self, sQ, loads, how, meeting, place, state, tail, warp, lane):
        """The sums over a warp's share: tiles share, share + shares, ... of the chunk.

        A step takes so many tiles of a share. Pieces of steps lie in the warp's slots in turn; when one is used, its
        slot is for the piece so many slots on.
        """
        _, ring, rPage, rAt, pages, caches, (start, end, tiles) = loads
        sSeen, scales, cap = how
        own = self.tiles
        ahead, slots, per_step = own.ahead, own.slots, 2 * own.pieces
        rOut = cute.make_rmem_tensor(4 * own.output_tiles, Float32)
        rMax = cute.make_rmem_tensor(2, Float32)  # of rows 2t and 2t + 1
        rSum = cute.make_rmem_tensor(own.cache.sums, Float32)
        rScore = cute.make_rmem_tensor(4 * own.at_once, Float32)
        rStart = cute.make_rmem_tensor(2, Float32)
        rNext = rPage[ahead]
        rStart.fill(0.0)
        own.cache.first_scores(own, sQ, rStart)
        rOut.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        slot = ring
        x = warp % own.shares * own.share_tiles
        while x < tiles:
            self.locate(rNext, rAt[ahead], pages, start, end, x + ahead * own.step, lane)
            self.look_up(rNext, pages, self.entries(pages, start, x + (ahead + 1) * own.step, lane), end)
            sNow = own.cache.step_queries(own, sQ, slot, rStart, state)
            for i in cutlass.range_constexpr(4 * own.at_once):
                rScore[i] = rStart[i % 2]
            for piece in cutlass.range_constexpr(per_step):
                ptx.cp_async_wait(slots - 1)
                cute.arch.sync_warp()
                if cutlass.const_expr(piece < own.pieces):
                    own.multiply_keys(piece, slot, sNow, rScore, x, tiles, lane)
                    if cutlass.const_expr(tail is not None):
                        own.cache.multiply_tail(own, tail, rScore, start + x * TILE, lane)
                else:
                    if cutlass.const_expr(piece == own.pieces):
                        own.weigh(rScore, rAt[0], rMax, rSum, rOut, sSeen, start, scales, cap, x, slot, lane)
                    own.multiply_values(piece - own.pieces, slot, rScore, rAt[0], rOut, x, tiles, lane)
                cute.arch.sync_warp()
                at, coming = (piece + slots) // per_step, (piece + slots) % per_step
                own.load(coming, slot, rAt[at], caches, x + at * own.step, tiles, lane)
                slot = cutlass.select_(slot == ring + (slots - 1) * own.slot_bytes, ring, slot + own.slot_bytes)
            for i in cutlass.range_constexpr(ahead):
                for k in cutlass.range_constexpr(own.located_words):
                    rAt[i][k] = rAt[i + 1][k]
            x += own.step
        self.leave(rOut, rMax, rSum, meeting, place, warp, lane)

    # -- queries --------------------------------------------------------------------------------------------------

    @cute.jit
    def query_row(self, mQ, place, lane) -> Int64:
        """Where the row of Q lies that lane (g, t) loads: row g."""
        sequence, kv_head, first_row, rows, group, per_group = place
        row = first_row + cutlass.min(lane // 4, rows - 1)
        query = self.divide(row, per_group)
        head = kv_head * group + row - query * group
        offset = Int64(sequence) * mQ.stride[0] + Int64(query) * mQ.stride[1] + Int64(head) * mQ.stride[2]
        return mQ.iterator.toint() + 2 * offset

    @cute.jit
    def load_queries(self, mQ, rQ, address, rows, lane):
        """The B tiles of Q', as they are; zeros past the last row and dim."""
        dims = cutlass.const_expr(self.tiles.key_dims)
        for i in cutlass.range_constexpr(self.tiles.query_words // 4):
            c, part = i // (dims // 8), i % (dims // 8)
            dim = c * 4 * dims + lane % 4 * dims + part * 8
            for k in cutlass.range_constexpr(4):
                rQ[4 * i + k] = Uint32(0)
            if lane // 4 < rows and dim < mQ.shape[3]:
                loaded = ptx.load_global(address + 2 * dim, 4)
                for k in cutlass.range_constexpr(4):
                    rQ[4 * i + k] = loaded[k]

    @cute.jit
    def narrow_queries(self, rQ, more):
        """Queries become f16 where keys do: times a power of two per row, whose inverse is returned."""
        row_scale = Float32(1.0)
        if cutlass.const_expr(self.tiles.cache.kind == "f16" and (more is not None or self.dtype is cutlass.BFloat16)):
            largest = Int32(0)
            for i in cutlass.range_constexpr(self.tiles.query_words):
                low, high = Int32(rQ[i] & 0x7FFF), Int32((rQ[i] >> 16) & 0x7FFF)
                largest = cutlass.max(largest, cutlass.max(low, high))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 2))
            exponent = cutlass.min(largest >> 7, 254)
            if cutlass.const_expr(more is not None):
                exponent = cutlass.select_(more.bf16 != 0, exponent, (largest >> 10) + 112)
            goal = cutlass.const_expr(self.tiles.cache.query_exponent)
            back = cutlass.const_expr(self.tiles.cache.exponent - goal)
            if cutlass.const_expr(goal < 1):  # the factor is a normal number
                exponent = cutlass.min(exponent, 253 + goal)
            exponent = cutlass.max(exponent, goal + 1)
            factor = ptx.int_as_float((254 + goal - exponent) << 23)
            row_scale = ptx.int_as_float(cutlass.min(exponent + back, 254) << 23)
            if cutlass.const_expr(more is None):
                self.multiply_queries(rQ, factor, "bf16")
            else:
                if more.bf16 != 0:
                    self.multiply_queries(rQ, factor, "bf16")
                else:
                    self.multiply_queries(rQ, factor, "f16")
        return row_scale

    @cute.jit
    def multiply_queries(self, rQ, factor, kind: cutlass.Constexpr):
        """Queries times a number, as f16, in the order of the keys' operands."""
        for i in cutlass.range_constexpr(self.tiles.query_words // 4):
            pairs = []
            for k in cutlass.range_constexpr(4):
                low, high = ptx.unpack_f32x2(rQ[4 * i + k], kind)
                pairs.append(ptx.pack_f32x2(low * factor, high * factor, "f16"))
            pairs = self.tiles.cache.arrange(pairs)
            for k in cutlass.range_constexpr(4):
                rQ[4 * i + k] = pairs[k]

    # -- where keys lie -------------------------------------------------------------------------------------------

    @cute.jit
    def position(self, start, x, lookup: cutlass.Constexpr, lane):
        """The key that a lane looks up: lanes 0-15 those of one tile, 16-31 those of the share's next."""
        tile = x + 2 * lookup * self.tiles.apart
        if cutlass.const_expr(self.tiles.at_once > 1):
            tile = tile + lane // TILE * self.tiles.apart
        return start + tile * TILE + lane % TILE

    @cute.jit
    def entries(self, pages, start, x, lane):
        """The keys that a lane looks up for a step, and where their entries of the block table lie."""
        table, stride, _, _, _, page, inverse, _, _ = pages
        found = []
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key = self.position(start, x, i, lane)
            entry, _ = self.split(key, page, inverse)
            found.append((key, table + 4 * Int64(entry) * stride))
        return found

    @cute.jit
    def look_up(self, rPage, pages, entries, end):
        """Start reading the pages of a step's keys, up to key ``end``."""
        _, _, sequence, paged, _, _, _, _, _ = pages
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key, at = entries[i]
            found = ptx.load_global_if(key < end and paged != 0, at, -1)
            rPage[i] = cutlass.select_(key < end and paged == 0, sequence, Int32(found))

    @cute.jit
    def split(self, key: Int32, page: Int32, inverse):
        """Page and slot of a key; inverse holds 2^shift / page, rounded up, and shift: exact for keys below 2^31."""
        factor, shift = inverse
        entry = Uint32((Uint64(Uint32(key)) * Uint64(factor)) >> Uint64(shift))
        return entry, Uint32(key) - entry * Uint32(page)

    @cute.jit
    def locate(self, rPage, rAt, pages, start, end, x, lane):
        """From pages to offsets in units of 16 bytes, and a bit for each key that exists."""
        _, _, _, _, blocks, page, inverse, strides, scales_at = pages
        if cutlass.const_expr(self.tiles.cache.adjacent):
            self.tiles.locate_page(rPage[0], rAt, blocks, scales_at, end - start - x * TILE)
            return
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key = self.position(start, x, i, lane)
            exists = rPage[i] >= 0 and rPage[i] < blocks and key < end
            _, offset = self.split(key, page, inverse)
            block = cutlass.select_(exists, Uint32(rPage[i]), Uint32(0))
            offset = cutlass.select_(exists, offset, Uint32(0))
            rAt[3 * i] = block * strides[0] + offset * strides[1]
            rAt[3 * i + 1] = block * strides[2] + offset * strides[3]
            rAt[3 * i + 2] = Uint32(cute.arch.vote_ballot_sync(exists))
            at = cutlass.const_expr(3 * self.tiles.lookups + i * self.tiles.cache.scale_words)
            self.tiles.cache.locate_scales(rAt, at, scales_at, exists, rPage[i], offset)

    # -- results --------------------------------------------------------------------------------------------------

    @cute.jit
    def leave(self, rOut, rMax, rSum, meeting, place, share, lane):
        """Put the sums of a share where the block meets: over its slots, of which none is used any more."""
        sOut, sMax, sSum = meeting
        _, _, _, rows, _, _ = place
        g, t = lane // 4, lane % 4
        for odd in cutlass.range_constexpr(2):
            total = rSum[odd]
            for distance in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, 4 << distance)
            if g == 0:
                sMax[share * ROWS + 2 * t + odd] = rMax[odd]
                sSum[share * ROWS + 2 * t + odd] = total
            self.tiles.cache.settle(self.tiles, rOut, rSum, odd)
            if 2 * t + odd < rows:
                at = Int32(sOut.iterator.toint()) + share * self.tiles.ring_bytes + odd * 512 + lane * 16
                for pair in cutlass.range_constexpr(self.tiles.size // 32):
                    four = [ptx.float_as_int(rOut[8 * pair + odd + 2 * k]) for k in range(4)]
                    ptx.store_shared(at + pair * 1024, four)

    @cute.jit
    def join(self, meeting, numbers, place, results, more, warp, lane):
        """Add the shares up, in their order, and write."""
        sOut, sMax, sSum = meeting
        sequence, kv_head, first_row, rows, group, per_group = place
        chunks, chunk = numbers
        mOut, mLse, mPartOut, mPartLse, mVScale, v_scale_heads = results
        shares = cutlass.const_expr(self.tiles.shares)
        group_at, own = warp // shares * shares, warp % shares
        g, t = lane // 4, lane % 4
        v_scale = Float32(1.0)
        if v_scale_heads > 0:
            v_scale = mVScale[cutlass.select_(v_scale_heads > 1, kv_head, Int32(0))]

        # A unit is 32 dims of the even or of the odd rows, four of each lane; the warps take units in turn.
        odd = warp % 2
        row = 2 * t + odd
        largest = -Float32.inf
        for w in cutlass.range_constexpr(shares):
            largest = ptx.fmax(largest, sMax[(group_at + w) * ROWS + row])
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        share = [ptx.exp2_approx(sMax[(group_at + w) * ROWS + row] - base) for w in range(shares)]
        total = Float32(0.0)
        for w in cutlass.range_constexpr(shares):
            total = ptx.fma(share[w], sSum[(group_at + w) * ROWS + row], total)
        factor = cutlass.select_(total == 0.0, Float32(0.0), v_scale / total)
        lse = largest * (1.0 / LOG2_E) + ptx.log2_approx(total) * (1.0 / LOG2_E)
        rOut = cute.make_rmem_tensor(4 * self.units, Float32)
        rOut.fill(0.0)
        if row < rows:
            for n in cutlass.range_constexpr(self.units):
                pair = (n * shares + own) // 2
                if pair < self.tiles.size // 32:
                    at = Int32(sOut.iterator.toint()) + group_at * self.tiles.ring_bytes
                    at = at + (pair * 2 + odd) * 512 + lane * 16
                    for w in cutlass.range_constexpr(shares):
                        four = ptx.load_shared(at + w * self.tiles.ring_bytes, 4)
                        for k in cutlass.range_constexpr(4):
                            rOut[4 * n + k] = ptx.fma(share[w], ptx.int_as_float(Int32(four[k])), rOut[4 * n + k])
                    for k in cutlass.range_constexpr(4):
                        rOut[4 * n + k] = rOut[4 * n + k] * factor
        whole = chunks == 1
        writes = row < rows
        if cutlass.const_expr(self.groups > 1):
            lse = self.join_groups(rOut, lse, sOut, row, warp, lane)
            whole = group_at == 0
            writes = writes and whole
        if writes:
            packed = first_row + row
            query = self.divide(packed, per_group)
            head = kv_head * group + packed - query * group
            part = chunk * ROWS + row
            if g == 0 and own < 2:
                if whole:
                    mLse[sequence, head, query] = lse
                else:
                    mPartLse[part] = lse
            size = mOut.shape[3]
            out_row = ((Int64(sequence) * mOut.shape[1] + query) * mOut.shape[2] + head) * size
            out_at = mOut.iterator.toint() + 2 * out_row
            part_at = mPartOut.iterator.toint() + 4 * Int64(part) * size
            per_chunk = cutlass.const_expr(self.tiles.value_dims // 4)
            for n in cutlass.range_constexpr(self.units):
                pair = (n * shares + own) // 2
                dim = (pair // per_chunk * 8 + g) * self.tiles.value_dims + pair % per_chunk * 4
                if pair < self.tiles.size // 32 and dim < size:
                    four = [rOut[4 * n + k] for k in range(4)]
                    if whole:
                        ptx.store_global(out_at + 2 * dim, self.rounded(four, more))
                    else:
                        ptx.store_global(part_at + 4 * dim, [ptx.float_as_int(x) for x in four])

    @cute.jit
    def rounded(self, four, more):
        """Four elements of the result."""
        words = []
        for k in cutlass.range_constexpr(2):
            low, high = four[2 * k], four[2 * k + 1]
            if cutlass.const_expr(more is None):
                kind = cutlass.const_expr("bf16" if self.dtype is cutlass.BFloat16 else "f16")
                words.append(ptx.pack_f32x2(low, high, kind))
            else:
                of_bf16, of_f16 = ptx.pack_f32x2(low, high, "bf16"), ptx.pack_f32x2(low, high, "f16")
                words.append(cutlass.select_(more.bf16 != 0, of_bf16, of_f16))
        return words

    @cute.jit
    def join_groups(self, rOut, lse, sOut, row, warp, lane):
        """The sums of all groups into rOut of the first, in order, as combine.py joins chunks; returns the LSE."""
        shares = cutlass.const_expr(self.tiles.shares)
        sLse = cute.make_tensor(cute.arch.alloc_smem(Float32, self.groups * ROWS, alignment=16), self.groups * ROWS)
        at = Int32(sOut.iterator.toint()) + warp * self.tiles.ring_bytes + self.tiles.size * ROWS * 4 + lane * 16
        for n in cutlass.range_constexpr(self.units):
            ptx.store_shared(at + n * 512, [ptx.float_as_int(rOut[4 * n + k]) for k in range(4)])
        if lane // 4 == 0 and warp % shares < 2:
            sLse[warp // shares * ROWS + row] = lse
        cute.arch.sync_threads()
        if warp < shares:
            largest = -Float32.inf
            for c in cutlass.range_constexpr(self.groups):
                largest = ptx.fmax(largest, sLse[c * ROWS + row])
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            total = Float32(0.0)
            rOut.fill(0.0)
            for c in cutlass.range_constexpr(self.groups):
                weight = ptx.exp2_approx((sLse[c * ROWS + row] - base) * LOG2_E)
                total += weight
                for n in cutlass.range_constexpr(self.units):
                    four = ptx.load_shared(at + c * shares * self.tiles.ring_bytes + n * 512, 4)
                    for k in cutlass.range_constexpr(4):
                        rOut[4 * n + k] = ptx.fma(weight, ptx.int_as_float(Int32(four[k])), rOut[4 * n + k])
            factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
            for k in cutlass.range_constexpr(4 * self.units):
                rOut[k] = ptx.fma(rOut[k], factor, Float32(0.0))
            lse = base + ptx.log2_approx(total) * (1.0 / LOG2_E)
        return lse
