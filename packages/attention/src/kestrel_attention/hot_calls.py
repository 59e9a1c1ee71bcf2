"""Calls whose form was launched before: found by one look-up and one check of their tensors in C++.

``torch.compile`` guards its graphs with TensorGuards, which compares type, dtype, device, shape, strides, requires_grad
and dispatch keys of tensors in one call. It is no public interface of torch: without it no call is hot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from kestrel_runtime import current_backend
from kestrel_runtime.check import span
from kestrel_runtime.registry import _tracers

from .plans import Plans

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None

MAX_FORMS = 8  # of the tensors that one key tells apart no further: strides, devices, inference mode

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_ran = threading.local()


class HotCalls:
    """Launches by key; a key holds the numbers of a call, their types, and which optional tensors it has."""

    def __init__(self) -> None:
        self._forms: Plans[list[tuple[Callable[..., bool], Any, tuple[int, ...]]]] = Plans()

    def find(self, key: Hashable, tensors: Sequence[torch.Tensor], written: int | None = None) -> Any:
        """The launch of a call on plain tensors that were launched in this form before, or None.

        written: the index of a tensor that lies apart from all others; where it may touch one, the answer is None.
        """
        forms = self._forms.get(key)
        if forms is None or _tracers or _dispatch_modes() or _transforms() is not None:
            return None
        if forward_ad._current_level >= 0 or current_backend() == "reference":
            return None
        for matches, launch, spans in forms:
            if matches(*tensors):
                return launch if written is None or _lies_apart(tensors, spans, written) else None
        return None

    def keep(self, key: Hashable, tensors: Sequence[torch.Tensor], launch: Any) -> None:
        """Remember the launch of a call; of the forms of one key, the last MAX_FORMS."""
        if _TensorGuards is None or any(x.requires_grad for x in tensors):  # refused where gradients are enabled
            return
        if len(set(map(id, tensors))) < len(tensors):  # guards never match a tensor that is given twice
            return
        forms = self._forms.get(key) or []
        if any(matches(*tensors) for matches, *_ in forms):
            return
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        forms = [*forms, (guards.check, launch, tuple(map(span, tensors)))]
        self._forms.keep(key, forms[-MAX_FORMS:])


def _lies_apart(tensors: Sequence[torch.Tensor], spans: Sequence[int], written: int) -> bool:
    """Whether the addresses of one tensor lie outside the range of each other one's."""
    target = tensors[written]
    start, size = target.data_ptr(), spans[written]
    for index, x in enumerate(tensors):  # a loop takes less time than all()
        if -spans[index] < x.data_ptr() - start < size and index != written:
            return False
    return True


def ran(launch: Any) -> None:
    """Note a launch that this thread has run, for :func:`taken`."""
    _ran.launch = launch


def taken() -> Any:
    """The launch that this thread ran since the last call of this function, or None."""
    launch = getattr(_ran, "launch", None)
    _ran.launch = None
    return launch
