"""Linear layers of the feed-forward block: with a residual, for few tokens, and for router logits."""

from __future__ import annotations

import torch

from kestrel_runtime import check, kernel_op

from . import reference
from ._checks import check_like, check_linear, check_out, check_vector


def _check_input(op: str, x: torch.Tensor) -> None:
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    if x.ndim == 0:
        check.fail(op, "x", "at least 1 dimension [..., K]", f"shape {tuple(x.shape)}")


def _check_fused_linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
) -> None:
    op = "fused_linear_residual"
    _check_input(op, x)
    width = check_linear(op, x, "x", weight, "weight")
    check_vector(op, "bias", bias, width, x)
    check.tensor(op, "residual", residual)
    check_like(op, "residual", residual, (*x.shape[:-1], width), x)
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.fused_linear_residual, check=_check_fused_linear_residual)
def fused_linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer added to a residual: ``x @ weight.T + bias + residual``.

    x: [..., K] bf16, fp16 or float32. weight: [N, K], bias: [N] or None, residual: [..., N], all in x's dtype.
    *Constant*: weight, bias. Accumulated in float32, rounded once.

    Returns [..., N] in x's dtype, in ``out`` if it is given; ``out`` may be ``residual`` but not ``x``.
    By reference each number of rows T is a range of its own: at one T a row is the same bit for bit whatever the other
    rows hold; at another it may differ by rounding, for the matrix product chooses its order of summation by T.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: torch.nn.functional.linear.

    >>> fused_linear_residual(torch.tensor([[1.0, 2.0]]), 3 * torch.eye(2), None, torch.ones(1, 2)).tolist()
    [[4.0, 7.0]]
    """


def _check_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> None:
    op = "gemv"
    _check_input(op, x)
    width = check_linear(op, x, "x", weight, "weight")
    check_vector(op, "bias", bias, width, x)
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.gemv, check=_check_gemv)
def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer for few tokens: ``x @ weight.T + bias``.

    x: [..., K] bf16, fp16 or float32, one row or a few (any number is right). weight: [N, K], bias: [N] or None, in
    x's dtype. *Constant*: weight, bias. Accumulated in float32, rounded once.

    Returns [..., N] in x's dtype, in ``out`` if it is given; ``out`` may not overlap ``x``.
    By reference each number of rows T is a range of its own: at one T a row is the same bit for bit whatever the other
    rows hold; at another it may differ by rounding, for the matrix product chooses its order of summation by T.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: torch.nn.functional.linear.

    >>> gemv(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, -1.0]])).tolist()
    [3.0, -2.0]
    """


def _check_router_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> None:
    op = "router_gemm"
    _check_input(op, x)
    experts = check_linear(op, x, "x", weight, "weight")
    check_out(op, out, (*x.shape[:-1], experts), x, dtype=torch.float32)


@kernel_op(reference=reference.router_gemm, check=_check_router_gemm)
def router_gemm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Router logits in float32: ``x @ weight.T`` without the rounding a linear layer in 16 bits would add.

    x: [..., Hd] bf16, fp16 or float32. weight: [E, Hd] in x's dtype. *Constant*: weight. Accumulated in float32.

    Returns float32 [..., E], in ``out`` if it is given.
    By reference each number of rows T is a range of its own: at one T a row is the same bit for bit whatever the other
    rows hold; at another it may differ by rounding, for the matrix product chooses its order of summation by T.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device.
    Semantics: the gate of a routed layer, as vLLM's router GEMM computes it.

    >>> router_gemm(torch.tensor([[1.0, 2**-9]]).bfloat16(), torch.ones(1, 2).bfloat16()).item()
    1.001953125
    """
