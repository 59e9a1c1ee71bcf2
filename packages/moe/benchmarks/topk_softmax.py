"""Shapes of record of topk_softmax: tokens x experts of float32 logits, k = 8. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_moe
from kestrel_runtime import Binary
from kestrel_runtime.bench import peer

K = 8
MOST_SETS = 4_000  # 1x64 and 1x256: so many sets still fit into L2, and those two are timed nearly warm
TARGETS = {
    "1x64 k8": 2.00,
    "1x256 k8": 2.31,
    "16x64 k8": 2.12,
    "16x256 k8": 2.60,
    "740x64 k8": 2.31,
    "740x256 k8": 3.36,
    "4096x64 k8": 3.42,
    "4096x256 k8": 9.51,
}


def sizes(shape: str) -> tuple[int, int]:
    tokens, experts = map(int, shape.removesuffix(f" k{K}").split("x"))
    return tokens, experts


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    tokens, experts = sizes(shape)
    return [(each,) for each in torch.randn(min(count, MOST_SETS), tokens, experts, device="cuda")]


def set_bytes(shape: str) -> int:
    tokens, experts = sizes(shape)
    return tokens * experts * 4


def traffic(shape: str) -> int:
    tokens, experts = sizes(shape)
    return tokens * (4 * experts + 8 * K) + 4 * experts


def operations(shape: str) -> int:
    return 0  # a few per logit: arithmetic does not bound the op


def result(arguments: tuple[torch.Tensor, ...], returned: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(returned[:2])


def softmax_and_topk(gating: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, ids = torch.topk(gating.softmax(dim=1), K)
    return weights, ids.int()


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": lambda gating: kestrel_moe.topk_softmax(gating, K),
        "torch": softmax_and_topk,  # without the counts: bincount reads the host
    }
    ops = peer("vllm._custom_ops")
    if ops is None:
        return found

    def vllm(gating: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = gating.shape[0]
        weights = torch.empty(tokens, K, device="cuda")
        ids, rows = (torch.empty(tokens, K, dtype=torch.int32, device="cuda") for _ in range(2))
        ops.topk_softmax(weights, ids, rows, gating)
        return weights, ids

    return found | {"vllm": vllm}


def bare() -> Callable[..., object]:
    """The entry point with its results given: the least host time."""
    entry = Binary("kestrel_moe").topk_softmax
    results: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

    def call(gating: torch.Tensor) -> None:
        tokens, experts = gating.shape
        made = results.get((tokens, experts))
        if made is None:
            weights, ids = (torch.empty(tokens, K, dtype=d, device="cuda") for d in (torch.float32, torch.int32))
            scratch = 8 if tokens > 8 else 0  # scratch memory after the counts, for several CTAs
            counts = torch.empty(experts + scratch, dtype=torch.int32, device="cuda")
            made = results[tokens, experts] = (weights, ids, counts)
        entry(*made, gating, K, False, None, None)

    return call
