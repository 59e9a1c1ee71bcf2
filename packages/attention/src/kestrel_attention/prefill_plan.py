"""The plan of a prefill call: which kernel runs, and its scalar arguments. Pure functions of numbers, as plan.py."""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kestrel_runtime import UnsupportedError

from .kernels.constants import BOX_ROWS, LARGE_BOX_ROWS, MIN_SPLIT_TILES, PAST_ALL_BLOCKS, SPLIT_ROWS
from .kernels.parameters import PrefillCombineScalars, PrefillScalars, PrefillWorksScalars
from .kernels.prefill_variants import (
    FullPrefillVariant,
    HopperPrefillVariant,
    Length,
    PrefillVariant,
    in_large_boxes,
    prefilling,
    prefilling_in_fp8,
    prefilling_in_full,
    prefilling_on_hopper,
)
from .kernels.splits import prefill_split_limit
from .plan import MAX_GRID, MAX_KEYS, MULTIPROCESSORS, UNBOUNDED, page_divisor, scaling

LONG_WAVES = 6  # of blocks of LARGE_BLOCK queries, from which on larger blocks are faster
LARGER_TILE = 1.3  # the time of a tile of three warpgroups, of two: 1
SHORT_WAVES = 2  # of blocks of LARGE_BLOCK queries, up to which small blocks are faster
OTHER_TILES = 2.3  # the time of the prologue and the epilogue of a work
COUNTED_WAVES = 4  # from which on blocks take unequal works when they can: a counter is worth a launch that clears it
LISTED_WAVES = 8  # of works that find nothing to do, from which on a list of works is worth its launch
MAX_PACK_SHIFT = 2  # a warp of 16 rows has the queries of one head, a warpgroup those of up to four
GRID_WAVES = 2  # up to this many, a grid of one block per tile is faster than a persistent one
LARGE_BLOCK = SPLIT_ROWS  # queries of a thread block of the kernels that are not for short calls
SECTION_BYTES = 20 * 2**20  # of keys and values that blocks share in L2 at a time
MIN_SCALE = 2.0**-126  # a smaller scale is 0, with which hidden scores would be NaN


