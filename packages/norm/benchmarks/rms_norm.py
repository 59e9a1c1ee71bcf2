"""Shapes of record of rms_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_norm

TARGETS = {
    "1x2048": 1.25,
    "16x4096": 1.25,
    "740x2048": 2.71,
    "2048x896": 3.03,
    "2048x1536": 4.37,
    "2048x2048": 5.45,
    "2048x3072": 7.59,
    "2048x4096": 9.74,
    "16384x4096": 66.4,
    "65536x8192": 525.0,
}


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    rows, n = map(int, shape.split("x"))
    weight = torch.randn(n, dtype=torch.bfloat16, device="cuda")
    x = (torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, weight, torch.empty_like(one)) for one in x]


def set_bytes(shape: str) -> int:
    rows, n = map(int, shape.split("x"))
    return rows * n * 2  # x alone: that it is cold must not depend on what is written


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, weight, out: kestrel_norm.rms_norm(x, weight, out=out),
        "torch": lambda x, weight, out: torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6),
    }
