"""What one warp does with tiles of 16 keys: load, scores, softmax, output.

A step loads keys and values of some tiles into pipeline stages in shared memory that only its warp uses. A matrix
product may sum its inner dimension in any order, so lane (g, t) = 4 g + t uses the consecutive bytes it reads:
    scores   S' = K Q'   16 x 8 x 16: A = K: keys g and g + 8, dims 16 t.. of a row; B = Q': row g, the same dims
    output   O' = V' P'  16 x 8 x 16: A = V': keys 2t, 2t + 1, 2t + 8, 2t + 9, dims 16 g.. of a row; B = P', the S' of
                         the lanes, transposed

formats.py turns the words of a cache row into operands. P is the sum of two 16-bit numbers, so its rounding is exact.
Tensor cores truncate sums to 24 bits, so an offset of all codes is subtracted before it outweighs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import ptx

from .constants import BLOCK_ROWS, TILE_KEYS
from .formats import CacheFormat
from .scores import RESCALE_SLACK, soft_cap

# Registers of a lane for each look-up of a step: offsets of its key and value row in 16 bytes, and a ballot of the
# tiles' keys that exist. The formats' scales follow those of all look-ups.
KEY_OFFSET, VALUE_OFFSET, EXISTS = range(3)
LOOKUP_WORDS = 3


class VisibleWords:
    """Layout of sVisible, the words that say which keys the rows of a block see."""

    FIRST = 0  # all rows see the keys from FIRST to LAST - 1
    LAST = 1
    PREFIX = 2  # and those below PREFIX
    NUM_SPLITS = 3  # of the sequence
    ROWS = 4  # first and last + 1 of each row
    PARTIAL = ROWS + 2 * BLOCK_ROWS  # index of the block's partial results
    COUNT = PARTIAL + 1


class ScoreScales(NamedTuple):
    """How products of queries and keys become base-2 scores."""

    sVisible: cute.Tensor
    scales: Any  # of rows 2t and 2t + 1
    softcap: Float32  # 0: none


class CacheBase(NamedTuple):
    """Where a lane's 16 bytes of the first key and value of a KV head lie."""

    key: Int64
    value: Int64
    row_bytes_left: Int32


class HeadRows(NamedTuple):
    """A head's rows of a tensor: the address of the first, and strides of pages and tokens in units of its own."""

    address: Int64
    page_stride: Any
    token_stride: Any = None


def head_rows(mX, kv_head) -> HeadRows:
    """The numbers of a head in a tensor [pages, tokens, heads], with strides in elements."""
    address = mX.iterator.toint() + mX.element_type.width // 8 * Int64(kv_head) * mX.stride[2]
    return HeadRows(address, Uint32(mX.stride[0]), Uint32(mX.stride[1]))


