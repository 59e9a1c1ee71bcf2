"""Checks that several ops of this family share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel_runtime import check

APPROXIMATIONS = ("none", "tanh")


def check_out(
    op: str, out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """``out`` is None, or has this shape and the device and dtype of ``like`` (or the dtype given)."""
    if out is not None:
        check.tensor(op, "out", out, dtype=dtype or like.dtype, last_contiguous=True)
        check.shape(op, "out", out, tuple(shape))
        check.disjoint(op, "out", out)
        check.same(op, "device", input=like, out=out)


def check_gated_input(op: str, x: torch.Tensor) -> int:
    """x is [..., 2F]; returns F."""
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    if x.ndim == 0 or x.shape[-1] % 2 or x.shape[-1] == 0:
        check.fail(op, "x", "an even last dimension [..., 2F]", f"shape {tuple(x.shape)}")
    return x.shape[-1] // 2


def check_linear(
    op: str, x: torch.Tensor, x_name: str, weight: torch.Tensor, weight_name: str, width: int | None = None
) -> int:
    """weight is [N, K] in x's dtype and on its device; K is ``width``, or x's last dimension. Returns N."""
    check.tensor(op, weight_name, weight, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    check.shape(op, weight_name, weight, (None, x.shape[-1] if width is None else width))
    check.same(op, "dtype", **{x_name: x, weight_name: weight})
    check.same(op, "device", **{x_name: x, weight_name: weight})
    return weight.shape[0]


def check_vector(op: str, name: str, value: torch.Tensor | None, size: int, x: torch.Tensor) -> None:
    """A bias: None, or [size] in x's dtype and on its device."""
    if value is not None:
        check.tensor(op, name, value, dtype=check.FLOATS, last_contiguous=True)
        check.shape(op, name, value, (size,))
        check.same(op, "dtype", x=x, **{name: value})
        check.same(op, "device", x=x, **{name: value})


def check_like(op: str, name: str, value: torch.Tensor | None, shape: Sequence[int], x: torch.Tensor) -> None:
    """A residual: None, or this shape in x's dtype and on its device."""
    if value is not None:
        check.tensor(op, name, value, dtype=check.FLOATS, last_contiguous=True)
        check.shape(op, name, value, tuple(shape))
        check.same(op, "dtype", x=x, **{name: value})
        check.same(op, "device", x=x, **{name: value})


def check_overlaps(op: str, out: torch.Tensor | None, **others: torch.Tensor | None) -> None:
    """``out`` shares no memory with the others; for calls that begin with the vendor's product, which does not look."""
    for name, other in others.items():
        if out is not None and other is not None:
            check.no_overlap(op, "out", out, name, other)
