"""What a warp does with tiles of 16 keys: it loads them, multiplies them with the queries, weighs and adds the values.

A piece of a step (keys or values of some tiles, or a part of these) is copied into a slot in shared memory that only
its warp uses: what is under way takes no registers, and neighbouring lanes ask for neighbouring 16 bytes. A product
does not care in which order its inner dimension is summed, so that a lane reads up to 16 consecutive bytes of a row and
uses them as they are; (g, t) is lane 4 g + t:

    scores   S' = K Q'   16 x 8 x 16: A = K: keys g and g + 8, dims 16 t.. of a row; B = Q': row g, the same dims
    output   O' = V' P'  16 x 8 x 16: A = V': keys 2t, 2t + 1, 2t + 8, 2t + 9, dims 16 g.. of a row; B = P', which is
                         what the lanes have of S', transposed

What a cache holds shows in how a row's words become operands: a class for each kind, below. Codes become f16, which
holds every e4m3 code exactly. P is the sum of two 16-bit numbers, so that it adds no rounding of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import ptx

TILE = 16  # keys of one product P V
ROWS = 8  # of a block: queries x heads of a KV head
SLACK = 8.0  # weights may pass 1 by so many powers of two before the sums are brought to another base
TANH = [factor * (0.5 * math.log(2)) ** (2 * i + 1) for i, factor in enumerate((1, -1 / 3, 2 / 15, -17 / 315))]


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

    def step_state(self, tiles, warps, warp, lane):
        """What step_queries works in."""
        return None

    def step_queries(self, tiles, sQ, slot, rStart, state):
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

    def settle(self, tiles, rOut, rSum, odd) -> None:
        """Bring a warp's sums over values, of rows 2t + odd, from what operands count to what codes mean."""


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
            ptx.prmt(words[0], words[1], 0x5410),
            ptx.prmt(words[0], words[1], 0x7632),
            ptx.prmt(words[2], words[3], 0x5410),
            ptx.prmt(words[2], words[3], 0x7632),
        )


class Bytes(Codes):
    """A cache of codes of eight bits that are numbers by themselves."""

    bits: ClassVar[int] = 8

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        low, high = self.widen(rPiece[at + i])
        low8, high8 = self.widen(rPiece[at + next_key + i])
        return low, low8, high, high8

    @cute.jit
    def value_operand(self, words, i: cutlass.Constexpr):
        selector = 0x7362 if cutlass.const_expr(i) else 0x5140
        a01 = self.widen(ptx.prmt(words[0], words[1], selector))
        a23 = self.widen(ptx.prmt(words[2], words[3], selector))
        return *a01, *a23


@dataclass(frozen=True)
class E4m3(Bytes):
    """A cache of e4m3 codes."""

    bit_trick: bool  # convert without the instruction, which sm_80 and sm_86 lack

    @cute.jit
    def widen(self, word):
        """Four codes as two pairs of f16."""
        if cutlass.const_expr(self.bit_trick):
            return [self.widen_pair(ptx.prmt(word, Uint32(0), selector)) for selector in (0x1404, 0x3424)]
        else:
            return ptx.e4m3x4_to_f16x4(word)

    @cute.jit
    def widen_pair(self, pair):
        """Two e4m3 codes, each in the high byte of a half, as f16: shifted by one they are 1/256 of it, and NaN 480."""
        shifted = (pair & 0x80008000) | ((pair & 0x7F007F00) >> 1)
        value = ptx.packed("mul.rn.f16x2", shifted, Uint32(0x5C005C00))
        nan = ptx.packed("set.eq.f16x2.f16x2", value & 0x7FFF7FFF, Uint32(0x5F805F80))  # 0x3c00 or 0 in each half
        return value | nan | (nan << 1)


