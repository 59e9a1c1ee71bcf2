"""Layers of routed experts for tests on a GPU: tensors, routings, quantised weights, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kestrel_moe import fused_experts, reference_experts
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import Variant
from kestrel_quant import fp8_quant
from kestrel_runtime.testing import assert_close_to_f64

FORMS = ["expert", "channel", "block"]
"""What the scales of FP8 weights stand for."""
Ids = Callable[[int, int, int], torch.Tensor]


def random_ids(tokens: int, experts: int, choices: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(choices).indices


def layer(
    tokens: int,
    experts: int,
    choices: int,
    width: int,
    inner: int,
    dtype: torch.dtype = torch.bfloat16,
    ids: Ids = random_ids,
) -> tuple[torch.Tensor, ...]:
    """hidden, w1, w2, topk_weights, topk_ids."""
    torch.manual_seed(tokens + experts + width)
    hidden = torch.randn(tokens, width, device="cuda").to(dtype)
    w1 = (torch.randn(experts, 2 * inner, width, device="cuda") / width**0.5).to(dtype)
    w2 = (torch.randn(experts, width, inner, device="cuda") / inner**0.5).to(dtype)
    weights = torch.rand(tokens, choices, device="cuda").softmax(-1)
    return hidden, w1, w2, weights, ids(tokens, experts, choices).to("cuda", torch.int32)


def gated(up: torch.Tensor, activation: str) -> torch.Tensor:
    h, g = up.chunk(2, dim=-1)
    if activation == "silu_and_mul":
        return F.silu(h) * g
    return F.gelu(h) * (g + 1 if activation == "gelu_residual" else g)


def composed(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The layer by a loop over experts in this dtype; the sum over choices in float64."""
    total = torch.zeros(hidden.shape, dtype=torch.float64, device="cuda")
    for expert in range(w1.shape[0]):
        token, choice = (local == expert).nonzero(as_tuple=True)
        if token.numel():
            inner = gated(hidden[token].to(dtype) @ w1[expert].to(dtype).T, activation)
            rows = (inner @ w2[expert].to(dtype).T) * weights[token, choice, None].to(dtype)
            total.index_add_(0, token, rows.double())
    return total


def assert_layer_is_right(
    args: tuple[torch.Tensor, ...],
    activation: str = "gelu_residual",
    expert_map: torch.Tensor | None = None,
    variant: Variant | None = None,
) -> None:
    """As accurate against float64 as :func:`composed` in the layer's dtype. variant: None for the built-in choice."""
    hidden, w1, w2, weights, ids = args
    local = reference_experts.local_experts(ids, w1.shape[0], expert_map)
    exact = composed(hidden, w1, w2, weights, local, activation, torch.float64)
    baseline = composed(hidden, w1, w2, weights, local, activation, hidden.dtype).to(hidden.dtype)
    if variant is None:
        got = fused_experts(*args, activation=activation, expert_map=expert_map)
    else:
        got = by_variant(variant, *args, activation, expert_map=expert_map)
    assert_close_to_f64(got, exact, baseline)


ODD_ROUTINGS: dict[str, Ids] = {
    "one expert": lambda t, e, k: torch.full((t, k), 5),
    "none": lambda t, e, k: torch.full((t, k), -1),
    "outside": lambda t, e, k: torch.randint(-2, e + 3, (t, k)),
    "first and last": lambda t, e, k: torch.randint(0, 2, (t, k)) * (e - 1),
}


def quantised(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of this form, and the weight they stand for in float64."""
    experts, rows, columns = weight.shape
    if form == "expert":
        scale = weight.abs().amax((1, 2)).float() / 448
        full = scale[:, None, None]
    elif form == "channel":
        scale = weight.abs().amax(2).float() / 448
        full = scale[:, :, None]
    else:
        tall, wide = -(-rows // 128), -(-columns // 128)
        padded = F.pad(weight.float(), (0, wide * 128 - columns, 0, tall * 128 - rows))
        scale = padded.view(experts, tall, 128, wide, 128).abs().amax((2, 4)) / 448
        full = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :columns]
    codes = (weight.float() / full).to(torch.float8_e4m3fn)
    return codes, scale, codes.double() * full.double()


def dequantised_rows(x: torch.Tensor, form: str) -> torch.Tensor:
    if form == "block":
        codes, scale = fp8_quant(x.float(), granularity="group", group_size=128)
        scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    else:
        codes, scale = fp8_quant(x.float())
    return codes.double() * scale.double()
