# mypy: ignore-errors
"""Arguments to compile a kernel with: fake tensors of symbolic shapes and strides, and the stream."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


def strided(dtype: Any, *shape: Any, unit: int = 1) -> Any:
    """A tensor of any 64-bit strides that are multiples of ``unit`` elements; the last dimension is contiguous."""
    strides = tuple(cute.sym_int64(divisibility=unit) for _ in shape[:-1])
    align = dtype.width // 8 * unit
    return cute.runtime.make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=align)


def contiguous(dtype: Any, *shape: Any, align: int | None = 16) -> Any:
    """A contiguous tensor; ``align`` None assumes the alignment of an element alone."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def any_strides(dtype: Any, *shape: Any) -> Any:
    """A tensor of any 64-bit strides."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride=tuple(cute.sym_int64() for _ in shape))


def torch_stream() -> Any:
    """torch's current stream, which the entry point finds by itself."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
