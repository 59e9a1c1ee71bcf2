"""From the definition of an op to its rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..errors import KestrelFallbackWarning
from .agreement import disagreements
from .definition import OURS, Benchmark, Call, Set, forget_compiled, kind_of
from .limits import TARGET_GPU, limit_of, limit_us
from .report import Row
from .timer import REPLAYS, Timed, empty_launch, host_us, time_candidates

LONGEST_FOR_HOST_US = 30.0  # beyond it the launch queue, not the host, limits calls in a row

CLEARED_BYTES_PER_SECOND = 2e11  # the driver clears freed device memory at this rate or faster

EMPTY = "empty"

Wanted = Callable[[str], bool]
"""Says by its name whether a candidate is timed."""


def everything(candidate: str) -> bool:
    return True


def without_peers(candidate: str) -> bool:
    return kind_of(candidate) != "peer"


def ours_only(candidate: str) -> bool:
    return kind_of(candidate) == "ours"


def measure(
    benchmark: Benchmark, shapes: Sequence[str] | None = None, wanted: Wanted = everything, replays: int = REPLAYS
) -> Iterator[list[Row]]:
    """Yield the rows of each shape, the candidates in the order of the definition.

    shapes: names of shapes; default: all. An error of a candidate or of a shape does not stop the others.
    """
    every = benchmark.candidates()
    if EMPTY in every:
        raise ValueError(f"{benchmark.name}: no candidate may be called {EMPTY!r}, the name of the empty launch")
    candidates = {name: call for name, call in every.items() if wanted(name)}
    for shape, target in benchmark.targets.items():
        if shapes is None or shape in shapes:
            yield _measure_shape(benchmark, shape, target, candidates, replays)
            _free_cached_memory()


def _free_cached_memory() -> None:
    """Free what the caching allocator holds, and wait while the driver clears it, which takes bandwidth."""
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((held - torch.cuda.memory_reserved()) / CLEARED_BYTES_PER_SECOND)


def sets_needed(benchmark: Benchmark, shape: str, l2_bytes: int) -> int:
    """The number of sets: their bytes exceed twice the L2, or one set that stays in it."""
    return 1 if benchmark.warm else max(2, -(-2 * l2_bytes // benchmark.set_bytes(shape)))


def _measure_shape(
    benchmark: Benchmark, shape: str, target: float | None, candidates: dict[str, Call], replays: int
) -> list[Row]:
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    forget_compiled()
    try:
        sets = benchmark.make(shape, sets_needed(benchmark, shape, l2_bytes))
        cold = not benchmark.warm and len(sets) * benchmark.set_bytes(shape) >= 2 * l2_bytes
        finish(benchmark, Row(benchmark.family, benchmark.op, shape, OURS), torch.cuda.get_device_name())
    except Exception as error:
        failed = f"make: {type(error).__name__}: {error}"[:300]
        return [Row(benchmark.family, benchmark.op, shape, name, failed=failed) for name in candidates]
    refused = disagreements(benchmark, candidates, sets[0])
    agreed = {name: call for name, call in candidates.items() if name not in refused}
    times = time_candidates({**agreed, EMPTY: empty_launch}, sets, replays)
    empty = times.pop(EMPTY).figures
    rows = []
    for name in candidates:
        timed = Timed(None, failed=refused[name]) if name in refused else times[name]
        first = name == next(iter(candidates)) and kind_of(name) == "ours"
        with_target = first and torch.cuda.get_device_name() == TARGET_GPU
        eager, bare = {"eager": candidates[name]}, _bare(benchmark, first)
        # If the bare entry point fails, the host time of the op alone is kept.
        host = _host({**eager, **bare}, sets[0], timed) or (_host(eager, sets[0], timed) if bare else {})
        figures = timed.figures
        row = Row(
            family=benchmark.family,
            op=benchmark.op,
            shape=shape,
            candidate=name,
            us=figures.us if figures else None,
            p20=figures.p20 if figures else None,
            p80=figures.p80 if figures else None,
            failed=timed.failed,
            runs=timed.runs,
            cold=cold,
            sets=len(sets),
            calls=timed.calls,
            target_us=target if with_target else None,
            target_of=benchmark.target_of.get(shape) if with_target else None,
            empty_us=empty.us if empty else None,
            host_us=host.get("eager"),
            bare_host_us=host.get("bare"),
        )
        rows.append(finish(benchmark, row, torch.cuda.get_device_name()))
    return rows


def finish(benchmark: Benchmark, row: Row, gpu: str) -> Row:
    """The row with bytes, operations, rates, the limit and the fraction of it."""
    traffic = benchmark.traffic(row.shape) if benchmark.traffic else None
    operations = benchmark.operations(row.shape) if benchmark.operations else None
    limit = limit_us(limit_of(gpu), traffic, operations, benchmark.launches, benchmark.precision)
    us = row.us
    return replace(
        row,
        bytes=traffic,
        operations=operations,
        gb_per_s=traffic / us / 1e3 if traffic and us else None,
        tflop_per_s=operations / us / 1e6 if operations and us else None,
        limit_us=limit,
        fraction=limit / us if limit and us else None,
    )


def _bare(benchmark: Benchmark, first: bool) -> dict[str, Call]:
    """The bare entry point, for the first candidate if that is ours."""
    try:
        return {"bare": benchmark.bare()} if first and benchmark.bare else {}
    except Exception:  # no binary here
        return {}


def _host(calls: dict[str, Call], arguments: Set, timed: Timed) -> dict[str, float]:
    """Host time in microseconds of calls that are shorter on the GPU than on the host."""
    if timed.figures is None or timed.figures.us > LONGEST_FOR_HOST_US:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KestrelFallbackWarning)
            return {name: figures.us for name, figures in host_us(calls, arguments).items()}
    except Exception:  # it runs in a graph alone: the columns stay empty
        return {}
