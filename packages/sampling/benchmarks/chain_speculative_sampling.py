"""Shapes of record of chain_speculative_sampling: rows x draft tokens x V, float32, draft near target, in L2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))

WARM = True
TARGETS = {"1x4x151936": None, "8x4x128256": None, "64x4x32000": None}


def sizes(shape: str) -> tuple[int, int, int]:
    rows, steps, vocabulary = map(int, shape.split("x"))
    return rows, steps, vocabulary


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """Draft, its tokens, target, seed and offset."""
    rows, steps, vocabulary = sizes(shape)
    sets = []
    for number in range(count):
        logits = 2 * torch.randn(rows, steps + 1, vocabulary, device="cuda")
        draft = torch.softmax(logits[:, :steps] + 0.3 * torch.randn_like(logits[:, :steps]), -1)
        ids = torch.multinomial(draft.flatten(0, 1), 1).view(rows, steps)
        seed = torch.full((1,), number, device="cuda")
        sets.append((draft, ids, torch.softmax(logits, -1), seed, torch.arange(rows, device="cuda")))
    return sets


def traffic(shape: str) -> int:
    """Of each row one position of draft and target is read whole."""
    rows, steps, vocabulary = sizes(shape)
    return rows * (8 * vocabulary + 80 * steps)


set_bytes = traffic


def operations(shape: str) -> int:
    return 0


def candidates() -> dict[str, Callable[..., object]]:
    def plain(draft: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, *_key: torch.Tensor) -> torch.Tensor:
        steps = ids.shape[1]
        q, p = draft.gather(2, ids[:, :, None])[..., 0], target[:, :steps].gather(2, ids[:, :, None])[..., 0]
        emitted = (torch.rand_like(q) * q < p).int().cumprod(1).sum(1)
        rows = torch.arange(len(ids), device="cuda")
        last = target[rows, emitted]
        rest = (last - draft[rows, emitted.clamp(max=steps - 1)]).clamp_(min=0)
        return torch.multinomial(torch.where((emitted < steps)[:, None], rest, last), 1)

    def kestrel(
        draft: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor
    ) -> object:
        return kestrel_sampling.chain_speculative_sampling(draft, ids, target, seed=seed, offset=offset)

    return {"kestrel": kestrel, "torch": plain}
