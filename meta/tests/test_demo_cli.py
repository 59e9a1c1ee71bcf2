"""`kestrel-kernels generate` as it is typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

COMMAND = [sys.executable, "-m", "kestrel_kernels.cli", "generate"]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def invoke(*arguments: str):
    from kestrel_kernels.cli import app

    return CliRunner().invoke(app, ["generate", "--device", "cpu", *arguments])


def test_it_writes_text_and_says_what_ran():
    done = subprocess.run(
        [*COMMAND, "--prompt", "def add(", "--max-new-tokens", "30"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("def add(")
    assert len(done.stdout) > len("def add(") + 10
    assert "1.86 million parameters in bfloat16" in done.stderr
    assert "no GPU here: every op runs by its PyTorch reference" in done.stderr
    assert re.search(r"tokens in [\d.]+ s: [\d.]+ tokens per second", done.stderr)
    assert "ran as kernels: none" in done.stderr
    assert "attention.flash_attn_with_kvcache" in done.stderr
    assert "Warning" not in done.stderr


def test_the_same_request_gives_the_same_text_and_another_seed_another():
    arguments = ["--prompt", "class ", "--max-new-tokens", "20", "--seed"]
    first, again, other = (invoke(*arguments, seed).stdout for seed in ("3", "3", "4"))
    assert first == again != other


@pytest.mark.parametrize(
    "options",
    [
        ["--kv-cache", "fp8", "--experts", "fp8"],
        ["--dtype", "float16", "--kv-cache", "fp8"],
        ["--dtype", "float32", "--temperature", "0"],
        ["--context", "40"],
        ["--kv-cache", "int8"],
        ["--kv-cache", "int4", "--context", "70"],
    ],
)
def test_every_way_to_store_and_to_draw(options):
    result = invoke("--prompt", "import ", "--max-new-tokens", "12", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("import ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "--preset: expected one of tiny, moondream3, got 'huge'"),
        (["--prompt", ""], "--prompt: expected at least one character"),
        (["--prompt", "x" * 2000], "--prompt: expected at most 1024 tokens with those to come"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--max-new-tokens", "2000"], "--prompt: expected at most 1024 tokens with those to come"),
        (["--context", "20"], "--context: expected a cache of at least"),
        (["--context", "0"], "--context: expected at least 1, got 0"),
        (["--context", "4096"], "--context: expected at most 1024 (the model's), got 4096"),
        (["--temperature", "nan"], "--temperature: expected a number from 0 on, got nan"),
        (["--temperature", "-1"], "--temperature: expected a number from 0 on, got -1.0"),
        (["--top-p", "0"], "--top-p: expected a number above 0 and at most 1, got 0.0"),
        (["--top-p", "1.5"], "--top-p: expected a number above 0 and at most 1, got 1.5"),
        (["--seed", "-1"], "--seed: expected 0 to 2**63 - 1, got -1"),
        (["--dtype", "float64"], "--dtype: expected one of bfloat16, float32, float16, got 'float64'"),
        (["--kv-cache", "int2"], "--kv-cache: expected one of auto, fp8, int8, int4, got 'int2'"),
        (["--experts", "int4"], "--experts: expected one of bf16, fp8, got 'int4'"),
        (["--model", "missing.pt"], "got missing.pt, which is no file"),
        (["--preset", "moondream3", "--model", "x.pt"], "--model: expected no file with --preset moondream3"),
        (["--device", "tpu9"], "--device: expected cpu, cuda or cuda:N, got 'tpu9'"),
        (["--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "--device: expected one of"),
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


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_bytes_that_are_not_text_pass_through(encoding):
    done = subprocess.run(
        [*COMMAND, "--prompt", b"x = '\xff\xc3\xa9", "--max-new-tokens", "5"],
        env={**ENVIRONMENT, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode(encoding).startswith({"ascii": "x = '??", "utf-8": "x = '\ufffdé"}[encoding])


def test_kernels_can_be_demanded():
    done = subprocess.run(COMMAND, env={**ENVIRONMENT, "KESTREL_BACKEND": "kernel"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "" or "Traceback" not in done.stderr
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


def test_a_reader_that_leaves_ends_it_quietly():
    process = subprocess.Popen(
        [*COMMAND, "--max-new-tokens", "200"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    remarks = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in remarks
    assert "Exception" not in remarks


def test_importing_the_command_imports_neither_torch_nor_a_family():
    program = (
        "import sys, kestrel_kernels.demo.cli;"
        "print([name for name in sys.modules if name == 'torch' or name.startswith('kestrel_') and "
        "not name.startswith('kestrel_kernels')])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert time.monotonic() - started < 30
