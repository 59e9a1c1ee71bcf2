"""LayerNorm over the last dimension."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference

_kernels = Binary("kestrel_norm")


def check_vectors(op: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
    """Checks that the LayerNorms share: weight and bias [N] of x's dtype, and eps."""
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check.tensor(op, name, vector, dtype=x.dtype, last_contiguous=True)
            check.shape(op, name, vector, x.shape[-1:])
    check.number(op, "eps", eps, minimum=0)


def check_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
) -> None:
    op = "layer_norm"
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=(2, 3, 4), last_contiguous=True)
    check_vectors(op, x, weight, bias, eps)
    if out is not None:
        check.tensor(op, "out", out, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "out", out, x.shape)
        check.disjoint(op, "out", out)
    check.same(op, "device", x=x, weight=weight, bias=bias, out=out)


@kernel_op(reference=reference.layer_norm, check=check_layer_norm, kernel="cuda", out_may_be=("x",))
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the last dimension to mean 0 and variance 1, scale and shift it: (x - mean) * rstd * weight + bias.

    T rows (of 1 to 3 leading dimensions) of N elements; any N.

    x: [T, N], [S, T, N] or [R, S, T, N], bf16, fp16 or float32. Only the last dimension must be contiguous.
    weight, bias: *constant* [N], dtype of x, or None: no scale, no shift.
    eps: added to the variance, >= 0.
    out: the result, shape and dtype of x. It may be x itself, but shares no memory with anything else.

    Returns a new contiguous tensor like x, or ``out``. Statistics are float32 (variance over N, from differences to a
    value near the mean); the result is rounded once. A row's result does not depend on the other rows, bit for bit.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, range or device.
    Semantics: torch.nn.functional.layer_norm; Ba et al., "Layer Normalization", arXiv 1607.06450.

    >>> import torch, kestrel_norm
    >>> kestrel_norm.layer_norm(torch.tensor([[1.0, 2.0, 3.0, 6.0]]), eps=0.0)
    tensor([[-1.0690, -0.5345,  0.0000,  1.6036]])
    """
    if out is None:
        out = empty(x, x.dtype, *x.shape)
    _kernels.layer_norm(out, x, weight, bias, eps)
    return out
