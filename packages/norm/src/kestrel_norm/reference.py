"""The specification of every op of this family, in plain PyTorch.

Sums over a row are taken in float64 and rounded to float32 once, so they depend neither on the order of the additions
nor on the machine. The mean stays float64, so that a row whose mean is large against its deviation loses nothing.
Everything per element is float32, rounded to the result's dtype at the end.
"""

from __future__ import annotations

import torch

from kestrel_runtime.reference import quantise_rows, row_sums


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]; infinite where the sum of squares exceeds float32, as in the kernels."""
    return row_sums(x.double().square()).float() / x.shape[-1]


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    wide = x.double()
    centred = (wide - row_sums(wide) / x.shape[-1]).float()
    y = centred / torch.sqrt(_mean_square(centred) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, weight_bias: float = 0.0
) -> torch.Tensor:
    return _rms_normed(x, weight, eps, weight_bias).to(x.dtype)


def _rms_normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_bias: float) -> torch.Tensor:
    """rms_norm in float32, before it is rounded to x's dtype."""
    y = x.float() / torch.sqrt(_mean_square(x) + eps)
    return y if weight is None else y * (weight.float() + weight_bias)


def _add_to(residual: torch.Tensor, x: torch.Tensor) -> None:
    """residual <- round(x + residual). The norms below take the rounded sum."""
    residual.copy_(x.float() + residual.float())


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
) -> None:
    _add_to(residual, x)
    x.copy_(rms_norm(residual, weight, eps, weight_bias=weight_bias))


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    _add_to(residual, x)
    x.copy_(layer_norm(residual, weight, bias, eps))


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_rows(_rms_normed(x, weight, eps, weight_bias), scale_ub)


def fused_add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _add_to(residual, x)
    return rms_norm_fp8(residual, weight, eps, weight_bias=weight_bias, scale_ub=scale_ub)


def rms_norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    normed = rms_norm(x, norm_weight, eps).float()
    return (normed @ weight.float().t()).to(x.dtype)
