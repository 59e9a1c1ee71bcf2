"""Everything around the timer, on any machine: statistics, reports, limits, comparisons, definitions, the command."""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from kestrel_runtime.bench import (
    Benchmark,
    Figures,
    Report,
    Row,
    compiled,
    discover,
    limit_of,
    limit_us,
    load,
    peer,
    slower,
    summarise,
    time_candidates,
)
from kestrel_runtime.bench.agreement import difference, disagreements
from kestrel_runtime.bench.command import main
from kestrel_runtime.bench.definition import Source, kind_of, select
from kestrel_runtime.bench.report import file_name
from kestrel_runtime.bench.rows import everything, finish, ours_only, sets_needed, without_peers
from kestrel_runtime.bench.show import cells, headline, rate, verdict, watching

H200 = "NVIDIA H200"
ENVIRONMENT = {
    "gpu": H200,
    "driver": "580.1",
    "clocks": {"sm": "1980 MHz", "memory": "3201 MHz", "sm_max": "1980 MHz"},
    "versions": {"torch": "2.11.0"},
    "git": "abc",
    "empty_us": 0.55,
    "empty_host_us": 3.0,
}


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


def row(op="rms_norm", shape="2x4", candidate="kestrel", us=2.0, spread=0.1, **others) -> Row:
    return Row("norm", op, shape, candidate, us=us, p20=us - spread / 2, p80=us + spread / 2, **others)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_median_and_ignores_outliers():
    found = summarise([1.0, 1.1, 1.2, 1.3, 99.0])
    assert found.us == 1.2
    assert found.p20 <= found.us <= found.p80


def test_percentiles_bracket_the_middle_of_many_samples():
    found = summarise([float(i) for i in range(1, 100)])
    assert (found.us, found.p20, found.p80) == (50.0, 20.0, 80.0)


def test_one_sample_has_no_spread():
    found = summarise([3.0])
    assert (found.us, found.p20, found.p80) == (3.0, 3.0, 3.0)


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretend_graphs(monkeypatch):
    """Captures that cost a table's microseconds per call, and what was replayed behind what."""
    from kestrel_runtime.bench import timer

    log = []
    us_of = {"fast": 1.0, "slow": 9000.0, "slower": 20_000.0, "fails": 1.0, "kestrel": 1.0, "kestrel_slow": 9000.0}

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


def test_every_sample_follows_a_replay_of_the_same_candidate(pretend_graphs):
    timed = time_candidates(named("fast", "slow"), [(None,)] * 10, replays=15)
    assert timed["fast"].figures == Figures(1.0, 1.0, 1.0)
    assert timed["fast"].calls == 200
    assert timed["slow"].figures == Figures(9000.0, 9000.0, 9000.0)
    assert timed["slow"].calls == 10  # two rounds would be longer than one replay may take
    assert {behind for _, behind in pretend_graphs if behind} == {"fast", "slow"}
    assert all(behind in (name, None) for name, behind in pretend_graphs)


def test_a_slow_candidate_gets_fewer_samples(pretend_graphs):
    time_candidates(named("fast", "slow"), [(None,)] * 10, replays=15)
    samples = [name for name, behind in pretend_graphs if behind]
    assert samples.count("fast") == 1 + 1 + 15  # to count rounds, to warm up, to measure
    assert samples.count("slow") == 1 + 1 + 5


def test_a_candidate_too_slow_for_all_sets_gets_a_part_of_them_and_an_empty_l2(pretend_graphs):
    timed = time_candidates(named("fast", "slow", "slower"), [(None,)] * 1000, replays=15)
    assert {name: each.calls for name, each in timed.items()} == {"fast": 1000, "slow": 44, "slower": 32}
    assert {behind for name, behind in pretend_graphs if name != "fast" and behind} == {"flush"}
    assert ("fast", "flush") not in pretend_graphs
    assert timed["slower"].figures == Figures(20_000.0, 20_000.0, 20_000.0)


def test_an_empty_launch_is_timed_over_no_more_calls_than_it_needs(pretend_graphs, monkeypatch):
    from kestrel_runtime.bench import timer

    monkeypatch.setattr(timer, "empty_launch", lambda _: "fast")
    timed = time_candidates({"empty": timer.empty_launch, **named("fast")}, [(None,)] * 5000)
    assert {name: each.calls for name, each in timed.items()} == {"empty": 2000, "fast": 5000}


