"""The attention function and the mask function that transformers' registries get under the name "kestrel"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .prompts import Packing, Scores, attention_with_weights, causal_attention, dense_attention, serves

NAME = "kestrel"


class Mask:
    """What transformers says about visibility in one forward pass. It becomes a dense mask only where one is needed.

    rows: bool [B, keys], False for padding; None if there is none.
    """

    ndim = 4
    """As of a dense mask: transformers' `generate` reads it, and calls `contiguous`, for masks that it makes ahead."""

    def __init__(self, rows: Tensor | None, arguments: dict[str, Any]) -> None:
        self.rows = rows
        self._arguments = arguments
        self._dense: Tensor | None = None
        self._is_built = False
        self._packing: Packing | None = None
        self._packing_of: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether besides padding and a window only causality counts: no packed sequences, no blocks of images."""
        return bool(self._arguments.get("allow_is_causal_skip", True))

    def is_first_prompt(self, count: int, window: int | None) -> bool:
        """Whether `count` tokens, several, see each other causally and nothing else, padding aside.

        transformers counts padding in a window; kernels see packed tokens, so gaps between tokens need the dense mask.
        """
        offsets = [self._arguments.get(name, 0) for name in ("q_offset", "kv_offset")]
        if count == 1 or not self.is_causal or not all(isinstance(offset, int) and offset == 0 for offset in offsets):
            return False
        if self.rows is None:
            return True
        if torch.compiler.is_compiling():  # packing reads the mask
            return False
        packing = self.packing(count)
        return packing is None or not packing.has_gaps or window is None or window >= count

    def contiguous(self) -> Mask:
        return self

    def packing(self, count: int) -> Packing | None:
        """The first `count` tokens that are not padding; None if there is no padding. Reads the mask once."""
        if self._packing_of != count:
            valid = None if self.rows is None else self.rows[:, :count]
            self._packing = None if valid is None or bool(valid.all()) else Packing.of(valid)
            self._packing_of = count
        return self._packing

    def dense(self) -> Tensor | None:
        """Bool [B, 1, queries, keys]; None if it is plainly causal."""
        from transformers.masking_utils import sdpa_mask

        if not self._is_built:
            self._dense, self._is_built = sdpa_mask(**self._arguments), True
        return self._dense


def make_mask(**arguments: Any) -> Mask | Tensor | None:
    """The mask function: keeps its arguments. Of a static cache, which counts on the device, a dense mask."""
    made = arguments.get("attention_mask")
    if isinstance(made, Mask):
        return made
    if isinstance(arguments.get("q_offset"), Tensor):
        from transformers.masking_utils import sdpa_mask

        dense: Tensor | None = sdpa_mask(**arguments)
        return dense
    return Mask(made, arguments)


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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: over a KestrelCache's pages in place, else dense as transformers' "sdpa" does it.

    query: [B, H, q, D]; key, value: [B, Hk, k, D]. Returns [B, q, H, D], and None or, where the model is asked for
    attentions, the weights [B, H, q, k].
    """
    layer = getattr(key, "_kestrel_layer", None)
    if layer is not None:
        layer.pending = False  # this call serves it or raises
    if s_aux is not None:
        raise ValueError("kestrel attention: s_aux: expected None, got attention sinks")
    if position_bias is not None:
        raise ValueError("kestrel attention: position_bias: expected None, got a bias of scores")
    if dropout:
        raise ValueError(f"kestrel attention: dropout: expected 0 (an inference library), got {dropout}")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scores = Scores(scaling, sliding_window, softcap)
    if wants_weights(module, kwargs):
        if layer is not None:
            raise ValueError("kestrel attention: output_attentions: expected False with a KestrelCache, got True")
        visible = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
        return attention_with_weights(query, key, value, visible, scores, causal=is_causal)
    if layer is None:
        if not isinstance(attention_mask, Mask):
            return dense_attention(query, key, value, attention_mask, scores, causal=is_causal), None
        count = query.shape[2]
        if is_causal and serves(query, key, value) and attention_mask.is_first_prompt(count, scores.window):
            q, k, v = (x[:, :, :count].transpose(1, 2) for x in (query, key, value))
            return causal_attention(q, k, v, attention_mask.packing(count), scores), None
        return dense_attention(query, key, value, attention_mask.dense(), scores, causal=is_causal), None
    if not is_causal:
        raise ValueError("kestrel attention: is_causal: expected True with a KestrelCache, got False")
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            "kestrel attention: attention_mask: expected a padding mask [B, keys] with a KestrelCache, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    return layer.attend(query, key, value, attention_mask, scores), None


def wants_weights(module: Any, arguments: dict[str, Any]) -> bool:
    """Whether a forward pass is asked for attention weights, by its arguments or the model's config."""
    return bool(arguments.get("output_attentions", getattr(module.config, "output_attentions", False)))


def register() -> None:
    """Enter both functions into transformers' registries. Nothing uses them before a model's config names them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
