"""Attention of many new tokens: the prefill kernels where they support the call, else PyTorch's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel_attention import flash_attn_func, flash_attn_varlen_func
from kestrel_runtime import check

DTYPES = check.FLOATS
"""What the ops of this library compute in."""
_MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Packing:
    """The tokens of padded rows [B, S], packed.

    rows: int64 [T], their indices in B * S. starts: int32 [B + 1]. longest: tokens of the longest row.
    has_gaps: whether padding lies between tokens of a row.
    """

    rows: Tensor
    starts: Tensor
    longest: int
    has_gaps: bool

    @classmethod
    def of(cls, valid: Tensor) -> Packing:
        """valid: bool [B, S], False for padding. Synchronises: the host reads the lengths."""
        lengths = valid.sum(1)
        starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        runs = (valid & ~F.pad(valid[:, :-1], (1, 0))).sum(1)
        longest, most_runs = torch.stack([lengths.max(), runs.max()]).tolist()
        return cls(valid.flatten().nonzero()[:, 0], starts, longest, most_runs > 1)

    def pack(self, x: Tensor) -> Tensor:
        """[B, S, H, D] to [T, H, D]."""
        return x.reshape(-1, *x.shape[2:])[self.rows]

    def unpack(self, x: Tensor, like: Tensor) -> Tensor:
        """[T, H, D] to the shape of `like` [B, S, H, D], padding 0."""
        out = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
        out.view(-1, *x.shape[1:])[self.rows] = x
        return out


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores become weights. window: how many keys a query sees, itself included; None is all."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def arguments(self) -> dict[str, Any]:
        """As the ops of kestrel_attention take them."""
        left = -1 if self.window is None else self.window - 1
        return {
            "causal": True,
            "window_size": (left, -1),
            "softmax_scale": self.scale,
            "softcap": self.softcap or 0.0,
        }


def serves(query: Tensor, *keys: Tensor) -> bool:
    """Whether the ops of kestrel_attention run for this query [..., D] over these keys and values.

    On a GPU they run where a kernel covers the case: PyTorch's attention is faster than a reference. On a CPU they run
    always.
    """
    if any(x.requires_grad for x in (query, *keys)) or query.dtype not in DTYPES:
        return False
    if not query.is_cuda:
        return True
    unit = 8 if all(x.dtype == query.dtype for x in keys) else 16  # dimensions: 16 bytes, of FP8 keys too
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return is_half and query.shape[-1] % unit == 0 and query.shape[-1] <= _MAX_HEAD_DIM


def causal_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing | None, scores: Scores) -> Tensor:
    """Causal attention of q [B, S, H, D] over k, v [B, K, Hk, D], the last query at the last key; [B, S, H, D].

    packing: the tokens that are not padding, for K = S; None: all.
    """
    if packing is None:
        out = flash_attn_func(query, key, value, **scores.arguments())
        assert isinstance(out, Tensor)
        return out
    q, k, v = (packing.pack(x) for x in (query, key, value))
    starts, longest = packing.starts, packing.longest
    out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **scores.arguments())
    assert isinstance(out, Tensor)
    return packing.unpack(out, query)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores, *, causal: bool = True
) -> Tensor:
    """PyTorch's attention of query [B, H, q, D] over key, value [B, Hk, k, D]; returns [B, q, H, D].

    visible: bool or additive, broadcast to [B, H, q, k], window included; None: causal (from the first key on) if there
    are several queries and `causal` says so, else everything.
    """
    groups = query.shape[1] // key.shape[1]
    if scores.softcap:
        return attention_with_weights(query, key, value, visible, scores, causal=causal)[0]
    causal = causal and visible is None and query.shape[2] > 1
    if groups > 1 and (visible is not None or not query.is_cuda or query.shape[-1] > 256):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    if causal and key.shape[2] > query.shape[2]:  # the rest of a static cache is empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scores.scale, is_causal=causal, enable_gqa=groups > 1
    )
    return out.transpose(1, 2).contiguous()


def attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores, *, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """As `dense_attention`, with softcap, and the weights [B, H, q, k]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    products = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap:
        products = (products / scores.softcap).tanh() * scores.softcap
    if causal and visible is None and query.shape[2] > 1:
        visible = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).tril()
    if visible is not None:
        if visible.dtype == torch.bool:
            least = max(torch.finfo(products.dtype).min, torch.finfo(torch.float32).min)  # finite in the softmax
            products = products.masked_fill(~visible, least)
        else:
            products = products + visible
    weights = products.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights
