"""Every draw at the corners of rows and parameters, against the specification in Python integers.

A case is one call: a row for each combination of parameters, each with its own key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from sampling_oracle import DTYPES, words_of

from kestrel_sampling import (
    min_p_sampling_from_probs,
    reference_sampling,
    sample_from_logits,
    sample_with_logprobs,
    sampling_from_probs,
    token_logprobs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)

INF, NAN = math.inf, math.nan
WIDTHS = (1, 2, 33)
CALLS = list(zip(DTYPES, (False, True, True), strict=True))  # dtype, joint
TOP_K = (0, 1, 2, -3, 2**40, -(2**63))  # and V - 1, V, V + 1
TOP_P = (0.0, 1.0, -1.0, 1e-45, 0.1, 0.125, 0.5, 1 - 2.0**-24, 2.0, INF, -INF, NAN)
MIN_P = (0.0, 1.0, 0.3, 1e-45, 3.0, NAN)
TEMPERATURES = (0.0, -1.0, -INF, 1e-30, 1e-3, 0.7, 2.0, 1e30, NAN)

# ---- the specification -----------------------------------------------------------------------------------------------


def masses_of(weights: list[float]) -> list[int] | None:
    """The integer masses of float32 weights; None for a row without a distribution."""
    largest = max(weights)
    if any(w != w for w in weights) or not 0 < largest < INF:
        return None
    bits = max(17, len(weights).bit_length())
    exponent = 1 if 2.0**-bits <= largest <= 1 else math.frexp(largest)[1]
    return [round(Fraction(max(w, 0.0)) * Fraction(2) ** (60 - bits - exponent)) for w in weights]  # ties to even


def draw_by_hand(
    values: list[float],
    weights: list[float],
    key: tuple[int, int],
    top_k: int = 0,
    top_p: float | None = None,
    min_p: float = 0.0,
    joint: bool = False,
) -> tuple[int, bool, set[int]]:
    """The id, whether the row has a distribution, and the ids that the filters keep. top_p None: no such filter."""
    masses, width = masses_of(weights), len(weights)
    if masses is None:
        return 0, False, set()
    least = (torch.tensor(min_p).nan_to_num(0.0).clamp(0, 1) * torch.tensor(max(weights))).item()  # a float32 product
    reaches = [w >= least for w in weights]
    masses = [m if reach else 0 for m, reach in zip(masses, reaches, strict=True)]
    order = sorted(range(width), key=lambda i: (-values[i], i))
    has_top_k = 0 < top_k < width
    kept = set(order[:top_k] if has_top_k else order)
    if top_p is not None and top_p < 1:
        counted = [masses[i] if joint or i in kept else 0 for i in order]
        goal = sum(counted) * int(Fraction(max(top_p, 0.0)) * 2**32) >> 32
        before = itertools.accumulate(counted, initial=0)
        kept &= {i for n, (i, mass) in enumerate(zip(order, before, strict=False)) if n == 0 or mass < goal}
    found = {i for i in kept if reaches[i]}
    if has_top_k or top_p is None:
        return at([m if i in kept else 0 for i, m in enumerate(masses)], words_of(*key)[0]), True, found
    place, first = {i: n for n, i in enumerate(order)}, width
    for round_ in itertools.count(1):
        for word in words_of(*key, round_ - 1):
            drawn = at(masses, word)
            if drawn in kept:
                return drawn, True, found
            first = min(first, place[drawn])
        if round_ >= (1 if top_p < 0.125 else 16):
            masses = [m if place[i] < first else 0 for i, m in enumerate(masses)]
    raise AssertionError("the first entry is kept")


def at(masses: list[int], word: int) -> int:
    """The first id at which the prefix sum exceeds the point of a word."""
    point = sum(masses) * word >> 32
    return next(i for i, up_to in enumerate(itertools.accumulate(masses)) if up_to > point)


# ---- rows ------------------------------------------------------------------------------------------------------------


def with_one(rows: torch.Tensor, value: float) -> torch.Tensor:
    rows[torch.arange(rows.shape[0]), torch.arange(rows.shape[0]) % rows.shape[1]] = value
    return rows


PROBS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "probabilities": lambda x: torch.softmax(3 * x, 1),
    "ties": lambda x: x.round().clamp(0, 2) / 4,
    "no mass": torch.zeros_like,
    "one entry": lambda x: with_one(torch.zeros_like(x), 0.3),
    "the smallest number": lambda x: with_one(torch.zeros_like(x), 1e-45),
    "subnormal": lambda x: x.abs().round() * 1e-45,
    "near overflow": lambda x: x.abs().clamp(max=1) * 3e38,
    "mixed signs": lambda x: x,
    "all negative": lambda x: -x.abs(),
    "NaN": lambda x: with_one(x, NAN),
    "+inf": lambda x: with_one(x, INF),
    "-inf": lambda x: with_one(x, -INF),
}
LOGITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: 3 * x,
    "ties": torch.Tensor.round,
    "equal": lambda x: torch.full_like(x, -7.0),
    "one finite entry": lambda x: with_one(torch.full_like(x, -INF), -5.0),
    "mostly -inf": lambda x: torch.where(x < 1, -INF, x),
    "all -inf": lambda x: torch.full_like(x, -INF),
    "NaN": lambda x: with_one(x, NAN),
    "+inf": lambda x: with_one(x, INF),
    "large": lambda x: 1e4 * x,
    "signed zeros": lambda x: 0.0 * x,
}


def rows_of(kind: Callable[[torch.Tensor], torch.Tensor], rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, width] as a view into a wider buffer of NaN, every other row of it."""
    x = kind(torch.randn(rows, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    buffer = torch.full((2 * rows, width + 3), NAN, dtype=dtype)
    buffer[::2, 1:-2] = x
    return buffer[::2, 1:-2]


def keys_of(rows: int) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor]]:
    keys = [(b * 0x9E3779B97F4A7C15 % 2**63 - 2**62, 2**40 - b) for b in range(rows)]
    seeds, offsets = torch.tensor(keys).T.contiguous()
    return keys, {"seed": seeds, "offset": offsets}


