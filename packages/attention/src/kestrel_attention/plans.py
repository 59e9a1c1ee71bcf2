"""Plans of calls, found by the form of their arguments: shapes, strides, dtypes, devices and numbers.

A CuTe entry point checks that its tensors fit each other, with short messages. The checks in Python take longer than a
launch, so an op makes them once for each form and keeps what follows from it. Addresses are no part of a form: calls
check these.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import torch

Plan = TypeVar("Plan")
MAX_PLANS = 4096  # of an op; each takes some 2 KB
_changes = threading.Lock()


def form(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What checks read and plans depend on; all tensors are on GPUs, or none is."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])


class Plans(dict[Any, Plan], Generic[Plan]):
    """Plans by key. A key holds the type of each number too, since True and 1 are equal."""

    def keep(self, key: Any, plan: Plan) -> Plan:
        """Store a plan; the oldest is dropped at MAX_PLANS."""
        with _changes:
            if key not in self and len(self) >= MAX_PLANS:
                del self[next(iter(self))]
            self[key] = plan
        return plan
