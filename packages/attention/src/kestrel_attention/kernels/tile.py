"""What a warp does with tiles of 16 keys: it loads them, multiplies them with the queries, weighs and adds the values.

No tile passes through shared memory. A product does not care in which order its inner dimension is summed, so that a
lane loads 16 consecutive bytes of a row and uses them as they are; (g, t) is lane 4 g + t:

    scores   S' = K Q'   16 x 8 x 16: A = K: keys g and g + 8, dims 16 t.. of a row; B = Q': row g, the same dims
    output   O' = V' P'  16 x 8 x 16: A = V': keys 2t, 2t + 1, 2t + 8, 2t + 9, dims 16 g.. of a row; B = P', which is
                         what the lanes have of S', transposed

What a cache holds shows in how a row's words become operands: a class for each kind, below. Codes become f16, which
holds every e4m3 code exactly. P is the sum of two 16-bit numbers, so that it adds no rounding of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import ptx

TILE = 16  # keys of one product P V
ROWS = 8  # of a block: queries x heads of a KV head


class Codes:
    """What a cache may hold; the kinds differ in what stands here."""

    bits: int  # of a cached element
    kind: str = "f16"  # the type of the products' operands
    more: type | None = None  # what a launch is given besides, a NamedTuple
    finite: bool = False  # whatever the bits
    exponent: int = 0  # products of keys come out as 2^-exponent of what they are
    query_exponent: int = 14  # of the largest of a row of queries in f16
    scale_words: int = 0  # registers of a lane for the scales of the key that it looks up
    sums: int = 2  # registers of a lane for sums over keys: of the weights of rows 2t and 2t + 1, and others after them
    adjacent: bool = False  # the tiles of a step lie side by side

    grain: int = TILE  # chunks start at multiples of it
    tail: bool = False  # the keys of an unfinished page lie elsewhere

    def arrange(self, words):
        """Four words of queries, of consecutive dims, in the order in which key_operand takes the dims."""
        return words

    def first_scores(self, tiles, sQ, rStart) -> None:
        """What scores start from, into rStart, of rows 2t and 2t + 1."""

    def scales_at(self, more, tiles, kv_head, lane):
        """Where the scales of this head lie."""
        return ()

    def step_words(self, tiles) -> int:
        """Registers of a lane for what the keys of a step share."""
        return 0

    def locate_step(self, tiles, rAt, scales_at, page, blocks) -> None:
        """Start loading what the keys of a step share."""

    def step_state(self, tiles, warps, warp, lane):
        """What step_queries works in."""
        return None

    def step_queries(self, tiles, sQ, rAt, rStart, state):
        """The queries for the keys of a step, and what their scores start from."""
        return sQ

    def locate_scales(self, rAt, at, scales_at, exists, block, offset) -> None:
        """Start loading the scales of a key into ``scale_words`` registers; ones where there is no key."""

    def key_scales(self, rAt, at, source):
        """The scales of keys g and g + 8, of which lanes source and source + 8 looked up; or nothing."""
        return []

    def value_scales(self, rAt, at, source):
        """The same of values, each with its zero or None."""
        return []


@dataclass(frozen=True)
class Plain(Codes):
    """A cache of the queries' dtype."""

    dtype: type[cutlass.Numeric]

    bits: ClassVar[int] = 16

    @property
    def kind(self) -> str:
        return "bf16" if self.dtype is cutlass.BFloat16 else "f16"

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        """A of product i with a chunk of keys: key g's registers start with ``at``, key g + 8's so many after."""
        return [rPiece[at + 2 * i + k // 2 + k % 2 * next_key] for k in range(4)]

    @cute.jit
    def value_operand(self, words, i: cutlass.Constexpr):
        """A of product i with one word of each of four keys' values."""
        return (
            ptx.permute(words[0], words[1], 0x5410),
            ptx.permute(words[0], words[1], 0x7632),
            ptx.permute(words[2], words[3], 0x5410),
            ptx.permute(words[2], words[3], 0x7632),
        )


@dataclass(frozen=True)
class E4m3(Codes):
    """A cache of e4m3 codes."""

    bit_trick: bool  # convert without the instruction, which sm_80 and sm_86 lack

    bits: ClassVar[int] = 8

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        low, high = self.widen(rPiece[at + i])
        low8, high8 = self.widen(rPiece[at + next_key + i])
        return low, low8, high, high8

    @cute.jit
    def value_operand(self, words, i: cutlass.Constexpr):
        selector = 0x7362 if cutlass.const_expr(i) else 0x5140
        a01 = self.widen(ptx.permute(words[0], words[1], selector))
        a23 = self.widen(ptx.permute(words[2], words[3], selector))
        return *a01, *a23

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


@dataclass(frozen=True)
class Tiles:
    """How a warp takes its tiles."""

    cache: Codes
    size: int  # dims of a row that are computed: 64, 128, 256, 512; a smaller head size is padded
    padded: bool  # the head size may be smaller than ``size``
    shares: int  # into which the keys of a chunk are dealt: tile x + shares follows tile x
    at_once: int  # tiles of a warp, loaded together
    pieces: int  # in which the keys (and the values) of these tiles are loaded
    value_split: int  # warps that take the same keys, and each a part of the values' dims
    split_weights: bool  # P as the sum of two 16-bit numbers

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        return self.size * self.cache.bits // 8

    @property
    def key_bytes(self) -> int:
        """What a lane loads of a row of keys at once: four lanes load so much each."""
        return min(16, self.row_bytes // 4)

    @property
    def key_chunks(self) -> int:
        return self.row_bytes // (4 * self.key_bytes)

    @property
    def key_dims(self) -> int:
        """Consecutive dims of a lane in one chunk of keys."""
        return self.key_bytes * 8 // self.cache.bits

    @property
    def key_products(self) -> int:
        """Of 16 dims, in one chunk of keys."""
        return self.key_dims // 4

    @property
    def value_bytes(self) -> int:
        """What a lane loads of a row of values at once: eight lanes load so much each."""
        return min(16, self.row_bytes // 8)

    @property
    def value_chunks(self) -> int:
        return self.row_bytes // (8 * self.value_bytes * self.value_split)

    @property
    def value_dims(self) -> int:
        """Consecutive dims of a lane in one chunk of values."""
        return self.value_bytes * 8 // self.cache.bits

    @property
    def value_products(self) -> int:
        """With one word of each of four keys' values: two of its dims each."""
        return 16 // self.cache.bits

    @property
    def words(self) -> int:
        """Registers of a lane for the keys, and again for the values, of its warp's tiles, in one piece."""
        return self.at_once * self.row_bytes // 8 // self.pieces

    @property
    def query_words(self) -> int:
        return self.size // 8

    @property
    def queries_in_shared(self) -> bool:
        return self.size >= (128 if self.cache.adjacent else 256)

    @property
    def lookups(self) -> int:
        """Lanes look up one key each: so many times for all tiles."""
        return (self.at_once + 1) // 2

    @property
    def located_words(self) -> int:
        """Registers of a lane that say where the keys of a step lie: 3 for each look-up, and scales."""
        return (3 + self.cache.scale_words) * self.lookups + self.cache.step_words(self)

    @property
    def apart(self) -> int:
        """From one tile of a step to the next."""
        return 1 if self.cache.adjacent else self.shares

    @property
    def share_tiles(self) -> int:
        """Tiles from the first of a share to the first of the next."""
        return self.at_once if self.cache.adjacent else 1

    @property
    def output_tiles(self) -> int:
        """Of 16 dims, of a warp."""
        return self.size // (16 * self.value_split)

    # -- loads ----------------------------------------------------------------------------------------------------

    @cute.jit
    def addresses(self, mK, mV, kv_head, part_of_values, lane):
        """Where the head's keys and values start, and a lane's part of each chunk of a row.

        Past the end of a shorter row a lane loads the row's start, which meets zeros in Q or is not written.
        """
        g, t = lane // 4, lane % 4
        element = cutlass.const_expr(mK.element_type.width // 8)
        row_bytes = mK.shape[3] * element
        key_base = mK.iterator.toint() + Int64(kv_head) * mK.stride[2] * element
        value_base = mV.iterator.toint() + Int64(kv_head) * mV.stride[2] * element
        value_base += part_of_values * self.value_chunks * 8 * self.value_bytes
        key_at = [c * 4 * self.key_bytes for c in range(self.key_chunks)]
        value_at = [c * 8 * self.value_bytes for c in range(self.value_chunks)]
        if cutlass.const_expr(self.padded):
            part = t * self.key_bytes
            key_at = [cutlass.select_(at + part < row_bytes, at + part, Int32(0)) for at in key_at]
            part = g * self.value_bytes
            value_at = [cutlass.select_(at + part < row_bytes, at + part, Int32(0)) for at in value_at]
        else:
            key_base += t * self.key_bytes
            value_base += g * self.value_bytes
        return key_base, value_base, key_at, value_at

    @cute.jit
    def load(self, piece: cutlass.Constexpr, rPiece, rAt, address, x, tiles, lane):
        """Start loading one piece of a step's keys, or of its values."""
        for tile in cutlass.range_constexpr(self.at_once):
            if x + tile * self.apart < tiles:
                if cutlass.const_expr(piece < self.pieces):
                    self.load_keys(piece, tile, rPiece, rAt, address, lane)
                else:
                    self.load_values(piece - self.pieces, tile, rPiece, rAt, address, lane)

    def key_units(self, piece: int, tile: int) -> list[tuple[int, int]]:
        """(chunk, first register of key g, before those of key g + 8) of what a piece holds of a tile's keys."""
        each = self.key_chunks // self.pieces if self.at_once == 1 else self.key_chunks
        return [(piece * each + i, (tile * each + i) * self.key_bytes // 2) for i in range(each)]

    def value_units(self, piece: int, tile: int) -> list[tuple[int, int]]:
        """(chunk, first register of four keys) of what a piece holds of a tile's values."""
        each = self.value_chunks // self.pieces if self.at_once == 1 else self.value_chunks
        return [(piece * each + i, (tile * each + i) * self.value_bytes) for i in range(each)]

    @cute.jit
    def load_keys(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, rAt, address, lane):
        base, _, key_at, _ = address
        units = cutlass.const_expr(self.key_units(piece, tile))
        words = cutlass.const_expr(self.key_bytes // 4)
        for half in cutlass.range_constexpr(2):
            at = cute.arch.shuffle_sync(rAt[3 * (tile // 2)], (tile % 2) * TILE + half * 8 + lane // 4)
            row = base + Int64(at) * 16
            for u in cutlass.range_constexpr(len(units)):
                c, register = units[u]
                loaded = ptx.load_words(row + Int64(key_at[c]), words)
                for i in cutlass.range_constexpr(words):
                    rPiece[register + words * half + i] = loaded[i]

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
    def multiply_keys(self, piece: cutlass.Constexpr, rPiece, sQ, rScore, x, tiles):
        """Scores of the keys that a piece holds, added to rScore."""
        if cutlass.const_expr(self.at_once == 1):
            self.multiply_keys_of(piece, 0, rPiece, sQ, rScore)
        else:
            for tile in cutlass.range_constexpr(self.at_once):
                if x + tile * self.apart < tiles:
                    self.multiply_keys_of(piece, tile, rPiece, sQ, rScore)

    @cute.jit
    def multiply_keys_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, sQ, rScore):
        units = cutlass.const_expr(self.key_units(piece, tile))
        for u in cutlass.range_constexpr(len(units)):
            c, register = units[u]
            for two in cutlass.range_constexpr(self.key_products // 2):
                q = self.four_words(sQ, c * self.key_products // 2 + two)
                for i in cutlass.range_constexpr(2):
                    a = self.cache.key_operand(rPiece, register, self.key_bytes // 4, 2 * two + i)
                    c4 = [rScore[4 * tile + k] for k in range(4)]
                    sums = ptx.mma(a, (q[2 * i], q[2 * i + 1]), c4, self.cache.kind)
                    for k in cutlass.range_constexpr(4):
                        rScore[4 * tile + k] = sums[k]

    @cute.jit
    def four_words(self, sQ, i: cutlass.Constexpr):
        """Four consecutive words of the lane's part of Q."""
        if cutlass.const_expr(cute.rank(sQ) == 2):
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
        of_values = []
        for tile in cutlass.range_constexpr(self.at_once):
            at = cutlass.const_expr(4 * tile)
            scales_at = cutlass.const_expr(3 * self.lookups + tile // 2 * self.cache.scale_words)
            source = tile % 2 * TILE + lane // 4
            key_scales = self.cache.key_scales(rNow, scales_at, source)
            value_scales = self.cache.value_scales(rNow, scales_at, source)
            of_values.append(value_scales)
            if x + tile * self.apart < tiles:
                for i in cutlass.range_constexpr(4):
                    rScore[at + i] *= scales[i % 2]
                    if cutlass.const_expr(len(key_scales) > 0):
                        rScore[at + i] *= key_scales[i // 2]
                if cap > 0.0:  # cap * tanh(x), of which rScore holds 2 x log2(e)
                    for i in cutlass.range_constexpr(4):
                        rScore[at + i] = cap * (1.0 - 2.0 / (1.0 + ptx.exp2(rScore[at + i])))
                key = start + (x + tile * self.apart) * TILE
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
                score = rScore[at + i]
                if cutlass.const_expr(len(value_scales) > 0):
                    score += self.log_size(value_scales[i // 2][0])
                largest[i % 2] = ptx.maximum(largest[i % 2], score)
        for distance in cutlass.range_constexpr(3):
            for e in cutlass.range_constexpr(2):
                other = cute.arch.shuffle_sync_bfly(largest[e], 4 << distance)
                largest[e] = ptx.maximum(largest[e], other)
        base = [cutlass.select_(x == -Float32.inf, Float32(0.0), x) for x in largest]
        if cute.arch.vote_any_sync(largest[0] > rMax[0] or largest[1] > rMax[1]):
            fade = [ptx.exp2(rMax[e] - base[e]) for e in range(2)]
            for e in cutlass.range_constexpr(self.cache.sums):
                rSum[e] *= fade[e % 2]
            for i in cutlass.range_constexpr(4 * self.output_tiles):
                rOut[i] *= fade[i % 2]
        for e in cutlass.range_constexpr(2):
            rMax[e] = largest[e]
        for i in cutlass.range_constexpr(4 * self.at_once):
            weight = ptx.exp2(rScore[i] - base[i % 2])
            rSum[i % 2] += weight
            if cutlass.const_expr(len(of_values[i // 4]) > 0):
                value_scale, zero = of_values[i // 4][i % 4 // 2]
                weight = weight * value_scale
                if cutlass.const_expr(zero is not None):
                    rSum[2 + i % 2] += weight * zero
            rScore[i] = weight

    @cute.jit
    def log_size(self, scale: Float32) -> Float32:
        """The binary logarithm of a scale's size, not below that of the smallest scales."""
        return ptx.maximum(ptx.log2(ptx.float_of(ptx.bits_of(scale) & 0x7FFFFFFF)), Float32(-100.0))

    @cute.jit
    def multiply_values(self, piece: cutlass.Constexpr, rPiece, rScore, rNow, rOut, x, tiles, lane):
        """Add weights times values for what a piece holds."""
        if cutlass.const_expr(self.at_once == 1):
            self.multiply_values_of(piece, 0, rPiece, rScore, rNow, rOut, lane)
        else:
            for tile in cutlass.range_constexpr(self.at_once):
                if x + tile * self.apart < tiles:
                    self.multiply_values_of(piece, tile, rPiece, rScore, rNow, rOut, lane)

    @cute.jit
    def multiply_values_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, rPiece, rScore, rNow, rOut, lane):
        units = cutlass.const_expr(self.value_units(piece, tile))
        words = cutlass.const_expr(self.value_bytes // 4)
        exist = rNow[3 * (tile // 2) + 2] >> (tile % 2 * TILE)
        if cutlass.const_expr(not self.cache.finite):
            self.clear_missing(rPiece, units, exist, lane)
        weights, rest = [], []
        for half in cutlass.range_constexpr(2):
            x, y = rScore[4 * tile + 2 * half], rScore[4 * tile + 2 * half + 1]
            pair = ptx.pack_pair(x, y, self.cache.kind)
            weights.append(ptx.transpose(pair))
            if cutlass.const_expr(self.split_weights):
                low, high = ptx.unpack_pair(pair, self.cache.kind)
                rest.append(ptx.transpose(ptx.pack_pair(x - low, y - high, self.cache.kind)))
        for u in cutlass.range_constexpr(len(units)):
            c, register = units[u]
            for w in cutlass.range_constexpr(words):
                r = [rPiece[register + key * words + w] for key in range(4)]
                out = cutlass.const_expr(4 * (c * self.value_dims // 2 + w * self.value_products))
                for i in cutlass.range_constexpr(self.value_products):
                    self.add_output(self.cache.value_operand(r, i), weights, rest, rOut, out + 4 * i)

    @cute.jit
    def clear_missing(self, rPiece, units: cutlass.Constexpr, exist, lane):
        """Zeros for values of keys that do not exist: what lies there may be NaN."""
        words = cutlass.const_expr(self.value_bytes // 4)
        if (exist & 0xFFFF) != 0xFFFF:
            for key in cutlass.range_constexpr(4):
                place = lane % 4 * 2 + key % 2 + key // 2 * 8
                if (exist >> place) & 1 == 0:
                    for u in cutlass.range_constexpr(len(units)):
                        for i in cutlass.range_constexpr(words):
                            rPiece[units[u][1] + key * words + i] = Uint32(0)

    @cute.jit
    def add_output(self, a, weights, rest, rOut, at: cutlass.Constexpr):
        c = [rOut[at + i] for i in range(4)]
        c = ptx.mma(a, weights, c, self.cache.kind)
        if cutlass.const_expr(self.split_weights):
            c = ptx.mma(a, rest, c, self.cache.kind)
        for i in cutlass.range_constexpr(4):
            rOut[at + i] = c[i]
