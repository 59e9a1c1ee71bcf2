"""chain_speculative_sampling against exact fractions, and against the target distribution by chi-square."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from sampling_oracle import DTYPES, Row, assert_follows, distributions, rounded, words_of

from kestrel_runtime.testing import assert_runs_repeat, assert_same_bits
from kestrel_sampling import chain_speculative_sampling, sampling_from_probs, softmax

DRAWS = 20_000


def chain_by_hand(
    draft: list[list[float]] | None, ids: list[int], target: list[list[float]], seed: int, offset: int
) -> tuple[list[int], int, int]:
    """Ids, accepted and emitted of one row, in exact fractions."""
    accepts = []
    for i, token in enumerate(ids):
        ratio = Fraction(words_of(seed, offset, i)[1], 2**32)
        q = Fraction(draft[i][token]) if draft else Fraction(1)
        accepts.append(0 <= token < len(target[i]) and ratio * q < Fraction(target[i][token]))
    emitted = accepts.index(False) if False in accepts else len(ids)
    row = target[emitted]
    if emitted < len(ids):
        token = ids[emitted]
        removed = draft[emitted] if draft else [float(i == token) for i in range(len(row))]
        row = [rounded(p - q) for p, q in zip(row, removed, strict=True)]
    up_to = list(itertools.accumulate(Row(row).masses))
    drawn = bisect.bisect_right(up_to, words_of(seed, offset, emitted)[0] * up_to[-1] // 2**32)
    return ids[:emitted] + [drawn] + [-1] * (len(ids) - emitted), sum(accepts), emitted


def chains(rows: int, steps: int, width: int, seed: int = 0, sharpness: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Draft and target probabilities that resemble one another, and draft tokens drawn from the draft."""
    g = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(rows, steps + 1, width, generator=g)
    draft = torch.softmax(logits[:, :steps] + 0.7 * torch.randn(rows, steps, width, generator=g), -1)
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=g).view(rows, steps) if steps else torch.empty(rows, 0)
    return draft, ids.int(), torch.softmax(logits, -1)


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 40, 111])
def test_chains_are_those_of_exact_fractions(width: int, dtype: torch.dtype, with_draft: bool) -> None:
    draft, ids, target = chains(60, 4, width, seed=width, sharpness=3.0)
    draft, target = draft.to(dtype), target.to(dtype)
    seeds, offsets = torch.arange(60) * 7919, torch.arange(60) * 5 + 3
    got, accepted, emitted = chain_speculative_sampling(
        draft if with_draft else None, ids.long(), target, seed=seeds, offset=offsets
    )
    assert got.dtype == accepted.dtype == emitted.dtype == torch.int32
    assert emitted.unique().numel() > 2  # rows end at several places
    for b in range(60):
        rows = draft[b].double().tolist() if with_draft else None
        want = chain_by_hand(rows, ids[b].tolist(), target[b].double().tolist(), seeds[b].item(), offsets[b].item())
        assert (got[b].tolist(), accepted[b].item(), emitted[b].item()) == want, f"row {b}"


@pytest.mark.parametrize("width", [1, 111, 51200])
def test_without_draft_tokens_it_is_sampling_from_probs(width: int) -> None:
    target = distributions(5, width).unsqueeze(1)
    key = {"seed": torch.arange(5), "offset": 9}
    for draft in (None, torch.empty(5, 0, width)):
        ids, accepted, emitted = chain_speculative_sampling(draft, torch.empty(5, 0).int(), target, **key)
        assert torch.equal(ids[:, 0], sampling_from_probs(target[:, 0], **key))
        assert accepted.tolist() == emitted.tolist() == [0] * 5


def test_a_greedy_target_accepts_its_own_tokens_alone() -> None:
    target = softmax(torch.randn(8 * 4, 50, generator=torch.Generator().manual_seed(1)), 0.0).view(8, 4, 50)
    best = target.argmax(2)
    ids = best[:, :3].clone()
    for b in range(1, 8):
        for i in range(3):
            ids[b, i] = (ids[b, i] + (b >> i & 1)) % 50  # row b is wrong where its bits are 1
    firsts = [3, 0, 1, 0, 2, 0, 1, 0]
    got, accepted, emitted = chain_speculative_sampling(None, ids, target, seed=3)
    assert emitted.tolist() == firsts
    assert accepted.tolist() == [3 - b.bit_count() for b in range(8)]
    assert got.tolist() == [best[b, : n + 1].tolist() + [-1] * (3 - n) for b, n in enumerate(firsts)]


