"""Dense layers, activation(x @ weight.T + bias) + residual: which kernel computes which case.

- one token, and 2 to 4 with few outputs and weights (:func:`choose`): gemv's kernel with an epilogue
- in 16 bits on an H100 or H200, up to 32 tokens: a kernel that streams the weight; more: wgmma tiles, by
  :func:`choose_tile`
- otherwise, and where it is faster: the vendor's product, then torch's activation or sum
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch

from kestrel_runtime import Binary, empty

from ._rows import as_rows

kernels = Binary("kestrel_moe")
FEW_TOKENS = 4  # kGemvTokens of gemv.cuh
FEW_ELEMENTS = 2**24  # of the weight, for more than one token
_FEW_OUTPUTS = 4096  # for more than one token
_STREAM_TOKENS = 32
_MOST_TOKENS = 262140  # kMaxTokens of linear.h


class Kernel(IntEnum):
    """Numbered as in csrc/dense_launch.h."""

    VENDOR = 0  # the vendor's product
    FEW_TOKENS = 1  # gemv's
    STREAM = 2  # tiles of 128 outputs by 16, 32 or 64 tokens
    COOPERATIVE = 3  # tiles of 128 tokens by `columns` outputs
    PING_PONG = 4  # the same; the consumer warpgroups compute tiles in turn


class Plan(NamedTuple):
    """The kernel of one layer and its tile."""

    kernel: Kernel
    columns: int = 0
    cluster_rows: int = 1  # CTAs that share a tile of the weight, and
    cluster_columns: int = 1  # CTAs that share tokens
    splits: int = 1  # CTAs that each sum a part of K


_FEW, _VENDOR = Plan(Kernel.FEW_TOKENS), Plan(Kernel.VENDOR)
_STREAM = Plan(Kernel.STREAM, splits=0)  # the launch chooses the splits

_COLUMNS = (64, 96, 112, 128, 144, 160, 192, 208, 224, 256)
_PING_PONG_COLUMNS = (128, 144, 160)
_TILES = (
    *(Plan(Kernel.COOPERATIVE, columns) for columns in _COLUMNS),
    *(Plan(Kernel.PING_PONG, columns) for columns in _PING_PONG_COLUMNS),
)
_CLUSTERS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2))
_ACTIVE_CLUSTERS = {1: 132, 2: 60, 4: 30}  # that run at once on an H200, by CTAs per cluster

# Fitted to results/h200_dense_pipelines.json. Microseconds of a launch, of a column of a wave's epilogue:
_LAUNCH, _COLUMN = 1.07, 0.0188
# of 64 elements of K, for a tile of 64 and of 256 columns, and in ping-pong of 128 and of 160:
_STEP_64, _STEP_256, _STEP_128_PING_PONG, _STEP_160_PING_PONG = 0.249, 0.692, 0.45, 0.535
_CLUSTER, _EXCHANGE = 0.613, 0.012  # of a cluster, and of sending a column of sums
_L2_BYTES, _BYTES, _FLOPS = 9.51e6, 2.91e6, 5.67e8  # per microsecond: of L2, of memory, of the tensor cores
# The vendor's product, likewise: tiles, a launch, a step of a tile of 128x256 by products and by shared memory, its
# epilogue, split-K and its sums, bytes and operations per microsecond.
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
_LONG_SUMS = (
    (33, 100, Plan(Kernel.COOPERATIVE, 64, splits=2)),
    (289, 384, Plan(Kernel.COOPERATIVE, 64, splits=2)),
    (450, 512, Plan(Kernel.COOPERATIVE, 96, splits=2)),
    (700, 768, Plan(Kernel.COOPERATIVE, 128, 2, splits=2)),
    (769, 896, Plan(Kernel.COOPERATIVE, 144, splits=2)),
    (1230, 1280, Plan(Kernel.COOPERATIVE, 192, splits=2)),
    (1281, 1536, Plan(Kernel.COOPERATIVE, 128, 2)),
)
# The same for 1152 -> 4304: what is fastest with the layer above behind it.
_WIDE_OUTPUTS, _WIDE_WIDTHS = range(4161, 4369), range(1025, 1153)
_WIDE = ((1409, 1536, Plan(Kernel.COOPERATIVE, 208, 2)),)


def _estimate(tokens: int, outputs: int, width: int, plan: Plan) -> float:
    """The estimated time of a layer with this plan, in microseconds."""
    size = plan.cluster_rows * plan.cluster_columns * plan.splits
    rows = -(-tokens // (128 * plan.cluster_rows))
    clusters = rows * -(-outputs // (plan.columns * plan.cluster_columns))
    running = min(clusters, _ACTIVE_CLUSTERS[size])
    if plan.splits > 1 and clusters > running:
        return float("inf")
    ping_pong = plan.kernel == Kernel.PING_PONG
    if ping_pong:
        step = _STEP_128_PING_PONG + (_STEP_160_PING_PONG - _STEP_128_PING_PONG) * (plan.columns - 128) / 32
    else:
        step = _STEP_64 + (_STEP_256 - _STEP_64) * (plan.columns - 64) / 192
    bytes_of_step = 128 * (min(tokens, 128) / plan.cluster_columns + plan.columns / plan.cluster_rows)
    step = max(step, bytes_of_step * running * size / _L2_BYTES)
    waves, steps = -(-clusters // running), -(-width // (64 * plan.splits))
    total = _LAUNCH + waves * steps * step + (1 if ping_pong else waves) * _COLUMN * plan.columns
    total += (_CLUSTER if size > 1 else 0) + _EXCHANGE * plan.columns * (plan.splits - 1) / plan.splits
    size_in_bytes = 2 * (tokens * width + width * outputs + tokens * outputs)
    return max(total, _LAUNCH + size_in_bytes / _BYTES, _LAUNCH + 2 * tokens * outputs * width / _FLOPS)


def _estimate_vendor(tokens: int, outputs: int, width: int) -> float:
    """The estimated time of the vendor's product and the kernel after it, in microseconds."""
    steps = -(-width // 64)
    times = []
    for rows, columns in _VENDOR_TILES:
        part = rows * columns / 2**15
        step = max(part * _VENDOR_STEP, (rows + columns) / 384 * _VENDOR_LOADS)
        tiles = -(-tokens // rows) * -(-outputs // columns)
        for splits in (1, 2, 3, 4, 6, 8):
            if splits > 1 and (tiles * splits > 132 or steps < 8 * splits):
                continue
            waves = -(-tiles * splits // 132)
            sums = _VENDOR_SPLIT + _VENDOR_SUMS * part if splits > 1 else 0
            times.append(_VENDOR_LAUNCH + waves * (-(-steps // splits) * step + _VENDOR_EPILOGUE * part) + sums)
    size_in_bytes = 2 * (tokens * width + width * outputs + tokens * outputs)
    operations = 2 * tokens * outputs * width
    product = max(min(times), _VENDOR_LAUNCH + operations / _VENDOR_FLOPS, 1 + size_in_bytes / _VENDOR_BYTES)
    return product + _ELEMENTWISE + _ELEMENT * tokens * outputs


# Of equal estimates the first is chosen: the smallest cluster, then the largest tile.
_PLANS = sorted(
    (
        tile._replace(cluster_rows=rows, cluster_columns=columns, splits=splits)
        for tile in _TILES
        for rows, columns, splits in _CLUSTERS
        if tile.columns % (8 * rows) == 0
        if tile.kernel == Kernel.COOPERATIVE or (rows, columns, splits) == (1, 1, 1)
    ),
    key=lambda plan: (plan.cluster_rows * plan.cluster_columns * plan.splits, -plan.columns),
)


@functools.lru_cache(4096)
def choose_tile(tokens: int, outputs: int, width: int) -> Plan:
    """The wgmma tile with the shortest estimated time."""
    plans = _PLANS if width > 64 else (plan for plan in _PLANS if plan.splits == 1)
    return min(plans, key=lambda plan: _estimate(tokens, outputs, width, plan))


@functools.lru_cache(4096)
def choose_on_hopper(tokens: int, outputs: int, width: int) -> Plan:
    """The plan of aligned 16-bit layers, for more tokens than gemv's kernel takes."""
    if tokens <= _STREAM_TOKENS:
        return _STREAM
    if width > 2 * outputs:
        if outputs not in _LONG_OUTPUTS or width not in _LONG_WIDTHS:
            return _VENDOR
        return next((plan for least, most, plan in _LONG_SUMS if least <= tokens <= most), _VENDOR)
    if outputs * width > _SMALL_WEIGHT and outputs >= _LARGE_OUTPUTS and tokens >= _LARGE_TOKENS:
        tiles = -(-tokens // 128) * -(-outputs // _LARGE.columns)
        full = tiles / (_ACTIVE_CLUSTERS[1] * -(-tiles // _ACTIVE_CLUSTERS[1]))
        return _LARGE if full >= _FULL_WAVES else _VENDOR
    if outputs in _WIDE_OUTPUTS and width in _WIDE_WIDTHS:
        measured = next((plan for least, most, plan in _WIDE if least <= tokens <= most), None)
        if measured is not None:
            return measured
    plan = choose_tile(tokens, outputs, width)
    margin = _MARGIN_SMALL if outputs * width <= _SMALL_WEIGHT else _MARGIN if tokens >= 128 else _MARGIN_FEW
    faster = _estimate(tokens, outputs, width, plan) < margin * _estimate_vendor(tokens, outputs, width)
    return plan if faster else _VENDOR


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def choose(x: torch.Tensor, outputs: int, width: int) -> Plan:
    """The plan of a layer for x [T, K]. Kernels refuse rows that are not aligned to 16 bytes."""
    tokens = x.shape[0]
    if tokens <= 1 or (tokens <= FEW_TOKENS and outputs <= _FEW_OUTPUTS and outputs * width <= FEW_ELEMENTS):
        return _FEW if width * x.element_size() % 16 == 0 else _VENDOR
    if (width | outputs) % 8 or width == 0 or tokens > _MOST_TOKENS or x.element_size() != 2:
        return _VENDOR
    return choose_on_hopper(tokens, outputs, width) if x.is_cuda and _is_hopper(x.get_device()) else _VENDOR


def padded(width: int) -> int:
    """The row stride of a hidden layer: rows that begin with a line of 128 bytes are loaded faster."""
    return -(-width // 64) * 64


def by_vendor(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    *,
    out: torch.Tensor,
) -> None:
    """One layer as the vendor's product, then torch's activation and sum, each rounded to x's dtype."""
    product = out if residual is None else empty(x, x.dtype, *out.shape)
    with torch._C._DisableAutocast():
        if bias is None:
            torch.mm(x, weight.T, out=product)
        else:
            torch.addmm(bias, x, weight.T, out=product)
        if activation != "none":
            torch._C._nn.gelu_(product, approximate="tanh" if activation == "gelu_tanh" else "none")
        if residual is not None:
            torch.add(product, residual, out=out)


def prepared(
    x: torch.Tensor,
    outputs: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    check: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """x and the residual as [T, K] and [T, N], the result [..., N], and the tensor [T, N] that a kernel writes.

    ``check`` raises for errors that are invisible after flattening to two dimensions.
    """
    if out is None:
        out = empty(x, x.dtype, *x.shape[:-1], outputs)
    if x.ndim == 2:
        return x, residual, out, out
    if residual is not None and residual.shape != out.shape:
        check()
    rows, into = as_rows(x, out, check)
    return rows, None if residual is None else residual.reshape(into.shape), out, into
