"""Checks that several ops of this family share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kestrel_runtime import check

from ._w4_layout import COLUMNS, ROWS


def check_input(op: str, x: torch.Tensor) -> None:
    """x is [T, N] floats with at least one column."""
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    if x.shape[1] == 0:
        check.fail(op, "x", "at least one column", f"shape {tuple(x.shape)}")


def check_codes(op: str, q: torch.Tensor, dtype: torch.dtype) -> None:
    """q is [T, N] codes."""
    check.tensor(op, "q", q, dtype=dtype, ndim=2, last_contiguous=True)


def check_scale(op: str, q: torch.Tensor, scale: torch.Tensor, groups: int | None = None) -> None:
    """float32 [1], [T, 1] or, where there are groups, [T, groups], any strides, where q is."""
    check.tensor(op, "scale", scale, dtype=torch.float32, ndim=(1, 2))
    if scale.ndim == 1:
        check.shape(op, "scale", scale, (1,))
    else:
        check.shape(op, "scale", scale, (q.shape[0], 1 if groups is None or scale.shape[1] == 1 else groups))
    check.same(op, "device", q=q, scale=scale)


def check_result(
    op: str, dtype: torch.dtype, out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor
) -> None:
    """dtype is a float; out is None, or of this shape and dtype and on like's device."""
    check.choice(op, "dtype", dtype, check.FLOATS)
    if out is not None:
        check.tensor(op, "out", out, dtype=dtype, last_contiguous=True)
        check.shape(op, "out", out, tuple(shape))
        check.disjoint(op, "out", out)
        check.same(op, "device", q=like, out=out)


class W4Parts(NamedTuple):
    """The fields of a W4Weight, as ops take them: one by one, since torch's schemas have no structures."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    permutation: torch.Tensor | None
    group_size: int


def check_x_and_weight(op: str, x: torch.Tensor, w: W4Parts, name: str = "w") -> tuple[int, int]:
    """x is [..., K] floats and the parts of the 4-bit weight [N, K] fit it, but for their device; returns N and K.

    name: that of the weight in messages.
    """
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    check.tensor(op, name, w.scales, dtype=check.FLOATS, ndim=2)
    check.number(op, f"{name}.group_size", w.group_size, integer=True, minimum=2)
    rows, columns = w.scales.shape[1], w.scales.shape[0] * w.group_size
    if x.ndim == 0 or x.shape[-1] != columns:
        check.fail(op, "x", f"a last dimension of {columns}, as the weight has", f"shape {tuple(x.shape)}")
    check.same(op, "dtype", **{name: w.scales}, x=x)
    check.tensor(op, name, w.codes, dtype=torch.int32)
    check.shape(op, name, w.codes, (-(-rows // ROWS), -(-columns // COLUMNS), 32, 4))
    if w.zeros is not None:
        check.tensor(op, name, w.zeros, dtype=torch.int16)
        check.shape(op, name, w.zeros, w.scales.shape)
    if w.permutation is not None:
        check.tensor(op, name, w.permutation, dtype=torch.int64)
        check.shape(op, name, w.permutation, (columns,))
    return rows, columns


def check_weight_device(op: str, x: torch.Tensor, w: W4Parts, name: str = "w") -> None:
    """The parts of a 4-bit weight are where x is."""
    for part in (w.codes, w.scales, w.zeros, w.permutation):
        check.same(op, "device", x=x, **{name: part})
