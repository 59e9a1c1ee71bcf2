"""Shared by the benchmarks of the sampling ops: rows of probabilities in L2, a key per row, and the peers.

A shape is rows x V. Rows are softmax of standard normal logits. They are flat for a vocabulary: TOP_P keeps most of a
row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kestrel_runtime.bench import peer

TOP_K, TOP_P = 50, 0.9


def sizes(shape: str) -> tuple[int, int]:
    rows, vocabulary = shape.split("x")
    return int(rows), int(vocabulary)


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """probs, seed and offset per row."""
    rows, vocabulary = sizes(shape)
    sets = []
    for number in range(count):
        probs = torch.softmax(torch.randn(rows, vocabulary, device="cuda"), dim=-1)
        seed = torch.full((1,), number, device="cuda")
        sets.append((probs, seed, torch.arange(rows, device="cuda")))
    return sets


def traffic(shape: str) -> int:
    rows, vocabulary = sizes(shape)
    return rows * (4 * vocabulary + 8 + 5)  # probabilities and offset in, id and flag out


def operations(shape: str) -> int:
    return 0


def peers(top_k: int = 0, top_p: float = 1.0) -> dict[str, Callable[..., object]]:
    """The same draw by PyTorch alone, and by FlashInfer where it is installed."""

    def plain(probs: torch.Tensor, *_key: torch.Tensor) -> torch.Tensor:
        if top_k:
            kept, ids = probs.topk(top_k)
        elif top_p < 1:
            kept, ids = probs.sort(dim=-1, descending=True)
        else:
            return torch.multinomial(probs, 1)
        if top_p < 1:
            before = kept.cumsum(-1) - kept
            kept = torch.where(before < top_p * kept.sum(-1, keepdim=True), kept, 0.0)
        return ids.gather(1, torch.multinomial(kept, 1))

    found: dict[str, Callable[..., object]] = {"torch": plain}
    sampling = peer("flashinfer.sampling")
    if sampling is None:
        return found

    def flashinfer(probs: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> object:
        key = {"seed": seed, "offset": offset}  # without tensors it reads a generator, not in a graph
        if top_k:
            return sampling.top_k_top_p_sampling_from_probs(probs, top_k, top_p, **key)
        if top_p < 1:
            return sampling.top_p_sampling_from_probs(probs, top_p, **key)
        return sampling.sampling_from_probs(probs, **key)

    return found | {"flashinfer": flashinfer}
