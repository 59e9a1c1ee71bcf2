"""top_p_sampling_from_probs against exact integers, a Philox in Python and the chi-square distribution."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from sampling_oracle import words_of

from kestrel_runtime.testing import BadInput, assert_rejects, assert_works_or_is_named, odd_calls, opcheck
from kestrel_sampling import _parameters, top_p_sampling_from_probs
from kestrel_sampling._parameters import _reserved_keys, is_capturing
from kestrel_sampling.top_p_sampling import _top_p_sampling_from_probs

VOCABULARIES = (1, 2, 111, 1024, 51200, 128256, 151936)


def exact(row: list[float]) -> list[int]:
    """What float32 numbers weigh, exactly: as multiples of the smallest of them, 2^-149."""
    return [int(max(p, 0.0) * 2.0**149) for p in row]


def kept_by_hand(row: list[float], top_p: float) -> list[int]:
    """Ids of the smallest set whose mass reaches top_p of the whole, in exact integers."""
    masses = exact(row)
    top_p = torch.tensor(top_p, dtype=torch.float32).item()  # a number is rounded, as a tensor of it is
    goal = math.floor(min(max(top_p, 0.0), 1.0) * 2**32) * sum(masses)
    kept, mass = [], 0
    for i in sorted(range(len(row)), key=row.__getitem__, reverse=True):  # keeps equal ones in their order
        if kept and mass * 2**32 >= goal:
            break
        kept.append(i)
        mass += masses[i]
    return sorted(kept)


def draw_by_hand(row: list[float], top_p: float, seed: int, offset: int) -> int:
    """The first proposal that is kept: of 64 from the row (four for a small p), then of four at a time from the entries
    before all of those."""
    masses, kept = exact(row), set(kept_by_hand(row, top_p))
    remaining = list(range(len(row)))
    first = (math.inf, 0)
    for round_ in range(16 + len(row)):
        up_to = list(itertools.accumulate(masses[i] for i in remaining))
        words = words_of(seed, offset, round_)
        proposals = [remaining[bisect.bisect_right(up_to, word * up_to[-1] // 2**32)] for word in words]
        for i in proposals:
            if i in kept:
                return i
        first = min(first, *((-row[i], i) for i in proposals))
        if round_ >= (15 if top_p >= 0.125 else 0):
            remaining = [i for i in remaining if (-row[i], i) < first]
    raise AssertionError("the first entry is kept")


def distributions(rows: int, width: int, sharpness: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(width)
    return torch.softmax(sharpness * torch.randn(rows, width, generator=g), dim=-1)


def critical_chi_square(degrees: int) -> float:
    """The value a chi-square variable passes once in ten thousand (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * part**0.5) ** 3


# ---- the draw --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 7, 111, 1024])
def test_draws_what_exact_integers_draw(width: int, dtype: torch.dtype, top_p: float) -> None:
    probs = distributions(12, width).to(dtype)
    seeds = torch.arange(12) * 7919 - 3
    offsets = torch.arange(12) * 2**31 + 5
    got = top_p_sampling_from_probs(probs, top_p, seed=seeds, offset=offsets)
    rows = probs.double().tolist()
    expected = [draw_by_hand(r, top_p, s, o) for r, s, o in zip(rows, seeds.tolist(), offsets.tolist(), strict=True)]
    assert got.dtype == torch.int32
    assert got.tolist() == expected


def test_every_round_of_proposals_has_random_words_of_its_own() -> None:
    # Flat rows and a small p: many entries are kept, and most first rounds propose none of them.
    probs = distributions(200, 60, sharpness=0.2)
    rows = probs.double().tolist()
    got = top_p_sampling_from_probs(probs, 0.1, seed=5, offset=torch.arange(200))
    assert got.tolist() == [draw_by_hand(row, 0.1, 5, b) for b, row in enumerate(rows)]


@pytest.mark.parametrize("width", [51200, 128256, 151936])
def test_draws_from_a_whole_vocabulary(width: int) -> None:
    probs = distributions(2, width)
    top_p = torch.tensor([0.9, 1.0])
    got = top_p_sampling_from_probs(probs, top_p, seed=3, offset=torch.tensor([0, 1]))
    rows = probs.double().tolist()
    assert got.tolist() == [draw_by_hand(rows[b], top_p[b].item(), 3, b) for b in range(2)]


