"""`kestrel-kernels info` tells what runs here, and why."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import types

import pytest
import torch
from typer.testing import CliRunner

from kestrel_kernels import info
from kestrel_kernels.cli import app
from kestrel_kernels.info import GPU, BinaryInfo, _op, _ops_behind, _why_not
from kestrel_runtime import ops

H200 = GPU(name="NVIDIA H200", capability="9.0", architecture="90a")
UNKNOWN = GPU(name="Some GPU", capability="7.5", architecture=None)


def binary(*archs: str, built: bool = True) -> BinaryInfo:
    return BinaryInfo(family="kestrel_norm", built=built, archs=list(archs), functions=[], size=0)


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("kernel", "holder", "gpus", "reason"),
    [
        (None, binary("90a"), [H200], "no kernel yet"),
        ("cuda", binary(built=False), [H200], "runs from its sources"),
        ("cuda", binary("90a"), [], "no GPU"),
        ("cuda", binary(), [H200], "built without kernels"),
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
        assert found["gpus"] or op["runs"] != "kernel"


@pytest.mark.parametrize(("answer", "version"), [("580.95.05\n580.95.05\n", "580.95.05"), ("\n", None)])
def test_without_a_kernel_module_nvidia_smi_tells_the_driver(
    answer: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info.Path, "is_file", lambda path: False)
    monkeypatch.setattr(info.subprocess, "run", lambda query, **how: types.SimpleNamespace(stdout=answer))
    assert info._driver() == version


def test_every_gpu_is_listed_with_the_architecture_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(9, 0), (7, 5)]
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_capability", capabilities.__getitem__),
        ("get_device_name", "NVIDIA {}".format),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    assert info._gpus() == [
        GPU(name="NVIDIA 0", capability="9.0", architecture="90a"),
        GPU(name="NVIDIA 1", capability="7.5", architecture=None),
    ]


def test_a_wheel_without_kernels_says_so() -> None:
    found = info.Info(versions={}, driver=None, gpus=[], binaries=[binary()], ops=[])
    [line] = [line for line in info.lines(found) if "kestrel_norm" in line]
    assert "built without kernels (KESTREL_ARCHS=none)" in line


def test_info_lists_every_public_function_and_nothing_else() -> None:
    listed = [op["op"] for op in info.collect()["ops"]]
    public = []
    for name in info.FAMILIES:
        module = importlib.import_module(f"kestrel_{name}")
        public += [f"{module.__name__}.{n}" for n in module.__all__ if inspect.isfunction(getattr(module, n))]
    assert listed == public
    assert {"kestrel_rope.build_cos_sin_cache", "kestrel_quant.pack_w4", "kestrel_quant.fp8_quant"} <= set(listed)


def test_only_functions_without_an_op_need_no_kernel() -> None:
    plain = {op["op"] for op in info.collect()["ops"] if op["runs"] == "plain"}
    names = {"pack_w4", "w4_from_awq", "w4_from_compressed_tensors", "w4_from_gptq", "w4a16_token_covers"}
    assert plain == {"kestrel_rope.build_cos_sin_cache", *(f"kestrel_quant.{name}" for name in names)}


def test_every_registered_op_stands_behind_one_public_function() -> None:
    for name in info.FAMILIES:
        family = f"kestrel_{name}"
        behind = _ops_behind(info.public_functions(family), ops(family))
        assert sorted(op.name for found in behind.values() for op in found) == [op.name for op in ops(family)]


def test_of_several_ops_those_without_a_kernel_are_named() -> None:
    any_op = ops("kestrel_norm")[0]
    with_kernel = dataclasses.replace(any_op, name="f", kernel="cuda")
    pair = [with_kernel, dataclasses.replace(any_op, name="f_append", kernel=None)]
    assert _ops_behind(["f", "g"], pair) == {"f": pair, "g": []}
    assert _ops_behind(["f", "f_append"], pair) == {"f": pair[:1], "f_append": pair[1:]}
    both = _op("f", pair, binary("90a"), [H200])
    assert (both["runs"], both["kernel"], both["without"]) == ("kernel", "cuda", ["f_append"])
    assert _op("f", pair, binary("90a"), [])["why"] == "no GPU"
    assert _op("f", pair[1:], binary("90a"), [H200])["why"] == "no kernel yet"
    alone = _op("f", [with_kernel], binary("90a"), [H200])
    assert (alone["runs"], alone["kernel"], alone["archs"]) == ("kernel", "cuda", ["90a"])


def test_info_as_text_has_a_line_for_every_op() -> None:
    found = info.collect()
    text = command("info").splitlines()
    for op in found["ops"]:
        assert any(op["op"] in line.split() for line in text)
