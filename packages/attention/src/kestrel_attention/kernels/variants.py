"""What is compiled ahead of time, and which of it covers a call. Imports without the DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kestrel_runtime.cute_dsl.variants import capability, supports_pdl

from .constants import BLOCK_ROWS, COMBINE_WARPS, TILE_KEYS

ARCHS = ("80", "86", "89", "90a", "100f", "120f")
WIDE_ARCHS = ("90a",)  # where kernels of several row blocks were measured; other wheels would grow by a tenth
DTYPES = ("bf16", "fp16")
EITHER = "half"  # bf16 or fp16, selected by an argument


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
    vector_loads: bool = True
    archs: tuple[str, ...] = ARCHS

    @property
    def name(self) -> str:
        warps = self.splits_per_block * self.warps
        rows = f"_r{self.rows}" if self.row_blocks > 1 else ""
        return f"decode_{self.dtype}_{self.cache}_d{self.head_dim}{'p' if self.padded else ''}_w{warps}{rows}"

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
        from . import formats, int4
        from .decode import Decode
        from .tile import WarpTiles

        dtype = numeric_type(self.dtype)
        cache_formats = {
            "same": lambda: formats.SameDtype(dtype),
            "e4m3": lambda: formats.E4m3(by_bits=capability(arch) < 89),
            "e5m2": formats.E5m2,
            "int8": formats.Int8,
            "int4": int4.Int4,
        }
        warps, slices, num_stages, ctas_per_sm = self.warps, self.slices, self.num_stages, self.ctas_per_sm
        if capability(arch) not in (90, 100):  # these have 227 KB of shared memory for a block, others at least 99
            if self.head_dim == 512:
                warps, slices = 4, 4 * self.slices
            num_stages = min(num_stages, self.stages_in(92 * 1024, self.splits_per_block * warps, slices))
        if capability(arch) != 90:  # where these registers were counted
            ctas_per_sm = max(1, ctas_per_sm - 1)
        tiles = (int4.PageTiles if self.cache == "int4" else WarpTiles)(
            format=cache_formats[self.cache](),
            head_dim=self.head_dim,
            padded=self.padded,
            warps=warps,
            tiles_per_step=self.tiles_per_step,
            slices=slices,
            num_stages=num_stages,
            two_term_p=self.two_term_p,
            row_blocks=self.row_blocks,
        )
        kernel = Decode(dtype, self.splits_per_block, tiles, ctas_per_sm, supports_pdl(arch))
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
            kernel = Append(codes, self.threads, pdl, by_bits=capability(arch) < 89)
        return kernel, kernel.arguments(numeric_type(self.dtype))


@dataclass(frozen=True)
class DequantiseVariant:
    """Dequantises a cache of INT8 or INT4 codes for prefill (dequantise.py)."""

    cache: str
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"dequantise_{self.cache}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .dequantise import Dequantise

        kernel = Dequantise(supports_pdl(arch), self.cache == "int4")
        return kernel, kernel.arguments()


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


@dataclass(frozen=True)
class PrefillVariant:
    """Attention of many queries (prefill.py), for heads of up to ``head_dim``."""

    dtype: str
    head_dim: int
    row_tiles: int
    """Row tiles of 16 queries per warp; one on architectures where two do not fit the registers."""
    cache: str = "same"  # as the dtype, or "fp8": e4m3 and e5m2
    queries_in_registers: bool = True
    key_tile: int = 64
    warps: int = 4
    num_stages: int = 2
    ctas_per_sm: int = 2
    short: bool = False
    """For calls with few queries in total: more and smaller thread blocks, bit-identical results."""
    vector_loads: bool = False

    @property
    def name(self) -> str:
        return f"prefill_{self.dtype}_{self.cache}_d{self.head_dim}{'_short' if self.short else ''}"

    def is_large(self, arch: str) -> bool:
        """Whether a block takes more than 99 KB of shared memory: these architectures allow 227."""
        return capability(arch) in (90, 100) and self.head_dim == 256 and self.cache == "same"

    def has_one_tile(self, arch: str) -> bool:
        """Whether warps have one row tile for lack of registers."""
        return capability(arch) >= 100 and self.head_dim in (64, 128)

    def rows_on(self, arch: str) -> int:
        """Queries of a thread block."""
        if self.head_dim > 256:  # two warps have the same queries
            return 8 * self.warps
        warps = 8 if self.is_large(arch) else self.warps
        return 16 * warps * (1 if self.has_one_tile(arch) else self.row_tiles)

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .prefill import Prefill
        from .prefill_wide import HALVES, PrefillWide

        is_wide = self.head_dim > 256
        large, one_tile = self.is_large(arch), self.has_one_tile(arch)
        kernel = (PrefillWide if is_wide else Prefill)(
            dtype=numeric_type(self.dtype),
            head_dim=self.head_dim // HALVES if is_wide else self.head_dim,
            key_tile=64 if large else self.key_tile,
            warps=8 if large else self.warps,
            row_tiles=1 if one_tile else self.row_tiles,
            num_stages=self.num_stages,
            queries_in_registers=capability(arch) not in (90, 100)
            if is_wide
            else self.queries_in_registers or one_tile,
            ctas_per_sm=1 if large else min(self.ctas_per_sm, 2 if capability(arch) == 100 else 3),  # or it spills
            pdl=supports_pdl(arch),
            codes=self.cache == "fp8",
            by_bits=capability(arch) < 89,
            output_in_shared=capability(arch) != 90,  # where the compiler spills with it, elsewhere without
        )
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class HopperPrefillVariant:
    """Attention of many queries with warpgroup matrix products (prefill_hopper.py), for heads of up to ``head_dim``."""

    dtype: str
    head_dim: int
    cache: str = "same"  # as the dtype, or "fp8": e4m3 and e5m2
    key_tile: int = 128
    consumers: int = 2
    """Consumer warpgroups, of 64 queries each."""
    num_stages: int = 2
    query_buffers: int = 2
    producer_registers: int = 56
    consumer_registers: int = 224
    long: bool = False
    """For calls of many thread blocks: larger blocks, bit-identical results."""
    boxes: bool = False
    """For keys of which each 16 follow one another in memory, so that TMA loads them; bit-identical results."""
    vector_loads: bool = False
    archs: tuple[str, ...] = ("90a",)
    """Architectures that the kernel is compiled for."""

    @property
    def name(self) -> str:
        long, boxes = "_long" if self.long else "", "_boxes" if self.boxes else ""
        return f"prefill_{self.dtype}_{self.cache}_hopper_d{self.head_dim}{long}{boxes}"

    @property
    def block_rows(self) -> int:
        """Queries of a thread block."""
        return 64 * self.consumers

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .prefill_hopper import PrefillHopper

        kernel = PrefillHopper(
            dtype=numeric_type(self.dtype),
            head_dim=self.head_dim,
            key_tile=self.key_tile,
            warps=3 if self.key_tile == 96 else 4,
            row_tiles=1,
            num_stages=self.num_stages,
            pdl=supports_pdl(arch),
            codes=self.cache == "fp8",
            consumers=self.consumers,
            query_buffers=self.query_buffers,
            producer_registers=self.producer_registers,
            consumer_registers=self.consumer_registers,
            boxes=self.boxes,
            turns=True,
        )
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class Fp8PrefillVariant(HopperPrefillVariant):
    """The same for e4m3 queries, keys and values, with e4m3 matrix products (prefill_fp8.py)."""

    staging: int = 3
    output_parts: int = 1
    turns: bool = False
    """Consumers in turn, and bases that rarely move (prefill_fp8_turns.py)."""

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .prefill_fp8 import PrefillFp8
        from .prefill_fp8_turns import PrefillFp8Turns

        kernel = (PrefillFp8Turns if self.turns else PrefillFp8)(
            dtype=numeric_type(self.dtype),
            head_dim=self.head_dim,
            key_tile=self.key_tile,
            warps=4,
            row_tiles=1,
            num_stages=self.num_stages,
            pdl=supports_pdl(arch),
            codes=True,
            consumers=self.consumers,
            query_buffers=self.query_buffers,
            producer_registers=self.producer_registers,
            consumer_registers=self.consumer_registers,
            staging=self.staging,
            output_parts=self.output_parts,
            boxes=self.boxes,
            turns=self.turns,
        )
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class PrefillCombineVariant:
    """Combines the splits of prefill_hopper.py (prefill_combine.py)."""

    dtype: str
    vector_loads: bool = True
    archs: tuple[str, ...] = ("90a",)

    @property
    def name(self) -> str:
        return f"prefill_combine_{self.dtype}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .prefill_combine import PrefillCombine

        kernel = PrefillCombine(numeric_type(self.dtype), supports_pdl(arch))
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class PrefillWorksVariant:
    """Lists the works of packed sequences ahead of prefill (prefill_works.py)."""

    vector_loads: bool = False

    @property
    def name(self) -> str:
        return "prefill_works"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .prefill_works import PrefillWorks

        kernel = PrefillWorks(supports_pdl(arch))
        return kernel, kernel.arguments()


def numeric_type(dtype: str) -> Any:
    """The DSL's type of this name; kernels for EITHER see 16-bit elements as bf16."""
    from kestrel_runtime.cute_dsl import numeric

    return numeric.from_name("bf16" if dtype == EITHER else dtype)


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
        of("same", 512, warps=8, tiles_per_step=1, num_stages=3, ctas_per_sm=1, slices=2),
    )


