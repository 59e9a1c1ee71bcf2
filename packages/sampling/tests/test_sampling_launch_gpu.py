"""Sampling kernels in graphs, on streams and behind other launches; their statistics; random calls."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sampling_gpu_cases import (
    FLOATS,
    OPS,
    assert_same_probabilities,
    distributions,
    keys,
)

from kestrel_runtime.testing import RandomCase, compare_at_random, graph_replay
from kestrel_sampling import (
    _launch,
    min_p_sampling_from_probs,
    sample_from_logits,
    sampling_from_probs,
    softmax,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from kestrel_sampling._parameters import _GENERATOR_KEY, Keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


# ---- graphs, streams, the launch before ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1024, 51200])
@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_sees_new_probabilities_and_keys(op: str, width: int) -> None:
    first, second = ([distributions(4, width, n), *(v + n for v in keys(4).values())] for n in (7, 70))
    run = lambda probs, seed, offset: OPS[op](probs, seed=seed, offset=offset)  # noqa: E731
    got = graph_replay(run, first, [x.clone() for x in second])
    assert torch.equal(got, run(*second))


def test_a_replayed_graph_draws_new_numbers_when_the_offset_is_advanced() -> None:
    probs = torch.ones(64, 1000, device="cuda")
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    seed = torch.arange(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset)
    with torch.cuda.graph(graph):
        ids = top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset)
        offset += 1
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(ids.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=2))


@pytest.mark.parametrize("written", ["probs", "top_p", "top_k", "seed", "offset"])
def test_what_the_previous_launch_writes_is_read_after_the_wait(written: str) -> None:
    """In a graph of 1000 calls, the kernel before each call writes one of its inputs."""
    sources = [distributions(2, 8192, n, 1.0).cuda() for n in range(4)]
    probs, p, k = sources[0].clone(), torch.ones(2).cuda(), torch.zeros(2, dtype=torch.int64).cuda()
    seed, offset = keys(2).values()
    new = {
        "probs": (probs, sources),
        "top_p": (p, [torch.full((2,), n).cuda() for n in (0.2, 0.5, 0.8, 1.0)]),
        "top_k": (k, [torch.full((2,), n).cuda() for n in (1, 20, 500, 0)]),
        "seed": (seed, [torch.full((2,), n).cuda() for n in (1, 2, 3, 4)]),
        "offset": (offset, [torch.full((2,), n).cuda() for n in (1, 2, 3, 4)]),
    }

    def call() -> torch.Tensor:
        return top_k_top_p_sampling_from_probs(probs, k, p, seed=seed, offset=offset)

    target, values = new[written]
    want = []
    for value in values:
        target.copy_(value)
        want.append(call().clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = []
        for value in values:
            target.copy_(value)
            got.append(call())
    for replay in range(250):
        graph.replay()
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(one, other), f"replay {replay}, call {index}"


def test_a_second_stream() -> None:
    probs = distributions(8, 51200).cuda()
    key = keys(8)
    want = OPS["both"](probs, **key)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = OPS["both"](probs, **key)
    side.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("op", ["top_p", "both", "min_p"])
def test_compiles_into_one_graph(op: str) -> None:
    probs = distributions(4, 1000).cuda()
    key = keys(4)
    compiled = torch.compile(lambda probs, seed, offset: OPS[op](probs, seed=seed, offset=offset), fullgraph=True)
    assert torch.equal(compiled(probs, **key), OPS[op](probs, **key))


def test_a_capture_needs_tensors_for_its_key() -> None:
    probs: Any = distributions(2, 100).cuda()
    with pytest.raises(ValueError, match="seed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        top_p_sampling_from_probs(probs, 0.9, seed=1, offset=0)
    torch.cuda.synchronize()


def test_a_generator_gives_its_counter_as_offsets_and_moves_on_without_synchronising() -> None:
    probs, generator = torch.ones(63, 1000, device="cuda"), torch.Generator("cuda").manual_seed(2**63 + 5)
    counter = generator.get_offset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = sampling_from_probs(probs, generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert generator.get_offset() == counter + 64
    key = {"seed": generator.initial_seed() ^ _GENERATOR_KEY, "offset": counter + torch.arange(63, device="cuda")}
    assert torch.equal(ids, sampling_from_probs(probs, **key))
    assert not torch.equal(ids, sampling_from_probs(probs, generator=generator))


def test_successive_offsets_are_those_of_a_tensor() -> None:
    for width in (1000, 51200):
        probs, rows = distributions(5, width), torch.arange(5, device="cuda")
        for op in ("none", "top_p", "both", "many"):
            filters = {"none": {}, "top_p": {"top_p": (None, 0.9)}, "both": {"top_k": (None, 50), "top_p": (None, 0.9)}}
            filters["many"] = {"top_k": (None, 900), "top_p": (None, 0.8)}
            one, other = (
                _launch.draw("op", probs, key, **filters[op])[0]  # type: ignore[arg-type]
                for key in (Keys(None, 3, None, 2**40, 1), Keys(None, 3, 2**40 + rows, 0))
            )
            assert torch.equal(one, other), (width, op)


def test_the_default_generator_is_that_of_the_device() -> None:
    probs = torch.ones(64, 1000).cuda()
    torch.cuda.manual_seed(5)
    first, second = (top_p_sampling_from_probs(probs, 1.0) for _ in range(2))
    torch.cuda.manual_seed(5)
    assert torch.equal(top_p_sampling_from_probs(probs, 1.0), first)
    assert not torch.equal(first, second)


# ---- statistics ------------------------------------------------------------------------------------------------------

DRAWS = 200_000


def critical_chi_square(degrees: int) -> float:
    """The value that a chi-square variable exceeds once in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.753 * part**0.5) ** 3


