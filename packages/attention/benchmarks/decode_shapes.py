"""What decode_fp8.py and decode_bf16.py share: shapes by name, their tensors, their bytes.

A name is "b<batch> kv<keys> <heads>/<KV heads> d<head size> p<page>", with " w<window>" for a sliding window. Keys lie
scattered over the pages of a cache twice as large as needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kestrel_attention


@dataclass(frozen=True)
class Shape:
    batch: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    page: int
    window: int

    @classmethod
    def parse(cls, name: str) -> Shape:
        batch, keys, heads, size, page, *window = name.split()
        queries, kv = heads.split("/")
        numbers = [int(x.lstrip("bkvdpw")) for x in (batch, keys, queries, kv, size, page, *(window or ["w-1"]))]
        return cls(*numbers)

    @property
    def visited(self) -> int:
        """Keys that a sequence attends to."""
        return self.keys if self.window < 0 else min(self.keys, self.window + 1)

    def cache_bytes(self, element: int) -> int:
        return 2 * self.batch * self.visited * self.kv_heads * self.size * element

    def traffic(self, element: int) -> int:
        """Keys and values once, the table, queries and results in bf16."""
        pages = -(-self.visited // self.page)
        return self.cache_bytes(element) + 4 * self.batch * (pages + self.heads * self.size)

    def operations(self) -> int:
        return 4 * self.batch * self.visited * self.heads * self.size


def make(shape: Shape, count: int, storage: torch.dtype) -> list[tuple[Any, ...]]:
    """Sets of (q, k_cache, v_cache, lengths, table, window, out)."""
    pages = -(-shape.keys // shape.page)
    blocks = shape.batch * pages
    sets = []
    for _ in range(count):
        caches = torch.empty(2, blocks, shape.page, shape.kv_heads, shape.size, dtype=storage, device="cuda")
        for part in caches.flatten(0, 1).split(max(1, 2**26 // (shape.page * shape.kv_heads * shape.size))):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda"))
        q = torch.randn(shape.batch, 1, shape.heads, shape.size, dtype=torch.bfloat16, device="cuda")
        table = torch.randperm(blocks, device="cuda").int().view(shape.batch, pages)
        lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda")
        sets.append((q, *caches, lengths, table, shape.window, torch.empty_like(q)))
    return sets


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(q, k_cache, v_cache, lengths, table, window, out):
        return kestrel_attention.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, window_size=(window, -1)
        )

    return {"kestrel": kestrel}
