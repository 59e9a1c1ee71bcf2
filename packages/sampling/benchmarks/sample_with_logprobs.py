"""Shapes of record of sample_with_logprobs: rows x V, float32, in L2; temperature 0.8, top-k 50, top-p 0.9.

n: the most probable tokens per row. "step" is process_and_sample: penalties and a bitmask before, in the same launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))
import sampling_step
from sampling_step import HISTORY, sizes

WARM = True
TARGETS = {
    "1x151936,n20": None,
    "8x128256,n20": None,
    "64x151936,n20": None,
    "256x128256,n20": None,
    "1x151936,n20,step": None,
    "64x151936,n20,step": 24.6,  # one and a half times the draw alone
}
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9


def top_n(shape: str) -> int:
    return int(shape.split(",")[1].removeprefix("n"))


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """Logits, the other arguments of sample_with_logprobs, and those of process_logits or None."""
    rows, _vocabulary = sizes(shape)
    known = sampling_step.known(shape) if "step" in shape else None
    sets = []
    for number in range(count):
        seed, offset = torch.full((1,), number, device="cuda"), torch.arange(rows, device="cuda")
        sets.append((sampling_step.logits_of(shape), {"top_n": top_n(shape), "seed": seed, "offset": offset}, known))
    return sets


def traffic(shape: str) -> int:
    """A step stores the logits of the history's tokens, 32 bytes each; it does not store -inf for masked tokens."""
    rows, vocabulary = sizes(shape)
    own = rows * (4 * vocabulary + 13 + 8 * top_n(shape))
    return own + rows * (4 * HISTORY + vocabulary // 8 + 32 * HISTORY) if "step" in shape else own


set_bytes = traffic


def operations(shape: str) -> int:
    return 0


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(logits: torch.Tensor, given: dict[str, Any], known: dict[str, Any] | None) -> Any:
        if known:
            return kestrel_sampling.process_and_sample(logits, TEMPERATURE, TOP_K, TOP_P, **known, **given)
        return kestrel_sampling.sample_with_logprobs(logits, TEMPERATURE, TOP_K, TOP_P, **given)

    def plain(logits: torch.Tensor, given: dict[str, Any], known: dict[str, Any] | None) -> Any:
        if known:
            logits = sampling_step.torch_process_logits(logits, known)
        largest, ids = (logits / TEMPERATURE).topk(TOP_K)
        probs = torch.softmax(largest, -1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= TOP_P, 0)
        drawn = ids.gather(1, torch.multinomial(probs, 1))
        return sampling_step.torch_token_logprobs(logits, drawn[:, 0], given["top_n"])

    return {"kestrel": kestrel, "torch": plain}
