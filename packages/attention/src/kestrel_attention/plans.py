"""Remembering what the shapes, strides, dtypes and devices of a call's tensors decide.

A CuTe entry point sees to it that tensors fit each other, and says little where they do not; the rest an op checks in
Python, which takes longer than the launch. So an op checks a form once, works out what follows from it, and finds both
under the form in later calls. What a form does not hold (addresses) is looked at in each call.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import torch

Plan = TypeVar("Plan")
_MOST = 4096  # forms of an op; one is some 2 KB
_changes = threading.Lock()


def form(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What checks look at and launches are planned by; of tensors on a GPU, or on none."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])


class Plans(dict[Any, Plan], Generic[Plan]):
    """Plans by form, and whatever else decides them. A number stands beside its type: True and 1 are one key."""

    def keep(self, key: Any, plan: Plan) -> Plan:
        """Remember a plan; where there are too many, instead of the oldest."""
        with _changes:
            if len(self) >= _MOST:
                del self[next(iter(self))]
            self[key] = plan
        return plan
