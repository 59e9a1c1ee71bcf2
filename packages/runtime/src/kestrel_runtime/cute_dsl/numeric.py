# mypy: ignore-errors
"""Numeric types of the DSL: by the name a variant has for them, in PTX, elements per 16 bytes."""

from __future__ import annotations

import cutlass

_BY_NAME = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}


def from_name(name: str) -> type[cutlass.Numeric]:
    """The type of ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    return _BY_NAME[name]


def ptx_name(dtype: type[cutlass.Numeric]) -> str:
    """How PTX names a 16-bit type: ``"bf16"`` or ``"f16"``."""
    return {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}[dtype]


def bytes_of(dtype: type[cutlass.Numeric]) -> int:
    """Bytes of an element."""
    return dtype.width // 8


def vector_elements(dtype: type[cutlass.Numeric]) -> int:
    """Elements in 16 bytes."""
    return 128 // dtype.width
