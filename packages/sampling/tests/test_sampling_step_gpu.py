"""On a GPU the ops around the draw give what their references give, bit for bit but for sums of log-probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_gpu_cases import FLOATS, assert_close_logprobs, normal

from kestrel_runtime.testing import (
    RandomCase,
    assert_same_bits,
    by_reference,
    canary,
    compare_at_random,
    graph_replay,
    in_layout,
)
from kestrel_sampling import (
    chain_speculative_sampling,
    process_and_sample,
    process_logits,
    sample_from_logits,
    sample_with_logprobs,
    sampling_from_probs,
    token_logprobs,
)
from kestrel_sampling._parameters import Keys
from kestrel_sampling.reference_sampling import random_words

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

INF, NAN = math.inf, math.nan
SHAPES = [(1, 1), (3, 7), (4, 111), (3, 1024), (5, 4097), (2, 51200), (3, 128257), (2, 151936), (1, 262144)]


# ---- process_logits --------------------------------------------------------------------------------------------------


def integers(low: int, high: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(low, high, shape, generator=g, device="cuda").to(dtype)


def penalties(rows: int, width: int, length: int, ids: torch.dtype = torch.int64) -> dict[str, Any]:
    """A history with repeated tokens and ids outside the vocabulary, lengths that end before and after it."""
    scale = torch.arange(rows, device="cuda") / max(rows - 1, 1)
    return {
        "token_ids": integers(-2, width + 2, rows, length, dtype=ids) % max(width // 3, 3),
        "lengths": (torch.arange(rows, device="cuda") * length // max(rows - 1, 1) + 1).to(ids),
        "prompt_lengths": integers(-3, length + 3, rows, seed=2),
        "repetition_penalty": 0.6 + scale,
        "presence_penalty": 0.5 - scale,
        "frequency_penalty": 0.3 - 0.4 * scale,
    }


def biases(rows: int, width: int, count: int, ids: torch.dtype = torch.int64) -> dict[str, Any]:
    return {
        "bias_ids": integers(-1, width + 1, rows, count, seed=3, dtype=ids),
        "bias_values": normal(rows, count, 4),
    }


def mask_of(rows: int, width: int) -> dict[str, Any]:
    words = integers(-(2**31), 2**31, rows, -(-width // 32), seed=5).int()
    words[0] = -1
    words[-1, 1:] = 0
    return {"bitmask": words}


OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "nothing": lambda rows, width: {},
    "penalties": lambda rows, width: penalties(rows, width, 300),
    "long history": lambda rows, width: penalties(rows, width, 9000, torch.int32),
    "one token over and over": lambda rows, width: {
        "token_ids": torch.full((rows, 5000), width // 2, device="cuda"),
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
    },
    "bias": lambda rows, width: biases(rows, width, 40),
    "many biases of one token": lambda rows, width: biases(rows, min(width, 5), 300, torch.int32),
    "mask": mask_of,
    "all": lambda rows, width: penalties(rows, width, 2000) | biases(rows, width, 300) | mask_of(rows, width),
    "empty history": lambda rows, width: penalties(rows, width, 2) | {"lengths": integers(-1, 1, rows)},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_processed_logits_are_those_of_the_reference(options: str, rows: int, width: int, dtype: torch.dtype) -> None:
    given = OPTIONS[options](rows, width)
    if "bias_values" in given:
        # float64 sums of multiples of 1/64 are exact: kernel and reference may add them in different orders.
        given["bias_values"] = (given["bias_values"] * 64).round() / 64
    logits = normal(rows, width, 9).to(dtype)
    logits[0, 0], logits[-1, -1] = NAN, -0.0
    want = by_reference(process_logits, logits, **given)
    before = logits.clone()
    assert_same_bits(process_logits(logits, **given), want, any_nan=True)
    assert_same_bits(logits, before, any_nan=True)
    own = logits.clone()
    assert process_logits(own, **given, out=own) is own
    assert_same_bits(own, want.to(dtype), "in place", any_nan=True)
    if dtype != torch.float32:
        assert_same_bits(process_logits(logits, **given, out=torch.empty_like(logits)), want.to(dtype), any_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [70, 5000, 51200])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_views_of_any_alignment_are_processed_as_their_copies(offset: int, width: int, dtype: torch.dtype) -> None:
    given = penalties(4, width, 100) | mask_of(4, width)
    wide = normal(8, width + 13, 2).to(dtype)
    view = wide[::2, offset : offset + width]
    want = by_reference(process_logits, view, **given)
    assert_same_bits(process_logits(view, **given), want)
    moved = {k: in_layout(v, "sliced") if torch.is_tensor(v) and v.ndim == 2 else v for k, v in given.items()}
    assert_same_bits(process_logits(view, **moved), want)
    out, intact = canary((4, width), torch.float32, "cuda")
    process_logits(view, **given, out=out)
    assert_same_bits(out, want)
    intact()
    before = wide.clone()
    process_logits(view, **given, out=view)
    before[::2, offset : offset + width] = want.to(dtype)
    assert_same_bits(wide, before)


def test_processing_repeats_and_does_not_depend_on_the_batch() -> None:
    rows, width = 64, 51200
    logits = normal(rows, width, 3)
    given = penalties(rows, width, 500) | biases(rows, width, 300) | mask_of(rows, width)
    full = process_logits(logits, **given)
    for _ in range(5):
        assert_same_bits(process_logits(logits, **given), full)
    alone = {k: v[9:10].contiguous() if torch.is_tensor(v) else v for k, v in given.items()}
    assert_same_bits(process_logits(logits[9:10], **alone), full[9:10])


def test_a_replayed_graph_processes_new_logits_and_histories() -> None:
    names = list(penalties(3, 4100, 60) | mask_of(3, 4100))
    first, second = ([normal(3, 4100, n), *(penalties(3, 4100, 60) | mask_of(3, 4100)).values()] for n in (1, 2))
    second[1] = second[1].flip(1)
    run = lambda logits, *values: process_logits(logits, **dict(zip(names, values, strict=True)))  # noqa: E731
    assert_same_bits(graph_replay(run, first, [x.clone() for x in second]), run(*second))


# ---- token_logprobs --------------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rows, width: normal(rows, width, 1),
    "flat": lambda rows, width: normal(rows, width, 2, 1e-3),
    "sharp": lambda rows, width: normal(rows, width, 3, 30.0),
    "large": lambda rows, width: 1e4 + normal(rows, width, 4),
    "equal": lambda rows, width: torch.full((rows, width), -3.5, device="cuda"),
    "sure": lambda rows, width: normal(rows, width, 5) + 40 * (torch.arange(width, device="cuda") == width // 2),
    "ties": lambda rows, width: normal(rows, width, 6).round(),
    "masked": lambda rows, width: torch.where(normal(rows, width, 7) > 7, normal(rows, width, 8), -INF),
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 1.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 50, "temperature": 0.8},
    "top_k_1000": {"top_k": 1000, "top_p": 0.95},
    "top_k_top_p": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "joint": {"top_k": 60, "top_p": 0.5, "min_p": 0.01, "filter_apply_order": "joint"},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02, "temperature": 1.3},
    "many": {"top_k": 3000, "top_p": 0.9},
}


def drawn(logits: torch.Tensor) -> torch.Tensor:
    rows, width = logits.shape
    ids = integers(0, width, rows, seed=6)
    best = logits.nan_to_num(-INF, INF, -INF).argmax(1)
    return torch.where(torch.arange(rows, device="cuda") % 2 == 0, best, ids)


@pytest.mark.parametrize("rows_of", ROWS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("options", FILTERS)
def test_log_probabilities_are_those_of_the_reference(options: str, rows: int, width: int, rows_of: str) -> None:
    logits = ROWS[rows_of](rows, width)
    for n in (0, min(width, 20)):
        got = token_logprobs(logits, drawn(logits), n, **FILTERS[options])
        want = by_reference(token_logprobs, logits, drawn(logits), n, **FILTERS[options])
        assert_close_logprobs(got, want, f"n = {n}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", ["none", "top_k_top_p", "top_p"])
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_log_probabilities_of_views_in_every_dtype(offset: int, options: str, dtype: torch.dtype) -> None:
    wide = normal(7, 20011, 4).to(dtype)
    view = wide[1::2, offset:20007]
    got = token_logprobs(view, drawn(view).int(), 5, **FILTERS[options])
    assert_close_logprobs(got, by_reference(token_logprobs, view, drawn(view), 5, **FILTERS[options]))


@pytest.mark.parametrize("rows", [1, 4, 20, 64, 140, 300])
@pytest.mark.parametrize("options", ["none", "top_k_top_p", "joint"])
def test_log_probabilities_do_not_depend_on_the_batch(options: str, rows: int) -> None:
    logits = normal(rows, 33000, 3)
    got = token_logprobs(logits, drawn(logits), 7, **FILTERS[options])
    assert_same_bits(token_logprobs(logits, drawn(logits), 7, **FILTERS[options]), got)
    alone = token_logprobs(logits[:1], drawn(logits)[:1], 7, **FILTERS[options])
    assert_same_bits(tuple(x[:1] for x in got), tuple(alone))
    assert_close_logprobs(got, by_reference(token_logprobs, logits, drawn(logits), 7, **FILTERS[options]))


@pytest.mark.parametrize("width", [200, 5000, 60000])
def test_rows_with_parameters_of_their_own(width: int) -> None:
    rows = 48
    logits, place = normal(rows, width, 2), torch.arange(rows, device="cuda")
    given: dict[str, Any] = {
        "temperature": torch.where(place % 5 == 0, 0.0, 0.5 + place / rows),
        "top_k": torch.tensor([0, 1, 20, 1000, 1025, width, -1, 3000], device="cuda").repeat(rows // 8),
        "top_p": torch.where(place % 3 == 0, 1.0, 0.4 + place / rows / 2),
        "min_p": torch.where(place % 4 == 0, 0.0, 0.001 * place),
    }
    for order in ("top_k_first", "joint"):
        got = token_logprobs(logits, drawn(logits), 30, **given, filter_apply_order=order)
        want = by_reference(token_logprobs, logits, drawn(logits), 30, **given, filter_apply_order=order)
        assert_close_logprobs(got, want, order)


@pytest.mark.parametrize("width", [5, 4097, 60000])
@pytest.mark.parametrize("options", ["none", "top_k_top_p", "top_p", "greedy"])
def test_odd_rows_and_tokens_are_those_of_the_reference(options: str, width: int) -> None:
    logits = normal(8, width, 2)
    logits[0, 3], logits[1, 2], logits[2], logits[3, 1:] = NAN, INF, -INF, -INF
    logits[4], logits[5, ::2] = NAN, -0.0
    logits[5, 1::2] = 0.0
    for tokens in (torch.zeros(8), torch.full((8,), width - 1), torch.tensor([-1, width, 2**31 - 1, 0, 1, 2, 3, 4])):
        ids = tokens.to("cuda", torch.int64)
        n = min(width, 40)
        got = token_logprobs(logits, ids, n, **FILTERS[options])
        assert_close_logprobs(got, by_reference(token_logprobs, logits, ids, n, **FILTERS[options]))


@pytest.mark.parametrize(("logit", "min_p"), [(-5.75, 0.00318278023), (-8.3125, 0.00024542975)])
def test_probabilities_at_the_edge_of_min_p_sum_to_one(logit: float, min_p: float) -> None:
    """A token that min-p keeps counts in the sum, and one that it drops does not, to the last bit of its weight."""
    row = torch.tensor([[0.0] + [logit] * 1000], device="cuda")
    edge = torch.tensor(min_p).view(torch.int32) + torch.arange(-8, 9, dtype=torch.int32)
    for value in edge.view(torch.float32).tolist():
        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        logprobs = token_logprobs(row, ids, 1001, min_p=value)[3]
        # Each is within 2e-6 of the exact one, and half an ulp below 16 is 2^-21: a relative error of each probability.
        assert float(logprobs.double().exp().sum()) == pytest.approx(1, rel=0, abs=2e-6 + 2**-21), value


@pytest.mark.parametrize("width", [262145, 300000, 600011])
def test_the_largest_is_counted_once_in_rows_whose_groups_have_several_tiles(width: int) -> None:
    """The group with the largest element is summed by itself. 32 elements counted twice are one part in 10^4 here."""
    for rows in (1, 40):
        logits = normal(rows, width, 3, 1e-2)
        ids = drawn(logits)
        assert_close_logprobs(token_logprobs(logits, ids, 3), by_reference(token_logprobs, logits, ids, 3))


def test_log_probabilities_near_zero_keep_their_relative_precision() -> None:
    logits = torch.full((4, 50000), -60.0, device="cuda")
    logits[:, 77] = torch.tensor([-40.0, -35.0, -30.0, -25.0], device="cuda")
    got = token_logprobs(logits, torch.full((4,), 77, device="cuda")).logprobs
    want = -torch.log1p(49999 * torch.exp(-60.0 - logits[:, 77].double()))
    assert bool(((got.double() / want - 1).abs() < 3e-6).all()), (got, want)


@pytest.mark.parametrize("width", [2000, 151936])
@pytest.mark.parametrize("n", [128, 129, 1024])
def test_many_most_probable_tokens(n: int, width: int) -> None:
    logits = normal(3, width, 5)
    for options in ({}, {"top_k": 7}, {"top_p": 0.5}):
        got = token_logprobs(logits, drawn(logits), n, **options)
        assert_close_logprobs(got, by_reference(token_logprobs, logits, drawn(logits), n, **options))


def test_log_probabilities_of_a_draw_are_those_of_what_it_draws_from() -> None:
    logits = normal(64, 151936, 6)
    given: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    ids = sample_from_logits(logits, **given, seed=5, offset=torch.arange(64).cuda())
    found = token_logprobs(logits, ids, 50, **given)
    assert bool((found.logprobs > -INF).all())
    assert bool(((found.top_logprobs.double().exp().sum(1) - 1).abs() < 1e-5).all())
    assert torch.equal(found.logprobs, found.top_logprobs.gather(1, found.ranks.long()[:, None] - 1)[:, 0])


def test_replayed_graphs_see_new_logits_and_tokens() -> None:
    for options in FILTERS.values():
        first, second = ([normal(3, 9000, n), integers(0, 9000, 3, seed=n)] for n in (1, 2))
        run = lambda logits, ids: tuple(token_logprobs(logits, ids, 4, **options))  # noqa: B023, E731
        assert_same_bits(graph_replay(run, first, [x.clone() for x in second]), run(*second))


# ---- sample_with_logprobs --------------------------------------------------------------------------------------------


def assert_draws_with_logprobs_as_the_reference(logits: torch.Tensor, **given: Any) -> None:
    got = sample_with_logprobs(logits, **given)
    want = by_reference(sample_with_logprobs, logits, **given)
    assert_same_bits(tuple(got[:2]), tuple(want[:2]))
    assert_close_logprobs(got, want)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("rows_of", ["normal", "sharp", "ties", "masked"])
@pytest.mark.parametrize(("rows", "width"), [(3, 7), (4, 111), (5, 4097), (3, 128257), (2, 151936)])
@pytest.mark.parametrize("options", FILTERS)
def test_draws_with_log_probabilities_are_those_of_the_reference(
    options: str, rows: int, width: int, rows_of: str, processed: bool
) -> None:
    key = {"seed": torch.arange(rows, device="cuda"), "offset": torch.arange(rows, device="cuda") * 3}
    assert_draws_with_logprobs_as_the_reference(
        ROWS[rows_of](rows, width), **FILTERS[options], processed=processed, top_n=min(width, 6), **key
    )


@pytest.mark.parametrize("k", [1, 2, 31, 128, 129, 700, 1024])
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_draws_with_log_probabilities_from_any_top_k(order: str, k: int) -> None:
    for rows, width in ((300, 2000), (64, 20000), (3, 151936)):
        logits = normal(rows, width, k)
        logits[0, 3], logits[1] = NAN, -INF
        logits[2, ::2] = 2.0
        given: dict[str, Any] = {"top_k": k, "min_p": 1e-3, "filter_apply_order": order, "seed": 4, "top_n": 3}
        top_p = 0.5 + torch.arange(rows, device="cuda") / rows
        given["temperature"] = torch.where(torch.arange(rows, device="cuda") % 7 == 6, 0.0, 0.9)
        for processed in (False, True):
            offset = torch.arange(rows, device="cuda")
            assert_draws_with_logprobs_as_the_reference(
                logits, **given, top_p=top_p, offset=offset, processed=processed
            )
            ids = sample_with_logprobs(logits, **given, top_p=top_p, offset=offset, processed=processed).ids
            same = {name: value for name, value in given.items() if name != "top_n"}
            assert_same_bits(ids, sample_from_logits(logits, **same, top_p=top_p, offset=offset))


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("top_k", [0, 5, 2000])
def test_a_row_whose_temperature_is_nan_has_no_log_probabilities(top_k: int, processed: bool) -> None:
    temperature = torch.tensor([0.9, NAN, 0.0, 1.3], device="cuda")
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "processed": processed, "top_n": 3, "seed": 2}
    assert_draws_with_logprobs_as_the_reference(normal(4, 5000, 3), **given)
    assert sample_with_logprobs(normal(4, 5000, 3), **given).logprobs.isnan().tolist() == [False, True, False, False]


def test_a_replayed_graph_draws_with_new_keys() -> None:
    first, second = ([normal(5, 9000, n), integers(0, 99, 5, seed=n), integers(0, 99, 5, seed=n + 1)] for n in (1, 3))
    run = lambda logits, seed, offset: tuple(  # noqa: E731
        sample_with_logprobs(logits, 0.8, 40, 0.9, top_n=2, seed=seed, offset=offset)
    )
    assert_same_bits(graph_replay(run, first, [x.clone() for x in second]), run(*second))


# ---- process_and_sample ----------------------------------------------------------------------------------------------

BITMASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "none": lambda rows, width: {},
    "any": mask_of,
    "half": lambda rows, width: {
        "bitmask": mask_of(rows, width)["bitmask"] | (torch.arange(rows, device="cuda") % 2 - 1).int()[:, None]
    },
    "few": lambda rows, width: {"bitmask": integers(0, 40, rows, -(-width // 32), seed=8).sub(38).clamp(0).int()},
}


def assert_one_call_is_both(logits: torch.Tensor, known: dict[str, Any], **options: Any) -> None:
    """What is written in place stays inside the rows. Sums of exponentials depend on the alignment of the rows."""
    rows, width = logits.shape
    wide, other = (torch.full((rows, width + 9), 7.0, dtype=logits.dtype, device="cuda") for _ in range(2))
    for one, two in ((logits.clone(), logits.clone()), (wide[:, 5 : 5 + width], other[:, 5 : 5 + width])):
        one.copy_(logits), two.copy_(logits)
        want = sample_with_logprobs(process_logits(two, **known, out=two), **options)
        assert_same_bits(tuple(process_and_sample(one, **known, **options)), tuple(want), any_nan=True)
    assert bool((torch.cat((wide[:, :5], wide[:, -4:]), 1) == 7).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mask", BITMASKS)
@pytest.mark.parametrize(("rows", "width"), [(3, 70), (1, 5003), (20, 33000), (70, 20011), (150, 5000), (3, 151936)])
def test_one_call_is_both_ops_of_a_step(rows: int, width: int, mask: str, dtype: torch.dtype) -> None:
    logits = normal(rows, width, 9).to(dtype)
    logits[0, 0], logits[-1, -1] = NAN, -0.0
    place = torch.arange(rows, device="cuda")
    key = {"seed": place * 3, "offset": place * 5, "top_n": 7}
    temperature = torch.where(place % 7 == 6, 0.0, 0.8)
    for length, ids, k, more in (
        (1000, torch.int32, 50, {"top_p": 0.9}),
        (1, torch.int64, 1, {"processed": True}),
        (4096, torch.int64, 200, {"min_p": 0.01, "filter_apply_order": "joint", "top_p": 0.7}),
        (5000, torch.int32, 20, {"processed": True}),  # two launches
        (300, torch.int32, 0, {"top_p": 0.8}),
    ):
        known = penalties(rows, width, length, ids) | BITMASKS[mask](rows, width)
        if k == 50:
            known["token_ids"] = integers(-2, width + 2, rows, length, seed=6, dtype=ids)  # of the whole vocabulary
        assert_one_call_is_both(logits, known, temperature=temperature, top_k=min(k, width - 1), **more, **key)
    assert_one_call_is_both(logits, BITMASKS[mask](rows, width), top_k=20, top_n=30, seed=4)


@pytest.mark.parametrize("rows_of", ["ties", "equal", "masked", "sure"])
def test_one_call_of_odd_rows_is_both_ops(rows_of: str) -> None:
    rows, width = 40, 20000
    logits = ROWS[rows_of](rows, width)
    logits[3], logits[4, 5], logits[5, ::2] = -INF, INF, NAN
    known = penalties(rows, width, 600) | mask_of(rows, width)
    known["bitmask"][7:9] = 0
    assert_one_call_is_both(logits, known, top_k=30, top_p=0.95, top_n=20, seed=1, offset=torch.arange(rows).cuda())


@pytest.mark.parametrize("top_k", [0, 20, 2000])
@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": torch.ones(2)},
        {"top_p": torch.ones(4)},
        {"min_p": torch.ones(5, dtype=torch.float64)},
        {"seed": torch.ones(5, dtype=torch.int32)},
        {"offset": torch.ones(4, dtype=torch.int64)},
        {"top_n": 9001},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@pytest.mark.parametrize("length", [60, 5000])
def test_a_wrong_argument_of_a_step_leaves_the_logits(length: int, wrong: dict[str, Any], top_k: int) -> None:
    logits = normal(5, 9000, 1)
    before, known = logits.clone(), penalties(5, 9000, length) | mask_of(5, 9000)
    given = {"seed": 1, "offset": 2} | {k: v.cuda() if torch.is_tensor(v) else v for k, v in wrong.items()}
    with pytest.raises((TypeError, ValueError), match=f"^process_and_sample: argument '{next(iter(wrong))}': "):
        process_and_sample(logits, top_k=top_k, **known, **given)
    assert_same_bits(logits, before)


def test_a_replayed_graph_makes_steps_with_new_histories() -> None:
    names = list(penalties(5, 9000, 60) | mask_of(5, 9000))
    first, second = ([normal(5, 9000, n), *(penalties(5, 9000, 60) | mask_of(5, 9000)).values()] for n in (1, 2))
    second[1] = second[1].flip(1)
    seed = torch.arange(5, device="cuda")
    run = lambda logits, *values: tuple(  # noqa: E731
        process_and_sample(
            logits.clone(), 0.8, 40, 0.9, **dict(zip(names, values, strict=True)), seed=seed, offset=seed
        )
    )
    assert_same_bits(graph_replay(run, first, [x.clone() for x in second]), run(*second))


# ---- chain_speculative_sampling --------------------------------------------------------------------------------------


def chain(rows: int, steps: int, width: int, likeness: float = 1.0, sharpness: float = 2.0) -> tuple[torch.Tensor, ...]:
    """Draft probabilities, draft tokens drawn from them, and target probabilities."""
    logits = normal(rows * (steps + 1), width, 1, sharpness).view(rows, steps + 1, width)
    draft = torch.softmax(logits[:, :steps] + normal(rows * steps, width, 2, likeness).view(rows, steps, width), -1)
    ids = torch.empty(rows, steps, dtype=torch.int64, device="cuda")
    for i in range(steps):
        ids[:, i] = sampling_from_probs(draft[:, i], seed=i, offset=torch.arange(rows, device="cuda"))
    return draft, ids, torch.softmax(logits, -1)


def chain_keys(rows: int) -> dict[str, torch.Tensor]:
    return {"seed": torch.arange(rows, device="cuda") * 7919, "offset": torch.arange(rows, device="cuda") * 5 + 3}


def assert_chains_as_the_reference(*args: torch.Tensor | None, **key: Any) -> Any:
    got = chain_speculative_sampling(*args, **key, return_valid=True)  # type: ignore[arg-type]
    want = by_reference(chain_speculative_sampling, *args, **key, return_valid=True)
    assert_same_bits(got, want)
    return got


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize(
    ("rows", "steps", "width"),
    [(1, 1, 1), (3, 0, 50), (200, 4, 40), (9, 3, 1025), (40, 5, 4099), (2, 2, 151936), (20, 2, 51200), (70, 1, 33003)],
)
def test_chains_are_those_of_the_reference(
    rows: int, steps: int, width: int, with_draft: bool, dtype: torch.dtype
) -> None:
    draft, ids, target = chain(rows, steps, width)
    given = (draft.to(dtype) if with_draft else None, ids, target.to(dtype))
    emitted = assert_chains_as_the_reference(*given, **chain_keys(rows))[2]
    if with_draft and rows * steps > 30:
        assert emitted.unique().numel() > 1
    if dtype != torch.float32:
        assert_chains_as_the_reference(draft if with_draft else None, ids.int(), target.to(dtype), seed=1, offset=2)


@pytest.mark.parametrize("likeness", [0.0, 1e-3, 8.0])
@pytest.mark.parametrize("sharpness", [1e-2, 1.0, 12.0])
def test_chains_of_any_likeness_are_those_of_the_reference(sharpness: float, likeness: float) -> None:
    for rows, steps, width in ((30, 4, 300), (5, 2, 60000)):
        assert_chains_as_the_reference(*chain(rows, steps, width, likeness, sharpness), **chain_keys(rows))


def test_views_of_any_alignment_chain_as_their_copies() -> None:
    draft, ids, target = chain(6, 3, 5003)
    wide = torch.zeros(6, 5, 5010, device="cuda")
    wide[:, :4, 3:5006] = target
    drafts = torch.zeros(7, 3, 5007, device="cuda", dtype=torch.bfloat16)
    drafts[1:, :, 1:5004] = draft
    tokens = torch.zeros(6, 9, device="cuda", dtype=torch.int32)
    tokens[:, 4:7] = ids
    key = chain_keys(6)
    got = chain_speculative_sampling(drafts[1:, :, 1:5004], tokens[:, 4:7], wide[:, :4, 3:5006], **key)
    want = by_reference(chain_speculative_sampling, drafts[1:, :, 1:5004], tokens[:, 4:7], wide[:, :4, 3:5006], **key)
    assert_same_bits(got, want)


@pytest.mark.parametrize("width", [3, 5000])
@pytest.mark.parametrize("with_draft", [True, False])
def test_odd_chains_are_those_of_the_reference(with_draft: bool, width: int) -> None:
    draft, ids, target = chain(16, 2, width)
    ids[0], ids[1, 1], ids[2, 0], ids[3] = -1, width, 2**40, -(2**63)
    target[4, 1, 2], target[5, 0, 1], target[6], target[7, 2] = NAN, INF, 0.0, -1.0
    draft[8], draft[9, 0, 1], draft[10] = NAN, -0.5, 0.0
    draft[11] = target[11, :2] + 1e-9  # nothing remains
    target[12] *= 1e-30
    target[13] *= 1e-41
    target[14] *= 50.0
    draft[12:15] = 2.0
    assert_chains_as_the_reference(draft if with_draft else None, ids, target, **chain_keys(16))


def test_counts_are_added_to_those_given() -> None:
    draft, ids, target = chain(5, 3, 200)
    counts = torch.arange(10, device="cuda", dtype=torch.int32).view(2, 5)
    _, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=3)
    chain_speculative_sampling(draft, ids, target, counts[0], counts[1], seed=3)
    want = torch.arange(10, device="cuda", dtype=torch.int32).view(2, 5)
    assert_same_bits(counts, want + torch.stack((accepted, emitted)))


def test_a_replayed_graph_chains_new_probabilities_and_keys() -> None:
    first = [*chain(5, 3, 5000), *chain_keys(5).values()]
    second = [x.flip(0).contiguous() for x in first]
    run = lambda draft, ids, target, seed, offset: chain_speculative_sampling(  # noqa: E731
        draft, ids, target, seed=seed, offset=offset
    )
    assert_same_bits(graph_replay(run, first, [x.clone() for x in second]), run(*second))


# ---- random calls ----------------------------------------------------------------------------------------------------


def random_processing(rng: random.Random) -> RandomCase:
    rows, width = rng.choice([1, 2, 9, 70]), rng.choice([3, 130, 4096, 20000])
    logits = normal(rows, width, rng.randrange(99)).to(rng.choice(FLOATS))
    given: dict[str, Any] = {}
    if rng.random() < 0.7:
        given |= penalties(rows, width, rng.choice([1, 30, 3000]), rng.choice([torch.int32, torch.int64]))
        for name in rng.sample(["lengths", "prompt_lengths", "presence_penalty", "frequency_penalty"], 2):
            del given[name]
    if rng.random() < 0.5:
        given |= biases(rows, width, rng.choice([1, 17, 500]))
        given["bias_values"] = given["bias_values"].round()
    if rng.random() < 0.5:
        given |= mask_of(rows, width)
    return RandomCase(process_logits, (logits,), given)


def test_random_calls_process_as_the_reference() -> None:
    compare_at_random(random_processing, seconds=6, least=30)


def test_a_chain_draws_from_masses_just_below_a_power_of_two_as_they_are() -> None:
    """The largest mass of a row is 2^43 - 2^19. If it were cut to 2^43 - 2^20, a draw in 2000 would differ."""
    rows, half = 20_000, 60_000
    large, small = 256 * (1 - 2**-24), 128.0
    target = torch.tensor([large, small]).repeat_interleave(half).cuda().expand(rows, 1, -1)
    key = chain_keys(rows)
    ids = chain_speculative_sampling(None, torch.empty(rows, 0, dtype=torch.int64, device="cuda"), target, **key)[0]
    words = random_words(Keys(key["seed"], 0, key["offset"], 0), torch.empty(rows, 1))[:, 0, 0].tolist()
    masses = int(large * 2**35), int(small * 2**35)
    for word, drawn in zip(words, ids[:, 0].tolist(), strict=True):
        point = word * half * sum(masses) >> 32
        rest = point - half * masses[0]
        assert drawn == (point // masses[0] if rest < 0 else half + rest // masses[1])
