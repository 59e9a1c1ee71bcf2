"""Checks that the cache ops share."""

from __future__ import annotations

import torch

from kestrel_runtime import check
from kestrel_runtime.paged_cache import FP8_OF_NAME


def check_slots(op: str, slot_mapping: torch.Tensor, rows: int) -> None:
    """slot_mapping is [T] with T <= rows."""
    check.tensor(op, "slot_mapping", slot_mapping, dtype=check.INTEGERS, ndim=1, last_contiguous=True)
    if slot_mapping.shape[0] > rows:
        check.fail(op, "slot_mapping", f"at most {rows} slots, one per row of key", slot_mapping.shape[0])


def check_rows(op: str, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """key and value are [T', Hk, D] of one dtype, slot_mapping is [T] with T <= T'."""
    check.tensor(op, "key", key, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check.tensor(op, "value", value, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check.shape(op, "value", value, key.shape)
    check.same(op, "dtype", key=key, value=value)
    check_slots(op, slot_mapping, key.shape[0])


def check_pair(
    op: str,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    heads: int | None = None,
    width: int | None = None,
) -> torch.Size:
    """Both caches are [blocks, P, heads, width] of one dtype, P >= 1. Returns their shape."""
    check.tensor(op, "key_cache", key_cache, dtype=dtype, ndim=4, last_contiguous=True)
    check.tensor(op, "value_cache", value_cache, dtype=dtype, ndim=4, last_contiguous=True)
    check.shape(op, "key_cache", key_cache, (None, None, heads, width))
    if key_cache.shape[1] < 1:
        check.fail(op, "key_cache", "a page size >= 1", key_cache.shape[1])
    check.shape(op, "value_cache", value_cache, key_cache.shape)
    check.same(op, "dtype", key_cache=key_cache, value_cache=value_cache)
    return key_cache.shape


def check_written(op: str, **tensors: torch.Tensor) -> None:
    """No two elements of a written tensor share memory. Tensors are given by their argument names."""
    for name, x in tensors.items():
        check.disjoint(op, name, x)


def check_scale(op: str, name: str, scale: torch.Tensor | None, heads: int) -> None:
    """A scale is None, or float32 [1] or [Hk]."""
    if scale is None:
        return
    check.tensor(op, name, scale, dtype=torch.float32, ndim=1, last_contiguous=True)
    if scale.shape[0] not in (1, heads):
        check.fail(op, name, f"shape (1,) or ({heads},)", f"({scale.shape[0]},)")


def check_store(
    op: str,
    dtype: torch.dtype,
    heads: int,
    size: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Caches, to be written, of the format that kv_cache_dtype names, for rows of this dtype."""
    check.choice(op, "kv_cache_dtype", kv_cache_dtype, ("auto", *FP8_OF_NAME))
    allowed = (dtype,) if kv_cache_dtype == "auto" else (torch.uint8, FP8_OF_NAME[kv_cache_dtype])
    check_pair(op, key_cache, value_cache, allowed, heads, size)
    check_written(op, key_cache=key_cache, value_cache=value_cache)
    check_scale(op, "k_scale", k_scale, heads)
    check_scale(op, "v_scale", v_scale, heads)


def check_int8(op: str, shape: torch.Size, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Scales of an INT8 cache of this shape: float32, one per token and head."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check.tensor(op, name, scale, dtype=torch.float32, ndim=3, last_contiguous=True)
        check.shape(op, name, scale, shape[:3])


def check_int4(
    op: str,
    shape: torch.Size,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    k_scale: torch.Tensor | None,
    k_zero: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    k_tail: torch.Tensor | None,
) -> None:
    """Scales, zeros and tail (of this dtype) of an INT4 cache of this shape, [blocks, P, Hk, D/2]."""
    blocks, page, heads, half = shape
    for name, x in (("k_scale", k_scale), ("k_zero", k_zero)):
        check.tensor(op, name, x, dtype=torch.float16, ndim=3, last_contiguous=True)
        check.shape(op, name, x, (blocks, heads, 2 * half))
    for name, x in (("v_scale", v_scale), ("v_zero", v_zero)):
        check.tensor(op, name, x, dtype=torch.float16, ndim=3, last_contiguous=True)
        check.shape(op, name, x, (blocks, page, heads))
    check.tensor(op, "k_tail", k_tail, dtype=dtype, ndim=4, last_contiguous=True)
    check.shape(op, "k_tail", k_tail, (None, page, heads, 2 * half))
