"""Shapes of record of gelu_residual, bf16: rows x 2F->F. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_moe
from kestrel_runtime import Binary

TARGETS = {
    "8x2048->1024": 1.25,
    "32x2048->1024": 1.25,
    "128x2048->1024": 1.36,
    "740x2048->1024": 2.32,
    "1024x2048->1024": 2.76,
    "2048x2048->1024": 4.37,
    "5920x2048->1024": 10.5,
}


def sizes(shape: str) -> tuple[int, int]:
    rows, width = shape.split("->")[0].split("x")
    return int(rows), int(width)


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    rows, width = sizes(shape)
    x = (torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, torch.empty(rows, width // 2, dtype=one.dtype, device="cuda")) for one in x]


def set_bytes(shape: str) -> int:
    rows, width = sizes(shape)
    return rows * width * 2


def traffic(shape: str) -> int:
    rows, width = sizes(shape)
    return rows * width * 3


def operations(shape: str) -> int:
    """About twenty per element: the normal distribution by a polynomial and an exponential."""
    rows, width = sizes(shape)
    return 20 * rows * width // 2


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_moe").gated
    return lambda x, out: entry(out, x, False, "none", 1.0)


def composed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    h, g = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(h) * (g + 1)


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, out: kestrel_moe.gelu_residual(x, out=out),
        "torch": composed,
        "torch.compile": torch.compile(composed, dynamic=False),
    }
