"""The command `kestrel-kernels`: what it refuses, how fast, and what it does with broken output streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kestrel_kernels import __version__, cli

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def python(program: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", program, *arguments]
    return subprocess.run(words, env=ENVIRONMENT, text=True, check=False, **options)


def test_python_m_is_the_command():
    words = [sys.executable, "-m", "kestrel_kernels", "--version"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == f"kestrel-kernels {__version__}\n"


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["generate", "-h"], ["info", "-h"], ["tune", "moe", "-h"]])
def test_help_is_printed(arguments: list[str]):
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0
    assert "Usage" in done.stdout


TUNE = ["tune", "moe", "--experts", "8", "--hidden", "64", "--inner", "32", "--topk", "2"]
REFUSED = {
    "no-such-command": ["no-such-command"],
    "no-such-option": ["generate", "--nope"],
    "nothing-to-tune": ["tune", "no-such-op"],
    "a-layer-without-sizes": ["tune", "moe", "--experts", "8"],
    "no-such-dtype-to-tune": [*TUNE, "--dtype", "int3"],
    "no-token-counts": [*TUNE, "--tokens", "1,x"],
    "token-counts-of-many-digits": [*TUNE, "--tokens", "9" * 5000],
    "no-such-preset": ["generate", "--preset", "huge"],
    "no-such-model": ["generate", "--model", "missing.pt"],
    "no-such-dtype": ["generate", "--dtype", "float64"],
    "prompt-too-long": ["generate", "--prompt", "x" * 2000],
}


def test_what_needs_no_model_is_answered_without_importing_torch():
    """One process for all cases: each leaves torch and the families unimported."""
    program = """
import contextlib, io, json, sys
from kestrel_kernels.cli import app
answers = {}
for name, arguments in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            app(arguments)
        except SystemExit as error:
            heavy = [m for m in sys.modules if m == "torch" or m.startswith("kestrel_") and "kernels" not in m]
            answers[name] = [error.code, heavy, "Traceback" in said.getvalue() or not said.getvalue()]
print(json.dumps(answers))
"""
    done = python(program, json.dumps(REFUSED), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [2, [], False] for name in REFUSED}


@pytest.mark.parametrize(
    ("options", "said"), [([], "needs a CUDA GPU"), (["--inner", "40"], "inner: expected a multiple of 16, got 40")]
)
def test_a_layer_that_cannot_be_tuned_is_one_line(options: list[str], said: str):
    done = python("from kestrel_kernels.cli import app; app()", *TUNE, *options, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: tune moe: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_backend_is_refused_with_one_line(monkeypatch):
    monkeypatch.setenv("KESTREL_BACKEND", "nope")
    done = CliRunner().invoke(cli.app, ["info"])
    assert done.exit_code == 2
    expected = "error: environment variable KESTREL_BACKEND: expected one of auto, kernel, reference, got 'nope'\n"
    assert done.stderr == expected


def test_the_backends_are_those_of_the_runtime():
    from kestrel_runtime.state import BACKENDS

    assert cli.BACKENDS == BACKENDS


RUN = "import sys; from kestrel_kernels.cli import main; sys.argv[0] = 'kestrel-kernels'; main()"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--device", "cpu", "--max-new-tokens", "1"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = python(RUN, *arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--device", "cpu", "--max-new-tokens", "40"]])
def test_a_reader_that_leaves_ends_it_quietly(arguments):
    words = [sys.executable, "-c", RUN, *arguments]
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    remarks = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=120) == 1
    assert "Traceback" not in remarks
    assert "Exception" not in remarks


def closing(number: int):
    return lambda: os.close(number)


def test_a_closed_stdout_is_an_error():
    done = python(RUN, "--version", stderr=subprocess.PIPE, preexec_fn=closing(1))
    assert (done.returncode, done.stderr) == (1, "error: stdout is closed\n")


def test_with_stderr_closed_remarks_do_not_go_to_stdout():
    done = python(RUN, "generate", "--preset", "huge", stdout=subprocess.PIPE, preexec_fn=closing(2))
    assert (done.returncode, done.stdout) == (2, "")
