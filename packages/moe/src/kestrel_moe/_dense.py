"""Dense layers, activation(x @ weight.T + bias) + residual: which kernel computes which case.

- up to 4 tokens: gemv's kernel with an epilogue
- in 16 bits on an H100 or H200, up to 64 tokens: a kernel that streams the weight; more: wgmma tiles, by
  :func:`choose_tile`
- otherwise, and where it is faster: the vendor's product, then one kernel for bias, activation and residual
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
FEW_TOKENS = 4
FEW_ELEMENTS = 2**24  # of the weight, for more than one token
_FEW_OUTPUTS = 4096  # for more than one token
_STREAM_TOKENS = 64
_MOST_TOKENS = 262140


class Kernel(IntEnum):
    """Numbered as in csrc/dense_launch.h."""

    VENDOR = 0  # the vendor's product
    FEW_TOKENS = 1  # gemv's
    STREAM = 2  # tiles of 128 outputs by 64 tokens
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

_COLUMNS = (64, 96, 112, 128, 144, 160, 192, 208, 224, 256)
_TILES = (*(Plan(Kernel.COOPERATIVE, columns) for columns in _COLUMNS), Plan(Kernel.PING_PONG, 192))
_CLUSTERS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4), (2, 1, 4), (1, 1, 8))
_ACTIVE_CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 14}  # that run at once on an H200, by CTAs per cluster
_STREAM_CLUSTERS = ((5, 16), (4, 28), (3, 32), (2, 66), (1, 1))  # CTAs per cluster; clusters that run at once
_SMALL_WEIGHT, _LARGE_WEIGHT = 2**23, 2**25  # elements
_FLOPS = 9.6e8  # per microsecond of the whole GPU, with tiles of 128x256
# Microseconds on an H200 (EXPERIMENTS.md):
_STEP = {64: 0.23, 96: 0.275, 112: 0.298, 128: 0.32, 144: 0.352, 160: 0.384, 192: 0.447, 208: 0.479, 224: 0.511, 256: 0.575}
_PING_PONG_STEP = 0.555
_L2_BYTES, _LONG_STEPS = 7.5e6, 32  # that all CTAs load, at most, in a long loop over K
_COLUMN = 0.0165  # a column of the epilogue
_CLUSTER, _EXCHANGE, _LAUNCH = 0.8, 0.008, 2.7  # _EXCHANGE: a column's halves of K


def _divides(width: int, columns: int, splits: int) -> bool:
    """Whether every split of K has a step, and their sums fit into shared memory."""
    steps = -(-width // 64)
    return (splits - 1) * -(-steps // splits) < steps and (splits < 8 or columns <= 160)


def _estimate(tokens: int, outputs: int, width: int, plan: Plan) -> float:
    """The estimated time of a layer with this plan, in microseconds."""
    size = plan.cluster_rows * plan.cluster_columns * plan.splits
    rows = -(-tokens // (128 * plan.cluster_rows))
    clusters = rows * -(-outputs // (plan.columns * plan.cluster_columns))
    running = min(clusters, _ACTIVE_CLUSTERS[size])
    if plan.splits > 1 and clusters > running:
        return float("inf")
    bytes_of_step = 128 * (128 / plan.cluster_columns + plan.columns / plan.cluster_rows)
    step = _PING_PONG_STEP if plan.kernel == Kernel.PING_PONG else _STEP[plan.columns]
    steps = -(-width // (64 * plan.splits))
    if steps > _LONG_STEPS:
        step = max(step, bytes_of_step * running * size / _L2_BYTES)
    waves, epilogue = -(-clusters // running), _COLUMN * plan.columns
    epilogues = 1 if plan.kernel == Kernel.PING_PONG else waves
    total = _LAUNCH + waves * steps * step + epilogues * epilogue
    return total + (_CLUSTER if size > 1 else 0) + (_EXCHANGE * plan.columns if plan.splits > 1 else 0)


@functools.cache
def choose_tile(tokens: int, outputs: int, width: int) -> Plan:
    """The wgmma tile with the shortest estimated time."""
    plans = [
        tile._replace(cluster_rows=rows, cluster_columns=columns, splits=splits)
        for tile in _TILES
        for rows, columns, splits in _CLUSTERS
        if splits == 1 or (tile.kernel == Kernel.COOPERATIVE and _divides(width, tile.columns, splits))
        if tile.columns % (8 * rows) == 0
    ]
    return min(plans, key=lambda plan: _estimate(tokens, outputs, width, plan))


def _choose_stream(tokens: int, outputs: int, width: int) -> Plan:
    """The plan for up to 64 tokens: the most splits of K whose clusters all run at once."""
    tiles, steps = -(-outputs // 128), -(-width // 64)
    splits = next(s for s, clusters in _STREAM_CLUSTERS if s == 1 or (tiles <= clusters and steps >= 4 * s))
    vendor = outputs * width > _LARGE_WEIGHT or (splits == 3 and tokens > 16)
    return _VENDOR if vendor else Plan(Kernel.STREAM, splits=splits)


@functools.cache
def choose_on_hopper(tokens: int, outputs: int, width: int) -> Plan:
    """The plan of aligned 16-bit layers, for more tokens than gemv's kernel takes; measured in EXPERIMENTS.md."""
    if tokens <= _STREAM_TOKENS:
        return _choose_stream(tokens, outputs, width)
    if tokens < 128 and outputs * width > _SMALL_WEIGHT:
        return _VENDOR
    if width > 2 * outputs and (not 192 <= tokens <= 2048 or width > 8192):
        return _VENDOR
    plan = choose_tile(tokens, outputs, width)
    busy = 2 * tokens * outputs * width / _FLOPS
    idle = busy < 0.45 * (_estimate(tokens, outputs, width, plan) - _LAUNCH)  # a poor fit: an incomplete last wave
    return _VENDOR if idle and busy > 4 else plan


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
