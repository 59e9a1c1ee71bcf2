"""The kernel and tile of a dense 16-bit layer on an H100 or H200: the shortest estimated time.

- up to 32 tokens: the kernel that streams the weight, but for large weights the vendor's product
- more: wgmma tiles (csrc/dense_wgmma.cuh) or the vendor's product, with its own epilogue or a kernel of torch behind it
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Kernel(IntEnum):
    """Numbered as in csrc/dense_launch.h."""

    VENDOR = 0  # the vendor's product
    FEW_TOKENS = 1  # gemv's
    STREAM = 2  # tiles of 128 outputs by 16, 32 or 64 tokens
    COOPERATIVE = 3  # tiles of 128 tokens by `columns` outputs
    PING_PONG = 4  # the same; the consumer warpgroups compute tiles in turn
    VENDOR_EPILOGUE = 5  # the vendor's product with bias, activation and residual (csrc/dense_vendor.cu)


class Plan(NamedTuple):
    """The kernel of one layer and its tile."""

    kernel: Kernel
    columns: int = 0
    cluster_rows: int = 1  # CTAs that share a tile of the weight, and
    cluster_columns: int = 1  # CTAs that share tokens
    splits: int = 1  # CTAs that each sum a part of K


VENDOR = Plan(Kernel.VENDOR)
_WITH_EPILOGUE = Plan(Kernel.VENDOR_EPILOGUE)
_STREAM = Plan(Kernel.STREAM, splits=0)  # the launch chooses the splits
_STREAM_TOKENS = 32
# Layers of more weights than these take the vendor's epilogue instead (results/h200_dense_choices.json): of any tokens,
# and from _STREAM_WIDE_TOKENS tokens on with K <= 2N.
_STREAM_WEIGHT, _STREAM_WIDE_WEIGHT, _STREAM_WIDE_TOKENS = 26_000_000, 12_000_000, 17
_STREAM_LONG_TOKENS, _STREAM_LONG_OUTPUTS = 64, range(1017, 1153)  # of layers of _LONG_WIDTHS

# Fitted to results/h200_dense_pipelines.json. Microseconds of a launch, of a column of a wave's epilogue:
_LAUNCH, _COLUMN = 1.07, 0.0188
# of 64 elements of K, for a tile of 64 and of 256 columns, and in ping-pong of 128 and of 160:
_STEP_64, _STEP_256, _STEP_128_PING_PONG, _STEP_160_PING_PONG = 0.249, 0.692, 0.45, 0.535
_CLUSTER, _EXCHANGE = 0.613, 0.012  # of a cluster, and of sending a column of sums
_L2_BYTES, _BYTES, _FLOPS = 9.51e6, 2.91e6, 5.67e8  # per microsecond: of L2, of memory, of the tensor cores
# The vendor's product, likewise: a launch, a step of a tile of 128x256 by products and by shared memory, its
# epilogue, split-K and its sums, bytes and operations per microsecond.
_VENDOR_LAUNCH, _VENDOR_STEP, _VENDOR_LOADS, _VENDOR_EPILOGUE = 2.55, 0.328, 0.415, 0.295
_VENDOR_SPLIT, _VENDOR_SUMS, _VENDOR_BYTES, _VENDOR_FLOPS = 4.47, 8.03, 3.57e6, 6.62e8
_ELEMENTWISE, _ELEMENT = 1.4, 1.1e-6  # the kernel after the product: its launch, and an element
_MARGIN, _MARGIN_FEW = 0.96, 0.85  # of the vendor's time, for the errors of both estimates; below 128 tokens
_MARGIN_SMALL, _SMALL_WEIGHT = 1.05, 2**23  # of weights of so many elements, where these kernels are faster
# Where the vendor's product is slower than its estimate, of larger weights, if waves of tiles are as full as this:
# results/h200_dense_plans.json.
_LARGE_TOKENS, _LARGE_OUTPUTS, _LARGE, _FULL_WAVES = 4096, 2048, Plan(Kernel.COOPERATIVE, 256), 0.93
# Tokens and plans of layers with K > 2N, where the vendor's product is mostly faster; measured for 4304 -> 1152:
_LONG_OUTPUTS, _LONG_WIDTHS = range(1025, 1153), range(4096, 4609)
_NARROW = Plan(Kernel.COOPERATIVE, 64, splits=2)
_LONG_SUMS = (
    (65, 127, _NARROW),
    (129, 152, _NARROW),
    (208, 240, _NARROW),
    (257, 351, _NARROW),
    (700, 768, Plan(Kernel.COOPERATIVE, 128, 2, splits=2)),
    (1458, 1472, Plan(Kernel.COOPERATIVE, 128, 2)),
    (1536, 1536, Plan(Kernel.COOPERATIVE, 128, 2)),
)
_BEHIND_TILE = (range(33, 65), range(129, 169), range(200, 241))  # tokens that take _NARROW behind a tile of an MLP
_LONG_MANY = 1024  # tokens beyond which no tile is used there
# The same for 1152 -> 4304: what is fastest with the layer above behind it.
_WIDE_OUTPUTS, _WIDE_WIDTHS = range(4161, 4369), range(1025, 1153)
_WIDE = ((1409, 1536, Plan(Kernel.COOPERATIVE, 208, 2)),)
# GELU by erf, whose epilogue takes longer: the margin of other layers, and tokens that take the vendor's product.
_MARGIN_ERF, _VENDOR_ERF = 0.9, range(800, 3400)
_WIDE_ERF = ((1281, 1536, Plan(Kernel.COOPERATIVE, 208)), (1537, 2900, VENDOR))
# Where the vendor's epilogue is used (results/h200_dense_vendor.json, h200_dense_ops.json, h200_dense_many_rows.json).
# GELU: everywhere but at these numbers of tokens, which keep tiles. Residual: where no tile is chosen, at _MANY
# tokens and, with at most _SUM_WEIGHT weights, at _SUM; layers of _LONG_OUTPUTS and _LONG_WIDTHS at _VISION_SUM alone.
_GELU, _VISION_GELU = (range(129, 449),), (range(65, 449), range(3457, 4609), range(12_000, 262_141))
_MANY, _SUM, _SUM_WEIGHT = range(2048, 262_141), range(64, 513), 2**24
_LONG_SUM, _LARGE_LONG_SUM = range(64, 1025), range(33, 449)  # with K > 2N; of more weights
_MANY_5120, _OUTPUTS_5120 = range(2500, 262_141), range(4865, 5121)  # of these outputs: at 2048 tokens it is slower
_VISION_SUM = (range(65, 1537), range(3600, 4401), range(5632, 262_141))
_SQUARE_WIDTHS, _SQUARE_SUM = range(1025, 1153), range(9217, 9729)  # of layers as wide as their results

_COLUMNS = (64, 96, 112, 128, 144, 160, 192, 208, 224, 256)
_PING_PONG_COLUMNS = (128, 144, 160)
_CLUSTERS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2))
_ACTIVE_CLUSTERS = {1: 132, 2: 60, 4: 30}  # that run at once on an H200, by CTAs per cluster


class _Tile(NamedTuple):
    """A plan, and the parts of its time that do not depend on the layer."""

    plan: Plan
    size: int
    """CTAs of a cluster."""
    step: float
    """Microseconds of 64 elements of K, unless L2 takes longer."""
    once: float
    """Microseconds of the cluster, and of sending sums."""


def _tiles() -> Iterator[_Tile]:
    for columns in _COLUMNS:
        for rows, cluster_columns, splits in _CLUSTERS:
            if columns % (8 * rows) == 0:
                size = rows * cluster_columns * splits
                step = _STEP_64 + (_STEP_256 - _STEP_64) * (columns - 64) / 192
                once = (_CLUSTER if size > 1 else 0) + _EXCHANGE * columns * (splits - 1) / splits
                yield _Tile(Plan(Kernel.COOPERATIVE, columns, rows, cluster_columns, splits), size, step, once)
    for columns in _PING_PONG_COLUMNS:
        step = _STEP_128_PING_PONG + (_STEP_160_PING_PONG - _STEP_128_PING_PONG) * (columns - 128) / 32
        yield _Tile(Plan(Kernel.PING_PONG, columns), 1, step, 0)


# Of equal estimates the first is chosen: the smallest cluster, then the largest tile.
_TILES = sorted(_tiles(), key=lambda tile: (tile.size, -tile.plan.columns))


@functools.lru_cache(4096)
def _fastest_tiles(tokens: int, outputs: int, width: int) -> tuple[tuple[float, Plan], ...]:
    """Times in microseconds and plans, each faster than those before it. Without the bounds of the whole layer."""
    found: list[tuple[float, Plan]] = []
    least = float("inf")
    for plan, size, step, once in _TILES:
        kernel, columns, cluster_rows, cluster_columns, splits = plan
        clusters = -(-tokens // (128 * cluster_rows)) * -(-outputs // (columns * cluster_columns))
        running = min(clusters, _ACTIVE_CLUSTERS[size])
        if splits > 1 and (clusters > running or width <= 64):
            continue
        loads = 128 * (min(tokens, 128) / cluster_columns + columns / cluster_rows)
        step = max(step, loads * running * size / _L2_BYTES)
        waves, steps = -(-clusters // running), -(-width // (64 * splits))
        epilogues = 1 if kernel == Kernel.PING_PONG else waves
        us = _LAUNCH + waves * steps * step + epilogues * _COLUMN * columns + once
        if us < least:
            least = us
            found.append((us, plan))
    return tuple(found)


def choose_tile(tokens: int, outputs: int, width: int) -> tuple[float, Plan]:
    """The wgmma tile with the shortest estimated time, and that time in microseconds."""
    # From 128 tokens on, times are the same up to the next multiple of 128, so few new T estimate every plan.
    tiles = _fastest_tiles(tokens if tokens <= 128 else -(-tokens // 128) * 128, outputs, width)
    size_in_bytes = 2 * (tokens * width + width * outputs + tokens * outputs)
    bound = max(_LAUNCH + size_in_bytes / _BYTES, _LAUNCH + 2 * tokens * outputs * width / _FLOPS)
    return next(((bound, plan) for us, plan in tiles if us <= bound), tiles[-1])


_VENDOR_TILES = (
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (64, 192),
    (192, 128),
    (64, 256),
    (128, 192),
    (128, 256),
    (256, 128),
)


@functools.lru_cache(4096)
def _fastest_vendor_tile(tokens: int, outputs: int, width: int) -> float:
    """The estimated time of the vendor's product in microseconds. Without the bounds of the whole layer."""
    steps = -(-width // 64)
    least = float("inf")
    for rows, columns in _VENDOR_TILES:
        part = rows * columns / 2**15
        step = max(part * _VENDOR_STEP, (rows + columns) / 384 * _VENDOR_LOADS)
        tiles = -(-tokens // rows) * -(-outputs // columns)
        for splits in (1, 2, 3, 4, 6, 8):
            if splits > 1 and (tiles * splits > 132 or steps < 8 * splits):
                break
            waves = -(-tiles * splits // 132)
            sums = _VENDOR_SPLIT + _VENDOR_SUMS * part if splits > 1 else 0
            us = _VENDOR_LAUNCH + waves * (-(-steps // splits) * step + _VENDOR_EPILOGUE * part) + sums
            least = min(least, us)
    return least


def _estimate_vendor(tokens: int, outputs: int, width: int) -> float:
    """The estimated time of the vendor's product and the kernel after it, in microseconds."""
    tiles = _fastest_vendor_tile(-(-tokens // 64) * 64, outputs, width)  # tiles have multiples of 64 tokens
    size_in_bytes = 2 * (tokens * width + width * outputs + tokens * outputs)
    operations = 2 * tokens * outputs * width
    product = max(tiles, _VENDOR_LAUNCH + operations / _VENDOR_FLOPS, 1 + size_in_bytes / _VENDOR_BYTES)
    return product + _ELEMENTWISE + _ELEMENT * tokens * outputs


@functools.lru_cache(4096)
def choose_on_hopper(tokens: int, outputs: int, width: int, activation: str = "none") -> Plan:
    """The plan of aligned 16-bit layers that gemv's kernel does not take.

    activation: "gelu_tanh", "gelu", or "none" with a residual.
    """
    long = outputs in _LONG_OUTPUTS and width in _LONG_WIDTHS
    wide = outputs in _WIDE_OUTPUTS and width in _WIDE_WIDTHS
    erf = activation == "gelu"
    streamed = outputs in _STREAM_LONG_OUTPUTS and width in _LONG_WIDTHS
    if tokens <= (_STREAM_LONG_TOKENS if streamed else _STREAM_TOKENS):
        sooner = tokens >= _STREAM_WIDE_TOKENS and width <= 2 * outputs and not erf
        if outputs * width <= (_STREAM_WIDE_WEIGHT if sooner else _STREAM_WEIGHT):
            return _STREAM
        return VENDOR if erf else _WITH_EPILOGUE
    plan = _tile_or_vendor(tokens, outputs, width, erf and not wide)
    if activation == "gelu_tanh":
        tiles = _VISION_GELU if wide else _GELU
        return plan if plan != VENDOR and any(tokens in tokens_of for tokens_of in tiles) else _WITH_EPILOGUE
    if erf and wide:
        return next((measured for least, most, measured in _WIDE_ERF if least <= tokens <= most), plan)
    if activation == "none" and outputs in _SQUARE_WIDTHS and width in _SQUARE_WIDTHS and tokens in _SQUARE_SUM:
        return _WITH_EPILOGUE
    if plan == VENDOR and activation == "none":
        ranges: tuple[range, ...] = _VISION_SUM
        if not long:
            ranges = (_MANY_5120 if outputs in _OUTPUTS_5120 else _MANY,)
            if outputs * width <= _SUM_WEIGHT:
                ranges += (_LONG_SUM if width > 2 * outputs else _SUM,)
            elif width > 2 * outputs:
                ranges += (_LARGE_LONG_SUM,)
        return _WITH_EPILOGUE if any(tokens in tokens_of for tokens_of in ranges) else VENDOR
    return plan


def choose_second(tokens: int, outputs: int, width: int, first: Plan, second: Plan) -> Plan:
    """The plan of an MLP's second layer, where ``second`` is the fastest for it alone.

    Behind a tile, which lets the next one start early, few tokens take tiles, and many do not.
    """
    if outputs % 8:
        return second
    if outputs in _LONG_OUTPUTS and width in _LONG_WIDTHS and first.kernel == Kernel.COOPERATIVE:
        if any(tokens in tokens_of for tokens_of in _BEHIND_TILE):
            return _NARROW
        if tokens > _LONG_MANY and second.kernel == Kernel.COOPERATIVE:
            return _WITH_EPILOGUE
    return second


def _tile_or_vendor(tokens: int, outputs: int, width: int, erf: bool) -> Plan:
    """A tile, or the vendor's product where it is faster with a kernel behind it. erf: GELU by erf."""
    if width > 2 * outputs:
        if outputs not in _LONG_OUTPUTS or width not in _LONG_WIDTHS:
            return VENDOR
        return next((plan for least, most, plan in _LONG_SUMS if least <= tokens <= most), VENDOR)
    if outputs * width > _SMALL_WEIGHT and outputs >= _LARGE_OUTPUTS and tokens >= _LARGE_TOKENS:
        tiles = -(-tokens // 128) * -(-outputs // _LARGE.columns)
        full = tiles / (_ACTIVE_CLUSTERS[1] * -(-tiles // _ACTIVE_CLUSTERS[1]))
        return _LARGE if full >= _FULL_WAVES else VENDOR
    if outputs in _WIDE_OUTPUTS and width in _WIDE_WIDTHS:
        measured = next((plan for least, most, plan in _WIDE if least <= tokens <= most), None)
        if measured is not None:
            return measured
    us, plan = choose_tile(tokens, outputs, width)
    margin = _MARGIN_SMALL if outputs * width <= _SMALL_WEIGHT else _MARGIN if tokens >= 128 else _MARGIN_FEW
    if erf and tokens < _VENDOR_ERF.stop:
        margin = 0 if tokens in _VENDOR_ERF else _MARGIN_ERF
    return plan if us < margin * _estimate_vendor(tokens, outputs, width) else VENDOR
