"""Symmetric INT8 quantisation per row or per tensor, and its inverse."""

from __future__ import annotations

import torch

from kestrel_runtime import check, empty, kernel_op

from . import reference
from ._checks import check_codes, check_input, check_result, check_scale
from ._launch import kernels, partial_amax, result


def _check_int8_quant(x: torch.Tensor, granularity: str = "row") -> None:
    op = "int8_quant"
    check_input(op, x)
    check.choice(op, "granularity", granularity, ("row", "tensor"))


@kernel_op(reference=reference.int8_quant, check=_check_int8_quant, kernel="cuda")
def int8_quant(x: torch.Tensor, *, granularity: str = "row") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to INT8, symmetric, rounding half to even: ``x ≈ q * scale``.

    x: [T, N] bf16, fp16 or float32, any row stride. granularity: "row" or "tensor".

    Returns (q, scale): q int8 [T, N], codes -127..127; scale float32 [T, 1] or [1], the largest finite magnitude / 127,
    or 1 where that is zero. NaN becomes 0, inf saturates; neither changes the scale. With "row" a row does not
    depend on the batch around it.

    Raises ValueError or TypeError for a wrong dtype or rank or an unknown ``granularity``.
    Semantics: vLLM's scaled_int8_quant (dynamic, symmetric).

    >>> q, scale = int8_quant(torch.tensor([[254.0, -127.0, 1.0, 3.0]]))
    >>> q.tolist(), scale.tolist()
    ([[127, -64, 0, 2]], [[2.0]])
    """
    rows, columns = x.shape
    q = empty(x, torch.int8, rows, columns)
    if granularity == "tensor":
        scale, maxima = empty(x, torch.float32, 1), partial_amax(x)
    else:
        scale, maxima = empty(x, torch.float32, rows, 1), None
    kernels.int8_quant(q, scale, maxima, x, granularity)
    return q, scale


def _check_int8_dequant(
    q: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> None:
    op = "int8_dequant"
    check_codes(op, q, torch.int8)
    check_scale(op, q, scale)
    check_result(op, dtype, out, q.shape, q)


@kernel_op(reference=reference.int8_dequant, check=_check_int8_dequant, kernel="cuda")
def int8_dequant(
    q: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Undo :func:`int8_quant`: ``q * scale`` in float32, rounded once to ``dtype``.

    q: int8 [T, N], any row stride. scale: float32 [1] or [T, 1]. dtype: bf16, fp16 or float32.
    Returns [T, N] of dtype, in ``out`` if it is given (of that shape and dtype);
    ``out`` may not overlap ``q``.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device.
    Semantics: the inverse of int8_quant, with the scales of vLLM's scaled_int8_quant (dynamic, symmetric).

    >>> int8_dequant(torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([2.0]), dtype=torch.float32).tolist()
    [[254.0, -128.0]]
    """
    out = result(out, q.shape, dtype, q)
    kernels.int8_dequant(out, q, scale)
    return out
