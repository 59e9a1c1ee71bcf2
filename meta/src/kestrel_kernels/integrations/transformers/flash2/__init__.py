"""flash-attn's functions as transformers' continuous batching calls them: a local kernel (../batching.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kestrel_attention import flash_attn_func as _dense
from kestrel_attention import flash_attn_varlen_func as _packed
from kestrel_attention import flash_attn_with_kvcache as _cached

_QUERIES, _KEYS = 256, 4096
"""Bounds of lengths are rounded up to multiples of these, so that calls of many lengths share few plans."""


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
    """q [B, Sq, H, D], k and v [B, Sk, Hk, D]; returns [B, Sq, H, D]."""
    return _tensor(_dense(q, k, v, **_options(dropout_p, options)))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:
    """q [T, H, D], k and v [Tk, Hk, D], packed; returns [T, H, D]. Rows past the last sequence are 0."""
    bounds = -(-int(max_seqlen_q) // _QUERIES) * _QUERIES, -(-int(max_seqlen_k) // _KEYS) * _KEYS
    return _tensor(_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds, **_options(dropout_p, options)))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """q [B, Sq, H, D] over pages [blocks, P, Hk, D], after k and v are stored; returns [B, Sq, H, D].

    A sequence of length -1 is padding: nothing is stored for it, and it gives 0.
    """
    assert cache_seqlens is not None
    given = {"cache_seqlens": cache_seqlens.to(torch.int32), "block_table": block_table, **_options(0.0, options)}
    return _tensor(_cached(q, k_cache, v_cache, k, v, **given))


def _options(dropout: float, given: dict[str, Any]) -> dict[str, Any]:
    """The options of kestrel_attention; a setting that it does not have must be at its default."""
    if dropout:
        raise ValueError(f"kestrel-flash2: dropout_p: expected 0 (an inference library), got {dropout}")
    renamed = {"sinks" if name == "s_aux" else name: value for name, value in given.items() if value is not None}
    known = {"softmax_scale", "causal", "window_size", "softcap", "sinks"}
    others = {name: value for name, value in renamed.items() if name not in known}
    if unknown := sorted(name for name, value in others.items() if isinstance(value, Tensor) or value):
        raise ValueError(f"kestrel-flash2: expected {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return {name: value for name, value in renamed.items() if name in known}


def _tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found
