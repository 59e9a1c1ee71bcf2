"""Microseconds per call on the GPU and on the host.

On the GPU: one replay of a CUDA graph calls a candidate once per set of arguments. The sets hold more than twice the
L2, so that a set is cold when it repeats; a warm benchmark has one set. A candidate so slow that all sets would take
seconds gets a part of them, and twice the L2 is read before each of its replays.

Each turn takes one sample of every candidate, in random order. A sample is two replays of the candidate's graph, of
which the second is timed, so that the state of the GPU does not depend on the other candidates. A figure is the median
over turns, with the 20th and the 80th percentile. Launches inside a graph overlap as programmatic dependent launch
allows, as in an engine that captures its decode step.

The time of a launch depends on what the process has launched before. Plain eager launches may raise it, and a
dependent launch lowers it, unless the process has used some 15 streams. So all graphs are captured on one stream, and
one call of ours precedes each sample of every candidate (_settling).

On the host: calls in a row without a graph, few enough that the launch queue does not fill.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..capture import undone_on_error
from ..errors import KestrelFallbackWarning
from ..registry import trace
from .definition import Call, Set, kind_of

REPLAYS = 15
FEWEST_CALLS = 200  # in one replay, which makes the start of the graph negligible
LONGEST_REPLAY_US = 20_000.0  # a replay has more than one round over the sets only up to here
LONGEST_ROUND_US = 400_000.0  # of eager calls over all sets; a slower candidate gets a part of the sets
FEWEST_SETS = 32  # in such a part
LONGEST_CANDIDATE_US = 400_000.0  # of all samples of a candidate; a slow one gets fewer samples
FEWEST_SAMPLES = 5
MOST_EMPTY_CALLS = 2000  # of the empty launch in one replay: it reads no set
LONGEST_TO_SETTLE_US = 100.0  # per call; in longer ones the time of a launch is negligible
HOST_CALLS = 200  # the launch queue holds about a thousand
HOST_TURNS = 15


@dataclass(frozen=True)
class Figures:
    """Microseconds per call: the median, and the range of the middle 60 % of the samples."""

    us: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Timed:
    """One candidate: its figures, or why there are none."""

    figures: Figures | None
    failed: str | None = None
    calls: int = 0
    """In one replay."""
    runs: str | None = None
    """How our ops inside it were served: "kernel"; "reference" if one of them was; None if it calls none of ours."""


def summarise(samples: Sequence[float]) -> Figures:
    """Median, 20th and 80th percentile.

    >>> summarise([3.0, 1.0, 2.0, 5.0, 4.0])
    Figures(us=3.0, p20=1.2, p80=4.8)
    """
    if len(samples) < 2:
        return Figures(*[float(sample) for sample in samples] * 3)
    fifths = statistics.quantiles(samples, n=5)
    return Figures(statistics.median(samples), round(fifths[0], 6), round(fifths[3], 6))


def time_candidates(candidates: Mapping[str, Call], sets: Sequence[Set], replays: int = REPLAYS) -> dict[str, Timed]:
    """Time every candidate over the sets. A candidate that raises is reported as failed; the others go on."""
    graphs: dict[str, _Graph] = {}
    found: dict[str, Timed] = {}
    for name, call in candidates.items():
        try:
            graphs[name] = _Graph(call, sets[:MOST_EMPTY_CALLS] if call is empty_launch else sets)
        except Exception as error:
            found[name] = Timed(None, failed=_words(error))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    settling = _settling(graphs)
    order = random.Random(0)
    for turn in range(1 + replays):
        for name in order.sample(list(graphs), len(graphs)):
            if name in found or turn > _samples_of(graphs[name], replays):
                continue
            if settling is not None and settling not in found:
                try:
                    _call_once(candidates[settling], sets[0])
                except Exception as error:  # an error of ours, not of the next candidate
                    found[settling] = Timed(None, failed=_words(error))
                    if name == settling:
                        continue
            try:
                us = graphs[name].sample_us()
            except Exception as error:
                found[name] = Timed(None, failed=_words(error))
                continue
            if turn > 0:  # the first turn warms up
                samples[name].append(us / graphs[name].calls)
    for name, graph in graphs.items():
        if name not in found:
            found[name] = Timed(summarise(samples[name]), calls=graph.calls, runs=graph.runs)
    return {name: found[name] for name in candidates}


def host_us(calls: Mapping[str, Call], arguments: Set) -> dict[str, Figures]:
    """Host time per call of each function in microseconds, without a graph, in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(*arguments)
    with _without_collection():
        for _ in range(HOST_TURNS):
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call(*arguments)
                samples[name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: summarise(times) for name, times in samples.items()}


