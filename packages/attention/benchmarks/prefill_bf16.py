"""Shapes of record of prefill in bf16, causal unless a name says full. Targets in us on one H200.

A name is "b<batch> s<tokens> <heads>/<KV heads> d<head size>", or "sq<queries> kv<keys>" for a chunk over a longer
cache. "p<page>": keys lie scattered over the pages of a cache; else they are dense. torch has them dense at all times.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import kestrel_attention

TARGETS = {
    "b1 s740 32/32 d64 p1": 8.8,
    "b1 s1024 32/32 d64 p1": 12.5,
    "b8 s2048 32/8 d128 p16": 422,
    "b2 s8192 32/8 d128 p16": 1556,
    "b1 s16384 32/8 d128 p16": 3150,
    "b1 s16384 32/8 d128 p16 full": 6230,
    "b2 s8192 32/32 d64 p16": 980,
    "b8 s2048 32/8 d128 p1": 447,
    "b2 s8192 32/8 d128 p1": 1650,
    "b1 s16384 32/8 d128 p1": 3340,
    "b1 sq512 kv8192 32/8 d128 p16": 106,
    "b1 sq512 kv8192 32/8 d128 p1": 112,
    "b4 sq512 kv8192 32/8 d128 p16": 400,
    "b4 sq512 kv8192 32/8 d128 p1": 424,
    "b1 sq512 kv32768 16/2 d128 p16": 218,
    "b1 sq512 kv32768 16/2 d128 p1": 231,
    "b1 sq128 kv8192 32/8 d128 p16": 33,
    "b1 sq128 kv8192 32/8 d128 p1": 35,
    "b1 s729 16/16 d72 full": 8.5,
    "b2 s729 16/16 d72 full": 11.5,
    "b4 s729 16/16 d72 full": 19.5,
    "b8 s729 16/16 d72 full": 38,
    "b13 s729 16/16 d72 full": 62,
    "b4 s1024 16/16 d80 full": 44,
    "b4 s2048 32/8 d96 p16": 178,
    "b1 s740 32/32 d64 p1 prefix730": 13.5,
}


@dataclass(frozen=True)
class Shape:
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    page: int
    causal: bool
    prefix: int

    @classmethod
    def parse(cls, name: str) -> Shape:
        numbers = {word: int(n) for word, n in re.findall(r"\b(b|s|sq|kv|d|p|prefix)(\d+)\b", name)}
        heads, kv_heads = map(int, re.findall(r"(\d+)/(\d+)", name)[0])
        queries = numbers.get("sq") or numbers["s"]
        keys, page, prefix = (
            numbers.get(word, default) for word, default in (("kv", queries), ("p", 0), ("prefix", 0))
        )
        return cls(numbers["b"], queries, keys, heads, kv_heads, numbers["d"], page, "full" not in name, prefix)

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, of a sequence and head."""
        if not self.causal:
            return self.queries * self.keys
        first = self.keys - self.queries + 1  # keys that query 0 sees
        return sum(max(first + i, self.prefix) for i in range(self.queries))


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """Sets of (shape, q, keys and values dense, caches, lengths, table)."""
    s = Shape.parse(shape)
    sets = []
    for _ in range(count):
        q = torch.randn(s.batch, s.queries, s.heads, s.size, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, s.batch, s.keys, s.kv_heads, s.size, dtype=torch.bfloat16, device="cuda")
        caches = lengths = table = None
        if s.page:
            pages = -(-s.keys // s.page)
            table = torch.randperm(s.batch * pages, device="cuda").int().view(s.batch, pages)
            lengths = torch.full((s.batch,), s.keys, dtype=torch.int32, device="cuda")
            caches = []
            for x in (k, v):
                padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * s.page - s.keys))
                cache = padded.new_empty(s.batch * pages, s.page, s.kv_heads, s.size)
                cache[table.long().flatten()] = padded.view(cache.shape)
                caches.append(cache)
        sets.append((s, q, k, v, caches, lengths, table))
    return sets


def set_bytes(shape: str) -> int:
    return traffic(shape)


def traffic(shape: str) -> int:
    s = Shape.parse(shape)
    return 4 * s.batch * s.size * (s.queries * s.heads + s.keys * s.kv_heads)


def operations(shape: str) -> int:
    s = Shape.parse(shape)
    return 4 * s.batch * s.heads * s.size * s.visible


def result(_: tuple[Any, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(s, q, k, v, caches, lengths, table):
        how = {"causal": s.causal, "prefix_len": s.prefix or None}
        if caches is None:
            return kestrel_attention.flash_attn_func(q, k, v, **how)
        return kestrel_attention.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table, **how)

    def torch_by(backend: SDPBackend) -> Callable[..., object]:
        def attend(s, q, k, v, *_):
            if s.prefix:
                raise NotImplementedError("torch's kernels have no prefix")
            how: dict[str, Any] = {"is_causal": s.causal, "enable_gqa": s.heads != s.kv_heads}
            if s.causal and s.queries != s.keys:
                how |= {"is_causal": False, "attn_mask": causal_lower_right(s.queries, s.keys)}
            with sdpa_kernel(backend):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

        return attend

    return {
        "kestrel": kestrel,
        "torch_flash": torch_by(SDPBackend.FLASH_ATTENTION),
        "torch_cudnn": torch_by(SDPBackend.CUDNN_ATTENTION),
    }
