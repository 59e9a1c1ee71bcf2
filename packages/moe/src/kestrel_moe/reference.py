"""The PyTorch reference of the dense ops and of routing: their specification.

Everything is computed in float32 and rounded once. Two values are rounded earlier, because they are operands of a
matrix product: the hidden layer of an MLP (to the dtype of the input) and FP8 activations.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kestrel_quant.reference import fp8_quant
from kestrel_runtime.reference import row_sums


def gelu_residual(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU(h) * (g + 1), h the first half of the last dimension, g the second."""
    return gated(x.float(), "gelu_residual", approximate).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SiLU(h) * g."""
    return gated(x.float(), "silu_and_mul").to(x.dtype)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU(h) * g."""
    return gated(x.float(), "gelu_and_mul", approximate).to(x.dtype)


def gelu_residual_fp8(x: torch.Tensor, approximate: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """gelu_residual in float32, quantised per row without a rounding in between."""
    return fp8_quant(gated(x.float(), "gelu_residual", approximate))


def silu_and_mul_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu_and_mul in float32, quantised per row without a rounding in between."""
    return fp8_quant(gated(x.float(), "silu_and_mul"))


def gelu_and_mul_fp8(x: torch.Tensor, approximate: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """gelu_and_mul in float32, quantised per row without a rounding in between."""
    return fp8_quant(gated(x.float(), "gelu_and_mul", approximate))


def gated(x: torch.Tensor, activation: str, approximate: str = "none") -> torch.Tensor:
    """The gated activations, float32 [..., 2F] to float32 [..., F]."""
    h, g = x.chunk(2, dim=-1)
    if activation == "silu_and_mul":
        return h / (1 + torch.exp(-h)) * g
    activated = gelu(h, approximate)
    return activated * (g + 1) if activation == "gelu_residual" else activated * g


def gelu(h: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU of float32 values, without cancellation in the left tail.

    Not torch.nn.functional.gelu: its vectorised loop and its scalar remainder round differently, so a row would depend
    on its position.
    """
    if approximate == "tanh":
        slope = 2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h)
        return h / (1 + torch.exp(-slope))  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
    return 0.5 * h * torch.erfc(h * -math.sqrt(0.5))


def fused_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str = "gelu_tanh",
) -> torch.Tensor:
    """residual + act(x @ w1.T + b1) @ w2.T + b2; the hidden layer is rounded to x's dtype."""
    hidden = linear(x, w1, b1)
    hidden = gelu(hidden, "tanh" if activation == "gelu_tanh" else "none").to(x.dtype)
    result = linear(hidden, w2, b2)
    if residual is not None:
        result = residual.float() + result
    return result.to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias in float32, not rounded."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def fused_linear_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """x @ weight.T + bias + residual."""
    return (linear(x, weight, bias) + residual.float()).to(x.dtype)


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias."""
    return linear(x, weight, bias).to(x.dtype)


def router_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, not rounded."""
    return linear(x, weight, None)


def moe_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the choices in their order."""
    total = torch.zeros((x.shape[0], x.shape[2]), dtype=torch.float32, device=x.device)
    for choice in x.unbind(1):
        total = total + choice.float()
    return total.to(x.dtype)


def topk_softmax(
    gating: torch.Tensor,
    k: int,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k most probable experts of each row, their weights, and how many rows chose each expert."""
    tokens, experts = gating.shape
    logits = torch.nan_to_num(gating.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    largest = logits.amax(dim=1, keepdim=True)
    # The maximum counts as e^0 even where it is infinite: no row yields NaN.
    shares = torch.where(logits == largest, 0.0, logits - largest).exp()
    probabilities = shares / row_sums(shares)

    order_by = logits if bias is None else torch.nan_to_num(probabilities + bias.float(), nan=-torch.inf)
    ids = order_by.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = probabilities.gather(1, ids)
    if renormalize:
        total = row_sums(weights)
        weights = weights / torch.where(total > 0, total, 1.0)

    if num_tokens is not None:
        real = torch.arange(tokens, device=gating.device).unsqueeze(1) < num_tokens
        ids = torch.where(real, ids, -1)
        weights = torch.where(real, weights, 0.0)
    return weights, ids.to(torch.int32), histogram(ids, experts)


def histogram(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each of 0..experts-1 occurs: int32 [experts]. Negative ids are not counted."""
    bins = torch.where(ids < 0, experts, ids).flatten().long()
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add(0, bins, torch.ones_like(bins, dtype=torch.int32))[:experts]