def empty_launch(*_: object) -> None:
    """A launch whose kernel does nothing: the lower bound of every candidate."""
    torch.cuda._sleep(0)


class _Graph:
    """A captured candidate: every set once per round, and enough rounds that the start of the graph is negligible."""

    def __init__(self, call: Call, sets: Sequence[Set]) -> None:
        self.runs = _warm_up(call, sets)
        affordable = max(FEWEST_SETS, int(LONGEST_ROUND_US / _eager_us(call, sets)))
        self._flush = _Flush() if len(sets) > affordable else None
        self._capture(call, sets[:affordable], 1)
        self.replay_us = replay_us(self._graph)
        if self._flush is None and self.calls < FEWEST_CALLS:
            rounds = min(-(-FEWEST_CALLS // self.calls), max(1, int(LONGEST_REPLAY_US / self.sample_us())))
            if rounds > 1:
                self.replay_us *= rounds
                self._capture(call, sets, rounds)

    def sample_us(self) -> float:
        """The time of one replay, directly after another one or after the flush of L2."""
        self.replay_us = replay_us(self._graph, behind=self._flush or self._graph)
        return self.replay_us

    def _capture(self, call: Call, sets: Sequence[Set], rounds: int) -> None:
        self._graph = capture(call, sets, rounds)
        self.calls = rounds * len(sets)


class _Flush:
    """Reads twice as many bytes as L2 holds."""

    def __init__(self) -> None:
        size = 2 * torch.cuda.get_device_properties().L2_cache_size
        self._bytes = torch.zeros(size // 4, dtype=torch.float32, device="cuda")

    def replay(self) -> None:
        self._bytes.sum()


def _settling(graphs: Mapping[str, _Graph]) -> str | None:
    """The candidate to call before each sample: ours, whose launch is dependent, if it is a short kernel."""
    for name, graph in graphs.items():
        if kind_of(name) == "ours" and graph.runs == "kernel" and graph.replay_us < LONGEST_TO_SETTLE_US * graph.calls:
            return name
    return None


def _call_once(call: Call, arguments: Set) -> None:
    call(*arguments)
    torch.cuda.synchronize()


def _samples_of(graph: _Graph, replays: int) -> int:
    """How many samples a candidate gets."""
    affordable = int(LONGEST_CANDIDATE_US / (2 * graph.replay_us))
    return min(replays, max(FEWEST_SAMPLES, affordable))


def replay_us(graph: torch.cuda.CUDAGraph, behind: torch.cuda.CUDAGraph | _Flush | None = None) -> float:
    """The time of one replay by CUDA events, directly after ``behind`` if given."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if behind is not None:
        behind.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _warm_up(call: Call, sets: Sequence[Set]) -> str | None:
    """Run first calls, which compile and load, and return how our ops were served."""
    with trace() as served, warnings.catch_warnings():
        warnings.simplefilter("ignore", KestrelFallbackWarning)  # the report shows it
        for arguments in sets[:3]:
            call(*arguments)
    torch.cuda.synchronize()
    by_reference = any(count["reference"] for count in served.values())
    return ("reference" if by_reference else "kernel") if served else None


def _eager_us(call: Call, sets: Sequence[Set]) -> float:
    """An estimate of the time of a call on GPU or host, whichever is slower."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for arguments in sets[:3]:
        call(*arguments)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / len(sets[:3])


def capture(call: Call, sets: Sequence[Set], rounds: int) -> torch.cuda.CUDAGraph:
    """Capture `rounds` rounds over the sets, like torch.cuda.graph, but without a garbage collection before each."""
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    with undone_on_error(graph, stream), _without_collection():
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for arguments in sets:
                    call(*arguments)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures, as in torch.cuda.graph: launches are slower after the use of many streams."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _words(error: Exception) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__
