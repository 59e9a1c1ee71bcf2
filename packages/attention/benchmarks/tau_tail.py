"""Shapes of record of tau_tail: tokens x heads x head size, as many KV heads, positions int64, table float32.

The target is a ratio: at most 1.5 times an elementwise copy of the same bytes. Two of them are timed beside it: a
kernel that adds a number to each element, and torch's copy of a contiguous tensor, which may be the driver's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_attention

TARGETS = {"1x32x64": None, "4x32x64": None, "16x32x64": None, "740x32x64": None}
POSITIONS = 4096


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """Sets of (qkv, linear, table, positions, heads, size, as much to copy as is scaled, where to)."""
    tokens, heads, size = map(int, shape.split("x"))
    table = torch.rand(POSITIONS, 2 * heads, device="cuda")
    sets = []
    for _ in range(count):
        qkv = torch.randn(tokens, 3 * heads * size, dtype=torch.bfloat16, device="cuda")
        linear = torch.randn(tokens, 2 * heads, dtype=torch.bfloat16, device="cuda")
        positions = torch.randint(0, POSITIONS, (tokens,), device="cuda")
        copied = torch.randn(tokens, 2 * heads * size, dtype=torch.bfloat16, device="cuda")
        sets.append((qkv, linear, table, positions, heads, size, copied, torch.empty_like(copied)))
    return sets


def set_bytes(shape: str) -> int:
    tokens, heads, size = map(int, shape.split("x"))
    return tokens * (2 * heads * size * 2 + 2 * heads * 6)


def traffic(shape: str) -> int:
    """Query and value heads read and written, the linear, an entry of the table and a position per token."""
    tokens, heads, size = map(int, shape.split("x"))
    return tokens * (4 * heads * size * 2 + 2 * heads * 6 + 8)


def operations(shape: str) -> int:
    return 0


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(qkv, linear, table, positions, heads, size, copied, target):
        kestrel_attention.tau_tail(qkv, linear, table, positions, heads, size)

    def elementwise(qkv, linear, table, positions, heads, size, copied, target):
        torch.add(copied, 1.0, out=target)

    def copy(qkv, linear, table, positions, heads, size, copied, target):
        target.copy_(copied)

    return {"kestrel": kestrel, "elementwise": elementwise, "copy": copy}