@pytest.mark.parametrize("factor", [1e-30, 0.3, 1000.0, 1e30])
def test_rows_need_not_sum_to_one(factor: float) -> None:
    probs = distributions(8, 40) * factor
    got = top_p_sampling_from_probs(probs, 0.8, seed=torch.arange(8))
    assert got.tolist() == [draw_by_hand(row, 0.8, b, 0) for b, row in enumerate(probs.double().tolist())]


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("keyed_by", ["offset", "seed"])
def test_frequencies_follow_the_filtered_distribution(top_p: float, keyed_by: str) -> None:
    row = distributions(1, 30, sharpness=1.5)
    draws = 40_000
    keys = torch.arange(draws) + 100
    key = {"seed": 42, "offset": keys} if keyed_by == "offset" else {"seed": keys, "offset": 42}
    ids = top_p_sampling_from_probs(row.expand(draws, -1), top_p, **key)
    kept = kept_by_hand(row[0].double().tolist(), top_p)
    counts = torch.bincount(ids, minlength=30).double()
    assert counts[kept].sum() == draws  # nothing outside the support
    expected = row[0, kept].double() / row[0, kept].double().sum() * draws
    statistic = ((counts[kept] - expected) ** 2 / expected).sum().item()
    assert statistic < critical_chi_square(len(kept) - 1)
    assert statistic > 1.0  # and not suspiciously even


def test_entries_without_mass_are_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, -3.0, 0.5, 0.0]]).expand(2000, -1)
    ids = top_p_sampling_from_probs(probs, 1.0, seed=1, offset=torch.arange(2000))
    assert set(ids.tolist()) == {1, 4}


# ---- the filter ------------------------------------------------------------------------------------------------------


def support(row: list[float], top_p: float) -> list[int]:
    ids = top_p_sampling_from_probs(torch.tensor([row]).expand(400, -1), top_p, seed=9, offset=torch.arange(400))
    return sorted(set(ids.tolist()))


def test_ties_go_to_the_lower_id() -> None:
    assert support([0.25, 0.25, 0.25, 0.25], 0.5) == [0, 1]
    assert support([0.2, 0.4, 0.2, 0.2], 0.55) == [0, 1]


def test_the_set_is_the_smallest_that_reaches_p() -> None:
    row = [0.125, 0.5, 0.25, 0.125]  # exact in binary, so that p can be met exactly
    assert support(row, 0.5) == [1]
    assert support(row, 0.5 + 1e-6) == [1, 2]
    assert support(row, 0.75) == [1, 2]
    assert support(row, 0.875) == [0, 1, 2]


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1e-9])
def test_no_p_keeps_the_most_probable(top_p: float) -> None:
    assert support([0.2, 0.3, 0.3, 0.2], top_p) == [1]


@pytest.mark.parametrize("top_p", [1.0, 2.0, math.inf])
def test_a_full_p_keeps_all(top_p: float) -> None:
    assert support([0.2, 0.3, 0.3, 0.2], top_p) == [0, 1, 2, 3]


def test_p_per_row_and_p_that_is_nan() -> None:
    probs = distributions(5, 60)
    values = [0.0, 0.3, 0.9, 1.0, math.nan]
    seeds = torch.arange(5)
    got = top_p_sampling_from_probs(probs, torch.tensor(values), seed=seeds)
    each = [
        top_p_sampling_from_probs(probs[b : b + 1], torch.tensor([p]), seed=b).item() for b, p in enumerate(values[:4])
    ]
    assert got.tolist()[:4] == each
    assert got[4] == top_p_sampling_from_probs(probs[4:], 1.0, seed=4)[0]


# ---- rows that are no distribution -----------------------------------------------------------------------------------


def test_rows_without_a_distribution_give_0_and_false() -> None:
    nan, inf = math.nan, math.inf
    good = [0.0, 1.0, 0.0]
    bad = [
        [nan, 1.0, 1.0],
        [0.0, 1.0, nan],
        [nan] * 3,
        [0.0] * 3,
        [-1.0, -2.0, -0.5],
        [1.0, inf, 0.0],
        [0.0, -inf, 0.0],
    ]
    rows = [row for other in bad for row in (good, other)]
    ids, valid = top_p_sampling_from_probs(torch.tensor(rows), 0.9, seed=5, return_valid=True)
    assert valid.dtype == torch.bool
    assert ids.tolist() == [1, 0] * len(bad)
    assert valid.tolist() == [True, False] * len(bad)


def test_sixteen_rounds_propose_from_the_whole_row() -> None:
    """Two entries of sixteen are kept; with these offsets no proposal of the first 15 rounds is one of them, and the
    draw is another if one round more or less is of the whole row."""
    row, offsets = [1 / 16] * 16, [8041, 10169, 12179, 29973, 32012, 44457]
    got = top_p_sampling_from_probs(torch.tensor([row] * 6), 0.125, seed=0, offset=torch.tensor(offsets))
    assert got.tolist() == [draw_by_hand(row, 0.125, 0, offset) for offset in offsets] == [1, 1, 0, 1, 0, 1]


