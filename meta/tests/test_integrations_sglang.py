"""The plugin of SGLang: both backends beside SGLang's own classes on a CPU (nox -s engines)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="needs SGLang, as nox -s engines has it"
)


@pytest.fixture(scope="module")
def found():
    """What the rehearsal found, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("sglang_rehearsal.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "case", ["plain, page 1", "plain, page 16", "window, page 1", "window, page 16", "fp8, page 16"]
)
def test_attention_is_that_of_torch_native(found, case):
    """A prefill, a prefill behind a context, decoding, and decoding over the tensors of a CUDA graph."""
    errors = found["errors"][case]
    assert len(errors) == 4
    assert max(errors) < 1e-5


@pytest.mark.parametrize("case", ["keys of an encoder", "irope", "temperature by position", "another cap"])
def test_a_layer_that_no_kernel_computes_is_refused(found, case):
    assert found["refused"][case].startswith("kestrel attention: ")


def test_both_backends_can_be_chosen(found):
    assert found["chosen"] == [True, True]
    assert found["sampler"]["registered"]


def test_requests_with_seeds_draw_the_same_alone_and_together(found):
    drawn = found["sampler"]
    assert drawn["together"] == drawn["alone"]
    assert drawn["together"][1] == drawn["greedy"]  # top-k of 1
    assert drawn["of_top_5"] == []
    assert drawn["distinct"] > 1
    assert drawn["unseeded"] == 4
