"""Which kernel a call of w4a16_linear runs: the one place that says so.

A plan depends on T through ranges alone: up to 16, 17 to 32, 33 to 64, and then each 32. Within a plan a row of the
result does not depend on the other rows, nor on its place among them: K is cut for rows of the weight, for all rows of
x alike.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

MMA_TOKENS = 128
"""The most rows of ``w4a16_kernel``: kMaxTokens of csrc/w4a16.cu."""
_WGMMA_TOKENS = 4096  # beyond, the vendor's GEMM, for which the weight is written once
_LEAST = 1 << 20  # elements of a weight for wgmma
_SMALL = 1 << 22  # up to here, tiles of 64 tokens take up to 128, and more where pairs of CTAs fill the GPU
_LARGE = 1 << 27  # from here on, tiles of 256 rows take up to 64 tokens
SPLITS = 8  # of K, at most: kMaxSplits of csrc/w4a16.cuh
_K_STEP = 128  # kStep there
_TOKENS_OF_CLUSTERS = 16  # of w4a16_kernel: beyond them, and without clusters, a second kernel may add slices up
# Floats for their sums, at most: no more CTAs than SMs, of which there are up to 1024, add slices of 64 x 128 up.
_MOST_PARTIAL = 1024 * 64 * 128


class Tile(NamedTuple):
    """A CTA of ``w4a16_wgmma_kernel``, for which ``csrc/w4a16_wgmma_launch.cuh`` has a kernel."""

    tokens: int
    rows: int
    """of the weight"""
    ctas: int
    """per SM"""
    rate: float
    """products per microsecond and SM / 10^6, measured on an H200 (results/h200_w4_designs.json)"""
    long_rate: float = 0.0
    """the same after the first _SHORT_US, where power limits the clock"""


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
)
"""In the order of csrc/w4a16_wgmma_launch.cuh. The estimate leaves out those without a rate."""

STREAM_TILES = (
    Tile(96, 192, 1, 2.6, 2.35),
    Tile(128, 128, 1, 2.89, 2.35),
    Tile(128, 192, 1, 2.95, 2.5),
    Tile(160, 128, 1, 3.07, 2.45),
    Tile(160, 192, 1, 2.95, 2.6),
    Tile(192, 128, 1, 3.0, 2.5),
    Tile(192, 192, 1, 2.95, 2.68),
    Tile(256, 128, 1, 2.91, 2.66),
    Tile(224, 128, 1, 2.95, 2.6),
)
"""Those of ``w4a16_stream_kernel``, in the order there."""
PAIR_TILES = (
    Tile(64, 128, 2, 2.4, 2.3),
    Tile(80, 128, 2, 2.5, 2.3),
    Tile(96, 128, 2, 2.6, 2.3),
    Tile(112, 128, 1, 2.8, 2.35),
    Tile(128, 128, 1, 2.89, 2.35),
    Tile(128, 192, 1, 2.95, 2.5),
    Tile(160, 128, 1, 3.07, 2.45),
    Tile(160, 192, 1, 2.95, 2.6),
    Tile(192, 128, 1, 3.0, 2.5),
    Tile(192, 192, 1, 2.95, 2.68),
    Tile(224, 128, 1, 2.95, 2.6),
    Tile(256, 128, 1, 2.91, 2.66),
)
"""Those of ``w4a16_pair_kernel``, in the order there."""
MAX_STREAM_CTAS = 256
"""kMaxStreamCtas of csrc/w4a16_stream.cuh."""

# Fitted to results/h200_w4_designs.json. Microseconds of a tile without its products, of a slice of K, and of the
# kernel that adds slices up, with its bytes per microsecond:
_TILE_US, _SLICE_US, _SUM_US, _SUM_BYTES = 4.0, 3.0, 1.5, 6e6
# The same of w4a16_stream_kernel, fitted to results/h100_w4_stream.json: a call; the results of one tile more, for 2^15
# sums; tiles that CTAs share, and their sums, likewise; the time for which the clock stays high.
_STREAM_US, _RESULT_US, _SHARED_US, _SHARED_SUM_US, _SHORT_US = 4.0, 3.0, 5.0, 6.0, 40.0
_PAIR_SUM_US = 1.5  # sums that a pair exchanges, for 2^15; fitted to results/h200_w4_stream.json
# The vendor's GEMM: its start, operations per microsecond, and writing the weight in 16 bits before it, per element.
_VENDOR_US, _VENDOR_FLOPS, _DEQUANT_US, _DEQUANT_ELEMENT = 5.5, 7.2e8, 0.5, 2.53 / 3.9e6


class Plan(NamedTuple):
    """A kernel and its options."""

    kernel: str
    """"mma": ``w4a16_kernel``. "wgmma": ``w4a16_wgmma_kernel``. "stream": ``w4a16_stream_kernel``. "pairs":
    ``w4a16_pair_kernel``. "vendor": its GEMM of the weight in 16 bits."""
    tile: int = -1
    """of :data:`TILES` for "wgmma", of :data:`STREAM_TILES` for "stream", of :data:`PAIR_TILES` for "pairs" """
    splits: int = 1
    """slices of K"""
    ctas: int = 0
    """for "stream": persistent CTAs that share the work; for "pairs": two for each tile"""
    scratch: int = 0
    """float32 for the sums of slices, which a second kernel adds up, and for those of CTAs that share a tile; 0: the
    slices are a cluster, and no tile is shared"""


@functools.lru_cache(maxsize=4096)
def plan(tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """The plan for x [tokens, columns] and a weight [rows, columns]. sms: of the GPU if it has wgmma, else 0."""
    if not sms or tokens <= 16 or tokens > _WGMMA_TOKENS or rows * columns < _LEAST:
        if tokens > MMA_TOKENS:
            return Plan("vendor")
        in_cluster = sms and tokens <= _TOKENS_OF_CLUSTERS
        return Plan("mma", scratch=0 if in_cluster else min(SPLITS * tokens * rows, _MOST_PARTIAL))
    return _on_hopper(-(-tokens // 32) * 32, rows, columns, sms)


@functools.lru_cache(maxsize=4096)
def _on_hopper(tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """The plan for a multiple of 32 tokens and a weight that is not small."""
    elements = rows * columns
    if tokens <= 64 or elements <= _SMALL:
        number = (0 if tokens <= 32 else 2) + (elements >= _LARGE)
        splits = _fill(TILES[number], tokens, rows, columns, sms)
        if tokens <= 128 or splits == 2:
            return _wgmma(number, tokens, rows, splits)
    cost, chosen = min(
        *(
            (_us(tile, splits, tokens, rows, columns, sms), _wgmma(number, tokens, rows, splits))
            for number, tile in enumerate(TILES)
            if tile.rate
            for splits in range(1 if tokens <= 96 else 2, 1 + max(1, min(SPLITS, -(-columns // (4 * _K_STEP)))))
        ),
        *(
            (_stream_us(tile, row_ctas, tokens, rows, columns), _stream(number, row_ctas, tokens, rows))
            for number, tile in enumerate(STREAM_TILES)
            for row_ctas in _row_ctas(tile, tokens, rows, columns, sms)
        ),
        *(
            (_pairs_us(tile, columns), _pairs(number, tokens, rows))
            for number, tile in enumerate(PAIR_TILES)
            if 2 * -(-tokens // tile.tokens) * -(-rows // tile.rows) <= sms and columns > _K_STEP
        ),
    )
    if tokens > MMA_TOKENS and cost > _vendor_us(tokens, rows, columns):
        return Plan("vendor")
    return chosen


def _fill(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> int:
    """Slices of K with which all CTAs run at once; one on each SM where that is soon done."""
    ctas = 1 if rows * columns <= 1 << 24 else tile.ctas
    tiles = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    return max(1, min(SPLITS, sms * ctas // tiles, -(-columns // (2 * _K_STEP))))


def _wgmma(number: int, tokens: int, rows: int, splits: int) -> Plan:
    tile = TILES[number]
    tiles = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    # Clusters of more than two CTAs leave SMs of a GPC free: they pay where they are few.
    in_cluster = splits <= 2 or (tile.ctas == 2 and tiles * splits <= 64)
    return Plan("wgmma", number, splits, scratch=0 if in_cluster else splits * tiles * tile.tokens * tile.rows)


def _us(tile: Tile, splits: int, tokens: int, rows: int, columns: int, sms: int) -> float:
    """An estimate of the time of a call: waves of tiles or slices, and the sums of the slices."""
    tiles = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    steps, size = -(-columns // _K_STEP), tile.tokens * tile.rows
    step = size * _K_STEP / (tile.rate * 1e6)
    waves = -(-tiles * splits // (sms * tile.ctas))
    if splits == 1:
        return waves * (_TILE_US + steps * step)
    total = waves * (_SLICE_US + -(-steps // splits) * step)
    if splits == 2:  # a cluster: those of a second wave would wait for each other
        return total + 1.5 * size / (1 << 14) if waves == 1 else math.inf
    return total + _SUM_US + tiles * splits * size * 8 / _SUM_BYTES


def _stream(number: int, row_ctas: int, tokens: int, rows: int) -> Plan:
    tile = STREAM_TILES[number]
    ctas = -(-tokens // tile.tokens) * row_ctas
    shared = -(-rows // tile.rows) % row_ctas != 0
    return Plan("stream", number, ctas=ctas, scratch=MAX_STREAM_CTAS + ctas * tile.tokens * tile.rows if shared else 0)


def _pairs(number: int, tokens: int, rows: int) -> Plan:
    tile = PAIR_TILES[number]
    return Plan("pairs", number, splits=2, ctas=2 * -(-tokens // tile.tokens) * -(-rows // tile.rows))


def _pairs_us(tile: Tile, columns: int) -> float:
    """The same for pairs of CTAs: the steps of one, and what they exchange."""
    size = tile.tokens * tile.rows
    products = -(-columns // (2 * _K_STEP)) * size * _K_STEP / (tile.rate * 1e6)
    slower = max(0.0, products - _SHORT_US) * (tile.rate / tile.long_rate - 1)
    return _STREAM_US + products + slower + _PAIR_SUM_US * size / (1 << 15)


def _row_ctas(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> list[int]:
    """Numbers of CTAs for each token tile that are worth an estimate: all SMs, and those that fill the same waves."""
    most = min(sms, MAX_STREAM_CTAS) // -(-tokens // tile.tokens)
    row_tiles = -(-rows // tile.rows)
    waves = -(-row_tiles // max(most, 1))
    return [n for n in {min(most, row_tiles * -(-columns // _K_STEP)), -(-row_tiles // waves)} if n > 0]


def _stream_us(tile: Tile, row_ctas: int, tokens: int, rows: int, columns: int) -> float:
    """The same for w4a16_stream_kernel: steps and results of a CTA, and the sums of tiles that CTAs share."""
    row_tiles, size = -(-rows // tile.rows), tile.tokens * tile.rows
    steps = -(-row_tiles * -(-columns // _K_STEP) // row_ctas)
    products = steps * size * _K_STEP / (tile.rate * 1e6)
    total = _STREAM_US + products + max(0.0, products - _SHORT_US) * (tile.rate / tile.long_rate - 1)
    if row_tiles % row_ctas:
        total += _SHARED_US + -(-row_ctas // row_tiles) * _SHARED_SUM_US * size / (1 << 15)
    return total + (-(-row_tiles // row_ctas) - 1) * _RESULT_US * size / (1 << 15)


def _vendor_us(tokens: int, rows: int, columns: int) -> float:
    """The same for the vendor's GEMM, with the weight written in 16 bits before it."""
    elements = rows * columns
    product = _VENDOR_US + 2 * tokens * elements / _VENDOR_FLOPS
    return product + _DEQUANT_US + elements * _DEQUANT_ELEMENT
