"""RMSNorm and the linear layer after it."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference

_kernels = Binary("kestrel_norm")
_STREAM_ROWS = 32  # kLinearTokens in csrc: product_of_norm refuses more rows, and the host saves the call


def check_rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
) -> None:
    op = "rms_norm_linear"
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=(2, 3, 4), last_contiguous=True)
    check.tensor(op, "norm_weight", norm_weight, dtype=x.dtype, last_contiguous=True)
    check.shape(op, "norm_weight", norm_weight, x.shape[-1:])
    check.tensor(op, "weight", weight, dtype=x.dtype, ndim=2, last_contiguous=True)
    check.shape(op, "weight", weight, (None, x.shape[-1]))
    check.number(op, "eps", eps, minimum=0)
    if out is not None:
        check.tensor(op, "out", out, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "out", out, (*x.shape[:-1], weight.shape[0]))
        check.disjoint(op, "out", out)
    check.same(op, "device", x=x, norm_weight=norm_weight, weight=weight, out=out)


@kernel_op(reference=reference.rms_norm_linear, check=check_rms_norm_linear, kernel="cuda", out_may_be=())
def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rms_norm(x, norm_weight, eps), rounded to x's dtype, then ``@ weight.T``.

    T rows (of 1 to 3 leading dimensions) of N elements, M results each.

    x: [T, N], [S, T, N] or [R, S, T, N], bf16, fp16 or float32. Only the last dimension must be contiguous.
    norm_weight: *constant* [N], weight: *constant* [M, N], both of x's dtype.
    eps: added to the mean square, >= 0.
    out: the result, [..., M] of x's dtype. It shares no memory with x or the weights.

    Returns a new contiguous tensor [..., M] of x's dtype, or ``out``: products accumulated in float32, rounded once.
    On an H100 or H200 a row is the same bit for bit for 1 to 8, for 9 to 16 and for 17 to 32 rows, if x, both weights
    and the result are 16-bit and their rows aligned to 16 bytes. Otherwise a row may depend on its batch by the
    rounding of the matrix product. There are three ways to compute it:

    - One launch, for up to 16 rows on an H100 or H200 and up to 32 elsewhere: bf16 or fp16, N a multiple of 8, rows
      aligned to 16 bytes, x in the shared memory of a cluster, no large weight. It rounds x * norm_weight, and the
      row's rstd multiplies the sums in float32.
    - On an H100 or H200, other calls of up to 32 aligned rows: the kernel of :func:`kestrel_norm.rms_norm`, then a
      product that loads its weight while the norm runs.
    - All other calls: the kernel of rms_norm, then torch.mm with torch's switches for reduced precision: TF32, and
      reductions in 16 bits, which round partial sums to x's dtype.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, range or device.
    Semantics: torch.nn.functional.rms_norm, then torch.nn.functional.linear.

    >>> import torch, kestrel_norm
    >>> kestrel_norm.rms_norm_linear(torch.tensor([[3.0, 4.0]]), torch.ones(2), torch.tensor([[1.0, 1.0]]), eps=0.0)
    tensor([[1.9799]])
    """
    columns = weight.shape[0]
    result = empty(x, x.dtype, *x.shape[:-1], columns) if out is None else out
    if not _kernels.rms_norm_linear(result, x, norm_weight, weight, eps):
        normed = empty(x, x.dtype, *x.shape)
        _kernels.rms_norm(normed, x, norm_weight, eps, 0.0)
        tokens = x.shape[:-1].numel()
        rows, into = normed.view(tokens, x.shape[-1]), result.reshape(tokens, columns)
        if tokens > _STREAM_ROWS or not _kernels.product_of_norm(into, rows, weight):
            torch.mm(rows, weight.T, out=into)
        if into.data_ptr() != result.data_ptr():
            result.copy_(into.view(result.shape))
    return result