def test_tiny_and_huge_rows_are_distributions() -> None:
    probs = torch.tensor([[0.0, 1e-45], [3e38, 3e38], [1e-40, 3e-40], [-5.0, 1e-3]])
    ids, valid = top_p_sampling_from_probs(probs, 1.0, seed=torch.arange(4), return_valid=True)
    assert valid.all()
    assert ids.tolist() == [draw_by_hand(row, 1.0, b, 0) for b, row in enumerate(probs.double().tolist())]


# ---- where the randomness comes from ---------------------------------------------------------------------------------


def test_a_row_depends_on_its_own_key_only() -> None:
    probs = distributions(257, 111)
    seeds = torch.randint(-(2**63), 2**63 - 1, (257,), generator=torch.Generator().manual_seed(0))
    offsets = torch.arange(257) * 3
    full = top_p_sampling_from_probs(probs, 0.9, seed=seeds, offset=offsets)
    for b in (0, 128, 256):
        alone = top_p_sampling_from_probs(probs[b : b + 1], 0.9, seed=seeds[b].item(), offset=offsets[b].item())
        assert alone.item() == full[b]
    order = torch.randperm(257, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        top_p_sampling_from_probs(probs[order], 0.9, seed=seeds[order], offset=offsets[order]), full[order]
    )


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**63])
def test_a_key_is_the_same_as_a_number_and_as_a_tensor(seed: int) -> None:
    probs = distributions(6, 500)
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    expected = [draw_by_hand(row, 1.0, seed, 7) for row in probs.double().tolist()]
    assert top_p_sampling_from_probs(probs, 1.0, seed=seed, offset=7).tolist() == expected
    assert top_p_sampling_from_probs(probs, 1.0, seed=signed, offset=torch.tensor([7])).tolist() == expected
    both = top_p_sampling_from_probs(probs, 1.0, seed=signed.expand(6).contiguous(), offset=torch.full((6,), 7))
    assert both.tolist() == expected


