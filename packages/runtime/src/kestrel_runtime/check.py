"""Checks of op arguments. Every message reads: ``op: argument 'name': expected ..., got ...``.

The entry points of the binaries make the same checks with the same wording, so a caller sees one language of errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)

_is_compiling = torch.compiler.is_dynamo_compiling


def fail(op: str, name: str, expected: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise ``kind`` with the one wording that all checks share."""
    raise kind(f"{op}: argument '{name}': expected {expected}, got {got}")


def _dtype_name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_text(shape: Sequence[object]) -> str:
    sizes = ["any" if size is None else str(size) for size in shape]
    return "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"


def tensor(
    op: str,
    name: str,
    value: Any,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    ndim: int | tuple[int, ...] | None = None,
    last_contiguous: bool = False,
) -> None:
    """``value`` is a tensor of one of the dtypes and ranks, its last dimension contiguous if asked for."""
    if not isinstance(value, torch.Tensor):
        fail(op, name, "a tensor", type(value).__name__, TypeError)
    if value.layout != torch.strided:
        fail(op, name, "a strided tensor", f"layout {_dtype_name(value.layout)}")
    if not _is_compiling() and (value.is_neg() or value.is_conj()):  # a compiler traces resolved tensors
        fail(op, name, "a tensor of plain values", "a view that negates or conjugates (see Tensor.resolve_neg)")
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if value.dtype not in allowed:
            fail(op, name, "dtype " + " or ".join(map(_dtype_name, allowed)), _dtype_name(value.dtype), TypeError)
    if ndim is not None:
        ranks = (ndim,) if isinstance(ndim, int) else ndim
        if value.ndim not in ranks:
            wanted = " or ".join(f"{rank}-D" for rank in ranks)
            fail(op, name, f"a {wanted} tensor", f"{value.ndim}-D of shape {_shape_text(value.shape)}")
    if last_contiguous and value.ndim > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        fail(op, name, "a contiguous last dimension (stride 1)", f"stride {value.stride(-1)}")


def shape(op: str, name: str, value: torch.Tensor, expected: Sequence[int | None]) -> None:
    """``value`` has exactly this shape; None stands for any size."""
    fits = value.ndim == len(expected) and all(
        want is None or have == want for have, want in zip(value.shape, expected, strict=True)
    )
    if not fits:
        fail(op, name, f"shape {_shape_text(expected)}", _shape_text(value.shape))


def disjoint(op: str, name: str, value: torch.Tensor) -> None:
    """No two elements of ``value``, which is written, are the same memory through a dimension of stride 0."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        strides = _shape_text(value.stride())
        fail(op, name, "a tensor to write whose elements do not share memory", f"strides {strides}")


def same(op: str, what: str, **tensors: torch.Tensor | None) -> None:
    """All given tensors agree in ``what`` ("dtype" or "device"); None is skipped. The first one sets the standard."""
    given = [(name, value) for name, value in tensors.items() if value is not None]
    first_name, first = given[0]
    wanted = getattr(first, what)
    for name, value in given[1:]:
        have = getattr(value, what)
        if have != wanted:
            kind = TypeError if what == "dtype" else ValueError
            expected, got = str(wanted).removeprefix("torch."), str(have).removeprefix("torch.")
            fail(op, name, f"{what} {expected} as {first_name} has", got, kind)


def number(
    op: str,
    name: str,
    value: Any,
    *,
    integer: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> None:
    """``value`` is a number (not a bool, not NaN) with ``minimum <= value <= maximum`` and ``value > above``."""
    kinds = (int, torch.SymInt) if integer else (int, float, torch.SymInt, torch.SymFloat)
    wanted = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, kinds):
        fail(op, name, wanted, f"{type(value).__name__} {value!r}", TypeError)
    if isinstance(value, float) and math.isnan(value):
        fail(op, name, wanted, "nan")
    if minimum is not None and value < minimum:
        fail(op, name, f"{wanted} >= {minimum}", value)
    if maximum is not None and value > maximum:
        fail(op, name, f"{wanted} <= {maximum}", value)
    if above is not None and value <= above:
        fail(op, name, f"{wanted} > {above}", value)
    if isinstance(value, int):
        low, high = (-(2**63) if minimum is None else minimum), (2**63 - 1 if maximum is None else maximum)
        if not low <= value <= high:
            fail(op, name, f"{wanted} of finite magnitude, within 64 bits", f"one of {value.bit_length()} bits")


def flag(op: str, name: str, value: object) -> None:
    """``value`` is a bool; nothing else counts as true or false, so that "no" is not taken for yes."""
    if not isinstance(value, bool):
        fail(op, name, "True or False", type(value).__name__, TypeError)


def choice(op: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """``value`` is one of ``allowed``."""
    if value not in allowed:
        fail(op, name, "one of " + ", ".join(map(repr, allowed)), repr(value))
