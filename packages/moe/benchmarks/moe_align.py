"""Shapes of record of moe_align_block_size: tokens, experts E, choices k, block size b. Timed warm. Targets in us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_moe
from kestrel_runtime.bench import peer

WARM = True
LAUNCHES = 1.5  # what the limit counts: 1.58 us at every size
TARGETS = {
    "1 E64 k8 b16": 3.20,
    "4 E64 k8 b16": 3.20,
    "16 E64 k8 b16": 3.20,
    "740 E64 k8 b64": 3.20,
    "1024 E64 k8 b64": 3.20,
    "8192 E256 k8 b64": 11.0,
}


def sizes(shape: str) -> tuple[int, int, int, int]:
    tokens, experts, k, block = shape.split()
    return int(tokens), int(experts[1:]), int(k[1:]), int(block[1:])


def num_positions(shape: str) -> int:
    """As many as vLLM allocates."""
    tokens, experts, k, block = sizes(shape)
    most = tokens * k + experts * (block - 1)
    return -(-most // block) * block


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    tokens, experts, k, block = sizes(shape)
    sets = []
    for _ in range(min(count, 100)):
        ids = torch.rand(tokens, experts, device="cuda").topk(k).indices.int()
        lengths = (num_positions(shape), num_positions(shape) // block, 1)
        outputs = (torch.empty(n, dtype=torch.int32, device="cuda") for n in lengths)
        sets.append((ids, experts, block, *outputs))
    return sets


def set_bytes(shape: str) -> int:
    return traffic(shape)


def traffic(shape: str) -> int:
    tokens, _, k, block = sizes(shape)
    return 4 * (tokens * k + num_positions(shape) + num_positions(shape) // block + 1)


def operations(shape: str) -> int:
    return 0


def result(arguments: tuple[Any, ...], returned: None) -> list[torch.Tensor]:
    """The padded length, the expert of each position and its pairs, sorted: peers order pairs of an expert differently.

    Positions past the padded length are not compared.
    """
    ids, _, block, sorted_ids, expert_ids, length = arguments
    used = int(length)
    experts = expert_ids[: used // block].long().repeat_interleave(block)
    pairs = sorted_ids[:used].long()
    return [length, experts, (experts * (ids.numel() + 1) + pairs).sort().values]


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {"kestrel": kestrel_moe.moe_align_block_size, "torch": by_torch}
    if vllm := peer("vllm._custom_ops"):
        found["vllm"] = vllm.moe_align_block_size
    return found


def by_torch(
    ids: torch.Tensor,
    experts: int,
    block: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """The reference: sort, histogram, cumulative sum, scatter."""
    from kestrel_moe import reference_experts

    reference_experts.moe_align_block_size(ids, experts, block, sorted_ids, expert_ids, length)


def bare() -> Callable[..., object]:
    """The entry point alone: the least host time."""
    from kestrel_runtime import Binary

    entry = Binary("kestrel_moe").moe_align_block_size
    return lambda *arguments: entry(*arguments, None)
