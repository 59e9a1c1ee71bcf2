"""Reports of the bench: their files, their comparison, what is shown of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench_rows import ENVIRONMENT, H200, row, stop

from kestrel_runtime.bench import Report, Row, slower
from kestrel_runtime.bench.report import file_name
from kestrel_runtime.bench.show import cells, headline, verdict, watching

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


@pytest.mark.parametrize("whole_ops", [True, False])
def test_rows_of_candidates_that_a_run_does_not_time_stay_in_their_place(whole_ops):
    names, shapes = ("kestrel", "torch", "torch.compile", "vllm"), ("1x1", "2x4")
    old, new = Report(H200), Report(H200)
    for shape in (*shapes, "gone"):
        old.add([row(shape=shape, candidate=name) for name in names], ENVIRONMENT)
    for shape in shapes:
        new.add([row(shape=shape, candidate="torch", us=1.0)], {**ENVIRONMENT, "git": "def"})
    old.merge(new, whole_ops, timed={"torch", "torch.compile"}.__contains__)
    stay = ("kestrel", "torch", "vllm")
    expected = [(shape, name) for shape in shapes for name in stay]
    expected += [] if whole_ops else [("gone", name) for name in names]
    assert [(each.shape, each.candidate) for each in old.rows] == expected
    assert {each.us for each in old.rows if each.candidate == "torch" and each.shape in shapes} == {1.0}
    assert [old.environments[each.environment]["git"] for each in old.rows[:3]] == ["abc", "def", "abc"]


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
        ("NVIDIA H100 80GB HBM3", "h100.json"),
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


def test_a_slower_empty_launch_counts_as_noise():
    before = [row(us=1.0, spread=0.0, empty_us=0.54)]
    assert not slower([row(us=1.17, spread=0.0, empty_us=0.72)], before)
    assert len(slower([row(us=1.19, spread=0.0, empty_us=0.72)], before)) == 1
    assert len(slower([row(us=1.01, spread=0.0, empty_us=0.4)], before)) == 1


def test_faster_rows_failed_rows_and_new_rows_are_not_slower():
    failed = Row("norm", "rms_norm", "1x1", "kestrel", failed="no")
    assert not slower([row(us=1.0), failed, row(op="new", us=9.0)], [row(us=2.0), row(shape="1x1")])
    assert not slower([row(shape="1x1", us=9.0)], [failed])


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_row_by_reference_or_from_l2_is_marked():
    found = cells(row(runs="reference", cold=False, host_us=5.04, bare_host_us=4.0))
    assert found[-2:] == ("5.0 / 4.0", "by reference, warm")


def test_a_verdict_names_the_target():
    assert verdict(row(us=1.25, target_us=1.25)) == "1.25 met"
    assert verdict(row(us=1.26, target_us=1.25)) == "1.25 missed"
    assert verdict(row()) == ""


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
