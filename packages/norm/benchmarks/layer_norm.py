"""Shapes of record of layer_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_norm

TARGETS = {
    "729x1152": 2.01,
    "1458x1152": 2.87,
    "2916x1152": 4.59,
    "5832x1152": 8.03,
    "9477x1152": 12.3,
    "1x2048": 1.25,
    "16x2048": 1.25,
    "740x2048": 2.71,
}


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    rows, n = map(int, shape.split("x"))
    weight, bias = torch.randn(2, n, dtype=torch.bfloat16, device="cuda")
    x = (torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, weight, bias, torch.empty_like(one)) for one in x]


def set_bytes(shape: str) -> int:
    rows, n = map(int, shape.split("x"))
    return rows * n * 2  # x alone: that it is cold must not depend on what is written


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, weight, bias, out: kestrel_norm.layer_norm(x, weight, bias, out=out),
        "torch": lambda x, weight, bias, out: torch.nn.functional.layer_norm(x, weight.shape, weight, bias),
    }