def top_ks(width: int) -> tuple[int, ...]:
    return (*TOP_K, width - 1, width, width + 1)


# ---- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "joint"), CALLS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", PROBS)
def test_draws_from_probabilities(kind: str, width: int, dtype: torch.dtype, joint: bool) -> None:
    combined = list(itertools.product(top_ks(width), TOP_P))
    probs = rows_of(PROBS[kind], len(combined), width, dtype)
    keys, key = keys_of(len(combined))
    k, p = torch.tensor([k for k, _ in combined]), torch.tensor([p for _, p in combined])
    min_p = torch.tensor(MIN_P).repeat(len(combined))[: len(combined)]
    order = "joint" if joint else "top_k_first"
    got = {
        "none": sampling_from_probs(probs, **key, return_valid=True),
        "top_k": top_k_sampling_from_probs(probs, k, **key, return_valid=True),
        "top_p": top_p_sampling_from_probs(probs, p, **key, return_valid=True),
        "both": top_k_top_p_sampling_from_probs(probs, k, p, filter_apply_order=order, **key, return_valid=True),
        "min_p": min_p_sampling_from_probs(probs, min_p, **key, return_valid=True),
    }
    parameters: dict[str, Callable[[int], dict[str, Any]]] = {
        "none": lambda b: {},
        "top_k": lambda b: {"top_k": combined[b][0]},
        "top_p": lambda b: {"top_p": p[b].item()},
        "both": lambda b: {"top_k": combined[b][0], "top_p": p[b].item(), "joint": joint},
        "min_p": lambda b: {"min_p": min_p[b].item()},
    }
    for name, (ids, valid) in got.items():
        want = [draw_by_hand(row, row, keys[b], **parameters[name](b)) for b, row in enumerate(probs.tolist())]
        assert list(zip(ids.tolist(), valid.tolist(), strict=True)) == [(i, has) for i, has, _ in want], name


