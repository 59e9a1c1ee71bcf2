"""Shapes of record of silu_and_mul, bf16: rows x 2 x F. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_moe
from kestrel_runtime import Binary

TARGETS = {
    "2048x2x4096": 13.3,
    "2048x2x8192": 25.2,
    "2048x2x11008": 33.8,
    "2048x2x14336": 43.4,
    "2048x2x18944": 57.3,
}


def sizes(shape: str) -> tuple[int, int]:
    rows, _, width = map(int, shape.split("x"))
    return rows, 2 * width


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