def test_a_candidate_that_fails_half_way_has_no_figures(pretend_graphs):
    timed = time_candidates(named("fast", "fails"), [(None,)] * 10, replays=5)
    assert timed["fails"].failed == "RuntimeError: lost"
    assert timed["fails"].figures is None
    assert timed["fast"].figures is not None


@pytest.mark.parametrize(("ours", "runs", "called"), [("kestrel", "kernel", True), ("kestrel", "reference", False)])
def test_a_dependent_launch_of_ours_comes_before_every_sample(pretend_graphs, monkeypatch, ours, runs, called):
    assert (settled_samples(pretend_graphs, monkeypatch, ours, runs) == 2 * (1 + 15)) is called


def test_a_slow_op_of_ours_is_not_called_before_samples(pretend_graphs, monkeypatch):
    assert settled_samples(pretend_graphs, monkeypatch, "kestrel_slow", "kernel") == 0


def test_an_error_of_ours_before_a_sample_of_another_is_ours(pretend_graphs, monkeypatch):
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


def test_who_gives_something_else_is_named_and_nothing_of_the_set_changes(one_set):
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
        found["far"] == "not timed: it gives something else than kestrel: result 0 is off by 10.0 % (2.0 % are allowed)"
    )
    assert "shape [4] instead of [8]" in found["other shape"]
    assert one_set[1].eq(0).all()


def test_a_form_of_a_peer_is_held_against_the_same_form_of_ours(one_set):
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
    assert "something else than kestrel_softmax" in found["flashinfer_softmax"]


def test_without_a_word_on_results_or_without_ours_nobody_is_held_against_it(one_set):
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


def test_a_candidate_that_computes_something_else_is_reported_and_not_timed(tmp_path, pretend_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    more = (
        "import torch\n"
        "def make(shape, count): return [(torch.ones(4),)] * count\n"
        "def result(arguments, returned): return [returned]\n"
        "def candidates(): return {'kestrel': torch.exp, 'torch': torch.log, 'vllm': torch.exp}\n"
    )
    write_definition(tmp_path, more=more)
    out = tmp_path / "x.json"
    pretend_gpu["vllm"] = 2.0
    assert main(["--checkout", str(tmp_path), "--out", str(out)]) == 0
    ours, other, peer_row = Report.read(out).rows
    assert (ours.us, other.us, peer_row.us) == (1.0, None, 2.0)
    assert other.failed.startswith("not timed: it gives something else than kestrel")


# -- limits ------------------------------------------------------------------------------------------------------------


def test_the_limit_is_a_launch_and_the_bytes():
    assert limit_us(limit_of(H200), 2 * 2048 * 4096 * 2, 0) == pytest.approx(8.85, abs=0.01)


def test_the_limit_is_a_launch_and_the_operations_where_they_take_longer():
    operations = 2 * 2048 * 3584 * 3584
    assert limit_us(limit_of(H200), 40_000_000, operations) == pytest.approx(75.7, abs=0.1)
    assert limit_us(limit_of(H200), 40_000_000, operations, precision="fp8") == pytest.approx(37.8, abs=0.1)


def test_the_limit_counts_the_launches_an_op_needs():
    assert limit_us(limit_of(H200), 51200 * 4, 0, launches=2) == pytest.approx(2.15, abs=0.01)


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "some other GPU"])
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
def test_so_many_sets_pass_that_none_is_in_l2_when_it_comes_again(warm, set_bytes, count):
    assert sets_needed(benchmark(warm=warm, set_bytes=lambda shape: set_bytes), "2x4", 60_000) == count


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_report_survives_its_file(tmp_path):
    report = Report(H200)
    report.add([row(target_us=1.25, host_us=5.0), Row("norm", "rms_norm", "2x4", "torch", failed="no")], ENVIRONMENT)
    report.write(tmp_path / "results" / "h200.json")
    again = Report.read(tmp_path / "results" / "h200.json")
    assert again == report


