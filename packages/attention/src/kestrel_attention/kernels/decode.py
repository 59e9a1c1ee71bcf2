"""Attention of few queries over a KV cache: each warp streams its own keys from memory straight into tensor-core tiles.

Built for decoding, one query per sequence and 1 to 8 query heads per KV head. A sequence of L keys moves 2 L Hk D
elements of cache and takes 4 L H D operations: memory decides, so the point is to keep many loads in flight.

Work: a block takes up to 8 rows (queries x heads of one KV head) of one sequence, and one chunk of its keys. The chunk
is a function of the length that the sequence has on the device, and of arguments of the call. Tiles of 16 keys are
dealt into shares; a warp takes one share, or several one after the other, and waits for no other warp before the end.
There the shares meet in shared memory and are added in their order, so that the number of warps does not show in a
result: the launch takes more where blocks are few. A sequence of one chunk is then done; of several, the chunks'
normalised sums go to memory and combine.py joins them.

No tile passes through shared memory. A product does not care in which order its inner dimension is summed, so that a
lane loads 16 consecutive bytes of a row and uses them as they are; (g, t) is lane 4 g + t:

    scores   S' = K Q'   16 x 8 x 16: A = K: keys g and g + 8, dims 16 t.. of a row; B = Q': row g, the same dims
    output   O' = V' P'  16 x 8 x 16: A = V': keys 2t, 2t + 1, 2t + 8, 2t + 9, dims 16 g.. of a row; B = P', which is
                         what the lanes have of S', transposed

Codes become f16, which holds every e4m3 code exactly; their scale goes into the scores and the result. bf16 queries are
then brought to f16's range by a power of two per row. P is the sum of two 16-bit numbers, so that it adds no rounding
of its own. What was predicted and measured is in the family's README.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from . import ptx

TILE = 16  # keys of one product P V
ROWS = 8  # of a block: queries x heads of a KV head
LOG2_E = math.log2(math.e)
NONE = 1 << 25  # a tile that no chunk has


@dataclass(frozen=True)
class Decode:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]  # of queries and results: BFloat16 or Float16
    codes: str  # what the caches hold: "" for the dtype itself, "e4m3"
    size: int  # dims of a row that are computed: 64, 128, 256, 512; a smaller head size is padded
    padded: bool  # the head size may be smaller than ``size``
    warps: int
    shares: int  # into which the keys of a chunk are dealt; a warp takes shares / warps of them, one after the other
    tiles: int  # of a warp, loaded at once
    pieces: int  # in which the keys (and the values) of these tiles are loaded
    value_split: int  # warps that take the same keys, and each a part of the values' dims
    split_weights: bool  # P as the sum of two 16-bit numbers
    residents: int  # blocks that registers must allow on a multiprocessor
    dependent_launch: bool
    bit_trick: bool = False  # convert e4m3 without the instruction, which sm_80 and sm_86 lack

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The type of the products' operands."""
        return "bf16" if self.dtype is cutlass.BFloat16 and not self.codes else "f16"

    @property
    def element(self) -> int:
        """Bytes of a cached element."""
        return 1 if self.codes else 2

    @property
    def key_chunks(self) -> int:
        """Times 64 bytes in a row of keys: four lanes load 16 each."""
        return self.size * self.element // 64

    @property
    def value_bytes(self) -> int:
        """What a lane loads of a row of values at once: eight lanes load so much each."""
        return min(16, self.size * self.element // 8)

    @property
    def value_chunks(self) -> int:
        return self.size * self.element // (8 * self.value_bytes * self.value_split)

    @property
    def value_dims(self) -> int:
        """Consecutive dims of a lane in one chunk of values."""
        return self.value_bytes // self.element

    @property
    def words(self) -> int:
        """Registers of a lane for the keys, and again for the values, of its warp's tiles, in one piece."""
        return self.tiles * self.size * self.element // 8 // self.pieces

    @property
    def query_words(self) -> int:
        return self.size // 8

    @property
    def queries_in_shared(self) -> bool:
        return self.size >= 256

    @property
    def lookups(self) -> int:
        """Lanes look up one key each: so many times for all tiles."""
        return (self.tiles + 1) // 2

    @property
    def output_tiles(self) -> int:
        """Of 16 dims, of a warp."""
        return self.size // (16 * self.value_split)

    @property
    def carveout(self) -> int:
        """Percent of a multiprocessor's 228 KB that the resident blocks need as shared memory; the rest is L1."""
        block = 1024 + self.shares * (self.size * ROWS + 2 * ROWS) * 4 + self.queries_in_shared * self.query_words * 128
        return min(100, -(-100 * self.residents * block // (228 * 1024)))

    # -- host -----------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mLengths: cute.Tensor,
        mTable: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mPrefix: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        mChunks: cute.Tensor,
        paged: Int32,
        room: Int32,
        added: Int32,
        page_inverse: Uint32,
        page_shift: Int32,
        group: Int32,
        per_group: Float32,
        k_scale_heads: Int32,
        v_scale_heads: Int32,
        prefix_given: Int32,
        prefix: Int32,
        left: Int32,
        right: Int32,
        scale: Float32,
        softcap: Float32,
        shortest: Int32,
        most: Int32,
        slots: Int32,
        fixed_chunk: Int32,
        stream: cuda.CUstream,
    ):
        blocks = cute.ceil_div(mQ.shape[1] * group, ROWS)
        self.kernel(
            mQ,
            mK,
            mV,
            mLengths,
            mTable,
            mKScale,
            mVScale,
            mPrefix,
            mOut,
            mLse,
            mPartOut,
            mPartLse,
            mChunks,
            paged,
            room,
            added,
            page_inverse,
            page_shift,
            group,
            per_group,
            k_scale_heads,
            v_scale_heads,
            prefix_given,
            prefix,
            left,
            right,
            scale,
            softcap,
            shortest,
            most,
            slots,
            fixed_chunk,
        ).launch(
            grid=[mK.shape[2], slots * blocks, mQ.shape[0]],
            block=[32 * self.warps, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.residents,
            preferred_smem_carveout=self.carveout,
            use_pdl=self.dependent_launch,
        )

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mLengths: cute.Tensor,
        mTable: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mPrefix: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        mChunks: cute.Tensor,
        paged: Int32,
        room: Int32,
        added: Int32,
        page_inverse: Uint32,
        page_shift: Int32,
        group: Int32,
        per_group: Float32,
        k_scale_heads: Int32,
        v_scale_heads: Int32,
        prefix_given: Int32,
        prefix: Int32,
        left: Int32,
        right: Int32,
        scale: Float32,
        softcap: Float32,
        shortest: Int32,
        most: Int32,
        slots: Int32,
        fixed_chunk: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        kv_head, slot, sequence = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        queries = mQ.shape[1]
        first_row = Int32(0)
        if queries * group > ROWS:
            first_row = (Uint32(slot) // Uint32(slots)).to(Int32) * ROWS
            slot = (Uint32(slot) % Uint32(slots)).to(Int32)
        rows = cutlass.min(queries * group - first_row, ROWS)
        block = sequence * (mK.shape[2] * ((queries * group + ROWS - 1) // ROWS))  # a number for these rows
        block += first_row // ROWS * mK.shape[2] + kv_head
        place = (sequence, kv_head, first_row, rows, group, per_group)

        # What does not depend on the length is asked for first: queries, and the first pages where it is known which.
        units = cutlass.const_expr(16 // self.element)  # elements in 16 bytes, the unit of offsets
        strides = [Uint32(mX.stride[i] // units) for mX in (mK, mV) for i in range(2)]
        table = mTable.iterator.toint() + 4 * Int64(sequence) * mTable.stride[0]
        pages = (
            table,
            mTable.stride[1],
            sequence,
            paged,
            mK.shape[0],
            mK.shape[1],
            (page_inverse, page_shift),
            strides,
        )
        length_at = mLengths.iterator.toint() + 4 * Int64(sequence) * mLengths.stride[0]
        known = left < 0 and (slots == 1 or fixed_chunk != 0)  # where the chunk starts, whatever the length
        guess = slot * shortest
        share = warp // self.value_split
        rPage = cute.make_rmem_tensor(self.lookups, Int32)
        rAhead = cute.make_rmem_tensor(self.lookups, Int32)
        rQ = cute.make_rmem_tensor(self.query_words, Uint32)
        if cutlass.const_expr(self.dependent_launch):
            self.prefetch(mQ, length_at, place, pages, room, known, guess, warp, share, lane)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.load_queries(mQ, rQ, place, lane)
        if known:
            self.look_up(rPage, pages, guess, room, share, lane)
        length = Int32(ptx.load_words(length_at, 1)[0])

        # Which keys are seen: by a row from first to last - 1, and below prefix; by all rows from all_first to
        # all_last - 1; by any from start to end - 1.
        length = cutlass.select_(length < 0, Int32(0), cutlass.min(length, 0x7FFFFFFF - added) + added)
        held = cutlass.min(length, room)
        if prefix_given != 0:
            prefix = mPrefix[sequence]
        prefix = cutlass.min(prefix, held)
        oldest = length - queries  # where query 0 stands
        start, all_last = self.seen(oldest + self.divide(first_row, per_group), left, right, held)
        all_first, end = self.seen(oldest + self.divide(first_row + rows - 1, per_group), left, right, held)
        sSeen = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * ROWS + 4, alignment=16), 2 * ROWS + 4)
        if tid < ROWS:
            row = cutlass.min(first_row + tid, queries * group - 1)
            first, last = self.seen(oldest + self.divide(row, per_group), left, right, held)
            sSeen[4 + 2 * tid] = first
            sSeen[4 + 2 * tid + 1] = last
        if prefix > 0:
            start = Int32(0)
            end = cutlass.max(end, prefix)

        # This block's chunk of them.
        chunks = Int32(1)
        if slots > 1:
            visited = Uint32(cutlass.max(end - start, 0))
            even = ptx.divide(visited + Uint32(most) - 1, Uint32(most)).to(Int32)
            chunk = cutlass.max(shortest, (even + TILE - 1) // TILE * TILE)
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
            if k_scale_heads > 0:
                k_scale = mKScale[cutlass.select_(k_scale_heads > 1, kv_head, Int32(0))]
            scale = scale * k_scale * LOG2_E
            cap = softcap * LOG2_E
            if softcap > 0.0:
                scale = scale * (2.0 / softcap)
            results = (mOut, mLse, mPartOut, mPartLse, slot, slots, block, mVScale, v_scale_heads)
            caches = self.addresses(mK, mV, kv_head, warp % self.value_split, lane)
            self.attend(rQ, rPage, rAhead, pages, caches, place, (start, end), sSeen, scale, cap, results, warp, lane)

    @cute.jit
    def prefetch(self, mQ, length_at, place, pages, room, known, guess, warp, share, lane):
        """Bring towards L2 what is read first, while the launch before this one ends."""
        if warp == 0:
            if lane == 0:
                ptx.prefetch(length_at)
            ptx.prefetch(self.query_row(mQ, place, lane))
        table, stride, _, paged, _, page, inverse, _ = pages
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
    def addresses(self, mK, mV, kv_head, part_of_values, lane):
        """Where the head's keys and values start, and a lane's part of each chunk of a row.

        Past the end of a shorter row a lane loads the row's start, which meets zeros in Q or is not written.
        """
        g, t = lane // 4, lane % 4
        element = cutlass.const_expr(self.element)
        row_bytes = mK.shape[3] * element
        key_base = mK.iterator.toint() + Int64(kv_head) * mK.stride[2] * element
        value_base = mV.iterator.toint() + Int64(kv_head) * mV.stride[2] * element
        value_base += part_of_values * self.value_chunks * 8 * self.value_bytes
        key_at = [c * 64 for c in range(self.key_chunks)]
        value_at = [c * 8 * self.value_bytes for c in range(self.value_chunks)]
        if cutlass.const_expr(self.padded):
            key_at = [cutlass.select_(at + t * 16 < row_bytes, at + t * 16, Int32(0)) for at in key_at]
            part = g * self.value_bytes
            value_at = [cutlass.select_(at + part < row_bytes, at + part, Int32(0)) for at in value_at]
        else:
            key_base += t * 16
            value_base += g * self.value_bytes
        return key_base, value_base, key_at, value_at

    @cute.jit
    def attend(self, rQ, rPage, rAhead, pages, caches, place, span, sSeen, scale, cap, results, warp, lane):
        """One block's rows over one chunk of keys."""
        start, end = span
        tiles = (cutlass.max(end - start, 0) + TILE - 1) // TILE
        row_scale = self.narrow_queries(rQ)
        scales = [scale * cute.arch.shuffle_sync(row_scale, lane % 4 * 8 + 4 * e) for e in range(2)]
        sQ = rQ
        if cutlass.const_expr(self.queries_in_shared):
            shared = cute.arch.alloc_smem(Uint32, self.query_words * 32, alignment=16)
            sQ = cute.make_tensor(shared + lane * 4, cute.make_layout((4, self.query_words // 4), stride=(1, 128)))
            if warp == 0:
                for i in cutlass.range_constexpr(self.query_words // 4):
                    cute.autovec_copy(cute.local_tile(rQ, (4,), (i,)), sQ[None, i])
        cute.arch.sync_threads()
        sMax = cute.make_tensor(cute.arch.alloc_smem(Float32, self.shares * ROWS, alignment=16), self.shares * ROWS)
        sSum = cute.make_tensor(cute.arch.alloc_smem(Float32, self.shares * ROWS, alignment=16), self.shares * ROWS)
        # [share][tile of 16 dims][row even or odd][lane][2 dims]: as the registers lie
        shared = cute.arch.alloc_smem(Float32, self.shares * self.size * ROWS, alignment=16)
        sOut = cute.make_tensor(shared, self.shares * self.size * ROWS)

        meeting = (sOut, sMax, sSum, warp % self.value_split)
        ahead = (rPage, rAhead)
        how = (sSeen, scales, cap)
        self.take_shares(warp // self.value_split, sQ, ahead, pages, caches, place, span, tiles, how, meeting, lane)
        cute.arch.sync_threads()
        self.join(meeting, sSeen[3], place, results, warp, lane)

    @cute.jit
    def take_shares(self, share, sQ, ahead, pages, caches, place, span, tiles, how, meeting, lane):
        """The sums over a warp's shares, of which this is the first: tiles share, share + shares, ... of the chunk.

        A step takes tiles x, x + shares, ...: self.tiles of them, of one share. Loads run ahead of it, across shares.
        """
        rPage, rAhead = ahead
        start, end = span
        sSeen, scales, cap = how
        rNow = cute.make_rmem_tensor(3 * self.lookups, Uint32)  # offsets of keys and values, and which keys exist
        rNext = cute.make_rmem_tensor(3 * self.lookups, Uint32)
        rBuffer = [cute.make_rmem_tensor(self.words, Uint32) for _ in range(2)]
        rOut = cute.make_rmem_tensor(4 * self.output_tiles, Float32)
        rMax = cute.make_rmem_tensor(2, Float32)  # of rows 2t and 2t + 1
        rSum = cute.make_rmem_tensor(2, Float32)
        rScore = cute.make_rmem_tensor(4 * self.tiles, Float32)
        x = share
        following_x = self.after(x, tiles)
        self.look_up(rAhead, pages, start, end, following_x, lane)
        self.locate(rPage, rNext, pages, start, end, x, lane)
        for piece in cutlass.range_constexpr(2):
            self.load(piece, rBuffer[piece], rNext, caches, x, tiles, lane)
        rOut.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        while x < tiles:
            for i in cutlass.range_constexpr(3 * self.lookups):
                rNow[i] = rNext[i]
            self.locate(rAhead, rNext, pages, start, end, following_x, lane)
            self.look_up(rAhead, pages, start, end, self.after(following_x, tiles), lane)
            rScore.fill(0.0)
            for piece in cutlass.range_constexpr(2 * self.pieces):
                rPiece = rBuffer[piece % 2]
                if cutlass.const_expr(piece < self.pieces):
                    self.multiply_keys(piece, rPiece, sQ, rScore, x, tiles)
                else:
                    if cutlass.const_expr(piece == self.pieces):
                        self.weigh(rScore, rNow, rMax, rSum, rOut, sSeen, start, scales, cap, x, tiles, lane)
                    self.multiply_values(piece - self.pieces, rPiece, rScore, rNow, rOut, x, tiles, lane)
                coming = cutlass.const_expr(piece + 2)
                if cutlass.const_expr(coming < 2 * self.pieces):
                    self.load(coming, rPiece, rNow, caches, x, tiles, lane)
                else:
                    self.load(coming - 2 * self.pieces, rPiece, rNext, caches, following_x, tiles, lane)
            if x + self.tiles * self.shares >= tiles:
                self.leave(rOut, rMax, rSum, meeting, place, x % self.shares, lane)
                rOut.fill(0.0)
                rMax.fill(-Float32.inf)
                rSum.fill(0.0)
            x = following_x
            following_x = self.after(x, tiles)
        # Shares without a tile: their weight is 0, whatever lies where their sums would.
        _, sMax, sSum, _ = meeting
        stride = cutlass.const_expr(self.warps // self.value_split)
        if lane < ROWS:
            for empty in cutlass.range(share, self.shares, stride, unroll=1):
                if empty >= tiles:
                    sMax[empty * ROWS + lane] = -Float32.inf
                    sSum[empty * ROWS + lane] = Float32(0.0)

    @cute.jit
    def after(self, x: Int32, tiles: Int32) -> Int32:
        """The first tile of the step after the one that starts with tile x; NONE past the last."""
        later = x + self.tiles * self.shares
        share = x % self.shares + self.warps // self.value_split
        if later >= tiles:
            later = cutlass.select_(share < self.shares, share, Int32(NONE))
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
        dims = cutlass.const_expr(16 // self.element)  # of a lane, in a chunk of keys
        for i in cutlass.range_constexpr(self.query_words // 4):
            c, part = i // (dims // 8), i % (dims // 8)
            dim = c * 4 * dims + lane % 4 * dims + part * 8
            for k in cutlass.range_constexpr(4):
                rQ[4 * i + k] = Uint32(0)
            if lane // 4 < rows and dim < mQ.shape[3]:
                loaded = ptx.load_words(address + 2 * dim, 4)
                for k in cutlass.range_constexpr(4):
                    rQ[4 * i + k] = loaded[k]

    @cute.jit
    def narrow_queries(self, rQ):
        """bf16 queries become f16 where keys do: times a power of two per row, whose inverse is returned."""
        row_scale = Float32(1.0)
        if cutlass.const_expr(self.kind == "f16" and self.dtype is cutlass.BFloat16):
            largest = Int32(0)
            for i in cutlass.range_constexpr(self.query_words):
                low, high = Int32(rQ[i] & 0x7FFF), Int32((rQ[i] >> 16) & 0x7FFF)
                largest = cutlass.max(largest, cutlass.max(low, high))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 2))
            exponent = cutlass.max(cutlass.min(largest >> 7, 254), 15)
            factor = ptx.float_of((268 - exponent) << 23)
            row_scale = ptx.float_of((exponent - 14) << 23)
            for i in cutlass.range_constexpr(self.query_words):
                low, high = ptx.unpack_pair(rQ[i], "bf16")
                rQ[i] = ptx.pack_pair(low * factor, high * factor, "f16")
        return row_scale

    # -- where keys lie -------------------------------------------------------------------------------------------

    @cute.jit
    def position(self, start, x, lookup: cutlass.Constexpr, lane):
        """The key that a lane looks up: lanes 0-15 those of one tile, 16-31 those of the share's next."""
        tile = x + 2 * lookup * self.shares
        if cutlass.const_expr(self.tiles > 1):
            tile = tile + lane // TILE * self.shares
        return start + tile * TILE + lane % TILE

    @cute.jit
    def look_up(self, rPage, pages, start, end, x, lane):
        """Start reading the entries of the block table for a step, up to key ``end``."""
        table, stride, sequence, paged, _, page, inverse, _ = pages
        for i in cutlass.range_constexpr(self.lookups):
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
        _, _, _, _, blocks, page, inverse, strides = pages
        for i in cutlass.range_constexpr(self.lookups):
            key = self.position(start, x, i, lane)
            exists = rPage[i] >= 0 and rPage[i] < blocks and key < end
            rAt[3 * i] = Uint32(0)
            rAt[3 * i + 1] = Uint32(0)
            if exists:
                _, offset = self.split(key, page, inverse)
                rAt[3 * i] = Uint32(rPage[i]) * strides[0] + offset * strides[1]
                rAt[3 * i + 1] = Uint32(rPage[i]) * strides[2] + offset * strides[3]
            rAt[3 * i + 2] = Uint32(cute.arch.vote_ballot_sync(exists))

    @cute.jit
    def load(self, piece: cutlass.Constexpr, rPiece, rAt, address, x, tiles, lane):
        """Start loading one piece of a step's keys, or of its values."""
        for tile in cutlass.range_constexpr(self.tiles):
            if x + tile * self.shares < tiles:
                if cutlass.const_expr(piece < self.pieces):
                    self.load_keys(piece, tile, rPiece, rAt, address, lane)
                else:
                    self.load_values(piece - self.pieces, tile, rPiece, rAt, address, lane)

    def key_units(self, piece: int, tile: int) -> list[tuple[int, int]]:
        """(chunk, first of 8 registers: 4 of key g, 4 of key g + 8) of what a piece holds of a tile's keys."""
        each = self.key_chunks // self.pieces if self.tiles == 1 else self.key_chunks
        return [(piece * each + i, (tile * each + i) * 8) for i in range(each)]

    def value_units(self, piece: int, tile: int) -> list[tuple[int, int]]:
        """(chunk, first register of four keys) of what a piece holds of a tile's values."""
        each = self.value_chunks // self.pieces if self.tiles == 1 else self.value_chunks
        return [(piece * each + i, (tile * each + i) * self.value_bytes) for i in range(each)]

    @cute.jit
    def load_keys(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, rAt, address, lane):
        base, _, key_at, _ = address
        units = cutlass.const_expr(self.key_units(piece, tile))
        for half in cutlass.range_constexpr(2):
            at = cute.arch.shuffle_sync(rAt[3 * (tile // 2)], (tile % 2) * TILE + half * 8 + lane // 4)
            row = base + Int64(at) * 16
            for u in cutlass.range_constexpr(len(units)):
                c, register = units[u]
                loaded = ptx.load_words(row + Int64(key_at[c]), 4)
                for i in cutlass.range_constexpr(4):
                    rPiece[register + 4 * half + i] = loaded[i]

    @cute.jit
    def load_values(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, rAt, address, lane):
        _, base, _, value_at = address
        units = cutlass.const_expr(self.value_units(piece, tile))
        words = cutlass.const_expr(self.value_bytes // 4)
        for key in cutlass.range_constexpr(4):
            source = (tile % 2) * TILE + lane % 4 * 2 + key % 2 + key // 2 * 8
            at = cute.arch.shuffle_sync(rAt[3 * (tile // 2) + 1], source)
            row = base + Int64(at) * 16
            for u in cutlass.range_constexpr(len(units)):
                c, register = units[u]
                loaded = ptx.load_words(row + Int64(value_at[c]), words)
                for i in cutlass.range_constexpr(words):
                    rPiece[register + key * words + i] = loaded[i]

    # -- products -------------------------------------------------------------------------------------------------

    @cute.jit
    def widen(self, word):
        """Four codes as two pairs of f16."""
        if cutlass.const_expr(self.bit_trick):
            return [self.widen_pair(ptx.permute(word, Uint32(0), selector)) for selector in (0x1404, 0x3424)]
        else:
            return ptx.e4m3_to_halves(word)

    @cute.jit
    def widen_pair(self, pair):
        """Two e4m3 codes, each in the high byte of a half, as f16: shifted by one they are 1/256 of it, and NaN 480."""
        shifted = (pair & 0x80008000) | ((pair & 0x7F007F00) >> 1)
        value = ptx.half_pair("mul.rn.f16x2", shifted, Uint32(0x5C005C00))
        nan = ptx.half_pair("set.eq.f16x2.f16x2", value & 0x7FFF7FFF, Uint32(0x5F805F80))  # 0x3c00 or 0 in each half
        return value | nan | (nan << 1)

    @cute.jit
    def multiply_keys(self, piece: cutlass.Constexpr, rPiece, sQ, rScore, x, tiles):
        """Scores of the keys that a piece holds, added to rScore."""
        if cutlass.const_expr(self.tiles == 1):
            self.multiply_keys_of(piece, 0, rPiece, sQ, rScore)
        else:
            for tile in cutlass.range_constexpr(self.tiles):
                if x + tile * self.shares < tiles:
                    self.multiply_keys_of(piece, tile, rPiece, sQ, rScore)

    @cute.jit
    def multiply_keys_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, sQ, rScore):
        units = cutlass.const_expr(self.key_units(piece, tile))
        for u in cutlass.range_constexpr(len(units)):
            c, register = units[u]
            for four in cutlass.range_constexpr(2 if self.codes else 1):
                q = self.four_words(sQ, c * 2 + four if cutlass.const_expr(self.codes) else c)
                for i in cutlass.range_constexpr(2):
                    if cutlass.const_expr(self.codes):
                        low, high = self.widen(rPiece[register + 2 * four + i])
                        low8, high8 = self.widen(rPiece[register + 4 + 2 * four + i])
                        a = (low, low8, high, high8)
                    else:
                        a = [rPiece[register + 2 * i + k // 2 + k % 2 * 4] for k in range(4)]
                    sums = ptx.mma(a, (q[2 * i], q[2 * i + 1]), [rScore[4 * tile + k] for k in range(4)], self.kind)
                    for k in cutlass.range_constexpr(4):
                        rScore[4 * tile + k] = sums[k]

    @cute.jit
    def four_words(self, sQ, i: cutlass.Constexpr):
        """Four consecutive words of the lane's part of Q."""
        if cutlass.const_expr(self.queries_in_shared):
            rFour = cute.make_rmem_tensor(4, Uint32)
            cute.autovec_copy(sQ[None, i], rFour)
            return [rFour[k] for k in range(4)]
        else:
            return [sQ[4 * i + k] for k in range(4)]

    @cute.jit
    def weigh(self, rScore, rNow, rMax, rSum, rOut, sSeen, start, scales, cap, x, tiles, lane):
        """Scores become weights exp2(score - largest); the sums so far are brought to the new largest.

        Score i of a tile is that of key g + i // 2 * 8 and row 2t + i % 2.
        """
        all_first, all_last, prefix = sSeen[0], sSeen[1], sSeen[2]
        largest = [rMax[0], rMax[1]]
        for tile in cutlass.range_constexpr(self.tiles):
            at = cutlass.const_expr(4 * tile)
            if x + tile * self.shares < tiles:
                for i in cutlass.range_constexpr(4):
                    rScore[at + i] *= scales[i % 2]
                if cap > 0.0:  # cap * tanh(x), of which rScore holds 2 x log2(e)
                    for i in cutlass.range_constexpr(4):
                        rScore[at + i] = cap * (1.0 - 2.0 / (1.0 + ptx.exp2(rScore[at + i])))
                key = start + (x + tile * self.shares) * TILE
                exist = rNow[3 * (tile // 2) + 2] >> (tile % 2 * TILE)
                if (exist & 0xFFFF) != 0xFFFF or key < all_first or key + TILE > all_last:
                    for i in cutlass.range_constexpr(4):
                        row = lane % 4 * 2 + i % 2
                        offset = lane // 4 + i // 2 * 8
                        inside = key + offset >= sSeen[4 + 2 * row] and key + offset < sSeen[4 + 2 * row + 1]
                        if not ((inside or key + offset < prefix) and (exist >> Uint32(offset)) & 1 != 0):
                            rScore[at + i] = -Float32.inf
            else:
                for i in cutlass.range_constexpr(4):
                    rScore[at + i] = -Float32.inf
            for i in cutlass.range_constexpr(4):
                largest[i % 2] = ptx.maximum(largest[i % 2], rScore[at + i])
        for distance in cutlass.range_constexpr(3):
            for e in cutlass.range_constexpr(2):
                other = cute.arch.shuffle_sync_bfly(largest[e], 4 << distance)
                largest[e] = ptx.maximum(largest[e], other)
        base = [cutlass.select_(x == -Float32.inf, Float32(0.0), x) for x in largest]
        if cute.arch.vote_any_sync(largest[0] > rMax[0] or largest[1] > rMax[1]):
            fade = [ptx.exp2(rMax[e] - base[e]) for e in range(2)]
            for e in cutlass.range_constexpr(2):
                rSum[e] *= fade[e]
            for i in cutlass.range_constexpr(4 * self.output_tiles):
                rOut[i] *= fade[i % 2]
        for e in cutlass.range_constexpr(2):
            rMax[e] = largest[e]
        for i in cutlass.range_constexpr(4 * self.tiles):
            weight = ptx.exp2(rScore[i] - base[i % 2])
            rScore[i] = weight
            rSum[i % 2] += weight

    @cute.jit
    def multiply_values(self, piece: cutlass.Constexpr, rPiece, rScore, rNow, rOut, x, tiles, lane):
        """Add weights times values for what a piece holds."""
        if cutlass.const_expr(self.tiles == 1):
            self.multiply_values_of(piece, 0, rPiece, rScore, rNow, rOut, lane)
        else:
            for tile in cutlass.range_constexpr(self.tiles):
                if x + tile * self.shares < tiles:
                    self.multiply_values_of(piece, tile, rPiece, rScore, rNow, rOut, lane)

    @cute.jit
    def multiply_values_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, rScore, rNow, rOut, lane):
        units = cutlass.const_expr(self.value_units(piece, tile))
        words = cutlass.const_expr(self.value_bytes // 4)
        exist = rNow[3 * (tile // 2) + 2] >> (tile % 2 * TILE)
        if (exist & 0xFFFF) != 0xFFFF:  # what lies where no key is may be NaN
            for key in cutlass.range_constexpr(4):
                place = lane % 4 * 2 + key % 2 + key // 2 * 8
                if (exist >> place) & 1 == 0:
                    for u in cutlass.range_constexpr(len(units)):
                        for i in cutlass.range_constexpr(words):
                            rPiece[units[u][1] + key * words + i] = Uint32(0)
        weights, rest = [], []
        for half in cutlass.range_constexpr(2):
            x, y = rScore[4 * tile + 2 * half], rScore[4 * tile + 2 * half + 1]
            pair = ptx.pack_pair(x, y, self.kind)
            weights.append(ptx.transpose(pair))
            if cutlass.const_expr(self.split_weights):
                low, high = ptx.unpack_pair(pair, self.kind)
                rest.append(ptx.transpose(ptx.pack_pair(x - low, y - high, self.kind)))
        for u in cutlass.range_constexpr(len(units)):
            c, register = units[u]
            for w in cutlass.range_constexpr(words):
                r = [rPiece[register + key * words + w] for key in range(4)]
                out = cutlass.const_expr(4 * (c * self.value_dims // 2 + w * (4 // self.element) // 2))
                if cutlass.const_expr(self.codes):
                    for pair in cutlass.range_constexpr(2):
                        selector = 0x7362 if cutlass.const_expr(pair) else 0x5140
                        a01 = self.widen(ptx.permute(r[0], r[1], selector))
                        a23 = self.widen(ptx.permute(r[2], r[3], selector))
                        self.add_output((*a01, *a23), weights, rest, rOut, out + 4 * pair)
                else:
                    a = (
                        ptx.permute(r[0], r[1], 0x5410),
                        ptx.permute(r[0], r[1], 0x7632),
                        ptx.permute(r[2], r[3], 0x5410),
                        ptx.permute(r[2], r[3], 0x7632),
                    )
                    self.add_output(a, weights, rest, rOut, out)

    @cute.jit
    def add_output(self, a, weights, rest, rOut, at: cutlass.Constexpr):
        c = [rOut[at + i] for i in range(4)]
        c = ptx.mma(a, weights, c, self.kind)
        if cutlass.const_expr(self.split_weights):
            c = ptx.mma(a, rest, c, self.kind)
        for i in cutlass.range_constexpr(4):
            rOut[at + i] = c[i]

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
            if 2 * t + odd < rows:
                for tile in cutlass.range_constexpr(self.output_tiles):
                    whole = (share * self.value_split + part_of_values) * self.output_tiles + tile
                    at = ((whole * 2 + odd) * 32 + lane) * 2
                    sOut[at] = rOut[4 * tile + odd]
                    sOut[at + 1] = rOut[4 * tile + 2 + odd]

    @cute.jit
    def join(self, meeting, chunks, place, results, warp, lane):
        """Add the shares up, in their order, and write."""
        sOut, sMax, sSum, _ = meeting
        all_tiles = cutlass.const_expr(self.size // 16)
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
        for w in cutlass.range_constexpr(self.shares):
            largest = ptx.maximum(largest, sMax[w * ROWS + row])
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        share = [ptx.exp2(sMax[w * ROWS + row] - base) for w in range(self.shares)]
        total = Float32(0.0)
        for w in cutlass.range_constexpr(self.shares):
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
                    for w in cutlass.range_constexpr(self.shares):
                        at = (((w * all_tiles + tile) * 2 + odd) * 32 + lane) * 2
                        low += cutlass.select_(share[w] == 0.0, Float32(0.0), share[w] * sOut[at])
                        high += cutlass.select_(share[w] == 0.0, Float32(0.0), share[w] * sOut[at + 1])
                    per_chunk = cutlass.const_expr(self.value_dims // 2)
                    dim = (tile // per_chunk * 8 + g) * self.value_dims + tile % per_chunk * 2
                    if dim < mOut.shape[3]:
                        if chunks == 1:
                            mOut[sequence, query, head, dim] = self.dtype(low * factor)
                            mOut[sequence, query, head, dim + 1] = self.dtype(high * factor)
                        else:
                            target = Int64(part) * mOut.shape[3] + dim
                            mPartOut[target] = low * factor
                            mPartOut[target + 1] = high * factor
