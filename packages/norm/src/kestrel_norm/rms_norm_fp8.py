"""RMSNorm with FP8 output and a scale per row, alone and after a residual addition."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference
from .fused_add_rms_norm import check_residual
from .rms_norm import check_weight

_kernels = Binary("kestrel_norm")


def _check_bound(op: str, x: torch.Tensor, scale_ub: torch.Tensor | None) -> None:
    if scale_ub is not None:
        check.tensor(op, "scale_ub", scale_ub, dtype=torch.float32, ndim=1)
        check.shape(op, "scale_ub", scale_ub, (1,))
    if x.shape[-1] == 0:
        check.fail(op, "x", "rows of at least one element", f"shape {tuple(x.shape)}")


def _codes_and_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh codes and scales for a launch to write."""
    *leading, columns = x.shape
    return empty(x, torch.float8_e4m3fn, *leading, columns), empty(x, torch.float32, *leading, 1)


def check_rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    scale_ub: torch.Tensor | None = None,
) -> None:
    op = "rms_norm_fp8"
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=(2, 3, 4), last_contiguous=True)
    check_weight(op, x, weight, eps, weight_bias)
    _check_bound(op, x, scale_ub)
    check.same(op, "device", x=x, weight=weight, scale_ub=scale_ub)


def check_fused_add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    scale_ub: torch.Tensor | None = None,
) -> None:
    op = "fused_add_rms_norm_fp8"
    check_residual(op, x, residual)
    check_weight(op, x, weight, eps, weight_bias)
    _check_bound(op, x, scale_ub)
    check.same(op, "device", x=x, residual=residual, weight=weight, scale_ub=scale_ub)


@kernel_op(reference=reference.rms_norm_fp8, check=check_rms_norm_fp8, kernel="cuda")
def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm in float32, then dynamic FP8 per row, with no rounding in between.

    T rows (of 1 to 3 leading dimensions) of N >= 1 elements.

    x: [T, N], [S, T, N] or [R, S, T, N], bf16, fp16 or float32. Only the last dimension must be contiguous.
    weight: *constant* [N], dtype of x or float32, or None: no scale, and weight_bias is ignored.
    eps: added to the mean square, >= 0. weight_bias: added to every weight in float32; 1.0 is Gemma's form.
    scale_ub: float32 [1] on the device, an upper bound of the row's amax, or None.

    Returns (q, scale): q float8_e4m3fn of x's shape, scale float32 [..., 1], normed ≈ q * scale with
    scale = max(min(amax, scale_ub), 1e-12) / 448 and amax the largest finite magnitude of the normed row. Codes are
    rounded to nearest even and saturate. A row does not depend on the other rows, bit for bit.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, range or device.
    Semantics: :func:`kestrel_norm.rms_norm`, then ``fp8_quant`` of kestrel_quant; in vLLM,
    ``rms_norm_dynamic_per_token_quant``.

    >>> import torch, kestrel_norm
    >>> q, scale = kestrel_norm.rms_norm_fp8(torch.tensor([[3.0, 4.0]]), eps=0.0)
    >>> q.float(), q.float() * scale
    (tensor([[320., 448.]]), tensor([[0.8081, 1.1314]]))
    """
    q, scale = _codes_and_scale(x)
    _kernels.rms_norm_fp8(q, scale, x, weight, eps, weight_bias, scale_ub)
    return q, scale


@kernel_op(
    reference=reference.fused_add_rms_norm_fp8,
    check=check_fused_add_rms_norm_fp8,
    kernel="cuda",
    mutates=("residual",),
)
def fused_add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and return the normed sum as FP8: residual <- round(x + residual).

    Shapes, dtypes, scales and errors are those of :func:`rms_norm_fp8`, for the rounded sum. x is only read.
    residual: shape and dtype of x, its own strides; it shares no memory with x. The only tensor written in place.
    weight: *constant*.

    Returns (q, scale) as :func:`rms_norm_fp8`. A row does not depend on the other rows, bit for bit.
    Semantics: ``rms_norm_dynamic_per_token_quant`` of vLLM, with a residual.

    >>> import torch, kestrel_norm
    >>> residual = torch.tensor([[2.0, 0.0]])
    >>> q, scale = kestrel_norm.fused_add_rms_norm_fp8(torch.tensor([[1.0, 4.0]]), residual, eps=0.0)
    >>> residual, q.float()
    (tensor([[3., 4.]]), tensor([[320., 448.]]))
    """
    q, scale = _codes_and_scale(x)
    _kernels.fused_add_rms_norm_fp8(q, scale, x, residual, weight, eps, weight_bias, scale_ub)
    return q, scale