def test_a_generator_gives_new_and_repeatable_draws_and_leaves_the_global_one_alone() -> None:
    probs = distributions(64, 1000, sharpness=0.1)
    state = torch.get_rng_state()
    g = torch.Generator().manual_seed(3)
    first, second = (top_p_sampling_from_probs(probs, 1.0, generator=g) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert torch.equal(first, top_p_sampling_from_probs(probs, 1.0, generator=g.manual_seed(3)))
    assert len(set(first.tolist())) > 32  # rows of one call have offsets of their own


@pytest.mark.parametrize(("rows", "reserved"), [(0, 0), (1, 4), (4, 4), (5, 8)])
@pytest.mark.parametrize("seed", [5, 2**63 + 5])
def test_a_generator_of_a_gpu_gives_its_seed_and_reserves_a_value_for_each_row(
    seed: int, rows: int, reserved: int
) -> None:
    class Source:
        """The part of a CUDA generator that keys come from."""

        offset = 8

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

        def initial_seed(self) -> int:
            return seed

    source = Source()
    no_seed, key, no_offset, offset, stride = _reserved_keys(torch.empty(rows, 3), source)
    assert no_seed is no_offset is None
    assert key % 2**64 == seed ^ int.from_bytes(b"kestrel", "big")
    assert -(2**63) <= key < 2**63
    assert (offset, stride, source.offset) == (8, 1, 8 + reserved)


def test_without_any_key_the_default_generator_is_used() -> None:
    probs = distributions(64, 1000, sharpness=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        first = top_p_sampling_from_probs(probs, 1.0)
        second = top_p_sampling_from_probs(probs, 1.0)
        torch.manual_seed(11)
        assert torch.equal(top_p_sampling_from_probs(probs, 1.0), first)
    assert not torch.equal(first, second)


# ---- the contract of every op ----------------------------------------------------------------------------------------


def test_views_give_the_same_and_are_not_written() -> None:
    buffer = distributions(12, 200)
    before = buffer.clone()
    view = buffer[1::3, 20:150]
    seeds = torch.arange(4)
    assert torch.equal(
        top_p_sampling_from_probs(view, 0.9, seed=seeds), top_p_sampling_from_probs(view.clone(), 0.9, seed=seeds)
    )
    assert torch.equal(buffer, before)


def test_no_rows() -> None:
    ids, valid = top_p_sampling_from_probs(torch.empty(0, 10), 0.9, return_valid=True)
    assert ids.shape == valid.shape == (0,)


PROBS = distributions(3, 8)
ONES = torch.ones(3, dtype=torch.int64)


def call(*args: Any, **kwargs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: (args, kwargs)


BAD_INPUTS = [
    BadInput("no tensor", "probs", call([0.5, 0.5], 0.9), TypeError, "tensor"),
    BadInput("float64", "probs", call(PROBS.double(), 0.9), TypeError, "float64"),
    BadInput("integers", "probs", call(ONES[None], 0.9), TypeError, "int64"),
    BadInput("one dimension", "probs", call(PROBS[0], 0.9), ValueError, "2-D"),
    BadInput("no entries", "probs", call(PROBS[:, :0], 0.9), ValueError, "entry"),
    BadInput("transposed", "probs", call(PROBS.t(), 0.9), ValueError, "contiguous"),
    BadInput("no p", "top_p", call(PROBS, None), TypeError, "number"),
    BadInput("p is nan", "top_p", call(PROBS, math.nan), ValueError, "nan"),
    BadInput("p as bool", "top_p", call(PROBS, True), TypeError, "number"),
    BadInput("p for other rows", "top_p", call(PROBS, torch.ones(2)), ValueError, "(3,)"),
    BadInput("p as column", "top_p", call(PROBS, torch.ones(3, 1)), ValueError, "1-D"),
    BadInput("p in fp16", "top_p", call(PROBS, torch.ones(3).half()), TypeError, "float32"),
    BadInput("p elsewhere", "top_p", call(PROBS, torch.ones(3, device="meta")), ValueError, "device"),
    BadInput("seed for other rows", "seed", call(PROBS, 0.9, seed=ONES[:2]), ValueError, "(3,)"),
    BadInput("seed in int32", "seed", call(PROBS, 0.9, seed=ONES.int()), TypeError, "int64"),
    BadInput("seed as float", "seed", call(PROBS, 0.9, seed=1.0), TypeError, "integer"),
    BadInput("seed of 65 bits", "seed", call(PROBS, 0.9, seed=2**64), ValueError, "<="),
    BadInput("offset in float", "offset", call(PROBS, 0.9, seed=1, offset=torch.ones(3)), TypeError, "int64"),
    BadInput("offset alone", "offset", call(PROBS, 0.9, offset=1), ValueError, "seed"),
    BadInput("two sources", "generator", call(PROBS, 0.9, seed=1, generator=torch.Generator()), ValueError, "None"),
    BadInput("number as generator", "generator", call(PROBS, 0.9, generator=5), TypeError, "Generator"),
    BadInput("return_valid as text", "return_valid", call(PROBS, 0.9, return_valid="no"), TypeError, "True"),
]
ODD_VALUES = [
    None, True, 0, -1, 2**70, 2.5, math.nan, "x", [1], PROBS, PROBS[0], PROBS[:0], PROBS.t(), PROBS.half(),
    PROBS.double(), ONES, ONES[:1], ONES.int(), torch.ones(3), torch.tensor(1.0), torch.Generator(),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUTS, ids=lambda case: case.name)
def test_a_bad_input_is_named(case: BadInput) -> None:
    assert_rejects(top_p_sampling_from_probs, case)


GIVEN = {"probs": PROBS, "top_p": 0.9, "seed": 1, "offset": 0, "generator": None, "return_valid": True}


@settings(max_examples=100, deadline=None)
@given(call=odd_calls((), GIVEN, ODD_VALUES))
def test_whatever_is_passed_either_works_or_is_named(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    assert_works_or_is_named(top_p_sampling_from_probs, *call)


@pytest.mark.parametrize(
    "args",
    [
        (PROBS, None, 0.9, None, 3, None, 4, 0),
        (
            distributions(8, 40).half()[::2, 3:33],
            torch.rand(4),
            0.0,
            torch.arange(4),
            0,
            torch.arange(8)[::2].clone(),
            0,
            0,
        ),
        (torch.rand(3, 5, 20).transpose(0, 1)[2], torch.rand(1), 0.0, torch.arange(1), 0, None, 2**40, 1),
    ],
)
def test_registration_agrees_with_torch(args: tuple[Any, ...]) -> None:
    opcheck(_top_p_sampling_from_probs, args)


def test_compiles_into_one_graph() -> None:
    def draws(probs: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
        ids, valid = top_p_sampling_from_probs(probs, torch.tensor([0.5]), seed=seeds, offset=seeds, return_valid=True)
        return [ids, valid, top_p_sampling_from_probs(probs, 0.9, seed=2**64 - 1)]

    compiled = torch.compile(draws, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(PROBS, ONES), draws(PROBS, ONES), strict=True):
        assert torch.equal(got, expected)


def test_the_default_generator_compiles_into_one_graph() -> None:
    compiled = torch.compile(lambda probs: top_p_sampling_from_probs(probs, 1.0), fullgraph=True, backend="aot_eager")
    probs = distributions(64, 1000, sharpness=0.1)
    assert not torch.equal(compiled(probs), compiled(probs))


def test_a_capture_is_detected_on_the_device_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(other: int) -> Iterator[None]:
        current.append(other)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(_parameters, "_current_device", lambda: current[-1])
    monkeypatch.setattr(_parameters, "_current_stream_is_capturing", lambda: current[-1] == 1)
    assert is_capturing(1)
    assert not is_capturing(0)
    assert len(current) == 1
