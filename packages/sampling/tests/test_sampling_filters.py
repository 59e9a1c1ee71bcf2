"""The sampling ops beside top-p against exact fractions and against float64 softmax."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from sampling_oracle import (
    DTYPES,
    FILTERS,
    Row,
    assert_follows,
    distributions,
    frequencies,
    kept_by_hand,
    sample_probs,
    words_of,
)

from kestrel_sampling import (
    min_p_sampling_from_probs,
    reference_sampling,
    sample_from_logits,
    sampling_from_probs,
    softmax,
    token_logprobs,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
)


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


@pytest.mark.parametrize(
    ("min_p", "kept"),
    [(0.5, {0, 1, 3}), (0.51, {0, 3}), (1.0, {0, 3}), (7.0, {0, 3}), (-1.0, {0, 1, 2, 3}), (math.nan, {0, 1, 2, 3})],
)
def test_an_entry_that_just_reaches_min_p_stays(min_p: float, kept: set[int]) -> None:
    probs, offsets = torch.tensor([[0.25, 0.125, 0.0625, 0.25]]).expand(300, -1), torch.arange(300)
    for given in (torch.tensor([min_p]), *([] if math.isnan(min_p) else [min_p])):  # NaN is no number to give
        assert set(min_p_sampling_from_probs(probs, given, seed=2, offset=offsets).tolist()) == kept


@pytest.mark.parametrize(("options", "kept"), [({"top_k": 1}, {1}), ({"top_k": 2}, {1, 2}), ({"top_p": 0.25}, {1})])
def test_logits_whose_weights_are_equal_are_ordered_by_themselves(options: dict[str, Any], kept: set[int]) -> None:
    logits, offsets = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).expand(60, -1), torch.arange(60)
    assert set(sample_from_logits(logits, 1e9, **options, seed=3, offset=offsets).tolist()) == kept  # weights of 1
    logprobs = token_logprobs(logits[:1], torch.tensor([1]), 4, 1e9, **options)
    finite = logprobs.top_logprobs[0].isfinite()
    assert set(logprobs.top_ids[0][finite].tolist()) == kept


def test_weights_of_logits_are_powers_of_an_exponent_rounded_to_float32() -> None:
    """That moves a weight by up to 2^-20 ln 2 of it, a power of two in float32 by an ulp or two."""
    logits = torch.linspace(-14, -8, 1000)[None]
    logits[0, 0] = 0.0
    exponents = (logits.double() * math.log2(math.e)).float().double()
    weights = reference_sampling.exponentials(logits, torch.ones(1, 1)).double()
    assert bool(((weights - torch.exp2(exponents)).abs() <= 2.0**-22 * torch.exp2(exponents)).all())


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


@pytest.mark.parametrize(
    ("width", "largest", "mass"),
    [
        (2, 1.0, 2**42),
        (2, 0.75, 3 * 2**40),
        (2, 2.0**-17, 2**25),  # the last one with the power 2^42
        (2, 2.0**-18, 2**42),  # others: in [2^42, 2^43)
        (2, 1.5, 3 * 2**41),
        (2, 2.0, 2**42),
        (2**17 - 1, 1.0, 2**42),
        (2**17, 1.0, 2**41),  # a bit less for each bit of V beyond 17
        (2**17, 2.0**-18, 2**23),
        (2**17, 2.0**-19, 2**41),
        (2**18, 1.0, 2**40),
    ],
)
def test_the_mass_of_the_largest_entry(width: int, largest: float, mass: int) -> None:
    row = torch.zeros(1, width)
    row[0, 0] = largest
    assert reference_sampling.integer_mass(row)[0][0, 0].item() == mass


def test_masses_are_rounded_half_to_even_and_negative_ones_are_0() -> None:
    small = torch.tensor([0.5, 0.75, 1.5, 1.75, 2.5, -3.0]) * 2.0**-42
    mass, _ = reference_sampling.integer_mass(torch.cat([torch.ones(1), small])[None])
    assert mass.tolist() == [[2**42, 0, 1, 2, 2, 2, 0]]


@pytest.mark.parametrize("width", [2**17 - 1, 2**17, 151_936, 2**18 - 1])
def test_a_flat_row_has_the_power_of_two_that_every_distribution_has(width: int) -> None:
    flat, _ = reference_sampling.integer_mass(torch.full((1, width), 1 / width))
    one_hot, _ = reference_sampling.integer_mass(torch.nn.functional.one_hot(torch.tensor([0]), width).float())
    assert int(flat[0, 0]) == round(int(one_hot[0, 0]) * float(torch.tensor(1 / width)))


def test_top_p_of_a_row_longer_than_2_to_the_18_counts_exactly() -> None:
    kept = top_p_renorm_probs(torch.ones(1, 2**19), 0.75).nonzero()
    assert kept.shape[0] == 2**18 + 2**17


def test_successive_offsets_are_those_of_a_tensor() -> None:
    rows, op = distributions(5, 300), torch.ops.kestrel_sampling.sampling_from_probs.default
    successive = op(rows, None, 11, None, 2**40, 1)[0]
    assert torch.equal(successive, sampling_from_probs(rows, seed=11, offset=2**40 + torch.arange(5)))
    assert torch.equal(op(rows, None, 11, None, 2**40, 0)[0], sampling_from_probs(rows, seed=11, offset=2**40))
