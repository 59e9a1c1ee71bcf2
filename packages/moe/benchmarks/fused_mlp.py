"""Shapes of record of fused_mlp, bf16 with biases and a residual: tokens x N x I. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import kestrel_moe

TARGETS = {
    "729x1152x4304": 27.5,
    "1458x1152x4304": 45.4,
    "2916x1152x4304": 89.7,
    "5832x1152x4304": 178.0,
    "9477x1152x4304": 289.0,
    "1x2048x8192": None,
    "4x2048x8192": None,
    "16x2048x8192": None,
    "64x2048x8192": None,
    "256x2048x8192": None,
}


def sizes(shape: str) -> tuple[int, int, int]:
    tokens, width, inner = map(int, shape.split("x"))
    return tokens, width, inner


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    tokens, width, inner = sizes(shape)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    return [
        (
            torch.randn(tokens, width, **options),
            torch.randn(inner, width, **options) * width**-0.5,
            torch.randn(inner, **options),
            torch.randn(width, inner, **options) * inner**-0.5,
            torch.randn(width, **options),
            torch.randn(tokens, width, **options),
            torch.empty(tokens, width, **options),
        )
        for _ in range(count)
    ]


def set_bytes(shape: str) -> int:
    tokens, width, inner = sizes(shape)
    return 4 * width * (inner + tokens)


def traffic(shape: str) -> int:
    """Without the hidden layer, which stays in L2."""
    tokens, width, inner = sizes(shape)
    return 2 * (2 * width * inner + width + inner + 3 * tokens * width)


def operations(shape: str) -> int:
    tokens, width, inner = sizes(shape)
    return 4 * tokens * width * inner


def result(arguments: tuple[torch.Tensor, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def by_torch(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    hidden = F.gelu(F.linear(x, w1, b1), approximate="tanh")
    return torch.add(F.linear(hidden, w2, b2), residual, out=out)


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, w1, b1, w2, b2, r, out: kestrel_moe.fused_mlp(x, w1, b1, w2, b2, r, out=out),
        "torch": by_torch,
    }