@dataclass(frozen=True)
class PrefillProblem:
    """A prefill call in numbers."""

    batch: int
    max_queries: int
    """Of a sequence."""
    max_keys: int
    """Of a sequence; keys beyond it are ignored."""
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    """Slots of a block of the keys, paged or not."""
    dtype: str
    """"bf16" or "fp16", of the result."""
    cache: str = "same"
    """Keys and values: "same" as the dtype, "e4m3" or "e5m2"."""
    fp8_queries: bool = False
    """Queries of the dtype of the keys. They become bf16 where no kernel computes with them."""
    packed_queries: bool = False
    total_queries: int = 0
    """Rows of packed queries."""
    key_starts: int = 0
    """1: keys are packed; 2: cu_seqlens_k gives lengths alone; 0: there is none."""
    has_lengths: bool = False
    has_block_table: bool = False
    in_order: bool = False
    """Keys of a sequence lie behind one another in its block. The table says which pages of page_size exist."""
    transposed: bool = False
    """Tiles of e4m3 values are transposed in memory; keys are in order."""
    appended: int = 0
    """Keys that the lengths do not count."""
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    prefix_len: int = 0
    has_prefix_lens: bool = False
    has_sinks: bool = False
    q_scale_heads: int = 0
    """0: no scale; 1: one for all heads; 2: one for each."""
    k_scale_heads: int = 0
    v_scale_heads: int = 0
    has_boxes: bool = False
    """Whether TMA can load from the tensors of keys and values, where a page is a multiple of 16 slots."""
    hopper: bool = False
    """Whether the GPU has wgmma (sm_90a)."""
    arch: str = "90a"

    @property
    def lengths_differ(self) -> bool:
        """Whether packed sequences may have different numbers of queries, which the device alone knows.

        There are more rows than sequences may hold where queries are padded, as for CUDA graphs.
        """
        unequal = self.total_queries != self.batch * self.max_queries
        return self.packed_queries and self.batch > 1 and unequal

    def blocks_of(self, rows: int) -> int:
        """Blocks of so many queries, at most, of all sequences."""
        blocks = self.batch * -(-self.max_queries // rows)
        if self.packed_queries:
            blocks = min(blocks, self.total_queries // rows + min(self.batch, self.total_queries))
        return blocks


@dataclass(frozen=True)
class PrefillPlan:
    """The kernel and the arguments of a problem."""

    variant: PrefillVariant | HopperPrefillVariant
    scalars: PrefillScalars
    combine: PrefillCombineScalars
    """Arguments of the combine kernel, which runs where scalars.num_splits > 1."""
    works: PrefillWorksScalars
    """Arguments of the kernel that lists works, which runs where scalars.listed_works > 0."""
    partial_rows: int
    """Rows of all heads of partial results."""


def plan_prefill(problem: PrefillProblem) -> PrefillPlan:
    """The plan of a problem. Raises UnsupportedError where no kernel covers it."""
    cache, unit = ("same", 8) if problem.cache == "same" else ("fp8", 16)
    blocks = problem.heads * problem.blocks_of(LARGE_BLOCK)
    short = blocks <= 2 * MULTIPROCESSORS
    case = problem.dtype, cache, problem.head_dim
    variant: PrefillVariant | HopperPrefillVariant | None = None
    if problem.head_dim % unit == 0:
        # Splits depend on the size of a block. Where it is unknown which sequences have some, the kernel chooses it.
        limit = splits_of(problem, 1).limit
        fills_blocks = not problem.packed_queries or problem.total_queries >= 2 * LARGE_BLOCK * problem.batch
        # Three consumers have no registers for scales.
        scaled = problem.cache == "same" and problem.k_scale_heads + problem.v_scale_heads > 0
        is_long = limit < 2 and blocks >= LONG_WAVES * MULTIPROCESSORS and fills_blocks and not scaled
        length: Length = "long" if is_long else ""
        few = limit == 1 and blocks <= SHORT_WAVES * MULTIPROCESSORS and not problem.lengths_differ
        in_boxes = problem.in_order or not problem.has_block_table or problem.page_size % BOX_ROWS == 0
        boxes = problem.has_boxes and in_boxes
        if problem.hopper and problem.fp8_queries and problem.cache == "e4m3":
            length_in_fp8: Length = "short" if few else length
            variant = prefilling_in_fp8(problem.head_dim, length_in_fp8, boxes, problem.transposed)
        if problem.hopper and variant is None:
            variant = prefilling_on_hopper(*case, length, boxes)
            larger = prefilling_on_hopper(*case, "long", boxes)
            if larger is not variant and limit == 1 and not problem.packed_queries and not scaled:
                variant = min(variant, larger, key=lambda v: estimated_tiles(problem, v))
            if few and variant is not None and not variant.length:
                variant = prefilling_on_hopper(*case, "short", boxes)
        by_32 = problem.in_order or not problem.has_block_table or problem.page_size % LARGE_BOX_ROWS == 0
        if variant is not None and variant.boxes and by_32:
            variant = in_large_boxes(variant)
        if boxes and limit == 1 and sees_every_key(problem):
            candidates = prefilling_in_full(problem.dtype, problem.head_dim, problem.max_keys)
            variant = min(candidates, key=lambda v: estimated_tiles(problem, v), default=variant)
        variant = variant or prefilling(*case, short)
    if variant is None:
        raise UnsupportedError(f"no kernel for many queries with heads of {problem.head_dim} over {problem.cache} keys")
    is_hopper = isinstance(variant, HopperPrefillVariant)
    problem = replace(problem, hopper=is_hopper)  # the portable kernel splits nothing
    if problem.max_keys > MAX_KEYS or problem.max_queries > MAX_KEYS:
        raise UnsupportedError(f"kernels cover sequences of up to {MAX_KEYS} queries and keys")
    section = section_heads(problem)
    if problem.batch > MAX_GRID or problem.heads // section > MAX_GRID:
        raise UnsupportedError(f"kernels cover up to {MAX_GRID} sequences and heads")
    block_rows = variant.block_rows if is_hopper else variant.rows_on(problem.arch)
    thread_blocks = variant.thread_blocks if is_hopper else 1
    splits = splits_of(problem, variant.key_tile, thread_blocks)
    blocks *= thread_blocks
    pack_shift = pack_shift_of(problem) if is_hopper and variant.packs else 0
    listing = listing_of(problem, splits, block_rows, pack_shift)
    if listing.works and not is_hopper and problem.max_queries > PAST_ALL_BLOCKS * block_rows:
        raise UnsupportedError(f"kernels cover packed sequences of up to {PAST_ALL_BLOCKS * block_rows} queries")
    if listing.works * section * thread_blocks >= 2**31:
        raise UnsupportedError("too many queries for one call")
    if not listing.works and problem.max_queries * (problem.heads * problem.batch if is_hopper else section) >= 2**31:
        raise UnsupportedError("too many queries for one call")

    # A persistent kernel gains by loading the next queries ahead, for which it needs a second or an early free buffer.
    ahead = isinstance(variant, HopperPrefillVariant) and (variant.query_buffers > 1 or variant.early)
    ahead = ahead and variant.ctas_per_sm == 1 and blocks > GRID_WAVES * MULTIPROCESSORS
    persistent = ahead or (is_hopper and listing.works > 0) or isinstance(variant, FullPrefillVariant)
    left = -1 if problem.window_left > UNBOUNDED else problem.window_left
    right = -1 if problem.window_right > UNBOUNDED else problem.window_right
    unequal = problem.causal or left >= 0 or right >= 0 or problem.packed_queries
    counted = persistent and unequal and splits.limit < 2 and blocks >= COUNTED_WAVES * MULTIPROCESSORS
    counted = counted or (is_hopper and listing.works > 0)
    multiplier, shift = page_divisor(problem.page_size)
    row_blocks = max(-(-problem.max_queries // block_rows), splits.blocks)
    of_section = page_divisor(max(1, section * row_blocks))  # where the launch has one work for each block of rows
    of_head = page_divisor(section)
    scale, softcap = scaling(problem.head_dim, problem.softmax_scale, problem.softcap)
    scales = problem.q_scale_heads + problem.k_scale_heads + problem.v_scale_heads
    on_device = (problem.packed_queries, problem.key_starts, problem.has_lengths, problem.has_prefix_lens, scales)
    scalars = PrefillScalars(
        has_device_numbers=int(any(on_device)),
        packed_queries=int(problem.packed_queries),
        key_starts=problem.key_starts,
        has_lengths=int(problem.has_lengths),
        has_block_table=2 if problem.in_order else int(problem.has_block_table),
        max_queries=problem.max_queries,
        max_keys=problem.max_keys,
        appended=problem.appended,
        page_multiplier=multiplier,
        page_shift=shift,
        group_size=problem.heads // problem.kv_heads,
        section_heads=section,
        section_multiplier=of_section[0],
        section_shift=of_section[1],
        head_multiplier=of_head[0],
        head_shift=of_head[1],
        has_prefix_lens=int(problem.has_prefix_lens),
        prefix_len=min(problem.prefix_len, UNBOUNDED),
        window_left=left,
        window_right=0 if problem.causal else right,
        softmax_scale=max(abs(scale), MIN_SCALE),
        query_signs=0x80008000 if scale < 0 else 0,
        softcap=softcap,
        has_sinks=int(problem.has_sinks),
        q_scale_heads=problem.q_scale_heads,
        k_scale_heads=problem.k_scale_heads,
        v_scale_heads=problem.v_scale_heads,
        codes_are_e5m2=int(problem.cache == "e5m2"),
        max_blocks=MULTIPROCESSORS if persistent else 2**31 - 1,
        has_counter=int(counted),
        num_splits=splits.most,
        split_limit=splits.limit,
        split_blocks=splits.blocks,
        partials_of_row=splits.partials_of_row,
        partials_of_sequence=splits.partials_of_sequence,
        listed_works=listing.works,
        pack_shift=pack_shift,
    )
    if splits.partial_rows >= 2**31:
        raise UnsupportedError("too many splits for one call")
    of_combine = {name: getattr(scalars, name) for name in PrefillCombineScalars._fields}
    of_works = {name: getattr(scalars, name) for name in PrefillWorksScalars._fields if name in scalars._fields}
    of_works |= {"total_queries": problem.total_queries, "sections": problem.heads // section}
    of_works["heads"] = problem.heads * thread_blocks  # for the number of splits
    of_works |= {"block_rows": block_rows, "key_tile": variant.key_tile, "listed_blocks": listing.blocks}
    return PrefillPlan(
        variant,
        scalars,
        PrefillCombineScalars(**of_combine),
        PrefillWorksScalars(**of_works),
        splits.partial_rows,
    )


def sees_every_key(problem: PrefillProblem) -> bool:
    """Whether keys are dense, every query sees all of them, and scores change by a scale above 0 alone."""
    dense = not (problem.packed_queries or problem.key_starts or problem.has_lengths or problem.has_block_table)
    of_window = (problem.window_left, problem.window_right)
    bounded = problem.causal or any(0 <= side <= UNBOUNDED for side in of_window)
    scaled = problem.q_scale_heads or problem.k_scale_heads or problem.v_scale_heads or problem.has_sinks
    positive = problem.softmax_scale is None or problem.softmax_scale > 0
    plain = problem.hopper and problem.cache == "same" and problem.max_keys > 0
    return plain and dense and positive and not (bounded or scaled or problem.softcap)


def estimated_tiles(problem: PrefillProblem, variant: HopperPrefillVariant) -> float:
    """How long a call takes if each thread block takes the next work when it can, in tiles of two warpgroups."""
    works = []
    for first in range(0, problem.max_queries, variant.block_rows):
        position = problem.max_keys + problem.appended - problem.max_queries + first
        last = position + min(variant.block_rows, problem.max_queries - first)
        end = problem.max_keys if not problem.causal else max(min(last, problem.max_keys), problem.prefix_len)
        start = max(0, position - problem.window_left) if 0 <= problem.window_left < UNBOUNDED else 0
        works.append(max(1, -(-end // variant.key_tile) - start // variant.key_tile))
    tile = 1.0 if variant.consumers == 2 else LARGER_TILE
    busy = [0.0] * MULTIPROCESSORS  # until when
    for tiles in sorted(works, reverse=True) * problem.batch:
        for _ in range(problem.heads):
            heapq.heapreplace(busy, busy[0] + OTHER_TILES + tile * tiles)
    return max(busy)


class Splits(NamedTuple):
    """How the keys of blocks of rows are split."""

    limit: int
    """Of each block; 0: by the queries of its sequence."""
    most: int
    """That the launch has work for."""
    blocks: int
    """Blocks of rows, at most, of a sequence whose keys are split."""
    more_works: int
    """That splits add to a sequence, at most, in blocks of rows."""
    partials_of_row: int
    partials_of_sequence: int
    partial_rows: int


UNSPLIT = Splits(1, 1, 0, 0, 0, 0, 0)


class Listing(NamedTuple):
    """A list of the works of packed sequences."""

    works: int
    """That it has room for; 0: there is no list."""
    blocks: int
    """Blocks of rows with splits that it has room for."""


def pack_shift_of(problem: PrefillProblem) -> int:
    """The binary logarithm of the heads of a KV head whose queries may share a work: four, two, or one."""
    group = problem.heads // problem.kv_heads
    if problem.q_scale_heads > 1:  # a work has one scale
        return 0
    return min((group & -group).bit_length() - 1, MAX_PACK_SHIFT)


def listing_of(problem: PrefillProblem, splits: Splits, block_rows: int, pack_shift: int) -> Listing:
    """A list where most sequences have far fewer queries than the longest, or than a block of rows; else none.

    Without a list a launch has works for as many blocks of rows of each sequence as the longest has, of one head each.
    """
    if not problem.packed_queries or problem.batch == 1:
        return Listing(0, 0)
    blocks = problem.blocks_of(min(block_rows, SPLIT_ROWS) if splits.most > 1 else block_rows)
    works = blocks + min(problem.batch * splits.more_works, blocks * (splits.most - 1)) + 2
    enumerated = max(-(-problem.max_queries // block_rows), splits.blocks) + splits.blocks * (splits.most - 1)
    empty = problem.batch * enumerated - works
    if pack_shift and problem.total_queries <= problem.batch * (SPLIT_ROWS >> pack_shift):
        empty = max(empty, problem.batch // 2)  # works that share another one's block
    if empty * problem.heads < LISTED_WAVES * MULTIPROCESSORS:
        return Listing(0, 0)
    sections = problem.heads // section_heads(problem)
    return Listing(works * sections, min(problem.batch * splits.blocks, blocks) if splits.most > 1 else 0)


def splits_of(problem: PrefillProblem, key_tile: int, thread_blocks: int = 1) -> Splits:
    """Splits by the queries and keys of each sequence, whatever its batch. Of packed sequences these are known on the
    device alone, so the launch has work for any lengths, unless every sequence must have as many as the longest.

    thread_blocks: that have a block of rows together.
    """
    most_of_keys = -(-problem.max_keys // (MIN_SPLIT_TILES * key_tile))
    row_blocks = max(1, -(-problem.max_queries // SPLIT_ROWS))
    if not problem.hopper:
        return UNSPLIT

    def limit_of(blocks: int) -> int:
        return int(prefill_split_limit(blocks * SPLIT_ROWS, problem.heads * thread_blocks, operator.floordiv, _clamp))

    unknown = problem.lengths_differ
    sizes = range(1, min(row_blocks, MULTIPROCESSORS) + 1) if unknown else (row_blocks,)
    found = {blocks: min(limit_of(blocks), most_of_keys) for blocks in sizes}
    found = {blocks: splits for blocks, splits in found.items() if splits > 1}
    if not found:
        return UNSPLIT._replace(limit=1 if unknown else limit_of(row_blocks))
    most = max(found.values())
    of_sequence = max(splits * min(blocks * SPLIT_ROWS, problem.max_queries) for blocks, splits in found.items())
    of_rows = problem.packed_queries and most * problem.total_queries < problem.batch * of_sequence
    return Splits(
        limit=0 if unknown else limit_of(row_blocks),
        most=most,
        blocks=max(found),
        more_works=max(blocks * (splits - 1) for blocks, splits in found.items()),
        partials_of_row=most if of_rows else 0,
        partials_of_sequence=0 if of_rows else of_sequence,
        partial_rows=most * problem.total_queries if of_rows else problem.batch * of_sequence,
    )


def _clamp(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def section_heads(problem: PrefillProblem) -> int:
    """Query heads that run together: those of as many KV heads as fit into L2, a divisor of their number."""
    head_bytes = 4 * max(1, problem.max_keys) * problem.head_dim
    most = max(1, SECTION_BYTES // head_bytes)
    together = max(n for n in range(1, problem.kv_heads + 1) if problem.kv_heads % n == 0 and n <= most)
    return together * (problem.heads // problem.kv_heads)
