"""The timer against what is known: CUDA events around a large copy, L2, and a candidate against itself."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from kestrel_runtime.bench import Benchmark, host_us, measure, time_candidates
from kestrel_runtime.bench.machine import environment
from kestrel_runtime.bench.timer import empty_launch

pytestmark = pytest.mark.gpu
MEGABYTE = 2**20


def copies(nbytes: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sources = [torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    return [(torch.empty_like(source), source) for source in sources]


def copy_benchmark(nbytes: int, warm: bool = False) -> Benchmark:
    return Benchmark(
        family="runtime",
        op="copy",
        targets={"one": None},
        make=lambda shape, count: copies(nbytes, count),
        set_bytes=lambda shape: nbytes,
        candidates=lambda: {"torch": lambda target, source: target.copy_(source)},
        traffic=lambda shape: 2 * nbytes,
        operations=lambda shape: 0,
        warm=warm,
    )


def events_us(sets: list[tuple[torch.Tensor, torch.Tensor]], rounds: int) -> float:
    """Per copy, by two events around copies in a row without a graph: they take longer than their launches."""
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(rounds):
            for target, source in sets:
                target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(sets)))
    return statistics.median(times)


def test_the_time_of_a_copy_agrees_with_events_around_it():
    sets = copies(256 * MEGABYTE, 2)
    by_harness = time_candidates({"copy": lambda target, source: target.copy_(source)}, sets)["copy"].figures
    assert by_harness is not None
    assert by_harness.us == pytest.approx(events_us(sets, rounds=10), rel=0.05)


def test_a_megabyte_is_faster_from_l2_than_from_memory():
    [[cold]] = measure(copy_benchmark(MEGABYTE))
    [[warm]] = measure(copy_benchmark(MEGABYTE, warm=True))
    assert cold.cold
    assert not warm.cold
    assert warm.sets == 1
    assert cold.us - warm.us > cold.spread + warm.spread


@pytest.mark.parametrize("nbytes", [16 * 1024, 8 * MEGABYTE, 128 * MEGABYTE])
def test_a_candidate_differs_from_itself_by_less_than_the_spread(nbytes):
    sets = copies(nbytes, max(2, 128 * MEGABYTE // nbytes))
    candidates = {name: lambda target, source: target.copy_(source) for name in ("one", "other")}
    timed = time_candidates(candidates, sets)
    one, other = timed["one"].figures, timed["other"].figures
    resolution = 0.5 / timed["one"].calls  # of an event, in us
    assert abs(one.us - other.us) <= max(one.p80 - one.p20, other.p80 - other.p20, resolution)


def test_a_part_of_the_sets_is_as_cold_as_all_of_them():
    def slowly(target, source):
        time.sleep(0.004)  # on the host: the graph holds the copy alone
        target.copy_(source)

    sets = copies(MEGABYTE, 400)
    timed = time_candidates({"all": lambda target, source: target.copy_(source), "part": slowly}, sets)
    every, part = timed["all"], timed["part"]
    assert every.calls == 400
    assert part.calls < 200
    assert part.figures.us == pytest.approx(every.figures.us, rel=0.1)


def test_a_candidate_that_raises_leaves_the_others_their_figures():
    def raises(target, source):
        raise RuntimeError("no such kernel\nand more")

    def raises_in_capture(target, source):
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a graph")
        target.copy_(source)

    def reads_the_host(target, source):
        target.copy_(source)
        return target[0].item()

    candidates = {
        "raises": raises,
        "raises_in_capture": raises_in_capture,
        "reads_the_host": reads_the_host,
        "copies": lambda target, source: target.copy_(source),
    }
    timed = time_candidates(candidates, copies(MEGABYTE, 4))
    assert list(timed) == list(candidates)
    assert timed["raises"].failed == "RuntimeError: no such kernel"
    assert timed["raises_in_capture"].failed == "ValueError: not in a graph"
    assert timed["reads_the_host"].failed
    assert timed["copies"].figures is not None
    assert timed["copies"].failed is None


def test_a_candidate_that_runs_out_of_memory_leaves_the_others_their_figures():
    def hungry(target, source):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    def hungry_in_capture(target, source):
        target.copy_(source)
        if torch.cuda.is_current_stream_capturing():
            hungry(target, source)

    candidates = {
        "hungry": hungry,
        "in capture": hungry_in_capture,
        "copies": lambda target, source: target.copy_(source),
    }
    timed = time_candidates(candidates, copies(MEGABYTE, 4))
    assert [timed[name].failed.partition(":")[0] for name in ("hungry", "in capture")] == ["OutOfMemoryError"] * 2
    assert timed["copies"].figures is not None


def test_a_candidate_with_another_result_has_no_figures():
    fields = vars(copy_benchmark(MEGABYTE))
    candidates = {
        "kestrel": lambda target, source: target.copy_(source),
        "torch": lambda target, source: target.copy_(source),
        "peer": lambda target, source: target.copy_(source.flip(0)),
    }
    benchmark = Benchmark(**{**fields, "candidates": lambda: candidates, "result": lambda arguments, _: [arguments[0]]})
    [[ours, theirs, other]] = measure(benchmark)
    assert ours.us
    assert theirs.us
    assert other.us is None
    assert "differs from that of kestrel" in other.failed


def test_a_row_holds_bytes_and_rate():
    [[row]] = measure(copy_benchmark(64 * MEGABYTE))
    assert row.bytes == 128 * MEGABYTE
    assert row.gb_per_s == pytest.approx(row.bytes / row.us / 1e3)
    assert row.p20 <= row.us <= row.p80
    if row.limit_us is not None:  # a GPU whose rates are known
        assert 0.5 < row.fraction < 1.1


def test_sets_that_were_not_made_are_reported_for_every_candidate():
    def make(shape, count):
        raise MemoryError("too large")

    [[row]] = measure(Benchmark(**{**vars(copy_benchmark(MEGABYTE)), "make": make}))
    assert row.us is None
    assert "too large" in row.failed


def test_an_eager_call_costs_the_host_more_than_an_empty_launch():
    arguments = copies(MEGABYTE // 16, 1)[0]
    found = host_us({"empty": empty_launch, "copy": lambda target, source: target.copy_(source)}, arguments)
    assert 0.5 < found["empty"].us < found["copy"].us


def test_the_environment_names_gpu_clocks_and_versions():
    found = environment("abc")
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["git"] == "abc"
    assert found["versions"]["torch"]
    assert found["clocks"]["sm"].endswith("MHz")
    assert 0.1 < found["empty_us"] < 10
