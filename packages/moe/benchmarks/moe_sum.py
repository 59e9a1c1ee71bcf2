"""Shapes of record of moe_sum, bf16: tokens x K x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_moe
from kestrel_runtime import Binary
from kestrel_runtime.bench import peer

TARGETS = {"1x8x2048": 1.25, "4x8x2048": 1.25, "16x8x2048": 1.31, "740x8x2048": 8.13, "1024x8x2048": 10.8}


def sizes(shape: str) -> tuple[int, int, int]:
    tokens, choices, width = map(int, shape.split("x"))
    return tokens, choices, width


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    tokens, choices, width = sizes(shape)
    x = (torch.randn(tokens, choices, width, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, torch.empty(tokens, width, dtype=one.dtype, device="cuda")) for one in x]


def set_bytes(shape: str) -> int:
    tokens, choices, width = sizes(shape)
    return tokens * choices * width * 2


def traffic(shape: str) -> int:
    tokens, choices, width = sizes(shape)
    return tokens * (choices + 1) * width * 2


def operations(shape: str) -> int:
    tokens, choices, width = sizes(shape)
    return tokens * choices * width


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_moe").moe_sum
    return lambda x, out: entry(out, x)


def result(arguments: tuple[torch.Tensor, ...], returned: object) -> list[torch.Tensor]:
    return [arguments[-1]]


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": kestrel_moe.moe_sum,
        "torch": lambda x, out: torch.sum(x, dim=1, out=out),
    }
    if vllm := peer("vllm._custom_ops"):
        found["vllm"] = vllm.moe_sum
    return found
