"""topk_softmax against a loop over Python's sorted()."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_moe import reference, topk_softmax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a weight, in float32: exp of a difference up to 88 (2^-24 * 88 = 5.2e-6), a sum and two quotients.
WEIGHT_ERROR = 6e-6


def by_hand(
    gating: torch.Tensor, k: int, renormalize: bool = False, bias: list[float] | None = None
) -> tuple[list[list[float]], list[list[int]]]:
    """Weights and ids of each row: softmax in Python floats, NaN as -inf, ties to the lower id."""
    all_weights, all_ids = [], []
    for row in gating.double().tolist():
        row = [-math.inf if math.isnan(value) else value for value in row]
        top = max(row)
        shares = [1.0 if value == top else math.exp(value - top) for value in row]
        probabilities = [share / math.fsum(shares) for share in shares]
        keys = row if bias is None else [p + b for p, b in zip(probabilities, bias, strict=True)]
        ids = sorted(range(len(row)), key=lambda i: (-keys[i], i))[:k]
        weights = [probabilities[i] for i in ids]
        total = math.fsum(weights) if renormalize else 1.0
        all_weights.append([w / total for w in weights])
        all_ids.append(ids)
    return all_weights, all_ids


def assert_matches(gating: torch.Tensor, k: int, **options: object) -> None:
    weights, ids, counts = topk_softmax(gating, k, **options)  # type: ignore[arg-type]
    bias = options.get("bias")
    expected_weights, expected_ids = by_hand(
        gating,
        k,
        bool(options.get("renormalize")),
        None if bias is None else bias.double().tolist(),  # type: ignore[attr-defined]
    )
    assert (weights.dtype, ids.dtype, counts.dtype) == (torch.float32, torch.int32, torch.int32)
    assert ids.tolist() == expected_ids
    exact = torch.tensor(expected_weights, dtype=torch.float64)
    torch.testing.assert_close(weights.double(), exact, rtol=WEIGHT_ERROR, atol=1e-37)
    flat = [i for row in expected_ids for i in row]
    assert counts.tolist() == [flat.count(e) for e in range(gating.shape[1])]


def logits(tokens: int, experts: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    return (scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (60, 4), (64, 8), (256, 8), (512, 10), (7, 7)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_chooses_what_a_sort_chooses(dtype: torch.dtype, experts: int, k: int, renormalize: bool) -> None:
    assert_matches(logits(16, experts, dtype), k, renormalize=renormalize)


@pytest.mark.parametrize("tokens", [1, 3, 257, 740])
def test_any_number_of_tokens(tokens: int) -> None:
    assert_matches(logits(tokens, 64), 8)


@pytest.mark.parametrize("magnitude", [0.0, 1e-40, 1e4, 1e38])
def test_extreme_magnitudes(magnitude: float) -> None:
    assert_matches(logits(5, 16, scale=magnitude), 4, renormalize=True)


def test_ties_go_to_the_lower_id() -> None:
    gating = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [0.0, -0.0, 0.0, -0.0, 0.0]])
    assert topk_softmax(gating, 4)[1].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_experts_too_improbable_for_float32_are_still_chosen_by_their_logits() -> None:
    gating = torch.tensor([[-900.0, 0.0, -700.0, -800.0]])
    weights, ids, _ = topk_softmax(gating, 3)
    assert ids.tolist() == [[1, 2, 3]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_nan_counts_as_minus_infinity_and_ids_stay_distinct(k: int) -> None:
    nan, inf = math.nan, math.inf
    most = torch.finfo(torch.float32).max
    gating = torch.tensor(
        [[nan, 1.0, nan, 2.0, nan, nan], [nan] * 6, [-inf] * 6, [inf, 0.0, inf, -inf, nan, 1.0], [0.0, 1, 2, 3, 4, 5],
         [most, inf, -inf, -most, 0.0, -inf], [-inf, -most, -inf, nan, -most, -inf]]
    )  # fmt: skip
    assert_matches(gating, k, renormalize=True)
    _, ids, _ = topk_softmax(gating, k)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_a_bias_moves_the_selection_and_not_the_weights() -> None:
    gating = logits(16, 24)
    bias = torch.linspace(1, -1, 24)
    assert_matches(gating, 4, bias=bias)
    assert_matches(gating, 4, bias=bias, renormalize=True)
    probabilities = gating.double().softmax(1)
    weights, ids, _ = topk_softmax(gating, 4, bias=bias)
    torch.testing.assert_close(weights.double(), probabilities.gather(1, ids.long()), rtol=WEIGHT_ERROR, atol=0)
    assert ids.tolist() != topk_softmax(gating, 4)[1].tolist()


def test_chosen_experts_without_any_probability_keep_weights_of_zero() -> None:
    gating, bias = torch.tensor([[0.0, -900.0, -900.0]]), torch.tensor([0.0, 5.0, 5.0])
    weights, ids, _ = topk_softmax(gating, 2, bias=bias, renormalize=True)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_nan_in_the_bias_puts_its_expert_last() -> None:
    bias = torch.tensor([math.nan, 0.0, 0.0])
    assert topk_softmax(torch.tensor([[9.0, 1.0, 2.0]]), 3, bias=bias)[1].tolist() == [[2, 1, 0]]


@pytest.mark.parametrize("real", [0, 1, 5, 8, 100])
def test_rows_past_num_tokens_are_padding(real: int) -> None:
    gating = logits(8, 12)
    gating[min(real, 8) :] = math.nan
    weights, ids, counts = topk_softmax(gating, 3, num_tokens=torch.tensor([real], dtype=torch.int32))
    kept = topk_softmax(gating[:real], 3)
    assert torch.equal(weights[:real], kept[0])
    assert torch.equal(ids[:real], kept[1])
    assert torch.equal(counts, kept[2])
    assert bool((ids[real:] == -1).all())
    assert bool((weights[real:] == 0).all())


def test_a_long_row_does_not_depend_on_its_batch_either() -> None:
    gating = torch.randn(3, 33500, generator=torch.Generator().manual_seed(8))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # torch splits a sum to a single number across threads from 32768 terms on
        for renormalize in (False, True):
            weights, ids, _ = topk_softmax(gating, 33000, renormalize=renormalize)
            for t in range(3):
                alone = topk_softmax(gating[t : t + 1], 33000, renormalize=renormalize)
                assert torch.equal(alone[0][0], weights[t])
                assert torch.equal(alone[1][0], ids[t])
    finally:
        torch.set_num_threads(threads)


def test_a_row_does_not_depend_on_its_batch() -> None:
    gating = logits(257, 60)
    weights, ids, _ = topk_softmax(gating, 8, renormalize=True)
    for row in (0, 100, 256):
        alone = topk_softmax(gating[row : row + 1], 8, renormalize=True)
        assert torch.equal(weights[row], alone[0][0])
        assert torch.equal(ids[row], alone[1][0])


def test_views_give_the_same_and_are_not_written() -> None:
    buffer = logits(12, 100)
    before = buffer.clone()
    for got, expected in zip(
        topk_softmax(buffer[1::3, 20:84], 6), topk_softmax(buffer[1::3, 20:84].clone(), 6), strict=True
    ):
        assert torch.equal(got, expected)
        assert got.is_contiguous()
    assert torch.equal(buffer, before)


def test_no_tokens() -> None:
    weights, ids, counts = topk_softmax(torch.empty(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)
    assert counts.tolist() == [0] * 8


def test_the_reference_reads_nothing_on_the_host() -> None:
    with FakeTensorMode():  # a read of a value would raise here
        number = torch.empty(1, dtype=torch.int32)
        weights, ids, counts = reference.topk_softmax(torch.empty(4, 8), 2, True, torch.empty(8), number)
    assert (weights.shape, ids.shape, counts.shape) == ((4, 2), (4, 2), (8,))
