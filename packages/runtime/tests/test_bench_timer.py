"""The timer and what surrounds it, without a GPU: statistics, the order of samples, agreement, limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from bench_rows import H200, row

from kestrel_runtime.bench import (
    Benchmark,
    Figures,
    Row,
    host_us,
    limit_of,
    limit_us,
    summarise,
    time_candidates,
    timer,
)
from kestrel_runtime.bench.agreement import difference, disagreements
from kestrel_runtime.bench.rows import finish, sets_needed
from kestrel_runtime.bench.show import rate


def benchmark(**changes) -> Benchmark:
    fields = {
        "family": "norm",
        "op": "rms_norm",
        "targets": {"2x4": 1.25, "2048x4096": None},
        "make": lambda shape, count: [()] * count,
        "set_bytes": lambda shape: 1000,
        "candidates": dict,
        "traffic": lambda shape: 33_554_432,
        "operations": lambda shape: 0,
    }
    return Benchmark(**{**fields, **changes})


# -- statistics --------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_median_and_ignores_outliers():
    found = summarise([1.0, 1.1, 1.2, 1.3, 99.0])
    assert found.us == 1.2
    assert found.p20 <= found.us <= found.p80


def test_percentiles_bracket_the_middle_of_many_samples():
    found = summarise([float(i) for i in range(1, 100)])
    assert (found.us, found.p20, found.p80) == (50.0, 20.0, 80.0)


def test_host_time_is_that_of_one_call_in_microseconds(monkeypatch):
    clock = itertools.count(0, 1e-6)  # each look takes a microsecond
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(clock))
    found = host_us({"three looks": lambda x: [next(clock) for _ in range(3)], "none": lambda x: None}, (1,))
    assert found["three looks"].us == pytest.approx(3, rel=0.05)
    assert found["none"].us < 0.05


def test_one_sample_has_no_spread():
    found = summarise([3.0])
    assert (found.us, found.p20, found.p80) == (3.0, 3.0, 3.0)


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_graphs(monkeypatch):
    """Captures that cost a table's microseconds per call, and what was replayed behind what."""
    from kestrel_runtime.bench import timer

    log = []
    us_of = {"fast": 1.0, "slow": 9000.0, "slower": 20_000.0, "fails": 1.0, "kestrel": 1.0, "kestrel_slow": 9000.0}
    us_of["medium"] = 2000.0

    class Graph:
        def __init__(self, name, calls):
            self.name, self.calls = name, calls

    class Flush:
        name = "flush"

    def capture(call, sets, rounds):
        return Graph(call(None), rounds * len(sets))

    def replay_us(graph, behind=None):
        log.append((graph.name, behind.name if behind else None))
        if graph.name == "fails" and len(log) > 8:
            raise RuntimeError("lost")
        return us_of[graph.name] * graph.calls

    monkeypatch.setattr(timer, "capture", capture)
    monkeypatch.setattr(timer, "replay_us", replay_us)
    monkeypatch.setattr(timer, "_eager_us", lambda call, sets: us_of[call(None)])
    monkeypatch.setattr(timer, "_Flush", Flush)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return log


def named(*names):
    return {name: lambda _, name=name: name for name in names}


def test_every_sample_follows_a_replay_of_the_same_candidate(fake_graphs):
    timed = time_candidates(named("fast", "slow"), [(None,)] * 10, replays=15)
    assert timed["fast"].figures == Figures(1.0, 1.0, 1.0)
    assert timed["fast"].calls == 200
    assert timed["slow"].figures == Figures(9000.0, 9000.0, 9000.0)
    assert timed["slow"].calls == 10  # two rounds would be longer than one replay may take
    assert {behind for _, behind in fake_graphs if behind} == {"fast", "slow"}
    assert all(behind in (name, None) for name, behind in fake_graphs)


