"""More rows than multiprocessors, of any distribution, draw the ids of the reference bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sampling_gpu_cases import FLOATS, assert_draws_as_the_reference, distributions, keys, normal

from kestrel_runtime.reference import philox4x32
from kestrel_runtime.testing import by_reference
from kestrel_sampling import _launch, min_p_sampling_from_probs, sample_from_logits, top_p_sampling_from_probs
from kestrel_sampling._parameters import Keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

ROWS = 140  # more than one per multiprocessor


def masked(width: int) -> torch.Tensor:
    logits = normal(ROWS, width, 3, 1.0)
    return torch.softmax(torch.where(logits > 1, logits, -math.inf), -1)


def with_nan(width: int) -> torch.Tensor:
    probs = distributions(ROWS, width, 4, 1.0)
    probs[::10, width // 3] = math.nan
    return probs


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda width: distributions(ROWS, width, 1, 1.0),
    "flat": lambda width: distributions(ROWS, width, 2, 0.1),
    "3 randn": lambda width: distributions(ROWS, width, 3, 3.0),
    "peaked": lambda width: distributions(ROWS, width, 4, 12.0),
    "all equal": lambda width: torch.full((ROWS, width), 1 / width, device="cuda"),
    "two values": lambda width: torch.where(normal(ROWS, width, 5) > 0, 2 / width, 1 / width),
    "one-hot": lambda width: torch.nn.functional.one_hot(torch.arange(ROWS, device="cuda") * 17 % width, width).float(),
    "ties": lambda width: torch.softmax((2 * normal(ROWS, width, 6, 1.0)).round() / 2, -1),
    "eighths": lambda width: torch.softmax((8 * normal(ROWS, width, 15, 1.0)).round() / 8, -1),
    "masked": masked,
    "NaN rows": with_nan,
    "nearly equal": lambda width: distributions(ROWS, width, 10, 0.001),
    "a thousandth left": lambda width: torch.softmax(
        torch.where((z := normal(ROWS, width, 11, 1.0)) > 3, z, -math.inf), -1
    ),
    "three values": lambda width: (normal(ROWS, width, 12, 1.0).round().abs().clamp(max=2) + 1) / (2.0 * width),
    "bf16": lambda width: distributions(ROWS, width, 13, 1.0).bfloat16().float(),
    "times 20": lambda width: 20 * distributions(ROWS, width, 14, 1.0),
    "some ones": lambda width: (torch.arange(width, device="cuda") % (width // 2000) == 1).float().repeat(ROWS, 1),
    "denormal": lambda width: distributions(ROWS, width, 7, 1.0) * 1e-37,
    "above 1": lambda width: distributions(ROWS, width, 8, 1.0) * 1e6,
    "negative entries": lambda width: normal(ROWS, width, 9),
}


@pytest.mark.parametrize("width", [4097, 20000, 51200, 128256, 202048])
@pytest.mark.parametrize("kind", KINDS)
def test_top_p_of_any_distribution(kind: str, width: int) -> None:
    mixed = torch.tensor([0.9, 0.0, 0.02, 0.3, 0.6, 0.99, 1.0], device="cuda").repeat(ROWS // 7)
    assert_draws_as_the_reference(partial(top_p_sampling_from_probs, top_p=mixed), KINDS[kind](width))


@pytest.mark.parametrize("width", [4097, 5003, 8192, 128256, 128257])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sharpness", [0.1, 3.0])
def test_top_p_of_every_dtype_and_alignment(sharpness: float, dtype: torch.dtype, width: int) -> None:
    probs = (distributions(ROWS, width, 1, sharpness) * 20).to(dtype)
    assert_draws_as_the_reference(partial(top_p_sampling_from_probs, top_p=0.9), probs)
    view = torch.cat((probs[:, :3], probs, probs[:, :2]), 1)[:, 3:-2]
    assert_draws_as_the_reference(partial(top_p_sampling_from_probs, top_p=0.8), view)


def offsets_of_the_threshold(probs: torch.Tensor, top_p: float, seed: int) -> torch.Tensor:
    """Offsets whose first proposal is one of the elements around the threshold, another one in every row."""
    zero = torch.zeros(1 << 22, dtype=torch.int64, device="cuda")
    counters = torch.stack((torch.arange(1 << 22, device="cuda"), zero, zero, zero), -1)
    word = philox4x32(torch.stack((zero + seed, zero), -1), counters)[:, 0] / 2**32
    offsets = []
    for number, row in enumerate(probs.double()):
        up_to = row.cumsum(0)
        values, order = row.sort(descending=True, stable=True)
        last_kept = int((values.cumsum(0) - values < top_p * up_to[-1]).sum()) - 1
        index = int(order[last_kept + number % 7 - 3])
        low, high = float((up_to[index] - row[index]) / up_to[-1]), float(up_to[index] / up_to[-1])
        hits = torch.nonzero((word > low) & (word < high))
        offsets.append(int(hits[0]) if len(hits) else number)
    return torch.tensor(offsets, device="cuda")


@pytest.mark.parametrize("kind", ["normal", "flat", "nearly equal", "ties"])
@pytest.mark.parametrize("width", [51200, 128256])  # of rows that L2 holds, and of those that it does not
def test_proposals_at_the_threshold_are_decided_exactly(width: int, kind: str) -> None:
    probs = KINDS[kind](width)
    offset = offsets_of_the_threshold(probs, 0.9, seed=3)
    key = {"seed": torch.full_like(offset, 3), "offset": offset}
    assert_draws_as_the_reference(partial(top_p_sampling_from_probs, top_p=0.9), probs, key)
    assert_draws_as_the_reference(partial(sample_from_logits, top_p=0.9), torch.log(probs), key)


@pytest.mark.parametrize("width", [5003, 51200, 202048])
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 384), (2, 256), (4, 96), (8, 224), (8, 384)])
def test_no_split_changes_an_id(blocks: int, threads: int, width: int) -> None:
    probs, (seed, offset) = distributions(ROWS, width, 5, 1.0), keys(ROWS).values()
    got, valid = _launch.draw("op", probs, Keys(seed, 0, offset, 0), top_p=(None, 0.7), blocks=blocks, threads=threads)
    assert bool(valid.all())
    assert torch.equal(got, top_p_sampling_from_probs(probs, 0.7, seed=seed, offset=offset))
    assert torch.equal(got, by_reference(top_p_sampling_from_probs, probs, 0.7, seed=seed, offset=offset))


OPTIONS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.4, "min_p": 0.05, "temperature": 0.7},
    {"top_p": 0.9, "temperature": 0.0},
]


@pytest.mark.parametrize("width", [5003, 128256])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_of_many_rows(options: dict[str, Any], dtype: torch.dtype, width: int) -> None:
    logits = normal(ROWS, width, 3).to(dtype)
    logits[1, : width // 2] = -math.inf
    logits[2] = -math.inf
    logits[3, 5] = math.nan
    assert_draws_as_the_reference(partial(sample_from_logits, **options), logits)


@pytest.mark.parametrize("width", [20000, 128256, 202048])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "negative entries"])
def test_top_p_of_logits_of_any_distribution(kind: str, width: int) -> None:
    mixed = torch.tensor([0.9, 0.0, 0.02, 0.3, 0.6, 0.99, 1.0], device="cuda").repeat(ROWS // 7)
    logits = torch.log(KINDS[kind](width))
    assert_draws_as_the_reference(partial(sample_from_logits, top_p=mixed), logits)
    assert_draws_as_the_reference(partial(sample_from_logits, top_p=0.9, temperature=0.6), logits)


def test_min_p_and_rows_with_top_k_among_many() -> None:
    probs, key = distributions(ROWS, 20000, 6, 3.0), keys(ROWS)
    assert_draws_as_the_reference(partial(min_p_sampling_from_probs, min_p=0.05), probs)
    logits, count = normal(ROWS, 20000, 6), torch.tensor([0, 50, 20000, 2000], device="cuda").repeat(ROWS // 4)
    options: dict[str, Any] = {"top_k": count, "top_p": 0.8, **key}
    assert torch.equal(sample_from_logits(logits, **options), by_reference(sample_from_logits, logits, **options))


@pytest.mark.parametrize("kind", ["flat", "two values", "all equal", "a thousandth left"])
def test_runs_repeat_and_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    probs, key = KINDS[kind](128256), keys(ROWS)
    ids = top_p_sampling_from_probs(probs, 0.9, **key)
    for _ in range(20):
        assert torch.equal(top_p_sampling_from_probs(probs, 0.9, **key), ids)
    few = {name: value[:3] for name, value in key.items()}
    assert torch.equal(top_p_sampling_from_probs(probs[:3], 0.9, **few), ids[:3])
