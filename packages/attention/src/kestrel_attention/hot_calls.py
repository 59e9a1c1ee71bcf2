"""Calls whose form was launched before: found by one look-up and one check of their tensors in C++.

``torch.compile`` guards its graphs with TensorGuards, which compares type, dtype, device, shape, strides, requires_grad
and dispatch keys of tensors in one call. It is no public interface of torch: without it no call is hot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from kestrel_runtime import launches_directly
from kestrel_runtime.check import span

from .plans import Plans

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None

MAX_FORMS = 8  # of the tensors that one key tells apart no further: strides, devices, inference mode
_PLAIN = torch.Tensor, torch.nn.Parameter  # types whose data is the memory at data_ptr

_ran = threading.local()


class Hot(NamedTuple):
    """A launch, and what its tensors must fulfil."""

    matches: Callable[..., bool]
    launch: Any
    spans: tuple[int, ...]


class HotCalls:
    """Launches by key; a key holds the numbers of a call, their types, and which optional tensors it has."""

    def __init__(self) -> None:
        self._forms: Plans[list[Hot]] = Plans()
        self._last: tuple[Any, ...] = (None,) * 9

    def find(self, key: Hashable, tensors: Sequence[torch.Tensor], written: int | None = None) -> Any:
        """The launch of a call on plain tensors that were launched in this form before, or None.

        written: the index of a tensor that lies apart from all others; where it may touch one, the answer is None.
        """
        hot = self.entry(key, tensors, written)
        return None if hot is None else hot.launch

    def entry(self, key: Hashable, tensors: Sequence[torch.Tensor], written: int | None = None) -> Hot | None:
        """:func:`find` with what the tensors were compared by."""
        forms = self._forms.get(key)
        if forms is None or not launches_directly():
            return None
        for hot in forms:
            if hot.matches(*tensors):
                return hot if written is None or _lies_apart(tensors, hot.spans, written) else None
        return None

    def remember(self, matches: Callable[..., bool], launch: Any, given: int, *numbers: Any) -> None:
        """Have :func:`repeated` find a launch. given: which optional tensors its call has."""
        self._last = (matches, launch, given, *numbers)

    def repeated(
        self, tensors: Sequence[torch.Tensor], given: int, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any
    ) -> Any:
        """The remembered launch, if a call has the very objects as numbers, and tensors of the same forms.

        It takes no key: most calls are like the one before, in another layer of a model. Six comparisons in a row take
        less time than a loop over tuples.
        """
        matches, launch, given_last, a_last, b_last, c_last, d_last, e_last, f_last = self._last
        if given != given_last or a is not a_last or b is not b_last or c is not c_last or d is not d_last:
            return None
        if e is not e_last or f is not f_last or not launches_directly() or not matches(*tensors):
            return None
        return launch

    def keep(
        self, key: Hashable, tensors: Sequence[torch.Tensor], launch: Any, bind: Callable[[], Any] | None = None
    ) -> None:
        """Remember the launch of a call; of the forms of one key, the last MAX_FORMS.

        bind: gives what is remembered in its place; called for a form that is to be kept and is not yet.
        """
        if _TensorGuards is None or not launches_directly() or any(type(x) not in _PLAIN for x in tensors):
            return
        if any(x.requires_grad for x in tensors):  # refused where gradients are enabled
            return
        if len(set(map(id, tensors))) < len(tensors):  # guards never match a tensor that is given twice
            return
        forms = self._forms.get(key) or []
        if any(hot.matches(*tensors) for hot in forms):
            return
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        forms = [*forms, Hot(guards.check, launch if bind is None else bind(), tuple(map(span, tensors)))]
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
