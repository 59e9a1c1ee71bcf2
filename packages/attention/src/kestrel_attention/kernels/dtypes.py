"""The dtypes that kernels are compiled for. Imports without the DSL."""

from __future__ import annotations

from typing import Any

DTYPES = ("bf16", "fp16")
EITHER = "half"  # bf16 or fp16, selected by an argument


def numeric_type(dtype: str) -> Any:
    """The DSL's type of this name; kernels for EITHER see 16-bit elements as bf16."""
    from kestrel_runtime.cute_dsl import numeric

    return numeric.from_name("bf16" if dtype == EITHER else dtype)
