"""The plan of a decode call: which kernels run, how sequences are split, and the kernels' scalar arguments.

Pure functions of numbers: no tensors, no GPU, no DSL. decode.py makes the problem from tensors and launches the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime import UnsupportedError

from .kernels.constants import BLOCK_ROWS, COMBINE_SPLITS, COMBINE_WARPS, FOLDED_ROWS, INT4_PAGE, TILE_KEYS
from .kernels.dtypes import EITHER
from .kernels.parameters import AppendIntegerScalars, AppendScalars, CombineScalars, DecodeScalars
from .kernels.splits import SplitRule
from .kernels.variants import (
    NAMED,
    AppendVariant,
    CombineVariant,
    DecodeVariant,
    MergeVariant,
    TauTailVariant,
    compilable,
    covering,
    covering_few,
    covering_folded,
    covering_many,
    covering_wide,
)

MAX_QUERIES = 16  # of a sequence; more are prefill
MAX_KEYS = 2**29  # of a sequence
MAX_SPLITS = 2**25  # a split has at least 16 keys
MAX_GRID = 65535  # blocks in the second and third dimension
MAX_PARTIAL_ROWS = 2**31
MORE_WARPS = -1  # num_splits: one split for a kernel of twice the warps, where there is one
UNBOUNDED = 2**30  # windows and prefixes above it do not end: kernels count in 32 bits
MULTIPROCESSORS = 132  # up to so many blocks, and more than half, take all splits of a sequence each
MAX_SCALE = 2.0**126  # of softmax scales: times log2(e), they are finite in float32
MIN_SOFTCAP = 2.0**-40  # a smaller soft cap gives the same weights, and has no finite reciprocal
MAX_SOFTCAP = 2.0**60  # a larger one leaves scores up to 2^48 as they are

Variant = DecodeVariant | CombineVariant | AppendVariant | TauTailVariant | MergeVariant


@dataclass(frozen=True)
class DecodeProblem:
    """What a decode call is, in numbers."""

    batch: int
    queries: int
    """Of a sequence."""
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int | None
    """Width of the block table; None without one."""
    dtype: str
    """Of queries and results: "bf16" or "fp16"."""
    cache: str
    """"same" as the dtype, "e4m3", "e5m2", "int8" or "int4"."""
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    prefix_len: int = 0
    has_prefix_lens: bool = False
    num_splits: int = 0
    k_scale_heads: int = 0
    """0: no scale; 1: one for all heads; 2: one for each."""
    v_scale_heads: int = 0
    has_sinks: bool = False
    appends: bool = False
    has_wide_kernels: bool = True
    """Whether wheels hold kernels of several row blocks, and of one split of few sequences, for the GPU."""

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """Keys that the pages of a sequence hold."""
        return self.page_size * (1 if self.pages is None else self.pages)

    @property
    def rows(self) -> int:
        """Of a KV head of a sequence: queries x query heads."""
        return self.queries * self.group_size

    @property
    def row_blocks(self) -> int:
        """Blocks of 8 rows of one KV head each, of a sequence."""
        return self.kv_heads * -(-self.rows // BLOCK_ROWS)

    @property
    def split_granularity(self) -> int:
        return INT4_PAGE if self.cache == "int4" else TILE_KEYS


@dataclass(frozen=True)
class DecodePlan:
    """What follows from a problem."""

    variant: DecodeVariant
    combine: CombineVariant | None
    """None where no sequence can have more splits than a block combines."""
    append: AppendVariant | None
    scalars: DecodeScalars
    combine_scalars: CombineScalars
    append_scalars: AppendScalars | AppendIntegerScalars
    partial_rows: int
    """Rows of partial results, of all splits; 0 without the combine kernel."""
    row_blocks: int
    """Of all sequences."""


def split_rule(num_splits: int, head_dim: int, cache: str, thread_blocks: int, wide: bool = False) -> SplitRule:
    """The split rule of a call.

    num_splits: as the caller gave it. thread_blocks: of a sequence with one split. wide: of more than 8 rows each.
    """
    if num_splits > 0:
        keys = INT4_PAGE if cache == "int4" else TILE_KEYS
        return SplitRule(
            unsplit_keys=keys,
            medium_split_keys=keys,
            medium_keys=0,
            long_split_keys=keys,
            max_splits=min(num_splits, MAX_SPLITS),
        )
    max_splits = max(1, 128 // max(1, thread_blocks))
    if head_dim > 256:
        return SplitRule(
            unsplit_keys=512, medium_split_keys=512, medium_keys=8192, long_split_keys=256, max_splits=max_splits
        )
    if head_dim > 128:
        return SplitRule(
            unsplit_keys=272,
            medium_split_keys=272,
            medium_keys=2176,
            long_split_keys=1024 if cache == "same" else 272,
            max_splits=max_splits,
        )
    if head_dim > 64 and (cache == "same" or wide):  # four warps
        return SplitRule(
            unsplit_keys=1024, medium_split_keys=1024, medium_keys=8192, long_split_keys=512, max_splits=2 * max_splits
        )
    if head_dim <= 64 and cache != "int4":
        return SplitRule(
            unsplit_keys=512, medium_split_keys=192, medium_keys=768, long_split_keys=256, max_splits=max_splits
        )
    return SplitRule(
        unsplit_keys=1024, medium_split_keys=1024, medium_keys=0, long_split_keys=1024, max_splits=max_splits
    )


def scaling(head_dim: int, softmax_scale: float | None, softcap: float) -> tuple[float, float]:
    """The factor of scores, with a soft cap times 2 / softcap, and the soft cap; 0: none."""
    scale = float(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    cap = max(float(softcap), MIN_SOFTCAP) if 0 < softcap <= MAX_SOFTCAP else 0.0
    scale = scale * 2 / cap if cap else scale
    return min(max(scale, -MAX_SCALE), MAX_SCALE), cap


def page_divisor(page_size: int) -> tuple[int, int]:
    """(multiplier, shift) with key // page_size == key * multiplier >> shift for all keys below 2^31."""
    shift = 31 + (page_size - 1).bit_length()
    return -(-(1 << shift) // page_size), shift


def variants_of(problem: DecodeProblem) -> tuple[DecodeVariant, ...]:
    """The kernels for a problem, fewest warps first; their results are equal.

    Wide kernels serve several queries of several heads. Without groups, short sequences gain from more thread blocks.
    """
    if problem.queries > MAX_QUERIES:
        raise UnsupportedError(f"kernels cover up to {MAX_QUERIES} queries of a sequence")
    if problem.cache == "int4" and problem.page_size != INT4_PAGE:
        raise UnsupportedError(f"INT4 caches have pages of {INT4_PAGE} slots, this one has {problem.page_size}")
    case = problem.dtype, problem.cache, problem.head_dim
    aligned = problem.head_dim % (8 if problem.cache == "same" else 16) == 0
    variants = (covering(*case) or compilable(*case)) if aligned else ()
    if problem.has_wide_kernels and problem.queries > 1 and problem.group_size > 1 and problem.rows > BLOCK_ROWS:
        variants = covering_wide(*case, problem.rows) or variants
    if problem.has_wide_kernels and problem.rows <= FOLDED_ROWS and variants:
        variants = covering_folded(*case) or variants
    if not variants:
        raise UnsupportedError(f"no kernel for heads of {problem.head_dim} over a cache of {problem.cache}")
    return variants


def plan_decode(problem: DecodeProblem) -> DecodePlan:
    """The plan of a problem. Raises UnsupportedError where no kernel covers it."""
    variants = variants_of(problem)
    capacity, queries = problem.capacity, problem.queries
    if capacity > MAX_KEYS:
        raise UnsupportedError(f"kernels cover sequences of up to {MAX_KEYS} keys")
    thread_blocks = -(-problem.rows // variants[0].rows)  # of a KV head of a sequence with one split
    wide = variants[0].rows > BLOCK_ROWS
    rule = split_rule(abs(problem.num_splits), problem.head_dim, problem.cache, problem.kv_heads * thread_blocks, wide)
    granularity = problem.split_granularity
    left = -1 if problem.window_left > UNBOUNDED else problem.window_left
    right = -1 if problem.window_right > UNBOUNDED else problem.window_right
    right = 0 if problem.causal else right

    longest = capacity  # keys that a block visits at most
    has_prefix = problem.prefix_len > 0 or problem.has_prefix_lens
    if left >= 0 and right >= 0 and not has_prefix:
        slack = granularity - 1 if granularity > TILE_KEYS else 0  # the start is rounded down
        longest = min(longest, left + right + queries + slack)
    num_splits = rule.num_splits(longest)
    if num_splits * thread_blocks > MAX_GRID or problem.batch > MAX_GRID:
        raise UnsupportedError(f"kernels cover up to {MAX_GRID} sequences and splits")
    expected_start = 0
    if left >= 0 and longest < capacity:
        expected_start = max(0, capacity - queries - left)
        if granularity > TILE_KEYS:
            expected_start = expected_start // granularity * granularity
    expected_split_keys = rule.keys(min(capacity - expected_start, longest), granularity)

    blocks = problem.batch * max(1, problem.row_blocks)
    variant = variants[0]
    for joining in variants[1:]:
        if 1 < num_splits <= joining.splits_per_block and MULTIPROCESSORS // 2 < blocks <= MULTIPROCESSORS:
            variant = joining
    if problem.num_splits == MORE_WARPS and problem.has_wide_kernels and not wide:
        variant = covering_few(problem.dtype, problem.cache, problem.head_dim) or variant
    if problem.has_wide_kernels:
        variant = covering_many(variant, blocks * num_splits)
    combines = num_splits > variant.splits_per_block
    partial_rows = blocks * num_splits * BLOCK_ROWS if combines else 0
    if partial_rows >= MAX_PARTIAL_ROWS:
        raise UnsupportedError("too many splits for one call")

    multiplier, shift = page_divisor(problem.page_size)
    scale, softcap = scaling(problem.head_dim, problem.softmax_scale, problem.softcap)
    has_block_table, is_bf16 = int(problem.pages is not None), int(problem.dtype == "bf16")
    scalars = DecodeScalars(
        has_block_table=has_block_table,
        capacity=capacity,
        appended=queries if problem.appends else 0,
        page_multiplier=multiplier,
        page_shift=shift,
        group_size=problem.group_size,
        inverse_group_size=1.0 / max(problem.group_size, 1),
        k_scale_heads=problem.k_scale_heads,
        v_scale_heads=problem.v_scale_heads,
        has_prefix_lens=int(problem.has_prefix_lens),
        has_sinks=int(problem.has_sinks),
        prefix_len=min(problem.prefix_len, UNBOUNDED),
        window_left=left,
        window_right=right,
        softmax_scale=scale,
        softcap=softcap,
        **rule._asdict(),
        num_splits=num_splits,
        expected_split_keys=expected_split_keys,
        expected_start=expected_start,
    )
    if problem.cache in ("int8", "int4"):
        append_scalars: AppendScalars | AppendIntegerScalars = AppendIntegerScalars(
            has_block_table=has_block_table, is_bf16=is_bf16
        )
    else:
        append_scalars = AppendScalars(
            has_block_table=has_block_table,
            k_scale_heads=problem.k_scale_heads,
            v_scale_heads=problem.v_scale_heads,
            is_bf16=is_bf16,
        )
    combine = f"combine_{problem.dtype}_w{1 if num_splits <= COMBINE_SPLITS else COMBINE_WARPS}"
    return DecodePlan(
        variant=variant,
        combine=_named(combine, CombineVariant) if combines else None,
        append=_named(f"append_{variant.dtype}_{variant.cache}", AppendVariant) if problem.appends else None,
        scalars=scalars,
        combine_scalars=CombineScalars(problem.group_size, num_splits, int(problem.has_sinks)),
        append_scalars=append_scalars,
        partial_rows=partial_rows,
        row_blocks=blocks,
    )


def serves_both_dtypes(variant: DecodeVariant) -> bool:
    """Whether one kernel serves bf16 and fp16; it sees 16-bit elements as bf16 and takes the dtype as an argument."""
    return variant.dtype == EITHER


def _named(name: str, kind: type) -> Variant:
    variant = NAMED[name]
    assert isinstance(variant, kind)
    return variant