@pytest.mark.parametrize("width", [111, 1024, 51200, 128256])
@pytest.mark.parametrize("op", ["none", "top_p", "top_p_0.1", "top_k", "both", "min_p"])
def test_frequencies_follow_the_filtered_distribution(op: str, width: int) -> None:
    row = distributions(1, width, sharpness=1.5 if op == "min_p" else 1.0).cpu()
    offsets = torch.arange(DRAWS, device="cuda")
    ids = OPS[op](row.cuda().expand(DRAWS, -1), seed=torch.tensor([42]).cuda(), offset=offsets)
    counts = torch.bincount(ids, minlength=width).cpu().double()
    p = row[0].double()
    order = p.argsort(descending=True, stable=True)
    kept = torch.zeros(width, dtype=torch.bool)
    if op == "min_p":
        kept = row[0] >= torch.tensor(0.05) * row.max()
    else:
        k = 50 if op in ("top_k", "both") else width
        share = {"top_p": 0.9, "top_p_0.1": 0.1, "both": 0.9}.get(op, 2.0)
        first = p[order[:k]]
        kept[order[:k][first.cumsum(0) - first < share * first.sum()]] = True
    assert counts[~kept].sum() == 0
    expected = torch.where(kept, p, 0.0) / p[kept].sum() * DRAWS
    cell = (expected.cumsum(0) / max(20.0, expected.max().item())).long()  # neighbours, until 20 draws are expected
    cells = torch.zeros(int(cell.max()) + 1, dtype=torch.float64)
    want, have = cells.index_add(0, cell, expected), cells.index_add(0, cell, counts)
    want, have = want[want > 5], have[want > 5]
    if len(want) > 1:
        assert ((have - want) ** 2 / want).sum() < critical_chi_square(len(want) - 1)


# ---- random calls ----------------------------------------------------------------------------------------------------

