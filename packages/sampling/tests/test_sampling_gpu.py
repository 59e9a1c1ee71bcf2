"""On a GPU every sampling op draws what it draws on a CPU, bit for bit, in a captured graph too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kestrel_runtime.testing import graph_replay
from kestrel_sampling import (
    min_p_sampling_from_probs,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)

pytestmark = pytest.mark.gpu

OPS = {
    "none": lambda probs, seed, offset: sampling_from_probs(probs, seed=seed, offset=offset),
    "top_p": lambda probs, seed, offset: top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset),
    "top_k": lambda probs, seed, offset: top_k_sampling_from_probs(probs, 50, seed=seed, offset=offset),
    "both": lambda probs, seed, offset: top_k_top_p_sampling_from_probs(probs, 50, 0.9, seed=seed, offset=offset),
    "min_p": lambda probs, seed, offset: min_p_sampling_from_probs(probs, 0.05, seed=seed, offset=offset),
}


def inputs(rows: int, width: int, first: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(first)
    probs = torch.softmax(3 * torch.randn(rows, width, generator=g), -1)
    return [probs, torch.arange(rows) + first, torch.arange(rows) * 5]


@pytest.mark.parametrize("width", [1, 111, 1024, 51200, 151936])
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("op", OPS)
def test_draws_the_ids_of_the_cpu(op: str, rows: int, width: int) -> None:
    args = inputs(rows, width, 7)
    assert torch.equal(OPS[op](*(a.cuda() for a in args)).cpu(), OPS[op](*args))


@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_sees_new_probabilities_and_keys(op: str) -> None:
    first, second = inputs(4, 1024, 7), inputs(4, 1024, 70)
    got = graph_replay(OPS[op], [a.cuda() for a in first], [a.cuda() for a in second])
    assert torch.equal(got.cpu(), OPS[op](*second))


def test_a_capture_needs_tensors_for_its_key() -> None:
    probs: Any = inputs(2, 100, 1)[0].cuda()
    with pytest.raises(ValueError, match="seed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        top_p_sampling_from_probs(probs, 0.9, seed=1, offset=0)
    torch.cuda.synchronize()


def test_the_default_generator_is_that_of_the_device() -> None:
    probs = torch.ones(64, 1000).cuda()
    torch.cuda.manual_seed(5)
    first, second = (top_p_sampling_from_probs(probs, 1.0) for _ in range(2))
    torch.cuda.manual_seed(5)
    assert torch.equal(top_p_sampling_from_probs(probs, 1.0), first)
    assert not torch.equal(first, second)
