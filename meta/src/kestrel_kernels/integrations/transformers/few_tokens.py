"""Products of a decode step of few tokens that include, in one launch, the norm before them or what follows them.

What follows is a gated activation or the addition to the residual stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kestrel_moe import fused_linear_residual, gelu_and_mul, silu_and_mul
from kestrel_norm import rms_norm_linear
from kestrel_quant import W4Weight, w4a16_token, w4a16_token_covers

from . import w4

TOKENS = range(4, 17)
"""Sequences of a step for which these kernels, with 16-bit weights, are faster than torch's products."""
_HALF = (torch.bfloat16, torch.float16)


def activation(name: str) -> Callable[..., Tensor] | None:
    """The gated form of an activation that transformers calls `name`; None if there is none."""
    if name in ("silu", "swish"):
        return silu_and_mul
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return functools.partial(gelu_and_mul, approximate="tanh")
    return gelu_and_mul if name == "gelu" else None


def _gate_of(act: Callable[..., Tensor] | None) -> str:
    """What w4a16_token calls a result of :func:`activation`, or a copy of one."""
    if act is None:
        return "none"
    if isinstance(act, functools.partial):
        return "gelu_tanh_and_mul"
    return "silu_and_mul" if act is silu_and_mul else "gelu_and_mul"


def serves(x: Tensor) -> bool:
    """Whether x [B, 1, K] is a step that this module may have kernels for."""
    if torch.compiler.is_compiling():  # where the memory of fused weights lies cannot be traced
        return False
    return x.is_cuda and x.ndim == 3 and x.shape[1] == 1 and x.is_contiguous() and x.dtype in _HALF


def _weight_of(layer: Any) -> tuple[Tensor | W4Weight, Tensor | None]:
    """The weight and bias of a linear layer, or of several that are fused, as they are now."""
    if isinstance(layer, w4.W4Linear):
        return layer.packed, layer.bias
    if not isinstance(layer, nn.Linear):
        layer.refresh()
    return layer.weight, layer.bias


def takes(layer: Any, x: Tensor, *, norm: Any = None, gated: bool = False) -> bool:
    """Whether :func:`product_of_norm` (with a norm) or :func:`add_product` is for this layer and input."""
    (weight, _), tokens = _weight_of(layer), x.shape[0]
    if weight.dtype != x.dtype:
        return False
    if isinstance(weight, W4Weight):
        return tokens == 1 and w4a16_token_covers(weight, norm=norm is not None, gated=gated)
    return tokens in TOKENS and weight.shape[1] % 8 == 0 and (norm is None or norm.weight_bias == 0)


def product(layer: Any, x: Tensor) -> Tensor:
    """layer(x) of a 4-bit layer."""
    weight, bias = _weight_of(layer)
    assert isinstance(weight, W4Weight)
    return w4a16_token(_matrix(x), weight, bias).view(*x.shape[:-1], -1)


def product_of_norm(layer: Any, x: Tensor, norm: Any, act: Callable[..., Tensor] | None = None) -> Tensor:
    """act(layer(norm(x))). norm: a ``modules.Norm``; act: a result of :func:`activation`."""
    (weight, bias), scale = _weight_of(layer), norm.module.weight
    if isinstance(weight, W4Weight):
        options = {"norm_weight": scale, "norm_eps": norm.eps, "norm_weight_bias": norm.weight_bias}
        product = w4a16_token(_matrix(x), weight, bias, activation=_gate_of(act), **options)
        return product.view(*x.shape[:-1], -1)
    product = rms_norm_linear(x, scale, weight, norm.eps) if bias is None else layer(norm(x))
    return product if act is None else act(product)


def add_product(layer: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual += layer(x), in place; returns the residual."""
    weight, bias = _weight_of(layer)
    if isinstance(weight, W4Weight):
        total = _matrix(residual)
        w4a16_token(_matrix(x), weight, bias, residual=total, out=total)
        return residual
    return fused_linear_residual(x, weight, bias, residual, out=residual)


def _matrix(x: Tensor) -> Tensor:
    """x [1, 1, K] as a matrix, which w4a16_token passes on without a reshape."""
    return x.view(1, -1)
