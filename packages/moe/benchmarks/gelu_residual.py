"""Shapes of record of gelu_residual, bf16: rows x 2F->F. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gated_shapes import make, set_bytes, sizes, traffic

import kestrel_moe
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled

__all__ = ["TARGETS", "bare", "candidates", "make", "operations", "set_bytes", "traffic"]

TARGETS = {
    "8x2048->1024": 1.25,
    "32x2048->1024": 1.25,
    "128x2048->1024": 1.36,
    "740x2048->1024": 2.32,
    "1024x2048->1024": 2.76,
    "2048x2048->1024": 4.37,
    "5920x2048->1024": 10.5,
}


def operations(shape: str) -> int:
    """About twenty per element: the normal distribution by a polynomial and an exponential."""
    rows, width = sizes(shape)
    return 20 * rows * width // 2


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_moe").gated
    return lambda x, out: entry(out, x, False, "none", 1.0)


def result(arguments: tuple[torch.Tensor, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def composed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    h, g = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(h) * (g + 1)


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, out: kestrel_moe.gelu_residual(x, out=out),
        "torch": composed,
        "torch.compile": compiled(composed, dynamic=False),
    }