def test_the_first_sample_warms_up_and_does_not_count(fake_graphs, monkeypatch):
    from kestrel_runtime.bench import timer

    monkeypatch.setattr(timer, "replay_us", lambda graph, behind=None: next(times) * graph.calls)
    times = iter([1.0, 99.0, 2.0, 4.0])  # captured, to warm up, two samples
    assert time_candidates(named("fast"), [(None,)] * 200, replays=2)["fast"].figures.us == 3.0


def test_a_candidate_runs_by_reference_where_one_of_its_ops_does(monkeypatch):
    from types import SimpleNamespace

    from kestrel_runtime import registry
    from kestrel_runtime.bench import timer

    def calls(**ways):
        def call(*_):
            for name, way in ways.items():
                registry.count(SimpleNamespace(qualified_name=name), way)

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timer._warm_up(calls(), [(None,)]) is None
    assert timer._warm_up(calls(a="kernel", b="kernel"), [(None,)]) == "kernel"
    assert timer._warm_up(calls(a="kernel", b="reference"), [(None,)]) == "reference"
    assert timer._warm_up(calls(a="reference"), [(None,)]) == "reference"


def test_a_slow_candidate_gets_fewer_samples(fake_graphs):
    time_candidates(named("fast", "medium", "slow"), [(None,)] * 10, replays=15)
    samples = [name for name, behind in fake_graphs if behind]
    assert samples.count("medium") == 1 + 1 + 10  # 10 pairs of replays of 20 ms take 0.4 s
    assert samples.count("fast") == 1 + 1 + 15  # to count rounds, to warm up, to measure
    assert samples.count("slow") == 1 + 1 + 5


def test_a_candidate_too_slow_for_all_sets_gets_a_part_of_them_and_an_empty_l2(fake_graphs):
    timed = time_candidates(named("fast", "slow", "slower"), [(None,)] * 1000, replays=15)
    assert {name: each.calls for name, each in timed.items()} == {"fast": 1000, "slow": 44, "slower": 32}
    assert {behind for name, behind in fake_graphs if name != "fast" and behind} == {"flush"}
    assert ("fast", "flush") not in fake_graphs
    assert timed["slower"].figures == Figures(20_000.0, 20_000.0, 20_000.0)


def test_an_empty_launch_is_timed_over_no_more_calls_than_it_needs(fake_graphs, monkeypatch):
    from kestrel_runtime.bench import timer

    monkeypatch.setattr(timer, "empty_launch", lambda _: "fast")
    timed = time_candidates({"empty": timer.empty_launch, **named("fast")}, [(None,)] * 5000)
    assert {name: each.calls for name, each in timed.items()} == {"empty": 2000, "fast": 5000}


def test_a_candidate_that_fails_half_way_has_no_figures(fake_graphs):
    timed = time_candidates(named("fast", "fails"), [(None,)] * 10, replays=5)
    assert timed["fails"].failed == "RuntimeError: lost"
    assert timed["fails"].figures is None
    assert timed["fast"].figures is not None


@pytest.mark.parametrize(("ours", "runs", "called"), [("kestrel", "kernel", True), ("kestrel", "reference", False)])
def test_a_dependent_launch_of_ours_comes_before_every_sample(fake_graphs, monkeypatch, ours, runs, called):
    assert (settled_samples(fake_graphs, monkeypatch, ours, runs) == 2 * (1 + 15)) is called


def test_a_slow_op_of_ours_is_not_called_before_samples(fake_graphs, monkeypatch):
    assert settled_samples(fake_graphs, monkeypatch, "kestrel_slow", "kernel") == 0


def test_an_error_of_ours_before_a_sample_of_another_candidate_counts_as_ours(fake_graphs, monkeypatch):
    from kestrel_runtime.bench import timer

    calls = itertools.count()

    def ours(_):
        if next(calls) >= 4:  # captured, and called before some samples
            raise RuntimeError("no memory")
        return "kestrel"

    monkeypatch.setattr(timer, "_warm_up", lambda call, sets: "kernel")
    timed = time_candidates({"fast": lambda _: "fast", "kestrel": ours}, [(None,)], replays=15)
    assert timed["kestrel"].failed == "RuntimeError: no memory"
    assert timed["fast"].failed is None
    assert timed["fast"].figures == Figures(1.0, 1.0, 1.0)