def test_json_leaves_out_what_is_unknown_and_rounds_the_rest(tmp_path):
    report = Report(H200)
    report.add([row(us=1.23456789)], ENVIRONMENT)
    [found] = json.loads(report.to_json())["rows"]
    assert found["us"] == 1.2346
    assert "bytes" not in found


def test_a_target_that_is_a_peers_own_figure_is_met_within_two_percent():
    found = {us: row(us=us, target_us=100.0, target_of="quack") for us in (99.0, 100.0, 101.9, 102.1)}
    assert [(each.met, each.near) for each in found.values()] == [
        (True, False),
        (True, False),
        (True, True),
        (False, False),
    ]
    assert (row(us=101.0, target_us=100.0).met, row(us=101.0, target_us=100.0).near) == (False, False)
    assert row(us=101.0).met is None
    assert verdict(found[101.9]) == "100 met within 2 %"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    report = Report(H200)
    report.write(path)
    before = path.read_text()
    report.add([row()], ENVIRONMENT)
    monkeypatch.setattr("kestrel_runtime.bench.report.os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        report.write(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"gpu": "x", "rows": [{"op": 1}], "environments": []}', "null"])
def test_a_file_that_is_no_report_is_named(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not a report"):
        Report.read(path)


def test_new_rows_of_an_op_replace_all_its_old_ones_and_no_others():
    old, new = Report(H200), Report(H200)
    old.add([row(), row(shape="1x1"), row(op="layer_norm")], ENVIRONMENT)
    later = {**ENVIRONMENT, "git": "def"}
    new.add([row(us=1.0)], later)
    old.merge(new)
    assert [(each.op, each.shape, each.us, old.environments[each.environment]["git"]) for each in old.rows] == [
        ("layer_norm", "2x4", 2.0, "abc"),
        ("rms_norm", "2x4", 1.0, "def"),
    ]


def test_rows_of_chosen_shapes_leave_the_other_shapes():
    old, new = Report(H200), Report(H200)
    old.add([row(), row(shape="1x1")], ENVIRONMENT)
    new.add([row(us=1.0)], {**ENVIRONMENT, "git": "def"})
    old.merge(new, whole_ops=False)
    assert {each.shape: each.us for each in old.rows} == {"1x1": 2.0, "2x4": 1.0}
    assert len(old.environments) == 2


def test_environments_that_no_row_names_are_dropped():
    old, new = Report(H200), Report(H200)
    old.add([row()], ENVIRONMENT)
    new.add([row()], {**ENVIRONMENT, "git": "def"})
    old.merge(new)
    assert [each["git"] for each in old.environments] == ["def"]


def test_reports_of_two_gpus_do_not_mix():
    with pytest.raises(ValueError, match="do not go into"):
        Report(H200).merge(Report("another"))


def test_the_part_of_one_family_is_a_report_of_its_own():
    report = Report(H200)
    report.add([row()], ENVIRONMENT)
    report.add([replace(row(), family="rope")], {**ENVIRONMENT, "git": "def"})
    part = report.of_family("rope")
    assert [each.family for each in part.rows] == ["rope"]
    assert [part.environments[each.environment]["git"] for each in part.rows] == ["def"]
    assert len(report.rows) == 2


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (H200, "h200.json"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3.json"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090.json"),
    ],
)
def test_results_are_named_after_the_gpu(gpu, name):
    assert file_name(gpu) == name


# -- comparison --------------------------------------------------------------------------------------------------------


def test_only_what_exceeds_both_spreads_counts_as_slower():
    before = [row(us=2.0, spread=0.1), row(shape="1x1", us=2.0, spread=0.1)]
    after = [row(us=2.15, spread=0.1), row(shape="1x1", us=2.25, spread=0.1)]
    [found] = slower(after, before)
    assert found.row.shape == "1x1"
    assert str(found) == "norm:rms_norm 1x1 kestrel: 2.00 -> 2.25 us (+12.5 %, noise 0.20 us)"


def test_a_dearer_empty_launch_counts_as_noise():
    before = [row(us=1.0, spread=0.0, empty_us=0.54)]
    assert not slower([row(us=1.17, spread=0.0, empty_us=0.72)], before)
    assert len(slower([row(us=1.19, spread=0.0, empty_us=0.72)], before)) == 1
    assert len(slower([row(us=1.01, spread=0.0, empty_us=0.4)], before)) == 1