# ---- statistics ------------------------------------------------------------------------------------------------------


def draft_rows(kind: str, target: torch.Tensor) -> torch.Tensor:
    """A draft distribution [S, V] beside the target's [S + 1, V]."""
    first = target[:-1]
    if kind == "the same":
        return first.clone()
    if kind == "uniform":
        return torch.full_like(first, 1 / first.shape[1])
    if kind == "opposite":
        return (1 - first) / (1 - first).sum(-1, keepdim=True)
    if kind == "disjoint":
        return torch.nn.functional.one_hot(first.argmin(1), first.shape[1]).float()
    return torch.softmax(3 * first.log(), -1)  # sharper


def tokens_of(draft: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Draft tokens [N, S], each drawn from its row of draft [S, V]."""
    drawn = [
        sampling_from_probs(row.expand(len(offsets), -1), seed=100 + i, offset=offsets) for i, row in enumerate(draft)
    ]
    return torch.stack(drawn, 1)


@pytest.mark.parametrize("kind", ["the same", "uniform", "opposite", "disjoint", "sharper"])
@pytest.mark.parametrize("with_draft", [True, False])
def test_emitted_tokens_follow_the_target_whatever_the_draft_is(kind: str, with_draft: bool) -> None:
    width, steps = 12, 2
    target = distributions(steps + 1, width, sharpness=1.0)
    draft = draft_rows(kind, target)
    offsets = torch.arange(DRAWS)
    ids = torch.stack(
        [sampling_from_probs(q.expand(DRAWS, -1), seed=100 + i, offset=offsets) for i, q in enumerate(draft)], 1
    )
    got, accepted, emitted = chain_speculative_sampling(
        draft.expand(DRAWS, -1, -1) if with_draft else None, ids, target.expand(DRAWS, -1, -1), seed=7, offset=offsets
    )
    for position in range(steps + 1):
        reached = got[emitted >= position, position]
        if len(reached) > 500:  # the target of a position does not depend on the tokens before it here
            assert_follows(torch.bincount(reached, minlength=width).double(), target[position], list(range(width)))
    assert bool(((got == -1) == (torch.arange(steps + 1) > emitted[:, None])).all())
    first = (target[:steps] * draft).sum() if not with_draft else torch.minimum(target[:steps], draft).sum()
    rate, deviation = first.item() / steps, 4 * 0.5 / math.sqrt(DRAWS)
    assert abs(accepted.double().mean().item() / steps - rate) < deviation


def test_an_n_gram_draft_that_is_always_the_same_token_follows_the_target() -> None:
    target = distributions(1, 20, sharpness=1.0)
    rows = torch.stack((target[0], torch.full((20,), 0.05))).expand(DRAWS, -1, -1)
    likely = int(target.argmax())
    ids, _, emitted = chain_speculative_sampling(
        None, torch.full((DRAWS, 1), likely), rows, seed=9, offset=torch.arange(DRAWS)
    )
    assert_follows(torch.bincount(ids[:, 0], minlength=20).double(), target[0], list(range(20)))
    assert bool(((ids[:, 0] == likely) == (emitted == 1)).all())


def test_the_tokens_of_a_row_are_independent_of_one_another() -> None:
    """Pairs of the first two tokens follow the product of two targets."""
    target = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5], [0.25, 0.25, 0.5]])
    draft = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    offsets = torch.arange(2 * DRAWS)
    ids = torch.stack(
        [sampling_from_probs(q.expand(2 * DRAWS, -1), seed=i, offset=offsets) for i, q in enumerate(draft)], 1
    )
    got, _, emitted = chain_speculative_sampling(
        draft.expand(2 * DRAWS, -1, -1), ids, target.expand(2 * DRAWS, -1, -1), seed=77, offset=offsets
    )
    two = got[emitted >= 1]
    accepted_first = torch.minimum(target[0], draft[0])  # what is accepted at the first place
    row = (accepted_first[:, None] * target[1]).flatten()
    assert_follows(torch.bincount(3 * two[:, 0] + two[:, 1], minlength=9).double(), row, list(range(9)))


# ---- odd rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("with_draft", [True, False])
def test_an_id_outside_the_vocabulary_ends_the_draft(ids: torch.dtype, with_draft: bool) -> None:
    target = distributions(4, 30, sharpness=1.0)
    rows = target.expand(DRAWS, -1, -1)
    draft = rows[:, :3] if with_draft else None
    tokens = torch.tensor([[-1, 3, 30]], dtype=ids).expand(DRAWS, -1)
    got, accepted, emitted = chain_speculative_sampling(draft, tokens, rows, seed=1, offset=torch.arange(DRAWS))
    assert set(emitted.tolist()) == {0}
    assert set(accepted.tolist()) <= {0, 1}  # the token between them may pass its test
    assert_follows(torch.bincount(got[:, 0], minlength=30).double(), target[0], list(range(30)))
    assert bool((got[:, 1:] == -1).all())


def test_a_last_distribution_that_is_none_gives_0_and_false() -> None:
    nan, inf = math.nan, math.inf
    sure = [0.0, 1.0, 0.0]
    bad = [[nan] * 3, [0.0, nan, 0.5], [0.0, 0.0, 0.0], [inf, 0.0, 0.0], [-1.0, -2.0, 0.0]]
    for row in bad:
        target = torch.tensor([[sure, row, sure], [row, sure, sure], [sure, sure, row], [sure, sure, sure]])
        result = chain_speculative_sampling(None, torch.ones(4, 2).int(), target, seed=4, return_valid=True)
        ids, _, emitted, valid = result
        assert valid.dtype == torch.bool
        assert ids.tolist() == [[1, 0, -1], [0, -1, -1], [1, 1, 0], [1, 1, 1]]
        assert emitted.tolist() == [1, 0, 2, 2]
        assert valid.tolist() == [False, False, False, True]
    draft = torch.tensor([[[nan, nan, nan]], [[nan, 0.5, 0.5]]])
    target = torch.tensor([[sure, sure], [[0.0, 0.0, 1.0], sure]])
    ids, _, _, valid = chain_speculative_sampling(draft, torch.ones(2, 1).int(), target, seed=4, return_valid=True)
    assert ids.tolist() == [[0, -1]] * 2
    assert valid.tolist() == [False, False]


def test_where_rounding_leaves_no_residual_the_token_comes_from_the_target() -> None:
    draft = torch.tensor([[[0.5, 0.25, 0.25]]]).expand(2000, -1, -1)
    target = torch.stack((0.5 * draft[:, 0], draft[:, 0]), 1)  # half of the draft tokens are rejected
    ids, _, emitted, valid = chain_speculative_sampling(
        draft, torch.zeros(2000, 1).int(), target, seed=6, offset=torch.arange(2000), return_valid=True
    )
    assert valid.all()
    assert 800 < emitted.sum() < 1200
    counts = torch.bincount(ids[emitted == 0, 0], minlength=3).double()
    assert_follows(counts, target[0, 0], [0, 1, 2])


def test_tokens_without_target_mass_are_never_emitted() -> None:
    target = torch.tensor([[[0.0, 0.5, -3.0, 0.5], [1.0, 0.0, 0.0, 0.0]]]).expand(3000, -1, -1)
    draft = torch.tensor([[[0.5, 0.0, 0.25, 0.25]]]).expand(3000, -1, -1)
    tokens = torch.tensor([0, 2, 3])[torch.arange(3000) % 3, None]
    ids, _, emitted = chain_speculative_sampling(draft, tokens, target, seed=2, offset=torch.arange(3000))
    assert set(ids[:, 0].tolist()) <= {1, 3}
    assert bool((emitted[tokens[:, 0] != 3] == 0).all())
    assert bool((emitted[tokens[:, 0] == 3] == 1).all())


# ---- counts, rows, layouts -------------------------------------------------------------------------------------------


def test_counts_are_added_to_the_given_tensors() -> None:
    draft, ids, target = chains(9, 3, 20)
    _, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=1)
    assert 0 < emitted.sum() < accepted.sum()
    totals = torch.full((9,), 5, dtype=torch.int32), torch.full((9,), 7, dtype=torch.int32)
    for _ in range(2):
        _, first, second = chain_speculative_sampling(draft, ids, target, *totals, seed=1)
        assert first is totals[0]
        assert second is totals[1]
    assert torch.equal(totals[0], 5 + 2 * accepted)
    assert torch.equal(totals[1], 7 + 2 * emitted)
    new = chain_speculative_sampling(draft, ids, target, totals[0], seed=1)[2]
    assert torch.equal(new, emitted)


def test_a_row_depends_on_its_own_key_only_and_runs_repeat() -> None:
    draft, ids, target = chains(50, 3, 40)
    key = {"seed": torch.arange(50) * 3 - 9, "offset": torch.arange(50) + 2**40}
    full = assert_runs_repeat(chain_speculative_sampling, draft, ids, target, **key)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    mixed = chain_speculative_sampling(draft[order], ids[order], target[order], **{k: v[order] for k, v in key.items()})
    for got, want in zip(mixed, full, strict=True):
        assert torch.equal(got, want[order])
    alone = chain_speculative_sampling(draft[7:8], ids[7:8], target[7:8], seed=12, offset=2**40 + 7)
    for got, want in zip(alone, full, strict=True):
        assert torch.equal(got, want[7:8])


def test_a_negative_draft_probability_counts_as_0() -> None:
    """Then a token without a target probability is not accepted, and takes nothing from what is drawn."""
    draft, target = (
        torch.tensor([[[-0.5, -4.0]]]).expand(40, -1, -1),
        torch.tensor([[[0.0, 1.0]] * 2]).expand(40, -1, -1),
    )
    tokens = torch.zeros(40, 1, dtype=torch.int64)
    ids, accepted, emitted = chain_speculative_sampling(draft, tokens, target, seed=torch.arange(40))
    assert ids.tolist() == [[1, -1]] * 40
    assert not accepted.any()
    assert not emitted.any()


def test_a_generator_gives_each_row_an_offset_and_moves_on() -> None:
    draft, ids, target = (x[:1].expand(64, -1, -1) if x.ndim == 3 else x[:1].expand(64, -1) for x in chains(1, 2, 500))
    g = torch.Generator().manual_seed(3)
    first, second = (chain_speculative_sampling(draft, ids, target, generator=g)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert first.unique(dim=0).shape[0] > 16
    assert torch.equal(first, chain_speculative_sampling(draft, ids, target, generator=g.manual_seed(3))[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_same_and_are_not_written(dtype: torch.dtype) -> None:
    draft, ids, target = chains(4, 3, 33)
    draft, target = draft.to(dtype), target.to(dtype)
    want = chain_speculative_sampling(draft, ids, target, seed=torch.arange(4))
    views: list[Any] = []
    for x in (draft.transpose(0, 1), ids[None], target.transpose(0, 1)):
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 9)
        wide[..., 4:-5] = x
        views.append(wide[..., 4:-5])
    before = [v.clone() for v in views]
    draft_view, ids_view, target_view = views[0].transpose(0, 1), views[1][0], views[2].transpose(0, 1)
    got = chain_speculative_sampling(draft_view, ids_view, target_view, seed=torch.arange(4))
    assert_same_bits(got, want)
    for v, b in zip(views, before, strict=True):
        assert torch.equal(v, b)


@pytest.mark.parametrize("with_draft", [True, False])
def test_no_rows(with_draft: bool) -> None:
    draft = torch.empty(0, 2, 9) if with_draft else None
    result = chain_speculative_sampling(
        draft, torch.empty(0, 2).long(), torch.empty(0, 3, 9), seed=1, return_valid=True
    )
    assert [tuple(x.shape) for x in result] == [(0, 3), (0,), (0,), (0,)]
