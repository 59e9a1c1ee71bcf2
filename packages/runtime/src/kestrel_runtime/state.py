"""The choice of the implementation: the environment variable KESTREL_BACKEND and the context manager backend()."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

BACKENDS = ("auto", "kernel", "reference")


def _validated(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


_default = _validated(os.environ.get("KESTREL_BACKEND", "auto"), "environment variable KESTREL_BACKEND")
_chosen: contextvars.ContextVar[str] = contextvars.ContextVar("kestrel_backend", default=_default)

current_backend = _chosen.get


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose how ops run inside a ``with`` block, in this thread or task.

    ``"auto"``: the kernel where there is one, else the reference with one warning per op and reason.
    ``"kernel"``: a call that would run a reference raises UnsupportedError.
    ``"reference"``: nothing is launched; every op runs its PyTorch reference.

    >>> with backend("reference"):
    ...     current_backend()
    'reference'
    """
    token = _chosen.set(_validated(name, "backend"))
    try:
        yield
    finally:
        _chosen.reset(token)
