"""Merging two sets of keys: tokens x heads x head size in bf16. No target is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_attention
from kestrel_runtime.bench import compiled

TARGETS = {"16x32x64": None, "740x32x64": None, "2048x64x128": None}


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """Sets of (out, LSE) of one part, then of the other."""
    tokens, heads, size = map(int, shape.split("x"))
    sets = []
    for _ in range(count):
        outs = torch.randn(2, tokens, heads, size, dtype=torch.bfloat16, device="cuda")
        lses = torch.randn(2, heads, tokens, device="cuda")
        sets.append((outs[0], lses[0], outs[1], lses[1]))
    return sets


def set_bytes(shape: str) -> int:
    tokens, heads, size = map(int, shape.split("x"))
    return tokens * heads * (4 * size + 8)


def traffic(shape: str) -> int:
    """Two outputs and their LSE read, one of each written."""
    tokens, heads, size = map(int, shape.split("x"))
    return tokens * heads * (6 * size + 12)


def operations(shape: str) -> int:
    return 0


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(out_a, lse_a, out_b, lse_b):
        return kestrel_attention.merge_attention_states(out_a, lse_a, out_b, lse_b)

    def eager(out_a, lse_a, out_b, lse_b):
        lse = torch.logaddexp(lse_a, lse_b)
        a, b = ((part - lse).exp().T[..., None] for part in (lse_a, lse_b))
        return (out_a * a + out_b * b).to(out_a.dtype), lse

    return {"kestrel": kestrel, "torch": eager, "torch.compile": compiled(eager, dynamic=False)}