def test_faster_rows_failed_rows_and_new_rows_are_not_slower():
    failed = Row("norm", "rms_norm", "1x1", "kestrel", failed="no")
    assert not slower([row(us=1.0), failed, row(op="new", us=9.0)], [row(us=2.0), row(shape="1x1")])
    assert not slower([row(shape="1x1", us=9.0)], [failed])


# -- definitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "kind"),
    [
        ("kestrel", "ours"),
        ("kestrel_softmax", "ours"),
        ("torch", "torch"),
        ("torch.compile", "torch"),
        ("torch_sdpa", "torch"),
        ("torchao", "peer"),
        ("vllm", "peer"),
    ],
)
def test_candidates_are_told_apart_by_name(candidate, kind):
    assert kind_of(candidate) == kind
    assert everything(candidate)
    assert ours_only(candidate) == (kind == "ours")
    assert without_peers(candidate) == (kind != "peer")


def write_definition(checkout, family="norm", op="rms_norm", more=""):
    path = checkout / "packages" / family / "benchmarks" / f"{op}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "TARGETS = {'2x4': 1.25}\n"
        "def make(shape, count): return [()] * count\n"
        "def set_bytes(shape): return 16\n"
        "def candidates(): return {'kestrel': print}\n" + more
    )


def test_definitions_of_a_checkout_are_found_and_loaded(tmp_path):
    write_definition(tmp_path)
    write_definition(tmp_path, "rope", "rotary_embedding", "WARM = True\nLAUNCHES = 2\ndef traffic(shape): return 32\n")
    (tmp_path / "packages" / "rope" / "benchmarks" / "shapes.py").write_text("SIZE = 1\n")
    sources = discover(tmp_path)
    assert [source.name for source in sources] == ["norm:rms_norm", "rope:rotary_embedding"]
    norm, rope = map(load, sources)
    assert (norm.targets, norm.warm, norm.traffic, norm.bare, norm.launches) == ({"2x4": 1.25}, False, None, None, 1)
    assert (rope.warm, rope.launches, rope.traffic("2x4")) == (True, 2, 32)


def test_definitions_of_two_families_may_share_code_under_the_same_name(tmp_path):
    for family, size in (("norm", 1), ("rope", 2)):
        write_definition(tmp_path, family, more="import shapes\ndef traffic(shape): return shapes.SIZE\n")
        (tmp_path / "packages" / family / "benchmarks" / "shapes.py").write_text(f"SIZE = {size}\n")
    assert [load(source).traffic("2x4") for source in discover(tmp_path)] == [1, 2]


def test_a_definition_may_hold_a_dataclass(tmp_path):
    more = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass S:\n    n: int\n"
    write_definition(tmp_path)
    [source] = discover(tmp_path)
    source.path.write_text(more + source.path.read_text())
    assert load(source).targets


def test_a_definition_says_which_targets_are_a_peers_own_figures(tmp_path):
    write_definition(tmp_path, more="TARGET_OF = {'2x4': 'quack'}\n")
    write_definition(tmp_path, op="other", more="TARGET_OF = {'4x4': 'quack'}\n")
    wrong, right = discover(tmp_path)
    assert load(right).target_of == {"2x4": "quack"}
    with pytest.raises(ValueError, match=r"TARGET_OF names \['4x4'\]"):
        load(wrong)


