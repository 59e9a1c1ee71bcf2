"""Checks that several ops of this family share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel_runtime import check


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
