"""Residual addition and LayerNorm in one pass, in place."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op

from . import reference
from .fused_add_rms_norm import check_residual
from .layer_norm import check_vectors

_kernels = Binary("kestrel_norm")


def check_fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    op = "fused_add_layer_norm"
    check_residual(op, x, residual)
    check.disjoint(op, "x", x)
    check_vectors(op, x, weight, bias, eps)
    check.same(op, "device", x=x, residual=residual, weight=weight, bias=bias)


@kernel_op(
    reference=reference.fused_add_layer_norm,
    check=check_fused_add_layer_norm,
    kernel="cuda",
    mutates=("x", "residual"),
)
def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    """Add x to the residual stream and normalise the sum: residual <- round(x + residual); x <- layer_norm(residual).

    T rows (of 1 to 3 leading dimensions) of N elements; any N.

    x: [T, N], [S, T, N] or [R, S, T, N], bf16, fp16 or float32. Written in place: the normalised sum.
    residual: shape and dtype of x, its own strides; it shares no memory with x. Written in place: the rounded sum, of
        which mean and variance are computed. Of both only the last dimension must be contiguous.
    weight, bias: *constant* [N], dtype of x, or None: no scale, no shift.
    eps: added to the variance, >= 0.

    Returns None. Everything is computed in float32; the sum and the result are rounded once each. A row's result does
    not depend on the other rows, bit for bit.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, range or device.
    Semantics: ``fused_add_rms_norm`` of vLLM with :func:`kestrel_norm.layer_norm` in place of the RMS norm.

    >>> import torch, kestrel_norm
    >>> x, residual = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 1.0]])
    >>> kestrel_norm.fused_add_layer_norm(x, residual, eps=0.0)
    >>> residual, x
    (tensor([[3., 5.]]), tensor([[-1.,  1.]]))
    """
    _kernels.fused_add_layer_norm(x, residual, weight, bias, eps)