@dataclass(frozen=True)
class WarpTiles:
    """The tiles of one warp: sizes, stages and operations."""

    format: CacheFormat
    head_dim: int  # that is computed: 64, 128, 256, 512; a smaller one is padded
    padded: bool  # the head dimension may be smaller than ``head_dim``
    warps: int  # of a split, which share its tiles: tile i + warps follows tile i
    tiles_per_step: int
    slices: int  # in which the keys (and the values) of a step are loaded, a stage each
    num_stages: int
    two_term_p: bool  # P as the sum of two 16-bit numbers
    row_blocks: int = 1  # of BLOCK_ROWS rows, for which keys and values are read once
    folded: bool = False  # of at most 4 rows, which columns 4 to 7 repeat: these hold the second terms of P

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.format.bits // 8

    @property
    def key_bytes(self) -> int:
        """That a lane reads of a key's row at once: four lanes read adjacent parts."""
        return min(16, self.row_bytes // 4)

    @property
    def key_chunks(self) -> int:
        return self.row_bytes // (4 * self.key_bytes)

    @property
    def key_dims(self) -> int:
        """Consecutive dims of a lane in one chunk of keys."""
        return self.key_bytes * 8 // self.format.bits

    @property
    def key_products(self) -> int:
        """Of 16 dims, in one chunk of keys."""
        return self.key_dims // 4

    @property
    def value_bytes(self) -> int:
        """That a lane reads of a value's row at once: eight lanes read adjacent parts."""
        return min(16, self.row_bytes // 8)

    @property
    def value_chunks(self) -> int:
        return self.row_bytes // (8 * self.value_bytes)

    @property
    def value_dims(self) -> int:
        """Consecutive dims of a lane in one chunk of values."""
        return self.value_bytes * 8 // self.format.bits

    @property
    def value_products(self) -> int:
        """From one word of each of four keys' values: two of its dims each."""
        return 16 // self.format.bits

    @property
    def stage_bytes(self) -> int:
        return self.tiles_per_step * TILE_KEYS * self.row_bytes // self.slices

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: its stages, and after the main loop its sums."""
        return max(self.num_stages * self.stage_bytes, self.row_blocks * self.sums_bytes)

    @property
    def sums_bytes(self) -> int:
        """Of a row block."""
        return self.head_dim * BLOCK_ROWS * 4

    @property
    def steps_ahead(self) -> int:
        """Steps after the current one that have slices in flight."""
        return (2 * self.slices - 1 + self.num_stages) // (2 * self.slices)

    @property
    def query_words(self) -> int:
        return self.head_dim // 8

    @property
    def operand_words(self) -> int:
        """Of a lane's part of Q'."""
        return self.query_words

    @property
    def queries_in_shared(self) -> bool:
        return self.row_blocks * self.head_dim >= (128 if self.format.page_per_step else 256)

    @property
    def lookups(self) -> int:
        """Page-table look-ups of a lane for a step: the lanes cover two tiles at once."""
        return (self.tiles_per_step + 1) // 2

    @property
    def offset_words(self) -> int:
        """Registers of a lane that locate the keys of a step, scales included."""
        return (LOOKUP_WORDS + self.format.scale_words) * self.lookups

    @property
    def tile_stride(self) -> int:
        """From one tile of a step to the next."""
        return 1 if self.format.page_per_step else self.warps

    @property
    def warp_stride(self) -> int:
        """From the first tile of a warp to the first of the next warp."""
        return self.tiles_per_step if self.format.page_per_step else 1

    @property
    def step_tiles(self) -> int:
        """From the first tile of a step to the first of the warp's next step."""
        return self.tiles_per_step * self.warps

    @property
    def output_tiles(self) -> int:
        """Of 16 dims, of a warp."""
        return self.head_dim // 16

    # -- loads ----------------------------------------------------------------------------------------------------

    @property
    def units(self) -> int:
        """Of 16 bytes, in a row of a slice."""
        return self.row_bytes // (16 * self.slices)

    @property
    def rows_per_load(self) -> int:
        """Rows that a warp loads with one instruction."""
        return 32 // self.units

    @cute.jit
    def cache_base(self, mK, mV, extra, kv_head, lane):
        element = cutlass.const_expr(mK.element_type.width // 8)
        part = lane % self.units * 16
        key_base = mK.iterator.toint() + Int64(kv_head) * mK.stride[2] * element + part
        value_base = mV.iterator.toint() + Int64(kv_head) * mV.stride[2] * element + part
        return CacheBase(key_base, value_base, mK.shape[3] * element - part)

    @cute.jit
    def load(self, slice_idx: cutlass.Constexpr, stage_ptr, rOffset, base, tile_idx, num_tiles, lane):
        """Start loading one slice of a step's keys (the first ``slices``) or values into a stage."""
        for tile in cutlass.range_constexpr(self.tiles_per_step):
            if tile_idx + tile * self.tile_stride < num_tiles:
                self.load_tile(slice_idx, tile, stage_ptr, rOffset, base, lane)
        if cutlass.const_expr(slice_idx == self.slices):
            self.load_scales(stage_ptr, rOffset, base, tile_idx, num_tiles, lane)
        ptx.cp_async_commit()

    def load_scales(self, stage_ptr, rOffset, base, tile_idx, num_tiles, lane) -> None:
        """Start loading the scales of a step into a stage of values."""

    @cute.jit
    def load_tile(self, slice_idx: cutlass.Constexpr, tile: cutlass.Constexpr, stage_ptr, rOffset, base, lane):
        """Adjacent lanes load adjacent bytes. Values of missing keys and bytes behind a row become zeros."""
        of_values = cutlass.const_expr(slice_idx >= self.slices)
        source = base.value if cutlass.const_expr(of_values) else base.key
        source += cutlass.const_expr(slice_idx % self.slices * self.row_bytes // self.slices)
        lookup = cutlass.const_expr(LOOKUP_WORDS * (tile // 2))
        exist = rOffset[lookup + EXISTS] >> (tile % 2 * TILE_KEYS)
        for i in cutlass.range_constexpr(TILE_KEYS // self.rows_per_load):
            row = lane // self.units + i * self.rows_per_load
            which = cutlass.const_expr(VALUE_OFFSET if of_values else KEY_OFFSET)
            at = cute.arch.shuffle_sync(rOffset[lookup + which], tile % 2 * TILE_KEYS + row)
            valid = None
            if cutlass.const_expr(self.padded):
                left = base.row_bytes_left - slice_idx % self.slices * (self.units * 16)
                valid = cutlass.min(cutlass.max(left, 0), 16)
            if cutlass.const_expr(of_values and not self.format.finite):
                most = Int32(16) if cutlass.const_expr(valid is None) else valid
                valid = cutlass.select_((exist >> Uint32(row)) & 1 != 0, most, Int32(0))
            stage_row, swizzle = self.swizzle(of_values, row)
            to = stage_ptr + tile * (TILE_KEYS * self.units * 16)
            to = to + (stage_row * self.units + (lane % self.units ^ swizzle)) * 16
            ptx.cp_async(to, source + Int64(at) * 16, 16, valid)

    def swizzle(self, of_values: bool, row):
        """The row of a stage that holds a row, and the XOR of its units: lanes that read together hit 32 banks."""
        if not of_values:
            return row, (row & 1) * 4 if self.units >= 8 else 0
        if self.units >= 8:
            return row, (row >> 1 & 3) * 2
        if self.units == 4:
            return row >> 1 | (row & 1) << 3, (row >> 2 & 1) * 2
        return row, 0

    @cute.jit
    def read_keys(self, stage_ptr, c: cutlass.Constexpr, tile: cutlass.Constexpr, lane):
        """A lane's words of keys g and g + 8 in a chunk of a slice."""
        g, t = lane // 4, lane % 4
        words = cutlass.const_expr(self.key_bytes // 4)
        byte = c * 4 * self.key_bytes + t * self.key_bytes
        loaded = []
        for half in cutlass.range_constexpr(2):
            row, swizzle = self.swizzle(of_values=False, row=g + 8 * half)
            at = (row * self.units * 16) + (byte ^ (swizzle * 16)) + tile * (TILE_KEYS * self.units * 16)
            loaded += ptx.load_shared(stage_ptr + at, words)
        return loaded

    @cute.jit
    def read_values(self, stage_ptr, c: cutlass.Constexpr, tile: cutlass.Constexpr, lane):
        """A lane's words of four keys' values in a chunk of a slice."""
        g, t = lane // 4, lane % 4
        words = cutlass.const_expr(self.value_bytes // 4)
        byte = g * self.value_bytes
        rows = []
        for key in cutlass.range_constexpr(4):
            row, swizzle = self.swizzle(of_values=True, row=2 * t + key % 2 + key // 2 * 8)
            at = (row * self.units * 16) + (byte ^ (swizzle * 16)) + tile * (TILE_KEYS * self.units * 16)
            rows.append(ptx.load_shared(stage_ptr + at + c * 8 * self.value_bytes, words))
        return rows

    # -- scores ---------------------------------------------------------------------------------------------------

    @cute.jit
    def mma_keys(self, slice_idx: cutlass.Constexpr, stage_ptr, sQ, rScore, tile_idx, num_tiles, lane):
        """Add the products of queries with a slice of keys to rScore; both of each row block."""
        if cutlass.const_expr(self.tiles_per_step == 1 or self.format.page_per_step):
            for tile in cutlass.range_constexpr(self.tiles_per_step):
                self.mma_keys_of_tile(slice_idx, tile, stage_ptr, sQ, rScore, lane)
        else:
            for tile in cutlass.range_constexpr(self.tiles_per_step):
                if tile_idx + tile * self.tile_stride < num_tiles:
                    self.mma_keys_of_tile(slice_idx, tile, stage_ptr, sQ, rScore, lane)

    @cute.jit
    def mma_keys_of_tile(self, slice_idx: cutlass.Constexpr, tile: cutlass.Constexpr, stage_ptr, sQ, rScore, lane):
        words = cutlass.const_expr(self.key_bytes // 4)
        chunks = cutlass.const_expr(self.key_chunks // self.slices)
        for c in cutlass.range_constexpr(chunks):
            loaded = self.read_keys(stage_ptr, c, tile, lane)
            for two in cutlass.range_constexpr(self.key_products // 2):
                at = cutlass.const_expr((slice_idx * chunks + c) * self.key_products // 2 + two)
                q = [self.four_words(sQ[j], at) for j in range(self.row_blocks)]
                for i in cutlass.range_constexpr(2):
                    a = self.format.key_operand(loaded, 0, words, 2 * two + i)
                    for j in cutlass.range_constexpr(self.row_blocks):
                        c4 = [rScore[j][4 * tile + k] for k in range(4)]
                        sums = ptx.mma_m16n8k16(a, (q[j][2 * i], q[j][2 * i + 1]), c4, self.format.kind)
                        for k in cutlass.range_constexpr(4):
                            rScore[j][4 * tile + k] = sums[k]

    @cute.jit
    def four_words(self, sQ, i: cutlass.Constexpr):
        """Four consecutive words of the lane's part of Q, which is in shared memory or in registers."""
        if cutlass.const_expr(cute.rank(sQ) == 2):
            rFour = cute.make_rmem_tensor(4, Uint32)
            cute.autovec_copy(sQ[None, i], rFour)
            return [rFour[k] for k in range(4)]
        else:
            return [sQ[4 * i + k] for k in range(4)]

    # -- softmax --------------------------------------------------------------------------------------------------

    @cute.jit
    def softmax_step(self, rScore, rNow, rMax, rSum, rOut, scoring, split_start, tile_idx, stage_ptr, lane):
        """Scores become weights exp2(score - base), where the base is near the largest score so far; of each row block.

        Score i of a tile is that of key g + i // 2 * 8 and row 2t + i % 2.
        """
        of_values = []
        for tile in cutlass.range_constexpr(self.tiles_per_step):
            key_scales, value_scales = self.scales_of(tile, stage_ptr, rNow, lane)
            of_values.append(value_scales)
            for j in cutlass.range_constexpr(self.row_blocks):
                for i in cutlass.range_constexpr(4):
                    rScore[j][4 * tile + i] *= scoring[j].scales[i % 2]
                    if cutlass.const_expr(len(key_scales) > 0):
                        rScore[j][4 * tile + i] *= key_scales[i // 2]
        if scoring[0].softcap > 0.0:
            for j in cutlass.range_constexpr(self.row_blocks):
                for i in cutlass.range_constexpr(4 * self.tiles_per_step):
                    rScore[j][i] = soft_cap(rScore[j][i], scoring[0].softcap)
        self.mask(rScore, rNow, scoring, split_start + tile_idx * TILE_KEYS, lane)
        largest = [[rMax[j][0], rMax[j][1]] for j in range(self.row_blocks)]
        rises = False
        for j in cutlass.range_constexpr(self.row_blocks):
            for i in cutlass.range_constexpr(4 * self.tiles_per_step):
                score = rScore[j][i]
                if cutlass.const_expr(len(of_values[i // 4]) > 0):
                    score += self.log2_magnitude(of_values[i // 4][i % 4 // 2][0])
                largest[j][i % 2] = ptx.fmax(largest[j][i % 2], score)
            above = largest[j][0] > rMax[j][0] + RESCALE_SLACK or largest[j][1] > rMax[j][1] + RESCALE_SLACK
            rises = above if cutlass.const_expr(j == 0) else rises or above
        if cutlass.const_expr(self.format.offset_steps > 0):
            rises = rises or self.offsets_are_due(tile_idx)
        if cute.arch.vote_any_sync(rises):
            for j in cutlass.range_constexpr(self.row_blocks):
                self.rescale(largest[j], rMax[j], rSum[j], rOut[j])
            if cutlass.const_expr(self.subtracts_apart):
                self.subtract_offsets(rSum, rOut, tile_idx)
        for j in cutlass.range_constexpr(self.row_blocks):
            base = [cutlass.select_(rMax[j][e] == -Float32.inf, Float32(0.0), rMax[j][e]) for e in range(2)]
            for tile in cutlass.range_constexpr(self.tiles_per_step):
                value_scales = of_values[tile]
                if cutlass.const_expr(self.format.page_per_step):  # a second read holds no registers in between
                    _, value_scales = self.scales_of(tile, stage_ptr, rNow, lane)
                for i in cutlass.range_constexpr(4):
                    weight = ptx.exp2_approx(rScore[j][4 * tile + i] - base[i % 2])
                    rSum[j][i % 2] += weight
                    if cutlass.const_expr(len(value_scales) > 0):
                        value_scale, zero = value_scales[i // 2]
                        weight = weight * value_scale
                        if cutlass.const_expr(zero is not None):
                            rSum[j][2 + i % 2] += weight * zero
                    rScore[j][4 * tile + i] = weight

    @cute.jit
    def scales_of(self, tile: cutlass.Constexpr, stage_ptr, rNow, lane):
        """Scales of keys g and g + 8 of a tile, and of their values with their zeros; empty without scales."""
        return [], []

    @cute.jit
    def rescale(self, largest, rMax, rSum, rOut):
        """Make the largest score of all lanes the base, and rescale the sums so far to it, without their offsets."""
        for e in cutlass.range_constexpr(2):
            highest = largest[e]
            for distance in cutlass.range_constexpr(3):
                highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 4 << distance))
            base = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
            factor = ptx.exp2_approx(rMax[e] - base)
            rSum[e] *= factor
            if cutlass.const_expr(self.format.offset_steps > 0 and not self.subtracts_apart):
                less = [self.offset(rSum, e) * unit * factor for unit in self.format.value_units]
                for i in cutlass.range_constexpr(2 * self.output_tiles):
                    rOut[2 * i + e] = ptx.fma(rOut[2 * i + e], factor, -less[i % 2])
                rSum[2 + e] = Float32(0.0)
            else:
                if cutlass.const_expr(self.subtracts_apart):
                    rSum[2 + e] *= factor
                for i in cutlass.range_constexpr(2 * self.output_tiles):
                    rOut[2 * i + e] *= factor
            rMax[e] = highest

    @property
    def subtracts_apart(self) -> bool:
        """Whether offsets are subtracted behind the rescaling, not with it: short sequences then save a reduction."""
        return False

    def offsets_are_due(self, tile_idx):
        """Whether a step subtracts the offsets of those before: one of each ``offset_steps``."""
        period = self.format.offset_steps * self.step_tiles
        assert period & (period - 1) == 0, "steps are counted with a mask"
        step = tile_idx & (period - 1)
        return step >= period - self.step_tiles if self.subtracts_apart else step < self.step_tiles

    @cute.jit
    def subtract_offsets(self, rSum, rOut, tile_idx):
        """From the outputs of each row block, where it is due."""
        if self.offsets_are_due(tile_idx):
            for j in cutlass.range_constexpr(self.row_blocks):
                for e in cutlass.range_constexpr(2):
                    less = self.offset(rSum[j], e)
                    rSum[j][2 + e] = Float32(0.0)
                    for i in cutlass.range_constexpr(2 * self.output_tiles):
                        unit = cutlass.const_expr(self.format.value_units[i % 2])
                        rOut[j][2 * i + e] = ptx.fma(less, Float32(-unit), rOut[j][2 * i + e])

    @cute.jit
    def offset(self, rSum, odd: cutlass.Constexpr):
        """What the outputs of rows 2t + odd have too much, in units of codes: the sum of all lanes."""
        less = rSum[2 + odd]
        for distance in cutlass.range_constexpr(3):
            less += cute.arch.shuffle_sync_bfly(less, 4 << distance)
        if cutlass.const_expr(self.folded):  # the columns of second terms lack it
            less = cutlass.select_(cute.arch.lane_idx() & 2 != 0, Float32(0.0), less)
        return less

    @cute.jit
    def mask(self, rScore, rNow, scoring, first_key, lane):
        """-inf for keys of a step that do not exist or that a row does not see; ``first_key``: of the step."""
        sVisible = scoring[0].sVisible  # all row blocks have the same FIRST and LAST
        for tile in cutlass.range_constexpr(self.tiles_per_step):
            first = first_key + tile * self.tile_stride * TILE_KEYS
            exist = rNow[LOOKUP_WORDS * (tile // 2) + EXISTS] >> (tile % 2 * TILE_KEYS)
            if (
                (exist & 0xFFFF) != 0xFFFF
                or first < sVisible[VisibleWords.FIRST]
                or first + TILE_KEYS > sVisible[VisibleWords.LAST]
            ):
                for j in cutlass.range_constexpr(self.row_blocks):
                    self.mask_tile(tile, rScore[j], exist, scoring[j].sVisible, first, lane)

    @cute.jit
    def mask_tile(self, tile: cutlass.Constexpr, rScore, exist, sVisible, first_key, lane):
        """Of one tile; exist: a bit for each of its keys."""
        for i in cutlass.range_constexpr(4):
            row = lane % 4 * 2 + i % 2
            offset = lane // 4 + i // 2 * 8
            key = first_key + offset
            bounds = VisibleWords.ROWS + 2 * row
            inside = key >= sVisible[bounds] and key < sVisible[bounds + 1]
            if not ((inside or key < sVisible[VisibleWords.PREFIX]) and (exist >> Uint32(offset)) & 1 != 0):
                rScore[4 * tile + i] = -Float32.inf

    @cute.jit
    def log2_magnitude(self, scale: Float32) -> Float32:
        """The binary logarithm of |scale|, at least -100."""
        return ptx.fmax(ptx.log2_approx_ftz(ptx.int_as_float(ptx.float_as_int(scale) & 0x7FFFFFFF)), Float32(-100.0))

    # -- output ---------------------------------------------------------------------------------------------------

    @cute.jit
    def dequantise_output(self, rOut, rSum, odd: cutlass.Constexpr):
        """Bring a warp's sums over values, of rows 2t + odd, from the operands' to the codes' value."""
        if cutlass.const_expr(self.format.offset_steps > 0):
            less = self.offset(rSum, odd)
            for i in cutlass.range_constexpr(self.output_tiles):
                for k in cutlass.range_constexpr(2):
                    unit = cutlass.const_expr(self.format.value_units[k])
                    rOut[4 * i + odd + 2 * k] = rOut[4 * i + odd + 2 * k] * (1 / unit) - less

    @property
    def dims_of_pair(self) -> int:
        """Ranges of dims of a lane in two products: one of four dims, or two of two."""
        return 1

    def output_dim(self, pair, half, g):
        """The first dim of a range."""
        units_per_chunk = self.value_dims // 4
        return (pair // units_per_chunk * 8 + g) * self.value_dims + pair % units_per_chunk * 4

    @cute.jit
    def mma_values(self, slice_idx: cutlass.Constexpr, stage_ptr, rScore, rNow, rOut, tile_idx, num_tiles, lane):
        """Add the weights times a slice of values to rOut; both of each row block."""
        if cutlass.const_expr(self.tiles_per_step == 1 or self.format.page_per_step):  # whose codes are finite
            for tile in cutlass.range_constexpr(self.tiles_per_step):
                self.mma_values_of_tile(slice_idx, tile, stage_ptr, rScore, rNow, rOut, lane)
        else:
            for tile in cutlass.range_constexpr(self.tiles_per_step):
                if tile_idx + tile * self.tile_stride < num_tiles:
                    self.mma_values_of_tile(slice_idx, tile, stage_ptr, rScore, rNow, rOut, lane)

    @cute.jit
    def mma_values_of_tile(
        self, slice_idx: cutlass.Constexpr, tile: cutlass.Constexpr, stage_ptr, rScore, rNow, rOut, lane
    ):
        words = cutlass.const_expr(self.value_bytes // 4)
        chunks = cutlass.const_expr(self.value_chunks // self.slices)
        operands = [self.p_operands(tile, rScore[j]) for j in range(self.row_blocks)]
        for c in cutlass.range_constexpr(chunks):
            rows = self.read_values(stage_ptr, c, tile, lane)
            for w in cutlass.range_constexpr(words):
                dims = (slice_idx * chunks + c) * self.value_dims // 2 + w * self.value_products
                out = cutlass.const_expr(4 * dims)
                for i in cutlass.range_constexpr(self.value_products):
                    a = self.format.value_operand([rows[key][w] for key in range(4)], i)
                    for j in cutlass.range_constexpr(self.row_blocks):
                        self.mma_output(a, *operands[j], rOut[j], out + 4 * i)

    @cute.jit
    def p_operands(self, tile: cutlass.Constexpr, rScore):
        """P' of a tile as an operand, and the rest after its rounding."""
        p, rest = [], []
        for half in cutlass.range_constexpr(2):
            x, y = rScore[4 * tile + 2 * half], rScore[4 * tile + 2 * half + 1]
            pair = ptx.pack_f32x2(x, y, self.format.kind)
            if cutlass.const_expr(self.folded):
                low, high = ptx.unpack_f32x2(pair, self.format.kind)
                second = ptx.pack_f32x2(x - low, y - high, self.format.kind)
                p.append(ptx.movmatrix_trans(cutlass.select_(cute.arch.lane_idx() & 2 != 0, second, pair)))
            else:
                p.append(ptx.movmatrix_trans(pair))
                if cutlass.const_expr(self.two_term_p):
                    low, high = ptx.unpack_f32x2(pair, self.format.kind)
                    rest.append(ptx.movmatrix_trans(ptx.pack_f32x2(x - low, y - high, self.format.kind)))
        return p, rest

    @cute.jit
    def mma_output(self, a, p, rest, rOut, at: cutlass.Constexpr):
        c = [rOut[at + i] for i in range(4)]
        c = ptx.mma_m16n8k16(a, p, c, self.format.kind)
        if cutlass.const_expr(len(rest) > 0):
            c = ptx.mma_m16n8k16(a, rest, c, self.format.kind)
        for i in cutlass.range_constexpr(4):
            rOut[at + i] = c[i]
