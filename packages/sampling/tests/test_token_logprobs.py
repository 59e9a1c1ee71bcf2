"""token_logprobs against a float64 log-softmax, and against what sample_from_logits draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_oracle import DTYPES, FILTERS, assert_follows, kept_by_hand

from kestrel_runtime.testing import assert_same_bits
from kestrel_sampling import sample_from_logits, sample_with_logprobs, softmax, token_logprobs, topk_fwd

INF, NAN = math.inf, math.nan


def logits_of(rows: int, width: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


def sampler_options(options: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name != "joint"}
    return {**given, "filter_apply_order": "joint" if options.get("joint") else "top_k_first"}


def assert_within_an_ulp(got: torch.Tensor, exact: torch.Tensor) -> None:
    """One rounding to float32 of a float64 result, whose error is far below an ulp."""
    finite = exact.isfinite()
    assert torch.equal(got[~finite].double(), exact[~finite])
    bound = 0.501 * torch.exp2(torch.floor(torch.log2(exact[finite].abs())) - 23) + 1e-15
    assert ((got[finite].double() - exact[finite]).abs() <= bound).all()


@pytest.mark.parametrize(("rows", "width"), [(3, 1), (4, 111), (2, 51200)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_filters_they_are_those_of_the_softmax(
    rows: int, width: int, dtype: torch.dtype, temperature: float
) -> None:
    logits = logits_of(rows, width).to(dtype)
    logits[:, width // 3] = -INF if width > 1 else 0.0
    n = min(width, 20)
    ids = torch.arange(rows) * 7 % width
    found = token_logprobs(logits, ids, n, temperature)
    exact = torch.log_softmax(logits.double() / torch.tensor(temperature).double(), -1)
    assert [x.dtype for x in found] == [torch.float32, torch.int32, torch.int32, torch.float32]
    assert_within_an_ulp(found.logprobs, exact.gather(1, ids[:, None])[:, 0])
    assert_same_bits(found.top_ids, topk_fwd(logits, n)[1])
    assert_within_an_ulp(found.top_logprobs, exact.gather(1, found.top_ids.long()))


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_with_filters_they_are_those_of_what_the_filters_keep(options: dict[str, Any], temperature: float) -> None:
    logits = logits_of(5, 24, 1.5)
    weights = torch.exp((logits.double() - logits.double().amax(1, keepdim=True)) / temperature)
    found = token_logprobs(logits, torch.zeros(5).int(), 24, temperature, **sampler_options(options))
    for b in range(5):
        kept = kept_by_hand(weights[b].float().tolist(), **options)
        exact = torch.full((24,), -INF, dtype=torch.float64)
        exact[kept] = (weights[b, kept] / weights[b, kept].sum()).log()
        assert_within_an_ulp(found.top_logprobs[b], exact[found.top_ids[b].long()])
        assert found.logprobs[b] == found.top_logprobs[b][found.top_ids[b] == 0]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_log_probabilities_of_the_same_parameters(options: dict[str, Any]) -> None:
    logits, draws, given = logits_of(1, 24, 1.2), 20_000, sampler_options(options)
    found = token_logprobs(logits, torch.tensor([0]), 24, 0.8, **given)
    row = torch.empty(24, dtype=torch.float64)
    row[found.top_ids[0].long()] = found.top_logprobs[0].double().exp()
    ids = sample_from_logits(logits.expand(draws, -1), 0.8, **given, seed=5, offset=torch.arange(draws))
    assert_follows(torch.bincount(ids, minlength=24).double(), row, row.nonzero().flatten().tolist())


def test_the_rank_is_the_place_in_the_order_of_the_top_ids() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, -INF, 1.0]]).expand(5, -1)
    found = token_logprobs(logits, torch.arange(5), 5)
    assert found.ranks.tolist() == [3, 1, 2, 5, 4]
    assert found.top_ids.tolist() == [[1, 2, 0, 4, 3]] * 5
    assert found.logprobs.tolist() == found.top_logprobs[0][(found.ranks - 1).long()].tolist()
    assert token_logprobs(logits, torch.arange(5), top_k=1, temperature=3.0).ranks.tolist() == [3, 1, 2, 5, 4]


def test_greedy_rows_beside_sampled_ones() -> None:
    rows = 64
    logits = logits_of(rows, 200)
    temperature = torch.where(torch.arange(rows) % 2 == 0, 0.0, 0.9)
    given: dict[str, Any] = {"top_k": 20, "top_p": torch.full((rows,), 0.8), "min_p": 0.01}
    drawn = sample_from_logits(logits, temperature, **given, seed=torch.arange(rows))
    found = token_logprobs(logits, drawn, 3, temperature, **given)
    assert torch.equal(drawn[::2].long(), logits[::2].argmax(1))
    assert not torch.equal(drawn[1::2].long(), logits[1::2].argmax(1))
    sampled = sample_from_logits(logits[1::2], 0.9, 20, 0.8, 0.01, seed=torch.arange(1, rows, 2))
    assert torch.equal(drawn[1::2], sampled)
    assert found.top_logprobs[::2].tolist() == [[0.0, -INF, -INF]] * (rows // 2)
    assert found.logprobs[::2].tolist() == [0.0] * (rows // 2)
    alone = token_logprobs(logits[1::2], drawn[1::2].contiguous(), 3, 0.9, 20, 0.8, 0.01)
    for got, want in zip(found, alone, strict=True):
        assert_same_bits(got[1::2], want)
    assert bool((found.logprobs[1::2] > -INF).all())


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 3e38, INF])
def test_log_probabilities_at_any_temperature_are_those_of_softmax(temperature: float) -> None:
    logits = torch.tensor([[-INF, 2.0, -1e9, 1.5], [3e4, -3e4, -INF, 1.0], [-INF, 0.0, -INF, -INF]])
    temperatures = torch.tensor([temperature])
    found = token_logprobs(logits, torch.zeros(3).int(), 4, temperatures)
    want = softmax(logits, temperatures).gather(1, found.top_ids.long())
    # exp of a log-probability above -87, which float32 rounds by 2^-19
    assert ((found.top_logprobs.exp() - want).abs() <= 1e-5 * want + 1e-37).all()


def test_rows_without_a_distribution_are_nan_and_leave_the_others_alone() -> None:
    logits = torch.tensor([[NAN, 1.0], [0.0, 0.0], [INF, 1.0], [-INF, -INF], [-INF, 2.0]])
    for options in ({}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        found = token_logprobs(logits, torch.ones(5).long(), 2, **options)
        bad = [0, 2, 3]
        assert found.logprobs[bad].isnan().all()
        assert found.top_logprobs[bad].isnan().all()
        assert found.ranks.tolist() == [0, 2, 0, 0, 1]
        assert found.top_ids.tolist() == [[1, 0], [0, 1], [0, 1], [0, 1], [1, 0]]
        assert found.logprobs[4] == 0.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_outside_the_vocabulary_is_impossible(dtype: torch.dtype) -> None:
    found = token_logprobs(torch.zeros(4, 2), torch.tensor([-1, 2, 2**31 - 1, 1], dtype=dtype))
    assert found.logprobs[:3].tolist() == [-INF] * 3
    assert found.ranks.tolist() == [0, 0, 0, 2]


def test_no_rows_and_no_top() -> None:
    found = token_logprobs(torch.empty(0, 10), torch.empty(0).long(), 3, top_p=0.5)
    assert [tuple(x.shape) for x in found] == [(0,), (0,), (0, 3), (0, 3)]
    assert token_logprobs(torch.zeros(2, 10), torch.zeros(2).int()).top_ids.shape == (2, 0)


def test_views_give_the_same_and_are_not_written() -> None:
    buffer = logits_of(12, 200)
    before, ids = buffer.clone(), torch.arange(8)[::2]
    view = buffer[1::3, 20:150]
    for got, want in zip(
        token_logprobs(view, ids.clone(), 5, 0.8, 40, 0.9), token_logprobs(view.clone(), ids.clone(), 5, 0.8, 40, 0.9),
        strict=True,
    ):  # fmt: skip
        assert_same_bits(got, want)
    assert torch.equal(buffer, before)


# ---- sample_with_logprobs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("processed", [False, True])
def test_a_draw_with_log_probabilities_is_the_draw_and_its_log_probabilities(
    options: dict[str, Any], processed: bool
) -> None:
    logits, given = logits_of(40, 90), {"temperature": 0.7, **sampler_options(options)}
    logits[3], logits[4, 5] = -INF, NAN
    key = {"seed": torch.arange(40), "offset": 7}
    drawn = sample_with_logprobs(logits, top_n=4, processed=processed, **given, **key)
    ids, valid = sample_from_logits(logits, **given, **key, return_valid=True)
    assert_same_bits(tuple(drawn[:2]), (ids, valid))
    assert valid.tolist() == [row not in (3, 4) for row in range(40)]
    assert_same_bits(tuple(drawn[2:]), tuple(token_logprobs(logits, ids, 4, **(given if processed else {}))))
    assert bool((drawn.logprobs[valid] > -INF).all())


def test_a_row_whose_temperature_is_nan_is_not_valid() -> None:
    for processed in (False, True):
        drawn = sample_with_logprobs(
            torch.zeros(2, 5), torch.tensor([NAN, 1.0]), top_n=1, processed=processed, seed=torch.tensor([3])
        )
        assert drawn.valid.tolist() == [False, True]
        assert drawn.logprobs.isnan().tolist() == drawn.top_logprobs.isnan()[:, 0].tolist() == [True, False]
        assert drawn.ranks.tolist() == [0, drawn.ids[1] + 1]
