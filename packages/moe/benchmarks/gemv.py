"""Shapes of record of gemv, bf16: tokens x K -> N. Targets in us on one H200; the vendor's product is the peer."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_moe
from kestrel_runtime import Binary

TARGETS = {
    "1x4096->4096": 9.8,
    "1x4096->14336": 31.5,
    "1x14336->4096": None,
    "2x4096->4096": None,
    "4x4096->4096": None,
    "4x4096->14336": None,
    "8x4096->4096": None,
    "32x4096->4096": None,
}


def sizes(shape: str) -> tuple[int, int, int]:
    left, outputs = shape.split("->")
    tokens, width = left.split("x")
    return int(tokens), int(width), int(outputs)


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    tokens, width, outputs = sizes(shape)
    sets = []
    for _ in range(count):
        x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(outputs, width, dtype=torch.bfloat16, device="cuda")
        sets.append((x, weight, torch.empty(tokens, outputs, dtype=torch.bfloat16, device="cuda")))
    return sets


def set_bytes(shape: str) -> int:
    _, width, outputs = sizes(shape)
    return width * outputs * 2


def traffic(shape: str) -> int:
    tokens, width, outputs = sizes(shape)
    return 2 * (width * outputs + tokens * (width + outputs))


def operations(shape: str) -> int:
    tokens, width, outputs = sizes(shape)
    return 2 * tokens * width * outputs


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_moe").gemv
    return lambda x, weight, out: entry(out, x, weight, None)


def result(arguments: tuple[torch.Tensor, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, weight, out: kestrel_moe.gemv(x, weight, out=out),
        "torch": lambda x, weight, out: torch.mm(x, weight.T, out=out),
    }
