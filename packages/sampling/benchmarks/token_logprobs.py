"""Shapes of record of token_logprobs: rows x V, float32; n most probable tokens; k50: after top-k 50 and top-p 0.9."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))
import sampling_step
from sampling_step import sizes

TARGETS = {
    "1x151936,n20": None,
    "8x128256,n20": None,
    "64x151936,n0": None,
    "64x151936,n20": None,
    "64x151936,n20,k50": None,
    "256x128256,n20": None,
}


def top_n(shape: str) -> int:
    return int(shape.split(",")[1].removeprefix("n"))


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    rows, vocabulary = sizes(shape)
    filters = {"top_k": 50, "top_p": 0.9} if "k50" in shape else {}
    return [
        (sampling_step.logits_of(shape), torch.randint(vocabulary, (rows,), device="cuda"), top_n(shape), filters)
        for _ in range(count)
    ]


def traffic(shape: str) -> int:
    rows, vocabulary = sizes(shape)
    return rows * (4 * vocabulary + 16 + 8 * top_n(shape))


def set_bytes(shape: str) -> int:
    return traffic(shape)


def operations(shape: str) -> int:
    return 0


def candidates() -> dict[str, Callable[..., object]]:
    def plain(logits: torch.Tensor, ids: torch.Tensor, n: int, filters: dict[str, Any]) -> tuple[Any, ...]:
        if filters:
            least = logits.topk(filters["top_k"]).values
            kept = torch.softmax(least, -1)
            kept_before = kept.cumsum(-1) - kept
            last = (kept_before < filters["top_p"]).sum(1, keepdim=True) - 1
            logits = logits.masked_fill(logits < least.gather(1, last), -torch.inf)
        return sampling_step.torch_token_logprobs(logits, ids, n)

    return {
        "kestrel": lambda logits, ids, n, filters: kestrel_sampling.token_logprobs(logits, ids, n, **filters),
        "torch": plain,
    }
