"""Split-KV of packed sequences: what the kernels and the combine kernel are given."""

from __future__ import annotations

import pytest
import torch
from prefill_calls import Recorder, dense, half, ints, packed, recording


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch, "sm90a")


@pytest.mark.parametrize(
    ("queries", "max_queries", "expected"),
    [
        ([40, 0, 20], 40, {"num_splits": 4, "split_blocks": 1, "partials_of_row": 4, "partials_of_sequence": 0}),
        ([300, 20], 300, {"num_splits": 4, "split_blocks": 3, "partials_of_row": 4, "partials_of_sequence": 0}),
        ([700, 640], 700, {"num_splits": 4, "split_blocks": 6, "partials_of_row": 4, "partials_of_sequence": 0}),
        ([5000, 4000], 5000, {"num_splits": 4, "split_blocks": 33, "partials_of_row": 0, "partials_of_sequence": 8448}),
    ],
)
def test_splits_of_packed_sequences_follow_their_own_lengths(hopper, queries, max_queries, expected):
    """Scratch memory is that of all rows, or that of the most rows of a sequence that is split."""
    q, k = half(sum(queries), 2, 64), half(2000 * len(queries), 1, 64)
    starts_q, starts_k = ints(0, *torch.tensor(queries).cumsum(0)), ints(*range(0, len(k) + 1, 2000))
    starts = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    packed(q=q, k=k, v=k.clone(), **starts, max_seqlen_q=max_queries, max_seqlen_k=2000)
    (_, attend), (_, combine) = hopper.calls
    assert attend["split_limit"] == 0
    assert {field: attend[field] for field in expected} == expected
    rows = attend["partials_of_row"] * len(q) + attend["partials_of_sequence"] * len(queries)
    assert attend["mPartialLse"].numel() == 2 * rows
    assert attend["mNumSplits"].numel() == len(queries) * 2 * expected["split_blocks"]
    assert combine["mStartQ"] is attend["mStartQ"]


@pytest.mark.parametrize(
    ("queries", "heads"),
    [([1] * 60 + [4000], 2), ([40] * 20 + [700], 6), ([300, 20], 2), ([5000, 4000], 16), ([128] * 30 + [129], 1)],
    ids=["many-short", "short", "two", "long", "blocks"],
)
def test_scratch_memory_of_splits_has_at_most_16_copies_of_the_result(hopper, queries, heads):
    q, k = half(sum(queries), heads, 64), half(4000, 1, 64)
    starts_q, starts_k = ints(0, *torch.tensor(queries).cumsum(0)), ints(0, *[4000] * len(queries))
    starts = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    packed(q=q, k=k, v=k.clone(), **starts, max_seqlen_q=max(queries), max_seqlen_k=4000)
    *_, (_, attend), _ = hopper.calls
    assert attend["num_splits"] > 1
    assert attend["mPartialOut"].numel() <= 16 * q.numel()


@pytest.mark.parametrize("queries", [[1, 40], [300, 20], [384, 129, 5], [5000, 4000]])
def test_kernels_divide_the_indices_of_first_splits_by_multiplication(hopper, queries):
    """Works of a section: those of its heads, of as many blocks of 128 rows as a sequence may have."""
    q, k = half(sum(queries), 6, 64), half(2000 * len(queries), 3, 64)
    starts_q, starts_k = ints(0, *torch.tensor(queries).cumsum(0)), ints(*range(0, len(k) + 1, 2000))
    packed(
        q=q,
        k=k,
        v=k.clone(),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=max(queries),
        max_seqlen_k=2000,
    )
    attend = hopper.calls[0][1]
    section = attend["section_heads"] * max(-(-max(queries) // 128), attend["split_blocks"])
    for divisor, name in ((section, "section"), (attend["section_heads"], "head")):
        for index in (0, divisor - 1, divisor, 1000 * divisor - 1, 2**31 - 1):
            found = index * attend[f"{name}_multiplier"] >> attend[f"{name}_shift"]
            assert found == index // divisor, (name, index)


@pytest.mark.parametrize("batch", [1, 3])
def test_packed_sequences_of_equal_lengths_are_split_as_dense_ones(hopper, batch):
    starts = {
        "cu_seqlens_q": ints(*range(0, 200 * batch + 1, 200)),
        "cu_seqlens_k": ints(*range(0, 2000 * batch + 1, 2000)),
    }
    q, k = half(batch, 200, 2, 64), half(batch, 2000, 1, 64)
    given = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": k.flatten(0, 1).clone()}
    packed(**given, **starts, max_seqlen_q=200, max_seqlen_k=2000)
    dense(q=q, k=k, v=k.clone())
    fields = ("num_splits", "split_limit", "split_blocks", "partials_of_row", "partials_of_sequence")
    (first, second) = ([given[field] for field in fields] for name, given in hopper.calls if "combine" not in name)
    assert first == second
    assert first[0] > 1
