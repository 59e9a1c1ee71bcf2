"""The INT4 cache format after KIVI: keys quantised per channel over a page of 64, values per token.

A step processes the 64 keys of a page. K: the code is a subnormal f16; every other code stands four bits higher and is
multiplied by a sixteenth of the query. A channel's scale is multiplied into the queries once a page, times 2^15 where
all scales of the page are below 2^-7; the product of its zero with these is what scores start from. V: subnormals too,
read from shared memory transposed, so that a register holds two keys. Zeros times weights are subtracted every few
steps; sums of the codes that stand four bits higher are scaled down at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import ptx

from .constants import BLOCK_ROWS, INT4_PAGE, TILE_KEYS
from .formats import CacheFormat
from .parameters import Int4Extra
from .tile import HeadRows, VisibleWords, WarpTiles, head_rows

LARGE_SCALES = 0x60006000  # bits of two f16 of which one is set from 2^-7 on
PAGE_INDEX, PAGE_KEYS = range(2)  # the offset words of a step: the page, and its keys with two flags above them


class ScaleExchange(NamedTuple):
    """Where the lanes of a warp exchange the key scales and zeros of a page, and the queries times the scales.

    Four lanes that read together find adjacent groups of 8 channels. A group of zeros is stored as operands.
    """

    write_ptr: Int32
    writes_scales: Any  # the lane writes scales; otherwise zeros
    read_ptr: Int32
    rScaled: cute.Tensor


class TailRow(NamedTuple):
    """The unfinished page of a sequence."""

    address: Int64
    stride: Int64  # from a key to the next, in elements
    first_key: Int32


class Tail(NamedTuple):
    """The same in shared memory; a warp whose pages it belongs to has loaded it."""

    rows_ptr: Int32  # the keys, then the rows of queries
    parked_ptr: Int32  # of a lane: what multiplies its scores, which would hold registers
    first_key: Int32
    is_bf16: Int32


class PageBase(NamedTuple):
    mK: HeadRows
    mV: HeadRows
    mKeyScale: HeadRows
    mKeyZero: HeadRows
    mValueScale: HeadRows
    mValueZero: HeadRows


@dataclass(frozen=True)
class Int4(CacheFormat):
    """A cache of INT4 codes."""

    extra: ClassVar[type] = Int4Extra
    bits: ClassVar[int] = 4
    exponent: ClassVar[int] = 24
    query_exponent: ClassVar[int] = -1  # below 1, so that queries times a channel's scale are in the range of f16
    finite: ClassVar[bool] = True
    sum_words: ClassVar[int] = 4
    offset_steps: ClassVar[int] = 8
    value_units: ClassVar[tuple[float, float]] = (2.0**-24, 2.0**-20)
    page_per_step: ClassVar[bool] = True
    split_granularity: ClassVar[int] = INT4_PAGE
    tail: ClassVar[bool] = True

    # -- operands -------------------------------------------------------------------------------------------------

    @cute.jit
    def nibble_pairs(self, words):
        """Pairs of eight consecutive dims in the order of the nibbles: the first with the fifth."""
        return [ptx.prmt(words[i // 2], words[i // 2 + 2], (0x5410, 0x7632)[i % 2]) for i in range(4)]

    @cute.jit
    def permute_queries(self, words):
        pairs = self.nibble_pairs(words)
        return [sixteenth(pairs[i]) if i % 2 else pairs[i] for i in range(4)]

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        words = [rPiece[at + key * next_key + i // 2] >> (8 if i % 2 else 0) for key in range(2)]
        return [word & mask for mask in (0x000F000F, 0x00F000F0) for word in words]

    # -- scales ---------------------------------------------------------------------------------------------------

    @cute.jit
    def scale_addresses(self, extra, tiles, kv_head, lane):
        """For value scales and zeros: whether the lane's is the upper half of its word, and if pages change that."""
        found = []
        for mX in (extra.mValueScale, extra.mValueZero):
            elements = (mX.iterator.toint() >> 1) + Int64(kv_head) * mX.stride[2] + Int64(lane // 4) * mX.stride[1]
            found.append((Uint32(elements) & 1, Uint32(mX.stride[0]) & 1))
        return found

    @cute.jit
    def step_state(self, tiles, warps: cutlass.Constexpr, warp, lane):
        groups, parts = cutlass.const_expr((tiles.head_dim // 8, tiles.key_dims // 8))
        shared = cute.arch.alloc_smem(Uint32, warps * groups * 12, alignment=16).toint() + warp * (groups * 48)
        place = lane % groups % parts * 4 + lane % groups // parts
        writes_scales = lane % (2 * groups) < groups
        write_ptr = shared + place * 48 + cutlass.select_(writes_scales, 0, 16)
        rScaled = cute.make_rmem_tensor(tiles.query_words, Uint32)
        return ScaleExchange(write_ptr, writes_scales, shared + lane % 4 * 48, rScaled)

    @cute.jit
    def scale_queries(self, tiles, sQ, stage_ptr, rStart, state: ScaleExchange):
        groups, parts = cutlass.const_expr((tiles.head_dim // 8, tiles.key_dims // 8))
        ptx.cp_async_wait(tiles.num_stages - 1)
        cute.arch.sync_warp()
        raw = stage_ptr + INT4_PAGE * tiles.row_bytes + cute.arch.lane_idx() % (2 * groups) * 16
        pairs = self.nibble_pairs(ptx.load_shared(raw, 4))
        large = ((pairs[0] | pairs[1] | pairs[2] | pairs[3]) & LARGE_SCALES) != 0
        small_page = not cute.arch.vote_any_sync(state.writes_scales and large)
        raised = cutlass.select_(state.writes_scales and small_page, Uint32(0x78007800), Uint32(0x3C003C00))
        pairs = [ptx.packed("mul.rn.f16x2", pair, raised) for pair in pairs]
        even = [sixteenth(pairs[2 * k]) for k in range(2)]
        if state.writes_scales:
            ptx.store_shared(state.write_ptr, pairs)
        else:
            for k in cutlass.range_constexpr(2):
                ptx.store_shared(state.write_ptr + 16 * k, [even[k], even[k], pairs[2 * k + 1], pairs[2 * k + 1]])
        cute.arch.sync_warp()
        starts = [[Float32(0.0)] * 4 for _ in range(4)]  # four independent chains of products
        for i in cutlass.range_constexpr(tiles.query_words // 4):
            first = cutlass.const_expr(i // parts * 4 * parts + i % parts * 4)  # of four lanes' groups
            scales = ptx.load_shared(state.read_ptr + 48 * first, 4)
            q = tiles.four_words(sQ, i)
            for k in cutlass.range_constexpr(4):
                state.rScaled[4 * i + k] = ptx.packed("mul.rn.f16x2", q[k], scales[k])
            for k in cutlass.range_constexpr(2):
                zeros = ptx.load_shared(state.read_ptr + (48 * first + 16 + 16 * k), 4)
                b = (state.rScaled[4 * i + 2 * k], state.rScaled[4 * i + 2 * k + 1])
                chain = cutlass.const_expr((2 * i + k) % 4)
                starts[chain] = ptx.mma_m16n8k16(zeros, b, starts[chain], "f16")
        for e in cutlass.range_constexpr(2):
            rStart[e] = (starts[0][e] + starts[1][e] + (starts[2][e] + starts[3][e])) * -(2.0**-20)
        return state.rScaled, cutlass.select_(small_page, Float32(2.0**-15), Float32(1.0))

    # -- the unfinished page --------------------------------------------------------------------------------------

    @cute.jit
    def tail_of(self, extra, sequence, kv_head, length, appended):
        """The length, -1 for a sequence without a row in the tail, and the tail's row."""
        mTail = extra.mTail
        row = extra.mSequences[sequence]
        known = row >= 0 and row < mTail.shape[0]
        length = cutlass.select_(known, length, Int32(-1))
        row = cutlass.select_(known, row, Int32(0))
        address = mTail.iterator.toint() + 2 * (Int64(row) * mTail.stride[0] + Int64(kv_head) * mTail.stride[2])
        end = cutlass.min(length, 0x7FFFFFFF - appended) + appended
        return length, TailRow(address, mTail.stride[1], end // INT4_PAGE * INT4_PAGE)

    def tail_memory(self, tiles):
        """Shared memory for the keys of an unfinished page, and the rows of queries."""
        return cute.arch.alloc_smem(Uint32, (INT4_PAGE + BLOCK_ROWS) * tiles.head_dim // 2, alignment=128).toint()

    @cute.jit
    def load_tail(self, tiles, to, row: TailRow, query_address, start, end, warp, lane):
        """Start loading an unfinished page in the warp that it belongs to, as part of the next group of copies."""
        units = cutlass.const_expr(tiles.head_dim // 8)
        count = cutlass.min(end - row.first_key, INT4_PAGE)
        page = (row.first_key - start) // INT4_PAGE
        if row.first_key >= start and count > 0 and page % tiles.warps == warp % tiles.warps:
            for i in cutlass.range_constexpr(INT4_PAGE * units // 32):
                key, unit = (i * 32 + lane) // units, (i * 32 + lane) % units
                if key < count:
                    at = to + self.tail_offset(tiles, key, unit)
                    ptx.cp_async(at, row.address + 2 * Int64(key) * row.stride + unit * 16, 16)
            for i in cutlass.range_constexpr(units // 4):
                unit = 4 * i + lane % 4
                at = to + INT4_PAGE * units * 16 + self.tail_offset(tiles, lane // 4, unit)
                ptx.cp_async(at, query_address + unit * 16, 16)

    def tail_offset(self, tiles, row, unit):
        """Of 16 bytes of a row; lanes that read together hit 32 banks."""
        return row * (tiles.head_dim * 2) + (unit ^ (row & 1) * 4) * 16

    @cute.jit
    def park_tail(self, row: TailRow, rows_ptr, inverse_scales, is_bf16, warp, lane):
        """Complete behind the block's next barrier."""
        parked = cute.arch.alloc_smem(Uint32, 64, alignment=16).toint() + lane * 8
        if warp == 0:
            ptx.store_shared(parked, [Uint32(ptx.float_as_int(x)) for x in inverse_scales])
        return Tail(rows_ptr, parked, row.first_key, is_bf16)

    @cute.jit
    def mma_tail(self, tiles, tail: Tail, rScore, first_key, lane):
        """Scores of a step from the tail where its page is unfinished."""
        if first_key >= tail.first_key:
            inverse = [ptx.int_as_float(Int32(word)) for word in ptx.load_shared(tail.parked_ptr, 2)]
            rTail = cute.make_rmem_tensor(4, Float32)
            queries = tail.rows_ptr + INT4_PAGE * tiles.head_dim * 2
            for tile in cutlass.range(tiles.tiles_per_step, unroll=1):
                rTail.fill(0.0)
                for c in cutlass.range_constexpr(tiles.head_dim // 32):
                    unit = c * 4 + lane % 4
                    key = tile * TILE_KEYS + lane // 4
                    rows = [
                        ptx.load_shared(tail.rows_ptr + self.tail_offset(tiles, key + 8 * half, unit), 4)
                        for half in range(2)
                    ]
                    q = ptx.load_shared(queries + self.tail_offset(tiles, lane // 4, unit), 4)
                    for i in cutlass.range_constexpr(2):
                        a = (rows[0][2 * i], rows[1][2 * i], rows[0][2 * i + 1], rows[1][2 * i + 1])
                        self.mma_either(a, (q[2 * i], q[2 * i + 1]), rTail, tail.is_bf16)
                for i in cutlass.range_constexpr(4 * tiles.tiles_per_step):
                    rScore[i] = cutlass.select_(tile == i // 4, rTail[i % 4] * inverse[i % 2], rScore[i])

    @cute.jit
    def mma_either(self, a, b, rScore, is_bf16):
        c = [rScore[i] for i in range(4)]
        if is_bf16 != 0:
            c = ptx.mma_m16n8k16(a, b, c, "bf16")
        else:
            c = ptx.mma_m16n8k16(a, b, c, "f16")
        for i in cutlass.range_constexpr(4):
            rScore[i] = c[i]


@dataclass(frozen=True)
class PageTiles(WarpTiles):
    """The tiles of one warp over INT4 pages, the four of a page in a step."""

    @property
    def value_bytes(self) -> int:
        return 2

    def row_swizzle(self, row):
        """The XOR of the units of a row of values: the units of a column in eight rows lie in 32 banks."""
        return row * self.row_bytes // 128 % self.units

    @property
    def lookups(self) -> int:
        return 1

    @property
    def offset_words(self) -> int:
        return 2

    @property
    def stage_bytes(self) -> int:
        """Codes of a page, then the scales and zeros of its channels, or of its values."""
        return INT4_PAGE * self.row_bytes + 512

    @cute.jit
    def locate_page(self, page, rOffset, num_blocks, scale_addresses, keys_left):
        """keys_left: from the first key of the page to the end of the split."""
        page = cute.arch.shuffle_sync(page, 0)
        exists = page >= 0 and page < num_blocks
        page = Uint32(cutlass.select_(exists, page, Int32(0)))
        count = Uint32(cutlass.select_(exists, cutlass.min(cutlass.max(keys_left, 0), INT4_PAGE), Int32(0)))
        for i in cutlass.range_constexpr(2):
            first, of_page = scale_addresses[i]
            count |= ((first + page * of_page) & 1) << (8 + i)
        rOffset[PAGE_INDEX] = page
        rOffset[PAGE_KEYS] = count

    @cute.jit
    def cache_base(self, mK, mV, extra, kv_head, lane):
        rows = []
        for mX in (mK, mV):
            strides = [Uint32(mX.stride[i] // 16) for i in range(2)]
            rows.append(HeadRows(mX.iterator.toint() + Int64(kv_head) * mX.stride[2], *strides))
        for mX in (extra.mKeyScale, extra.mKeyZero):
            rows.append(HeadRows(mX.iterator.toint() + 2 * Int64(kv_head) * mX.stride[1], Uint32(mX.stride[0] // 8)))
        rows += [head_rows(mX, kv_head) for mX in (extra.mValueScale, extra.mValueZero)]
        return PageBase(*rows)

    @cute.jit
    def load(self, slice_idx: cutlass.Constexpr, stage_ptr, rOffset, base: PageBase, tile_idx, num_tiles, lane):
        if tile_idx < num_tiles:
            codes = base.mV if cutlass.const_expr(slice_idx == 1) else base.mK
            page = rOffset[PAGE_INDEX]
            row, unit = lane // self.units, lane % self.units
            if cutlass.const_expr(slice_idx == 1):
                unit = unit ^ self.row_swizzle(row)
            to = stage_ptr + row * self.row_bytes + unit * 16
            address = codes.address + lane % self.units * 16
            first = page * codes.page_stride + Uint32(row) * codes.token_stride
            for i in cutlass.range_constexpr(INT4_PAGE // self.rows_per_load):
                source = address + 16 * Int64(first + i * self.rows_per_load * codes.token_stride)
                ptx.cp_async(to + i * 512, source, 16)
            to = stage_ptr + INT4_PAGE * self.row_bytes
            if cutlass.const_expr(slice_idx == 0):
                groups = cutlass.const_expr(self.head_dim // 8)
                for i, channels in enumerate((base.mKeyScale, base.mKeyZero)):
                    if lane // groups == i:
                        source = channels.address + 16 * Int64(page * channels.page_stride + Uint32(lane % groups))
                        ptx.cp_async(to + lane * 16, source, 16)
            else:
                count = Int32(rOffset[PAGE_KEYS] & 0xFF)
                for i in cutlass.range_constexpr(4):
                    tokens = (base.mValueScale, base.mValueZero)[i % 2]
                    key = lane + cutlass.const_expr(i // 2 * 32)
                    valid = cutlass.select_(key < count, Int32(4), Int32(0))
                    offset = page * tokens.page_stride + Uint32(key) * tokens.token_stride
                    source = tokens.address + 2 * Int64(offset)
                    ptx.cp_async(to + key * 8 + i % 2 * 4, source & -4, 4, valid)
        ptx.cp_async_commit()

    @cute.jit
    def scales_of(self, tile: cutlass.Constexpr, stage_ptr, rNow, lane):
        """A lane reads the words of a key's scale and zero, and takes the half of each that is the head's."""
        halves = 0x5410 + (rNow[PAGE_KEYS] >> 8 & 1) * 0x22 + (rNow[PAGE_KEYS] >> 9 & 1) * 0x2200
        found = []
        for h in cutlass.range_constexpr(2):
            at = stage_ptr + INT4_PAGE * self.row_bytes + (tile * TILE_KEYS + 8 * h) * 8 + lane // 4 * 8
            words = ptx.load_shared(at, 2)
            scale, zero = ptx.unpack_f32x2(ptx.prmt(words[0], words[1], Int32(halves)), "f16")
            found.append((scale, zero))
        return [], found

    @cute.jit
    def mask(self, rScore, rNow, scoring, first_key, lane):
        sVisible = scoring[0].sVisible
        count = rNow[PAGE_KEYS] & 0xFF
        if (
            count != INT4_PAGE
            or first_key < sVisible[VisibleWords.FIRST]
            or first_key + INT4_PAGE > sVisible[VisibleWords.LAST]
        ):
            for tile in cutlass.range_constexpr(self.tiles_per_step):
                exist = cutlass.select_(count != 0, Uint32(0xFFFF), Uint32(0))  # no row sees keys past the last
                self.mask_tile(tile, rScore[0], exist, sVisible, first_key + tile * TILE_KEYS, lane)

    @cute.jit
    def mma_values_of_tile(
        self, slice_idx: cutlass.Constexpr, tile: cutlass.Constexpr, stage_ptr, rScore, rNow, rOut, lane
    ):
        """Lane l addresses the row of key l % 16; a word that it receives holds four dims of two keys."""
        p, rest = self.p_operands(tile, rScore[0])
        row, column = lane % TILE_KEYS, lane // TILE_KEYS ^ self.row_swizzle(lane % 8)
        for two in cutlass.range_constexpr(self.units // 2):
            at = stage_ptr + (tile * TILE_KEYS + row) * self.row_bytes + (column ^ (2 * two)) * 16
            words = ptx.ldmatrix_x4_trans(at)
            for i in cutlass.range_constexpr(4):
                half = [word >> (8 if i % 2 else 0) for word in words[i // 2 * 2 : i // 2 * 2 + 2]]
                a = [word & mask for word in half for mask in (0x000F000F, 0x00F000F0)]
                self.mma_output(a, p, rest, rOut[0], 16 * two + 4 * i)


@cute.jit
def sixteenth(pair: Uint32) -> Uint32:
    """A sixteenth of two f16."""
    return ptx.packed("mul.rn.f16x2", pair, Uint32(0x2C002C00))
