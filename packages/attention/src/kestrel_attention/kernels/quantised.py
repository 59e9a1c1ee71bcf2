"""What a warp does with caches of integer codes and of e5m2; tile.py has the rest.

Codes become f16, exactly: e5m2 is the high byte of f16; an integer n of up to 10 bits is, as the bits of a subnormal
f16, n 2^-24, and behind the exponent of 1024 it is 1024 + n.

INT8    K: code + 128 as a subnormal; what 128 gives with the same queries is where the scores start from.
        V: 1024 + code + 128, less 1152.
A key's scale multiplies its scores. A value's scale multiplies its weight, and its logarithm is added to the score
before the largest is looked for: weights with their scales then fit f16 whatever the scales are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import ptx
from .tile import Codes

ONE = 0x3F800000


class Dtype(NamedTuple):
    bf16: Int32  # 1: queries and results are bf16; 0: fp16


class Int8Scales(NamedTuple):
    mKeyScale: cute.Tensor
    mValueScale: cute.Tensor
    bf16: Int32


@dataclass(frozen=True)
class E5m2(Codes):
    """A cache of e5m2 codes."""

    more: ClassVar[type] = Dtype
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
        return [ptx.permute(word, Uint32(0), selector) for selector in (0x1404, 0x3424)]


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
        return [ptx.permute(words[i // 2 * 2], words[i // 2 * 2 + 1], (0x5410, 0x7632)[i % 2]) for i in range(4)]

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
            word = ptx.permute(words[2 * k], words[2 * k + 1], selector)
            for shifted in (word, word >> 8):
                pair = (shifted & 0x00FF00FF) ^ 0x64806480
                pairs.append(ptx.half_pair("add.rn.f16x2", pair, Uint32(0xE480E480)))
        return pairs

    @cute.jit
    def first_scores(self, tiles, sQ, rStart):
        """What codes of 128 give, taken off."""
        start = [Float32(0.0)] * 4
        for i in cutlass.range_constexpr(tiles.query_words // 4):
            q = tiles.four_words(sQ, i)
            for k in cutlass.range_constexpr(2):
                start = ptx.mma([Uint32(0x00800080)] * 4, (q[2 * k], q[2 * k + 1]), start, "f16")
        for e in cutlass.range_constexpr(2):
            rStart[e] = -start[e]

    @cute.jit
    def scales_at(self, more, kv_head, lane, lookups: cutlass.Constexpr):
        return [
            (mX.iterator.toint() + 4 * Int64(kv_head) * mX.stride[2], Uint32(mX.stride[0]), Uint32(mX.stride[1]))
            for mX in (more.mKeyScale, more.mValueScale)
        ]

    @cute.jit
    def locate_scales(self, rAt, at: cutlass.Constexpr, scales_at, exists, block, offset):
        for i in cutlass.range_constexpr(2):
            base, of_block, of_slot = scales_at[i]
            address = base + 4 * Int64(Uint32(block) * of_block + Uint32(offset) * of_slot)
            rAt[at + i] = ptx.load_if(exists, address, ONE)

    @cute.jit
    def key_scales(self, rAt, at: cutlass.Constexpr, source):
        return [ptx.float_of(Int32(cute.arch.shuffle_sync(rAt[at], source + 8 * h))) for h in range(2)]

    @cute.jit
    def value_scales(self, rAt, at: cutlass.Constexpr, source):
        return [(ptx.float_of(Int32(cute.arch.shuffle_sync(rAt[at + 1], source + 8 * h))), None) for h in range(2)]
