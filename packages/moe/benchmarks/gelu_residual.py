"""Shapes of record of gelu_residual, bf16: rows x 2F->F. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gated_shapes import entry_point, make, ours_and_torch, result, set_bytes, sizes, traffic

import kestrel_moe

__all__ = ["TARGETS", "bare", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

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
    return entry_point(silu=False, shift=1.0)


def candidates() -> dict[str, Callable[..., object]]:
    return ours_and_torch(kestrel_moe.gelu_residual, torch.nn.functional.gelu, shift=1.0)
