"""Residual addition and RMSNorm in one pass, in place."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op

from . import reference
from .rms_norm import check_weight

_kernels = Binary("kestrel_norm")


def check_residual(op: str, x: torch.Tensor, residual: torch.Tensor) -> None:
    """x of rows, and a residual of its shape and dtype, which is written."""
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=(2, 3, 4), last_contiguous=True)
    check.tensor(op, "residual", residual, dtype=x.dtype, last_contiguous=True)
    check.shape(op, "residual", residual, x.shape)
    check.disjoint(op, "residual", residual)


def check_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
) -> None:
    op = "fused_add_rms_norm"
    check_residual(op, x, residual)
    check.disjoint(op, "x", x)
    check_weight(op, x, weight, eps, weight_bias)
    check.same(op, "device", x=x, residual=residual, weight=weight)


@kernel_op(
    reference=reference.fused_add_rms_norm,
    check=check_fused_add_rms_norm,
    kernel="cuda",
    mutates=("x", "residual"),
)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
) -> None:
    """Add x to the residual stream and normalise the sum: residual <- round(x + residual); x <- rms_norm(residual).

    T rows (of 1 to 3 leading dimensions) of N elements; any N.

    x: [T, N], [S, T, N] or [R, S, T, N], bf16, fp16 or float32. Written in place: the normalised sum.
    residual: shape and dtype of x, its own strides; it shares no memory with x. Written in place: the rounded sum, of
        which the mean square is computed. Of both only the last dimension must be contiguous.
    weight: *constant* [N], dtype of x or float32, or None: no scale, and weight_bias is ignored.
    eps: added to the mean square, >= 0.
    weight_bias: added to every weight in float32; 1.0 is Gemma's form.

    Returns None. Everything is computed in float32; the sum and the result are rounded once each. A row's result does
    not depend on the other rows, bit for bit.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, range or device.
    Semantics: ``fused_add_rms_norm`` of vLLM.

    >>> import torch, kestrel_norm
    >>> x, residual = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]])
    >>> kestrel_norm.fused_add_rms_norm(x, residual, eps=0.0)
    >>> residual, x
    (tensor([[3., 4.]]), tensor([[0.8485, 1.1314]]))
    """
    _kernels.fused_add_rms_norm(x, residual, weight, eps, weight_bias)
