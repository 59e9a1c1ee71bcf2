"""Arguments that the attention ops share: the public forms made simple, and their checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel_runtime import check

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def window(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """The two ends of a window."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        check.fail(op, "window_size", "a pair (left, right)", repr(window_size), TypeError)
    return left, right


def prefix(op: str, prefix_len: torch.Tensor | int | None) -> tuple[int, torch.Tensor | None]:
    """A prefix for all sequences, or one for each."""
    if prefix_len is None:
        return 0, None
    if isinstance(prefix_len, torch.Tensor):
        return 0, prefix_len
    if isinstance(prefix_len, (int, torch.SymInt)):
        return prefix_len, None  # type: ignore[return-value]
    check.fail(op, "prefix_len", "an integer, a tensor or None", type(prefix_len).__name__, TypeError)


def check_scores(
    op: str,
    batch: int,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
) -> None:
    """What shapes the scores."""
    if softmax_scale is not None:
        check.number(op, "softmax_scale", softmax_scale)
    check.number(op, "window_size", window_left, integer=True, minimum=-1)
    check.number(op, "window_size", window_right, integer=True, minimum=-1)
    check.number(op, "softcap", softcap, minimum=0.0)
    check.number(op, "prefix_len", prefix_len, integer=True, minimum=0)
    if prefix_lens is not None:
        check.tensor(op, "prefix_len", prefix_lens, dtype=torch.int32, ndim=1)
        check.shape(op, "prefix_len", prefix_lens, (batch,))


def check_groups(op: str, q: torch.Tensor, kv_heads: int) -> None:
    """The query heads fall into equal groups, one per KV head; a head has at least one dimension."""
    heads, size = q.shape[-2:]
    if size < 1:
        check.fail(op, "q", "a head size >= 1", size)
    if kv_heads < 1 or heads % kv_heads:
        check.fail(op, "q", f"a number of heads that is a multiple of the {kv_heads} KV heads", heads)


def check_scale(op: str, name: str, scale: torch.Tensor | None, x: torch.Tensor, heads: int) -> None:
    """A scale is None, or float32 [1] or [heads] with an FP8 tensor."""
    if scale is None:
        return
    if x.element_size() != 1:
        check.fail(op, name, f"None with {str(x.dtype).removeprefix('torch.')} (nothing to scale)", "a tensor")
    check.tensor(op, name, scale, dtype=torch.float32, ndim=1)
    if scale.shape[0] not in (1, heads):
        check.fail(op, name, f"shape (1,) or ({heads},)", f"({scale.shape[0]},)")


def check_cache(
    op: str,
    names: tuple[str, str],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q: torch.Tensor,
    block_table: torch.Tensor | None,
    batch: int,
) -> None:
    """k and v are caches [blocks, P, Hk, D] of one dtype: that of q, or FP8 (uint8 is e4m3)."""
    allowed = (q.dtype, *FP8, torch.uint8)
    for name, cache in zip(names, (k_cache, v_cache), strict=True):
        check.tensor(op, name, cache, dtype=allowed, ndim=4, last_contiguous=True)
    check.shape(op, names[0], k_cache, (None, None, None, q.shape[-1]))
    check.shape(op, names[1], v_cache, k_cache.shape)
    check.same(op, "dtype", **{names[0]: k_cache, names[1]: v_cache})
    check_groups(op, q, k_cache.shape[2])
    if block_table is not None:
        check.tensor(op, "block_table", block_table, dtype=torch.int32, ndim=2)
        check.shape(op, "block_table", block_table, (batch, None))
    elif k_cache.shape[0] != batch:
        expected = f"{batch} blocks, one per sequence, as block_table is None"
        check.fail(op, names[0], expected, k_cache.shape[0])
