"""Shapes of record of silu_and_mul, bf16: rows x 2 x F. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gated_shapes import make, set_bytes, sizes, traffic

import kestrel_moe
from kestrel_runtime import Binary

__all__ = ["TARGETS", "bare", "candidates", "make", "operations", "set_bytes", "traffic"]

TARGETS = {
    "2048x2x4096": 13.3,
    "2048x2x8192": 25.2,
    "2048x2x11008": 33.8,
    "2048x2x14336": 43.4,
    "2048x2x18944": 57.3,
}


def operations(shape: str) -> int:
    """About six per element: an exponential, a reciprocal, products."""
    rows, width = sizes(shape)
    return 6 * rows * width // 2


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_moe").gated
    return lambda x, out: entry(out, x, True, "none", 0.0)


def composed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    h, g = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(h) * g


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": lambda x, out: kestrel_moe.silu_and_mul(x, out=out),
        "torch": composed,
        "torch.compile": torch.compile(composed, dynamic=False),
    }
    try:
        import flashinfer
    except ImportError:
        return found
    return found | {"flashinfer": lambda x, out: flashinfer.silu_and_mul(x, out)}
