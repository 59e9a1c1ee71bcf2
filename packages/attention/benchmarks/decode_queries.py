"""Decoding of several queries (speculative verification) and with sinks, beside one query without; us on one H200.

A name is "bf16 " or "e4m3 " (the cache), the queries as "q<queries> ", and one of decode_shapes.py, with " sinks" for
attention sinks. The goal is a ratio, of up to 8 queries of 4 heads a KV head: 1.15 times one query.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_attention

sys.path.insert(0, str(Path(__file__).parent))
import decode_shapes
from decode_shapes import Shape

TARGETS: dict[str, float | None] = dict.fromkeys(
    [
        *(f"{cache} q{n} b8 kv4096 32/8 d128 p16" for cache in ("bf16", "e4m3") for n in (2, 4, 8, 16)),
        *(f"{cache} q4 b1 kv32768 32/4 d128 p16" for cache in ("bf16", "e4m3")),
        "bf16 q4 b32 kv1024 32/8 d64 p16",
        "bf16 q8 b8 kv4096 64/8 d128 p16",
        *(f"{cache} q1 b8 kv4096 64/8 d64 p16 sinks" for cache in ("bf16", "e4m3")),
        "bf16 q4 b8 kv4096 64/8 d64 p16 sinks",
        "bf16 q1 b1 kv1024 64/8 d64 p16 sinks",
        "bf16 q1 b8 kv4096 64/8 d64 p16 w127 sinks",
    ]
)
STORAGE = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def parse(name: str) -> tuple[torch.dtype, int, Shape, bool]:
    """The dtype of the cache, the queries of a sequence, its shape, and whether there are sinks."""
    cache, queries, shape = name.removesuffix(" sinks").split(" ", 2)
    return STORAGE[cache], int(queries[1:]), Shape.parse(shape), name.endswith(" sinks")


def make(name: str, count: int) -> list[tuple[Any, ...]]:
    """Sets of (q, k_cache, v_cache, lengths, table, window, sinks)."""
    storage, queries, shape, has_sinks = parse(name)
    sets = []
    for _, *cache, window, _ in decode_shapes.make(shape, count, storage):
        q = torch.randn(shape.batch, queries, shape.heads, shape.size, dtype=torch.bfloat16, device="cuda")
        sets.append((q, *cache, window, torch.randn(shape.heads, device="cuda") if has_sinks else None))
    return sets


def set_bytes(name: str) -> int:
    storage, _, shape, _ = parse(name)
    return shape.cache_bytes(storage.itemsize)


def traffic(name: str) -> int:
    storage, queries, shape, _ = parse(name)
    return shape.traffic(storage.itemsize) + 4 * shape.batch * (queries - 1) * shape.heads * shape.size


def operations(name: str) -> int:
    _, queries, shape, _ = parse(name)
    return queries * shape.operations()


def candidates() -> dict[str, Callable[..., object]]:
    def attend(q, k_cache, v_cache, lengths, table, window, sinks):
        how = {"cache_seqlens": lengths, "block_table": table, "causal": True, "window_size": (window, -1)}
        return kestrel_attention.flash_attn_with_kvcache(q, k_cache, v_cache, sinks=sinks, **how)

    def one_query(q, k_cache, v_cache, lengths, table, window, sinks):
        return attend(q[:, :1], k_cache, v_cache, lengths, table, window, None)

    return {"kestrel": attend, "kestrel of one query": one_query}
