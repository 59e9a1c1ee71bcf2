"""What the definitions of the cache writers share: tokens x KV heads x head size, bf16 rows, pages of one slot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import kestrel_kvcache
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled, peer


def sizes(shape: str) -> tuple[int, int, int]:
    tokens, heads, size = map(int, shape.split("x"))
    return tokens, heads, size


def make(shape: str, count: int, dtype: torch.dtype, *how: object) -> list[tuple[Any, ...]]:
    """Sets of random rows and distinct slots, in random order, of two caches that all sets share."""
    tokens, heads, size = sizes(shape)
    caches = torch.zeros(2, count * tokens, 1, heads, size, dtype=dtype, device="cuda")
    slots = torch.randperm(count * tokens, device="cuda").view(count, tokens)
    rows = (torch.randn(2, tokens, heads, size, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(*pair, *caches, one.clone(), *how) for pair, one in zip(rows, slots, strict=True)]


def set_bytes(shape: str) -> int:
    """Bytes of keys and values alone, so that they are cold whatever is written."""
    return 2 * math.prod(sizes(shape)) * 2


def traffic(shape: str, dtype: torch.dtype) -> int:
    return set_bytes(shape) + 2 * math.prod(sizes(shape)) * dtype.itemsize + 8 * sizes(shape)[0]


def candidates(in_torch: Callable[..., None]) -> dict[str, Callable[..., object]]:
    found = {
        "kestrel": kestrel_kvcache.reshape_and_cache,
        "torch": in_torch,
        "torch.compile": compiled(in_torch, fullgraph=True, dynamic=False),
    }
    ops = peer("vllm._custom_ops")
    if ops is None:
        return found
    one = torch.ones(1, device="cuda")

    def vllm(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        kind: str,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        scales = (one if scale is None else scale for scale in (k_scale, v_scale))
        ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, *scales)

    return found | {"vllm": vllm}


def result(arguments: tuple[Any, ...], returned: None) -> list[torch.Tensor]:
    """The contents of the written slots. FP8 codes of two implementations may differ by one."""
    caches, slots, kind = arguments[2:4], arguments[4], arguments[5]
    rows = [cache.flatten(0, 1)[slots] for cache in caches]
    return rows if kind == "auto" else [one.view(torch.float8_e4m3fn).float() for one in rows]


def bare() -> Callable[..., object]:
    return Binary("kestrel_kvcache").reshape_and_cache
