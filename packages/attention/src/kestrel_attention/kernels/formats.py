"""What a KV cache may hold, and how its words become operands of 16-bit matrix products; see also int8.py and int4.py.

Codes become f16, exactly. e5m2 is the high byte of f16. An integer n of up to 10 bits is n 2^-24 as the bits of a
subnormal f16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from kestrel_runtime.cute_dsl import numeric, ptx

from .constants import TILE_KEYS
from .parameters import HalfExtra


def stored_type(cache: str, dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The element type of a cache, by the name that variants have for its format."""
    types = {"same": dtype, "e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2, "int8": cutlass.Int8}
    return types.get(cache, cutlass.Uint8)


class CacheFormat:
    """The operations in which formats differ, for a format without scales."""

    bits: int  # of a cached element
    kind: str = "f16"  # type of the products' operands, as PTX names it
    extra: type | None = None  # further arguments of a launch: a NamedTuple
    finite: bool = False  # whatever the bits
    exponent: int = 0  # products with keys come out as 2^-exponent of their value
    query_exponent: int = 14  # of the largest element of a row of queries in f16
    scale_words: int = 0  # registers of a lane for the scales of the key that it looks up
    sum_words: int = 2  # registers of a lane for sums over keys: the weights of rows 2t and 2t + 1, and their offsets
    offset_steps: int = 0  # steps between subtractions of offsets, a power of two; 0: outputs have none
    value_units: tuple[float, float] = (1.0, 1.0)  # what a code of 1 adds to sums 0 and 1, and 2 and 3
    page_per_step: bool = False  # a step takes one page, whose tiles are adjacent
    split_granularity: int = TILE_KEYS  # splits start at its multiples
    integer_queries: bool = False  # which are the sum of 8-bit terms
    tail: bool = False  # the keys of an unfinished page lie in a buffer of their own

    def permute_queries(self, words):
        """Four words of queries, of consecutive dims, in the order in which key_operand takes the dims."""
        return words

    def scale_addresses(self, extra, tiles, kv_head, lane):
        """Where the scales of this head lie."""
        return ()

    def step_state(self, tiles, warps, warp, lane):
        """Working memory of scale_queries."""
        return None

    def scale_queries(self, tiles, sQ, stage_ptr, rStart, state):
        """The queries for the keys of a step and a power of two that their scores lack; writes rStart."""
        return sQ, None

    def place_scales(self, rOffset, at, addresses, exists, block, slot) -> None:
        """Write where the scales of a key lie into ``scale_words`` registers."""


@dataclass(frozen=True)
class SameDtype(CacheFormat):
    """A cache of the queries' dtype."""

    dtype: type[cutlass.Numeric]

    bits: ClassVar[int] = 16

    @property
    def kind(self) -> str:
        return numeric.ptx_name(self.dtype)

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        """A of product i with a chunk of keys: the registers of key g start at ``at``, those of g + 8 at + next_key."""
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


class Fp8(CacheFormat):
    """A cache of codes of eight bits that are floats."""

    bits: ClassVar[int] = 8

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        low, high = self.to_f16(rPiece[at + i])
        low8, high8 = self.to_f16(rPiece[at + next_key + i])
        return low, low8, high, high8

    @cute.jit
    def value_operand(self, words, i: cutlass.Constexpr):
        selector = 0x7362 if cutlass.const_expr(i) else 0x5140
        a01 = self.to_f16(ptx.prmt(words[0], words[1], selector))
        a23 = self.to_f16(ptx.prmt(words[2], words[3], selector))
        return *a01, *a23

    def to_high_bytes(self, word):
        """Two pairs of f16 that have the four codes as their high bytes."""
        return [ptx.prmt(word, Uint32(0), selector) for selector in (0x1404, 0x3424)]


@dataclass(frozen=True)
class E4m3(Fp8):
    """A cache of e4m3 codes."""

    by_bits: bool  # convert without the instruction, which sm_80 and sm_86 lack

    @cute.jit
    def to_f16(self, word):
        """Four codes as two pairs of f16."""
        if cutlass.const_expr(self.by_bits):
            return [self.pair_to_f16(pair) for pair in self.to_high_bytes(word)]
        else:
            return ptx.e4m3x4_to_f16x4(word)

    @cute.jit
    def pair_to_f16(self, pair):
        """Two codes in the high bytes of a pair; shifted by one they are 1/256 of their value, and NaN is 480."""
        shifted = (pair & 0x80008000) | ((pair & 0x7F007F00) >> 1)
        value = ptx.packed("mul.rn.f16x2", shifted, Uint32(0x5C005C00))
        nan = ptx.packed("set.eq.f16x2.f16x2", value & 0x7FFF7FFF, Uint32(0x5F805F80))  # 0x3c00 or 0 in each half
        return value | nan | (nan << 1)


@dataclass(frozen=True)
class E5m2(Fp8):
    """A cache of e5m2 codes."""

    extra: ClassVar[type] = HalfExtra

    @cute.jit
    def to_f16(self, word):
        """Four codes as two pairs of f16."""
        return self.to_high_bytes(word)
