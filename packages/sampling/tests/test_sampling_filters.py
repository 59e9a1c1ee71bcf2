"""The sampling ops beside top-p against exact fractions and against float64 softmax."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import kestrel_sampling
from kestrel_runtime.reference import philox4x32
from kestrel_runtime.testing import BadInput, assert_rejects, opcheck
from kestrel_sampling import (
    min_p_sampling_from_probs,
    reference_sampling,
    sample_from_logits,
    sampling_from_probs,
    softmax,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
    topk_fwd,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def words_of(seed: int, offset: int, round_: int = 0) -> list[int]:
    """The random words of a draw; test_top_p_sampling.py has Philox in Python integers."""
    return philox4x32(torch.tensor([seed, 0]), torch.tensor([offset, 0, round_, 0])).tolist()


def rounded(number: float) -> float:
    """The number as float32, as the ops take it."""
    return torch.tensor(number, dtype=torch.float32).item()


@dataclass(eq=False)
class Row:
    """A row of float32 numbers, with what is computed once for all filters."""

    values: list[float]

    @functools.cached_property
    def masses(self) -> list[int]:
        """What the numbers weigh, exactly: as multiples of the smallest float32, 2^-149."""
        return [int(max(p, 0.0) * 2.0**149) for p in self.values]

    @functools.cached_property
    def order(self) -> list[int]:
        """Ids in descending order, ties to the lower id."""
        return sorted(range(len(self.values)), key=self.values.__getitem__, reverse=True)

    @functools.cached_property
    def up_to(self) -> list[int]:
        """Prefix sums of the masses."""
        return list(itertools.accumulate(self.masses))


def kept_by_hand(
    row: Row | list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, joint: bool = False
) -> list[int]:
    """The ids that the filters keep, in exact integers."""
    row = row if isinstance(row, Row) else Row(row)
    values, masses = row.values, row.masses
    threshold = (torch.tensor(min_p).clamp(0, 1) * torch.tensor(values[row.order[0]])).item()  # one float32 product
    order = [i for i in row.order if values[i] >= threshold]
    first = order[:top_k] if 0 < top_k < len(values) else order
    share = math.floor(min(max(rounded(top_p), 0.0), 1.0) * 2**32)
    goal = share * sum(masses[i] for i in (order if joint else first))
    kept, mass = [], 0
    for i in first:
        if kept and mass * 2**32 >= goal:
            break
        kept.append(i)
        mass += masses[i]
    return sorted(kept)


def distributions(rows: int, width: int, sharpness: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(width)
    return torch.softmax(sharpness * torch.randn(rows, width, generator=g), dim=-1)


def frequencies(
    sample: Callable[[torch.Tensor, torch.Tensor], Any], row: torch.Tensor, draws: int = 30_000
) -> torch.Tensor:
    ids = sample(row.expand(draws, -1), torch.arange(draws))
    return torch.bincount(ids, minlength=row.shape[1]).double()


def assert_follows(counts: torch.Tensor, row: torch.Tensor, kept: list[int]) -> None:
    """Chi-square below what it passes once in ten thousand (Wilson and Hilferty), and nothing outside the set."""
    draws = counts.sum()
    assert counts[kept].sum() == draws
    expected = row[kept].double() / row[kept].double().sum() * draws
    degrees = len(kept) - 1
    if degrees:
        statistic = ((counts[kept] - expected) ** 2 / expected).sum().item()
        part = 2 / (9 * degrees)
        assert statistic < degrees * (1 - part + 3.719 * part**0.5) ** 3


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 24},
    {"top_k": -1},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 6, "top_p": 0.5, "joint": True},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.1, "joint": True},
]


def sample_probs(options: dict[str, Any], probs: torch.Tensor, offsets: torch.Tensor, seed: int = 17) -> torch.Tensor:
    """The op from probabilities that has these filters."""
    key = {"seed": seed, "offset": offsets}
    names = {name for name in options if name != "joint"}
    if names == {"top_k", "top_p"}:
        order = "joint" if options.get("joint") else "top_k_first"
        return top_k_top_p_sampling_from_probs(
            probs, options["top_k"], options["top_p"], filter_apply_order=order, **key
        )
    if names == {"top_k"}:
        return top_k_sampling_from_probs(probs, options["top_k"], **key)
    if names == {"min_p"}:
        return min_p_sampling_from_probs(probs, options["min_p"], **key)
    if names == {"top_p"}:
        return top_p_sampling_from_probs(probs, options["top_p"], **key)
    return sampling_from_probs(probs, **key)


@pytest.mark.parametrize("options", [o for o in FILTERS if not {"min_p", "top_k"} <= set(o)], ids=str)
def test_frequencies_follow_the_filtered_distribution(options: dict[str, Any]) -> None:
    row = distributions(1, 24, sharpness=1.2)
    counts = frequencies(lambda probs, offsets: sample_probs(options, probs, offsets), row)
    assert_follows(counts, row[0], kept_by_hand(row[0].tolist(), **options))


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_from_logits_follow_the_filtered_softmax(options: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(4))
    options = dict(options)
    joint = options.pop("joint", False)
    order = "joint" if joint else "top_k_first"
    counts = frequencies(
        lambda rows, offsets: sample_from_logits(
            rows, temperature, **options, filter_apply_order=order, seed=23, offset=offsets
        ),
        logits,
    )
    weights = torch.exp((logits - logits.max()).double() / temperature).float()[0]
    assert_follows(counts, weights, kept_by_hand(weights.tolist(), **options, joint=joint))


def assert_inverse(drawn: int, row: Row, options: dict[str, Any], seed: int, offset: int, slack: float = 0.0) -> None:
    """The mass before the id and up to it enclose the point of a word, among what the id is drawn from.

    That is what the filters keep, and the first word. With top-p alone it is what min-p keeps, and the first of four
    words that draws an entry that top-p keeps; if none does, the same among what is before all of those.
    """
    values, masses, kept = row.values, row.masses, set(kept_by_hand(row, **options))
    has_top_k, min_p = 0 < options.get("top_k", 0) < len(values), options.get("min_p", 0.0)
    assert drawn in kept
    entries = sorted(kept) if has_top_k else kept_by_hand(row, min_p=min_p) if min_p > 0 else range(len(values))
    for round_ in range(len(values)):
        whole = len(entries) == len(values)
        up_to = row.up_to if whole else list(itertools.accumulate(masses[i] for i in entries))
        firsts = []
        for word in words_of(seed, offset, round_):
            firsts.append(entries[bisect.bisect_right(up_to, word * up_to[-1] // 2**32)])
            if firsts[-1] in kept:
                place = bisect.bisect_left(entries, drawn)
                before = up_to[place - 1] if place else 0
                assert before * 2**32 <= (word + 1) * up_to[-1] + int(slack * up_to[-1])
                assert (before + masses[drawn]) * 2**32 >= word * up_to[-1] - int(slack * up_to[-1])
                return
        bound = min((-values[first], first) for first in firsts)
        entries = [i for i in entries if (-values[i], i) < bound]


@functools.lru_cache(maxsize=32)
def probs_and_rows(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[Row]]:
    probs = distributions(4 if width <= 1024 else 1, width).to(dtype)
    return probs, [Row(row) for row in probs.double().tolist()]


@functools.lru_cache(maxsize=4)
def logits_and_weights(width: int, dtype: torch.dtype, temperature: float) -> tuple[torch.Tensor, Row]:
    logits = (3 * torch.randn(1, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    return logits, Row(torch.exp((logits - logits.max()).double() / temperature).float()[0].tolist())


VOCABULARIES = [(51200, torch.bfloat16), (128256, torch.float16), (151936, torch.float32)]


@pytest.mark.parametrize(
    ("width", "dtype"), [*((width, dtype) for width in (1, 3, 111, 1024) for dtype in DTYPES), *VOCABULARIES]
)
@pytest.mark.parametrize("options", [o for o in FILTERS if not {"min_p", "top_k"} <= set(o)], ids=str)
def test_each_draw_is_the_inverse_of_the_kept_mass(width: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    probs, rows = probs_and_rows(width, dtype)
    got = sample_probs(options, probs, torch.arange(len(rows))).tolist()
    for b, row in enumerate(rows):
        assert_inverse(got[b], row, options, 17, b, slack=64.0)  # masses are rounded: 2^-26 of the row's


@pytest.mark.parametrize(("width", "dtype"), VOCABULARIES)
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_each_draw_from_logits_is_the_inverse_of_the_kept_weights(
    width: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    logits, weights = logits_and_weights(width, dtype, 0.8)
    order = "joint" if options.get("joint") else "top_k_first"
    filters = {name: value for name, value in options.items() if name != "joint"}
    drawn = sample_from_logits(logits, 0.8, **filters, filter_apply_order=order, seed=17, offset=0).item()
    # the op's exponentials are float32: 2^-18 of the mass covers them
    assert_inverse(drawn, weights, options, 17, 0, slack=2.0**14)


@pytest.mark.parametrize("width", [51200, 151936])
@pytest.mark.parametrize("top_k", [1, 50])
def test_top_k_of_a_whole_vocabulary_keeps_exactly_k(width: int, top_k: int) -> None:
    probs = torch.zeros(1, width)
    probs[0, 5::7] = 0.25  # a tie far longer than k
    renormalised = top_k_renorm_probs(probs, top_k)
    assert renormalised.nonzero()[:, 1].tolist() == list(range(5, 5 + 7 * top_k, 7))
    ids = [top_k_sampling_from_probs(probs, top_k, seed=s).item() for s in range(20)]
    assert set(ids) <= set(range(5, 5 + 7 * top_k, 7))


def test_parameters_per_row_are_those_of_each_row_alone() -> None:
    logits = 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(9))
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, -1.0])
    top_k = torch.tensor([0, 3, 50, 1, 10, 7], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.1, 0.0, 1.0])
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.5, 0.01, 0.0])
    seeds = torch.arange(6) + 10
    full = sample_from_logits(logits, temperature, top_k, top_p, min_p, seed=seeds)
    probs_full = top_k_top_p_sampling_from_probs(softmax(logits), top_k.long(), top_p, seed=seeds)
    for b in range(6):
        row = slice(b, b + 1)
        alone = sample_from_logits(
            logits[row], max(temperature[b].item(), 0.0), top_k[b].item(), top_p[row], min_p[row], seed=b + 10
        )
        assert alone == full[b]
        assert (
            top_k_top_p_sampling_from_probs(softmax(logits[row]), top_k[row], top_p[row], seed=b + 10) == probs_full[b]
        )


@pytest.mark.parametrize("number", [0.7, 0.1, 0.9, 1e-46, 1 / 3, 1e39])
def test_a_number_and_a_tensor_of_it_draw_the_same(number: float) -> None:
    tensor, offsets = torch.tensor([number]), torch.arange(200)
    probs = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).expand(200, -1)  # 0.7 of it: two or three entries, as 0.7 is rounded
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(6))
    for parameter in ("top_p", "min_p", "temperature"):
        for given_as_tensor in (tensor, tensor.expand(200).contiguous()):
            for entries in (logits, probs.log()):
                drawn = [
                    sample_from_logits(entries, **{parameter: p}, seed=3, offset=offsets)
                    for p in (number, given_as_tensor)
                ]
                assert torch.equal(*drawn)
    for name in ("top_p", "min_p"):
        assert torch.equal(*(sample_probs({name: p}, probs, offsets) for p in (number, tensor)))
    assert torch.equal(*(sample_probs({"top_k": 3, "top_p": p}, probs, offsets) for p in (number, tensor)))
    assert torch.equal(*(top_p_renorm_probs(probs, p) for p in (number, tensor)))
    assert torch.equal(*(softmax(logits, p) for p in (number, tensor)))


@pytest.mark.parametrize(("word", "drawn"), [(0, 1), (2**31 - 1, 1), (2**31, 3), (2**32 - 1, 3)])
def test_the_running_mass_must_exceed_the_point(word: int, drawn: int) -> None:
    mass = torch.tensor([[0, 2**40, 0, 2**40, 0]])
    ids, _ = reference_sampling.draw(mass, torch.tensor([True]), torch.tensor([[word]]))
    assert ids.item() == drawn


@pytest.mark.parametrize(("min_p", "kept"), [(0.5, {0, 1, 3}), (0.51, {0, 3}), (1.0, {0, 3}), (7.0, {0, 3})])
def test_an_entry_that_just_reaches_min_p_stays(min_p: float, kept: set[int]) -> None:
    probs = torch.tensor([[0.25, 0.125, 0.0625, 0.25]]).expand(300, -1)
    assert set(min_p_sampling_from_probs(probs, min_p, seed=2, offset=torch.arange(300)).tolist()) == kept


# ---- the integer arithmetic -----------------------------------------------------------------------------------------


def test_top_p_is_rounded_down_to_a_multiple_of_2_to_the_minus_32() -> None:
    probs = torch.full((1, 4096), 2.0**-12)
    just_above = torch.tensor([2.0**-11 + 0.75 * 2.0**-32])  # float32 holds it: two entries reach 2^-11
    assert top_p_renorm_probs(probs, just_above).nonzero()[:, 1].tolist() == [0, 1]


@pytest.mark.parametrize("largest", [1.0, 0.75, 2.0**-17, 1e-30, 3e38])
@pytest.mark.parametrize("width", [2**17 - 1, 2**17, 2**18 - 1, 2**18, 2**19])
def test_the_mass_of_a_row_stays_below_2_to_the_60(width: int, largest: float) -> None:
    mass, valid = reference_sampling.integer_mass(torch.full((1, width), largest))
    assert valid.item()
    assert mass.unique().numel() == 1
    assert 2**39 <= int(mass[0, 0]) * width < 2**60


def test_top_p_of_a_row_longer_than_2_to_the_18_counts_exactly() -> None:
    kept = top_p_renorm_probs(torch.ones(1, 2**19), 0.75).nonzero()
    assert kept.shape[0] == 2**18 + 2**17


@pytest.mark.parametrize("temperature", [0.7, 0.3, 1.1, 3.0])
def test_softmax_is_within_an_ulp_at_temperatures_whose_slope_is_no_float32(temperature: float) -> None:
    # Exponents are float64 but for the slope, whose two float32 parts hold 48 bits: exp is exact to about 2^-40. The
    # sum and the quotient are float64. What remains is one rounding to float32, half an ulp.
    logits = -torch.arange(64.0)[None] * temperature
    exact = torch.softmax(logits.double() / torch.tensor(temperature).double(), -1)
    ulp = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    assert ((softmax(logits, temperature).double() - exact).abs() <= 0.501 * ulp).all()


def test_successive_offsets_are_those_of_a_tensor() -> None:
    rows, op = distributions(5, 300), torch.ops.kestrel_sampling.sampling_from_probs.default
    successive = op(rows, None, 11, None, 2**40, 1)[0]
    assert torch.equal(successive, sampling_from_probs(rows, seed=11, offset=2**40 + torch.arange(5)))
    assert torch.equal(op(rows, None, 11, None, 2**40, 0)[0], sampling_from_probs(rows, seed=11, offset=2**40))


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
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=1e-37)
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


def test_no_rows() -> None:
    empty = torch.empty(0, 10)
    for options in FILTERS[:9]:
        if not {"min_p", "top_k"} <= set(options):
            assert sample_probs(options, empty, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert sample_from_logits(empty).shape == (0,)
    assert top_p_renorm_probs(empty, 0.5).shape == top_k_renorm_probs(empty, 5).shape == (0, 10)


def test_the_references_read_nothing_on_the_host_but_for_top_p() -> None:
    with FakeTensorMode():  # a read of a value would raise here
        logits, seeds, floats = torch.empty(3, 100), torch.empty(3, dtype=torch.int64), torch.empty(3)
        key = (seeds, 0, None, 5, 0)
        draws = [
            reference_sampling.sampling_from_probs(logits, *key),
            reference_sampling.top_k_sampling_from_probs(logits, seeds, 0, *key),
            reference_sampling.min_p_sampling_from_probs(logits, floats, 0.0, *key),
            reference_sampling.sample_from_logits(logits, floats, 0.0, seeds, 0, None, 1.0, floats, 0.0, False, *key),
        ]
        rows = [
            reference_sampling.softmax(logits, floats),
            reference_sampling.top_p_renorm_probs(logits, floats, 0.0),
            reference_sampling.top_k_renorm_probs(logits, seeds, 0),
        ]
    assert all(ids.shape == valid.shape == (3,) for ids, valid in draws)
    assert all(result.shape == (3, 100) for result in rows)


# ---- the contract ----------------------------------------------------------------------------------------------------

PROBS = distributions(3, 8)
ONES = torch.ones(3, dtype=torch.int64)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Callable[[], Call]:
    return lambda: (args, kwargs)


GOOD_CALLS: dict[str, Call] = {
    "sampling_from_probs": ((PROBS,), {"seed": 1, "offset": 2, "return_valid": True}),
    "top_k_sampling_from_probs": ((PROBS, 3), {"seed": 1, "offset": None, "generator": None}),
    "top_k_top_p_sampling_from_probs": ((PROBS, 3, 0.9), {"filter_apply_order": "joint", "seed": 1}),
    "min_p_sampling_from_probs": ((PROBS, 0.1), {"seed": ONES, "offset": ONES}),
    "sample_from_logits": (
        (PROBS, 1.0, 5, 0.9, 0.1),
        {"filter_apply_order": "joint", "seed": 1, "return_valid": False},
    ),
    "softmax": ((PROBS, 0.5), {"out": None}),
    "top_p_renorm_probs": ((PROBS, 0.5), {"out": None}),
    "top_k_renorm_probs": ((PROBS, 5), {"out": None}),
}
FIRST = {op: "logits" if op in ("sample_from_logits", "softmax") else "probs" for op in GOOD_CALLS}


def with_first(op: str, value: Any) -> Callable[[], Call]:
    args, kwargs = GOOD_CALLS[op]
    return lambda: ((value, *args[1:]), kwargs)


def with_flag(op: str, value: Any) -> Callable[[], Call]:
    args, kwargs = GOOD_CALLS[op]
    return lambda: (args, {**kwargs, "return_valid": value})


# The tensors of each op, all given: every one beside the others may be elsewhere.
KEYS = {"seed": ONES, "offset": ONES}
TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "sampling_from_probs": {"probs": PROBS, **KEYS},
    "top_k_sampling_from_probs": {"probs": PROBS, "top_k": ONES, **KEYS},
    "top_p_sampling_from_probs": {"probs": PROBS, "top_p": PROBS[:, 0].clone(), **KEYS},
    "top_k_top_p_sampling_from_probs": {"probs": PROBS, "top_k": ONES, "top_p": PROBS[:, 0].clone(), **KEYS},
    "min_p_sampling_from_probs": {"probs": PROBS, "min_p": PROBS[:, 0].clone(), **KEYS},
    "sample_from_logits": {
        "logits": PROBS,
        "temperature": PROBS[:, 0].clone(),
        "top_k": ONES,
        "top_p": PROBS[:, 1].clone(),
        "min_p": PROBS[:, 2].clone(),
        **KEYS,
    },
    "softmax": {"logits": PROBS, "temperature": PROBS[:, 0].clone(), "out": PROBS.clone()},
    "top_p_renorm_probs": {"probs": PROBS, "top_p": PROBS[:, 0].clone(), "out": PROBS.clone()},
    "top_k_renorm_probs": {"probs": PROBS, "top_k": ONES, "out": PROBS.clone()},
}


def without_key(op: str, **key: Any) -> Callable[[], Call]:
    return lambda: (GOOD_CALLS[op][0], key)


BAD_KEYS = [
    (op, case)
    for op in GOOD_CALLS
    if "sampl" in op
    for case in (
        BadInput("generator a number", "generator", without_key(op, generator=5), TypeError, "Generator"),
        BadInput(
            "generator and seed", "generator", without_key(op, generator=torch.Generator(), seed=1), fragment="seed"
        ),
        BadInput("fractional seed", "seed", without_key(op, seed=1.5), TypeError, "integer"),
        BadInput("seed as text", "seed", without_key(op, seed="x"), TypeError, "integer"),
        BadInput("seed a flag", "seed", without_key(op, seed=True), TypeError, "integer"),
        BadInput("seed of 65 bits", "seed", without_key(op, seed=2**64), ValueError, "<= 18446744073709551615"),
        BadInput("float seeds", "seed", without_key(op, seed=torch.ones(3)), TypeError, "int64"),
        BadInput("int32 seeds", "seed", without_key(op, seed=ONES.int()), TypeError, "int64"),
        BadInput("seeds of others", "seed", without_key(op, seed=ONES[:2]), ValueError, "(3,)"),
        BadInput("fractional offset", "offset", without_key(op, seed=1, offset=0.5), TypeError, "integer"),
        BadInput("float offsets", "offset", without_key(op, seed=1, offset=torch.ones(3)), TypeError, "int64"),
        BadInput("offset alone", "offset", without_key(op, offset=3), ValueError, "seed"),
    )
]
BAD_INPUTS = [
    *BAD_KEYS,
    *(
        (op, case)
        for op, first in FIRST.items()
        for case in (
            BadInput("no tensor", first, with_first(op, [1.0]), TypeError, "tensor"),
            BadInput("float64", first, with_first(op, PROBS.double()), TypeError, "float64"),
            BadInput("one dimension", first, with_first(op, PROBS[0]), ValueError, "2-D"),
            BadInput("no entries", first, with_first(op, PROBS[:, :0]), ValueError, "entry"),
            BadInput("transposed", first, with_first(op, torch.rand(8, 3).t()), ValueError, "contiguous"),
        )
    ),
    *(
        (op, BadInput("return_valid as text", "return_valid", with_flag(op, "no"), TypeError, "True or False"))
        for op in GOOD_CALLS
        if "sampl" in op
    ),
    ("top_k_sampling_from_probs", BadInput("fractional k", "top_k", call(PROBS, 1.5), TypeError, "integer")),
    ("top_k_sampling_from_probs", BadInput("k in float", "top_k", call(PROBS, torch.ones(3)), TypeError, "int32")),
    ("top_k_sampling_from_probs", BadInput("k for others", "top_k", call(PROBS, ONES[:2]), ValueError, "(3,)")),
    ("top_k_top_p_sampling_from_probs", BadInput("no k", "top_k", call(PROBS, None, 0.9), TypeError, "integer")),
    ("top_k_top_p_sampling_from_probs", BadInput("p in int", "top_p", call(PROBS, 3, ONES), TypeError, "float32")),
    (
        "top_k_top_p_sampling_from_probs",
        BadInput(
            "unknown order", "filter_apply_order", call(PROBS, 3, 0.9, filter_apply_order="k"), ValueError, "'joint'"
        ),
    ),
    ("min_p_sampling_from_probs", BadInput("nan", "min_p", call(PROBS, math.nan), ValueError, "nan")),
    ("min_p_sampling_from_probs", BadInput("huge", "min_p", call(PROBS, 10**400), ValueError, "magnitude")),
    ("min_p_sampling_from_probs", BadInput("fp16", "min_p", call(PROBS, torch.ones(3).half()), TypeError, "float32")),
    ("sample_from_logits", BadInput("below zero", "temperature", call(PROBS, -1.0), ValueError, ">= 0")),
    ("sample_from_logits", BadInput("as column", "temperature", call(PROBS, torch.ones(3, 1)), ValueError, "1-D")),
    ("sample_from_logits", BadInput("k as bool", "top_k", call(PROBS, 1.0, True), TypeError, "integer")),
    ("sample_from_logits", BadInput("p as text", "top_p", call(PROBS, 1.0, 0, "x"), TypeError, "number")),
    ("sample_from_logits", BadInput("p is nan", "top_p", call(PROBS, top_p=math.nan), ValueError, "nan")),
    ("sample_from_logits", BadInput("p in int", "top_p", call(PROBS, top_p=ONES), TypeError, "float32")),
    ("sample_from_logits", BadInput("p for others", "top_p", call(PROBS, top_p=torch.ones(2)), ValueError, "(3,)")),
    ("sample_from_logits", BadInput("no min_p", "min_p", call(PROBS, min_p=None), TypeError, "number")),
    ("sample_from_logits", BadInput("min_p is nan", "min_p", call(PROBS, min_p=math.nan), ValueError, "nan")),
    ("sample_from_logits", BadInput("min_p fp16", "min_p", call(PROBS, min_p=ONES.half()), TypeError, "float32")),
    ("sample_from_logits", BadInput("min_p column", "min_p", call(PROBS, min_p=PROBS[:, :1]), ValueError, "1-D")),
    ("sample_from_logits", BadInput("order as flag", "filter_apply_order", call(PROBS, filter_apply_order=True))),
    ("softmax", BadInput("below zero", "temperature", call(PROBS, -0.5), ValueError, ">= 0")),
    ("softmax", BadInput("bf16 out", "out", call(PROBS, out=PROBS.bfloat16()), TypeError, "float32")),
    ("top_p_renorm_probs", BadInput("no p", "top_p", call(PROBS, None), TypeError, "number")),
    ("top_p_renorm_probs", BadInput("short out", "out", call(PROBS, 0.5, out=PROBS[:2]), ValueError, "(3, 8)")),
    ("top_k_renorm_probs", BadInput("k as float", "top_k", call(PROBS, 5.0), TypeError, "integer")),
    ("top_k_renorm_probs", BadInput("k elsewhere", "top_k", call(PROBS, ONES.to("meta")), ValueError, "device")),
]
ODD_VALUES = [
    None, True, 0, -1, 2**70, 2.5, math.nan, "x", [1], PROBS, PROBS[0], PROBS[:0], PROBS.t(), PROBS.half(),
    PROBS.double(), ONES, ONES[:1], ONES.int(), torch.ones(3), torch.tensor(1.0), torch.Generator(),
]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), [pytest.param(op, case, id=f"{op}-{case.name}") for op, case in BAD_INPUTS])
def test_a_bad_input_is_named(op: str, case: BadInput) -> None:
    assert_rejects(getattr(kestrel_sampling, op), case)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, tensors in TENSORS.items() for name in tensors])
def test_a_tensor_elsewhere_is_named(op: str, name: str) -> None:
    tensors = TENSORS[op]
    getattr(kestrel_sampling, op)(**{key: value.clone() for key, value in tensors.items()})
    mixed = {key: value.to("meta") if key == name else value.clone() for key, value in tensors.items()}
    first, second, *_ = tensors  # the first sets the standard: with it elsewhere, the next one is the one at fault
    blamed = second if name == first else name
    message = rf"^{op}: argument '{blamed}': expected device (cpu|meta) as \w+ has, got (cpu|meta)$"
    with pytest.raises(ValueError, match=message):
        getattr(kestrel_sampling, op)(**mixed)
    if "out" in mixed and name != "out":
        assert torch.equal(mixed["out"], tensors["out"])


@pytest.mark.parametrize("op", GOOD_CALLS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_either_works_or_is_named(op: str, data: st.DataObject) -> None:
    args, kwargs = GOOD_CALLS[op]
    values = dict(enumerate(args)) | kwargs
    for which in data.draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=2)):
        value = data.draw(st.sampled_from(ODD_VALUES))
        values[which] = value.clone() if torch.is_tensor(value) else value
    try:
        getattr(kestrel_sampling, op)(*(values[i] for i in range(len(args))), **{k: values[k] for k in kwargs})
    except (ValueError, TypeError) as error:
        if not re.match(rf"{op}: argument '\w+': expected .+, got .+", str(error), re.DOTALL):
            raise AssertionError("the message names neither op nor argument") from error


VIEW = distributions(8, 40)[::2, 3:33]  # [4, 30]
ROWS, COUNTS, KEY = torch.rand(4), torch.arange(4), (torch.arange(4), 0, None, 7, 1)
REGISTERED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("sampling_from_probs", (VIEW, *KEY), {}),
    ("top_k_sampling_from_probs", (VIEW.half(), COUNTS, 0, *KEY), {}),
    ("top_k_top_p_sampling_from_probs", (VIEW, None, 5, ROWS, 0.0, True, *KEY), {}),
    ("min_p_sampling_from_probs", (VIEW.bfloat16(), ROWS, 0.0, *KEY), {}),
    ("sample_from_logits", (VIEW, ROWS, 0.0, COUNTS.int(), 0, None, 0.9, ROWS, 0.0, False, *KEY), {}),
    ("softmax", (VIEW, ROWS, 0.0), {}),
    ("softmax", (VIEW.half(), None, 0.5), {"out": torch.empty(4, 30)}),
    ("top_p_renorm_probs", (VIEW, ROWS, 0.0), {}),
    ("top_p_renorm_probs", (VIEW, None, 0.5), {"out": torch.empty(4, 30)}),
    ("top_k_renorm_probs", (VIEW.bfloat16(), COUNTS, 0), {}),
    ("top_k_renorm_probs", (VIEW, None, 5), {"out": torch.empty(4, 30)}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), REGISTERED)
def test_registration_agrees_with_torch(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packet = getattr(torch.ops.kestrel_sampling, op)
    opcheck(packet.out if kwargs else packet.default, args, kwargs)


def test_public_functions_compile_into_one_graph() -> None:
    def everything(logits: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
        probs = softmax(logits, 0.7)
        key = {"seed": seeds, "offset": 3}
        return [
            probs,
            sampling_from_probs(probs, **key),
            top_k_sampling_from_probs(probs, 3, **key),
            top_k_top_p_sampling_from_probs(probs, 3, 0.9, filter_apply_order="joint", **key),
            min_p_sampling_from_probs(probs, 0.1, **key),
            *sample_from_logits(logits, 0.8, 5, 0.9, 0.01, return_valid=True, **key),
            top_p_renorm_probs(probs, 0.9),
            top_k_renorm_probs(probs, 3, out=torch.empty_like(probs)),
            *topk_fwd(logits, 3, softmax=True),
        ]

    logits = torch.randn(3, 8)
    for got, expected in zip(
        torch.compile(everything, fullgraph=True)(logits, ONES), everything(logits, ONES), strict=True
    ):
        assert torch.equal(got, expected)


SCALARS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "temperature": (lambda rows, t: sample_from_logits(rows, t, seed=1), (0.7, 0.8, 2)),
    "top_k": (lambda rows, k: sample_from_logits(rows, top_k=k, seed=1), (3, 5)),
    "top_p": (lambda rows, p: sample_from_logits(rows, top_p=p, seed=1), (0.7, 0.8)),
    "min_p": (lambda rows, p: sample_from_logits(rows, min_p=p, seed=1), (0.1, 0.2)),
    "seed": (lambda rows, s: sample_from_logits(rows, seed=s), (3, 5)),
    "seed beyond 63 bits": (lambda rows, s: sample_from_logits(rows, seed=s), (2**63, 2**64 - 1)),
    "offset": (lambda rows, o: sample_from_logits(rows, seed=1, offset=o), (3, 5)),
    "top_p of top_p_sampling": (lambda rows, p: top_p_sampling_from_probs(rows, p, seed=1), (0.7, 0.8)),
    "min_p of min_p_sampling": (lambda rows, p: min_p_sampling_from_probs(rows, p, seed=1), (0.1, 0.2)),
    "top_k of top_k_sampling": (lambda rows, k: top_k_sampling_from_probs(rows, k, seed=1), (3, 5)),
    "both of top_k_top_p_sampling": (lambda rows, k: top_k_top_p_sampling_from_probs(rows, k, k / 10, seed=1), (3, 5)),
    "seed of sampling": (lambda rows, s: sampling_from_probs(rows, seed=s), (3, 5)),
    "temperature of softmax": (softmax, (0.7, 0.8)),
    "top_p of renorm": (top_p_renorm_probs, (0.7, 0.8)),
    "top_k of renorm": (top_k_renorm_probs, (3, 5)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_may_change_between_compiled_calls(name: str) -> None:
    function, values = SCALARS[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    rows = distributions(4, 40)
    assert [compiled(rows, v).tolist() for v in values] == [function(rows, v).tolist() for v in values]


def test_a_generator_under_compile_is_refused_by_name() -> None:
    generator = torch.Generator()
    draw = lambda rows: sample_from_logits(rows, generator=generator)  # noqa: E731
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="sample_from_logits: argument 'generator': expected None under torch.compile"):
        compiled(torch.randn(2, 8))
