"""The INT8 cache format: a scale per token and head.

Scores are products of integers: a row of queries is a power of two times the sum of three 8-bit terms, so codes of keys
are operands as they are. Sums start from the bits of 1.5 2^23, so that their bits are floats. Values are code + 128 as
subnormal f16, read from shared memory transposed, so that a register holds two keys; 128 times the sum of the weights
is subtracted every few steps. A step has one tile, whose scales are copied to shared memory behind the values.

A key's scale multiplies its scores. The logarithm of a value's scale is added to the score before the maximum is taken,
so that weights times scales fit f16 whatever the scales are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from kestrel_runtime.cute_dsl import ptx

from .constants import TILE_KEYS
from .formats import CacheFormat
from .parameters import Int8Extra
from .tile import EXISTS, LOOKUP_WORDS, HeadRows, WarpTiles, head_rows

TERMS = 3  # of a query: 256 times the first, the second, and a 128th of the third
MAGIC = 12582912.0  # 1.5 2^23: in the bits of its sum with a number below 2^22, the lowest are the nearest integer
MAGIC_BITS = 0x4B400000
SCALE_BYTES = 8 * TILE_KEYS  # of a tile: for each g the scales of keys g and g + 8, then of their values
DIM_BLOCKS = 2  # blocks of 64 dims of an integer sum, which stays below 2^22


class ScaledBase(NamedTuple):
    """CacheBase, and the address of the scales that a lane copies."""

    key: Int64
    value: Int64
    row_bytes_left: Int32
    scales: Int64


@dsl_user_op
def mma_m16n8k32(a, b, c, kind: cutlass.Constexpr, *, loc=None, ip=None):
    """a (4 registers of s8) times b (2, of ``kind`` s8 or u8) plus c (4 int32); returns 4 int32."""
    text = (
        f"mma.sync.aligned.m16n8k32.row.col.s32.s8.{kind}.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [Uint32(x) for x in (*a, *b)] + [Int32(x) for x in c]
    constraints = ",".join(["=r"] * 4 + ["r"] * 10)
    return [Int32(x) for x in ptx.assemble(text, constraints, operands, [T.i32()] * 4, False, loc, ip)]


@dataclass(frozen=True)
class Int8(CacheFormat):
    """A cache of INT8 codes with a scale per token and head."""

    extra: ClassVar[type] = Int8Extra
    bits: ClassVar[int] = 8
    scale_words: ClassVar[int] = 1
    exponent: ClassVar[int] = 0
    query_exponent: ClassVar[int] = 14
    finite: ClassVar[bool] = True
    sum_words: ClassVar[int] = 4
    offset_steps: ClassVar[int] = 16
    value_units: ClassVar[tuple[float, float]] = (2.0**-24, 2.0**-24)
    integer_queries: ClassVar[bool] = True

    @cute.jit
    def integer_terms(self, values):
        """The 8-bit terms of four numbers below 2^15, each as a word."""
        first = [ptx.fma(x, Float32(1.0), Float32(MAGIC)) for x in values]
        rest = [ptx.fma(x - (y - MAGIC), Float32(128.0), Float32(MAGIC)) for x, y in zip(values, first, strict=True)]
        return self.bytes_of(first, 1), self.bytes_of(first, 0), self.bytes_of(rest, 0)

    def bytes_of(self, four, byte):
        """Byte 0 or 1 of the bits of four floats."""
        words = [Uint32(ptx.float_as_int(x)) for x in four]
        pair = 0x0040 + byte * 0x0011
        low, high = (ptx.prmt(words[i], words[i + 1], pair) for i in (0, 2))
        return ptx.prmt(low, high, 0x5410)

    @cute.jit
    def scale_addresses(self, extra, tiles, kv_head, lane):
        """The rows that a lane copies from: lanes 0 to 15 scales of keys, the others those of their values."""
        keys, values = (head_rows(mX, kv_head) for mX in (extra.mKeyScale, extra.mValueScale))
        return HeadRows(*[cutlass.select_(lane < TILE_KEYS, x, y) for x, y in zip(keys, values, strict=True)])

    @cute.jit
    def place_scales(self, rOffset, at: cutlass.Constexpr, rows: HeadRows, exists, block, slot):
        place = Uint32(block) * rows.page_stride + slot * rows.token_stride
        rOffset[at] = cutlass.select_(exists, place, Uint32(0))


@dataclass(frozen=True)
class Int8Tiles(WarpTiles):
    """The tiles of one warp over INT8 caches."""

    @property
    def value_bytes(self) -> int:
        return 2

    @property
    def stage_bytes(self) -> int:
        """Codes of a tile, then the scales of its keys and values, which only stages of values hold."""
        return TILE_KEYS * self.row_bytes + SCALE_BYTES

    @property
    def subtracts_apart(self) -> bool:
        return self.head_dim == 64

    @property
    def dims_of_pair(self) -> int:
        return 2

    def output_dim(self, pair, half, g):
        return pair * 32 + half * 16 + 2 * g

    @property
    def operand_words(self) -> int:
        return self.key_chunks * TERMS * 4

    def swizzle(self, of_values: bool, row):
        if of_values:
            return row, row % 8 if self.units >= 8 else row * self.row_bytes // 128 % self.units
        return super().swizzle(of_values, row)

    @cute.jit
    def cache_base(self, mK, mV, extra, kv_head, lane):
        base = super().cache_base(mK, mV, extra, kv_head, lane)
        return ScaledBase(*base, self.format.scale_addresses(extra, self, kv_head, lane).address)

    @cute.jit
    def load_scales(self, stage_ptr, rOffset, base, tile_idx, num_tiles, lane):
        if tile_idx < num_tiles:
            key, exists = lane % TILE_KEYS, rOffset[EXISTS] >> Uint32(lane) & 1
            to = stage_ptr + TILE_KEYS * self.row_bytes + key % 8 * 16 + lane // TILE_KEYS * 8 + key // 8 * 4
            ptx.cp_async(to, base.scales + 4 * Int64(rOffset[LOOKUP_WORDS]), 4, Int32(exists * 4))

    @cute.jit
    def scales_of(self, tile: cutlass.Constexpr, stage_ptr, rNow, lane):
        words = ptx.load_shared(stage_ptr + TILE_KEYS * self.row_bytes + lane // 4 * 16, 4)
        found = [ptx.int_as_float(Int32(word)) for word in words]
        return found[:2], [(scale, Float32(128.0)) for scale in found[2:]]

    @cute.jit
    def mma_keys_of_tile(self, slice_idx: cutlass.Constexpr, tile: cutlass.Constexpr, stage_ptr, sQ, rScore, lane):
        for first in cutlass.range_constexpr(0, self.key_chunks, DIM_BLOCKS):
            sums = [[Int32(MAGIC_BITS)] * 4 for _ in range(TERMS)]
            for c in cutlass.range_constexpr(first, min(first + DIM_BLOCKS, self.key_chunks)):
                loaded = self.read_keys(stage_ptr, c, tile, lane)
                for term in cutlass.range_constexpr(TERMS):
                    q = self.four_words(sQ[0], c * TERMS + term)
                    for i in cutlass.range_constexpr(2):
                        a = (loaded[2 * i], loaded[4 + 2 * i], loaded[2 * i + 1], loaded[5 + 2 * i])
                        kind = "u8" if term == 1 else "s8"
                        sums[term] = mma_m16n8k32(a, (q[2 * i], q[2 * i + 1]), sums[term], kind)
            for k in cutlass.range_constexpr(4):
                parts = [ptx.int_as_float(x[k]) - MAGIC for x in sums]
                score = ptx.fma(parts[0], Float32(256.0), parts[1])
                score = ptx.fma(parts[2], Float32(1.0 / 128), score)
                if cutlass.const_expr(first > 0):
                    score += rScore[0][4 * tile + k]
                rScore[0][4 * tile + k] = score

    @cute.jit
    def mma_values_of_tile(
        self, slice_idx: cutlass.Constexpr, tile: cutlass.Constexpr, stage_ptr, rScore, rNow, rOut, lane
    ):
        """Lane l addresses the row of key l % 16; a word that it receives holds two dims of two keys."""
        p, rest = self.p_operands(tile, rScore[0])
        row = lane % TILE_KEYS
        _, swizzle = self.swizzle(True, row)
        column = lane // TILE_KEYS ^ swizzle
        for two in cutlass.range_constexpr(self.units // 2):
            at = stage_ptr + (tile * TILE_KEYS + row) * self.row_bytes + (column ^ (2 * two)) * 16
            words = [word ^ 0x80808080 for word in ptx.ldmatrix_x4_trans(at)]
            for i in cutlass.range_constexpr(2):
                half = words[2 * i : 2 * i + 2]
                a = [ptx.prmt(word, Uint32(0), selector) for word in half for selector in (0x4240, 0x4341)]
                self.mma_output(a, p, rest, rOut[0], 8 * two + 4 * i)
