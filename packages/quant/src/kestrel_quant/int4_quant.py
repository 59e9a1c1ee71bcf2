"""Symmetric INT4 quantisation per group of columns, two codes to a byte, and its inverse."""

from __future__ import annotations

import torch

from kestrel_runtime import check, empty, kernel_op

from . import reference
from ._checks import check_codes, check_input, check_result
from ._launch import groups_of, kernels, result


def _check_int4_quant(x: torch.Tensor, group_size: int = 128) -> None:
    op = "int4_quant"
    check_input(op, x)
    if x.shape[1] % 2:
        check.fail(op, "x", "an even number of columns", f"shape {tuple(x.shape)}")
    check.number(op, "group_size", group_size, integer=True, minimum=1)


@kernel_op(reference=reference.int4_quant, check=_check_int4_quant, kernel="cuda")
def int4_quant(x: torch.Tensor, *, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to INT4, symmetric, rounding half to even: ``x ≈ code * scale``.

    x: [T, N] bf16, fp16 or float32, N even, any row stride. group_size: columns that share a scale (the last group of
    a row may be shorter).

    Returns (q, scale): q uint8 [T, N/2], two's complement nibbles, even columns in the low one, codes -7..7; scale
    float32 [T, ceil(N/G)], the largest finite magnitude / 7, or 1 where that is zero. NaN becomes 0, inf saturates;
    neither changes the scale. A row does not depend on the batch around it.

    Raises ValueError or TypeError for a wrong dtype or rank, an odd N or a group of less than one column.
    Semantics: this package's own; symmetric absmax per group of columns, as int8_quant has it per row, with 7 for 127.

    >>> x = torch.tensor([[7.0, -2.0, 1.0, 14.0]])  # two groups: scales 7 / 7 and 14 / 7
    >>> q, scale = int4_quant(x, group_size=2)  # codes 7, -2 and 0 (1 / 2 is a tie), 7: bytes 0xE7 and 0x70
    >>> q.tolist(), scale.tolist()
    ([[231, 112]], [[1.0, 2.0]])
    """
    rows, columns = x.shape
    q = empty(x, torch.uint8, rows, columns // 2)
    scale = empty(x, torch.float32, rows, groups_of(columns, group_size))
    kernels.int4_quant(q, scale, x, group_size)
    return q, scale


def _check_int4_dequant(
    q: torch.Tensor,
    scale: torch.Tensor,
    group_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> None:
    op = "int4_dequant"
    check_codes(op, q, torch.uint8)
    check.number(op, "group_size", group_size, integer=True, minimum=1)
    rows, columns = q.shape[0], 2 * q.shape[1]
    check.tensor(op, "scale", scale, dtype=torch.float32, ndim=2)
    check.shape(op, "scale", scale, (rows, (columns + group_size - 1) // group_size))
    check.same(op, "device", q=q, scale=scale)
    check_result(op, dtype, out, (rows, columns), q)


@kernel_op(reference=reference.int4_dequant, check=_check_int4_dequant, kernel="cuda")
def int4_dequant(
    q: torch.Tensor,
    scale: torch.Tensor,
    *,
    group_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Undo :func:`int4_quant`: ``code * scale`` in float32, rounded once to ``dtype``.

    q: uint8 [T, N/2], two's complement nibbles, even columns in the low one, any row stride. scale: float32
    [T, ceil(N/G)], any strides. dtype: bf16, fp16 or float32.
    Returns [T, N] of dtype, in ``out`` if it is given (of that shape and dtype);
    ``out`` may not overlap ``q``.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device.
    Semantics: the inverse of int4_quant, in its own format.

    >>> q = torch.tensor([[0xE7, 0x20]], dtype=torch.uint8)
    >>> int4_dequant(q, torch.tensor([[0.5]]), dtype=torch.float32).tolist()
    [[3.5, -1.0, 0.0, 1.0]]
    """
    out = result(out, (q.shape[0], 2 * q.shape[1]), dtype, q)
    kernels.int4_dequant(out, q, scale, group_size)
    return out
