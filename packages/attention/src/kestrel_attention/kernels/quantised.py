"""What a warp does with caches of integer codes and of e5m2; tile.py has the rest.

Codes become f16, exactly: e5m2 is the high byte of f16; an integer n of up to 10 bits is, as the bits of a subnormal
f16, n 2^-24, and behind the exponent of 1024 it is 1024 + n.

INT8    K: code + 128 as a subnormal; what 128 gives with the same queries is where the scores start from.
        V: 1024 + code + 128, less 1152.
INT4    A step takes the 64 keys of a page. K: the code as a subnormal, of which every other one stands four bits
        higher and meets a sixteenth of the query. The scale of a channel goes into the queries, once a page; its zero,
        multiplied with these, is where the scores start from.
        V: the code as a subnormal too, read from shared memory transposed, so that two keys lie in a register; sums of
        those that stand four bits higher are brought down at the end, where zeros times weights are taken off.

A key's scale multiplies its scores. A value's scale multiplies its weight, and its logarithm is added to the score
before the largest is looked for: weights with their scales then fit f16 whatever the scales are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import ptx

from .tile import TILE, Bytes, Codes, Tiles

PAGE = 64  # slots of an INT4 cache
ONE = 0x3F800000


class Dtype(NamedTuple):
    bf16: Int32  # 1: queries and results are bf16; 0: fp16


class Int8Scales(NamedTuple):
    mKeyScale: cute.Tensor
    mValueScale: cute.Tensor
    bf16: Int32


class Int4Scales(NamedTuple):
    mKeyScale: cute.Tensor
    mKeyZero: cute.Tensor
    mValueScale: cute.Tensor
    mValueZero: cute.Tensor
    mTail: cute.Tensor
    mSequences: cute.Tensor
    bf16: Int32


@dataclass(frozen=True)
class E5m2(Bytes):
    """A cache of e5m2 codes."""

    more: ClassVar[type] = Dtype

    @cute.jit
    def widen(self, word):
        """Four codes as two pairs of f16."""
        return [ptx.prmt(word, Uint32(0), selector) for selector in (0x1404, 0x3424)]


@dataclass(frozen=True)
class Int8(Codes):
    """A cache of INT8 codes with a scale per token and head."""

    more: ClassVar[type] = Int8Scales
    bits: ClassVar[int] = 8
    scale_words: ClassVar[int] = 2
    exponent: ClassVar[int] = 24
    finite: ClassVar[bool] = True

    @cute.jit
    def arrange(self, words):
        """Queries in the order of key_operand: of four dims the first with the third."""
        return [ptx.prmt(words[i // 2 * 2], words[i // 2 * 2 + 1], (0x5410, 0x7632)[i % 2]) for i in range(4)]

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        a, b = rPiece[at + i], rPiece[at + next_key + i]
        even = [(x ^ 0x00800080) & 0x00FF00FF for x in (a, b)]
        odd = [((x >> 8) ^ 0x00800080) & 0x00FF00FF for x in (a, b)]
        return *even, *odd

    @cute.jit
    def value_operand(self, words, i: cutlass.Constexpr):
        selector = 0x7632 if cutlass.const_expr(i) else 0x5410
        pairs = []
        for k in cutlass.range_constexpr(2):
            word = ptx.prmt(words[2 * k], words[2 * k + 1], selector)
            for shifted in (word, word >> 8):
                pair = (shifted & 0x00FF00FF) ^ 0x64806480
                pairs.append(ptx.packed("add.rn.f16x2", pair, Uint32(0xE480E480)))
        return pairs

    @cute.jit
    def first_scores(self, tiles, sQ, rStart):
        """What codes of 128 give, taken off."""
        start = [Float32(0.0)] * 4
        for i in cutlass.range_constexpr(tiles.query_words // 4):
            q = tiles.four_words(sQ, i)
            for k in cutlass.range_constexpr(2):
                start = ptx.mma_m16n8k16([Uint32(0x00800080)] * 4, (q[2 * k], q[2 * k + 1]), start, "f16")
        for e in cutlass.range_constexpr(2):
            rStart[e] = -start[e]

    @cute.jit
    def scales_at(self, more, tiles, kv_head, lane):
        return [
            (mX.iterator.toint() + 4 * Int64(kv_head) * mX.stride[2], Uint32(mX.stride[0]), Uint32(mX.stride[1]))
            for mX in (more.mKeyScale, more.mValueScale)
        ]

    @cute.jit
    def locate_scales(self, rAt, at: cutlass.Constexpr, scales_at, exists, block, offset):
        for i in cutlass.range_constexpr(2):
            base, of_block, of_slot = scales_at[i]
            address = base + 4 * Int64(Uint32(block) * of_block + Uint32(offset) * of_slot)
            rAt[at + i] = ptx.load_global_if(exists, address, ONE)

    @cute.jit
    def key_scales(self, rAt, at: cutlass.Constexpr, source):
        return [ptx.int_as_float(Int32(cute.arch.shuffle_sync(rAt[at], source + 8 * h))) for h in range(2)]

    @cute.jit
    def value_scales(self, rAt, at: cutlass.Constexpr, source):
        return [(ptx.int_as_float(Int32(cute.arch.shuffle_sync(rAt[at + 1], source + 8 * h))), None) for h in range(2)]


@dataclass(frozen=True)
class Int4(Codes):
    """A cache of INT4 codes after KIVI; the tiles of a step lie in one page."""

    more: ClassVar[type] = Int4Scales
    bits: ClassVar[int] = 4
    exponent: ClassVar[int] = 24
    query_exponent: ClassVar[int] = -1  # below 1: times a channel's scale, they are in the range of f16
    finite: ClassVar[bool] = True
    sums: ClassVar[int] = 4
    adjacent: ClassVar[bool] = True
    grain: ClassVar[int] = PAGE
    tail: ClassVar[bool] = True

    # -- operands -------------------------------------------------------------------------------------------------

    @cute.jit
    def fours(self, words):
        """Pairs of eight consecutive dims in the order in which nibbles come: the first with the fifth."""
        return [ptx.prmt(words[i // 2], words[i // 2 + 2], (0x5410, 0x7632)[i % 2]) for i in range(4)]

    @cute.jit
    def arrange(self, words):
        pairs = self.fours(words)
        return [sixteenth(pairs[i]) if i % 2 else pairs[i] for i in range(4)]

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        words = [rPiece[at + key * next_key + i // 2] >> (8 if i % 2 else 0) for key in range(2)]
        return [word & mask for mask in (0x000F000F, 0x00F000F0) for word in words]

    @cute.jit
    def settle(self, tiles, rOut, rSum, odd: cutlass.Constexpr):
        zeros = rSum[2 + odd]
        for distance in cutlass.range_constexpr(3):
            zeros += cute.arch.shuffle_sync_bfly(zeros, 4 << distance)
        for i in cutlass.range_constexpr(tiles.output_tiles):
            for k in cutlass.range_constexpr(2):
                rOut[4 * i + odd + 2 * k] = rOut[4 * i + odd + 2 * k] * (2.0**24, 2.0**20)[k] - zeros

    # -- scales ---------------------------------------------------------------------------------------------------

    @cute.jit
    def scales_at(self, more, tiles, kv_head, lane):
        """Of scales and zeros of values: whether a lane's is the upper half of its word, and if pages change that."""
        found = []
        for mX in (more.mValueScale, more.mValueZero):
            elements = (mX.iterator.toint() >> 1) + Int64(kv_head) * mX.stride[2] + Int64(lane // 4) * mX.stride[1]
            found.append((Uint32(elements) & 1, Uint32(mX.stride[0]) & 1))
        return found

    @cute.jit
    def step_state(self, tiles, warps: cutlass.Constexpr, warp, lane):
        """Where a warp's lanes exchange a page's scales and zeros; scaled queries.

        Four lanes that read together find neighbouring groups of 8 channels. A group of zeros is there as operands.
        """
        groups, parts = cutlass.const_expr((tiles.size // 8, tiles.key_dims // 8))
        shared = cute.arch.alloc_smem(Uint32, warps * groups * 12, alignment=16).toint() + warp * (groups * 48)
        place = lane % groups % parts * 4 + lane % groups // parts
        of_scales = lane % (2 * groups) < groups
        mine = shared + place * 48 + cutlass.select_(of_scales, 0, 16)
        return mine, of_scales, shared + lane % 4 * 48, cute.make_rmem_tensor(tiles.query_words, Uint32)

    @cute.jit
    def step_queries(self, tiles, sQ, slot, rStart, state):
        mine, of_scales, found, rScaled = state
        groups, parts = cutlass.const_expr((tiles.size // 8, tiles.key_dims // 8))
        ptx.cp_async_wait(tiles.slots - 1)
        cute.arch.sync_warp()
        raw = slot + PAGE * tiles.row_bytes + cute.arch.lane_idx() % (2 * groups) * 16
        pairs = self.fours(ptx.load_shared(raw, 4))
        even = [sixteenth(pairs[2 * k]) for k in range(2)]
        if of_scales:
            ptx.store_shared(mine, pairs)
        else:
            for k in cutlass.range_constexpr(2):
                ptx.store_shared(mine + 16 * k, [even[k], even[k], pairs[2 * k + 1], pairs[2 * k + 1]])
        cute.arch.sync_warp()
        starts = [[Float32(0.0)] * 4 for _ in range(4)]  # in four chains: a product waits for the one before it
        for i in cutlass.range_constexpr(tiles.query_words // 4):
            first = cutlass.const_expr(i // parts * 4 * parts + i % parts * 4)  # of four lanes' groups
            scales = ptx.load_shared(found + 48 * first, 4)
            q = tiles.four_words(sQ, i)
            for k in cutlass.range_constexpr(4):
                rScaled[4 * i + k] = ptx.packed("mul.rn.f16x2", q[k], scales[k])
            for k in cutlass.range_constexpr(2):
                zeros = ptx.load_shared(found + (48 * first + 16 + 16 * k), 4)
                b = (rScaled[4 * i + 2 * k], rScaled[4 * i + 2 * k + 1])
                chain = cutlass.const_expr((2 * i + k) % 4)
                starts[chain] = ptx.mma_m16n8k16(zeros, b, starts[chain], "f16")
        for e in cutlass.range_constexpr(2):
            rStart[e] = (starts[0][e] + starts[1][e] + (starts[2][e] + starts[3][e])) * -(2.0**-20)
        return rScaled

    # -- the unfinished page --------------------------------------------------------------------------------------

    @cute.jit
    def tail_of(self, more, sequence, kv_head, length, added):
        """The length, -1 for a sequence without a tail, and where its tail lies and starts."""
        mTail = more.mTail
        row = more.mSequences[sequence]
        known = row >= 0 and row < mTail.shape[0]
        length = cutlass.select_(known, length, Int32(-1))
        row = cutlass.select_(known, row, Int32(0))
        base = mTail.iterator.toint() + 2 * (Int64(row) * mTail.stride[0] + Int64(kv_head) * mTail.stride[2])
        end = cutlass.min(length, 0x7FFFFFFF - added) + added
        return length, (base, mTail.stride[1], end // PAGE * PAGE)

    @cute.jit
    def park_tail(self, tail, inverse, warp, lane):
        """What is needed once at most waits in shared memory, behind the block's next barrier."""
        base, stride, first, query_row, bf16 = tail
        mine = cute.arch.alloc_smem(Uint32, 256, alignment=16).toint() + lane * 32
        words = [Uint32(half) for x in (base, query_row, Int64(stride)) for half in (x, x >> 32)]
        if warp == 0:
            ptx.store_shared(mine, words[:4])
            ptx.store_shared(mine + 16, [*words[4:], *(Uint32(ptx.float_as_int(x)) for x in inverse)])
        return mine, first, bf16

    @cute.jit
    def multiply_tail(self, tiles, tail, rScore, key, lane):
        """Scores of a page's keys, the first of which is ``key``, from the tail where the page is not finished."""
        mine, first, bf16 = tail
        if key >= first:
            words = [*ptx.load_shared(mine, 4), *ptx.load_shared(mine + 16, 4)]
            base, query_row, stride = [Int64(words[2 * i]) | Int64(words[2 * i + 1]) << 32 for i in range(3)]
            inverse = [ptx.int_as_float(Int32(word)) for word in words[6:]]
            rTail = cute.make_rmem_tensor(4, Float32)
            for tile in cutlass.range(tiles.at_once, unroll=1):
                rTail.fill(0.0)
                address = base + 2 * Int64(tile * TILE + lane // 4) * stride + lane % 4 * 16
                for c in cutlass.range(tiles.size // 32, unroll=1):
                    rows = [ptx.load_global(address + 16 * half * stride + c * 64, 4) for half in range(2)]
                    q = ptx.load_global(query_row + c * 64 + lane % 4 * 16, 4)
                    for i in cutlass.range_constexpr(2):
                        a = (rows[0][2 * i], rows[1][2 * i], rows[0][2 * i + 1], rows[1][2 * i + 1])
                        self.multiply_either(a, (q[2 * i], q[2 * i + 1]), rTail, bf16)
                for i in cutlass.range_constexpr(4 * tiles.at_once):
                    rScore[i] = cutlass.select_(tile == i // 4, rTail[i % 4] * inverse[i % 2], rScore[i])

    @cute.jit
    def multiply_either(self, a, b, rScore, bf16):
        c = [rScore[i] for i in range(4)]
        if bf16 != 0:
            c = ptx.mma_m16n8k16(a, b, c, "bf16")
        else:
            c = ptx.mma_m16n8k16(a, b, c, "f16")
        for i in cutlass.range_constexpr(4):
            rScore[i] = c[i]


@dataclass(frozen=True)
class PageTiles(Tiles):
    """How a warp takes the pages of an INT4 cache, the four tiles of one in a step."""

    @property
    def value_bytes(self) -> int:
        return 2

    def turn(self, row):
        """How the units of a row of values are permuted: eight rows' units of a column lie in 32 banks."""
        return row * self.row_bytes // 128 % self.units

    @property
    def lookups(self) -> int:
        return 1

    @property
    def located_words(self) -> int:
        """A page, and how many of its keys exist with where scales and zeros lie in their words."""
        return 2

    @property
    def slot_bytes(self) -> int:
        """Codes and scales and zeros of a page: of its channels, or of its values."""
        return PAGE * self.row_bytes + 512

    @cute.jit
    def locate_page(self, page, rAt, blocks, scales_at, left):
        """left: keys from the first of the page to the chunk's end."""
        page = cute.arch.shuffle_sync(page, 0)
        exists = page >= 0 and page < blocks
        page = Uint32(cutlass.select_(exists, page, Int32(0)))
        count = Uint32(cutlass.select_(exists, cutlass.min(cutlass.max(left, 0), PAGE), Int32(0)))
        for i in cutlass.range_constexpr(2):
            first, of_page = scales_at[i]
            count |= ((first + page * of_page) & 1) << (8 + i)
        rAt[0] = page
        rAt[1] = count

    @cute.jit
    def addresses(self, mK, mV, more, kv_head, lane):
        """Where the head's bytes start, from a page to the next, and from a row to the next, in units of their own."""
        found = []
        for mX in (mK, mV):
            strides = [Uint32(mX.stride[i] // 16) for i in range(2)]
            found.append((mX.iterator.toint() + Int64(kv_head) * mX.stride[2], *strides))
        for mX in (more.mKeyScale, more.mKeyZero):
            found.append((mX.iterator.toint() + 2 * Int64(kv_head) * mX.stride[1], Uint32(mX.stride[0] // 8), None))
        for mX in (more.mValueScale, more.mValueZero):
            strides = [Uint32(mX.stride[i]) for i in range(2)]
            found.append((mX.iterator.toint() + 2 * Int64(kv_head) * mX.stride[2], *strides))
        return found

    @cute.jit
    def load(self, piece: cutlass.Constexpr, slot, rAt, address, x, tiles, lane):
        if x < tiles:
            base, of_page, stride = address[piece]
            page = rAt[0]
            row, unit = lane // self.units, lane % self.units
            if cutlass.const_expr(piece == 1):
                unit = unit ^ self.turn(row)
            to = slot + row * self.row_bytes + unit * 16
            base += lane % self.units * 16
            first = page * of_page + Uint32(row) * stride
            for i in cutlass.range_constexpr(PAGE // self.rows_at_once):
                ptx.cp_async(to + i * 512, base + 16 * Int64(first + i * self.rows_at_once * stride), 16)
            to = slot + PAGE * self.row_bytes
            if cutlass.const_expr(piece == 0):
                groups = cutlass.const_expr(self.size // 8)
                for i in cutlass.range_constexpr(2):
                    if lane // groups == i:
                        base, of_page, _ = address[2 + i]
                        source = base + 16 * Int64(page * of_page + Uint32(lane % groups))
                        ptx.cp_async(to + lane * 16, source, 16)
            else:
                count = Int32(rAt[1] & 0xFF)
                for i in cutlass.range_constexpr(4):
                    base, of_page, stride = address[4 + i % 2]
                    key = lane + cutlass.const_expr(i // 2 * 32)
                    there = cutlass.select_(key < count, Int32(4), Int32(0))
                    source = base + 2 * Int64(page * of_page + Uint32(key) * stride)
                    ptx.cp_async(to + key * 8 + i % 2 * 4, source & -4, 4, there)
        ptx.cp_async_commit()

    @cute.jit
    def scales_of(self, tile: cutlass.Constexpr, slot, rNow, lane):
        """A lane finds the words of a key's scale and zero, and takes the half of each that is the head's."""
        halves = 0x5410 + (rNow[1] >> 8 & 1) * 0x22 + (rNow[1] >> 9 & 1) * 0x2200
        found = []
        for h in cutlass.range_constexpr(2):
            at = slot + PAGE * self.row_bytes + (tile * TILE + 8 * h) * 8 + lane // 4 * 8
            words = ptx.load_shared(at, 2)
            scale, zero = ptx.unpack_f32x2(ptx.prmt(words[0], words[1], Int32(halves)), "f16")
            found.append((scale, zero))
        return [], found

    @cute.jit
    def hide_keys(self, rScore, rNow, sSeen, key, lane):
        count = rNow[1] & 0xFF
        if count != PAGE or key < sSeen[0] or key + PAGE > sSeen[1]:
            for tile in cutlass.range_constexpr(self.at_once):
                exist = cutlass.select_(count != 0, Uint32(0xFFFF), Uint32(0))  # no row sees keys past the last
                self.hide_keys_of(tile, rScore, exist, sSeen, key + tile * TILE, lane)

    @cute.jit
    def multiply_values_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, slot, rScore, rNow, rOut, lane):
        """Lane l names the row of key l % 16; a word it is given holds four dims of two keys."""
        weights, rest = self.weights_of(tile, rScore)
        row, column = lane % TILE, lane // TILE ^ self.turn(lane % 8)
        for two in cutlass.range_constexpr(self.units // 2):
            at = slot + (tile * TILE + row) * self.row_bytes + (column ^ (2 * two)) * 16
            words = ptx.ldmatrix_x4_trans(at)
            for i in cutlass.range_constexpr(4):
                half = [word >> (8 if i % 2 else 0) for word in words[i // 2 * 2 : i // 2 * 2 + 2]]
                a = [word & mask for word in half for mask in (0x000F000F, 0x00F000F0)]
                self.add_output(a, weights, rest, rOut, 16 * two + 4 * i)


@cute.jit
def sixteenth(pair: Uint32) -> Uint32:
    """A sixteenth of two f16."""
    return ptx.packed("mul.rn.f16x2", pair, Uint32(0x2C002C00))
