"""Shapes of record of fused_add_rms_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
from row_shapes import elements, matrices, sizes, vectors

import kestrel_norm
from kestrel_runtime import Binary

TARGETS = {
    "1x2048": 1.25,
    "16x4096": 1.29,
    "740x2048": 4.26,
    "2048x896": 4.91,
    "2048x1536": 7.59,
    "2048x2048": 9.74,
    "2048x3072": 14.0,
    "2048x4096": 18.3,
    "16384x4096": 131.0,
    "65536x8192": 1051.0,
}


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    (weight,) = map(torch.ones_like, vectors(shape, 1))  # x stays of one size however often it is normed
    return [(one, torch.randn_like(one), weight) for one in matrices(shape, count)]


def set_bytes(shape: str) -> int:
    return 2 * elements(shape) * 2


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return 4 * rows * n * 2 + n * 2


def operations(shape: str) -> int:
    """Per element: the sum, a square and a sum, two products."""
    return 5 * elements(shape)


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").fused_add_rms_norm
    return lambda x, residual, weight: entry(x, residual, weight, 1e-6, 0.0)


def torch_composition(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.rms_norm(residual, weight.shape, weight, 1e-6))


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": kestrel_norm.fused_add_rms_norm,
        "torch": torch_composition,
        "torch.compile": torch.compile(torch_composition, fullgraph=True, dynamic=False),
    }
    try:
        from flashinfer import norm

        found["flashinfer"] = lambda x, residual, weight: norm.fused_add_rmsnorm(x, residual, weight, 1e-6)
    except ImportError:
        pass
    try:
        from vllm import _custom_ops

        found["vllm"] = lambda x, residual, weight: _custom_ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    except ImportError:
        pass
    return found
