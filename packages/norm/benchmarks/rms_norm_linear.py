"""Shapes of record of rms_norm_linear, bf16: rows x N x M, of N elements and M results. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_norm
from kestrel_runtime.bench import compiled

TARGETS = {
    "1x3584x3584": 8.26,
    "4x3584x3584": 8.27,
    "16x3584x3584": 8.31,
    "64x3584x3584": 8.98,
    "256x3584x3584": 14.0,
    "2048x3584x3584": 84.4,
    "1x3584x18944": 35.2,
    "4x3584x18944": 35.2,
    "16x3584x18944": 35.2,
    "64x3584x18944": 35.2,
    "256x3584x18944": 54.5,
    "2048x3584x18944": 360.0,
}


def sizes(shape: str) -> tuple[int, int, int]:
    rows, n, m = map(int, shape.split("x"))
    return rows, n, m


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    rows, n, m = sizes(shape)
    norm_weight = torch.randn(n, dtype=torch.bfloat16, device="cuda")
    return [
        (
            torch.randn(rows, n, dtype=torch.bfloat16, device="cuda"),
            norm_weight,
            torch.randn(m, n, dtype=torch.bfloat16, device="cuda") / n**0.5,
        )
        for _ in range(count)
    ]


def set_bytes(shape: str) -> int:
    rows, n, m = sizes(shape)
    return 2 * n * (rows + m)


def traffic(shape: str) -> int:
    rows, n, m = sizes(shape)
    return 2 * (n * m + rows * (n + m) + n)


def operations(shape: str) -> int:
    rows, n, m = sizes(shape)
    return 2 * rows * n * m


def torch_rms_norm_linear(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(torch.nn.functional.rms_norm(x, norm_weight.shape, norm_weight, 1e-6), weight)


def kestrel_pair(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rms_norm of this package, then the vendor's product."""
    return torch.mm(kestrel_norm.rms_norm(x, norm_weight, 1e-6), weight.T)


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, norm_weight, weight: kestrel_norm.rms_norm_linear(x, norm_weight, weight, 1e-6),
        "rms_norm, torch.mm": kestrel_pair,
        "torch": torch_rms_norm_linear,
        "torch.compile": compiled(torch_rms_norm_linear, fullgraph=True, dynamic=False),
    }
