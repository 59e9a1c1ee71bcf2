"""Attention over a KV cache, paged or contiguous: decoding, and prefill on top of what is cached."""

from __future__ import annotations

import torch

from kestrel_runtime import check, kernel_op

from . import arguments, reference

_OP = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    prefix_len: torch.Tensor | int | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys and values of a cache; with k and v, first append these to it, in place.

    B sequences, Sq queries each, H query heads, Hk KV heads (H a multiple of Hk), head size D, pages of P slots.

    q: [B, Sq, H, D], bf16, fp16 or float32.
    k_cache, v_cache: [blocks, P, Hk, D] with strides as in kestrel_kvcache (only the last dimension contiguous);
        without block_table [B, S, Hk, D]. Of q's dtype, or FP8: float8_e4m3fn, float8_e5m2, or uint8 (read as e4m3).
    k, v: [B, Sq, Hk, D] of q's dtype, both or none. They are stored at positions cache_seqlens ..
        cache_seqlens + Sq - 1 (FP8: as k / k_scale, rounded to nearest even, saturating) and attended to as stored;
        k_cache and v_cache are then written in place. A position without a page is skipped.
    cache_seqlens: int32 [B], on the device: keys in the cache before k and v. Zero is legal; a negative length is
        padding: nothing is written, the output is 0 and its LSE -inf.
    block_table: int32 [B, n]: sequence b's keys p*P .. p*P + P - 1 lie in block block_table[b, p]. A negative entry, or
        one past the end of the cache, is no page: its keys do not exist. None: block b belongs to sequence b.
    k_scale, v_scale: float32 [1] or [Hk], on the device, for FP8 (value = code * scale); None is 1.
    softmax_scale: default D ** -0.5.
    causal, window_size: with L keys (k included), query i stands at key position p = L - Sq + i. causal keeps keys
        <= p; window (left, right) keeps p - left .. p + right, -1 is unbounded.
    softcap: scores become softcap * tanh(scores / softcap); 0 is off.
    prefix_len: an int or int32 [B]; keys below it are visible to all queries whatever causal and window say.
    num_splits: into how many parts a kernel may split a sequence; 0: chosen from each length. Changes rounding only.
    return_lse: also return the natural log of the sum of exponentials, float32 [B, H, Sq].

    Returns out [B, Sq, H, D] in q's dtype, or (out, lse). Accumulation in float32, one rounding. A query that sees no
    key gives 0 and LSE -inf. What unused slots and table entries hold has no effect, NaN included; a NaN or inf in a
    value that the sequence does hold may reach all queries of that sequence and KV head, masked or not.
    Kernels are for D in 64, 72, 80, 96, 128, 192, 256, 512; other D run by reference.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device.
    Semantics: ``flash_attn_with_kvcache`` of flash-attn.

    >>> import torch, kestrel_attention
    >>> cache = torch.zeros(2, 3, 1, 1, 4)  # K and V: 3 pages of 1 slot, 1 head of 4
    >>> table = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> row = torch.ones(1, 1, 1, 4)
    >>> kestrel_attention.flash_attn_with_kvcache(
    ...     row, cache[0], cache[1], row, 3 * row,
    ...     cache_seqlens=torch.tensor([1], dtype=torch.int32), block_table=table, softmax_scale=0.0)
    tensor([[[[1.5000, 1.5000, 1.5000, 1.5000]]]])
    >>> cache[1, :, 0, 0, 0]  # the new value is in page 0, the second of the sequence
    tensor([3., 0., 0.])
    """
    left, right = arguments.window(_OP, window_size)
    length, lengths = arguments.prefix(_OP, prefix_len)
    scores = (softmax_scale, causal, left, right, softcap, length, lengths, num_splits)
    if k is None and v is None:
        out, lse = _flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, k_scale, v_scale, *scores)
    else:
        for name, x in (("k", k), ("v", v)):
            if x is None:
                check.fail(_OP, name, "a tensor, as k and v are appended together", "None", TypeError)
        out, lse = _flash_attn_with_kvcache_append(
            q, k_cache, v_cache, k, v, cache_seqlens, block_table, k_scale, v_scale, *scores
        )
    return (out, lse) if return_lse else out


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    num_splits: int,
) -> None:
    check.tensor(_OP, "q", q, dtype=check.FLOATS, ndim=4, last_contiguous=True)
    batch = q.shape[0]
    arguments.check_cache(_OP, ("k_cache", "v_cache"), k_cache, v_cache, q, block_table, batch)
    check.tensor(_OP, "cache_seqlens", cache_seqlens, dtype=torch.int32, ndim=1)
    check.shape(_OP, "cache_seqlens", cache_seqlens, (batch,))
    arguments.check_scale(_OP, "k_scale", k_scale, k_cache, k_cache.shape[2])
    arguments.check_scale(_OP, "v_scale", v_scale, v_cache, v_cache.shape[2])
    arguments.check_scores(_OP, batch, softmax_scale, window_left, window_right, softcap, prefix_len, prefix_lens)
    check.number(_OP, "num_splits", num_splits, integer=True, minimum=0)
    given = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "block_table": block_table}
    check.same(_OP, "device", q=q, **given, k_scale=k_scale, v_scale=v_scale, prefix_len=prefix_lens)


def _check_append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: object,
) -> None:
    _check(q, k_cache, v_cache, *rest)  # type: ignore[arg-type]
    for name, x in (("k", k), ("v", v)):
        check.tensor(_OP, name, x, dtype=check.FLOATS, ndim=4, last_contiguous=True)
        check.shape(_OP, name, x, (*q.shape[:2], k_cache.shape[2], q.shape[3]))
    check.same(_OP, "dtype", q=q, k=k, v=v)
    check.same(_OP, "device", q=q, k=k, v=v)


@kernel_op(reference=reference.flash_attn_with_kvcache, check=_check, shape=reference.padded_shapes)
def _flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_with_kvcache` that only reads the cache: (out, lse)."""


@kernel_op(
    reference=reference.flash_attn_with_kvcache_append,
    check=_check_append,
    shape=reference.padded_shapes,
    mutates=("k_cache", "v_cache"),
)
def _flash_attn_with_kvcache_append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_with_kvcache` that first appends k and v to the cache, in place: (out, lse)."""
