"""Shapes of record of topk_fwd: rows x N, k = 8 and bf16 unless the name says otherwise. Targets in us on one H200.

Shapes with k or float32 in their name cover topk_select.py, the 64-bit keys, and topk_rows.cuh at the length of a
vocabulary; they have no target. 20 000 sets of 1x64 and 16x64 fit into L2, so those two are timed warm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_sampling
from kestrel_runtime.bench import peer

MOST_SETS = 20_000
TARGETS = {
    "1x64": 1.28,
    "16x64": 1.34,
    "740x64": 1.71,
    "4096x64": 1.76,
    "740x256": 1.61,
    "740x256,k8,fp32": None,
    "740x1000,k50,fp32": None,
    "740x4096,k128,fp32": None,
    "32x128256,k50,fp32": None,
    "32x128256,k1024,fp32": None,
}


def parse(shape: str) -> tuple[int, int, int, torch.dtype]:
    """rows, N, k and dtype of a shape's name."""
    size, *options = shape.split(",")
    rows, n = map(int, size.split("x"))
    k = int(options[0].removeprefix("k")) if options else 8
    return rows, n, k, torch.float32 if "fp32" in options else torch.bfloat16


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    rows, n, k, dtype = parse(shape)
    scores = torch.randn(min(count, MOST_SETS), rows, n, dtype=dtype, device="cuda")
    return [(each, k) for each in scores]


def set_bytes(shape: str) -> int:
    rows, n, _, dtype = parse(shape)
    return rows * n * dtype.itemsize


def traffic(shape: str) -> int:
    rows, n, k, dtype = parse(shape)
    return rows * (n * dtype.itemsize + k * (dtype.itemsize + 4))  # scores; values and int32 indices


def operations(shape: str) -> int:
    return 0


def result(arguments: tuple[Any, ...], returned: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Values, and the scores at the indices: of equal scores any may be chosen."""
    values, indices = returned[:2]
    return [values, arguments[0].gather(1, indices.long())]


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": kestrel_sampling.topk_fwd,
        "kestrel_softmax": lambda scores, k: kestrel_sampling.topk_fwd(scores, k, softmax=True),
        "torch": torch.topk,
    }
    if quack := peer("quack.topk"):
        found["quack"] = quack.topk_fwd
        found["quack_softmax"] = lambda scores, k: quack.topk_fwd(scores, k, softmax=True)
    return found
