"""The command line of the bench without a GPU: definitions and runs."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from bench_rows import ENVIRONMENT, H200, stop

from kestrel_runtime.bench import Figures, Report, compiled, discover, load, peer
from kestrel_runtime.bench.command import main
from kestrel_runtime.bench.definition import Source, kind_of, select
from kestrel_runtime.bench.rows import everything, ours_only, without_peers

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
def test_the_name_of_a_candidate_gives_its_kind(candidate, kind):
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


def test_no_peer_is_imported_where_none_is_timed(tmp_path, fake_gpu, monkeypatch):
    (tmp_path / "slow_library.py").write_text("raise OSError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    more = (
        "from kestrel_runtime.bench import peer\n"
        "def candidates(): return {'kestrel': print, **({'slow': print} if peer('slow_library') else {})}\n"
    )
    write_definition(tmp_path, more=more)
    given = ["--checkout", str(tmp_path)]
    for options in ([], ["--ours-only"], ["--only", "kestrel"]):
        assert main([*given, *options]) == 0
    with pytest.warns(RuntimeWarning, match="slow_library is not timed"):
        assert main([*given, "--peers"]) == 0


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
def fake_gpu(monkeypatch):
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
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(command, "environment", lambda revision: {**ENVIRONMENT, "git": revision})
    monkeypatch.setattr(rows, "time_candidates", time_candidates)
    monkeypatch.setattr(rows, "host_us", lambda calls, arguments: {name: Figures(7.0, 7.0, 7.0) for name in calls})
    return times


def test_a_run_writes_prints_and_records(tmp_path, fake_gpu, capsys):
    more = "def candidates(): return dict.fromkeys(('kestrel', 'torch', 'vllm'), print)\ndef bare(): return print\n"
    write_definition(tmp_path, more=more)
    out = tmp_path / "x.json"
    given = ["norm", "--checkout", str(tmp_path), "--record", "--out", str(out), "--revision", "abc", "--peers"]
    assert main(given) == 0
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


def test_rows_of_another_gpu_than_that_of_the_targets_have_none(tmp_path, fake_gpu, monkeypatch):
    write_definition(tmp_path, more="def candidates(): return dict.fromkeys(('kestrel', 'torch'), print)\n")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    out = tmp_path / "x.json"
    assert main(["norm", "--checkout", str(tmp_path), "--out", str(out)]) == 0
    assert [(each.us, each.target_us) for each in Report.read(out).rows] == [(1.0, None), (4.0, None)]


@pytest.fixture
def three_shapes(tmp_path, fake_gpu):
    """A checkout with an op of three shapes, and a report of it at 5 us."""
    write_definition(tmp_path, more="TARGETS = dict.fromkeys(('1x1', '2x4', '4x4'))\n")
    fake_gpu["kestrel"] = 5.0
    assert main(["--checkout", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 0
    fake_gpu["kestrel"] = 1.0
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
    assert main([*given, "--shape", "2x4", "--shape", "3x3"]) == 2
    assert "'3x3'; there are: 1x1, 2x4, 4x4" in capsys.readouterr().err
    assert main([*given, "--only", "kestrel", "flashinfer"]) == 2
    assert "--only: no candidate called 'flashinfer' could be timed" in capsys.readouterr().err


def test_the_name_of_the_empty_launch_is_taken(tmp_path, fake_gpu, capsys):
    write_definition(tmp_path, more="def candidates(): return {'kestrel': print, 'empty': print}\n")
    assert main(["--checkout", str(tmp_path)]) == 2
    assert "'empty'" in capsys.readouterr().err


def test_traffic_that_raises_is_an_error_of_the_definition(tmp_path, fake_gpu):
    write_definition(tmp_path, more="def traffic(shape): return 1 / 0\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out)]) == 2
    assert [each.failed for each in Report.read(out).rows] == ["make: ZeroDivisionError: division by zero"]


def test_a_bare_entry_point_that_raises_leaves_the_host_cost_of_the_op(tmp_path, fake_gpu, monkeypatch):
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


def test_recording_some_candidates_keeps_the_rows_of_the_others(tmp_path, fake_gpu):
    write_definition(tmp_path, more="def candidates(): return dict.fromkeys(('kestrel', 'torch', 'vllm'), print)\n")
    given = ["--checkout", str(tmp_path), "--record"]
    fake_gpu["vllm"] = 3.0
    assert main([*given, "--peers"]) == 0
    fake_gpu.update(kestrel=0.9, torch=3.9)
    assert main([*given, "--only", "torch"]) == 0
    recorded = Report.read(tmp_path / "packages" / "norm" / "results" / "h200.json").rows
    assert [(each.candidate, each.us) for each in recorded] == [("kestrel", 1.0), ("torch", 3.9), ("vllm", 3.0)]
    assert main(given) == 0
    recorded = Report.read(tmp_path / "packages" / "norm" / "results" / "h200.json").rows
    assert [(each.candidate, each.us) for each in recorded] == [("kestrel", 0.9), ("torch", 3.9), ("vllm", 3.0)]


@pytest.mark.parametrize("option", ["--out", "--record"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_timed(tmp_path, fake_gpu, capsys, option):
    write_definition(tmp_path, more="def make(shape, count): raise AssertionError('timed')\n")
    (tmp_path / "file").touch()
    (tmp_path / "packages" / "norm" / "results").touch()
    where = {"--out": ["--out", str(tmp_path / "file" / "x.json")], "--record": ["--record"]}[option]
    assert main(["--checkout", str(tmp_path), *where]) == 2
    printed = capsys.readouterr()
    assert "error: " in printed.err
    assert "rows are not written there" in printed.err
    assert "kestrel" not in printed.out


def test_a_folder_without_permission_to_write_is_named(tmp_path, fake_gpu, capsys, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    write_definition(tmp_path)
    monkeypatch.setattr("kestrel_runtime.bench.command.tempfile.TemporaryFile", refuse)
    assert main(["--checkout", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_the_program_names_itself_as_it_was_called(capsys):
    with pytest.raises(SystemExit):
        main(["-h"], prog="kestrel-kernels bench")
    assert "usage: kestrel-kernels bench [-h]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--peers", "--ours-only"], ["--only", "torch", "--peers"], ["--shap", "2x4"]])
def test_options_that_contradict_or_are_abbreviated_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("against", [True, False])
def test_an_op_of_ours_that_fails_fails_the_run(tmp_path, fake_gpu, capsys, against):
    write_definition(tmp_path, more="def candidates(): return dict.fromkeys(('kestrel', 'torch'), print)\n")
    out = tmp_path / "x.json"
    given = ["--checkout", str(tmp_path)]
    assert main([*given, "--out", str(out)]) == 0
    del fake_gpu["kestrel"]
    assert main([*given, *(["--against", str(out)] if against else [])]) == 2
    assert "failed: norm:rms_norm 2x4 kestrel: RuntimeError: broken" in capsys.readouterr().err


def test_candidates_can_be_named(tmp_path, fake_gpu):
    write_definition(tmp_path, more="def candidates(): return dict.fromkeys(('kestrel', 'torch', 'vllm'), print)\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out), "--only", "kestrel", "vllm"]) == 0
    assert [row.candidate for row in Report.read(out).rows] == ["kestrel", "vllm"]


def test_a_compiled_candidate_is_compiled_for_every_shape(tmp_path, fake_gpu, monkeypatch):
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
    assert forgotten == []  # the compiler of another library is left alone
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


def test_against_prints_what_became_slower_and_fails(tmp_path, fake_gpu, capsys):
    write_definition(tmp_path)
    out = tmp_path / "x.json"
    given = ["--checkout", str(tmp_path), "--ours-only"]
    assert main([*given, "--out", str(out)]) == 0
    assert main([*given, "--against", str(out)]) == 0
    assert "0 slower" in capsys.readouterr().out
    fake_gpu["kestrel"] = 1.2
    assert main([*given, "--against", str(out)]) == 1
    assert "norm:rms_norm 2x4 kestrel: 1.00 -> 1.20 us (+20.0 %" in capsys.readouterr().out


def test_against_a_missing_file_or_another_gpu_is_refused(tmp_path, fake_gpu, capsys):
    write_definition(tmp_path)
    given = ["--checkout", str(tmp_path), "--against", str(tmp_path / "x.json")]
    assert main(given) == 2
    assert "x.json" in capsys.readouterr().err
    Report("another GPU").write(tmp_path / "x.json")
    assert main(given) == 2
    assert "was measured on another GPU" in capsys.readouterr().err


def test_a_definition_that_cannot_be_loaded_is_named_and_the_others_run(tmp_path, fake_gpu, capsys):
    write_definition(tmp_path)
    (tmp_path / "packages" / "norm" / "benchmarks" / "broken.py").write_text("import no_such_module\nTARGETS = {}\n")
    out = tmp_path / "x.json"
    assert main(["--checkout", str(tmp_path), "--out", str(out)]) == 2
    assert "norm:broken: ModuleNotFoundError" in capsys.readouterr().err
    assert len(Report.read(out).rows) == 1


def test_an_unknown_name_and_an_empty_checkout_are_refused(tmp_path, fake_gpu, capsys):
    assert main(["--checkout", str(tmp_path)]) == 2
    assert "no benchmarks" in capsys.readouterr().err
    write_definition(tmp_path)
    assert main(["nrom", "--checkout", str(tmp_path)]) == 2
    assert "'nrom'" in capsys.readouterr().err


def test_a_candidate_with_another_result_is_reported_and_not_timed(tmp_path, fake_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    more = (
        "import torch\n"
        "def make(shape, count): return [(torch.ones(4),)] * count\n"
        "def result(arguments, returned): return [returned]\n"
        "def candidates(): return {'kestrel': torch.exp, 'torch': torch.log, 'vllm': torch.exp}\n"
    )
    write_definition(tmp_path, more=more)
    out = tmp_path / "x.json"
    fake_gpu["vllm"] = 2.0
    assert main(["--checkout", str(tmp_path), "--out", str(out), "--peers"]) == 0
    ours, other, peer_row = Report.read(out).rows
    assert (ours.us, other.us, peer_row.us) == (1.0, None, 2.0)
    assert other.failed.startswith("not timed: its result differs from that of kestrel")
