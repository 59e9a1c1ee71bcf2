"""Compares the results of candidates with ours, on one set of arguments, before anything is timed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import KestrelFallbackWarning
from .definition import OURS, Benchmark, Call, Set, kind_of


def disagreements(benchmark: Benchmark, candidates: Mapping[str, Call], arguments: Set) -> dict[str, str]:
    """The candidates whose result differs from ours, and how. Each is called on a copy of the set.

    A candidate with a form after an underscore is compared with the same form of ours where there is one
    ("quack_softmax" with "kestrel_softmax"), every other with the first of ours. The result is empty where the
    definition has no ``result``, and where ours is not among the candidates or raises. A candidate that raises is left
    to the timer, which reports it. One whose result cannot be read differs.
    """
    ours = [name for name in candidates if kind_of(name) == "ours"]
    if benchmark.result is None or not ours:
        return {}
    expected: dict[str, Sequence[torch.Tensor]] = {}
    for name in ours:
        with contextlib.suppress(Exception):  # the timer reports it
            own, returned = _called(candidates[name], arguments)
            expected[name] = benchmark.result(own, returned)
    found = {}
    for name in candidates:
        reference = f"{OURS}_{name.partition('_')[2]}"
        reference = reference if reference in ours else ours[0]
        if name in ours or reference not in expected:
            continue
        try:
            own, returned = _called(candidates[name], arguments)
        except Exception:
            continue
        try:
            wrong = difference(benchmark.result(own, returned), expected[reference], benchmark.tolerance)
        except Exception as error:
            wrong = f"its result cannot be read: {type(error).__name__}: {error}"
        if wrong:
            found[name] = f"not timed: its result differs from that of {reference}: {wrong}"
    return found


def difference(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> str | None:
    """How two lists of tensors differ, or None where they agree.

    Floats (8-bit ones too) agree where the norm of their difference is at most `tolerance` times the norm of the
    expected tensor; integers where at most that share of them differs.

    >>> difference([torch.ones(4)], [torch.ones(4) + 0.01], 0.02)
    >>> difference([torch.ones(4)], [torch.ones(4) * 2], 0.02)
    'result 0 is off by 50.0 % (2.0 % are allowed)'
    """
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for number, (found, wanted) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(found, torch.Tensor):
            return f"result {number} is of type {type(found).__name__} instead of a tensor"
        if found.shape != wanted.shape:
            return f"result {number} has shape {list(found.shape)} instead of {list(wanted.shape)}"
        if wanted.is_floating_point():
            a, b = found.float(), wanted.float()
            error = 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())
        else:
            error = float((found != wanted).float().mean())
        if not error <= tolerance:  # NaN too
            return f"result {number} is off by {error:.1%} ({tolerance:.1%} are allowed)".replace("%", " %")
    return None


def _called(call: Call, arguments: Set) -> tuple[Set, Any]:
    """A copy of the set, and what the candidate returned for it."""
    own = tuple(_copy(each) for each in arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KestrelFallbackWarning)
        returned = call(*own)
    torch.cuda.synchronize()
    return own, returned


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(map(_copy, value)) if isinstance(value, list) else value
