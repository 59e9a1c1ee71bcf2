"""What of prefill is compiled ahead of time, and which of it covers a call. Imports without the DSL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from kestrel_runtime.cute_dsl.variants import capability, supports_pdl

from .constants import ARCHS, BOX_ROWS, LARGE_BOX_ROWS
from .dtypes import DTYPES, numeric_type

Length = Literal["", "short", "long"]
T = TypeVar("T", bound="HopperPrefillVariant")


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
    def converts_fp8(self) -> bool:
        return self.cache == "fp8"

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
            by_bits=self.converts_fp8 and capability(arch) < 89,
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
    length: Length = ""
    """"long": larger thread blocks for calls of many. "short": for calls of few, small ones, two on an SM, so that one
    computes while another starts or ends. Results are bit-identical."""
    boxes: bool = False
    """For keys of which each 16 follow one another in memory, so that TMA loads them; bit-identical results."""
    box_rows: int = BOX_ROWS
    """Keys that TMA loads at once; a page holds a multiple of them."""
    early: bool = False
    """The next queries are loaded before the results of the last are stored (prefill_hopper_early.py)."""
    vector_loads: bool = False
    archs: tuple[str, ...] = ("90a",)
    """Architectures that the kernel is compiled for."""

    @property
    def name(self) -> str:
        words = ["prefill", self.dtype, self.cache, "hopper", f"d{self.head_dim}", self.length, "boxes" * self.boxes]
        words.append("large" * (self.box_rows > BOX_ROWS))
        return "_".join(filter(None, words))

    @property
    def is_wide(self) -> bool:
        """Whether consumer warpgroups share queries (prefill_hopper_wide.py)."""
        return self.head_dim > 256

    @property
    def block_rows(self) -> int:
        """Queries of a thread block."""
        return 64 * self.consumers

    @property
    def packs(self) -> bool:
        """Whether heads of a KV head may share a thread block."""
        return self.consumers == 2 and not self.is_wide

    @property
    def thread_blocks(self) -> int:
        """That have a block of queries together."""
        return 2 if self.is_wide else 1

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.length == "short" else 1

    def kernel_class(self) -> type:
        from .prefill_hopper import PrefillHopper
        from .prefill_hopper_early import PrefillHopperEarly
        from .prefill_hopper_wide import PrefillHopperWide

        return PrefillHopperWide if self.is_wide else PrefillHopperEarly if self.early else PrefillHopper

    def options(self, arch: str) -> dict[str, Any]:
        """Of the kernel's class."""
        return {
            "dtype": numeric_type(self.dtype),
            "head_dim": self.head_dim,
            "key_tile": self.key_tile,
            "warps": 3 if self.key_tile == 96 else 4,
            "row_tiles": 1,
            "num_stages": self.num_stages,
            "pdl": supports_pdl(arch),
            "codes": self.cache in ("fp8", "e4m3"),
            "consumers": self.consumers,
            "query_buffers": self.query_buffers,
            "producer_registers": self.producer_registers,
            "consumer_registers": self.consumer_registers,
            "boxes": self.boxes,
            "box_rows": self.box_rows,
            "turns": self.consumers > 1 and not self.is_wide,
            "ctas_per_sm": self.ctas_per_sm,
        }

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        kernel = self.kernel_class()(**self.options(arch))
        return kernel, kernel.arguments()


@dataclass(frozen=True)
class Fp8PrefillVariant(HopperPrefillVariant):
    """The same for e4m3 queries, keys and values, with e4m3 matrix products (prefill_fp8.py)."""

    staging: int = 3
    output_parts: int = 1
    turns: bool = False
    """Consumers in turn, and bases that rarely move (prefill_fp8_turns.py)."""
    transposed: bool = False
    """Values are transposed ahead of this kernel (prefill_transpose.py)."""

    @property
    def name(self) -> str:
        return super().name + "_transposed" * self.transposed

    def kernel_class(self) -> type:
        from .prefill_fp8 import PrefillFp8
        from .prefill_fp8_turns import PrefillFp8Turns

        return PrefillFp8Turns if self.turns else PrefillFp8

    def options(self, arch: str) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("staging", "output_parts", "transposed", "turns")}
        return super().options(arch) | own | {"box_rows": BOX_ROWS}


