"""What the definitions of routed expert layers share: random routing, weights of several layers, candidates.

A shape is "T1 E64 k8 h2048 i1024". Every token chooses its experts with equal probability; of such routings the sets
hold those whose mean number of distinct experts is the expected one, which decides how many weights a call reads.
Successive calls alternate between the weights of two layers. With one token, a call chooses other experts than the one
before in the same layer. No call therefore finds its weights in L2.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import kestrel_moe
from kestrel_runtime.bench import peer

Argument = torch.Tensor | None
Layer = Callable[..., torch.Tensor]

_DRAWN = 32  # routings, of which a set takes one


def sizes(shape: str) -> tuple[int, int, int, int, int]:
    """T, E, K, Hd, I."""
    tokens, experts, choices, width, inner = map(int, re.findall("[0-9]+", shape))
    return tokens, experts, choices, width, inner


def distinct_experts(shape: str) -> float:
    """The expected number of experts that T tokens choose."""
    tokens, experts, choices, _, _ = sizes(shape)
    return experts * (1 - (1 - choices / experts) ** tokens)


def weight_bytes(shape: str, element: int) -> int:
    _, _, _, width, inner = sizes(shape)
    return int(distinct_experts(shape) * 3 * width * inner * element)


def token_bytes(shape: str) -> int:
    tokens, _, _, width, _ = sizes(shape)
    return 4 * tokens * width


def operations(shape: str) -> int:
    tokens, _, choices, width, inner = sizes(shape)
    return 6 * tokens * choices * width * inner


@functools.lru_cache(maxsize=2)
def weights(experts: int, width: int, inner: int, fp8: bool, layer: int) -> tuple[Argument, ...]:
    """w1, w2 and, with FP8, their scales for each output: of layer 0 or 1."""
    w1 = torch.randn(experts, 2 * inner, width, dtype=torch.bfloat16, device="cuda") / width**0.5
    w2 = torch.randn(experts, width, inner, dtype=torch.bfloat16, device="cuda") / inner**0.5
    if not fp8:
        return w1, w2, None, None
    codes, scales = [], []
    for w in (w1, w2):
        scale = w.abs().amax(-1).float() / 448
        codes.append((w / scale.unsqueeze(-1)).to(torch.float8_e4m3fn))
        scales.append(scale)
    return (*codes, *scales)


def routings(shape: str, count: int) -> list[torch.Tensor]:
    """The ids [T, K] of `count` sets, on the CPU."""
    tokens, experts, choices, _, _ = sizes(shape)
    found: list[torch.Tensor] = []
    if tokens == 1:
        decks = [torch.empty(0, dtype=torch.int64)] * 2
        for i in range(count):
            deck = decks[i % 2] if decks[i % 2].numel() >= choices else torch.randperm(experts)
            found.append(deck[:choices].view(1, choices))
            decks[i % 2] = deck[choices:]
        return found
    drawn = _DRAWN if tokens * choices < 8 * experts else 1  # beyond, nearly all experts are chosen
    missing = 0.0  # distinct experts, for their mean to be the expected one
    for _ in range(count):
        missing += distinct_experts(shape)
        ids = torch.rand(drawn, tokens, experts).topk(choices).indices
        chosen = torch.zeros(drawn, experts).scatter_(1, ids.view(drawn, -1), 1.0)
        nearest = int((chosen.sum(1) - missing).abs().argmin())
        found.append(ids[nearest])
        missing -= float(chosen[nearest].sum())
    return found


def make(shape: str, count: int, fp8: bool) -> list[tuple[Argument, ...]]:
    tokens, experts, choices, width, inner = sizes(shape)
    sets: list[tuple[Argument, ...]] = []
    for i, ids in enumerate(routings(shape, count)):
        layer = weights(experts, width, inner, fp8, i % 2)
        hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        topk_weights = torch.rand(tokens, choices, device="cuda").softmax(-1)
        sets.append((hidden, *layer, topk_weights, ids.to("cuda", torch.int32), torch.empty_like(hidden)))
    return sets


def result(arguments: tuple[Argument, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def ours(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: Argument,
    w2_scale: Argument,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    return kestrel_moe.fused_experts(hidden, w1, w2, topk_weights, topk_ids, **scales, out=out)


def gelu_residual(up: torch.Tensor) -> torch.Tensor:
    h, g = up.chunk(2, dim=-1)
    return F.gelu(h) * (g + 1)


def grouped_products(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: Argument,
    w2_scale: Argument,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Sort tokens by expert, then PyTorch's grouped GEMM, the activation, grouped GEMM, and the weighted sum."""
    tokens, choices = topk_ids.shape
    order = topk_ids.flatten().argsort(stable=True)
    counts = torch.zeros(w1.shape[0], dtype=torch.int32, device=hidden.device)
    counts.scatter_add_(0, topk_ids.flatten().long(), torch.ones_like(topk_ids.flatten()))
    offs = counts.cumsum(0, dtype=torch.int32)
    x = hidden[order // choices]
    if w1_scale is None or w2_scale is None:
        inner = gelu_residual(F.grouped_mm(x, w1.transpose(1, 2), offs=offs))
        y = F.grouped_mm(inner, w2.transpose(1, 2), offs=offs)
    else:
        inner = gelu_residual(_scaled(x, w1, w1_scale, offs))
        y = _scaled(inner, w2, w2_scale, offs)
    pairs = torch.empty_like(y)
    pairs[order] = y
    return (pairs.view(tokens, choices, -1) * topk_weights.unsqueeze(-1).to(y.dtype)).sum(1)


def _scaled(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    row = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    codes = (x / row).to(torch.float8_e4m3fn)
    return torch._scaled_grouped_mm(
        codes, w.transpose(1, 2), row.flatten(), scale, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _experts_of_transformers(mixtral: Any) -> Layer:
    """The experts of transformers' Mixtral through its `grouped_mm`, with our gate."""

    @functools.lru_cache(maxsize=2)
    def module(w1: torch.Tensor, w2: torch.Tensor) -> torch.nn.Module:
        experts, width, inner = w2.shape
        config = mixtral.MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=experts)
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            layer = mixtral.MixtralExperts(config)
        layer.gate_up_proj, layer.down_proj = (torch.nn.Parameter(w, requires_grad=False) for w in (w1, w2))
        layer._apply_gate = gelu_residual
        return layer

    def call(
        hidden: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_scale: Argument,
        w2_scale: Argument,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return module(w1, w2)(hidden, topk_ids, topk_weights)

    return call


def candidates(fp8: bool) -> dict[str, Layer]:
    found = {"kestrel": ours, "torch": grouped_products}
    mixtral = None if fp8 else peer("transformers.models.mixtral.modeling_mixtral")
    if mixtral:
        found["transformers"] = _experts_of_transformers(mixtral)
    return found
