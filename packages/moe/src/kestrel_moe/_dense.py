"""Dense layers, activation(x @ weight.T + bias) + residual: which kernel computes which case.

- up to 4 tokens: gemv's kernel with an epilogue
- from some hundred tokens on, in 16 bits on an H100 or H200: wgmma tiles, by :func:`choose_tile`
- otherwise, and where it is faster: the vendor's product, then one kernel for bias, activation and residual
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from kestrel_runtime import Binary, empty

from ._rows import as_rows

kernels = Binary("kestrel_moe")
_FEW_TOKENS = 4
_FEW_ELEMENTS = 2**24  # of the weight, for more than one token
_FEW_OUTPUTS = 4096  # for more than one token
_LEAST_TOKENS, _MOST_TOKENS = 384, 262140  # of wgmma tiles


class Plan(NamedTuple):
    """The kernel of one layer.

    A wgmma tile of 128 tokens by ``columns`` outputs; gemv's kernel with 0 columns; the vendor's product with -1.
    """

    columns: int = 0
    ping_pong: bool = False
    cluster_rows: int = 1  # CTAs that share a tile of the weight, and
    cluster_columns: int = 1  # CTAs that share tokens
    splits: int = 1  # CTAs that each sum a part of K


_FEW, _VENDOR = Plan(), Plan(-1)


_TILES = (Plan(64), Plan(128), Plan(256), Plan(192, True))
_CLUSTERS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2))
_RESIDENT = {1: 132, 2: 66, 4: 30}  # clusters of so many CTAs that run at a time
# Microseconds on an H200 (EXPERIMENTS.md):
_STEP = {64: 0.25, 128: 0.32, 192: 0.55, 256: 0.575}  # 64 elements of K, by columns of the tile
_L2_BYTES = 8.2e6  # that all CTAs load, at most
_COLUMN = 0.014  # a column of the epilogue
_CLUSTER, _EXCHANGE, _LAUNCH = 0.5, 1.0, 2.7


def _estimate(tokens: int, outputs: int, width: int, plan: Plan) -> float:
    """About the microseconds of a layer with this plan."""
    size = plan.cluster_rows * plan.cluster_columns * plan.splits
    rows = -(-tokens // (128 * plan.cluster_rows))
    clusters = rows * -(-outputs // (plan.columns * plan.cluster_columns))
    running = min(clusters, _RESIDENT[size])
    if plan.splits > 1 and clusters > running:
        return float("inf")
    bytes_of_step = 128 * (128 / plan.cluster_columns + plan.columns / plan.cluster_rows)
    step = max(_STEP[plan.columns], bytes_of_step * running * size / _L2_BYTES)
    waves, epilogue = -(-clusters // running), _COLUMN * plan.columns
    total = _LAUNCH + waves * -(-width // (64 * plan.splits)) * step + (1 if plan.ping_pong else waves) * epilogue
    return total + (_CLUSTER if size > 1 else 0) + (_EXCHANGE if plan.splits > 1 else 0)


@functools.cache
def choose_tile(tokens: int, outputs: int, width: int) -> Plan:
    """The wgmma tile with the shortest makespan."""
    plans = [
        tile._replace(cluster_rows=rows, cluster_columns=columns, splits=splits)
        for tile in _TILES
        for rows, columns, splits in _CLUSTERS
        if splits == 1 or (not tile.ping_pong and width > 64)
    ]
    return min(plans, key=lambda plan: _estimate(tokens, outputs, width, plan))


def _vendor_is_faster(tokens: int, outputs: int, width: int) -> bool:
    """Whether the vendor's product and an epilogue kernel are faster than wgmma tiles."""
    return tokens > 2048 if width > 2 * outputs else 512 < tokens < 4096 and outputs > 2 * width


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def choose(x: torch.Tensor, outputs: int, width: int) -> Plan:
    """The plan of a layer for tokens like those of ``x``. Kernels refuse rows that are not aligned."""
    tokens = x.shape[0]
    if tokens <= 1 or (tokens <= _FEW_TOKENS and outputs <= _FEW_OUTPUTS and outputs * width <= _FEW_ELEMENTS):
        return _FEW if width * x.element_size() % 16 == 0 else _VENDOR
    if (width | outputs) % 8 or not _LEAST_TOKENS <= tokens <= _MOST_TOKENS or x.element_size() != 2 or not x.is_cuda:
        return _VENDOR
    if width == 0 or _vendor_is_faster(tokens, outputs, width) or not _is_hopper(x.get_device()):
        return _VENDOR
    return choose_tile(tokens, outputs, width)


def by_vendor(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    *,
    out: torch.Tensor,
) -> None:
    """One layer as the vendor's product and, where it needs one, an epilogue kernel."""
    alone = activation == "none" and residual is None
    product = out if alone else empty(x, x.dtype, *out.shape)
    with torch._C._DisableAutocast():
        if bias is None:
            torch.mm(x, weight.T, out=product)
        else:
            torch.addmm(bias, x, weight.T, out=product)
    if not alone:
        kernels.linear_epilogue(out, product, residual, activation)


def prepared(
    x: torch.Tensor,
    outputs: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    check: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """x and the residual as [T, K] and [T, N], the result [..., N], and the tensor [T, N] that a kernel writes.

    ``check`` raises for errors that the 2-D tensors do not show.
    """
    if out is None:
        out = empty(x, x.dtype, *x.shape[:-1], outputs)
    if x.ndim == 2:
        return x, residual, out, out
    if residual is not None and residual.shape != out.shape:
        check()
    rows, into = as_rows(x, out, check)
    return rows, None if residual is None else residual.reshape(into.shape), out, into
