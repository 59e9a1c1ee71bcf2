"""`kestrel-kernels bench`, and the definitions of every family that it finds in wheels and in the source tree."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from kestrel_kernels.cli import app
from kestrel_runtime.bench import discover, limit_of, limit_us, load
from kestrel_runtime.bench.agreement import disagreements

SOURCES = {source.name: source for source in discover()}


def test_definitions_of_several_families_are_found() -> None:
    assert {"norm:rms_norm", "norm:layer_norm", "sampling:topk_fwd"} <= set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_a_definition_holds_what_the_harness_asks_for(name: str) -> None:
    benchmark = load(SOURCES[name])
    assert benchmark.targets
    assert next(iter(benchmark.candidates())) == "kestrel"
    assert benchmark.traffic is not None, "traffic(shape) is missing"
    assert benchmark.operations is not None, "operations(shape) is missing"
    for shape, target in benchmark.targets.items():
        assert benchmark.set_bytes(shape) > 0
        assert benchmark.traffic(shape) > 0
        assert benchmark.operations(shape) >= 0
        limit = limit_us(
            limit_of("NVIDIA H200"),
            benchmark.traffic(shape),
            benchmark.operations(shape),
            benchmark.launches,
            benchmark.precision,
        )
        # A target is 8 to 15 % above the limit or slower, but for rows whose best peer beats the limit.
        assert limit is not None
        assert target is None or 0.9 * limit < target, f"{shape}: target {target}, limit {limit:.2f} us"


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_what_a_definition_times_beside_ours_computes_the_same(name: str) -> None:
    benchmark = load(SOURCES[name])
    if benchmark.result is None:
        pytest.skip("it does not say what a call gives")
    candidates = {name: call for name, call in benchmark.candidates().items() if name != "torch.compile"}
    shape = min(benchmark.targets, key=benchmark.set_bytes)
    [arguments, *_] = benchmark.make(shape, 1)
    assert benchmark.result(arguments, candidates["kestrel"](*arguments))
    assert disagreements(benchmark, candidates, arguments) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize("arguments", [[], ["norm"], ["norm:rms_norm", "--peers", "--shape", "1x2048"]])
def test_without_a_gpu_bench_says_so(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert "error: bench needs a CUDA GPU" in done.output


def test_bench_tells_what_it_can_be_told() -> None:
    done = CliRunner().invoke(
        app,
        ["bench", "--help"],
    )
    assert done.exit_code == 0
    for option in ("--peers", "--only", "--against", "--out", "--shape", "--replays"):
        assert option in done.output
