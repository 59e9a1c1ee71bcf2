"""The specification of every op of this family, in plain PyTorch: statistics in float32, one rounding at the end."""

from __future__ import annotations

import torch

from kestrel_runtime.reference import row_sums


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    n = x.shape[-1]
    centred = x.float() - row_sums(x.float()) / n
    y = centred / torch.sqrt(row_sums(centred.square()) / n + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, weight_bias: float = 0.0
) -> torch.Tensor:
    y = x.float() / torch.sqrt(row_sums(x.float().square()) / x.shape[-1] + eps)
    if weight is not None:
        y = y * (weight.float() + weight_bias)
    return y.to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
) -> None:
    residual.copy_(x.float() + residual.float())  # rounds to the dtype; the rounded sum feeds the variance
    x.copy_(rms_norm(residual, weight, eps, weight_bias=weight_bias))
