"""Attention of few queries over a KV cache: each warp streams its own keys from memory straight into tensor-core tiles.

Built for decoding, one query per sequence and 1 to 8 query heads per KV head. A sequence of L keys moves 2 L Hk D
elements of cache and takes 4 L H D operations: memory decides, so the point is to keep many loads in flight.

Work: a block takes up to 8 rows (queries x heads of one KV head) of one sequence, and one chunk of its keys. The chunk
is a function of the length that the sequence has on the device, and of arguments of the call. Tiles of 16 keys are
dealt into shares; a warp takes one share, or several one after the other, and waits for no other warp before the end.
There the shares meet in shared memory and are added in their order, so that the number of warps does not show in a
result: the launch takes more where blocks are few. A sequence of one chunk is then done; of several, the chunks'
normalised sums go to memory and combine.py joins them.

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

from . import ptx
from .tile import ROWS, TILE, Tiles

LOG2_E = math.log2(math.e)
NONE = 1 << 25  # a tile that no chunk has


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
    scale: Float32
    softcap: Float32
    shortest: Int32
    most: Int32
    slots: Int32
    fixed_chunk: Int32


@dataclass(frozen=True)
class Decode:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]  # of queries and results: BFloat16 or Float16
    tiles: Tiles
    warps: int  # a warp takes shares / warps of the shares, one after the other
    residents: int  # blocks that registers must allow on a multiprocessor
    dependent_launch: bool

    @property
    def carveout(self) -> int:
        """Percent of a multiprocessor's 228 KB that the resident blocks need as shared memory; the rest is L1."""
        tiles = self.tiles
        block = 1024 + tiles.shares * (tiles.size * ROWS + 2 * ROWS) * 4
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
            grid=[tensors.mK.shape[2], numbers.slots * blocks, batch],
            block=[32 * self.warps, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=self.residents,
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
        if queries * n.group > ROWS:
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
        length_at = mLengths.iterator.toint() + 4 * Int64(sequence) * mLengths.stride[0]
        known = n.left < 0 and (n.slots == 1 or n.fixed_chunk != 0)  # where the chunk starts, whatever the length
        guess = slot * n.shortest
        share = warp // self.tiles.value_split * self.tiles.share_tiles
        rPage = cute.make_rmem_tensor(self.tiles.lookups, Int32)
        rAhead = cute.make_rmem_tensor(self.tiles.lookups, Int32)
        rQ = cute.make_rmem_tensor(self.tiles.query_words, Uint32)
        if cutlass.const_expr(self.dependent_launch):
            self.prefetch(mQ, length_at, place, pages, n.room, known, guess, warp, share, lane)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.load_queries(mQ, rQ, place, lane)
        if known:
            self.look_up(rPage, pages, guess, n.room, share, lane)
        length = Int32(ptx.load_words(length_at, 1)[0])
        tail = None
        if cutlass.const_expr(self.tiles.cache.tail):
            length, tail = self.tiles.cache.tail_of(more, sequence, kv_head, length, n.added)
            tail = (*tail, self.query_row(mQ, place, lane), more.bf16)

        # Which keys are seen: by a row from first to last - 1, and below prefix; by all rows from all_first to
        # all_last - 1; by any from start to end - 1.
        length = cutlass.select_(length < 0, Int32(0), cutlass.min(length, 0x7FFFFFFF - n.added) + n.added)
        held = cutlass.min(length, n.room)
        prefix = n.prefix
        if n.prefix_given != 0:
            prefix = mPrefix[sequence]
        prefix = cutlass.min(prefix, held)
        oldest = length - queries  # where query 0 stands
        start, all_last = self.seen(oldest + self.divide(first_row, n.per_group), n.left, n.right, held)
        all_first, end = self.seen(oldest + self.divide(first_row + rows - 1, n.per_group), n.left, n.right, held)
        sSeen = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * ROWS + 4, alignment=16), 2 * ROWS + 4)
        if tid < ROWS:
            row = cutlass.min(first_row + tid, queries * n.group - 1)
            first, last = self.seen(oldest + self.divide(row, n.per_group), n.left, n.right, held)
            sSeen[4 + 2 * tid] = first
            sSeen[4 + 2 * tid + 1] = last
        if prefix > 0:
            start = Int32(0)
            end = cutlass.max(end, prefix)
        grain = cutlass.const_expr(self.tiles.cache.grain)
        if cutlass.const_expr(grain > TILE):
            start = start // grain * grain

        # This block's chunk of them.
        chunks = Int32(1)
        if n.slots > 1:
            visited = Uint32(cutlass.max(end - start, 0))
            even = ptx.divide(visited + Uint32(n.most) - 1, Uint32(n.most)).to(Int32)
            chunk = cutlass.max(n.shortest, (even + grain - 1) // grain * grain)
            chunks = cutlass.max(ptx.divide(visited + Uint32(chunk) - 1, Uint32(chunk)).to(Int32), 1)
            start = start + slot * chunk
            end = cutlass.min(end, start + chunk)
            if slot == 0 and tid == 0:
                mChunks[block] = chunks
        if tid == 0:
            sSeen[0] = all_first
            sSeen[1] = all_last
            sSeen[2] = prefix
            sSeen[3] = chunks
        if slot < chunks:
            if not known:
                self.look_up(rPage, pages, start, end, share, lane)
            k_scale = Float32(1.0)
            if n.k_scale_heads > 0:
                k_scale = mKScale[cutlass.select_(n.k_scale_heads > 1, kv_head, Int32(0))]
            scale = n.scale * k_scale * LOG2_E
            cap = n.softcap * LOG2_E
            if n.softcap > 0.0:
                scale = scale * (2.0 / n.softcap)
            results = (mOut, mLse, mPartOut, mPartLse, slot, n.slots, block, mVScale, n.v_scale_heads)
            caches = self.tiles.addresses(mK, mV, kv_head, warp % self.tiles.value_split, lane)
            self.attend(
                rQ,
                rPage,
                rAhead,
                pages,
                caches,
                place,
                (start, end),
                sSeen,
                scale,
                cap,
                results,
                more,
                tail,
                warp,
                lane,
            )

    @cute.jit
    def prefetch(self, mQ, length_at, place, pages, room, known, guess, warp, share, lane):
        """Bring towards L2 what is read first, while the launch before this one ends."""
        if warp == 0:
            if lane == 0:
                ptx.prefetch(length_at)
            ptx.prefetch(self.query_row(mQ, place, lane))
        table, stride, _, paged, _, page, inverse, _, _ = pages
        key = self.position(guess, share, 0, lane)
        if paged != 0 and known and key < room:
            entry, _ = self.split(key, page, inverse)
            ptx.prefetch(table + 4 * Int64(entry) * stride)

    @cute.jit
    def divide(self, row: Int32, per_group: Float32) -> Int32:
        """The query of a row: row / group for the few rows that there are, by the reciprocal."""
        return Int32((Float32(row) + 0.5) * per_group)

    @cute.jit
    def seen(self, position: Int32, left: Int32, right: Int32, held: Int32):
        """The keys in the window of a query at this position."""
        first, last = Int32(0), held
        if left >= 0:
            first = cutlass.max(position - left, 0)
        if right >= 0:
            last = cutlass.max(cutlass.min(Int64(position) + Int64(right) + 1, Int64(held)).to(Int32), 0)
        return first, last

    @cute.jit
    def attend(self, rQ, rPage, rAhead, pages, caches, place, span, sSeen, scale, cap, results, more, tail, warp, lane):
        """One block's rows over one chunk of keys."""
        start, end = span
        tiles = (cutlass.max(end - start, 0) + TILE - 1) // TILE
        row_scale = self.narrow_queries(rQ, more)
        row_scales = [cute.arch.shuffle_sync(row_scale, lane % 4 * 8 + 4 * e) for e in range(2)]
        scales = [scale * row_scale for row_scale in row_scales]
        if cutlass.const_expr(tail is not None):
            tail = (*tail, [ptx.float_of((254 << 23) - ptx.bits_of(row_scale)) for row_scale in row_scales])
        sQ = rQ
        if cutlass.const_expr(self.tiles.queries_in_shared):
            shared = cute.arch.alloc_smem(Uint32, self.tiles.query_words * 32, alignment=16)
            sQ = cute.make_tensor(
                shared + lane * 4, cute.make_layout((4, self.tiles.query_words // 4), stride=(1, 128))
            )
            if warp == 0:
                for i in cutlass.range_constexpr(self.tiles.query_words // 4):
                    cute.autovec_copy(cute.local_tile(rQ, (4,), (i,)), sQ[None, i])
        cute.arch.sync_threads()
        sMax = cute.make_tensor(
            cute.arch.alloc_smem(Float32, self.tiles.shares * ROWS, alignment=16), self.tiles.shares * ROWS
        )
        sSum = cute.make_tensor(
            cute.arch.alloc_smem(Float32, self.tiles.shares * ROWS, alignment=16), self.tiles.shares * ROWS
        )
        # [share][tile of 16 dims][row even or odd][lane][2 dims]: as the registers lie
        shared = cute.arch.alloc_smem(Float32, self.tiles.shares * self.tiles.size * ROWS, alignment=16)
        sOut = cute.make_tensor(shared, self.tiles.shares * self.tiles.size * ROWS)

        meeting = (sOut, sMax, sSum, warp % self.tiles.value_split)
        ahead = (rPage, rAhead)
        how = (sSeen, scales, cap)
        state = self.tiles.cache.step_state(self.tiles, self.warps, warp, lane)
        self.take_shares(
            warp // self.tiles.value_split,
            sQ,
            ahead,
            pages,
            caches,
            place,
            span,
            tiles,
            how,
            meeting,
            state,
            tail,
            lane,
        )
        cute.arch.sync_threads()
        self.join(meeting, sSeen[3], place, results, more, warp, lane)

    @cute.jit
    def take_shares(self, share, sQ, ahead, pages, caches, place, span, tiles, how, meeting, state, tail, lane):
        """The sums over a warp's shares, of which this is the first: tiles share, share + shares, ... of the chunk.

        A step takes tiles x, x + shares, ...: so many at once, of one share. Loads run ahead of it, across shares.
        """
        rPage, rAhead = ahead
        start, end = span
        sSeen, scales, cap = how
        rNow = cute.make_rmem_tensor(
            self.tiles.located_words, Uint32
        )  # offsets of keys and values, and which keys exist
        rNext = cute.make_rmem_tensor(self.tiles.located_words, Uint32)
        rBuffer = [cute.make_rmem_tensor(self.tiles.words, Uint32) for _ in range(2)]
        rOut = cute.make_rmem_tensor(4 * self.tiles.output_tiles, Float32)
        rMax = cute.make_rmem_tensor(2, Float32)  # of rows 2t and 2t + 1
        rSum = cute.make_rmem_tensor(self.tiles.cache.sums, Float32)
        rScore = cute.make_rmem_tensor(4 * self.tiles.at_once, Float32)
        rStart = cute.make_rmem_tensor(2, Float32)
        x = share * self.tiles.share_tiles
        following_x = self.after(x, tiles)
        self.look_up(rAhead, pages, start, end, following_x, lane)
        self.locate(rPage, rNext, pages, start, end, x, lane)
        for piece in cutlass.range_constexpr(2):
            self.tiles.load(piece, rBuffer[piece], rNext, caches, x, tiles, lane)
        rStart.fill(0.0)
        self.tiles.cache.first_scores(self.tiles, sQ, rStart)
        rOut.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        while x < tiles:
            for i in cutlass.range_constexpr(self.tiles.located_words):
                rNow[i] = rNext[i]
            self.locate(rAhead, rNext, pages, start, end, following_x, lane)
            self.look_up(rAhead, pages, start, end, self.after(following_x, tiles), lane)
            sNow = self.tiles.cache.step_queries(self.tiles, sQ, rNow, rStart, state)
            for i in cutlass.range_constexpr(4 * self.tiles.at_once):
                rScore[i] = rStart[i % 2]
            for piece in cutlass.range_constexpr(2 * self.tiles.pieces):
                rPiece = rBuffer[piece % 2]
                if cutlass.const_expr(piece < self.tiles.pieces):
                    self.tiles.multiply_keys(piece, rPiece, sNow, rScore, x, tiles)
                    if cutlass.const_expr(tail is not None):
                        self.tiles.cache.multiply_tail(self.tiles, tail, rScore, start + x * TILE, lane)
                else:
                    if cutlass.const_expr(piece == self.tiles.pieces):
                        self.tiles.weigh(rScore, rNow, rMax, rSum, rOut, sSeen, start, scales, cap, x, tiles, lane)
                    self.tiles.multiply_values(piece - self.tiles.pieces, rPiece, rScore, rNow, rOut, x, tiles, lane)
                coming = cutlass.const_expr(piece + 2)
                if cutlass.const_expr(coming < 2 * self.tiles.pieces):
                    self.tiles.load(coming, rPiece, rNow, caches, x, tiles, lane)
                else:
                    self.tiles.load(coming - 2 * self.tiles.pieces, rPiece, rNext, caches, following_x, tiles, lane)
            if x + self.tiles.at_once * self.tiles.shares >= tiles:
                self.leave(rOut, rMax, rSum, meeting, place, x // self.tiles.share_tiles % self.tiles.shares, lane)
                rOut.fill(0.0)
                rMax.fill(-Float32.inf)
                rSum.fill(0.0)
            x = following_x
            following_x = self.after(x, tiles)
        # Shares without a tile: their weight is 0, whatever lies where their sums would.
        _, sMax, sSum, _ = meeting
        stride = cutlass.const_expr(self.warps // self.tiles.value_split)
        if lane < ROWS:
            for empty in cutlass.range(share, self.tiles.shares, stride, unroll=1):
                if empty * self.tiles.share_tiles >= tiles:
                    sMax[empty * ROWS + lane] = -Float32.inf
                    sSum[empty * ROWS + lane] = Float32(0.0)

    @cute.jit
    def after(self, x: Int32, tiles: Int32) -> Int32:
        """The first tile of the step after the one that starts with tile x; NONE past the last."""
        later = x + self.tiles.at_once * self.tiles.shares
        share = x // self.tiles.share_tiles % self.tiles.shares + self.warps // self.tiles.value_split
        if later >= tiles:
            later = cutlass.select_(share < self.tiles.shares, share * self.tiles.share_tiles, Int32(NONE))
        return cutlass.select_(later < tiles, later, Int32(NONE))

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
    def load_queries(self, mQ, rQ, place, lane):
        """The B tiles of Q', as they are; zeros past the last row and dim."""
        _, _, _, rows, _, _ = place
        address = self.query_row(mQ, place, lane)
        dims = cutlass.const_expr(self.tiles.key_dims)
        for i in cutlass.range_constexpr(self.tiles.query_words // 4):
            c, part = i // (dims // 8), i % (dims // 8)
            dim = c * 4 * dims + lane % 4 * dims + part * 8
            for k in cutlass.range_constexpr(4):
                rQ[4 * i + k] = Uint32(0)
            if lane // 4 < rows and dim < mQ.shape[3]:
                loaded = ptx.load_words(address + 2 * dim, 4)
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
            exponent = cutlass.max(exponent, goal + 1)
            factor = ptx.float_of((254 + goal - exponent) << 23)
            row_scale = ptx.float_of(cutlass.min(exponent + back, 254) << 23)
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
                low, high = ptx.unpack_pair(rQ[4 * i + k], kind)
                pairs.append(ptx.pack_pair(low * factor, high * factor, "f16"))
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
    def look_up(self, rPage, pages, start, end, x, lane):
        """Start reading the entries of the block table for a step, up to key ``end``."""
        table, stride, sequence, paged, _, page, inverse, _, _ = pages
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key = self.position(start, x, i, lane)
            rPage[i] = Int32(-1)
            if key < end:
                rPage[i] = sequence
                if paged != 0:
                    entry, _ = self.split(key, page, inverse)
                    rPage[i] = Int32(ptx.load_words(table + 4 * Int64(entry) * stride, 1)[0])

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
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key = self.position(start, x, i, lane)
            exists = rPage[i] >= 0 and rPage[i] < blocks and key < end
            rAt[3 * i] = Uint32(0)
            rAt[3 * i + 1] = Uint32(0)
            offset = Uint32(0)
            if exists:
                _, offset = self.split(key, page, inverse)
                rAt[3 * i] = Uint32(rPage[i]) * strides[0] + offset * strides[1]
                rAt[3 * i + 1] = Uint32(rPage[i]) * strides[2] + offset * strides[3]
            rAt[3 * i + 2] = Uint32(cute.arch.vote_ballot_sync(exists))
            at = cutlass.const_expr(3 * self.tiles.lookups + i * self.tiles.cache.scale_words)
            self.tiles.cache.locate_scales(rAt, at, scales_at, exists, rPage[i], offset)
        self.tiles.cache.locate_step(self.tiles, rAt, scales_at, rPage[0], blocks)

    # -- results --------------------------------------------------------------------------------------------------

    @cute.jit
    def leave(self, rOut, rMax, rSum, meeting, place, share, lane):
        """Put the sums of a share where the block meets."""
        sOut, sMax, sSum, part_of_values = meeting
        _, _, _, rows, _, _ = place
        g, t = lane // 4, lane % 4
        for odd in cutlass.range_constexpr(2):
            total = rSum[odd]
            for distance in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, 4 << distance)
            if g == 0 and part_of_values == 0:
                sMax[share * ROWS + 2 * t + odd] = rMax[odd]
                sSum[share * ROWS + 2 * t + odd] = total
            if cutlass.const_expr(self.tiles.cache.sums > 2):  # of zeros, in every dim
                offset = rSum[2 + odd]
                for distance in cutlass.range_constexpr(3):
                    offset += cute.arch.shuffle_sync_bfly(offset, 4 << distance)
                for tile in cutlass.range_constexpr(self.tiles.output_tiles):
                    for k in cutlass.range_constexpr(2):
                        rOut[4 * tile + odd + 2 * k] -= offset
            if 2 * t + odd < rows:
                for tile in cutlass.range_constexpr(self.tiles.output_tiles):
                    whole = (share * self.tiles.value_split + part_of_values) * self.tiles.output_tiles + tile
                    at = ((whole * 2 + odd) * 32 + lane) * 2
                    sOut[at] = rOut[4 * tile + odd]
                    sOut[at + 1] = rOut[4 * tile + 2 + odd]

    @cute.jit
    def store(self, mOut, place, low, high, more):
        """Two neighbouring elements of the result, rounded."""
        sequence, query, head, dim = place
        if cutlass.const_expr(more is None):
            mOut[sequence, query, head, dim] = self.dtype(low)
            mOut[sequence, query, head, dim + 1] = self.dtype(high)
        else:
            of_bf16, of_f16 = ptx.pack_pair(low, high, "bf16"), ptx.pack_pair(low, high, "f16")
            target = Int64(sequence) * mOut.stride[0] + Int64(query) * mOut.stride[1] + Int64(head) * mOut.stride[2]
            word = cutlass.select_(more.bf16 != 0, of_bf16, of_f16)
            ptx.store_words(mOut.iterator.toint() + 2 * (target + dim), [word])

    @cute.jit
    def join(self, meeting, chunks, place, results, more, warp, lane):
        """Add the shares up, in their order, and write."""
        sOut, sMax, sSum, _ = meeting
        all_tiles = cutlass.const_expr(self.tiles.size // 16)
        sequence, kv_head, first_row, rows, group, per_group = place
        mOut, mLse, mPartOut, mPartLse, slot, slots, block, mVScale, v_scale_heads = results
        g, t = lane // 4, lane % 4
        v_scale = Float32(1.0)
        if v_scale_heads > 0:
            v_scale = mVScale[cutlass.select_(v_scale_heads > 1, kv_head, Int32(0))]

        # A unit is 16 dims of the even or of the odd rows; the warps take units in turn.
        odd = warp % 2
        row = 2 * t + odd
        largest = -Float32.inf
        for w in cutlass.range_constexpr(self.tiles.shares):
            largest = ptx.maximum(largest, sMax[w * ROWS + row])
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        share = [ptx.exp2(sMax[w * ROWS + row] - base) for w in range(self.tiles.shares)]
        total = Float32(0.0)
        for w in cutlass.range_constexpr(self.tiles.shares):
            total += share[w] * sSum[w * ROWS + row]
        factor = cutlass.select_(total == 0.0, Float32(0.0), v_scale / total)
        lse = largest * (1.0 / LOG2_E) + ptx.log2(total) * (1.0 / LOG2_E)
        if row < rows:
            packed = first_row + row
            query = self.divide(packed, per_group)
            head = kv_head * group + packed - query * group
            part = (block * slots + slot) * ROWS + row
            if g == 0 and warp < 2:
                if chunks == 1:
                    mLse[sequence, head, query] = lse
                else:
                    mPartLse[part] = lse
            for n in cutlass.range_constexpr((all_tiles * 2 + self.warps - 1) // self.warps):
                tile = (n * self.warps + warp) // 2
                if tile < all_tiles:
                    low, high = Float32(0.0), Float32(0.0)
                    for w in cutlass.range_constexpr(self.tiles.shares):
                        at = (((w * all_tiles + tile) * 2 + odd) * 32 + lane) * 2
                        low += cutlass.select_(share[w] == 0.0, Float32(0.0), share[w] * sOut[at])
                        high += cutlass.select_(share[w] == 0.0, Float32(0.0), share[w] * sOut[at + 1])
                    per_chunk = cutlass.const_expr(self.tiles.value_dims // 2)
                    dim = (tile // per_chunk * 8 + g) * self.tiles.value_dims + tile % per_chunk * 2
                    if dim < mOut.shape[3]:
                        if chunks == 1:
                            self.store(mOut, (sequence, query, head, dim), low * factor, high * factor, more)
                        else:
                            target = Int64(part) * mOut.shape[3] + dim
                            mPartOut[target] = low * factor
                            mPartOut[target + 1] = high * factor
