"""The decoder, written in ops of this library plus linear, gelu and embedding of torch.nn.functional.

A layer computes x + attention(norm(x)) + feed_forward(norm(x)). Attention runs beside the feed-forward in a CUDA graph.
The linear layer after attention adds the residual; what routed experts return is added by the norm of the next layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kestrel_attention import flash_attn_varlen_func, flash_attn_with_kvcache, tau_tail
from kestrel_moe import fused_experts, fused_linear_residual, fused_mlp, gemv, topk_softmax
from kestrel_norm import fused_add_layer_norm, layer_norm
from kestrel_quant import W4Weight, w4a16_linear
from kestrel_rope import build_cos_sin_cache

from ..graphs import Beside
from .cache import PagedCache, PageTable
from .stores import Store
from .weights import Dense, Experts, Layer, Linear, Norm, Weights


@dataclasses.dataclass(frozen=True)
class Step:
    """The places of the T tokens of one pass, on the device, sequence after sequence.

    positions: int64 [T]. slots: int32 [T], the cache slot of each. numbers: int32 [T], the id of its sequence.
    lengths, sequences: int32 [B], tokens of each sequence including these, and its id. block_table: int32 [B, n].
    counts: the number of tokens of each sequence. starts: int32 [B + 1], the first token of each sequence in a prefill;
    None for decoding, where all counts are equal. table: of decoding.
    """

    positions: Tensor
    slots: Tensor
    numbers: Tensor
    lengths: Tensor
    sequences: Tensor
    block_table: Tensor
    counts: Sequence[int]
    starts: Tensor | None = None
    table: PageTable | None = None

    @classmethod
    def prefill(cls, table: PageTable, counts: Sequence[int], before: Sequence[int] | None = None) -> Step:
        """`counts[b]` new tokens of sequence b, after `before[b]` tokens in the cache."""
        device = table.block_table.device
        before = before or [0] * len(counts)
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, counts, strict=True)]).to(device)
        sequences = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        lengths = torch.tensor([b + n for b, n in zip(before, counts, strict=True)], dtype=torch.int32).to(device)
        slots, numbers = table.slots(sequences, positions), table.numbers[sequences]
        return cls(positions, slots, numbers, lengths, table.numbers, table.block_table, tuple(counts), starts)

    @classmethod
    def decode(cls, table: PageTable, positions: Tensor) -> Step:
        """The next token of each sequence at positions [B], or the next n tokens at [B, n]. Never reads on the host."""
        batch, each = positions.shape[0], positions[0].numel()
        lengths = (positions.view(batch, each)[:, -1] + 1).int()
        positions, sequences, numbers = positions.flatten(), table.sequences, table.numbers
        if each > 1:
            sequences, numbers = sequences.repeat_interleave(each), numbers.repeat_interleave(each)
        slots = table.slots(sequences, positions)
        return cls(positions, slots, numbers, lengths, table.numbers, table.block_table, (each,) * batch, table=table)

    def advance(self) -> None:
        """Move a step of one new token per sequence to the next position, in place.

        After the last position of the cache, slots stay those of that position, so that an unused step is harmless.
        """
        table = self.table
        assert table is not None
        assert set(self.counts) == {1}
        self.positions.add_(1)
        self.lengths.add_(1)
        self.slots.copy_(table.slots(table.sequences, self.positions.clamp(max=table.capacity - 1)))


def linear(x: Tensor, layer: Linear) -> Tensor:
    """A linear layer; on a GPU one token runs gemv."""
    if isinstance(layer.weight, W4Weight):
        return w4a16_linear(x, layer.weight, layer.bias)
    product = gemv if x.is_cuda and x.shape[0] == 1 else F.linear
    return product(x, layer.weight, layer.bias)


def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> Tensor:
    return fused_linear_residual(x, layer.weight, layer.bias, residual)


def mlp_residual(x: Tensor, dense: Dense, residual: Tensor) -> Tensor:
    up, down = dense.up, dense.down
    if isinstance(up.weight, W4Weight) or isinstance(down.weight, W4Weight):
        return linear_residual(F.gelu(linear(x, up), approximate="tanh"), down, residual)
    return fused_mlp(x, up.weight, up.bias, down.weight, down.bias, residual)


class Decoder:
    """Token ids to logits; writes the paged cache."""

    def __init__(self, weights: Weights, cache: PagedCache) -> None:
        config = weights.config
        self.config = config
        self.weights = weights
        self.cache = cache
        self.cos_sin = build_cos_sin_cache(
            config.rotary_size, config.context, config.rotary_base, device=weights.device
        )

    def __call__(self, tokens: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """Logits [T, V] of the tokens [T], or of the selected rows."""
        x, added = F.embedding(tokens, self.weights.embedding), None
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(x, added, layer.norm)
            if isinstance(layer.feed_forward, Dense):
                with Beside(x.device) as attention:
                    attended = self._attention(index, layer, normed, step)
                x, added = mlp_residual(normed, layer.feed_forward, x), None
                attention.join()
                x = linear_residual(attended, layer.out, x)
            else:
                with Beside(x.device) as attention:
                    attended = linear_residual(self._attention(index, layer, normed, step), layer.out, x)
                added = self._experts(layer.feed_forward, normed)
                attention.join()
                x = attended
        if rows is not None:
            x, added = x[rows], None if added is None else added[rows]
        return linear(self._norm(x, added, self.weights.norm), self.weights.head)

    def _norm(self, x: Tensor, added: Tensor | None, norm: Norm) -> Tensor:
        """The norm of x, or of x + added, which is then also written to x."""
        if added is None:
            return layer_norm(x, norm.weight, norm.bias, self.config.eps)
        fused_add_layer_norm(added, x, norm.weight, norm.bias, self.config.eps)
        return added

    def _attention(self, index: int, layer: Layer, normed: Tensor, step: Step) -> Tensor:
        """The results of all heads, [T, H * D]."""
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
        qkv = linear(normed, layer.qkv)
        tau_tail(qkv, linear(F.gelu(qkv), layer.tau), layer.tau_table, step.positions, heads, size)
        q, k, v = qkv.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], dim=1)
        store = self.cache.layers[index]
        store.rotate_and_write(step, q, k, v, self.cos_sin)
        return self._attend(q, store, step).flatten(1)

    def _attend(self, q: Tensor, store: Store, step: Step) -> Tensor:
        """Causal attention of the queries [T, H, D] over the cache: [T, H, D]."""
        if step.starts is None:
            return self._attend_uniform(q, store, step, slice(None))
        if self.cache.kind in ("int8", "int4"):  # the varlen op has no INT8 or INT4 cache: one sequence after the other
            parts = q.split(list(step.counts))
            return torch.cat([self._attend_uniform(part, store, step, slice(b, b + 1)) for b, part in enumerate(parts)])
        attended = flash_attn_varlen_func(
            q,
            store.keys,
            store.values,
            step.starts,
            None,
            max(step.counts),
            step.block_table.shape[1] * store.page,
            causal=True,
            block_table=step.block_table,
            seqused_k=step.lengths,
            **store.reading(step.sequences),
        )
        assert isinstance(attended, Tensor)  # without the log-sum-exp
        return attended

    def _attend_uniform(self, q: Tensor, store: Store, step: Step, which: slice) -> Tensor:
        """The same for a slice of the sequences, with equally many queries each."""
        lengths = step.lengths[which]
        attended = flash_attn_with_kvcache(
            q.unflatten(0, (len(lengths), -1)),
            store.keys,
            store.values,
            cache_seqlens=lengths,
            block_table=step.block_table[which],
            causal=True,
            **store.reading(step.sequences[which]),
        )
        assert isinstance(attended, Tensor)
        return attended.flatten(0, 1)

    def _experts(self, experts: Experts, normed: Tensor) -> Tensor:
        gating = linear(normed, experts.router)
        weights, ids, _ = topk_softmax(gating, self.config.experts_per_token, renormalize=True)
        return fused_experts(
            normed, experts.w1, experts.w2, weights, ids, w1_scale=experts.w1_scale, w2_scale=experts.w2_scale
        )
