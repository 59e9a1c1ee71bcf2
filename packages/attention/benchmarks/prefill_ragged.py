"""Packed sequences of different lengths, in bf16 or e4m3, causal.

A name is "b<sequences> <lengths> <heads>/<KV heads> d<head size>". Lengths "1..2000" are log-uniform, "2000+1..32" are
one of 2000 queries, in the middle, and others. "kv<keys>": each sequence has so many keys, else as many as queries.
"p<page>": keys lie scattered over the pages of a cache; else they are packed. torch has them packed at all times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import kestrel_attention

__all__ = ["TARGETS", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS: dict[str, float | None] = {
    "b256 1..2000 32/8 d128": None,
    "b256 1..2000 32/8 d128 p16": None,
    "b256 1..2000 32/8 d128 p1": None,
    "b256 2000+1..32 32/8 d128": None,
    "b256 2000+1..32 32/32 d64": None,
    "b64 512+1..1 kv8192 32/8 d128 p16": None,
    "b256 1..2000 32/8 d128 p16 e4m3": None,
    "b256 2000+1..32 32/8 d128 p16 e4m3": None,
}


class Shape(NamedTuple):
    queries: list[int]
    keys: list[int]
    heads: int
    kv_heads: int
    size: int
    page: int
    dtype: torch.dtype

    @classmethod
    def parse(cls, name: str) -> Shape:
        numbers = {word: int(n) for word, n in re.findall(r"\b(b|d|p|kv)(\d+)\b", name)}
        heads, kv_heads = map(int, re.findall(r"(\d+)/(\d+)", name)[0])
        longest, low, high = re.findall(r"(?:(\d+)\+)?(\d+)\.\.(\d+)", name)[0]
        generator = torch.Generator().manual_seed(0)
        spread = torch.rand(numbers["b"], generator=generator).double() * math.log(int(high) / int(low))
        queries = (int(low) * spread.exp()).round().int().tolist()
        if longest:
            queries[len(queries) // 2] = int(longest)
        keys = [numbers["kv"]] * len(queries) if "kv" in numbers else queries
        dtype = torch.float8_e4m3fn if "e4m3" in name else torch.bfloat16
        return cls(queries, keys, heads, kv_heads, numbers["d"], numbers.get("p", 0), dtype)


def traffic(name: str) -> int:
    """Queries, keys and values once, results in bf16."""
    s = Shape.parse(name)
    return s.size * (
        sum(s.queries) * s.heads * (s.dtype.itemsize + 2) + 2 * sum(s.keys) * s.kv_heads * s.dtype.itemsize
    )


set_bytes = traffic


def operations(name: str) -> int:
    s = Shape.parse(name)
    pairs = sum(q * (k - q) + q * (q + 1) // 2 for q, k in zip(s.queries, s.keys, strict=True))
    return 4 * s.heads * s.size * pairs


def make(name: str, count: int) -> list[tuple[Any, ...]]:
    """Sets of (shape, q, keys and values packed in bf16, as stored, starts of queries and keys, table, lengths)."""
    s = Shape.parse(name)
    starts = [torch.tensor([0, *counts]).cumsum(0).int().cuda() for counts in (s.queries, s.keys)]
    sets = []
    for _ in range(count):
        q = torch.randn(sum(s.queries), s.heads, s.size, dtype=torch.bfloat16, device="cuda").to(s.dtype)
        packed = [
            torch.randn(sum(s.keys), s.kv_heads, s.size, dtype=torch.bfloat16, device="cuda").to(s.dtype)
            for _ in range(2)
        ]
        stored, table, lengths = packed, None, None
        if s.page:
            lengths = torch.tensor(s.keys, dtype=torch.int32, device="cuda")
            columns = -(-max(s.keys) // s.page)
            pages = [-(-n // s.page) for n in s.keys]
            order = torch.randperm(sum(pages))
            table = torch.full((len(pages), columns), -1, dtype=torch.int32)
            slots, first = [], 0
            for b, n in enumerate(pages):
                table[b, :n] = order[first : first + n]
                at = torch.arange(s.keys[b])
                slots.append(order[first : first + n][at // s.page] * s.page + at % s.page)
                first += n
            table, at = table.cuda(), torch.cat(slots).cuda()
            integers = {1: torch.uint8, 2: torch.int16}[s.dtype.itemsize]
            stored = []
            for x in packed:
                cache = torch.zeros(sum(pages) * s.page, s.kv_heads, s.size, dtype=integers, device="cuda")
                cache[at] = x.view(integers)
                stored.append(cache.view(s.dtype).view(-1, s.page, s.kv_heads, s.size))
        sets.append((s, q, [x.bfloat16() for x in packed], stored, *starts, table, lengths))
    return sets


def result(_: tuple[Any, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(s, q, packed, stored, starts_q, starts_k, table, lengths):
        how: dict[str, Any] = {"causal": True}
        if table is not None:
            how |= {"block_table": table, "seqused_k": lengths}
            starts_k = None
        most = max(s.queries), max(s.keys)
        return kestrel_attention.flash_attn_varlen_func(q, *stored, starts_q, starts_k, *most, **how)

    def torch_varlen(s, q, packed, stored, starts_q, starts_k, *_):
        if q.element_size() == 1:
            raise NotImplementedError("torch's kernel has no FP8")
        most = max(s.queries), max(s.keys)
        return torch.ops.aten._flash_attention_forward(q, *packed, starts_q, starts_k, *most, 0.0, True, False)[0]

    return {"kestrel": kestrel, "torch_varlen": torch_varlen}
