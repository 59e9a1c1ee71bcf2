"""A decode step of one sequence: products with the norm before them, and the gate or the residual behind them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kestrel_moe import fused_linear_residual, gelu_and_mul, rms_norm_gemv, silu_and_mul
from kestrel_quant import W4Weight, w4a16_token

from . import w4

HALF = (torch.bfloat16, torch.float16)
_W4_NORM_COLUMNS = 8192  # the most that w4a16_token's kernel normalises


def activation(name: str) -> Callable[..., Tensor] | None:
    """The gated form of an activation that transformers calls `name`; None if there is none."""
    if name in ("silu", "swish"):
        return silu_and_mul
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return functools.partial(gelu_and_mul, approximate="tanh")
    return gelu_and_mul if name == "gelu" else None


def gate_of(act: Callable[..., Tensor]) -> str:
    """What the ops with a gate call a result of :func:`activation`, or a copy of one."""
    if isinstance(act, functools.partial):
        return "gelu_tanh_and_mul"
    return "silu_and_mul" if act is silu_and_mul else "gelu_and_mul"


def is_one_token(x: Tensor) -> bool:
    """Whether the kernels of a step of one token take x."""
    return x.is_cuda and x.numel() == x.shape[-1] and x.is_contiguous() and x.dtype in HALF


def _weight_of(layer: Any) -> tuple[Tensor | W4Weight, Tensor | None] | None:
    """The weight and bias of a linear layer, or of several that are fused, once they are up to date."""
    if isinstance(layer, w4.W4Linear):
        return layer.packed, layer.bias
    if isinstance(layer, nn.Linear):
        return layer.weight, layer.bias
    layer.refresh()
    return None if layer.weight is None else (layer.weight, layer.bias)


def takes(layer: Any, x: Tensor, *, norm: bool, gated: bool = False) -> bool:
    """Whether :func:`product_of_norm` (norm) or :func:`add_product` has a kernel for this layer and input."""
    found = _weight_of(layer)
    if found is None:
        return False
    weight, _ = found
    rows, columns = weight.shape
    if weight.dtype != x.dtype or columns % 8:
        return False
    if not isinstance(weight, W4Weight):
        return True
    whole = weight.group_size % 128 == 0 or weight.group_size == columns
    fits = whole and weight.permutation is None and rows % (32 if gated else 16) == 0
    return fits and not (norm and columns > _W4_NORM_COLUMNS)


def product_of_norm(layer: Any, x: Tensor, norm: Any, gate: str = "none") -> Tensor:
    """gate(layer(norm(x))). norm: a ``modules.Norm``."""
    found = _weight_of(layer)
    assert found is not None
    weight, bias = found
    scale = norm.module.weight
    if isinstance(weight, W4Weight):
        options = {"norm_weight": scale, "norm_eps": norm.eps, "norm_weight_bias": norm.weight_bias}
        return w4a16_token(x, weight, bias, activation=gate, **options)
    return rms_norm_gemv(x, scale, weight, bias, eps=norm.eps, weight_bias=norm.weight_bias, activation=gate)


def add_product(layer: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual += layer(x), in place; returns the residual."""
    found = _weight_of(layer)
    assert found is not None
    weight, bias = found
    if isinstance(weight, W4Weight):
        return w4a16_token(x, weight, bias, residual=residual, out=residual)
    return fused_linear_residual(x, weight, bias, residual, out=residual)
