"""Whether a candidate computes what ours does: seen on one set before anything is timed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import KestrelFallbackWarning
from .definition import OURS, Benchmark, Call, Set, kind_of


def disagreements(benchmark: Benchmark, candidates: Mapping[str, Call], arguments: Set) -> dict[str, str]:
    """What is wrong with those that give something else than ours, by name. Each is called on a copy of the set.

    What has a form after an underscore is held against ours of that form, where there is one ("quack_softmax" against
    "kestrel_softmax"), everybody else against the first of ours. Nothing where the definition does not say what a call
    gives, where ours is not among the candidates, or raises: then there is nothing to hold the others against.
    """
    ours = [name for name in candidates if kind_of(name) == "ours"]
    if benchmark.result is None or not ours:
        return {}
    expected: dict[str, Sequence[torch.Tensor]] = {}
    for name in ours:
        # The timer meets what it raises too, and reports it.
        with contextlib.suppress(Exception):
            expected[name] = _result(benchmark, candidates[name], arguments)
    found = {}
    for name in candidates:
        own = f"{OURS}_{name.partition('_')[2]}"
        own = own if own in ours else ours[0]
        if name in ours or own not in expected:
            continue
        try:
            wrong = difference(_result(benchmark, candidates[name], arguments), expected[own], benchmark.tolerance)
        except Exception:
            continue
        if wrong:
            found[name] = f"not timed: it gives something else than {own}: {wrong}"
    return found


def difference(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> str | None:
    """How two lists of tensors differ, or None where they agree.

    Floats (8-bit ones, too) agree where the norm of their difference is at most `tolerance` of the norm of what is
    expected; integers where at most that share of them differ.

    >>> difference([torch.ones(4)], [torch.ones(4) + 0.01], 0.02)
    >>> difference([torch.ones(4)], [torch.ones(4) * 2], 0.02)
    'result 0 is off by 50.0 % (2.0 % are allowed)'
    """
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for number, (found, wanted) in enumerate(zip(got, expected, strict=True)):
        if found.shape != wanted.shape:
            return f"result {number} has shape {list(found.shape)} instead of {list(wanted.shape)}"
        if wanted.is_floating_point():
            a, b = found.float(), wanted.float()
            error = 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())
        else:
            error = float((found != wanted).float().mean())
        if not error <= tolerance:  # NaN is off, too
            return f"result {number} is off by {error:.1%} ({tolerance:.1%} are allowed)".replace("%", " %")
    return None


def _result(benchmark: Benchmark, call: Call, arguments: Set) -> Sequence[torch.Tensor]:
    assert benchmark.result is not None
    own = tuple(_copy(each) for each in arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KestrelFallbackWarning)
        found = benchmark.result(own, call(*own))
    torch.cuda.synchronize()
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(map(_copy, value)) if isinstance(value, list) else value
