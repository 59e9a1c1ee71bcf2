"""FP8 (e4m3fn) quantisation per row, per tensor or per group of columns, and its inverse."""

from __future__ import annotations

from typing import Literal

import torch

from kestrel_runtime import check, empty, kernel_op

from . import reference
from ._checks import check_codes, check_input, check_result, check_scale
from ._launch import groups_of, kernels, partial_amax, result

_GRANULARITIES = ("row", "tensor", "group")


def fp8_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    granularity: Literal["row", "tensor", "group"] = "row",
    group_size: int = 128,
    scale_ub: torch.Tensor | None = None,
    column_major_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to FP8 e4m3fn, saturating, rounding to nearest even: ``x ≈ q * scale``.

    x: [T, N] bf16, fp16 or float32, any row stride.
    scale: float32 [1] or [T, 1], positive: used and returned unchanged. None computes it:
        ``max(min(amax, scale_ub), 1e-12) / 448`` with amax the largest finite magnitude of each row, of the tensor or
        of each group of ``group_size`` columns (the last group may be shorter).
    granularity: which elements share a computed scale: a "row", the whole "tensor", or a "group" of ``group_size``
        columns of a row. With a given ``scale`` its shape decides, and "group" is refused.
    scale_ub: float32 [1], an upper bound of amax; values above it saturate. Not allowed with ``scale``.
    column_major_scales: "group" only; the scales then have strides (1, T rounded up to a multiple of 4), as
        block-scaled GEMMs read them.

    Returns (q, scale): q float8_e4m3fn [T, N]; scale float32 [T, 1] ("row"), [1] ("tensor"), [T, ceil(N/G)] ("group").
    NaN becomes the code NaN, inf saturates to ±448; neither changes the scale. A row of zeros gives zeros and a
    finite scale. With "row" and "group" a row does not depend on the batch around it.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, for ``scale_ub``, "group" or
    ``column_major_scales`` together with ``scale``, and for ``column_major_scales`` without "group".
    Semantics: vLLM's scaled_fp8_quant ("row", "tensor") and DeepGEMM's per-token-group cast ("group").

    >>> q, scale = fp8_quant(torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    >>> q.float().tolist(), (q.float() * scale).tolist()
    ([[224.0, -448.0, 112.0], [0.0, 0.0, 0.0]], [[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    >>> x = torch.tensor([[448.0, -224.0, 1792.0, 896.0]])  # two groups: scales 448 / 448 and 1792 / 448
    >>> q, scale = fp8_quant(x, granularity="group", group_size=2)
    >>> q.float().tolist(), scale.tolist()
    ([[448.0, -224.0, 448.0, 224.0]], [[1.0, 4.0]])
    """
    if scale is None and column_major_scales is False:  # the usual call
        return _fp8_quant(x, granularity, group_size, scale_ub, column_major_scales=False)
    check.flag("fp8_quant", "column_major_scales", column_major_scales)
    if scale is None:
        q, scales = _fp8_quant(x, granularity, group_size, scale_ub, column_major_scales=True)
        groups, padded = scales.shape
        return q, scales.as_strided((x.shape[0], groups), (1, padded))  # as scales[:, :T].t(), in one step
    check.choice("fp8_quant", "granularity", granularity, _GRANULARITIES)
    if granularity == "group":
        check.fail("fp8_quant", "granularity", "'row' or 'tensor' with a given scale", repr(granularity))
    if scale_ub is not None:
        check.fail("fp8_quant", "scale_ub", "None with a given scale", "a bound")
    if column_major_scales:
        check.fail("fp8_quant", "column_major_scales", "False with a given scale", True)
    return _fp8_quant_static(x, scale), scale


def _check_fp8_quant(
    x: torch.Tensor, granularity: str, group_size: int, scale_ub: torch.Tensor | None, column_major_scales: bool
) -> None:
    op = "fp8_quant"
    check_input(op, x)
    check.choice(op, "granularity", granularity, _GRANULARITIES)
    check.number(op, "group_size", group_size, integer=True, minimum=1)
    if scale_ub is not None:
        check.tensor(op, "scale_ub", scale_ub, dtype=torch.float32)
        check.shape(op, "scale_ub", scale_ub, (1,))
        check.same(op, "device", x=x, scale_ub=scale_ub)
    if column_major_scales and granularity != "group":
        check.fail(op, "column_major_scales", "False unless granularity is 'group'", True)


@kernel_op(reference=reference.fp8_quant, check=_check_fp8_quant, kernel="cuda")
def _fp8_quant(
    x: torch.Tensor, granularity: str, group_size: int, scale_ub: torch.Tensor | None, column_major_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic scales; column-major ones as their buffer, [groups, T rounded up to a multiple of 4]."""
    rows, columns = x.shape
    q, maxima = empty(x, torch.float8_e4m3fn, rows, columns), None
    if granularity == "tensor":
        scale, maxima = empty(x, torch.float32, 1), partial_amax(x)
    elif granularity == "group":
        groups = groups_of(columns, group_size)
        shape = (groups, -(-rows // 4) * 4) if column_major_scales else (rows, groups)
        scale = empty(x, torch.float32, *shape)
    else:
        scale = empty(x, torch.float32, rows, 1)
    kernels.fp8_quant(q, scale, maxima, x, granularity, group_size, scale_ub, column_major_scales)
    return q, scale


def _check_fp8_quant_static(x: torch.Tensor, scale: torch.Tensor) -> None:
    op = "fp8_quant"
    check_input(op, x)
    check.tensor(op, "scale", scale, dtype=torch.float32, ndim=(1, 2))
    check.shape(op, "scale", scale, (1,) if scale.ndim == 1 else (x.shape[0], 1))
    check.same(op, "device", x=x, scale=scale)


@kernel_op(reference=reference.fp8_quant_static, check=_check_fp8_quant_static, kernel="cuda", public="fp8_quant")
def _fp8_quant_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A given scale, [1] or [T, 1]."""
    q = empty(x, torch.float8_e4m3fn, *x.shape)
    kernels.fp8_quant_static(q, x, scale)
    return q


def _check_fp8_dequant(
    q: torch.Tensor,
    scale: torch.Tensor,
    group_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> None:
    op = "fp8_dequant"
    check_codes(op, q, torch.float8_e4m3fn)
    check.number(op, "group_size", group_size, integer=True, minimum=1)
    check_scale(op, q, scale, (q.shape[1] + group_size - 1) // group_size)
    check_result(op, dtype, out, q.shape, q)


@kernel_op(reference=reference.fp8_dequant, check=_check_fp8_dequant, kernel="cuda")
def fp8_dequant(
    q: torch.Tensor,
    scale: torch.Tensor,
    *,
    group_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Undo :func:`fp8_quant`: ``q * scale`` in float32, rounded once to ``dtype``.

    q: float8_e4m3fn [T, N], any row stride. scale: float32 [1], [T, 1] or [T, ceil(N/G)], any strides; the shape says
    which. dtype: bf16, fp16 or float32. Returns [T, N] of dtype, in ``out`` if it is given (of that shape and dtype);
    ``out`` may not overlap ``q``.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device.
    Semantics: the inverse of fp8_quant: the scales of vLLM's scaled_fp8_quant and DeepGEMM's per-token-group cast.

    >>> q = torch.tensor([[1.0, -448.0]]).to(torch.float8_e4m3fn)
    >>> fp8_dequant(q, torch.tensor([[0.5]]), dtype=torch.float32).tolist()
    [[0.5, -224.0]]
    """
    out = result(out, q.shape, dtype, q)
    kernels.fp8_dequant(out, q, scale, group_size)
    return out