def test_a_library_that_is_not_installed_is_passed_over_and_a_broken_one_named(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import no_such_module\n")
    (tmp_path / "other_library.py").write_text("raise OSError('libx.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert peer("no_such_library") is None
    assert peer("no_such_library.sub") is None
    assert peer("json.decoder") is json.decoder
    with pytest.warns(RuntimeWarning, match="broken_library is not timed: ModuleNotFoundError"):
        assert peer("broken_library") is None
    with pytest.warns(RuntimeWarning, match=r"other_library is not timed: OSError: libx\.so"):
        assert peer("other_library") is None


def test_no_peer_is_imported_where_none_is_timed(tmp_path, pretend_gpu, monkeypatch):
    (tmp_path / "slow_library.py").write_text("raise OSError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    more = (
        "from kestrel_runtime.bench import peer\n"
        "def candidates(): return {'kestrel': print, **({'slow': print} if peer('slow_library') else {})}\n"
    )
    write_definition(tmp_path, more=more)
    given = ["--checkout", str(tmp_path)]
    assert main([*given, "--without-peers"]) == 0
    assert main([*given, "--only", "kestrel"]) == 0
    with pytest.warns(RuntimeWarning, match="slow_library is not timed"):
        assert main(given) == 0


def test_a_compiled_candidate_costs_nothing_until_it_is_called(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    call = compiled(lambda a, b: a + b, dynamic=False)
    assert made == []
    assert [call(1, 2), call(3, 4)] == [3, 7]
    assert made == [{"dynamic": False}]


def test_a_definition_that_lacks_a_part_says_which(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("TARGETS = {}\n")
    with pytest.raises(AttributeError, match="make"):
        load(Source("norm", "broken", path))


def test_names_select_families_and_ops(tmp_path):
    for family, op in (("norm", "layer_norm"), ("norm", "rms_norm"), ("rope", "rotary_embedding")):
        write_definition(tmp_path, family, op)
    sources = discover(tmp_path)

    def names(*wanted):
        return [source.name for source in select(sources, wanted)]

    assert len(names()) == 3
    assert names("norm") == ["norm:layer_norm", "norm:rms_norm"]
    assert names("norm:rms_norm", "rope", "norm:rms_norm") == ["norm:rms_norm", "rope:rotary_embedding"]
    with pytest.raises(ValueError, match="'nrom'; there are: norm:layer_norm, "):
        names("nrom")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_recording_needs_a_checkout(capsys):
    with pytest.raises(SystemExit):
        main(["--record"])
    assert "--checkout" in capsys.readouterr().err


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A machine whose timer is a table: {(shape, candidate): us}."""
    from kestrel_runtime.bench import command, rows
    from kestrel_runtime.bench.timer import Timed

    times: dict[str, float] = {"kestrel": 1.0, "torch": 4.0, "empty": 0.5}

    def time_candidates(candidates, sets, replays):
        return {
            name: Timed(Figures(times[name], times[name] * 0.99, times[name] * 1.01), calls=200, runs="kernel")
            if name in times
            else Timed(None, failed="RuntimeError: broken")
            for name in candidates
        }

    class Properties:
        L2_cache_size = 60_000

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(command, "environment", lambda revision: {**ENVIRONMENT, "git": revision})
    monkeypatch.setattr(rows, "time_candidates", time_candidates)
    monkeypatch.setattr(rows, "host_us", lambda calls, arguments: {name: Figures(7.0, 7.0, 7.0) for name in calls})
    return times


def test_a_run_writes_prints_and_records(tmp_path, pretend_gpu, capsys):
    more = "def candidates(): return dict.fromkeys(('kestrel', 'torch', 'vllm'), print)\ndef bare(): return print\n"
    write_definition(tmp_path, more=more)
    out = tmp_path / "x.json"
    assert main(["norm", "--checkout", str(tmp_path), "--record", "--out", str(out), "--revision", "abc"]) == 0
    written = Report.read(out)
    assert written == Report.read(tmp_path / "packages" / "norm" / "results" / "h200.json")
    ours, theirs, broken = written.rows
    assert (ours.target_us, theirs.target_us) == (1.25, None)
    assert (ours.empty_us, theirs.empty_us) == (0.5, 0.5)
    assert (ours.host_us, ours.bare_host_us, theirs.bare_host_us) == (7.0, 7.0, None)
    assert broken.failed == "RuntimeError: broken"
    printed = capsys.readouterr().out
    assert "empty launch 0.55 us" in printed
    assert "1.25 met" in printed
    assert "RuntimeError: broken" in printed


@pytest.fixture
def three_shapes(tmp_path, pretend_gpu):
    """A checkout with an op of three shapes, and a report of it at 5 us."""
    write_definition(tmp_path, more="TARGETS = dict.fromkeys(('1x1', '2x4', '4x4'))\n")
    pretend_gpu["kestrel"] = 5.0
    assert main(["--checkout", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 0
    pretend_gpu["kestrel"] = 1.0
    return tmp_path


def fail():
    raise RuntimeError("broken")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("end", "status"), [(stop, 130), (terminate, 130), (fail, 2)])
def test_a_run_that_ends_early_keeps_what_it_measured_and_what_was_there(three_shapes, monkeypatch, end, status):
    from kestrel_runtime.bench import rows

    def measure_shape(benchmark, shape, *rest):
        if shape == "4x4":
            end()
        return whole(benchmark, shape, *rest)

    whole = rows._measure_shape
    monkeypatch.setattr(rows, "_measure_shape", measure_shape)
    out = three_shapes / "x.json"
    assert main(["--checkout", str(three_shapes), "--out", str(out)]) == status
    assert {each.shape: each.us for each in Report.read(out).rows} == {"1x1": 1.0, "2x4": 1.0, "4x4": 5.0}


@pytest.mark.parametrize("there", ["notes", '{"gpu": "another GPU", "rows": [], "environments": []}'])
def test_a_file_that_is_no_report_of_this_gpu_is_not_overwritten(three_shapes, capsys, there):
    out = three_shapes / "x.json"
    out.write_text(there)
    assert main(["--checkout", str(three_shapes), "--out", str(out)]) == 2
    assert "x.json" in capsys.readouterr().err
    assert out.read_text() == there


def test_a_shape_or_candidate_that_nothing_has_is_named(three_shapes, capsys):
    given = ["--checkout", str(three_shapes)]
    assert main([*given, "--shapes", "2x4", "3x3"]) == 2
    assert "'3x3'; there are: 1x1, 2x4, 4x4" in capsys.readouterr().err
    assert main([*given, "--only", "kestrel", "flashinfer"]) == 2
    assert "--only: no candidate called 'flashinfer' could be timed" in capsys.readouterr().err


def test_the_name_of_the_empty_launch_is_taken(tmp_path, pretend_gpu, capsys):
    write_definition(tmp_path, more="def candidates(): return {'kestrel': print, 'empty': print}\n")
    assert main(["--checkout", str(tmp_path)]) == 2
    assert "'empty'" in capsys.readouterr().err


def test_bytes_that_cannot_be_told_are_an_error_of_the_definition(tmp_path, pretend_gpu):
    write_definition(tmp_path, more="def traffic(shape): return 1 / 0\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out)]) == 0
    assert [each.failed for each in Report.read(out).rows] == ["make: ZeroDivisionError: division by zero"]


def test_a_bare_entry_point_that_raises_leaves_the_host_cost_of_the_op(tmp_path, pretend_gpu, monkeypatch):
    from kestrel_runtime.bench import rows

    def host_us(calls, arguments):
        if "bare" in calls:
            raise TypeError("other parameters")
        return {name: Figures(7.0, 7.0, 7.0) for name in calls}

    monkeypatch.setattr(rows, "host_us", host_us)
    write_definition(tmp_path, more="def bare(): return print\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out)]) == 0
    assert [(each.host_us, each.bare_host_us) for each in Report.read(out).rows] == [(7.0, None)]


def test_candidates_can_be_named(tmp_path, pretend_gpu):
    write_definition(tmp_path, more="def candidates(): return dict.fromkeys(('kestrel', 'torch', 'vllm'), print)\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out), "--only", "kestrel", "vllm"]) == 0
    assert [row.candidate for row in Report.read(out).rows] == ["kestrel", "vllm"]


def test_a_compiled_candidate_is_compiled_for_every_shape(tmp_path, pretend_gpu, monkeypatch):
    import torch._dynamo

    from kestrel_runtime.bench import definition, rows

    forgotten = []
    monkeypatch.setattr(definition, "_compiled", [])
    monkeypatch.setattr(torch._dynamo, "reset", lambda: forgotten.append(1))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(rows, "time_candidates", calling(rows.time_candidates))
    more = "TARGETS = dict.fromkeys(('1x1', '2x4', '4x4'))\n"
    write_definition(tmp_path, more=more)
    assert main(["--checkout", str(tmp_path)]) == 0
    assert forgotten == []  # what another library has loaded of the compiler is none of ours
    more += (
        "from kestrel_runtime.bench import compiled\n"
        "def candidates(): return {'kestrel': print, 'torch.compile': compiled(lambda *_: None)}\n"
    )
    write_definition(tmp_path, more=more)
    assert main(["--checkout", str(tmp_path)]) == 0
    assert len(forgotten) == 2  # before the second and the third shape


def calling(time_candidates):
    def timed(candidates, sets, replays):
        for name, call in candidates.items():
            if name == "torch.compile":
                call(*sets[0])
        return time_candidates(candidates, sets, replays)

    return timed


def test_against_prints_what_became_slower_and_fails(tmp_path, pretend_gpu, capsys):
    write_definition(tmp_path)
    out = tmp_path / "x.json"
    given = ["--checkout", str(tmp_path), "--ours-only"]
    assert main([*given, "--out", str(out)]) == 0
    assert main([*given, "--against", str(out)]) == 0
    assert "0 slower" in capsys.readouterr().out
    pretend_gpu["kestrel"] = 1.2
    assert main([*given, "--against", str(out)]) == 1
    assert "norm:rms_norm 2x4 kestrel: 1.00 -> 1.20 us (+20.0 %" in capsys.readouterr().out


def test_against_a_missing_file_or_another_gpu_is_refused(tmp_path, pretend_gpu, capsys):
    write_definition(tmp_path)
    given = ["--checkout", str(tmp_path), "--against", str(tmp_path / "x.json")]
    assert main(given) == 2
    assert "x.json" in capsys.readouterr().err
    Report("another GPU").write(tmp_path / "x.json")
    assert main(given) == 2
    assert "was measured on another GPU" in capsys.readouterr().err


def test_a_definition_that_cannot_be_loaded_is_named_and_the_others_run(tmp_path, pretend_gpu, capsys):
    write_definition(tmp_path)
    (tmp_path / "packages" / "norm" / "benchmarks" / "broken.py").write_text("import no_such_module\nTARGETS = {}\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out)]) == 2
    assert "norm:broken: ModuleNotFoundError" in capsys.readouterr().err
    assert len(Report.read(out).rows) == 1


def test_an_unknown_name_and_an_empty_checkout_are_refused(tmp_path, pretend_gpu, capsys):
    assert main(["--checkout", str(tmp_path)]) == 2
    assert "no benchmarks" in capsys.readouterr().err
    write_definition(tmp_path)
    assert main(["nrom", "--checkout", str(tmp_path)]) == 2
    assert "'nrom'" in capsys.readouterr().err


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_row_by_reference_or_from_l2_says_so():
    found = cells(row(runs="reference", cold=False, host_us=5.04, bare_host_us=4.0))
    assert found[-2:] == ("5.0 / 4.0", "by reference, warm")


def test_a_verdict_names_the_target():
    assert verdict(row(us=1.25, target_us=1.25)) == "1.25 met"
    assert verdict(row(us=1.26, target_us=1.25)) == "1.25 missed"
    assert verdict(row()) == ""


def test_the_rate_is_of_what_decides():
    memory = finish(benchmark(operations=lambda shape: 1000), row(us=10.0), H200)
    compute = finish(benchmark(operations=lambda shape: 10**12), row(us=2000.0), H200)
    assert rate(memory) == "3355 GB/s"
    assert rate(compute) == "500 TFLOP/s"


def test_the_headline_names_what_is_unknown():
    unknown = {**ENVIRONMENT, "driver": None, "clocks": {"sm": None, "memory": None}}
    assert headline(unknown).startswith(f"{H200}, unknown SM clock")


def test_a_terminal_gets_a_table_and_a_bar(monkeypatch, capsys):
    pytest.importorskip("rich")
    import sys

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with watching(ENVIRONMENT, 2) as watcher:
        watcher.begin("norm:rms_norm")
        watcher.shape([row(target_us=1.25), Row("norm", "rms_norm", "2x4", "torch", failed="broken")])
        watcher.end()
    printed = capsys.readouterr().out
    assert "norm:rms_norm" in printed
    assert "broken" in printed
