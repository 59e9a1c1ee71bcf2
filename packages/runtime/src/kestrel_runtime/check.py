"""Checks of op arguments. Every message reads: ``op: argument 'name': expected ..., got ...``.

The C++ entry points make the same checks with the same wording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)

_is_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_LONGEST_TEXT = 80


def shown(value: object) -> str:
    """``value`` in a message: its repr, shortened; of a tensor its type and shape, as values may not be readable.

    >>> shown("row"), shown([0] * 100)[-8:], shown(torch.zeros(2, 3))
    ("'row'", ' 0, 0...', 'a Tensor of shape (2, 3)')
    """
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {_shape_text(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 64:  # repr refuses thousands of digits
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # of any kind: the type is the caller's
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def fail(op: str, name: str, expected: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise ``kind`` with the wording that all checks share."""
    if isinstance(got, (int, torch.Tensor)):
        got = shown(got)
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
    """``value`` is a strided tensor of one of the dtypes and ranks; with last_contiguous its last stride is 1."""
    if not isinstance(value, torch.Tensor):
        fail(op, name, "a tensor", type(value).__name__, TypeError)
    if value.layout != torch.strided:
        fail(op, name, "a strided tensor", f"layout {_dtype_name(value.layout)}")
    if not _is_compiling() and (value.is_neg() or value.is_conj()):  # torch.compile traces resolved tensors
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
    """No two elements of ``value``, which is written, share memory, whatever its strides."""
    if _shares_memory_within(value):
        strides = _shape_text(value.stride())
        fail(op, name, "a tensor to write whose elements do not share memory", f"strides {strides}")


def no_overlap(
    op: str,
    name: str,
    written: torch.Tensor,
    other_name: str,
    other: torch.Tensor,
    *,
    may_be_same: bool = False,
    may_be_columns: bool = False,
) -> None:
    """``written`` shares no memory with ``other``; or it is the same view, or columns of it, where the op allows that.

    Strided views of one buffer may interleave: what counts is whether an element of one lies on an element of the
    other. ``@kernel_op`` makes this check for all written arguments before a reference runs.
    """
    if (may_be_same and _is_same_view(written, other)) or (may_be_columns and _is_columns_of(written, other)):
        return
    if _share_memory(written, other):
        fail(op, name, f"a tensor to write that shares no memory with '{other_name}'", "tensors that overlap")


