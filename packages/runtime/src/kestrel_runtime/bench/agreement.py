"""Whether a candidate computes what ours does: seen on one set before anything is timed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import KestrelFallbackWarning
from .definition import Benchmark, Call, Set, kind_of


def disagreements(benchmark: Benchmark, candidates: Mapping[str, Call], arguments: Set) -> dict[str, str]:
    """What is wrong with those that give something else than ours, by name. Each is called on a copy of the set.

    Nothing where the definition does not say what a call gives, where ours is not among the candidates, or raises: then
    there is nothing to hold the others against.
    """
    names = list(candidates)
    ours = next((name for name in names if kind_of(name) == "ours"), None)
    if benchmark.result is None or ours is None:
        return {}
    try:
        expected = _result(benchmark, candidates[ours], arguments)
    except Exception:  # the timer meets it too, and reports it
        return {}
    found = {}
    for name in names:
        if kind_of(name) == "ours":
            continue
        try:
            wrong = difference(_result(benchmark, candidates[name], arguments), expected, benchmark.tolerance)
        except Exception:
            continue
        if wrong:
            found[name] = f"not timed: it gives something else than {ours}: {wrong}"
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