WIDTHS = (1, 2, 31, 128, 129, 1000, 4095, 4096, 4097, 5000, 20001, 51200, 128256)
VALUES: dict[str, Callable[[random.Random], float]] = {
    "top_k": lambda rng: rng.choice([-1, 0, 1, 2, 50, 127, 128, 129, 1000, 10**6]),
    "top_p": lambda rng: rng.choice([0.0, 1e-9, 0.02, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0, rng.random()]),
    "min_p": lambda rng: rng.choice([-1.0, 0.0, 1e-4, 0.05, 0.5, 1.0, rng.random()]),
    "temperature": lambda rng: rng.choice([0.0, 1e-30, 0.1, 0.7, 1.0, 3.0, 1e30]),
}
RANDOM_OPS: dict[Callable[..., Any], tuple[str, ...]] = {
    sampling_from_probs: (),
    top_p_sampling_from_probs: ("top_p",),
    top_k_sampling_from_probs: ("top_k",),
    top_k_top_p_sampling_from_probs: ("top_k", "top_p"),
    min_p_sampling_from_probs: ("min_p",),
    sample_from_logits: ("temperature", "top_k", "top_p", "min_p"),
    softmax: ("temperature",),
    top_p_renorm_probs: ("top_p",),
    top_k_renorm_probs: ("top_k",),
}


def assert_same_softmax(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """As assert_same_probabilities, but weights of denormal size lose precision."""
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-37, equal_nan=True, msg=lambda text: f"{what}: {text}")


def random_rows(rng: random.Random, logits: bool) -> torch.Tensor:
    """Rows of a random shape, distribution, dtype and layout."""
    width = rng.choice(WIDTHS)
    rows = rng.choice([0, 1, 2, 3, 7, 32] if width > 5000 else [0, 1, 3, 17, 80, 200])
    x = rng.choice([0.1, 1.0, 3.0, 12.0]) * torch.randn(rows, width, device="cuda")
    if not logits:
        x = rng.choice([lambda: torch.softmax(x, -1), lambda: x.abs(), lambda: x, lambda: x.round().abs()])()
        x = x * rng.choice([1.0, 1.0, 1.0, 1e-6, 1e-39, 300.0, 1e30])
    if rng.random() < 0.3:
        x = x.round(decimals=1)  # ties
    if rng.random() < 0.2 and rows:
        x[rng.randrange(rows), rng.randrange(width)] = rng.choice([math.nan, math.inf, -math.inf])
    if rng.random() < 0.2 and rows:
        x[rng.randrange(rows)] = rng.choice([0.0, -1.0, -math.inf])
    x = x.to(rng.choice(FLOATS))
    start, pad = rng.choice([(0, 0), (1, 0), (3, 5), (8, 8)])
    buffer = torch.zeros(rows, start + width + pad, dtype=x.dtype, device="cuda")
    view = buffer[:, start : start + width]
    view.copy_(x)
    return view


def random_call(rng: random.Random) -> RandomCase:
    op = rng.choice(list(RANDOM_OPS))
    rows = random_rows(rng, op in (sample_from_logits, softmax))
    count = rows.shape[0]
    kwargs: dict[str, Any] = {}
    for name in RANDOM_OPS[op]:
        draw = partial(VALUES[name], rng)
        dtype = rng.choice([torch.int32, torch.int64]) if name == "top_k" else torch.float32
        values = [draw() for _ in range(rng.choice([1, count]) if count else 1)]
        kwargs[name] = draw() if rng.random() < 0.5 else torch.tensor(values, dtype=dtype, device="cuda")
    if op is softmax:
        return RandomCase(op, (rows,), kwargs, compare=assert_same_softmax)
    if op in (top_p_renorm_probs, top_k_renorm_probs):
        return RandomCase(op, (rows,), kwargs, compare=assert_same_probabilities)
    if {"top_k", "top_p"} <= kwargs.keys():
        kwargs["filter_apply_order"] = rng.choice(["top_k_first", "joint"])
    kwargs |= {"seed": rng.getrandbits(64), "offset": rng.getrandbits(62), "return_valid": True}
    if rng.random() < 0.5:
        kwargs |= {"seed": torch.randint(2**62, (count,), device="cuda")}
    if rng.random() < 0.5:
        kwargs |= {"offset": torch.randint(2**62, (count,), device="cuda")}
    return RandomCase(op, (rows,), kwargs)


def test_random_calls_equal_the_reference() -> None:
    compare_at_random(random_call, seconds=20.0, least=200)
