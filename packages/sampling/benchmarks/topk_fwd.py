"""Shapes of record of topk_fwd, bf16: rows x N, k = 8. Targets in us on one H200.

Scores of 1x64 and 16x64 are so few that 20 000 sets of them fit into L2: those two are timed warm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_sampling

K = 8
MOST_SETS = 20_000
TARGETS = {"1x64": 1.28, "16x64": 1.34, "740x64": 1.71, "4096x64": 1.76, "740x256": 1.61}


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    rows, n = map(int, shape.split("x"))
    scores = torch.randn(min(count, MOST_SETS), rows, n, dtype=torch.bfloat16, device="cuda")
    return [(each,) for each in scores]


def set_bytes(shape: str) -> int:
    rows, n = map(int, shape.split("x"))
    return rows * n * 2


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda scores: kestrel_sampling.topk_fwd(scores, K),
        "kestrel_softmax": lambda scores: kestrel_sampling.topk_fwd(scores, K, softmax=True),
        "torch": lambda scores: torch.topk(scores, K),
    }
