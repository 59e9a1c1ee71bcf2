"""What prefill_bf16.py, prefill_fp8kv.py and prefill_fp8.py share: all parts of a definition but the targets.

A name is "b<batch> s<tokens> <heads>/<KV heads> d<head size>", or "sq<queries> kv<keys>" for a chunk over a longer
cache; causal unless it says full. "p<page>": keys lie scattered over the pages of a cache; else they are dense. torch
has them dense at all times. "prefix", "softcap" and "w" (a window to the left) have a number behind them.
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

_NUMBERS = re.compile(r"\b(b|sq|s|kv|d|p|prefix|softcap|w)(\d+)\b")


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
    softcap: float
    window: int

    @classmethod
    def parse(cls, name: str) -> Shape:
        numbers = {word: int(n) for word, n in _NUMBERS.findall(name)}
        heads, kv_heads = map(int, re.findall(r"(\d+)/(\d+)", name)[0])
        queries = numbers.get("sq") or numbers["s"]
        optional = [numbers.get(word, default) for word, default in (("prefix", 0), ("softcap", 0), ("w", -1))]
        keys, page = numbers.get("kv", queries), numbers.get("p", 0)
        return cls(numbers["b"], queries, keys, heads, kv_heads, numbers["d"], page, "full" not in name, *optional)

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, of a sequence and head."""
        if not self.causal:
            return self.queries * self.keys
        first = self.keys - self.queries + 1  # keys up to query 0
        most = self.keys if self.window < 0 else self.window + 1
        return sum(max(min(first + i, most), self.prefix) for i in range(self.queries))


@dataclass(frozen=True)
class Dtypes:
    """What a benchmark stores its queries and its keys and values in, and the parts of a definition that follow."""

    queries: torch.dtype
    keys: torch.dtype

    def traffic(self, name: str) -> int:
        """Queries, keys and values once, results in bf16."""
        s = Shape.parse(name)
        queries = s.queries * s.heads * (self.queries.itemsize + 2)
        return s.batch * s.size * (queries + 2 * self.keys.itemsize * s.keys * s.kv_heads)

    def make(self, name: str, count: int) -> list[tuple[Any, ...]]:
        """Sets of (shape, q, keys and values dense in bf16, caches or dense, starts, lengths, table)."""
        s = Shape.parse(name)
        sets = []
        for _ in range(count):
            q = torch.randn(s.batch, s.queries, s.heads, s.size, dtype=torch.bfloat16, device="cuda").to(self.queries)
            stored, dense = [], []
            table = lengths = None
            if s.page:
                pages = -(-s.keys // s.page)
                table = torch.randperm(s.batch * pages, device="cuda").int().view(s.batch, pages)
                lengths = torch.full((s.batch,), s.keys, dtype=torch.int32, device="cuda")
            for _ in range(2):
                x = torch.randn(s.batch, s.keys, s.kv_heads, s.size, dtype=torch.bfloat16, device="cuda").to(self.keys)
                dense.append(x.bfloat16())
                if table is not None:
                    padded = torch.zeros(
                        s.batch, table.shape[1] * s.page, s.kv_heads, s.size, dtype=self.keys, device="cuda"
                    )
                    padded[:, : s.keys] = x
                    cache = torch.empty(table.numel(), s.page, s.kv_heads, s.size, dtype=self.keys, device="cuda")
                    of_integers = {1: torch.uint8, 2: torch.int16}[x.element_size()]
                    cache.view(of_integers)[table.long().flatten()] = padded.view(of_integers).view(cache.shape)
                    x = cache
                stored.append(x)
            starts = torch.arange(s.batch + 1, dtype=torch.int32, device="cuda") * s.queries
            sets.append((s, q, dense, stored, starts, lengths, table))
        return sets


def operations(name: str) -> int:
    s = Shape.parse(name)
    return 4 * s.batch * s.heads * s.size * s.visible


def result(_: tuple[Any, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(s, q, dense, stored, starts, lengths, table):
        how: dict[str, Any] = {"causal": s.causal, "window_size": (s.window, -1), "softcap": float(s.softcap)}
        how |= {"prefix_len": s.prefix or None}
        if table is None:
            return kestrel_attention.flash_attn_func(q, *stored, **how)
        if q.element_size() == 1:
            how |= {"block_table": table, "seqused_k": lengths}
            given = (*stored, starts, None, s.queries, s.keys)
            return kestrel_attention.flash_attn_varlen_func(q.flatten(0, 1), *given, **how).view(q.shape)
        return kestrel_attention.flash_attn_with_kvcache(q, *stored, cache_seqlens=lengths, block_table=table, **how)

    def torch_by(backend: SDPBackend) -> Callable[..., object]:
        def attend(s, q, dense, *_):
            if s.prefix or s.softcap or s.window >= 0 or q.element_size() == 1:
                raise NotImplementedError("torch's kernels have no prefix, soft cap, window or FP8")
            how: dict[str, Any] = {"is_causal": s.causal, "enable_gqa": s.heads != s.kv_heads}
            if s.causal and s.queries != s.keys:
                how |= {"is_causal": False, "attn_mask": causal_lower_right(s.queries, s.keys)}
            with sdpa_kernel(backend):
                q, k, v = (x.transpose(1, 2) for x in (q, *dense))
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

        return attend

    return {
        "kestrel": kestrel,
        "torch_flash": torch_by(SDPBackend.FLASH_ATTENTION),
        "torch_cudnn": torch_by(SDPBackend.CUDNN_ATTENTION),
    }
