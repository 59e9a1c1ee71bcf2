"""Kernel against reference on random calls: seeded, within a time budget."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import UnsupportedError
from ..state import backend
from .buffers import twins
from .compare import assert_same_bits

Compare = Callable[[Any, Any, str], None]


@dataclass
class RandomCase:
    """One call, and how its kernel is compared with its reference."""

    op: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    compare: Compare = assert_same_bits
    """compare(got, want, what) raises AssertionError; called for the result and for every written argument."""
    writes: tuple[str | int, ...] = ()
    """Positions and names of the arguments that the call writes. All others must keep their bits."""
    may_be_unsupported: bool = False
    """The kernel may refuse this call with UnsupportedError; the case then does not count."""

    def __str__(self) -> str:
        values = [_text(value) for value in self.args] + [f"{k}={_text(v)}" for k, v in self.kwargs.items()]
        return f"{getattr(self.op, '__name__', self.op)}({', '.join(values)})"


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    kind = str(value.dtype).removeprefix("torch.")
    strides = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
    return f"{kind}{list(value.shape)}{strides}"


def by_reference(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The op with these arguments, by its reference."""
    with backend("reference"):
        return op(*args, **kwargs)


def compare_at_random(
    draw: Callable[[random.Random], RandomCase],
    seconds: float = 20.0,
    *,
    first_seed: int = 0,
    cases: int | None = None,
    least: int = 1,
) -> int:
    """Compare the kernel with the reference on calls that ``draw`` makes, until the time is up.

    draw(rng) makes one case from ``rng`` alone and from torch's generators, which are seeded alike. A failure names the
    case and its seed; ``compare_at_random(draw, first_seed=SEED, cases=1)`` runs that case alone. Returns how many
    cases were compared, which must be ``least`` or more.
    """
    compared, seed, end = 0, first_seed, time.monotonic() + seconds
    while (compared < least or time.monotonic() < end) and (cases is None or seed < first_seed + cases):
        assert seed - first_seed < 1000 * least + 100_000, f"only {compared} of {seed - first_seed} cases are supported"
        torch.manual_seed(seed)
        case = draw(random.Random(seed))
        try:
            compared += _compare_one(case)
        except Exception as error:
            text = f"seed {seed}: {case}: {type(error).__name__}: {error}"
            raise AssertionError(text) from error
        seed += 1
    assert compared >= (least if cases is None else 0), f"only {compared} cases were compared"
    return compared


def _compare_one(case: RandomCase) -> bool:
    names = [*range(len(case.args)), *case.kwargs]
    values = [*case.args, *case.kwargs.values()]
    ours, theirs = twins(values), twins(values)

    def call(values: list[Any]) -> Any:
        count = len(case.args)
        return case.op(*values[:count], **dict(zip(case.kwargs, values[count:], strict=True)))

    try:
        with backend("kernel"):
            got = call(ours)
    except UnsupportedError:
        if case.may_be_unsupported:
            return False
        raise
    want = by_reference(call, theirs)
    if got is not None or want is not None:
        case.compare(got, want, "result")
    for name, value, mine, other in zip(names, values, ours, theirs, strict=True):
        if isinstance(value, torch.Tensor):
            if name in case.writes:
                case.compare(mine, other, f"argument {name}")
            else:
                assert_same_bits(mine, value, f"argument {name}, which is not written")
    return True
