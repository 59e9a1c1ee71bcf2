"""The decoder, written in ops of this library plus linear, gelu and embedding of torch.nn.functional."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kestrel_attention import flash_attn_varlen_func, flash_attn_with_kvcache, tau_tail
from kestrel_kvcache import reshape_and_cache
from kestrel_moe import fused_experts, fused_mlp, topk_softmax
from kestrel_norm import layer_norm
from kestrel_rope import build_cos_sin_cache, rotary_embedding

from .cache import PagedCache, PageTable
from .weights import Dense, Experts, Layer, Weights


@dataclasses.dataclass(frozen=True)
class Step:
    """Where the T tokens of one pass stand, on the device.

    positions: int64 [T]. slots: int32 [T], the cache slot of each. lengths: int32 [B], tokens of each sequence, these
    included. block_table: int32 [B, n]. starts: int32 [B + 1], which tokens belong to which sequence; None when each of
    B sequences has one (decoding). longest: the most new tokens of a sequence.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor
    block_table: Tensor
    starts: Tensor | None = None
    longest: int = 1

    @classmethod
    def prefill(cls, table: PageTable, counts: Sequence[int], before: Sequence[int] | None = None) -> Step:
        """`counts[b]` new tokens of sequence b behind the `before[b]` that are in the cache already."""
        device = table.block_table.device
        before = before or [0] * len(counts)
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, counts, strict=True)]).to(device)
        sequences = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        lengths = torch.tensor([b + n for b, n in zip(before, counts, strict=True)], dtype=torch.int32).to(device)
        slots = table.slots(sequences, positions)
        return cls(positions, slots, lengths, table.block_table, starts, max(counts))

    @classmethod
    def decode(cls, table: PageTable, positions: Tensor) -> Step:
        """One new token of each sequence, at these positions [B]. Reads nothing on the host."""
        sequences = torch.arange(len(positions), device=positions.device)
        return cls(positions, table.slots(sequences, positions), (positions + 1).int(), table.block_table)


class Decoder:
    """Token ids to logits, over a paged cache that it writes."""

    def __init__(self, weights: Weights, cache: PagedCache) -> None:
        config = weights.config
        self.config = config
        self.weights = weights
        self.cache = cache
        self.cos_sin = build_cos_sin_cache(
            config.rotary_size, config.context, config.rotary_base, device=weights.device
        )

    def __call__(self, tokens: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """Logits [T, V] of the tokens [T], or those of some rows only."""
        weights, eps = self.weights, self.config.eps
        x = F.embedding(tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            normed = layer_norm(x, layer.norm.weight, layer.norm.bias, eps)
            x = x + self._attention(index, layer, normed, step)
            if isinstance(layer.feed_forward, Dense):
                x = self._dense(layer.feed_forward, normed, x)
            else:
                x = x + self._experts(layer.feed_forward, normed)
        if rows is not None:
            x = x[rows]
        x = layer_norm(x, weights.norm.weight, weights.norm.bias, eps)
        return F.linear(x, weights.head.weight, weights.head.bias)

    def _attention(self, index: int, layer: Layer, normed: Tensor, step: Step) -> Tensor:
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
        qkv = F.linear(normed, layer.qkv.weight, layer.qkv.bias)
        token = F.linear(F.gelu(qkv), layer.tau.weight)
        tau_tail(qkv, token, layer.tau_table, step.positions, heads, size)
        q, k, v = qkv.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], dim=1)
        rotary_embedding(step.positions, q, k, size, self.cos_sin)

        keys, values, fp8 = self.cache.keys[index], self.cache.values[index], self.cache.fp8
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if fp8 else (None, None)
        reshape_and_cache(k, v, keys, values, step.slots, "fp8" if fp8 else "auto", k_scale, v_scale)
        if step.starts is None:
            attended = flash_attn_with_kvcache(
                q[:, None],
                keys,
                values,
                cache_seqlens=step.lengths,
                block_table=step.block_table,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        else:
            attended = flash_attn_varlen_func(
                q,
                keys,
                values,
                step.starts,
                None,
                step.longest,
                step.block_table.shape[1],
                causal=True,
                k_scale=k_scale,
                v_scale=v_scale,
                block_table=step.block_table,
                seqused_k=step.lengths,
            )
        assert isinstance(attended, Tensor)  # not a pair: its log-sum-exp was not asked for
        return F.linear(attended.reshape(len(q), heads * size), layer.out.weight, layer.out.bias)

    def _dense(self, dense: Dense, normed: Tensor, residual: Tensor) -> Tensor:
        return fused_mlp(normed, dense.up.weight, dense.up.bias, dense.down.weight, dense.down.bias, residual)

    def _experts(self, experts: Experts, normed: Tensor) -> Tensor:
        gating = F.linear(normed, experts.router.weight, experts.router.bias)
        weights, ids, _ = topk_softmax(gating, self.config.experts_per_token, renormalize=True)
        return fused_experts(
            normed, experts.w1, experts.w2, weights, ids, w1_scale=experts.w1_scale, w2_scale=experts.w2_scale
        )
