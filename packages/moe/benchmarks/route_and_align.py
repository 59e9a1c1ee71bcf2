"""Shapes of record of route_and_align: tokens, experts E of float32 logits, choices k, block size b. Timed warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_moe
from kestrel_moe.reference_experts import most_blocks
from kestrel_moe.reference_experts import route_and_align as by_torch
from kestrel_runtime import Binary

WARM = True  # the router has just written the logits
TARGETS = dict.fromkeys(
    [f"{tokens} E64 k8 b16" for tokens in (1, 16, 64, 128, 256, 512)]
    + [f"{tokens} E256 k8 b16" for tokens in (1, 16, 64, 256)]
)


def sizes(shape: str) -> tuple[int, int, int, int]:
    tokens, experts, k, block = shape.split()
    return int(tokens), int(experts[1:]), int(k[1:]), int(block[1:])


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    tokens, experts, k, block = sizes(shape)
    return [(torch.randn(tokens, experts, device="cuda"), k, block) for _ in range(count)]


def set_bytes(shape: str) -> int:
    return traffic(shape)


def traffic(shape: str) -> int:
    tokens, experts, k, block = sizes(shape)
    blocks = most_blocks(tokens * k, experts, block)
    return 4 * (tokens * experts + 2 * tokens * k + blocks * block + blocks + 1)


def operations(shape: str) -> int:
    return 0  # a few per logit: arithmetic does not bound the op


def in_two(logits: torch.Tensor, k: int, block: int) -> None:
    _, ids, _ = kestrel_moe.topk_softmax(logits, k)
    tokens, experts = logits.shape
    blocks = most_blocks(tokens * k, experts, block)
    outputs = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (blocks * block, blocks, 1))
    kestrel_moe.moe_align_block_size(ids, experts, block, *outputs)


def candidates() -> dict[str, Callable[..., object]]:
    return {"kestrel": kestrel_moe.route_and_align, "kestrel in two launches": in_two, "torch": by_torch}


def bare() -> Callable[..., object]:
    """The entry point with its results given: the least host time."""
    entry = Binary("kestrel_moe").route_and_align
    results: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

    def call(logits: torch.Tensor, k: int, block: int) -> None:
        tokens, experts = logits.shape
        made = results.get((tokens, experts))
        if made is None:
            blocks = most_blocks(tokens * k, experts, block)
            integers = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (blocks * block, blocks, 1))
            weights, ids = (torch.empty(tokens, k, dtype=d, device="cuda") for d in (torch.float32, torch.int32))
            made = results[tokens, experts] = (weights, ids, *integers)
        entry(*made, logits, k, block, False, None, None)

    return call