def settled_samples(log, monkeypatch, ours, runs):
    """How many samples of an op of ours and another candidate follow a call of ours."""
    from kestrel_runtime.bench import timer

    def call(_):
        log.append((ours, "called"))
        return ours

    monkeypatch.setattr(timer, "_warm_up", lambda call, sets: runs)
    time_candidates({ours: call, **named("fast")}, [(None,)] * 10, replays=15)
    return sum(first == (ours, "called") and second[1] in (ours, "fast") for first, second in itertools.pairwise(log))


# -- agreement ---------------------------------------------------------------------------------------------------------


def writes(value):
    def call(x, out):
        out.fill_(value)

    return call


def in_place(arguments, returned):
    return [arguments[1] if returned is None else returned]


@pytest.fixture
def one_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return torch.ones(8), torch.zeros(8)


def test_candidates_with_another_result_are_named_and_the_set_is_unchanged(one_set):
    def shifts(x, out):
        return x + 0.1

    def raises(x, out):
        raise RuntimeError("no such kernel")

    candidates = {
        "kestrel": writes(1.0),
        "torch": lambda x, out: x,
        "near": lambda x, out: x + 0.01,
        "far": shifts,
        "nan": writes(float("nan")),
        "other shape": lambda x, out: x[:4],
        "raises": raises,  # the timer reports that
        "kestrel_otherwise": writes(9.0),  # of ours, on purpose
    }
    found = disagreements(benchmark(result=in_place), candidates, one_set)
    assert list(found) == ["far", "nan", "other shape"]
    assert (
        found["far"] == "not timed: its result differs from that of kestrel: "
        "result 0 is off by 10.0 % (2.0 % are allowed)"
    )
    assert "shape [4] instead of [8]" in found["other shape"]
    assert one_set[1].eq(0).all()


def test_a_form_of_a_peer_is_compared_with_the_same_form_of_ours(one_set):
    candidates = {
        "kestrel": writes(1.0),
        "kestrel_softmax": writes(9.0),
        "quack": writes(1.0),
        "quack_softmax": writes(9.0),
        "flashinfer_softmax": writes(1.0),
        "flashinfer_tc": writes(1.0),
    }
    found = disagreements(benchmark(result=in_place), candidates, one_set)
    assert list(found) == ["flashinfer_softmax"]
    assert "differs from that of kestrel_softmax" in found["flashinfer_softmax"]


def test_a_result_of_another_structure_differs(one_set):
    def pair(arguments, returned):
        values, indices = returned
        return [values, indices]

    candidates = {
        "kestrel": lambda x, out: (x, x),
        "one": lambda x, out: x[:1],
        "none": lambda x, out: None,
        "three": lambda x, out: (x, x, x),
        "text": lambda x, out: (x, "x"),
        "vllm": lambda x, out: (x, x),
    }
    found = disagreements(benchmark(result=pair), candidates, one_set)
    assert list(found) == ["one", "none", "three", "text"]
    assert "its result cannot be read: ValueError" in found["one"]
    assert "result 1 is of type str instead of a tensor" in found["text"]


def test_nothing_is_compared_without_a_result_or_without_ours(one_set):
    candidates = {"kestrel": writes(1.0), "far": writes(2.0)}
    assert not disagreements(benchmark(), candidates, one_set)
    assert not disagreements(benchmark(result=in_place), {"far": writes(2.0)}, one_set)


@pytest.mark.parametrize(
    ("got", "expected", "agree"),
    [
        ([1.0, 0.0], [1.0, 0.0], True),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1e-6], [0.0, 0.0], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], False),
    ],
)
def test_results_agree_by_the_norm_of_their_difference(got, expected, agree):
    assert (difference([torch.tensor(got)], [torch.tensor(expected)], 0.02) is None) is agree