QUANTISED = (
    DecodeVariant(EITHER, "int4", 128, padded=False, warps=4, tiles_per_step=4, num_stages=2, ctas_per_sm=2),
    DecodeVariant(EITHER, "int4", 64, padded=False, warps=4, tiles_per_step=4, num_stages=4, ctas_per_sm=3),
    DecodeVariant(EITHER, "int8", 64, padded=False, warps=4, tiles_per_step=2, num_stages=4, ctas_per_sm=4),
    DecodeVariant(EITHER, "int8", 128, padded=False, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
    DecodeVariant(EITHER, "int8", 256, padded=False, warps=4, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
    DecodeVariant(EITHER, "e5m2", 64, padded=False, warps=4, tiles_per_step=2, num_stages=4, ctas_per_sm=4),
    DecodeVariant(EITHER, "e5m2", 128, padded=False, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=2),
)

# 255 registers allow two CTAs per SM of four warps. d64 with 16 rows takes fewer.
WIDE = tuple(
    DecodeVariant(dtype, cache, head_dim, padded=False, row_blocks=row_blocks, archs=WIDE_ARCHS, **fields)
    for dtype in DTYPES
    for row_blocks in (2, 4)
    for cache, head_dim, fields in (
        ("same", 64, {"warps": 4, "tiles_per_step": 1, "num_stages": 6, "ctas_per_sm": 3 if row_blocks == 2 else 2}),
        ("same", 128, {"warps": 4, "tiles_per_step": 1, "num_stages": 4, "ctas_per_sm": 2}),
        ("e4m3", 64, {"warps": 4, "tiles_per_step": 2, "num_stages": 4, "ctas_per_sm": 3 if row_blocks == 2 else 2}),
        ("e4m3", 128, {"warps": 4, "tiles_per_step": 1, "num_stages": 8, "ctas_per_sm": 2}),
    )
)

# For calls with num_splits=-1: twice the warps share the keys of the one split, with other roundings.
FEW = tuple(
    DecodeVariant(
        dtype, "same", 128, padded=False, warps=8, tiles_per_step=1, num_stages=4, ctas_per_sm=1, archs=WIDE_ARCHS
    )
    for dtype in DTYPES
)

PREFILL = tuple(
    variant
    for dtype in DTYPES
    for variant in (
        PrefillVariant(dtype, 64, row_tiles=1, ctas_per_sm=3, short=True),
        PrefillVariant(dtype, 64, row_tiles=2),
        PrefillVariant(dtype, 80, row_tiles=2),
        PrefillVariant(dtype, 96, row_tiles=2, queries_in_registers=False),
        PrefillVariant(dtype, 128, row_tiles=2, queries_in_registers=False),
        PrefillVariant(dtype, 256, row_tiles=1, queries_in_registers=False, key_tile=32),
        PrefillVariant(dtype, 512, row_tiles=1, key_tile=32, warps=8, num_stages=1, ctas_per_sm=1),
        PrefillVariant(dtype, 64, row_tiles=2, cache="fp8"),
        PrefillVariant(dtype, 128, row_tiles=1, cache="fp8"),
        PrefillVariant(dtype, 256, row_tiles=1, queries_in_registers=False, key_tile=32, cache="fp8"),
    )
)

PREFILL_HOPPER = tuple(
    variant
    for dtype in DTYPES
    for variant in (
        HopperPrefillVariant(dtype, 64, num_stages=3),
        HopperPrefillVariant(
            dtype, 64, consumers=3, num_stages=3, producer_registers=32, consumer_registers=160, long=True
        ),
        HopperPrefillVariant(dtype, 80, key_tile=96),
        HopperPrefillVariant(dtype, 96),
        HopperPrefillVariant(dtype, 128),
        HopperPrefillVariant(dtype, 64, "fp8"),
        HopperPrefillVariant(dtype, 128, "fp8"),
        *(
            HopperPrefillVariant(
                dtype, 256, cache, key_tile=64, query_buffers=1, producer_registers=40, consumer_registers=232
            )
            for cache in ("same", "fp8")
        ),
    )
)

PREFILL_HOPPER += tuple(replace(v, boxes=True) for v in PREFILL_HOPPER)

# Three consumers of keys that cp.async copies would spill.
PREFILL_HOPPER += tuple(
    HopperPrefillVariant(
        dtype, 80, key_tile=96, consumers=3, producer_registers=32, consumer_registers=160, long=True, boxes=True
    )
    for dtype in DTYPES
)

PREFILL_FP8 = (
    Fp8PrefillVariant("bf16", 64, "e4m3", num_stages=4),
    Fp8PrefillVariant(
        "bf16",
        64,
        "e4m3",
        num_stages=4,
        output_parts=2,
        consumers=3,
        producer_registers=32,
        consumer_registers=160,
        long=True,
    ),
    *(
        Fp8PrefillVariant(
            "bf16", 128, "e4m3", num_stages=4, boxes=boxes, producer_registers=40, consumer_registers=232, turns=True
        )
        for boxes in (False, True)
    ),
)

VARIANTS: tuple[
    DecodeVariant
    | CombineVariant
    | AppendVariant
    | DequantiseVariant
    | TauTailVariant
    | MergeVariant
    | PrefillVariant
    | HopperPrefillVariant
    | PrefillCombineVariant
    | PrefillWorksVariant,
    ...,
] = (
    *(variant for dtype in DTYPES for variant in _decode_variants(dtype)),
    *QUANTISED,
    *WIDE,
    *FEW,
    *(CombineVariant(dtype, warps) for dtype in DTYPES for warps in (1, COMBINE_WARPS)),
    *(AppendVariant(dtype, cache) for dtype in DTYPES for cache in ("same", "e4m3")),
    *(AppendVariant(EITHER, cache) for cache in ("e5m2", "int8", "int4")),
    *(DequantiseVariant(cache) for cache in ("int8", "int4")),
    *(TauTailVariant(dtype, table) for dtype in (*DTYPES, "fp32") for table in sorted({dtype, "fp32"})),
    *PREFILL,
    *PREFILL_HOPPER,
    *PREFILL_FP8,
    *(PrefillCombineVariant(dtype) for dtype in DTYPES),
    PrefillWorksVariant(),
    *(MergeVariant(dtype) for dtype in (*DTYPES, "fp32")),
)


NAMED = {variant.name: variant for variant in VARIANTS}


def covering(dtype: str, cache: str, head_dim: int) -> tuple[DecodeVariant, ...]:
    """The compiled decode variants for a head dimension, fewest warps first; their results are equal."""
    fitting = [v for v in VARIANTS if isinstance(v, DecodeVariant) and v.dtype in (dtype, EITHER) and v.cache == cache]
    fitting = [v for v in fitting if v.row_blocks == 1 and v not in FEW]
    exact = tuple(v for v in fitting if v.head_dim == head_dim and not v.padded)
    return exact or tuple(v for v in fitting if v.padded and head_dim < v.head_dim)[:1]


def covering_wide(dtype: str, cache: str, head_dim: int, rows: int) -> tuple[DecodeVariant, ...]:
    """The compiled decode variant for more than BLOCK_ROWS rows of a KV head: the narrowest that takes all at once."""
    fitting = [v for v in WIDE if (v.dtype, v.cache, v.head_dim) == (dtype, cache, head_dim)]
    return tuple(sorted(fitting, key=lambda v: (v.rows < rows, v.rows if v.rows >= rows else -v.rows))[:1])


def covering_few(dtype: str, cache: str, head_dim: int) -> DecodeVariant | None:
    """The compiled decode variant for one split of few sequences, or None."""
    return next((v for v in FEW if (v.dtype, v.cache, v.head_dim) == (dtype, cache, head_dim)), None)


def prefilling(dtype: str, cache: str, head_dim: int, short: bool = False) -> PrefillVariant | None:
    """The compiled prefill variant for a head dimension, or None. cache: "same" or "fp8"; short: see PrefillVariant."""
    fitting = [v for v in PREFILL if v.dtype == dtype and v.cache == cache and v.head_dim >= head_dim]
    return min(fitting, key=lambda v: (v.head_dim, v.short != short), default=None)


def prefilling_on_hopper(
    dtype: str, cache: str, head_dim: int, long: bool = False, boxes: bool = False
) -> HopperPrefillVariant | None:
    """The compiled variant with warpgroup matrix products for a head dimension, or None. long, boxes: see there."""
    fitting = [v for v in PREFILL_HOPPER if v.dtype == dtype and v.cache == cache and v.head_dim >= head_dim]
    return min(fitting, key=lambda v: (v.head_dim, v.boxes != boxes, v.long != long), default=None)


def prefilling_in_fp8(head_dim: int, long: bool = False, boxes: bool = False) -> Fp8PrefillVariant | None:
    """The compiled variant with e4m3 matrix products for a head dimension, or None. long, boxes: see there."""
    fitting = [v for v in PREFILL_FP8 if v.head_dim >= head_dim]
    return min(fitting, key=lambda v: (v.head_dim, v.long != long, v.boxes != boxes), default=None)


def compilable(dtype: str, cache: str, head_dim: int) -> tuple[DecodeVariant, ...]:
    """The variant to compile on first use where none is compiled: other codes of 8 bits as e4m3.

    Scales take registers: INT8 heads of up to 128 dims spill at three CTAs per SM, heads of 512 at any number.
    """
    if cache not in ("int8", "e5m2") or head_dim > 256:
        return ()
    found = covering(dtype, "e4m3", head_dim)[:1]
    return tuple(replace(v, dtype=EITHER, cache=cache, ctas_per_sm=min(v.ctas_per_sm, 2)) for v in found)
