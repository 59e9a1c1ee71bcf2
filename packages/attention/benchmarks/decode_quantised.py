"""Decoding over INT8 and INT4 caches, beside the bf16 cache of the same length; see decode_shapes.py. us on one H200.

A name is "int8 " or "int4 " and one of decode_shapes.py; a set holds the bf16 cache too. The targets are what bf16 is
to reach with the same shape, 34.8 us, over 1.7 and 2.6.
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

TARGETS: dict[str, float | None] = {
    "int8 b8 kv4096 32/8 d128 p16": 20.5,
    "int4 b8 kv4096 32/8 d128 p64": 13.4,
    "int8 b1 kv740 32/32 d64 p1": None,
    "int4 b1 kv740 32/32 d64 p64": None,
    "int8 b64 kv8192 32/8 d128 p16": None,
    "int4 b64 kv8192 32/8 d128 p64": None,
    "int8 b1 kv32768 32/4 d128 p16": None,
    "int4 b1 kv32768 32/4 d128 p64": None,
}
PAGE = 64  # of an INT4 cache


def parse(name: str) -> tuple[str, Shape]:
    kind, shape = name.split(" ", 1)
    return kind, Shape.parse(shape)


def make(name: str, count: int) -> list[tuple[Any, ...]]:
    """Sets of decode_shapes.py over bf16, each with the arguments of the quantised cache instead of K and V."""
    kind, shape = parse(name)
    sets = []
    for q, k_cache, v_cache, lengths, table, _, out in decode_shapes.make(shape, count, torch.bfloat16):
        dtype, width = (torch.int8, shape.size) if kind == "int8" else (torch.uint8, shape.size // 2)
        low, high = (-127, 128) if kind == "int8" else (0, 256)
        k_codes, v_codes = torch.randint(low, high, (2, *k_cache.shape[:3], width), dtype=dtype, device="cuda")
        of_tokens = k_cache.shape[:3]
        if kind == "int8":
            scales = torch.rand(2, *of_tokens, device="cuda") / 32
            more = {"k_scale": scales[0], "v_scale": scales[1]}
        else:
            of_channels = (k_cache.shape[0], shape.kv_heads, shape.size)
            more = {f"k_{what}": torch.rand(of_channels, device="cuda").half() for what in ("scale", "zero")}
            more |= {f"v_{what}": torch.rand(of_tokens, device="cuda").half() for what in ("scale", "zero")}
            tail = (shape.batch, PAGE, shape.kv_heads, shape.size)
            more["k_tail"] = torch.randn(tail, device="cuda").bfloat16()
            more["seq_ids"] = torch.arange(shape.batch, dtype=torch.int32, device="cuda")
        sets.append((q, k_cache, v_cache, lengths, table, {"k_cache": k_codes, "v_cache": v_codes, **more}, out))
    return sets


def set_bytes(name: str) -> int:
    """Of what the quantised candidate reads; the other reads more."""
    return traffic(name)


def traffic(name: str) -> int:
    kind, shape = parse(name)
    rest = shape.traffic(0)
    heads = shape.batch * shape.visited * shape.kv_heads
    if kind == "int8":
        return rest + 2 * heads * (shape.size + 4)
    return rest + heads * (shape.size + 4) + heads // PAGE * 4 * shape.size


def operations(name: str) -> int:
    return parse(name)[1].operations()


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(q, k_cache, v_cache, lengths, table, quantised, out):
        return kestrel_attention.flash_attn_with_kvcache(
            q, **quantised, cache_seqlens=lengths, block_table=table, causal=True
        )

    def bf16(q, k_cache, v_cache, lengths, table, quantised, out):
        return kestrel_attention.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True
        )

    return {"kestrel": kestrel, "kestrel over bf16": bf16}
