"""Temperature, softmax and renormalised probabilities against float64."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import (
    DTYPES,
    FILTERS,
    distributions,
    kept_by_hand,
    sample_probs,
)

from kestrel_sampling import (
    sample_from_logits,
    softmax,
    top_k_renorm_probs,
    top_p_renorm_probs,
)

# ---- temperature -----------------------------------------------------------------------------------------------------


def test_no_temperature_takes_the_first_of_the_largest_logits() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [-math.inf, -3.0, -math.inf], [1e38, 3e38, -3e38], [0.0, -0.0, 0.0]])
    ids, valid = sample_from_logits(logits, 0.0, top_k=2, top_p=0.99, seed=torch.arange(4), return_valid=True)
    assert ids.tolist() == [1, 1, 1, 0]
    assert valid.all()
    assert softmax(logits, 0.0).argmax(1).tolist() == [1, 1, 1, 0]
    assert softmax(logits, 0.0).sum(1).tolist() == [1.0] * 4


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1e30])
def test_extreme_temperatures_neither_overflow_nor_vanish(temperature: float) -> None:
    logits = torch.tensor([[1000.0, 999.0, -1000.0]])
    got = softmax(logits, temperature)
    exact = torch.softmax(logits.double() / temperature - logits.double().max() / temperature, -1)
    torch.testing.assert_close(
        got.double(), exact, rtol=2.0**-23, atol=1e-37
    )  # one rounding: all differences are exact
    assert sample_from_logits(logits, temperature, seed=1, return_valid=True)[1].item()


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-12])
def test_a_tiny_temperature_leaves_the_largest_logits_and_keeps_ties_equal(temperature: float) -> None:
    inf, most = math.inf, torch.finfo(torch.float32).max
    logits = torch.tensor([[-inf, 2.0, -1e9, 2.0], [-most, -inf, most, -1.0], [3.0, -most, -inf, 2.999], [0.0] * 4])
    want = [[0.0, 0.5, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25] * 4]
    assert softmax(logits, temperature).tolist() == want
    for top_p, likely in ((0.5, [{1}, {2}, {0}, {0, 1}]), (1.0, [{1, 3}, {2}, {0}, {0, 1, 2, 3}])):
        for row in range(4):
            many = logits[row].expand(64, 4)
            ids, valid = sample_from_logits(many, temperature, top_p=top_p, seed=torch.arange(64), return_valid=True)
            assert valid.all()
            assert set(ids.tolist()) == likely[row]


@pytest.mark.parametrize("temperature", [1e30, 1e37, 3e38])
def test_a_huge_temperature_gives_no_mass_to_minus_infinity(temperature: float) -> None:
    logits = torch.tensor([[-math.inf, 1.0, -5.0]])
    assert softmax(logits, temperature).tolist() == [[0.0, 0.5, 0.5]]
    ids = sample_from_logits(logits.expand(256, 3), temperature, seed=torch.arange(256))
    assert set(ids.tolist()) == {1, 2}


def test_rows_without_a_distribution_give_0_and_false() -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0], [inf, 1.0], [-inf, -inf], [-inf, 2.0], [0.0, nan]])
    for temperature in (0.0, 1.0):
        ids, valid = sample_from_logits(logits, temperature, seed=3, return_valid=True)
        assert ids.tolist() == [0, 0, 0, 1, 0]
        assert valid.tolist() == [False, False, False, True, False]
        rows = softmax(logits, temperature)
        assert rows.isnan().all(1).tolist() == [True, True, True, False, True]
        assert rows[3].tolist() == [0.0, 1.0]
    probs = torch.tensor([[nan, 1.0], [inf, 1.0], [0.0, 0.0], [0.0, 2.0], [-1.0, -2.0]])
    for options in FILTERS[:9]:
        if {"min_p", "top_k"} <= set(options):
            continue
        assert sample_probs(options, probs, torch.arange(5)).tolist() == [0, 0, 0, 1, 0]
    for renormalised in (top_p_renorm_probs(probs, 0.9), top_k_renorm_probs(probs, 1)):
        assert renormalised.isnan().all(1).tolist() == [True, True, False, False, False]
        assert renormalised[2:].tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]


# ---- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 111), (16, 1024), (2, 128256)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_softmax_is_that_of_float64(shape: tuple[int, int], dtype: torch.dtype, temperature: float) -> None:
    logits = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    got = softmax(logits, temperature)
    assert got.dtype == torch.float32
    # float32 arithmetic: the distance to the largest (up to 34) and the exponent of 2 (up to 70) are each rounded once
    torch.testing.assert_close(got.double(), torch.softmax(logits.double() / temperature, -1), rtol=8e-6, atol=0)


@pytest.mark.parametrize(
    ("width", "value"),
    [
        *((width, value) for width in (1, 111, 1024) for value in (0.0, 0.1, 0.5, 0.9, 1.0)),
        *((51200, 0.5), (51200, 1.0), (128256, 0.9), (151936, 0.1), (151936, 1.0)),
    ],
)
def test_renormalised_probabilities_are_the_kept_shares(width: int, value: float) -> None:
    probs = 5 * distributions(4 if width <= 1024 else 1, width)
    for got, options in (
        (top_p_renorm_probs(probs, value), {"top_p": value}),
        (top_k_renorm_probs(probs, 7), {"top_k": 7}),
    ):
        for b, row in enumerate(probs.double().tolist()):
            kept = kept_by_hand(row, **options)
            total = math.fsum(row[i] for i in kept)
            expected = torch.zeros(width, dtype=torch.float64)
            expected[kept] = torch.tensor([row[i] / total for i in kept], dtype=torch.float64)
            assert got[b].nonzero().flatten().tolist() == kept
            torch.testing.assert_close(got[b].double(), expected, rtol=2.0**-24 * 1.001, atol=0)


@pytest.mark.parametrize("top_p", [1.0, 2.0, math.inf, torch.tensor([1.0]), torch.tensor([math.nan])], ids=str)
def test_top_p_off_keeps_entries_too_small_to_have_mass(top_p: float | torch.Tensor) -> None:
    row = torch.tensor([[1.0, 0.3, 1e-20]])
    got = top_p_renorm_probs(row, top_p)
    assert torch.equal(got, (row.double() / row.double().sum()).float())
    assert got[0, 2] > 0


def test_views_out_and_untouched_inputs() -> None:
    buffer = distributions(12, 200)
    before = buffer.clone()
    view = buffer[1::3, 20:150]
    out = torch.full((4, 140), math.nan)
    for op, argument in ((softmax, 0.5), (top_p_renorm_probs, 0.9), (top_k_renorm_probs, 20)):
        expected = op(view.clone(), argument)
        assert torch.equal(op(view, argument), expected)
        op(view, argument, out=out[:, 5:135])
        assert torch.equal(out[:, 5:135], expected)
        own = view.clone()
        assert op(own, argument, out=own) is own
        assert torch.equal(own, expected)
        assert torch.equal(op(view[2:3], argument)[0], expected[2])
    assert bool(out[:, :5].isnan().all() and out[:, 135:].isnan().all())
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("temperature", [0.7, 0.3, 1.1, 3.0])
def test_softmax_is_within_an_ulp_at_temperatures_whose_slope_is_no_float32(temperature: float) -> None:
    # Exponents are float64 but for the slope, whose two float32 parts hold 48 bits: exp is exact to about 2^-40. The
    # sum and the quotient are float64. What remains is one rounding to float32, half an ulp.
    logits = -torch.arange(64.0)[None] * temperature
    exact = torch.softmax(logits.double() / torch.tensor(temperature).double(), -1)
    ulp = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    assert ((softmax(logits, temperature).double() - exact).abs() <= 0.501 * ulp).all()
