"""Shapes of record of fused_linear_residual, bf16 with a bias: tokens x K x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import kestrel_moe

TARGETS = {
    "729x1152x1152": 6.0,
    "1458x1152x1152": 8.489,
    "2916x1152x1152": 13.155,
    "5832x1152x1152": 24.8,
    "9477x1152x1152": 39.67,
    "1x8192x2048": None,
    "4x8192x2048": None,
    "16x8192x2048": None,
    "64x8192x2048": None,
    "256x8192x2048": None,
    "4096x4096x4096": None,
}


def sizes(shape: str) -> tuple[int, int, int]:
    tokens, width, outputs = map(int, shape.split("x"))
    return tokens, width, outputs


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    tokens, width, outputs = sizes(shape)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    return [
        (
            torch.randn(tokens, width, **options),
            torch.randn(outputs, width, **options) * width**-0.5,
            torch.randn(outputs, **options),
            torch.randn(tokens, outputs, **options),
            torch.empty(tokens, outputs, **options),
        )
        for _ in range(count)
    ]


def set_bytes(shape: str) -> int:
    tokens, width, outputs = sizes(shape)
    return 2 * (tokens * width + width * outputs + tokens * outputs)


def traffic(shape: str) -> int:
    tokens, width, outputs = sizes(shape)
    return 2 * (width * outputs + outputs + tokens * (width + 2 * outputs))


def operations(shape: str) -> int:
    tokens, width, outputs = sizes(shape)
    return 2 * tokens * width * outputs


def result(arguments: tuple[torch.Tensor, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, w, b, r, out: kestrel_moe.fused_linear_residual(x, w, b, r, out=out),
        "torch": lambda x, w, b, r, out: torch.add(F.linear(x, w, b), r, out=out),
    }
