"""Shapes of record of reshape_and_cache without a conversion, bf16: tokens x KV heads x head size. Targets in us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_write
import torch

TARGETS = {
    "1x32x64": 1.25,
    "8x32x64": 1.25,
    "64x32x64": 1.42,
    "256x32x64": 2.23,
    "1024x32x64": 5.45,
    "4096x32x64": 18.3,
}
set_bytes, bare, result = cache_write.set_bytes, cache_write.bare, cache_write.result


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    return cache_write.make(shape, count, torch.bfloat16, "auto", None, None)


def traffic(shape: str) -> int:
    return cache_write.traffic(shape, torch.bfloat16)


def operations(shape: str) -> int:
    return 0


def in_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: object,
) -> None:
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *rows.shape[1:])[slots] = rows


def candidates() -> dict[str, Callable[..., object]]:
    return cache_write.candidates(in_torch)