@pytest.mark.parametrize(("dtype", "joint"), CALLS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", LOGITS)
def test_draws_from_logits_and_their_log_probabilities(kind: str, width: int, dtype: torch.dtype, joint: bool) -> None:
    combined = list(itertools.product(TEMPERATURES, top_ks(width), TOP_P))[width % 17 :: 17]  # 17: every value occurs
    rows = len(combined)
    logits, (keys, key) = rows_of(LOGITS[kind], rows, width, dtype), keys_of(rows)
    temperature, p = torch.tensor([t for t, _, _ in combined]), torch.tensor([p for _, _, p in combined])
    k, min_p = torch.tensor([k for _, k, _ in combined]), torch.tensor(MIN_P).repeat(rows)[:rows]
    given = (temperature, k, p, min_p)
    order = {"filter_apply_order": "joint" if joint else "top_k_first"}
    ids, valid = sample_from_logits(logits, *given, **order, **key, return_valid=True)
    weights = reference_sampling.exponentials(logits, temperature[:, None]).tolist()
    lowest = torch.full((rows,), width - 1)
    found = token_logprobs(logits, lowest, width, *given, **order)
    drawn = {
        processed: sample_with_logprobs(logits, *given, top_n=width, processed=processed, **order, **key)
        for processed in (False, True)
    }
    for b, row in enumerate(logits.tolist()):
        t = temperature[b].item()
        want_id, has, kept = 0, max(row) < INF and max(row) > -INF and t == t and row == row, set()
        has = has and not any(x != x for x in row)
        exact = [(x - max(row)) / (t if t > 0 else 1.0) if has else NAN for x in row]
        if has:
            # An exponent up to 200 in magnitude, of base 2, is rounded to float32: 2^-17 of it.
            assert weights[b] == pytest.approx([math.exp(x) for x in exact], rel=2.0**-16, abs=2e-45)
            filters = {"top_p": p[b].item(), "min_p": min_p[b].item(), "joint": joint}
            top_k = 1 if t <= 0 else combined[b][1]
            want_id, has, kept = draw_by_hand(row, weights[b], keys[b], top_k, **filters)
        assert (ids[b].item(), valid[b].item()) == (want_id, has), combined[b]
        assert_log_probabilities(found, b, exact, kept, width - 1)
        assert_log_probabilities(drawn[True][2:], b, exact, kept, want_id)
        raw = [x - max(row) if has else NAN for x in row]
        assert_log_probabilities(drawn[False][2:], b, raw, set(range(width)), want_id)
        assert all((step.ids[b], step.valid[b]) == (want_id, has) for step in drawn.values())


def assert_log_probabilities(found: Any, b: int, exact: list[float], kept: set[int], token: int) -> None:
    """Row b of (logprobs, ranks, top_ids, top_logprobs): ``exact`` minus the logarithm of the sum over the kept."""
    logprobs, ranks, top_ids, top_logprobs = (x[b].tolist() for x in found)
    if NAN in exact or any(x != x for x in exact):
        assert logprobs != logprobs
        assert ranks == 0
        assert all(x != x for x in top_logprobs)
        return
    order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
    log_sum = math.log(math.fsum(math.exp(exact[i]) for i in kept))
    want = [exact[i] - log_sum if i in kept else -INF for i in order]
    rounded = torch.tensor(want, dtype=torch.float64).float().tolist()  # below -3.4e38 it is -inf
    assert top_ids == order
    assert ranks == order.index(token) + 1
    assert top_logprobs == pytest.approx(rounded, rel=2.0**-23, abs=1e-12)  # the float64 sum is off by 2^-50
    assert logprobs == top_logprobs[ranks - 1]
