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


@pytest.mark.parametrize("more", [1, 340, 5000])
def test_padded_queries_do_not_hide_that_lengths_differ(hopper, more):
    """Splits follow each sequence's own lengths where there are more rows than its batch may hold."""
    q, k = half(2 * 700 + more, 2, 64), half(4000, 1, 64)
    starts = {"cu_seqlens_q": ints(0, 700, 740), "cu_seqlens_k": ints(0, 2000, 4000)}
    packed(q=q, k=k, v=k.clone(), **starts, max_seqlen_q=700, max_seqlen_k=2000)
    (_, attend), _ = hopper.calls
    expected = {"num_splits": 4, "split_blocks": 6, "partials_of_row": 0, "split_limit": 0}
    assert {field: attend[field] for field in expected} == expected
    assert attend["partials_of_sequence"] >= max(s * min(700, 128 * b) for b, s in split_sizes(2, 6, 4).items())
    assert attend["mPartialLse"].numel() == 2 * 2 * attend["partials_of_sequence"]
    assert attend["mNumSplits"].numel() == 2 * 2 * 6


def split_sizes(heads: int, blocks: int, most: int) -> dict[int, int]:
    """The splits of sequences of up to so many blocks of rows, of which ``most`` have keys."""
    return {n: min(most, max(1, 132 // (heads * n))) for n in range(1, blocks + 1)}


@pytest.mark.parametrize("more", [130, 5000, 10**5])
def test_a_list_has_room_for_all_works_of_padded_queries(hopper, more):
    """However the queries are shared out: sequences of up to max_seqlen_q each, whose keys may be split."""
    batch, longest = 40, 300
    q, k = half(batch * longest + more, 16, 8), half(2000, 4, 8)
    starts = {"cu_seqlens_q": ints(*[0] * (batch + 1)), "cu_seqlens_k": ints(*[0] * batch, 2000)}
    packed(q=q, k=k, v=k.clone(), **starts, max_seqlen_q=longest, max_seqlen_k=2000)
    (name, works), *_ = hopper.calls
    assert name == "prefill_works"
    most = max(blocks * splits for blocks, splits in split_sizes(16, 3, 4).items())
    assert works["listed_works"] >= batch * most * works["sections"]
    assert works["listed_blocks"] == batch * 3


# -- lists of works ---------------------------------------------------------------------------------------------------


def ragged(queries: list[int], heads: int, kv_heads: int, size: int = 64, **changes) -> None:
    q, k = half(sum(queries), heads, size), half(sum(queries), kv_heads, size)
    starts = ints(0, *torch.tensor(queries).cumsum(0))
    given = {"q": q, "k": k, "v": k.clone(), "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    packed(**given | {"max_seqlen_q": max(queries), "max_seqlen_k": max(queries)} | changes)


@pytest.mark.parametrize(
    ("queries", "listed"),
    [
        ([2000] + [10] * 99, True),
        ([512] * 50 + [511], False),  # all but as long as the longest
        ([10] * 100, False),  # one block of rows each
        ([300, 20], False),  # too few works to matter
    ],
    ids=["one-long", "equal", "short", "two"],
)
def test_works_are_listed_where_most_sequences_are_far_shorter_than_the_longest(hopper, queries, listed):
    ragged(queries, 4, 4)
    names = [name for name, _ in hopper.calls]
    assert ("prefill_works" in names) is listed
    given = hopper.calls[names.index(next(name for name in names if "hopper" in name))][1]
    assert (given["listed_works"] > 0) is listed
    if listed:
        assert names[0] == "prefill_works"
        first = hopper.calls[0][1]
        assert first["mWorks"] is given["mWorks"]
        assert first["mStartQ"] is given["mStartQ"]
        assert (given["max_blocks"], given["has_counter"]) == (132, 1)
        assert (first["block_rows"], first["key_tile"], first["sections"]) == (128, 128, 1)
        assert first["mWorks"].numel() == 8 + 2 * (first["listed_works"] + first["listed_blocks"])
        assert first["listed_works"] >= sum(-(-n // 128) for n in queries)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shift"), [(4, 4, 0), (8, 4, 1), (12, 2, 1), (16, 4, 2), (16, 2, 2), (15, 5, 0)]
)
def test_up_to_four_heads_of_a_kv_head_share_works(hopper, heads, kv_heads, shift):
    ragged([2000] + [10] * 99, heads, kv_heads)
    given = next(given for name, given in hopper.calls if "hopper" in name)
    assert given["pack_shift"] == shift
    assert next(given for name, given in hopper.calls if name == "prefill_works")["pack_shift"] == shift


def test_heads_of_short_sequences_share_works_even_without_a_long_one(hopper):
    ragged([1, 2, 3] * 100, 16, 4)
    assert [name for name, _ in hopper.calls] == ["prefill_works", "prefill_bf16_same_hopper_d64_boxes"]


def test_queries_with_a_scale_for_each_head_share_no_works(hopper):
    codes = {"q": half(1990 + 2 * 99, 16, 64), "k": half(2188, 4, 64), "v": half(2188, 4, 64)}
    scales = {"q_scale": torch.ones(16)}
    ragged([1990] + [2] * 99, 16, 4, **{name: x.to(torch.float8_e4m3fn) for name, x in codes.items()}, **scales)
    assert next(given for name, given in hopper.calls if "hopper" in name)["pack_shift"] == 0


@pytest.mark.parametrize("size", [64, 128, 512])
def test_the_portable_kernel_takes_a_list_with_its_own_blocks_of_rows(monkeypatch, size):
    recorder = recording(monkeypatch, "sm80")
    ragged([2000] + [10] * 199, 8, 8, size)
    (name, first), (_, given) = recorder.calls
    assert name == "prefill_works"
    assert (given["listed_works"], given["pack_shift"]) == (first["listed_works"], 0)
    assert first["block_rows"] == (64 if size == 512 else 128)