@dataclass(frozen=True)
class Tiles:
    """How a warp takes its tiles."""

    cache: Codes
    size: int  # dims of a row that are computed: 64, 128, 256, 512; a smaller head size is padded
    padded: bool  # the head size may be smaller than ``size``
    shares: int  # into which the keys of a chunk are dealt, one to each warp: tile x + shares follows tile x
    at_once: int  # tiles of a warp, loaded together
    pieces: int  # in which the keys (and the values) of these tiles are loaded
    slots: int  # of a warp, a piece each, loaded while others are used
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
        return self.row_bytes // (8 * self.value_bytes)

    @property
    def value_dims(self) -> int:
        """Consecutive dims of a lane in one chunk of values."""
        return self.value_bytes * 8 // self.cache.bits

    @property
    def value_products(self) -> int:
        """With one word of each of four keys' values: two of its dims each."""
        return 16 // self.cache.bits

    @property
    def slot_bytes(self) -> int:
        return self.at_once * TILE * self.row_bytes // self.pieces

    @property
    def ring_bytes(self) -> int:
        """Of a warp's slots; its sums lie there in the end."""
        return max(self.slots * self.slot_bytes, self.size * ROWS * 4)

    @property
    def ahead(self) -> int:
        """Steps after the present one of which pieces are asked for."""
        return (2 * self.pieces - 1 + self.slots) // (2 * self.pieces)

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
        return (3 + self.cache.scale_words) * self.lookups

    @property
    def apart(self) -> int:
        """From one tile of a step to the next."""
        return 1 if self.cache.adjacent else self.shares

    @property
    def share_tiles(self) -> int:
        """Tiles from the first of a share to the first of the next."""
        return self.at_once if self.cache.adjacent else 1

    @property
    def step(self) -> int:
        """Tiles from the first of a step to the first of the share's next."""
        return self.at_once * self.shares

    @property
    def output_tiles(self) -> int:
        """Of 16 dims, of a warp."""
        return self.size // 16

    # -- loads ----------------------------------------------------------------------------------------------------

    @property
    def units(self) -> int:
        """Of 16 bytes, in a row of a piece."""
        return self.row_bytes // (16 * self.pieces)

    @property
    def rows_at_once(self) -> int:
        """That a warp loads with one instruction."""
        return 32 // self.units

    @cute.jit
    def addresses(self, mK, mV, more, kv_head, lane):
        """Where a lane's 16 bytes of the head's first key and value lie, and how much of a row there is from there."""
        element = cutlass.const_expr(mK.element_type.width // 8)
        part = lane % self.units * 16
        key_base = mK.iterator.toint() + Int64(kv_head) * mK.stride[2] * element + part
        value_base = mV.iterator.toint() + Int64(kv_head) * mV.stride[2] * element + part
        return key_base, value_base, mK.shape[3] * element - part

    @cute.jit
    def load(self, piece: cutlass.Constexpr, slot, rAt, address, x, tiles, lane):
        """Start loading one piece of a step's keys, or of its values, into a slot."""
        for tile in cutlass.range_constexpr(self.at_once):
            if x + tile * self.apart < tiles:
                self.load_tile(piece, tile, slot, rAt, address, lane)
        ptx.cp_async_commit()

    @cute.jit
    def load_tile(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, slot, rAt, address, lane):
        """Neighbouring lanes load neighbouring bytes. Missing values and what lies behind a row are zeros."""
        key_base, value_base, left = address
        of_values = cutlass.const_expr(piece >= self.pieces)
        base = value_base if cutlass.const_expr(of_values) else key_base
        base += cutlass.const_expr(piece % self.pieces * self.row_bytes // self.pieces)
        exist = rAt[3 * (tile // 2) + 2] >> (tile % 2 * TILE)
        for i in cutlass.range_constexpr(TILE // self.rows_at_once):
            row = lane // self.units + i * self.rows_at_once
            at = cute.arch.shuffle_sync(rAt[3 * (tile // 2) + of_values], tile % 2 * TILE + row)
            there = None
            if cutlass.const_expr(self.padded):
                there = cutlass.min(cutlass.max(left - piece % self.pieces * (self.units * 16), 0), 16)
            if cutlass.const_expr(of_values and not self.cache.finite):
                most = Int32(16) if cutlass.const_expr(there is None) else there
                there = cutlass.select_((exist >> Uint32(row)) & 1 != 0, most, Int32(0))
            place, turn = self.place(of_values, row)
            to = slot + tile * (TILE * self.units * 16) + (place * self.units + (lane % self.units ^ turn)) * 16
            ptx.cp_async(to, base + Int64(at) * 16, 16, there)

    def place(self, of_values: bool, row):
        """Where a row lies in a slot, and how its units are permuted: lanes that read together find 32 banks."""
        if not of_values:
            return row, (row & 1) * 4 if self.units >= 8 else 0
        if self.units >= 8:
            return row, (row >> 1 & 3) * 2
        if self.units == 4:
            return row >> 1 | (row & 1) << 3, (row >> 2 & 1) * 2
        return row, 0

    @cute.jit
    def read_keys(self, slot, c: cutlass.Constexpr, tile: cutlass.Constexpr, lane):
        """A lane's words of keys g and g + 8 in a chunk of a piece."""
        g, t = lane // 4, lane % 4
        words = cutlass.const_expr(self.key_bytes // 4)
        byte = c * 4 * self.key_bytes + t * self.key_bytes
        loaded = []
        for half in cutlass.range_constexpr(2):
            row, turn = self.place(False, g + 8 * half)
            at = (row * self.units * 16) + (byte ^ (turn * 16)) + tile * (TILE * self.units * 16)
            loaded += ptx.load_shared(slot + at, words)
        return loaded

    @cute.jit
    def read_values(self, slot, c: cutlass.Constexpr, tile: cutlass.Constexpr, lane):
        """A lane's words of four keys' values in a chunk of a piece."""
        g, t = lane // 4, lane % 4
        words = cutlass.const_expr(self.value_bytes // 4)
        byte = g * self.value_bytes
        rows = []
        for key in cutlass.range_constexpr(4):
            row, turn = self.place(True, 2 * t + key % 2 + key // 2 * 8)
            at = (row * self.units * 16) + (byte ^ (turn * 16)) + tile * (TILE * self.units * 16)
            rows.append(ptx.load_shared(slot + at + c * 8 * self.value_bytes, words))
        return rows

    # -- products -------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply_keys(self, piece: cutlass.Constexpr, slot, sQ, rScore, x, tiles, lane):
        """Scores of the keys that a piece holds, added to rScore."""
        if cutlass.const_expr(self.at_once == 1 or self.cache.adjacent):
            for tile in cutlass.range_constexpr(self.at_once):
                self.multiply_keys_of(piece, tile, slot, sQ, rScore, lane)
        else:
            for tile in cutlass.range_constexpr(self.at_once):
                if x + tile * self.apart < tiles:
                    self.multiply_keys_of(piece, tile, slot, sQ, rScore, lane)

    @cute.jit
    def multiply_keys_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, slot, sQ, rScore, lane):
        words = cutlass.const_expr(self.key_bytes // 4)
        each = cutlass.const_expr(self.key_chunks // self.pieces)
        for c in cutlass.range_constexpr(each):
            loaded = self.read_keys(slot, c, tile, lane)
            for two in cutlass.range_constexpr(self.key_products // 2):
                q = self.four_words(sQ, (piece * each + c) * self.key_products // 2 + two)
                for i in cutlass.range_constexpr(2):
                    a = self.cache.key_operand(loaded, 0, words, 2 * two + i)
                    c4 = [rScore[4 * tile + k] for k in range(4)]
                    sums = ptx.mma_m16n8k16(a, (q[2 * i], q[2 * i + 1]), c4, self.cache.kind)
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
    def weigh(self, rScore, rNow, rMax, rSum, rOut, sSeen, start, scales, cap, x, slot, lane):
        """Scores become weights exp2(score - base), base being near the largest so far.

        Score i of a tile is that of key g + i // 2 * 8 and row 2t + i % 2.
        """
        of_values = []
        for tile in cutlass.range_constexpr(self.at_once):
            key_scales, value_scales = self.scales_of(tile, slot, rNow, lane)
            of_values.append(value_scales)
            for i in cutlass.range_constexpr(4):
                rScore[4 * tile + i] *= scales[i % 2]
                if cutlass.const_expr(len(key_scales) > 0):
                    rScore[4 * tile + i] *= key_scales[i // 2]
        if cap > 0.0:
            for i in cutlass.range_constexpr(4 * self.at_once):
                rScore[i] = self.soft_cap(rScore[i], cap)
        self.hide_keys(rScore, rNow, sSeen, start + x * TILE, lane)
        largest = [rMax[0], rMax[1]]
        for i in cutlass.range_constexpr(4 * self.at_once):
            score = rScore[i]
            if cutlass.const_expr(len(of_values[i // 4]) > 0):
                score += self.log_size(of_values[i // 4][i % 4 // 2][0])
            largest[i % 2] = ptx.fmax(largest[i % 2], score)
        if cute.arch.vote_any_sync(largest[0] > rMax[0] + SLACK or largest[1] > rMax[1] + SLACK):
            self.rebase(largest, rMax, rSum, rOut)
        base = [cutlass.select_(rMax[e] == -Float32.inf, Float32(0.0), rMax[e]) for e in range(2)]
        for tile in cutlass.range_constexpr(self.at_once):
            value_scales = of_values[tile]
            if cutlass.const_expr(self.cache.adjacent):  # read again, which takes no registers meanwhile
                _, value_scales = self.scales_of(tile, slot, rNow, lane)
            for i in cutlass.range_constexpr(4):
                weight = ptx.exp2_approx(rScore[4 * tile + i] - base[i % 2])
                rSum[i % 2] += weight
                if cutlass.const_expr(len(value_scales) > 0):
                    value_scale, zero = value_scales[i // 2]
                    weight = weight * value_scale
                    if cutlass.const_expr(zero is not None):
                        rSum[2 + i % 2] += weight * zero
                rScore[4 * tile + i] = weight

    @cute.jit
    def scales_of(self, tile: cutlass.Constexpr, slot, rNow, lane):
        """Of a tile's keys g and g + 8: those of keys, and those of values with their zeros."""
        at = cutlass.const_expr(3 * self.lookups + tile // 2 * self.cache.scale_words)
        source = tile % 2 * TILE + lane // 4
        return self.cache.key_scales(rNow, at, source), self.cache.value_scales(rNow, at, source)

    @cute.jit
    def rebase(self, largest, rMax, rSum, rOut):
        """The largest of all lanes becomes the base, and the sums so far are brought to it."""
        for e in cutlass.range_constexpr(2):
            highest = largest[e]
            for distance in cutlass.range_constexpr(3):
                highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 4 << distance))
            base = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
            fade = ptx.exp2_approx(rMax[e] - base)
            for i in cutlass.range_constexpr(self.cache.sums // 2):
                rSum[2 * i + e] *= fade
            for i in cutlass.range_constexpr(2 * self.output_tiles):
                rOut[2 * i + e] *= fade
            rMax[e] = highest

    @cute.jit
    def soft_cap(self, x: Float32, cap: Float32) -> Float32:
        """cap * tanh(y), of 2 y log2(e); by a series where tanh would be the difference of numbers near 1.

        The division is a call, which keeps the compiler from working all this out where there is no cap: that took some
        100 of 600 instructions of a step.
        """
        result = cap * (1.0 - 2.0 / (1.0 + ptx.exp2_approx(x)))
        square = x * x
        if square < 0.08:  # |y| < 0.1
            result = cap * x * (TANH[0] + square * (TANH[1] + square * (TANH[2] + square * TANH[3])))
        return result

    @cute.jit
    def hide_keys(self, rScore, rNow, sSeen, key, lane):
        """-inf for keys of a step, the first of which is ``key``, that do not exist or that a row does not see."""
        for tile in cutlass.range_constexpr(self.at_once):
            first = key + tile * self.apart * TILE
            exist = rNow[3 * (tile // 2) + 2] >> (tile % 2 * TILE)
            if (exist & 0xFFFF) != 0xFFFF or first < sSeen[0] or first + TILE > sSeen[1]:
                self.hide_keys_of(tile, rScore, exist, sSeen, first, lane)

    @cute.jit
    def hide_keys_of(self, tile: cutlass.Constexpr, rScore, exist, sSeen, first, lane):
        """Of a tile, whose first key is ``first``; exist: a bit for each of its keys."""
        for i in cutlass.range_constexpr(4):
            row = lane % 4 * 2 + i % 2
            offset = lane // 4 + i // 2 * 8
            key = first + offset
            inside = key >= sSeen[4 + 2 * row] and key < sSeen[4 + 2 * row + 1]
            if not ((inside or key < sSeen[2]) and (exist >> Uint32(offset)) & 1 != 0):
                rScore[4 * tile + i] = -Float32.inf

    @cute.jit
    def log_size(self, scale: Float32) -> Float32:
        """The binary logarithm of a scale's size, not below that of the smallest scales."""
        return ptx.fmax(ptx.log2_approx_ftz(ptx.int_as_float(ptx.float_as_int(scale) & 0x7FFFFFFF)), Float32(-100.0))

    @cute.jit
    def multiply_values(self, piece: cutlass.Constexpr, slot, rScore, rNow, rOut, x, tiles, lane):
        """Add weights times values for what a piece holds."""
        if cutlass.const_expr(self.at_once == 1 or self.cache.adjacent):  # which is finite
            for tile in cutlass.range_constexpr(self.at_once):
                self.multiply_values_of(piece, tile, slot, rScore, rNow, rOut, lane)
        else:
            for tile in cutlass.range_constexpr(self.at_once):
                if x + tile * self.apart < tiles:
                    self.multiply_values_of(piece, tile, slot, rScore, rNow, rOut, lane)

    @cute.jit
    def multiply_values_of(self, piece: cutlass.Constexpr, tile: cutlass.Constexpr, slot, rScore, rNow, rOut, lane):
        words = cutlass.const_expr(self.value_bytes // 4)
        each = cutlass.const_expr(self.value_chunks // self.pieces)
        weights, rest = self.weights_of(tile, rScore)
        for c in cutlass.range_constexpr(each):
            rows = self.read_values(slot, c, tile, lane)
            for w in cutlass.range_constexpr(words):
                out = cutlass.const_expr(4 * ((piece * each + c) * self.value_dims // 2 + w * self.value_products))
                for i in cutlass.range_constexpr(self.value_products):
                    a = self.cache.value_operand([rows[key][w] for key in range(4)], i)
                    self.add_output(a, weights, rest, rOut, out + 4 * i)

    @cute.jit
    def weights_of(self, tile: cutlass.Constexpr, rScore):
        """P' of a tile as an operand, and what rounding left of it."""
        weights, rest = [], []
        for half in cutlass.range_constexpr(2):
            x, y = rScore[4 * tile + 2 * half], rScore[4 * tile + 2 * half + 1]
            pair = ptx.pack_f32x2(x, y, self.cache.kind)
            weights.append(ptx.movmatrix_trans(pair))
            if cutlass.const_expr(self.split_weights):
                low, high = ptx.unpack_f32x2(pair, self.cache.kind)
                rest.append(ptx.movmatrix_trans(ptx.pack_f32x2(x - low, y - high, self.cache.kind)))
        return weights, rest

    @cute.jit
    def add_output(self, a, weights, rest, rOut, at: cutlass.Constexpr):
        c = [rOut[at + i] for i in range(4)]
        c = ptx.mma_m16n8k16(a, weights, c, self.cache.kind)
        if cutlass.const_expr(self.split_weights):
            c = ptx.mma_m16n8k16(a, rest, c, self.cache.kind)
        for i in cutlass.range_constexpr(4):
            rOut[at + i] = c[i]
