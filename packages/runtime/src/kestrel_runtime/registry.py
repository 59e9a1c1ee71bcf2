"""Every imported op, and counts of how calls were served."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelOp:
    """One registered op: its name, its launch function, its reference, its check."""

    family: str
    name: str
    kernel: str | None
    """"cuda" (CUDA C++), "cute" (CuTe DSL), or None while the op has only its reference."""
    mutates: tuple[str, ...]
    launch: Callable[..., Any] = field(repr=False)
    reference: Callable[..., Any] = field(repr=False)
    check: Callable[..., None] = field(repr=False)

    @property
    def qualified_name(self) -> str:
        return f"{self.family}.{self.name}"


_ops: dict[str, KernelOp] = {}
_tracers: list[dict[str, dict[str, int]]] = []


def register(op: KernelOp) -> None:
    _ops[op.qualified_name] = op


def ops(family: str | None = None) -> list[KernelOp]:
    """The ops of every family imported so far (or of one family), sorted by name."""
    return [op for name, op in sorted(_ops.items()) if family is None or op.family == family]


def count(op: KernelOp, how: str) -> None:
    for tracer in _tracers:
        served = tracer.setdefault(op.qualified_name, {"kernel": 0, "reference": 0})
        served[how] += 1


@contextlib.contextmanager
def trace() -> Iterator[dict[str, dict[str, int]]]:
    """Count, inside a ``with`` block, how many calls of each op ran as a kernel and how many by reference.

    Yields a dict that fills as ops run: ``{"kestrel_norm.rms_norm": {"kernel": 3, "reference": 0}}``.
    Replays of a CUDA graph are not calls and are not counted.
    """
    counts: dict[str, dict[str, int]] = {}
    _tracers.append(counts)
    try:
        yield counts
    finally:
        _tracers[:] = [tracer for tracer in _tracers if tracer is not counts]
