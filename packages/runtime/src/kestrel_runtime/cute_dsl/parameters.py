"""Scalar arguments of a kernel, listed once as a NamedTuple; the host, the compiler and the kernel derive from it.

class Scalars(NamedTuple):
    num_splits: i32
    softmax_scale: f32

host         launch(*tensors, *Scalars(num_splits=4, softmax_scale=0.125))
compilation  cute.compile(kernel, *tensors, *compile_time(Scalars), stream)
kernel       scalars = Scalars(*given)
"""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

i32 = Annotated[int, "Int32"]
u32 = Annotated[int, "Uint32"]
f32 = Annotated[float, "Float32"]


def compile_time(fields: type) -> tuple[Any, ...]:
    """One value of the DSL's type for each field, to compile with; a kernel takes any value at run time."""
    import cutlass

    hints = get_type_hints(fields, include_extras=True)
    return tuple(getattr(cutlass, hint.__metadata__[0])(0) for hint in hints.values())
