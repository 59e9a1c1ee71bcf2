"""The demo's decoder as a plain torch module, for training and as the reference of the demo's tests.

It has the shape of Moondream 3's text model: attention and feed-forward in parallel after one LayerNorm, packed QKV,
learnt scaling of queries and values (tau), rotary embedding on part of each head, the first layers dense and the others
routed experts. It uses no op of this library and computes everything the straightforward way: full attention without a
cache, every expert on every token. The names in its state dict are the names in the model file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FP8_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. head_size * heads may differ from width."""

    width: int
    layers: int
    dense_layers: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    rotary_base: float
    dense_inner: int
    experts: int
    experts_per_token: int
    expert_inner: int
    vocabulary: int
    context: int
    eps: float = 1e-5

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size


TINY = Shape(
    width=128,
    layers=7,
    dense_layers=1,
    heads=2,
    kv_heads=2,
    head_size=64,
    rotary_size=32,
    rotary_base=10000.0,
    dense_inner=512,
    experts=8,
    experts_per_token=2,
    expert_inner=64,
    vocabulary=256,  # bytes; byte 0 begins and ends a document
    context=1024,
)


def tau_position(alpha: Tensor, positions: Tensor) -> Tensor:
    """The learnt function of log position, one value per head: [len(positions), H], around 1."""
    return 0.5 + torch.sigmoid(alpha.float() * torch.log1p(positions.float())[:, None])


def rotate(x: Tensor, base: float, size: int) -> Tensor:
    """Rotary embedding of [B, T, heads, D] over the first `size` dimensions, pairs (i, i + size/2)."""
    half = size // 2
    inverse = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) * 2 / size)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x.float().split([half, half, x.shape[-1] - size], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


class Attention(nn.Module):
    k_scale: Tensor
    v_scale: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.width, shape.qkv_width)
        self.tau = nn.Linear(shape.qkv_width, shape.heads + shape.kv_heads, bias=False)
        self.tau_alpha = nn.Parameter(torch.zeros(shape.heads))
        if shape.kv_heads != shape.heads:
            self.tau_alpha_v = nn.Parameter(torch.zeros(shape.kv_heads))
        self.out = nn.Linear(shape.heads * shape.head_size, shape.width)
        # Scales of an FP8 KV cache (value = code * scale), set by calibrate() after training.
        self.register_buffer("k_scale", torch.ones(shape.kv_heads))
        self.register_buffer("v_scale", torch.ones(shape.kv_heads))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, Hk, D], after tau scaling and rotary embedding."""
        shape = self.shape
        qkv = self.qkv(x)
        token = torch.tanh(self.tau(F.gelu(qkv)).float())
        positions = torch.arange(x.shape[1], device=x.device)
        table_q = tau_position(self.tau_alpha, positions)
        shared = shape.kv_heads == shape.heads
        table_v = table_q if shared else tau_position(self.tau_alpha_v, positions)
        tau_q, tau_v = token.split([shape.heads, shape.kv_heads], -1)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        q, k, v = qkv.unflatten(-1, (sum(sizes), shape.head_size)).split(sizes, -2)
        q = (q.float() * (tau_q + table_q)[..., None]).to(qkv.dtype)
        v = (v.float() * (tau_v + table_v)[..., None]).to(qkv.dtype)
        return rotate(q, shape.rotary_base, shape.rotary_size), rotate(k, shape.rotary_base, shape.rotary_size), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.project(x))
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.shape.heads != self.shape.kv_heads
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.dense_inner)
        self.down = nn.Linear(shape.dense_inner, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """Top-k routed experts: GELU(h) * (g + 1), h and g the two halves of the first product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts)
        self.w1 = nn.Parameter(torch.empty(shape.experts, 2 * shape.expert_inner, shape.width))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.width, shape.expert_inner))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Router probabilities over all experts, and the weight of each expert (zero where not chosen)."""
        probabilities = self.router(x).float().softmax(-1)
        top, ids = probabilities.topk(self.shape.experts_per_token, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, ids, top / top.sum(-1, keepdim=True))
        return probabilities, weights

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        shape = self.shape
        up = F.linear(x, self.w1.flatten(0, 1)).unflatten(-1, (shape.experts, 2 * shape.expert_inner))
        h, g = up.chunk(2, -1)
        weighted = F.gelu(h) * (g + 1) * weights[..., None].to(up.dtype)
        return F.linear(weighted.flatten(-2), self.w2.transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width, shape.eps)
        self.attention = Attention(shape)
        if index < shape.dense_layers:
            self.dense = Dense(shape)
        else:
            self.experts = Experts(shape)
        self.routed = index >= shape.dense_layers

    def forward(self, x: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
        """The next residual stream, and the load-balancing loss of the router (1 if balanced), or None if dense."""
        normed = self.norm(x)
        if not self.routed:
            change, balance = self.attention(normed) + self.dense(normed), None
        else:
            probabilities, weights = self.experts.route(normed)
            share = (weights > 0).float().mean((0, 1)) / self.experts.shape.experts_per_token
            balance = self.experts.shape.experts * (share * probabilities.mean((0, 1))).sum()
            change = self.attention(normed) + self.experts(normed, weights)
        return x + F.dropout(change, dropout, self.training), balance


class PlainModel(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    def __init__(self, shape: Shape, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, shape.eps)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def initialise(self, generator: torch.Generator) -> None:
        """Random weights with fan-in scaling. Matrices that write to the residual stream are scaled down with depth."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim < 2:
                    if not name.endswith("norm.weight"):
                        parameter.zero_()
                    continue
                deviation = 0.5 if name == "embedding.weight" else parameter.shape[-1] ** -0.5
                if name.endswith(("out.weight", "down.weight", "w2")):
                    deviation *= (2 * self.shape.layers) ** -0.5
                if name.endswith(("tau.weight", "head.weight", "router.weight")):
                    deviation *= 0.2
                parameter.normal_(0.0, deviation, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens)[0]

    def run(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the mean load-balancing loss of the routers."""
        x = self.embedding(tokens)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, self.dropout)
            if balance is not None:
                balances.append(balance)
        imbalance = torch.stack(balances).mean() if balances else x.new_ones(())
        return self.head(self.norm(x)), imbalance

    @torch.no_grad()
    def calibrate(self, tokens: Tensor) -> None:
        """Set the scales of an FP8 cache, so that twice the largest key and value of each head in `tokens` fit."""
        x = self.embedding(tokens)
        for layer in self.layers:
            _, k, v = layer.attention.project(layer.norm(x))
            layer.attention.k_scale.copy_(k.float().abs().amax((0, 1, 3)) * 2 / FP8_MAX)
            layer.attention.v_scale.copy_(v.float().abs().amax((0, 1, 3)) * 2 / FP8_MAX)
            x, _ = layer(x, 0.0)

    @torch.no_grad()
    def greedy(self, prompt: Tensor, steps: int) -> Tensor:
        """The `steps` tokens of greedy decoding after a prompt [T], each by a full forward pass without a cache."""
        tokens = prompt
        for _ in range(steps):
            tokens = torch.cat([tokens, self(tokens[None])[0, -1].argmax()[None]])
        return tokens[len(prompt) :]


def from_checkpoint(checkpoint: Mapping[str, Any]) -> PlainModel:
    """The float32 model from a checkpoint that train_tiny.py wrote, as torch.load(weights_only=True) returns it."""
    model = PlainModel(Shape(**checkpoint["config"]))
    model.load_state_dict(checkpoint["state"])
    return model.eval()
