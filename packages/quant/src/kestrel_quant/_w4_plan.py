"""Which kernel a call of w4a16_linear runs: the one place that says so.

A plan depends on T through ranges alone: up to 16, 17 to 32, 33 to 64, and then each 32. Within a plan a row of the
result does not depend on the other rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

MMA_TOKENS = 128
"""The most rows of ``w4a16_kernel``."""
_WGMMA_TOKENS = 2048
_LEAST = 1 << 20  # elements of a weight for wgmma
_LARGE = 1 << 27  # from here on, tiles of 256 rows take up to 64 tokens
_SPLITS = 8  # the most slices of K
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
    Tile(96, 128, 1, 2.2),
    Tile(128, 128, 1, 2.42),
    Tile(128, 192, 1, 2.65),
    Tile(192, 128, 1, 2.55),
    Tile(256, 128, 1, 2.62),
)
"""In the order of csrc/w4a16_wgmma_launch.cuh. Those without a rate are for up to 64 tokens."""


class Plan(NamedTuple):
    """A kernel and its options."""

    kernel: str
    """"mma": ``w4a16_kernel``. "wgmma": ``w4a16_wgmma_kernel``. "vendor": its GEMM of the weight in 16 bits."""
    tile: int = -1
    """of :data:`TILES`, for "wgmma" """
    splits: int = 1
    """slices of K, for "wgmma" """
    scratch: int = 0
    """float32 for the sums of the slices, which a second kernel adds up; 0: the slices are a cluster"""


@functools.lru_cache(maxsize=4096)
def plan(tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """The plan for x [tokens, columns] and a weight [rows, columns]. sms: of the GPU if it has wgmma, else 0."""
    elements = rows * columns
    if not sms or tokens <= 16 or tokens > _WGMMA_TOKENS or elements < _LEAST:
        return Plan("mma" if tokens <= MMA_TOKENS else "vendor")
    if tokens <= 64:
        number = (0 if tokens <= 32 else 2) + (elements >= _LARGE)
        return _wgmma(number, tokens, rows, columns, _fill(TILES[number], tokens, rows, columns, sms))
    tokens = -(-tokens // 32) * 32
    cost, number, splits = min(
        (_us(tile, splits, tokens, rows, columns, sms), number, splits)
        for number, tile in enumerate(TILES)
        if tile.rate
        for splits in range(1, 1 + min(_SPLITS, -(-columns // (4 * _K_STEP))))
    )
    if tokens > MMA_TOKENS and cost > _vendor_us(tokens, rows, columns, sms):
        return Plan("vendor")
    return _wgmma(number, tokens, rows, columns, splits)


def _tiles(tile: Tile, tokens: int, rows: int) -> int:
    return -(-tokens // tile.tokens) * -(-rows // tile.rows)


def _fill(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> int:
    """Slices of K with which all CTAs run at once."""
    return max(1, min(_SPLITS, sms * tile.ctas // _tiles(tile, tokens, rows), -(-columns // (2 * _K_STEP))))


def _wgmma(number: int, tokens: int, rows: int, columns: int, splits: int) -> Plan:
    tile = TILES[number]
    tiles = _tiles(tile, tokens, rows)
    # Clusters of more than two CTAs leave SMs of a GPC free: they pay where they are few.
    in_cluster = splits <= 2 or (tile.ctas == 2 and tiles <= 8)
    scratch = 0 if in_cluster else splits * tiles * tile.tokens * tile.rows
    return Plan("wgmma", number, splits, scratch)


def _us(tile: Tile, splits: int, tokens: int, rows: int, columns: int, sms: int) -> float:
    """An estimate of the time of a call: waves of CTAs, and the sums of the slices."""
    tiles = _tiles(tile, tokens, rows)
    waves = -(-tiles * splits // (sms * tile.ctas))
    steps = -(-columns // (_K_STEP * splits))
    sums = (0.0, 0.0, 1.0)[splits] if splits <= 2 else 0.3 + splits * tiles * tile.tokens * tile.rows * 8 / 6e6
    return 2.5 + waves * steps * _K_STEP * tile.tokens * tile.rows / (tile.rate * 1e6) + sums


def _vendor_us(tokens: int, rows: int, columns: int, sms: int) -> float:
    """The same for the vendor's GEMM, with the weight written in 16 bits before it."""
    return 3.5 + rows * columns * (2.53 / 3.9e6 + tokens / (sms * 2.75e6))
