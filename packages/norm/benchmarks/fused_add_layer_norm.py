"""Shapes of fused_add_layer_norm, bf16: rows x N, those of layer_norm; no targets are set."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_norm
from kestrel_runtime import Binary

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


def sizes(shape: str) -> tuple[int, int]:
    rows, n = shape.split("x")
    return int(rows), int(n)


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    rows, n = sizes(shape)
    weight, bias = torch.ones(2, n, dtype=torch.bfloat16, device="cuda")  # x stays of the same size
    x = (torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, torch.randn_like(one), weight, bias) for one in x]


def set_bytes(shape: str) -> int:
    rows, n = sizes(shape)
    return 2 * rows * n * 2


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return 4 * rows * n * 2 + 2 * n * 2


def operations(shape: str) -> int:
    """Per element: the sum, and what layer_norm does."""
    rows, n = sizes(shape)
    return 9 * rows * n


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").fused_add_layer_norm
    return lambda x, residual, weight, bias: entry(x, residual, weight, bias, 1e-5)


def torch_composition(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.layer_norm(residual, weight.shape, weight, bias))


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": kestrel_norm.fused_add_layer_norm,
        "torch": torch_composition,
        "torch.compile": torch.compile(torch_composition, fullgraph=True, dynamic=False),
    }
