"""Functions that exist once for the host and for kernels. Imports without the DSL.

@portable.jit
def ceil_div(a, b, on): ...                # the host calls it with Python's integers

ceil_div_device = portable.compiled(ceil_div)   # in a kernel file: calls compile it
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Mark a function that kernels compile; unchanged for the host.

    The DSL rewrites the control flow of functions whose source has a decorator of this name.
    """
    return function


def compiled(function: types.FunctionType) -> Any:
    """The function under ``cute.jit``: a copy, since the DSL replaces the code of what it compiles."""
    import cutlass.cute as cute

    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return cute.jit(copy)
