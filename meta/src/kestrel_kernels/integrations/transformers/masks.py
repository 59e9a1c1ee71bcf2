"""The attention function and the mask function that transformers' registries get under the name "kestrel"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "kestrel"


class Mask:
    """What transformers says about visibility in one forward pass. It becomes a dense mask only where one is needed.

    rows: bool [B, keys], False for padding; None if there is none.
    """

    def __init__(self, rows: Tensor | None, arguments: dict[str, Any]) -> None:
        self.rows = rows
        self._arguments = arguments
        self._dense: Tensor | None = None
        self._is_built = False

    @property
    def is_causal(self) -> bool:
        """Whether besides padding and a window only causality counts: no packed sequences, no blocks of images."""
        return bool(self._arguments.get("allow_is_causal_skip", True))

    def dense(self) -> Tensor | None:
        """Bool [B, 1, queries, keys]; None if it is plainly causal."""
        from transformers.masking_utils import sdpa_mask

        if not self._is_built:
            self._dense, self._is_built = sdpa_mask(**self._arguments), True
        return self._dense


def make_mask(**arguments: Any) -> Mask:
    """The mask function: keeps its arguments."""
    return Mask(arguments.get("attention_mask"), arguments)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scale: float | None,
    softcap: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of query [B, H, q, D] over key, value [B, Hk, k, D]; returns [B, q, H, D].

    visible: bool or additive, broadcast to [B, H, q, k]; None: causal (from the first key on) if there are several
    queries and `causal` says so, else everything.
    """
    groups = query.shape[1] // key.shape[1]
    causal = causal and visible is None and query.shape[2] > 1
    if not softcap:
        if groups > 1 and (visible is not None or not query.is_cuda or query.shape[-1] > 256):
            key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
        if causal and key.shape[2] > query.shape[2]:  # the rest of a static cache is empty
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, is_causal=causal, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous()
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores / softcap).tanh() * softcap
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if visible is not None:
        if visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        else:
            scores = scores + visible
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: over a KestrelCache's pages in place, else dense as transformers' "sdpa" does it.

    query: [B, H, q, D]; key, value: [B, Hk, k, D]. Returns ([B, q, H, D], None).
    """
    if s_aux is not None:
        raise ValueError("kestrel attention: s_aux: expected None, got attention sinks")
    if dropout:
        raise ValueError(f"kestrel attention: dropout: expected 0 (an inference library), got {dropout}")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    layer = getattr(key, "_kestrel_layer", None)
    if layer is None:
        visible = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
        return dense_attention(query, key, value, visible, scale=scaling, softcap=softcap, causal=is_causal), None
    if not is_causal:
        raise ValueError("kestrel attention: is_causal: expected True with a KestrelCache, got False")
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            "kestrel attention: attention_mask: expected a padding mask [B, keys] with a KestrelCache, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    options = {"scale": scaling, "window": sliding_window, "softcap": softcap}
    return layer.attend(query, key, value, attention_mask, **options), None


def register() -> None:
    """Enter both functions into transformers' registries. Nothing uses them before a model's config names them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