def _is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (
        (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
        and has_memory(a)
        and has_memory(b)
        and a.data_ptr() == b.data_ptr()
    )


def _is_columns_of(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether part is whole[..., i:j]."""
    if part.dtype != whole.dtype or part.ndim != whole.ndim or not (has_memory(part) and has_memory(whole)):
        return False
    width, start = part.element_size(), part.data_ptr() - whole.data_ptr()
    return (
        part.device == whole.device
        and part.shape[:-1] == whole.shape[:-1]
        and part.stride() == whole.stride()
        and 0 <= start <= width * whole.stride(-1) * (whole.shape[-1] - part.shape[-1])
        and start % (width * whole.stride(-1)) == 0
    )


def has_memory(value: torch.Tensor) -> bool:
    """Whether the addresses of ``value`` are known.

    They are not for tensors that are fake, meta, sparse, wrapped by a subclass or a transform (torch.func), or being
    compiled.
    """
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and (value.is_cuda or value.is_cpu)
        and value.layout == torch.strided
        and not _is_transformed(value)
    )


def _shares_memory_within(x: torch.Tensor) -> bool:
    dims = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    if any(stride == 0 for stride, _ in dims):
        return bool(all(size != 0 for size in x.shape))
    if _is_compiling() or any(type(number) is not int for dim in dims for number in dim) or 0 in x.shape:
        return False  # the check would specialise the graph on every size; it runs in the call of the compiled graph
    reach, nested = 0, True
    for stride, size in dims:
        nested = nested and stride > reach
        reach += stride * (size - 1)
    if nested:
        return False
    # Two different indices with one address differ by d with sum(d * stride) == 0. The loop goes over the first
    # dimension with d != 0; by symmetry d > 0 there.
    dims.reverse()
    for i, (stride, size) in enumerate(dims):
        rest = dims[i + 1 :]
        target = sum(s * (n - 1) for s, n in rest) - stride
        if _has_solution([(stride, size - 1), *((s, 2 * n - 1) for s, n in rest)], target, target):
            return True
    return False


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (has_memory(a) and has_memory(b)):
        return False
    distance, span_a, span_b = a.data_ptr() - b.data_ptr(), span(a), span(b)
    if distance >= span_b or -distance >= span_a or a.device != b.device or not (span_a and span_b):
        return False
    terms: dict[int, int] = {}
    for x in (a, b):
        width = x.element_size()
        for size, stride in zip(x.shape, x.stride(), strict=True):
            if size > 1 and stride > 0:
                terms[width * stride] = terms.get(width * stride, 1) + size - 1
    # The sum of the terms, plus base, runs over all differences of an address in a and an address in b.
    base = distance - (span_b - b.element_size())
    low, high = 1 - a.element_size() - base, b.element_size() - 1 - base
    return _has_solution(sorted(terms.items(), reverse=True), low, high)


def span(x: torch.Tensor) -> int:
    """Bytes from the first element of ``x`` to the end of the last one, whatever lies between them; 0 if it is empty.

    >>> span(torch.zeros(4, 8)[:, :3])
    108
    """
    reach = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size == 0:
            return 0
        reach += (size - 1) * stride
    return reach * x.element_size()


_MOST_CANDIDATES = 10_000  # that _has_solution tries: a bound of the host time, as in kestrel/memory.h


def _has_solution(terms: list[tuple[int, int]], low: int, high: int) -> bool:
    """Whether low <= sum(c * x) <= high for some 0 <= x < n; terms are (c, n) with c > 0, the largest c first.

    Strides of tensors usually nest, which leaves one or two candidates per term. After _MOST_CANDIDATES the answer is
    False.
    """
    reach = [0]
    for c, n in reversed(terms):
        reach.append(reach[-1] + c * (n - 1))
    reach.reverse()
    stack = [(0, low, high)]
    left = _MOST_CANDIDATES
    while stack and left > 0:
        left -= 1
        i, low, high = stack.pop()
        if high < 0 or low > reach[i]:
            continue
        if i == len(terms):
            return True
        c, n = terms[i]
        start = max(0, -((reach[i + 1] - low) // c))
        stop = min(n - 1, high // c)
        stack.extend((i + 1, low - c * x, high - c * x) for x in range(start, min(stop + 1, start + left)))
    return False


def same(op: str, what: str, **tensors: torch.Tensor | None) -> None:
    """All given tensors agree with the first one in ``what`` ("dtype" or "device"); None is skipped."""
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
    """``value`` is a number (not a bool, not NaN) with ``minimum <= value <= maximum`` and ``value > above``.

    Without bounds, integers are limited to 64 bits.
    """
    kinds = (int, torch.SymInt) if integer else (int, float, torch.SymInt, torch.SymFloat)
    wanted = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, kinds):
        got = shown(value) if isinstance(value, torch.Tensor) else f"{type(value).__name__} {shown(value)}"
        fail(op, name, wanted, got, TypeError)
    if value != value:  # nan; math.isnan breaks the graph of torch.compile
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
    """``value`` is a bool; no other type counts as true or false."""
    if not isinstance(value, bool):
        fail(op, name, "True or False", type(value).__name__, TypeError)


def choice(op: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """``value`` is one of ``allowed``."""
    kinds = (*{type(each) for each in allowed}, torch.SymInt)
    if not isinstance(value, kinds) or value not in allowed:  # arrays and tensors compare by elements
        fail(op, name, "one of " + ", ".join(map(repr, allowed)), shown(value))
