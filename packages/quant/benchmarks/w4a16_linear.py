"""Shapes of w4a16_linear, bf16, groups of 128: tokens x N x K, and the times to reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_quant

TARGETS = {
    "1x4096x4096": 4.1,
    "4x4096x4096": 4.11,
    "16x4096x4096": 4.16,
    "64x4096x4096": 5.5,
    "256x4096x4096": 16.8,
    "1x4096x14336": 9.46,
    "4x4096x14336": 9.49,
    "16x4096x14336": 9.59,
    "64x4096x14336": 15.0,
    "256x4096x14336": 43.5,
    "1x14336x4096": 9.46,
    "4x14336x4096": 9.49,
    "16x14336x4096": 9.59,
    "64x14336x4096": 15.6,
    "256x14336x4096": 48.2,
    "1x8192x28672": 32.0,
    "4x8192x28672": 32.0,
    "16x8192x28672": 32.2,
    "64x8192x28672": 55.6,
    "256x8192x28672": 168.0,
}
GROUP = 128


def sizes(shape: str) -> tuple[int, int, int]:
    tokens, n, k = map(int, shape.split("x"))
    return tokens, n, k


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """x; the packed weight; its values in bf16, for peers that multiply those."""
    tokens, n, k = sizes(shape)
    sets = []
    for _ in range(count):
        packed = kestrel_quant.pack_w4(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"), GROUP)
        sets.append((torch.randn(tokens, k, dtype=torch.bfloat16, device="cuda"), packed, packed.dequantize()))
    return sets


def set_bytes(shape: str) -> int:
    _, n, k = sizes(shape)
    return n * k // 2


def traffic(shape: str) -> int:
    tokens, n, k = sizes(shape)
    return n * k // 2 + 2 * n * k // GROUP + 2 * tokens * (n + k)


def operations(shape: str) -> int:
    tokens, n, k = sizes(shape)
    return 2 * tokens * n * k


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, packed, _: kestrel_quant.w4a16_linear(x, packed),
        "torch": lambda x, _, weight: torch.nn.functional.linear(x, weight),
    }
