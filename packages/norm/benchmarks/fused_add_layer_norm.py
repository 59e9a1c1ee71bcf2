"""Shapes of fused_add_layer_norm, bf16: rows x N, those of layer_norm; no targets are set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from row_shapes import elements, matrices, sizes, vectors

import kestrel_norm
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled

TARGETS: dict[str, float | None] = {
    "729x1152": None,
    "1458x1152": None,
    "2916x1152": None,
    "5832x1152": None,
    "9477x1152": None,
    "1x2048": None,
    "16x2048": None,
    "740x2048": None,
}


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    weight, bias = torch.ones_like(torch.stack(vectors(shape, 2)))  # ones: calls in place keep the magnitude of x
    return [(one, torch.randn_like(one), weight, bias) for one in matrices(shape, count)]


def set_bytes(shape: str) -> int:
    return 2 * elements(shape) * 2


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return 4 * rows * n * 2 + 2 * n * 2


def operations(shape: str) -> int:
    """Per element: the sum, and what layer_norm does."""
    return 9 * elements(shape)


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").fused_add_layer_norm
    return lambda x, residual, weight, bias: entry(x, residual, weight, bias, 1e-5)


def result(arguments: tuple[torch.Tensor, ...], returned: None) -> list[torch.Tensor]:
    return list(arguments[:2])


def torch_composition(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.layer_norm(residual, weight.shape, weight, bias))


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": kestrel_norm.fused_add_layer_norm,
        "torch": torch_composition,
        "torch.compile": compiled(torch_composition, fullgraph=True, dynamic=False),
    }
