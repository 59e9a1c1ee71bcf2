"""What a warp does with caches of integer codes and of e5m2; tile.py has the rest.

Codes become f16, exactly: e5m2 is the high byte of f16; an integer n of up to 10 bits is, as the bits of a subnormal
f16, n 2^-24, and behind the exponent of 1024 it is 1024 + n.

INT8    K: code + 128 as a subnormal; what 128 gives with the same queries is where the scores start from.
        V: 1024 + code + 128, less 1152.
INT4    K: the code as a subnormal, of which every other one stands four bits higher and meets a sixteenth of the
        query. The scale of a channel goes into the queries, once for the 32 keys of a step, which lie in one page; its
        zero, multiplied with these, is where the scores start from.
        V: 1024 + code, less 1032, so that sums stay small; the zero less 8, times the weights, is taken off at the end.

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
from .tile import TILE, Codes

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
            rAt[at + i] = ptx.load_if(exists, address, ONE)

    @cute.jit
    def key_scales(self, rAt, at: cutlass.Constexpr, source):
        return [ptx.float_of(Int32(cute.arch.shuffle_sync(rAt[at], source + 8 * h))) for h in range(2)]

    @cute.jit
    def value_scales(self, rAt, at: cutlass.Constexpr, source):
        return [(ptx.float_of(Int32(cute.arch.shuffle_sync(rAt[at + 1], source + 8 * h))), None) for h in range(2)]


@dataclass(frozen=True)
class Int4(Codes):
    """A cache of INT4 codes after KIVI; the tiles of a step lie in one page."""

    more: ClassVar[type] = Int4Scales
    bits: ClassVar[int] = 4
    scale_words: ClassVar[int] = 2
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
        return [ptx.permute(words[i // 2], words[i // 2 + 2], (0x5410, 0x7632)[i % 2]) for i in range(4)]

    @cute.jit
    def arrange(self, words):
        pairs = self.fours(words)
        return [sixteenth(pairs[i]) if i % 2 else pairs[i] for i in range(4)]

    @cute.jit
    def key_operand(self, rPiece, at: cutlass.Constexpr, next_key: cutlass.Constexpr, i: cutlass.Constexpr):
        words = [rPiece[at + key * next_key + i // 2] >> (8 if i % 2 else 0) for key in range(2)]
        return [word & mask for mask in (0x000F000F, 0x00F000F0) for word in words]

    @cute.jit
    def value_operand(self, words, i: cutlass.Constexpr):
        selector = 0x7632 if cutlass.const_expr(i // 2) else 0x5410
        pairs = []
        for k in cutlass.range_constexpr(2):
            word = ptx.permute(words[2 * k], words[2 * k + 1], selector) >> (8 if i % 2 else 0)
            low, high = (word & 0x000F000F) | 0x64006400, (word & 0x00F000F0) | 0x64006400
            pairs.append(ptx.half_pair("add.rn.f16x2", low, Uint32(0xE408E408)))
            pairs.append(ptx.half_fma(high, Uint32(0x2C002C00), Uint32(0xD480D480)))
        return pairs

    # -- scales ---------------------------------------------------------------------------------------------------

    @cute.jit
    def scales_at(self, more, tiles, kv_head, lane):
        """Values' scales and zeros as INT8's scales; and a lane's part of the scales and zeros of a page of keys."""
        of_values = [
            (mX.iterator.toint() + 2 * Int64(kv_head) * mX.stride[2], Uint32(mX.stride[0]), Uint32(mX.stride[1]))
            for mX in (more.mValueScale, more.mValueZero)
        ]
        of_keys = [
            (mX.iterator.toint() + 2 * Int64(kv_head) * mX.stride[1], Uint32(mX.stride[0] // 8))
            for mX in (more.mKeyScale, more.mKeyZero)
        ]
        scale, zero = of_keys
        base = cutlass.select_(lane < 16, scale[0], zero[0]) + lane % 16 * (4 * self.step_words(tiles))
        return of_values, base, cutlass.select_(lane < 16, scale[1], zero[1])

    @cute.jit
    def locate_scales(self, rAt, at: cutlass.Constexpr, scales_at, exists, block, offset):
        of_values, _, _ = scales_at
        for i in cutlass.range_constexpr(2):
            base, of_block, of_slot = of_values[i]
            address = base + 2 * Int64(Uint32(block) * of_block + Uint32(offset) * of_slot)
            rAt[at + i] = ptx.load_if(exists, address, (0x3C00, 0x4800)[i], 16)

    @cute.jit
    def value_scales(self, rAt, at: cutlass.Constexpr, source):
        both = ptx.permute(rAt[at], rAt[at + 1], 0x5410)
        found = []
        for h in cutlass.range_constexpr(2):
            scale, zero = ptx.unpack_pair(Uint32(cute.arch.shuffle_sync(both, source + 8 * h)), "f16")
            found.append((scale, zero - 8.0))
        return found

    def step_words(self, tiles) -> int:
        return tiles.size // 32

    @cute.jit
    def locate_step(self, tiles, rAt, scales_at, page, blocks):
        _, base, of_page = scales_at
        page = cute.arch.shuffle_sync(page, 0)
        page = cutlass.select_(page >= 0 and page < blocks, page, Int32(0))
        words = cutlass.const_expr(self.step_words(tiles))
        loaded = ptx.load_words(base + 16 * Int64(Uint32(page) * of_page), words)
        for i in cutlass.range_constexpr(words):
            rAt[tiles.located_words - words + i] = loaded[i]

    @cute.jit
    def step_state(self, tiles, warps: cutlass.Constexpr, warp, lane):
        """Where a warp's lanes exchange a page's scales and zeros; scaled queries."""
        sChannels = cute.arch.alloc_smem(Uint32, warps * tiles.size, alignment=16)
        shared = sChannels.toint() + warp * (4 * tiles.size)
        mine = shared + lane * (4 * self.step_words(tiles))
        return mine, shared + lane % 4 * (2 * tiles.key_dims), cute.make_rmem_tensor(tiles.query_words, Uint32)

    @cute.jit
    def step_queries(self, tiles, sQ, rAt, rStart, state):
        mine, channels, rScaled = state
        words = cutlass.const_expr(self.step_words(tiles))
        at = cutlass.const_expr(tiles.located_words - words)
        cute.arch.sync_warp()
        ptx.store_shared(mine, [rAt[at + i] for i in range(words)])
        cute.arch.sync_warp()
        starts = [[Float32(0.0)] * 4 for _ in range(4)]  # in four chains: a product waits for the one before it
        for i in cutlass.range_constexpr(tiles.query_words // 4):
            chunk, part = i // (tiles.key_dims // 8), i % (tiles.key_dims // 8)
            dim = cutlass.const_expr(chunk * 4 * tiles.key_dims + part * 8)
            scales = self.fours(ptx.load_shared(channels + 2 * dim, 4))
            zeros = self.fours(ptx.load_shared(channels + 2 * (tiles.size + dim), 4))
            q = tiles.four_words(sQ, i)
            for k in cutlass.range_constexpr(4):
                rScaled[4 * i + k] = ptx.half_pair("mul.rn.f16x2", q[k], scales[k])
            for k in cutlass.range_constexpr(2):
                even, odd = sixteenth(zeros[2 * k]), zeros[2 * k + 1]
                b = (rScaled[4 * i + 2 * k], rScaled[4 * i + 2 * k + 1])
                chain = cutlass.const_expr((2 * i + k) % 4)
                starts[chain] = ptx.mma((even, even, odd, odd), b, starts[chain], "f16")
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
        return length, (base, mTail.stride[1], (length + added) // PAGE * PAGE)

    @cute.jit
    def multiply_tail(self, tiles, tail, rScore, key, lane):
        """Scores of a step's keys from the tail, where they are not in a finished page."""
        base, stride, first, query_row, bf16, inverse = tail
        if key >= first:
            rTail = cute.make_rmem_tensor(4, Float32)
            for tile in cutlass.range(tiles.at_once, unroll=1):
                rTail.fill(0.0)
                slot = (key + tile * TILE) % PAGE + lane // 4
                address = base + 2 * Int64(slot) * stride + lane % 4 * 16
                for c in cutlass.range(tiles.size // 32, unroll=1):
                    rows = [ptx.load_words(address + 16 * half * stride + c * 64, 4) for half in range(2)]
                    q = ptx.load_words(query_row + c * 64 + lane % 4 * 16, 4)
                    for i in cutlass.range_constexpr(2):
                        a = (rows[0][2 * i], rows[1][2 * i], rows[0][2 * i + 1], rows[1][2 * i + 1])
                        self.multiply_either(a, (q[2 * i], q[2 * i + 1]), rTail, bf16)
                for i in cutlass.range_constexpr(4 * tiles.at_once):
                    rScore[i] = cutlass.select_(tile == i // 4, rTail[i % 4] * inverse[i % 2], rScore[i])

    @cute.jit
    def multiply_either(self, a, b, rScore, bf16):
        c = [rScore[i] for i in range(4)]
        if bf16 != 0:
            c = ptx.mma(a, b, c, "bf16")
        else:
            c = ptx.mma(a, b, c, "f16")
        for i in cutlass.range_constexpr(4):
            rScore[i] = c[i]


@cute.jit
def sixteenth(pair: Uint32) -> Uint32:
    """A sixteenth of two f16."""
    return ptx.half_pair("mul.rn.f16x2", pair, Uint32(0x2C002C00))
