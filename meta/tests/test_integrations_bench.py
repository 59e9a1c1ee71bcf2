"""`kestrel-kernels bench model` on a tiny configuration."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from kestrel_kernels.cli import app
from kestrel_kernels.integrations import plot
from kestrel_kernels.integrations.transformers import bench

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "model", *map(str, arguments)])


def test_every_way_gets_a_line_and_a_row(tiny, tmp_path):
    out = tmp_path / "results" / "figures.json"
    ways = ["--ways", "dynamic", "kestrel", "--batch", 1, 2, "--kv-cache", "auto", "int8"]
    done = run("--config", tiny, *ways, "--prompt", 3, "--new-tokens", 10, "--layers", 1, "--out", out)
    assert done.exit_code == 0, done.output
    [(name, found)] = json.loads(out.read_text()).items()
    assert name == f"{tiny}, prompt 3"
    rows = [(row["way"], row["batch"], row["kv_cache"]) for row in found["rows"]]
    ours = [("kestrel", batch, kind) for batch in (1, 2) for kind in ("auto", "int8")]
    assert rows == [("dynamic", 1, "auto"), ("dynamic", 2, "auto"), *ours]
    assert all(row["tokens_per_second"] > 0 and row["first_ms"] > 0 for row in found["rows"])
    assert {"gpu", "versions", "git", "date"} <= set(found["environment"])
    assert done.stdout.splitlines()[0].split() == [
        "way",
        "weights",
        "KV",
        "cache",
        "batch",
        "tokens/s",
        "first",
        "token",
        "peak",
        "memory",
    ]
    assert len([line for line in done.stdout.splitlines() if line.startswith(("dynamic", "kestrel "))]) == 6


def test_weights_of_4_bits_have_rows_behind_those_of_bf16(tmp_path):
    path, out = tmp_path / "config.json", tmp_path / "figures.json"
    path.write_text(json.dumps({**TINY, "hidden_size": 128, "intermediate_size": 128}))
    done = run(
        *("--config", path, "--ways", "kestrel", "--batch", 1, "--weights", "w4-head", "w4", "bf16"),
        *("--prompt", 3, "--new-tokens", 10, "--layers", 1, "--once", "--out", out, "--plot", tmp_path / "plot.svg"),
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    [found] = figures.values()
    assert [row["weights"] for row in found["rows"]] == ["bf16", "w4", "w4-head"]
    drawn = (tmp_path / "plot.svg").read_text()
    assert f"rows {plot.digest(figures)}" in drawn
    assert all(f">{plot.label(row)}<" in drawn for row in found["rows"])


def test_a_way_that_fails_is_a_row_that_says_why(tiny, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    own = LlamaForCausalLM.generate

    def no_compiler(model, ids, cache_implementation=None, **options):
        if cache_implementation == "static" and len(ids) == 16:
            raise RuntimeError("no C compiler\nsecond line")
        return own(model, ids, cache_implementation=cache_implementation, **options)

    def no_weights(model, **options):
        raise ValueError("quantize: no group fits")

    monkeypatch.setattr(LlamaForCausalLM, "generate", no_compiler)
    monkeypatch.setattr("kestrel_kernels.integrations.transformers.quantize", no_weights)
    out, drawn = tmp_path / "figures.json", tmp_path / "plot.svg"
    done = run(
        *("--config", tiny, "--ways", "static", "kestrel", "--batch", 2, 16, "--weights", "bf16", "w4", "--layers", 1),
        *("--prompt", 3, "--new-tokens", 10, "--once", "--out", out, "--plot", drawn),
    )
    assert done.exit_code == 0, done.output
    [found] = json.loads(out.read_text()).values()
    rows = {(row["way"], row["weights"], row["batch"]): row for row in found["rows"]}
    failed = {key: row["error"] for key, row in rows.items() if "error" in row}
    assert failed == {
        ("static", "bf16", 16): "RuntimeError: no C compiler",
        ("kestrel", "w4", 2): "ValueError: quantize: no group fits",
        ("kestrel", "w4", 16): "ValueError: quantize: no group fits",
    }
    assert all(row["tokens_per_second"] is None for row in rows.values() if "error" in row)
    assert rows["static", "bf16", 2]["tokens_per_second"] > 0
    assert not rows["static", "bf16", 2]["compiled"]  # transformers compiles on GPUs alone
    assert rows["kestrel", "bf16", 16]["tokens_per_second"] > 0
    assert re.search("static +bf16 +auto +16   failed: RuntimeError: no C compiler\n", done.stdout)
    assert "transformers, static, compiled" in drawn.read_text()


def test_a_failed_row_has_its_line_in_the_table(model_tables):
    row = {"way": "static", "weights": "bf16", "batch": 16, "kv_cache": "auto"}
    row |= {"tokens_per_second": None, "first_ms": None, "peak_gib": None, "error": "RuntimeError: no C compiler"}
    found = {"layers": None, "new_tokens": 64, "rows": [row], "environment": {"gpu": None}}
    table = model_tables.engine_table("llama, prompt 3", found)
    assert "| transformers, static cache, compiled | bf16 | bf16 | 16 | failed (RuntimeError) | |  |" in table


@pytest.mark.parametrize("name", bench.CONFIGS)
def test_a_named_configuration_is_one_that_every_way_takes(name):
    from transformers import AutoConfig

    from kestrel_kernels.integrations.transformers import KestrelCache, patch

    kind, settings = bench.CONFIGS[name]
    config = AutoConfig.for_model(kind, **settings)
    assert kind in patch._FAMILIES
    for kv_cache in ("auto", "fp8", "int8", "int4"):
        KestrelCache(config, kv_cache=kv_cache, max_tokens=config.max_position_embeddings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "no-model"), "--config: expected one of llama-3.1-8b, .*, got no-model"),
        (("--new-tokens", 9), "--new-tokens: expected at least 10, got 9"),
        (("--prompt", 0), "--prompt: expected at least 1, got 0"),
        (("--batch", 4, 0), "--batch: expected at least 1, got 0"),
        (("--layers", -1), "--layers: expected at least 1, got -1"),
        (("--out", __file__), "--out: expected a JSON file of this command or a new one, got .*test_integrations"),
        (("--config", __file__), "It looks like the config file at .* is not a valid JSON file"),
        (("--out", "/dev/null/x.json"), "--out: expected a file that can be written, got /dev/null/x.json"),
        (("--plot", "speed.png"), "--plot: expected an SVG file, got speed.png"),
        (("--kv-cache", "int2"), "invalid choice"),
    ],
)
def test_bad_options_are_named(arguments, message, capfd):
    done = run(*arguments)
    assert done.exit_code == 2
    assert re.search(message, done.stderr + capfd.readouterr().err)


def test_an_interrupted_run_writes_what_it_measured(tiny, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    own = LlamaForCausalLM.generate

    def interrupted(model, ids, **options):
        if len(ids) == 2:
            raise KeyboardInterrupt
        return own(model, ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", interrupted)
    out = tmp_path / "figures.json"
    ways = ("--ways", "dynamic", "kestrel", "--batch", 1, 2)
    done = run("--config", tiny, *ways, "--prompt", 3, "--new-tokens", 10, "--layers", 1, "--once", "--out", out)
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "interrupted: the rows measured until then are written"
    [found] = json.loads(out.read_text()).values()
    assert [(row["way"], row["batch"]) for row in found["rows"]] == [("dynamic", 1)]


def test_a_run_on_the_cpu_says_so_before_it_builds_the_model(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    said = io.StringIO()

    def build(name, device, layers):
        raise ValueError("--config: expected a shorter wait\nsecond line")

    monkeypatch.setattr(bench, "build", build)
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        bench.main([], prog="bench")
    assert said.getvalue().startswith("no GPU here: the model runs on the CPU; --layers makes it smaller\n")
    assert said.getvalue().endswith("expected a shorter wait\n")


def test_without_transformers_one_line_says_what_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kestrel_kernels.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name == "transformers":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    done = run()
    assert done.exit_code == 2
    assert done.stderr == "error: bench model: expected transformers, as the extra [transformers] installs it\n"
