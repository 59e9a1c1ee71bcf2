"""Which kernels run a layer of routed experts: the variants, when each is valid, and which one is chosen.

A variant is a path and the tokens of a tile. ``kestrel-kernels tune moe`` times the valid ones and writes the fastest
into a file of the GPU (:mod:`kestrel_moe.tuned`). Without an entry for a layer, :func:`by_rule` chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import tuned

FP8_WGMMA_TILE = 128  # tokens of a tile of the wgmma kernel of FP8, which reads x by the positions of its pairs
PAIRS_IN_KERNEL = 64  # kMaxPairsInKernel: the most (token, choice) pairs that the kernels group by expert themselves
# What the kernel for both projections has shared memory for: kFusedExperts and kFusedChoices of experts_fused.cuh, and
# for each tile the longest rows of x beside which stages fit.
_EXPERTS_OF_FUSED, _CHOICES_OF_FUSED = 1024, 8
_WIDTH_OF_FUSED = {8: 8192, 16: 4096}
# It takes up to 2 pairs for each expert. Where the hidden layer is wider than this and leaves more partial results, it
# takes up to 1, and few pairs in all.
_INNER_OF_FUSED = 2048
# FP8 takes tiles of 32 tokens instead, with more tokens and more pairs than the kernels group. Layers wider than the
# second number do so above _FEW_PAIRS pairs.
_TOKENS_OF_FUSED_FP8, _WIDTH_OF_FUSED_FP8 = 8, 4096
_FEW_PAIRS = 32  # up to this many pairs the kernels group them for any number of experts
_ROWS_OF_LARGE_TILES = 9.75  # pairs for each expert, above which tiles of 64 tokens are faster on Hopper
# FP8 layers on Hopper: tiles of 32 tokens of the wgmma kernel, which take fewer launches, up to so many pairs for each
# expert. Layers of more weights than this take them only from _ROWS_OF_LARGE_FP8 pairs for each expert on.
_WEIGHTS_OF_FP8_TILES, _ROWS_OF_FP8_TILES, _ROWS_OF_LARGE_FP8 = 2**30, 22, 0.25
# Pairs for each expert, above the first and up to the second number, with which layers of 16 bits take tiles of 160
# tokens: most experts fit into one of them and not into one of 128, or into two and not into two of 128.
_ROWS_OF_ONE_WIDE_TILE, _ROWS_OF_TWO_WIDE_TILES = (100, 168), (248, 312)
# Pairs for each expert, above which two tiles of 128 share the weights: of FP8, and of 16 bits if Hd * I / (Hd + I) is
# at least so large.
_ROWS_OF_FP8_CLUSTERS, _ROWS_OF_CLUSTERS, _PRODUCTS_OF_CLUSTERS = 2048, 152, 2048
# torch.nn.functional.grouped_mm is faster above so many pairs for each expert, if Hd * I / (Hd + I) is at least so
# large: products for each element that is gathered, activated and summed by kernels of their own.
_ROWS_OF_GROUPED_MM, _PRODUCTS_OF_GROUPED_MM = 2048, 2048
_ROWS_OF_TILES_64 = 48  # up to so many pairs for each expert, most experts have one tile of 64 tokens

FUSED, IN_KERNEL, ALIGNED, CLUSTERED, GROUPED_MM = "fused", "in_kernel", "aligned", "clustered", "grouped_mm"


@dataclass(frozen=True)
class Layer:
    """What the choice depends on."""

    tokens: int
    experts: int
    choices: int
    width: int
    inner: int
    dtype: str
    """Of the weights: "bf16", "fp16" or "fp8"."""
    hopper: bool
    """Whether the GPU has wgmma."""
    mapped: int | None = None
    """The entries of the expert_map: the experts of all devices. None without one."""

    @property
    def pairs(self) -> int:
        return self.tokens * self.choices

    @property
    def mean_rows(self) -> float:
        """P: the pairs that an expert has on average. The experts of all devices share them.

        >>> Layer(16, 32, 8, 2048, 1024, "fp8", hopper=True, mapped=256).mean_rows
        0.5
        """
        return self.pairs / (self.mapped or self.experts)

    @property
    def sizes(self) -> str:
        """The key of the layer in a tuned file.

        >>> Layer(4, 64, 8, 2048, 1024, "bf16", hopper=True).sizes
        'E64 k8 h2048 i1024 bf16'
        """
        return f"E{self.experts} k{self.choices} h{self.width} i{self.inner} {self.dtype}"


@dataclass(frozen=True)
class Variant:
    path: str
    """How the pairs are grouped: "in_kernel", "aligned" or "clustered" (after moe_align_block_size; in the latter two
    CTAs of a cluster share the weights of their tiles), or "grouped_mm". "fused": in a kernel for both projections."""
    tile: int = 0
    """Tokens of a tile; 0 for grouped_mm."""

    def __str__(self) -> str:
        """
        >>> str(Variant("aligned", 64)), str(Variant("grouped_mm"))
        ('aligned 64', 'grouped_mm')
        """
        return f"{self.path} {self.tile}" if self.tile else self.path


VARIANTS = (
    *(Variant(FUSED, tile) for tile in (8, 16)),
    Variant(IN_KERNEL, 8),
    *(Variant(ALIGNED, tile) for tile in (8, 16, 32, 64, 128, 160)),
    Variant(CLUSTERED, 128),
    Variant(GROUPED_MM),
)


def is_valid(variant: Variant, layer: Layer) -> bool:
    """Whether the variant covers the layer. Used by the tuner and by the choice of a call.

    >>> layer = Layer(8, 64, 8, 2048, 1024, "fp8", hopper=False)
    >>> [str(variant) for variant in VARIANTS if is_valid(variant, layer)]
    ['in_kernel 8', 'aligned 8', 'aligned 16', 'aligned 32']
    """
    if variant not in VARIANTS:
        return False
    if variant.path == FUSED:
        few = layer.experts <= _EXPERTS_OF_FUSED and layer.choices <= _CHOICES_OF_FUSED
        return layer.hopper and layer.tokens <= variant.tile and few and layer.width <= _WIDTH_OF_FUSED[variant.tile]
    if variant.path == IN_KERNEL:
        return layer.pairs <= PAIRS_IN_KERNEL
    if variant.path == GROUPED_MM:
        covered = layer.width % 16 == layer.inner % 16 == 0 and layer.experts < 1024 and layer.mapped is None
        return layer.hopper and layer.dtype == "bf16" and covered and hasattr(F, "grouped_mm")
    if variant.tile >= 64 and layer.dtype == "fp8":
        return layer.hopper and variant.tile <= FP8_WGMMA_TILE
    return variant.tile <= 64 or layer.hopper  # 64: wgmma on Hopper, elsewhere mma.sync


def valid_variants(layer: Layer) -> Iterator[Variant]:
    return (variant for variant in VARIANTS if is_valid(variant, layer))


def by_rule(layer: Layer) -> Variant:
    """The built-in choice, a function of the mean number of pairs of an expert.

    Each tile reads the weights of its expert, so most experts should have one tile.
    """
    rows = layer.mean_rows
    fused = Variant(FUSED, 8 if layer.tokens <= 8 else 16)
    few = layer.pairs <= _FEW_PAIRS
    many = layer.tokens > _TOKENS_OF_FUSED_FP8 and layer.pairs > PAIRS_IN_KERNEL
    streams = layer.dtype == "fp8" and (many or (layer.width > _WIDTH_OF_FUSED_FP8 and not few))
    if is_valid(fused, layer) and not streams and (rows <= 2 if layer.inner <= _INNER_OF_FUSED else rows <= 1 and few):
        return fused
    large = 3 * layer.experts * layer.width * layer.inner > _WEIGHTS_OF_FP8_TILES
    fp8_tiles = layer.hopper and layer.dtype == "fp8" and rows <= _ROWS_OF_FP8_TILES
    if fp8_tiles and large and rows >= _ROWS_OF_LARGE_FP8:
        return Variant(ALIGNED, 32)
    if few or (layer.hopper and layer.pairs <= PAIRS_IN_KERNEL and rows <= 2):
        return Variant(IN_KERNEL, 8)
    if fp8_tiles and not large:
        return Variant(ALIGNED, 32)
    if rows <= _ROWS_OF_LARGE_TILES:
        return Variant(ALIGNED, 8 if rows + 2 * rows**0.5 <= 8 else 16)
    if not layer.hopper:
        return Variant(ALIGNED, 64 if rows > 128 and layer.dtype != "fp8" else 32)
    products = layer.width * layer.inner / (layer.width + layer.inner)
    if rows > _ROWS_OF_GROUPED_MM and products >= _PRODUCTS_OF_GROUPED_MM and is_valid(Variant(GROUPED_MM), layer):
        return Variant(GROUPED_MM)
    if rows <= _ROWS_OF_TILES_64:
        return Variant(ALIGNED, 64)
    if layer.dtype == "fp8":
        return Variant(CLUSTERED if rows > _ROWS_OF_FP8_CLUSTERS else ALIGNED, 128)
    shares = products >= _PRODUCTS_OF_CLUSTERS and rows > _ROWS_OF_CLUSTERS
    one, two = (low < rows <= high for low, high in (_ROWS_OF_ONE_WIDE_TILE, _ROWS_OF_TWO_WIDE_TILES))
    if two or (one and not shares):
        return Variant(ALIGNED, 160)
    return Variant(CLUSTERED if shares else ALIGNED, 128)


def choose(layer: Layer, entries: tuned.Entries, *, grouped_mm: bool = True) -> Variant:
    """The tuned variant of the nearest number of tokens if it is valid here, else that of the rule.

    Layers are tuned without an expert_map, with which a device has fewer pairs.
    grouped_mm: whether the call's tensors have the alignment and strides that grouped_mm needs.
    """
    name = tuned.nearest(entries.get(layer.sizes, {}), layer.tokens) if layer.mapped is None else None
    chosen = _named(name) if name is not None else None
    if chosen is None or not is_valid(chosen, layer):
        chosen = by_rule(layer)
    if chosen.path == GROUPED_MM and not grouped_mm:
        return Variant(CLUSTERED, 128)
    return chosen


def _named(name: str) -> Variant | None:
    return next((variant for variant in VARIANTS if str(variant) == name), None)


_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.lru_cache(4096)
def for_call(
    device: int, tokens: int, choices: int, w2: torch.Size, dtype: torch.dtype, mapped: int | None, grouped_mm: bool
) -> Variant:
    """The choice on this GPU for weights w2 of shape [E, Hd, I] and this dtype. mapped: as in :class:`Layer`."""
    experts, width, inner = w2
    layer = Layer(tokens, experts, choices, width, inner, _DTYPES.get(dtype, "other"), _is_hopper(device), mapped)
    return choose(layer, tuned.of_gpu(torch.cuda.get_device_name(device)), grouped_mm=grouped_mm)
