"""Shapes of record of rotary_embedding, bf16: tokens x query/key heads x head size, whole heads; us on one H200."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import kestrel_rope
from kestrel_rope import reference
from kestrel_runtime.bench import compiled, peer

TARGETS = {
    "1x32/32x64": 1.25,
    "4x32/32x64": 1.25,
    "16x32/32x64": 1.25,
    "740x32/32x64": 4.26,
    "512x32/32x128": 5.45,
    "2048x32/32x128": 18.3,
    "8192x32/32x128": 69.8,
}
CONTEXT = 4096  # rows of the table


def sizes(shape: str) -> tuple[int, int, int, int]:
    """T, H, Hk, D."""
    tokens, heads, size = shape.split("x")
    query_heads, key_heads = heads.split("/")
    return int(tokens), int(query_heads), int(key_heads), int(size)


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """One table for all sets, as an engine has; positions, queries and keys are each set's own.

    The keys of a set follow its queries in memory. With all queries in one buffer and all keys in another, the time of
    16x32/32x64 varied from process to process.
    """
    tokens, heads, key_heads, size = sizes(shape)
    table = kestrel_rope.build_cos_sin_cache(size, CONTEXT, device="cuda")
    positions = torch.randint(0, CONTEXT, (count, tokens), device="cuda")
    both = torch.randn(count, tokens * (heads + key_heads), size, dtype=torch.bfloat16, device="cuda")
    query = both[:, : tokens * heads].view(count, tokens, heads * size)
    key = both[:, tokens * heads :].view(count, tokens, key_heads * size)
    return [(positions[i], query[i], key[i], size, table) for i in range(count)]


def set_bytes(shape: str) -> int:
    return traffic(shape) // 2  # what is read


def traffic(shape: str) -> int:
    """Queries and keys in and out; the table is small, and stays in L2 from layer to layer."""
    tokens, heads, key_heads, size = sizes(shape)
    return 2 * tokens * (heads + key_heads) * size * 2 + tokens * 8


def operations(shape: str) -> int:
    tokens, heads, key_heads, size = sizes(shape)
    return tokens * (heads + key_heads) * size * 3


def bare() -> Callable[..., object]:
    """The entry point alone: the least host time."""
    entry = kestrel_rope.rotary_embedding.kernel_op.launch.__globals__["_kernels"].rotary_embedding
    return lambda positions, query, key, size, table: entry(positions, query, key, size, table, True, 0, False)


def result(arguments: tuple[Any, ...], returned: None) -> list[torch.Tensor]:
    return [arguments[1], arguments[2]]


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": kestrel_rope.rotary_embedding,
        "torch": reference.rotary_embedding,
        "torch.compile": compiled(reference.rotary_embedding, fullgraph=True),
    }
    if flashinfer := peer("flashinfer.rope"):
        found["flashinfer"] = flashinfer.apply_rope_with_cos_sin_cache_inplace
    if vllm := peer("vllm._custom_ops"):
        narrow = functools.lru_cache(1)(lambda table: table.bfloat16())  # it takes the table in the dtype of the query
        found["vllm"] = lambda *args: vllm.rotary_embedding(*args[:-1], narrow(args[-1]), True)
    return found
