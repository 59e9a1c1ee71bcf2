"""Which kernel a call of w4a16_linear runs: the one place that says so.

A plan depends on T through ranges alone, but for the size of scratch memory: up to 8, 9 to 16, 17 to 32, 33 to 64, and
then each 32. Within a plan a row of the result does not depend on the other rows, nor on its place among them: K is cut
for rows of the weight, for all rows of x alike.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

MMA_TOKENS = 128
"""The most rows of ``w4a16_kernel``: kMaxTokens of csrc/w4a16.cu."""
_WGMMA_TOKENS = 4096  # beyond, the vendor's GEMM, for which the weight is written once
_LEAST = 1 << 20  # elements of a weight for wgmma
_LARGE = 1 << 27  # from here on, tiles of 256 rows have slices of K
# Rows of the weight for each SM beyond which wgmma is faster than w4a16_kernel: with up to 8 tokens, and with up to 16.
_ROWS_8, _ROWS_16 = 192, 36
SPLITS = 8  # of K, at most: kMaxSplits of csrc/w4a16.cuh
_K_STEP = 128  # kStep there
_TOKENS_OF_CLUSTERS = 16  # of w4a16_kernel: beyond them, and without clusters, a second kernel may add slices up
# Floats for their sums, at most: no more CTAs than SMs, of which there are up to 1024, add slices of 64 x 128 up.
_MOST_PARTIAL = 1024 * 64 * 128


class Tile(NamedTuple):
    """A CTA of a wgmma kernel, for which ``csrc/w4a16_wgmma_launch.cuh`` has a kernel."""

    tokens: int
    rows: int
    """of the weight"""
    ctas: int
    """per SM, at most"""
    rate: float
    """products per microsecond and SM / 10^6, with as many CTAs as that; fitted to results/h200_w4_pairs.json"""
    other_rate: float
    """the same with one CTA for each SM, where there may be two; else after the first _SHORT_US, where power limits the
    clock"""
    step: int = _K_STEP
    """k of a pipeline stage"""


TILES = (
    Tile(16, 128, 2, 0.88, 0.81, 256),
    Tile(32, 128, 2, 1.44, 1.46),
    Tile(32, 256, 1, 1.75, 1.65, 256),
    Tile(64, 128, 2, 2.23, 2.02),
    Tile(64, 256, 1, 2.43, 2.21, 256),
    Tile(96, 128, 1, 2.19, 2.19),
)
"""Those of ``w4a16_wgmma_kernel``, in the order of csrc/w4a16_wgmma_launch.cuh."""

STREAM_TILES = (
    Tile(96, 192, 1, 2.68, 2.40),
    Tile(128, 128, 1, 2.98, 2.40),
    Tile(128, 192, 1, 2.87, 2.55),
    Tile(160, 128, 1, 3.01, 2.50),
    Tile(160, 192, 1, 3.04, 2.65),
    Tile(192, 128, 1, 2.91, 2.55),
    Tile(192, 192, 1, 2.87, 2.64),
    Tile(256, 128, 1, 2.83, 2.71),
    Tile(224, 128, 1, 2.86, 2.65),
)
"""Those of ``w4a16_stream_kernel``, in the order there."""

PAIR_TILES = (
    Tile(16, 128, 2, 0.87, 0.73),
    Tile(16, 128, 2, 1.01, 0.87, 256),
    Tile(32, 128, 2, 1.54, 1.38),
    Tile(32, 128, 2, 1.68, 1.44, 256),
    Tile(64, 128, 2, 2.33, 2.21),
    Tile(80, 128, 2, 2.61, 2.40),
    Tile(96, 128, 2, 2.74, 2.45),
    Tile(112, 128, 1, 2.87, 2.87),
    Tile(128, 128, 1, 2.91, 2.78),
    Tile(128, 192, 1, 2.89, 2.66),
    Tile(160, 128, 1, 2.78, 2.34),
    Tile(160, 192, 1, 2.81, 2.81),
    Tile(192, 128, 1, 2.78, 2.34),
    Tile(192, 192, 1, 2.86, 2.58),
    Tile(224, 128, 1, 2.96, 2.49),
    Tile(256, 128, 1, 2.98, 2.55),
)
"""Those of ``w4a16_pair_kernel``, in the order there."""

MAX_STREAM_CTAS = 256
"""kMaxStreamCtas of csrc/w4a16_stream.cuh."""

# Fitted to results/h200_w4_pairs.json. Microseconds of a call; of one with slices of K that a second kernel adds up,
# and bytes of their sums per microsecond; of one with slices that are a cluster:
_TILE_US, _SLICE_US, _SUM_BYTES, _CLUSTER_US = 1.7, 2.7, 6.1e6, 2.9
# of a pair, and of what it exchanges, for 2^15 sums:
_PAIR_US, _PAIR_SUM_US = 1.3, 1.9
# of persistent CTAs; of the results of one tile more, for 2^15 sums; of tiles that CTAs share, and their sums,
# likewise; and the time for which the clock stays high:
_STREAM_US, _RESULT_US, _SHARED_US, _SHARED_SUM_US, _SHORT_US = 0.3, 3.0, 5.0, 5.0, 40.0
# The vendor's GEMM: its start, operations per microsecond, and writing the weight in 16 bits before it, per element.
_VENDOR_US, _VENDOR_FLOPS, _DEQUANT_US, _DEQUANT_ELEMENT = 5.5, 6.7e8, 0.5, 2.53 / 3.9e6


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
    by_wgmma = sms and tokens <= _WGMMA_TOKENS and rows * columns >= _LEAST
    few_rows = tokens <= 16 and rows <= (_ROWS_8 if tokens <= 8 else _ROWS_16) * sms
    if by_wgmma and not few_rows:
        most = next((most for most in (8, 16, 32, 64) if tokens <= most), -(-tokens // 32) * 32)
        return _on_hopper(most, rows, columns, sms)
    if tokens > MMA_TOKENS:
        return Plan("vendor")
    in_cluster = sms and tokens <= _TOKENS_OF_CLUSTERS
    return Plan("mma", scratch=0 if in_cluster else min(SPLITS * tokens * rows, _MOST_PARTIAL))


@functools.lru_cache(maxsize=4096)
def _on_hopper(tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """The plan for the most tokens of a range and a weight that is not small: the shortest estimate."""
    cost, chosen = min(
        *(
            (_slices_us(tile, splits, tokens, rows, columns, sms), _wgmma(number, tokens, rows, splits))
            for number, tile in enumerate(TILES)
            if tile.tokens < tokens + 32
            for splits in _slices(tile, tokens, rows, columns, sms)
        ),
        *(
            (_stream_us(tile, row_ctas, tokens, rows, columns), _stream(number, row_ctas, tokens, rows))
            for number, tile in enumerate(STREAM_TILES)
            for row_ctas in _row_ctas(tile, tokens, rows, columns, sms)
            if tokens > 64
        ),
        *(
            (_pairs_us(tile, tokens, rows, columns, sms), _pairs(number, tokens, rows))
            for number, tile in enumerate(PAIR_TILES)
            if 2 * _tiles(tile, tokens, rows) <= sms * tile.ctas and columns > tile.step
        ),
    )
    if tokens > MMA_TOKENS and cost > _vendor_us(tokens, rows, columns):
        return Plan("vendor")
    return chosen


def _tiles(tile: Tile, tokens: int, rows: int) -> int:
    return -(-tokens // tile.tokens) * -(-rows // tile.rows)


def _products_us(tile: Tile, ctas: int, steps: int, sms: int) -> float:
    """The main loop of a CTA of `steps` steps. `ctas` of them run at once: two on an SM where there are many."""
    products = steps * tile.tokens * tile.rows * _K_STEP / 1e6
    if tile.ctas == 2:
        return products / tile.other_rate if ctas <= sms else 2 * products / tile.rate
    short = products / tile.rate
    return short + max(0.0, short - _SHORT_US) * (tile.rate / tile.other_rate - 1)


def _slices(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> list[int]:
    """Numbers of slices of K that are worth an estimate: one, and those with which all CTAs run at once."""
    if tile.rows == 256 and rows * columns < _LARGE:
        return [1]
    tiles = _tiles(tile, tokens, rows)
    least = 2 if tile.rows == 256 else 3  # pairs are faster than clusters of two
    most = min(SPLITS, -(-columns // (2 * _K_STEP)), -(-columns // tile.step))
    return [1] + [n for n in {sms // tiles, sms * tile.ctas // tiles, SPLITS} if least <= n <= most]


def _in_cluster(tile: Tile, tiles: int, splits: int) -> bool:
    """Whether slices of K are a cluster. Clusters of more than two CTAs leave SMs of a GPC free: they pay if few."""
    return splits <= 2 or (tile.ctas == 2 and tiles * splits <= 64)


def _wgmma(number: int, tokens: int, rows: int, splits: int) -> Plan:
    tile = TILES[number]
    tiles = _tiles(tile, tokens, rows)
    sums = splits * tiles * tile.tokens * tile.rows
    return Plan("wgmma", number, splits, scratch=0 if _in_cluster(tile, tiles, splits) else sums)


def _slices_us(tile: Tile, splits: int, tokens: int, rows: int, columns: int, sms: int) -> float:
    """An estimate of the time of a call: waves of tiles or slices, and the sums of the slices."""
    tiles = _tiles(tile, tokens, rows)
    ctas = tiles * splits
    waves = -(-ctas // (sms * tile.ctas))
    total = waves * _products_us(tile, ctas, -(-columns // (splits * _K_STEP)), sms)
    if splits == 1:
        return total + waves * _TILE_US
    if _in_cluster(tile, tiles, splits):
        return total + waves * _CLUSTER_US
    return total + _SLICE_US + waves - 1 + ctas * tile.tokens * tile.rows * 8 / _SUM_BYTES


def _stream(number: int, row_ctas: int, tokens: int, rows: int) -> Plan:
    tile = STREAM_TILES[number]
    ctas = -(-tokens // tile.tokens) * row_ctas
    shared = -(-rows // tile.rows) % row_ctas != 0
    return Plan("stream", number, ctas=ctas, scratch=MAX_STREAM_CTAS + ctas * tile.tokens * tile.rows if shared else 0)


def _pairs(number: int, tokens: int, rows: int) -> Plan:
    return Plan("pairs", number, splits=2, ctas=2 * _tiles(PAIR_TILES[number], tokens, rows))


def _pairs_us(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> float:
    """The same for pairs of CTAs: the steps of one, and what they exchange."""
    products = _products_us(tile, 2 * _tiles(tile, tokens, rows), -(-columns // (2 * _K_STEP)), sms)
    return _PAIR_US + products + _PAIR_SUM_US * tile.tokens * tile.rows / (1 << 15)


def _row_ctas(tile: Tile, tokens: int, rows: int, columns: int, sms: int) -> list[int]:
    """Numbers of CTAs for each token tile that are worth an estimate: all SMs, and those that fill the same waves."""
    most = min(sms, MAX_STREAM_CTAS) // -(-tokens // tile.tokens)
    if most == 0:
        return []
    row_tiles = -(-rows // tile.rows)
    waves = -(-row_tiles // most)
    return [n for n in {min(most, row_tiles * -(-columns // _K_STEP)), -(-row_tiles // waves)} if n > 0]


def _stream_us(tile: Tile, row_ctas: int, tokens: int, rows: int, columns: int) -> float:
    """The same for w4a16_stream_kernel: steps and results of a CTA, and the sums of tiles that CTAs share."""
    row_tiles, size = -(-rows // tile.rows), tile.tokens * tile.rows
    total = _STREAM_US + _products_us(tile, 1, -(-row_tiles * -(-columns // _K_STEP) // row_ctas), 1)
    if row_tiles % row_ctas:
        total += _SHARED_US + -(-row_ctas // row_tiles) * _SHARED_SUM_US * size / (1 << 15)
    return total + (-(-row_tiles // row_ctas) - 1) * _RESULT_US * size / (1 << 15)


def _vendor_us(tokens: int, rows: int, columns: int) -> float:
    """The same for the vendor's GEMM, with the weight written in 16 bits before it."""
    elements = rows * columns
    product = _VENDOR_US + 2 * tokens * elements / _VENDOR_FLOPS
    return product + _DEQUANT_US + elements * _DEQUANT_ELEMENT
