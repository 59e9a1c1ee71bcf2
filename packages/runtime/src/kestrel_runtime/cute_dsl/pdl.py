# mypy: ignore-errors
"""Programmatic dependent launch (PDL), for kernels launched with ``use_pdl=True`` on sm_90 and later.

A kernel triggers after its own wait: otherwise what a later launch reads before its wait may still be written by a
launch two positions earlier in the stream. Before the wait, only constants may be read, and lines prefetched into L2.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cutlass_dsl import dsl_user_op

from .ptx import assemble


def wait() -> None:
    """Wait until the launches that this one depends on have completed and their writes are visible."""
    cute.arch.griddepcontrol_wait()


def trigger() -> None:
    """Allow the dependent launch to start."""
    cute.arch.griddepcontrol_launch_dependents()


@dsl_user_op
def wait_after(value: Int64, *, loc=None, ip=None) -> None:
    """:func:`wait`, once ``value`` is computed. ``value`` is not 0: addresses that must be ready, joined by ``|``."""
    text = "{.reg .pred p; setp.ne.s64 p, $0, 0; @p griddepcontrol.wait;}"
    assemble(text, "l,~{memory}", [Int64(value)], [], True, loc, ip)
