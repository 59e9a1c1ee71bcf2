"""Plans and launches of prefill of heads of more than 256 dims: which kernel, how many splits, and what is copied."""

from __future__ import annotations

from typing import Any

import pytest
from prefill_calls import cached, dense, half, recording

from kestrel_attention.kernels.constants import SPLIT_ROWS
from kestrel_attention.prefill_plan import PrefillProblem, plan_prefill


def plan_of(**how: Any) -> Any:
    usual = {"batch": 1, "max_queries": 4096, "max_keys": 4096, "heads": 16, "kv_heads": 2, "head_dim": 512}
    return plan_prefill(PrefillProblem(**usual | {"page_size": 16, "dtype": "bf16", "hopper": True} | how))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"has_boxes": True}, "prefill_bf16_same_hopper_d512_boxes"),
        ({"has_boxes": True, "head_dim": 264, "dtype": "fp16"}, "prefill_fp16_same_hopper_d512_boxes"),
        ({"has_boxes": True, "has_block_table": True, "page_size": 64}, "prefill_bf16_same_hopper_d512_boxes"),
        ({"has_boxes": True, "in_order": True, "has_block_table": True}, "prefill_bf16_same_hopper_d512_boxes"),
        ({"has_boxes": True, "has_block_table": True, "page_size": 24}, "prefill_bf16_same_d512"),
        ({"has_boxes": False}, "prefill_bf16_same_d512"),
        ({"has_boxes": True, "hopper": False}, "prefill_bf16_same_d512"),
        ({"has_boxes": True, "head_dim": 256}, "prefill_bf16_same_hopper_d256_boxes"),
        ({"has_boxes": False, "head_dim": 256}, "prefill_bf16_same_hopper_d256"),
    ],
)
def test_keys_that_tma_loads_take_the_kernel_of_hopper(how, expected):
    assert plan_of(**how).variant.name == expected


@pytest.mark.parametrize(
    ("queries", "heads", "limit"), [(4096, 16, 1), (512, 16, 1), (128, 16, 4), (128, 66, 1), (17, 2, 16), (200, 4, 8)]
)
@pytest.mark.parametrize("packs", [False, True])
def test_two_thread_blocks_of_a_block_of_rows_leave_room_for_half_as_many_splits(queries, heads, limit, packs):
    how = {"max_queries": queries, "max_keys": 8192, "heads": heads, "has_boxes": True}
    if packs:
        how |= {"packed_queries": True, "batch": 2, "total_queries": 2 * queries}
    scalars = plan_of(**how).scalars
    assert scalars.split_limit == limit
    assert scalars.num_splits == limit


def test_a_list_of_works_counts_the_thread_blocks_of_the_kernel():
    how = {"packed_queries": True, "batch": 300, "total_queries": 3000, "has_boxes": True, "max_queries": 2000}
    plan = plan_of(**how)
    assert plan.scalars.listed_works > 0
    assert (plan.works.block_rows, plan.works.heads, plan.scalars.pack_shift) == (SPLIT_ROWS, 32, 0)


@pytest.mark.parametrize(("page", "on_hopper"), [(1, False), (8, False), (16, True), (48, True)])
def test_caches_take_the_kernel_of_hopper_where_tma_can_load_their_pages(monkeypatch, page, on_hopper):
    found = recording(monkeypatch, "sm90a")
    given = {name: half(12, page, 2, 512) for name in ("k_cache", "v_cache")}
    cached(q=half(2, 64, 4, 512), **given)
    assert ["hopper" in name for name, _ in found.calls if not name.startswith("prefill_combine")] == [on_hopper]


def test_dense_keys_are_not_copied(monkeypatch):
    found = recording(monkeypatch, "sm90a")
    dense(q=half(2, 40, 4, 512), k=half(2, 50, 2, 512), v=half(2, 50, 2, 512))
    assert [name for name, _ in found.calls] == ["prefill_bf16_same_hopper_d512_boxes"]
