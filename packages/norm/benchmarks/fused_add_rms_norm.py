"""Shapes of record of fused_add_rms_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_norm

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
    rows, n = map(int, shape.split("x"))
    weight = torch.ones(n, dtype=torch.bfloat16, device="cuda")  # x stays of the same size however often it is normed
    x = (torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, torch.randn_like(one), weight) for one in x]


def set_bytes(shape: str) -> int:
    rows, n = map(int, shape.split("x"))
    return 2 * rows * n * 2


def torch_composition(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.rms_norm(residual, weight.shape, weight, 1e-6))


def candidates() -> dict[str, Callable[..., object]]:
    return {"kestrel": kestrel_norm.fused_add_rms_norm, "torch": torch_composition}
