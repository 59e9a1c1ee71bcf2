"""What is compiled ahead of time (prefill: prefill_variants.py), and which covers a call. Imports without the DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kestrel_runtime.cute_dsl.variants import capability, supports_pdl

from .constants import ARCHS, BLOCK_ROWS, COMBINE_WARPS, MULTIPROCESSORS, TILE_KEYS
from .dtypes import DTYPES, EITHER, numeric_type
from .prefill_variants import PREFILL_VARIANTS

WIDE_ARCHS = ("90a",)  # where kernels of several row blocks were measured; other wheels would grow by a tenth


@dataclass(frozen=True)
class DecodeVariant:
    """Attention of few queries over a cache (decode.py), for one head dimension or, if padded, for smaller ones too."""

    dtype: str  # or EITHER
    cache: str  # "same" as the dtype, "e4m3", "e5m2", "int8" or "int4"
    head_dim: int
    padded: bool
    warps: int  # of a split
    tiles_per_step: int
    num_stages: int
    slices: int = 1
    """In which the keys (and the values) of a step are loaded, a stage each."""
    splits_per_block: int = 1
    ctas_per_sm: int = 3
    two_term_p: bool = True
    row_blocks: int = 1
    """Of BLOCK_ROWS rows, for which a thread block reads keys and values once."""
    wgmma_key_stages: int = 0
    """Of the stages, those of keys in a kernel of warpgroup products (decode_hopper.py); 0: another kernel."""
    folded: bool = False
    """Of at most FOLDED_ROWS rows: the columns of further rows hold the second terms of weights."""
    copies_queries: bool = False
    """To shared memory, as they are."""
    for_many: int = 0
    """Used instead of another variant in launches of more thread blocks than this, with equal results; 0: never."""
    vector_loads: bool = True
    archs: tuple[str, ...] = ARCHS

    @property
    def converts_fp8(self) -> bool:
        return self.cache == "e4m3"

    @property
    def name(self) -> str:
        warps = self.splits_per_block * self.warps
        rows = f"_r{self.rows}" if self.row_blocks > 1 else ""
        many = ("_f" if self.folded else "") + ("_many" if self.for_many else "")
        return f"decode_{self.dtype}_{self.cache}_d{self.head_dim}{'p' if self.padded else ''}_w{warps}{rows}{many}"

    @property
    def rows(self) -> int:
        """Of a thread block: queries x query heads of one KV head."""
        return self.row_blocks * BLOCK_ROWS

    def stages_in(self, shared_bytes: int, warps: int, slices: int) -> int:
        """How many stages of a warp fit into so much shared memory."""
        bits = {"same": 16, "int4": 4}.get(self.cache, 8)
        stage = self.tiles_per_step * TILE_KEYS * self.head_dim * bits // 8 // slices
        return shared_bytes // (warps * stage)

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from . import formats, int4, int8
        from .decode import Decode
        from .tile import WarpTiles

        dtype = numeric_type(self.dtype)
        cache_formats = {
            "same": lambda: formats.SameDtype(dtype),
            "e4m3": lambda: formats.E4m3(by_bits=capability(arch) < 89),
            "e5m2": formats.E5m2,
            "int8": int8.Int8,
            "int4": int4.Int4,
        }
        warps, slices, num_stages, ctas_per_sm = self.warps, self.slices, self.num_stages, self.ctas_per_sm
        if capability(arch) not in (90, 100):  # these have 227 KB of shared memory for a block, others at least 99
            if self.head_dim == 512:
                warps, slices = 4, 4 * self.slices
            num_stages = min(num_stages, self.stages_in(92 * 1024, self.splits_per_block * warps, slices))
        if capability(arch) != 90:  # where these registers were counted
            ctas_per_sm = max(1, ctas_per_sm - 1)
        tiles_of = {"int4": int4.PageTiles, "int8": int8.Int8Tiles}.get(self.cache, WarpTiles)
        kernel_of = Decode
        if self.wgmma_key_stages:
            from .decode_hopper import DecodeWide, WideTiles

            kernel_of, tiles_of = DecodeWide, partial(WideTiles, key_stages=self.wgmma_key_stages)
        tiles = tiles_of(
            format=cache_formats[self.cache](),
            head_dim=self.head_dim,
            padded=self.padded,
            warps=warps,
            tiles_per_step=self.tiles_per_step,
            slices=slices,
            num_stages=num_stages,
            two_term_p=self.two_term_p,
            row_blocks=self.row_blocks,
            folded=self.folded,
        )
        kernel = kernel_of(
            dtype, self.splits_per_block, tiles, ctas_per_sm, supports_pdl(arch), copies_queries=self.copies_queries
        )
        return kernel, kernel.arguments(self.cache)


@dataclass(frozen=True)
class CombineVariant:
    """Combines the splits of long sequences (combine.py), for any head dimension up to 512."""

    dtype: str
    warps: int
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"combine_{self.dtype}_w{self.warps}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .combine import Combine

        kernel = Combine(numeric_type(self.dtype), self.warps, supports_pdl(arch))
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class AppendVariant:
    """Appends new keys and values to a cache (append.py, append_integers.py)."""

    dtype: str  # of "same" and "e4m3" caches; EITHER of others
    cache: str
    threads: int = 256
    vector_loads: bool = True

    @property
    def converts_fp8(self) -> bool:
        return self.cache in ("e4m3", "e5m2")

    @property
    def name(self) -> str:
        return f"append_{self.dtype}_{self.cache}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .append import Append
        from .append_integers import AppendInt4, AppendInt8

        pdl = supports_pdl(arch)
        if self.cache in ("int8", "int4"):
            kernel: Any = (AppendInt8 if self.cache == "int8" else AppendInt4)(pdl)
        else:
            codes = "" if self.cache == "same" else self.cache
            kernel = Append(codes, self.threads, pdl, by_bits=self.converts_fp8 and capability(arch) < 89)
        return kernel, kernel.arguments(numeric_type(self.dtype))


@dataclass(frozen=True)
class TauTailVariant:
    """Tau scaling in place (tau_tail.py)."""

    dtype: str
    table: str
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"tau_tail_{self.dtype}_{self.table}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .tau_tail import TauTail

        kernel = TauTail(numeric_type(self.dtype), numeric_type(self.table), supports_pdl(arch))
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class MergeVariant:
    """Merging attention over two sets of keys (merge.py)."""

    dtype: str
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"merge_{self.dtype}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .merge import Merge

        kernel = Merge(numeric_type(self.dtype), supports_pdl(arch))
        return kernel, kernel.arguments()


COPIED = {"ctas_per_sm": 1, "copies_queries": True, "vector_loads": False}


def _decode_variants(dtype: str) -> tuple[DecodeVariant, ...]:
    """The CTAs per SM follow from the registers: 16 warps of 128, 12 of 168, or 8 of 255."""

    def of(cache: str, head_dim: int, padded: bool = False, **fields: int) -> DecodeVariant:
        return DecodeVariant(dtype, cache, head_dim, padded, **fields)

    return (
        of("e4m3", 64, warps=4, tiles_per_step=2, num_stages=4, ctas_per_sm=4),
        of("e4m3", 64, warps=4, tiles_per_step=2, num_stages=4, ctas_per_sm=1, splits_per_block=4),
        of("same", 64, warps=4, tiles_per_step=1, num_stages=6, ctas_per_sm=4),
        of("same", 64, warps=4, tiles_per_step=1, num_stages=6, ctas_per_sm=1, splits_per_block=4),
        of("e4m3", 128, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
        of("same", 128, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=3),
        of("e4m3", 128, padded=True, warps=4, tiles_per_step=1, num_stages=6, ctas_per_sm=3),
        of("e4m3", 256, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=3),
        of("e4m3", 256, padded=True, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
        of("e4m3", 512, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=1),
        of("same", 128, padded=True, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
        of("same", 256, warps=4, tiles_per_step=1, num_stages=6, ctas_per_sm=2, slices=2),
        of("same", 256, padded=True, warps=4, tiles_per_step=1, num_stages=6, ctas_per_sm=2, slices=2),
        of("same", 512, warps=8, tiles_per_step=1, num_stages=3, slices=2, **COPIED),
    )


QUANTISED = (
    DecodeVariant(EITHER, "int4", 128, padded=False, warps=4, tiles_per_step=4, num_stages=2, ctas_per_sm=2),
    DecodeVariant(EITHER, "int4", 64, padded=False, warps=4, tiles_per_step=4, num_stages=4, ctas_per_sm=3),
    DecodeVariant(EITHER, "int8", 64, padded=False, warps=4, tiles_per_step=1, num_stages=6, ctas_per_sm=4),
    DecodeVariant(EITHER, "int8", 128, padded=False, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
    DecodeVariant(EITHER, "int8", 256, padded=False, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
    DecodeVariant(EITHER, "e5m2", 64, padded=False, warps=4, tiles_per_step=2, num_stages=4, ctas_per_sm=4),
    DecodeVariant(EITHER, "e5m2", 128, padded=False, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
)

# Of mma.sync 255 registers allow two CTAs per SM of four warps; d64 with 16 rows takes fewer. Over d128, warpgroup
# products: two warpgroups of 128 registers, whose stages, weights and queries take half of the shared memory of an SM.
WGMMA = {"warps": 8, "tiles_per_step": 1, "num_stages": 2, "ctas_per_sm": 2, "wgmma_key_stages": 1}
WIDE = tuple(
    DecodeVariant(dtype, cache, head_dim, padded=False, row_blocks=row_blocks, archs=WIDE_ARCHS, **fields)
    for dtype in DTYPES
    for row_blocks in (2, 4)
    for cache, head_dim, fields in (
        ("same", 64, {"warps": 4, "tiles_per_step": 1, "num_stages": 6, "ctas_per_sm": 3 if row_blocks == 2 else 2}),
        (
            "same",
            128,
            {"warps": 4, "tiles_per_step": 2, "num_stages": 2, "ctas_per_sm": 2} if row_blocks == 2 else WGMMA,
        ),
        ("e4m3", 64, {"warps": 4, "tiles_per_step": 2, "num_stages": 4, "ctas_per_sm": 3 if row_blocks == 2 else 2}),
        ("e4m3", 128, {"warps": 8, "tiles_per_step": 1, "num_stages": 4, "ctas_per_sm": 2, "wgmma_key_stages": 2}),
    )
)

# For calls with num_splits=-1: twice the warps share the keys of the one split, with other roundings.
FEW = tuple(
    DecodeVariant(
        dtype, "same", 128, padded=False, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=1, archs=WIDE_ARCHS
    )
    for dtype in DTYPES
)

# Of at most FOLDED_ROWS rows.
_of_few_rows = partial(DecodeVariant, padded=False, tiles_per_step=1, folded=True, archs=WIDE_ARCHS)
FOLDED = (
    *(_of_few_rows(dtype, "same", 256, warps=4, num_stages=6, ctas_per_sm=2, slices=2) for dtype in DTYPES),
    *(_of_few_rows(dtype, "e4m3", 128, warps=8, num_stages=3, ctas_per_sm=2) for dtype in DTYPES),
    _of_few_rows(EITHER, "int8", 64, warps=4, num_stages=6, ctas_per_sm=4),
    _of_few_rows(EITHER, "int8", 128, warps=8, num_stages=3, ctas_per_sm=2),
    replace(QUANTISED[0], num_stages=3, folded=True, archs=WIDE_ARCHS),
)

# With other numbers of stages, for launches of many thread blocks; results are equal.
MANY = (
    replace(QUANTISED[1], num_stages=2, for_many=MULTIPROCESSORS, archs=WIDE_ARCHS),
    *(replace(v, num_stages=4, for_many=2 * MULTIPROCESSORS) for v in FOLDED if v.cache == "e4m3"),
)

VARIANTS = (
    *(variant for dtype in DTYPES for variant in _decode_variants(dtype)),
    *QUANTISED,
    *WIDE,
    *FEW,
    *FOLDED,
    *MANY,
    *(CombineVariant(dtype, warps) for dtype in DTYPES for warps in (1, COMBINE_WARPS)),
    *(AppendVariant(dtype, cache) for dtype in DTYPES for cache in ("same", "e4m3")),
    *(AppendVariant(EITHER, cache) for cache in ("e5m2", "int8", "int4")),
    *(TauTailVariant(dtype, table) for dtype in (*DTYPES, "fp32") for table in sorted({dtype, "fp32"})),
    *PREFILL_VARIANTS,
    *(MergeVariant(dtype) for dtype in (*DTYPES, "fp32")),
)

NAMED = {variant.name: variant for variant in VARIANTS}


def covering(dtype: str, cache: str, head_dim: int) -> tuple[DecodeVariant, ...]:
    """The compiled decode variants for a head dimension, fewest warps first; their results are equal."""
    fitting = [v for v in VARIANTS if isinstance(v, DecodeVariant) and v.dtype in (dtype, EITHER) and v.cache == cache]
    fitting = [v for v in fitting if v.row_blocks == 1 and v not in (*FEW, *FOLDED, *MANY)]
    exact = tuple(v for v in fitting if v.head_dim == head_dim and not v.padded)
    return exact or tuple(v for v in fitting if v.padded and head_dim < v.head_dim)[:1]


def covering_wide(dtype: str, cache: str, head_dim: int, rows: int) -> tuple[DecodeVariant, ...]:
    """The compiled decode variant for more than BLOCK_ROWS rows of a KV head: the narrowest that takes all at once."""
    fitting = [v for v in WIDE if (v.dtype, v.cache, v.head_dim) == (dtype, cache, head_dim)]
    return tuple(sorted(fitting, key=lambda v: (v.rows < rows, v.rows if v.rows >= rows else -v.rows))[:1])


def covering_few(dtype: str, cache: str, head_dim: int) -> DecodeVariant | None:
    """The compiled decode variant for one split of few sequences, or None."""
    return next((v for v in FEW if (v.dtype, v.cache, v.head_dim) == (dtype, cache, head_dim)), None)


def covering_folded(dtype: str, cache: str, head_dim: int) -> tuple[DecodeVariant, ...]:
    """The compiled decode variant for at most FOLDED_ROWS rows of a KV head."""
    return tuple(v for v in FOLDED if v.dtype in (dtype, EITHER) and (v.cache, v.head_dim) == (cache, head_dim))


def covering_many(variant: DecodeVariant, thread_blocks: int) -> DecodeVariant:
    """The compiled decode variant for so many thread blocks: the given one, or one with equal results."""
    alike = (v for v in MANY if replace(variant, num_stages=v.num_stages, for_many=v.for_many, archs=v.archs) == v)
    return next((v for v in alike if thread_blocks > v.for_many), variant)


def compilable(dtype: str, cache: str, head_dim: int) -> tuple[DecodeVariant, ...]:
    """The variant to compile on first use where none is compiled: other codes of 8 bits as e4m3.

    Scales take registers: INT8 heads of up to 128 dims spill at three CTAs per SM, heads of 512 at any number.
    """
    if cache not in ("int8", "e5m2") or head_dim > 256:
        return ()
    found = covering(dtype, "e4m3", head_dim)[:1]
    return tuple(replace(v, dtype=EITHER, cache=cache, ctas_per_sm=min(v.ctas_per_sm, 2)) for v in found)
