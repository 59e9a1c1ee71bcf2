"""Shapes of multimodal_rotary_embedding, bf16: tokens x query/key heads x head size (Qwen2.5-VL); no targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_rope
from kestrel_rope import reference

TARGETS = {"1x28/4x128": None, "740x28/4x128": None, "4096x28/4x128": None}
CONTEXT = 4096  # rows of the table
SECTIONS = [16, 24, 24]  # frequencies of time, height and width


def sizes(shape: str) -> tuple[int, int, int, int]:
    """T, H, Hk, D."""
    tokens, heads, size = shape.split("x")
    query_heads, key_heads = heads.split("/")
    return int(tokens), int(query_heads), int(key_heads), int(size)


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """One table for all sets, as an engine has; positions, queries and keys are each set's own."""
    tokens, heads, key_heads, size = sizes(shape)
    table = kestrel_rope.build_cos_sin_cache(size, CONTEXT, device="cuda")
    positions = torch.randint(0, CONTEXT, (count, 3, tokens), device="cuda")
    query = torch.randn(count, tokens, heads * size, dtype=torch.bfloat16, device="cuda")
    key = torch.randn(count, tokens, key_heads * size, dtype=torch.bfloat16, device="cuda")
    return [(positions[i], query[i], key[i], size, table, SECTIONS) for i in range(count)]


def set_bytes(shape: str) -> int:
    return traffic(shape) // 2  # what is read


def traffic(shape: str) -> int:
    """Queries and keys in and out; the table is small, and stays in L2 from layer to layer."""
    tokens, heads, key_heads, size = sizes(shape)
    return 2 * tokens * (heads + key_heads) * size * 2 + 3 * tokens * 8


def operations(shape: str) -> int:
    tokens, heads, key_heads, size = sizes(shape)
    return tokens * (heads + key_heads) * size * 3


def result(arguments: tuple[Any, ...], returned: None) -> list[torch.Tensor]:
    return [arguments[1], arguments[2]]


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": kestrel_rope.multimodal_rotary_embedding,
        "torch": reference.multimodal_rotary_embedding,
    }
