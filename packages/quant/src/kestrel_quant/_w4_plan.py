"""Which kernel a call of w4a16_linear runs: the one place that says so.

A plan depends on T through ranges alone: up to 16, 17 to 32, 33 to 64, and then each 32. Within a plan a row of the
result does not depend on the other rows, nor on its place among them: slices of K are those of rows of the weight.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

MMA_TOKENS = 128
"""The most rows of ``w4a16_kernel``."""
_WGMMA_TOKENS = 1024  # beyond, the vendor's GEMM takes less power for each product
_LEAST = 1 << 20  # elements of a weight for wgmma
_SMALL = 1 << 22  # up to here, tiles of 64 tokens take up to 128
_LARGE = 1 << 27  # from here on, tiles of 256 rows take up to 64 tokens
SPLITS = 8  # of K, at most
_K_STEP = 128


class Tile(NamedTuple):
    """A CTA of ``w4a16_wgmma_kernel``, for which ``csrc/w4a16_wgmma_launch.cuh`` has a kernel."""

    tokens: int
    rows: int
    """of the weight"""
    ctas: int
    """per SM"""
    rate: float
    """products per microsecond and SM / 10^6, measured on an H200 (results/h200_w4_designs.json)"""


TILES = (
    Tile(32, 128, 2, 0.0),
    Tile(32, 256, 1, 0.0),
    Tile(64, 128, 2, 0.0),
    Tile(64, 256, 1, 0.0),
    Tile(96, 128, 1, 2.36),
    Tile(128, 128, 1, 2.6),
    Tile(128, 192, 1, 2.78),
    Tile(192, 128, 1, 2.72),
    Tile(256, 128, 1, 2.72),
    Tile(192, 192, 1, 2.85),
)
"""In the order of csrc/w4a16_wgmma_launch.cuh. The estimate leaves out those without a rate."""

# Fitted to results/h200_w4_designs.json. Microseconds of a tile without its products, of a slice of K, and of the
# kernel that adds slices up, with its bytes per microsecond:
_TILE_US, _SLICE_US, _SUM_US, _SUM_BYTES = 4.0, 3.0, 1.5, 6e6
_PARTS = 1.045  # what slices of a part of the row tiles must gain: power limits long calls more than waves do
# The vendor's GEMM: its start, operations per microsecond, and writing the weight in 16 bits before it, per element.
_VENDOR_US, _VENDOR_FLOPS, _DEQUANT_US, _DEQUANT_ELEMENT = 5.5, 7.2e8, 0.5, 2.53 / 3.9e6


class Plan(NamedTuple):
    """A kernel and its options."""

    kernel: str
    """"mma": ``w4a16_kernel``. "wgmma": ``w4a16_wgmma_kernel``. "vendor": its GEMM of the weight in 16 bits."""
    tile: int = -1
    """of :data:`TILES`, for "wgmma" """
    splits: int = 1
    """slices of K, for "wgmma" """
    whole_row_tiles: int = 0
    """row tiles without slices of K, where others have them, for "wgmma" """
    scratch: int = 0
    """float32 for the sums of the slices, which a second kernel adds up; 0: the slices are a cluster"""


@functools.lru_cache(maxsize=4096)
def plan(tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """The plan for x [tokens, columns] and a weight [rows, columns]. sms: of the GPU if it has wgmma, else 0."""
    if not sms or tokens <= 16 or tokens > _WGMMA_TOKENS or rows * columns < _LEAST:
        return Plan("mma" if tokens <= MMA_TOKENS else "vendor")
    return _on_hopper(-(-tokens // 32) * 32, rows, columns, sms)


@functools.lru_cache(maxsize=4096)
def _on_hopper(tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """The plan for a multiple of 32 tokens and a weight that is not small."""
    elements = rows * columns
    if tokens <= 64 or (tokens <= 128 and elements <= _SMALL):
        number = (0 if tokens <= 32 else 2) + (elements >= _LARGE)
        return _wgmma(number, tokens, rows, _fill(TILES[number], tokens, rows, columns, sms))
    cost, number, splits, whole = min(
        (_us(tile, splits, whole, tokens, rows, columns, sms), number, splits, whole)
        for number, tile in enumerate(TILES)
        if tile.rate
        for splits in range(1, 1 + min(SPLITS, -(-columns // (4 * _K_STEP))))
        for whole in _whole_row_tiles(tile, splits, tokens, rows, sms)
    )
    if tokens > MMA_TOKENS and cost > _vendor_us(tokens, rows, columns):
        return Plan("vendor")
    return _wgmma(number, tokens, rows, splits, whole)


def _fill(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> int:
    """Slices of K with which all CTAs run at once; one on each SM where that is soon done."""
    ctas = 1 if rows * columns <= 1 << 24 else tile.ctas
    tiles = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    return max(1, min(SPLITS, sms * ctas // tiles, -(-columns // (2 * _K_STEP))))


def _wgmma(number: int, tokens: int, rows: int, splits: int, whole: int = 0) -> Plan:
    tile = TILES[number]
    tiles = -(-tokens // tile.tokens) * (-(-rows // tile.rows) - whole)
    # Clusters of more than two CTAs leave SMs of a GPC free: they pay where they are few.
    in_cluster = whole == 0 and (splits <= 2 or (tile.ctas == 2 and tiles * splits <= 64))
    scratch = 0 if in_cluster or splits == 1 else splits * tiles * tile.tokens * tile.rows
    return Plan("wgmma", number, splits, whole, scratch)


def _whole_row_tiles(tile: Tile, splits: int, tokens: int, rows: int, sms: int) -> list[int]:
    """Numbers of row tiles without slices of K that are worth an estimate: none, or those of full waves."""
    row_tiles, token_tiles = -(-rows // tile.rows), -(-tokens // tile.tokens)
    waves = row_tiles * token_tiles // sms
    if splits == 1 or waves == 0:
        return [0]
    whole = sms * waves // token_tiles
    return [whole] if whole < row_tiles else []


def _us(tile: Tile, splits: int, whole: int, tokens: int, rows: int, columns: int, sms: int) -> float:
    """An estimate of the time of a call: waves of whole tiles, then of slices, and the sums of the slices."""
    token_tiles, row_tiles = -(-tokens // tile.tokens), -(-rows // tile.rows)
    steps, size = -(-columns // _K_STEP), tile.tokens * tile.rows
    wholes = (whole if splits > 1 else row_tiles) * token_tiles
    slices = (row_tiles * token_tiles - wholes) * splits
    step = size * _K_STEP / (tile.rate * 1e6)
    of_whole, of_slice = _TILE_US + steps * step, _SLICE_US + -(-steps // splits) * step
    ctas = sms * tile.ctas
    total = -(-wholes // ctas) * of_whole + -(-slices // ctas) * of_slice
    if splits == 1:
        return total
    if whole == 0 and splits == 2:  # a cluster: those of a second wave would wait for each other
        return total + 1.5 * size / (1 << 14) if slices <= ctas else math.inf
    return (total + _SUM_US + slices * size * 8 / _SUM_BYTES) * (_PARTS if whole else 1)


def _vendor_us(tokens: int, rows: int, columns: int) -> float:
    """The same for the vendor's GEMM, with the weight written in 16 bits before it."""
    elements = rows * columns
    product = _VENDOR_US + 2 * tokens * elements / _VENDOR_FLOPS
    return product + _DEQUANT_US + elements * _DEQUANT_ELEMENT
