"""`kestrel-kernels generate` as it is typed."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

COMMAND = [sys.executable, "-m", "kestrel_kernels", "generate"]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def invoke(*arguments: str):
    from kestrel_kernels.cli import app

    return CliRunner().invoke(app, ["generate", "--device", "cpu", *arguments])


def test_it_writes_text_and_says_what_ran():
    done = invoke("--prompt", "def add(", "--max-new-tokens", "12")
    assert done.exit_code == 0
    assert done.stdout.startswith("def add(")
    assert len(done.stdout) > len("def add(") + 6
    assert "1.86 million parameters in bfloat16" in done.stderr
    assert "every op runs by its PyTorch reference" in done.stderr
    assert re.search(r"tokens in [\d.]+ s: [\d.]+ tokens per second", done.stderr)
    assert "ran as kernels: none" in done.stderr
    assert "attention.flash_attn_with_kvcache" in done.stderr
    assert "Warning" not in done.stderr


def test_the_same_request_gives_the_same_text_and_another_seed_another():
    arguments = ["--prompt", "class ", "--max-new-tokens", "10", "--seed"]
    first, again, other = (invoke(*arguments, seed).stdout for seed in ("3", "3", "4"))
    assert first == again != other


@pytest.mark.parametrize(
    "options",
    [
        ["--kv-cache", "fp8", "--experts", "fp8"],
        ["--dtype", "float16", "--kv-cache", "fp8"],
        ["--dtype", "float32", "--temperature", "0"],
        ["--context", "19"],
        ["--kv-cache", "int8"],
        ["--kv-cache", "int4", "--context", "70"],
    ],
)
def test_every_way_to_store_and_to_draw(options):
    result = invoke("--prompt", "import ", "--max-new-tokens", "6", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("import ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "--preset: expected one of tiny, moondream3, got 'huge'"),
        (["--prompt", ""], "--prompt: expected at least one character"),
        (["--prompt", "x" * 2000], "--prompt: expected at most 1024 tokens of prompt and output"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--max-new-tokens", "2000"], "--prompt: expected at most 1024 tokens of prompt and output"),
        (["--context", "20"], "--context: expected a cache of at least"),
        (["--context", "0"], "--context: expected at least 1, got 0"),
        (["--context", "4096"], "--context: expected at most 1024 (the model's), got 4096"),
        (["--temperature", "nan"], "--temperature: expected a finite number of at least 0, got nan"),
        (["--temperature", "-1"], "--temperature: expected a finite number of at least 0, got -1.0"),
        (["--top-p", "0"], "--top-p: expected a number above 0 and at most 1, got 0.0"),
        (["--top-p", "1.5"], "--top-p: expected a number above 0 and at most 1, got 1.5"),
        (["--seed", "-1"], "--seed: expected 0 to 2**63 - 1, got -1"),
        (["--dtype", "float64"], "--dtype: expected one of bfloat16, float32, float16, got 'float64'"),
        (["--kv-cache", "int2"], "--kv-cache: expected one of auto, fp8, int8, int4, got 'int2'"),
        (["--experts", "int4"], "--experts: expected one of bf16, fp8, got 'int4'"),
        (["--model", "missing.pt"], "got missing.pt, not a file"),
        (["--preset", "moondream3", "--model", "x.pt"], "--model: expected no file with --preset moondream3"),
        (["--device", "tpu9"], "--device: expected cpu, cuda or cuda:N, got 'tpu9'"),
        (["--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "--device: expected one of"),
        (["--device", "cuda:255"], "--device: expected one of"),
        (["--device", "cuda:999"], "--device: expected one of"),
    ],
)
def test_a_wrong_request_gives_one_line_and_no_text(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_moondream3_is_refused_where_it_does_not_fit(monkeypatch):
    from kestrel_kernels.demo import memory

    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * memory.GIB)
    result = invoke("--preset", "moondream3")
    assert result.exit_code == 2
    assert re.search(r"^error: --preset: expected \d+\.\d GiB of free memory on cpu .* got 2\.0 GiB$", result.stderr)


def test_a_large_model_says_what_it_is_before_its_weights_are_drawn(monkeypatch):
    from kestrel_kernels.demo import memory, run

    def draw(*arguments, progress, **options):
        progress("random weights: embedding.weight")
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    monkeypatch.setattr(run, "random", draw)
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.0)
    result = invoke("--preset", "moondream3", "--prompt", "a")
    assert result.exit_code == 130
    heading, _, remark = result.stderr.partition("for timing only\n\n")
    assert "8.8 billion parameters" in heading
    assert remark.splitlines()[0] == "random weights: embedding.weight ..."


def test_an_error_of_torch_while_a_model_file_is_read_is_one_line(tmp_path):
    (tmp_path / "model.pt").write_text("import os\n")
    result = invoke("--model", str(tmp_path / "model.pt"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --model: expected a file that tools/train_tiny.py wrote")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_bytes_that_are_not_text_pass_through(encoding, monkeypatch):
    from kestrel_kernels.demo.cli import generate

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with pytest.raises(typer.Exit):
        generate(prompt=os.fsdecode(b"x = '\xff\xc3\xa9"), max_new_tokens=3, device="cpu")
    assert raw.getvalue().decode(encoding).startswith({"ascii": "x = '??", "utf-8": "x = '\ufffdé"}[encoding])


def test_a_demand_for_kernels_is_refused_without_a_gpu():
    from kestrel_runtime import backend

    with backend("kernel"):
        done = invoke()
    assert done.exit_code == 2
    assert "the backend is 'kernel'" in done.stderr.splitlines()[-1]


def test_ctrl_c_ends_it_quietly():
    process = subprocess.Popen(
        [*COMMAND, "--max-new-tokens", "900", "--temperature", "0"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    assert process.stdout.read(60)  # the prompt and some text
    process.send_signal(signal.SIGINT)
    _, remarks = process.communicate(timeout=60)
    assert process.returncode == 130
    assert remarks.decode().endswith("interrupted\n")
    assert "Traceback" not in remarks.decode()


def test_the_rate_counts_the_time_between_tokens_and_leaves_the_first_out():
    from kestrel_kernels.demo.run import _rate

    assert _rate([10.0, 10.5, 11.0]) == 2.0
