"""RMSNorm over the last dimension."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference

_kernels = Binary("kestrel_norm")


def check_weight(op: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_bias: float) -> None:
    """Checks that the RMS norms share: weight [N] of x's dtype or float32, eps and weight_bias."""
    if weight is not None:
        allowed = (x.dtype,) if x.dtype == torch.float32 else (x.dtype, torch.float32)
        check.tensor(op, "weight", weight, dtype=allowed, last_contiguous=True)
        check.shape(op, "weight", weight, x.shape[-1:])
    check.number(op, "eps", eps, minimum=0)
    check.number(op, "weight_bias", weight_bias)


def check_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
) -> None:
    op = "rms_norm"
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=(2, 3, 4), last_contiguous=True)
    check_weight(op, x, weight, eps, weight_bias)
    if out is not None:
        check.tensor(op, "out", out, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "out", out, x.shape)
        check.disjoint(op, "out", out)
    check.same(op, "device", x=x, weight=weight, out=out)


@kernel_op(reference=reference.rms_norm, check=check_rms_norm, kernel="cuda", out_may_be=("x",))
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale every row to a root mean square of 1: x * rsqrt(mean(x^2) + eps) * (weight + weight_bias).

    T rows (of 1 to 3 leading dimensions) of N elements; any N.

    x: [T, N], [S, T, N] or [R, S, T, N], bf16, fp16 or float32. Only the last dimension must be contiguous.
    weight: *constant* [N], dtype of x or float32, or None: no scale, and weight_bias is ignored.
    eps: added to the mean square, >= 0.
    weight_bias: added to every weight in float32; 1.0 is Gemma's form.
    out: the result, shape and dtype of x. It may be x itself, but shares no memory with anything else.

    Returns a new contiguous tensor like x, or ``out``. Everything is computed in float32 and rounded once. A row's
    result does not depend on the other rows, bit for bit.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, range or device.
    Semantics: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.

    >>> import torch, kestrel_norm
    >>> kestrel_norm.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([[0.8485, 2.2627]])
    """
    if out is None:
        out = empty(x, x.dtype, *x.shape)
    _kernels.rms_norm(out, x, weight, eps, weight_bias)
    return out