@dataclass(frozen=True)
class FullPrefillVariant(HopperPrefillVariant):
    """Dense queries that see every key (prefill_full.py), for heads of 72 and 80."""

    value_dims: int = 72
    """Of the products with values. Those with keys have 80."""
    first_tile: int = 96
    """Keys of the first tile of a work, at most."""

    @property
    def name(self) -> str:
        return f"prefill_{self.dtype}_full_d{self.value_dims}_x{self.consumers}_f{self.first_tile}"

    @property
    def packs(self) -> bool:
        return False

    def options(self, arch: str) -> dict[str, Any]:
        return super().options(arch) | {"warps": 4, "value_dims": self.value_dims, "first_tile": self.first_tile}

    def kernel_class(self) -> type:
        from .prefill_full import PrefillFull

        return PrefillFull


@dataclass(frozen=True)
class PrefillTransposeVariant:
    """Transposes e4m3 values ahead of prefill (prefill_transpose.py)."""

    vector_loads: bool = True
    archs: tuple[str, ...] = ("90a",)

    @property
    def name(self) -> str:
        return "prefill_transpose_d128"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .prefill_transpose import PrefillTranspose

        kernel = PrefillTranspose(
            dtype=numeric_type("bf16"),
            head_dim=128,
            key_tile=128,
            warps=4,
            row_tiles=1,
            num_stages=1,
            pdl=supports_pdl(arch),
            codes=True,
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


@dataclass(frozen=True)
class DequantiseVariant:
    """Dequantises a cache of INT8, INT4 or FP8 codes for prefill, or copies one of 16 bits (dequantise.py)."""

    cache: str
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"dequantise_{self.cache}"

    @property
    def archs(self) -> tuple[str, ...]:
        return ("90a",) if self.cache == "same" else ARCHS  # keys are copied for TMA alone

    @property
    def converts_fp8(self) -> bool:
        return self.cache == "fp8"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .dequantise import Dequantise

        kernel = Dequantise(supports_pdl(arch), self.cache, by_bits=self.converts_fp8 and capability(arch) < 89)
        return kernel, kernel.arguments()


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

# The registers of two thread blocks of two warpgroups on an SM.
SHORT: dict[str, Any] = {"consumers": 1, "producer_registers": 40, "consumer_registers": 216, "length": "short"}

# Where queries are in registers.
OF_128: dict[str, Any] = {"producer_registers": 40, "consumer_registers": 232}

PREFILL_HOPPER = tuple(
    variant
    for dtype in DTYPES
    for variant in (
        HopperPrefillVariant(dtype, 64, num_stages=3),
        HopperPrefillVariant(
            dtype, 64, consumers=3, num_stages=3, producer_registers=32, consumer_registers=160, length="long"
        ),
        HopperPrefillVariant(dtype, 80, key_tile=96),
        HopperPrefillVariant(dtype, 96),
        HopperPrefillVariant(dtype, 128, **OF_128),
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

# Heads of 256 have one buffer of queries. Where it is free early, thread blocks are persistent in long calls.
PREFILL_HOPPER += tuple(
    replace(v, boxes=True, early=v.query_buffers == 1 and v.cache == "same") for v in PREFILL_HOPPER
)

# Three consumers of 80 dims would spill where cp.async copies keys, and small thread blocks are slower there.
PREFILL_HOPPER += tuple(
    variant
    for dtype in DTYPES
    for variant in (
        HopperPrefillVariant(
            dtype,
            80,
            key_tile=96,
            consumers=3,
            producer_registers=32,
            consumer_registers=160,
            length="long",
            boxes=True,
        ),
        HopperPrefillVariant(dtype, 64, num_stages=3, boxes=True, **SHORT),
    )
)

PREFILL_HOPPER += tuple(
    HopperPrefillVariant(dtype, 128, boxes=True, box_rows=LARGE_BOX_ROWS, **OF_128) for dtype in DTYPES
)

PREFILL_HOPPER += tuple(
    HopperPrefillVariant(
        dtype,
        512,
        key_tile=64,
        num_stages=4,  # barriers: those of two parts of the keys of two tiles
        query_buffers=1,
        producer_registers=40,
        consumer_registers=232,
        boxes=True,
        early=True,
    )
    for dtype in DTYPES
)

PREFILL_FP8 = (
    Fp8PrefillVariant("bf16", 64, "e4m3", num_stages=4),
    Fp8PrefillVariant("bf16", 64, "e4m3", num_stages=4, **SHORT),
    Fp8PrefillVariant(
        "bf16",
        64,
        "e4m3",
        num_stages=4,
        output_parts=2,
        consumers=3,
        producer_registers=32,
        consumer_registers=160,
        length="long",
    ),
    *(
        Fp8PrefillVariant(
            "bf16", 128, "e4m3", num_stages=4, boxes=boxes, producer_registers=40, consumer_registers=232, turns=True
        )
        for boxes in (False, True)
    ),
    Fp8PrefillVariant(
        "bf16",
        128,
        "e4m3",
        num_stages=4,
        boxes=True,
        producer_registers=40,
        consumer_registers=232,
        turns=True,
        transposed=True,
        box_rows=LARGE_BOX_ROWS,
    ),
)

# Of the kernels for queries that see every key, by consumer warpgroups.
OF_FULL: dict[int, dict[str, Any]] = {2: OF_128, 3: {"producer_registers": 32, "consumer_registers": 160}}

PREFILL_FULL = tuple(
    FullPrefillVariant(
        dtype, 80, key_tile=96, num_stages=4, boxes=True, consumers=n, value_dims=dims, first_tile=first, **OF_FULL[n]
    )
    for dtype in DTYPES
    for dims in (72, 80)
    for n in (2, 3)
    for first in (64, 96)
)

PREFILL_VARIANTS = (
    *PREFILL_FULL,
    PrefillTransposeVariant(),
    *(DequantiseVariant(cache) for cache in ("int8", "int4", "fp8", "same")),
    *PREFILL,
    *PREFILL_HOPPER,
    *PREFILL_FP8,
    *(PrefillCombineVariant(dtype) for dtype in DTYPES),
    PrefillWorksVariant(),
)


def prefilling(dtype: str, cache: str, head_dim: int, short: bool = False) -> PrefillVariant | None:
    """The compiled prefill variant for a head dimension, or None. cache: "same" or "fp8"; short: see PrefillVariant."""
    fitting = [v for v in PREFILL if v.dtype == dtype and v.cache == cache and v.head_dim >= head_dim]
    return min(fitting, key=lambda v: (v.head_dim, v.short != short), default=None)


def prefilling_on_hopper(
    dtype: str, cache: str, head_dim: int, length: Length = "", boxes: bool = False
) -> HopperPrefillVariant | None:
    """The compiled variant with warpgroup matrix products for a head dimension, or None. boxes: see there."""
    fitting = [v for v in PREFILL_HOPPER if v.dtype == dtype and v.cache == cache and v.box_rows == BOX_ROWS]
    return _fitting([v for v in fitting if boxes or not v.boxes], head_dim, length, boxes)


def prefilling_in_full(dtype: str, head_dim: int, keys: int) -> list[FullPrefillVariant]:
    """Those for dense queries that see all of so many keys, with equal results: thread blocks of two sizes."""
    fitting = [v for v in PREFILL_FULL if v.dtype == dtype and v.value_dims - 8 < head_dim <= v.value_dims]
    fitting = [v for v in fitting if (keys - 1) % v.key_tile < v.first_tile]  # which holds the keys that others do not
    least = min((v.first_tile for v in fitting), default=0)
    return [v for v in fitting if v.first_tile == least]


def in_large_boxes(variant: HopperPrefillVariant) -> HopperPrefillVariant:
    """The same for keys of which each LARGE_BOX_ROWS follow one another in memory, if there is one."""
    large = replace(variant, box_rows=LARGE_BOX_ROWS)
    return large if large in PREFILL_HOPPER else variant


def prefilling_in_fp8(
    head_dim: int, length: Length = "", boxes: bool = False, transposed: bool = False
) -> Fp8PrefillVariant | None:
    """The compiled variant with e4m3 matrix products for a head dimension, or None. boxes, transposed: see there."""
    return _fitting([v for v in PREFILL_FP8 if v.transposed == transposed], head_dim, length, boxes)


def _fitting(variants: Iterable[T], head_dim: int, length: Length, boxes: bool) -> T | None:
    """The variant of the least head dimension that suffices, loaded as asked for; of the length, or of none."""
    fitting = [v for v in variants if v.head_dim >= head_dim and v.length in (length, "")]
    return min(fitting, key=lambda v: (v.head_dim, v.boxes != boxes, v.length != length), default=None)