def test_integers_agree_by_how_many_differ():
    expected = torch.arange(100)
    got = expected.clone()
    got[0] = 7
    assert difference([got], [expected], 0.02) is None
    assert difference([got], [expected], 0.0) == "result 0 is off by 1.0 % (0.0 % are allowed)"
    assert difference([got, got], [expected], 0.02) == "2 results instead of 1"


# -- limits ------------------------------------------------------------------------------------------------------------


def test_the_limit_is_a_launch_and_the_bytes():
    assert limit_us(limit_of(H200), 2 * 2048 * 4096 * 2, 0) == pytest.approx(8.85, abs=0.01)


def test_the_limit_is_a_launch_and_the_operations_where_they_take_longer():
    operations = 2 * 2048 * 3584 * 3584
    assert limit_us(limit_of(H200), 40_000_000, operations) == pytest.approx(75.7, abs=0.1)
    assert limit_us(limit_of(H200), 40_000_000, operations, precision="fp8") == pytest.approx(37.8, abs=0.1)


def test_the_limit_counts_the_launches_an_op_needs():
    assert limit_us(limit_of(H200), 51200 * 4, 0, launches=2) == pytest.approx(2.15, abs=0.01)


@pytest.mark.parametrize("gpu", ["NVIDIA H100 PCIe", "some other GPU"])
def test_a_gpu_that_was_not_measured_has_no_limit(gpu):
    assert limit_us(limit_of(gpu), 1000, 0) is None
    assert finish(benchmark(), row(), gpu).fraction is None


def test_a_row_gets_rates_and_the_fraction_of_the_limit():
    found = finish(benchmark(operations=lambda shape: 10**9), row(shape="2048x4096", us=10.0), H200)
    assert found.gb_per_s == pytest.approx(3355.4, abs=0.1)
    assert found.tflop_per_s == pytest.approx(100.0)
    assert found.fraction == pytest.approx(0.885, abs=0.001)


def test_a_definition_without_bytes_leaves_the_columns_empty():
    found = finish(benchmark(traffic=None, operations=None), row(), H200)
    assert (found.bytes, found.gb_per_s, found.tflop_per_s, found.limit_us, found.fraction) == (None,) * 5


def test_a_failed_row_keeps_its_limit_and_has_no_rate():
    found = finish(benchmark(), Row("norm", "rms_norm", "2x4", "torch", failed="RuntimeError"), H200)
    assert found.limit_us is not None
    assert (found.gb_per_s, found.fraction) == (None, None)


@pytest.mark.parametrize(("warm", "set_bytes", "count"), [(False, 1000, 120), (False, 10**9, 2), (True, 1000, 1)])
def test_the_sets_exceed_twice_the_l2_before_one_repeats(warm, set_bytes, count):
    assert sets_needed(benchmark(warm=warm, set_bytes=lambda shape: set_bytes), "2x4", 60_000) == count


@pytest.mark.parametrize(("sets", "cold"), [(120, True), (119, False), (60, False)])
def test_rows_are_cold_where_the_sets_exceed_twice_the_l2(monkeypatch, sets, cold):
    from types import SimpleNamespace

    from kestrel_runtime.bench import rows
    from kestrel_runtime.bench.timer import Timed

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(L2_cache_size=60_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    monkeypatch.setattr(rows, "time_candidates", lambda calls, sets, replays: dict.fromkeys(calls, Timed(None)))
    fewer = benchmark(make=lambda shape, count: [()] * sets)  # a definition may make fewer sets
    assert [each.cold for each in rows._measure_shape(fewer, "2x4", None, {"kestrel": print}, 5)] == [cold]


def test_the_rate_is_that_of_the_limiting_resource():
    memory = finish(benchmark(operations=lambda shape: 1000), row(us=10.0), H200)
    compute = finish(benchmark(operations=lambda shape: 10**12), row(us=2000.0), H200)
    assert rate(memory) == "3355 GB/s"
    assert rate(compute) == "500 TFLOP/s"
