"""`kestrel-kernels info` tells what runs here, and why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kestrel_kernels import info
from kestrel_kernels.info import GPU, BinaryInfo, _why_not

H200 = GPU(name="NVIDIA H200", capability="9.0", architecture="90a")
UNKNOWN = GPU(name="Some GPU", capability="7.5", architecture=None)


def binary(*archs: str, built: bool = True) -> BinaryInfo:
    return BinaryInfo(family="kestrel_norm", built=built, archs=list(archs), functions=[], size=0)


def command(*arguments: str) -> str:
    words = [sys.executable, "-m", "kestrel_kernels.cli", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kernel", "holder", "gpus", "reason"),
    [
        (None, binary("90a"), [H200], "no kernel yet"),
        ("cuda", binary(built=False), [H200], "runs from its sources"),
        ("cuda", binary("90a"), [], "no GPU"),
        ("cuda", binary("80"), [H200], "capability 9.0"),
        ("cuda", binary("80", "90a"), [UNKNOWN], "capability 7.5"),
        ("cuda", binary("80", "90a"), [H200], ""),
    ],
)
def test_an_op_says_why_it_runs_by_reference(
    kernel: str | None, holder: BinaryInfo, gpus: list[GPU], reason: str
) -> None:
    why = _why_not(kernel, holder, gpus, gpus[0]["architecture"] if gpus else None)
    assert (why == "") == (reason == "")
    assert reason in why


def test_info_as_data_names_every_distribution_binary_and_op() -> None:
    found = json.loads(command("info", "--json"))
    assert {"kestrel-kernels", "kestrel-runtime", "kestrel-norm", "torch"} <= set(found["versions"])
    assert [each["family"] for each in found["binaries"]] == [f"kestrel_{name}" for name in info.FAMILIES]
    ops = {each["op"]: each for each in found["ops"]}
    assert {"kestrel_norm.rms_norm", "kestrel_sampling.topk_fwd", "kestrel_moe.fused_experts"} <= set(ops)
    for op in ops.values():
        assert (op["runs"] == "kernel") == (op["why"] == "")
        assert found["gpus"] or op["runs"] == "reference"


def test_info_as_text_has_a_line_for_every_op() -> None:
    found = info.collect()
    text = command("info").splitlines()
    for op in found["ops"]:
        assert any(op["op"] in line.split() for line in text)


def test_info_loads_no_binary() -> None:
    program = "from kestrel_kernels.info import collect; collect(); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    libraries = {line.rpartition("/")[2] for line in done.stdout.splitlines() if line.endswith(".so")}
    assert not {name for name in libraries if name.startswith("kestrel_") or "cute_dsl" in name}


def test_an_unknown_command_is_refused_with_a_message() -> None:
    words = [sys.executable, "-m", "kestrel_kernels.cli", "no-such-command"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-command" in done.stderr
