"""Prefill of e4m3 queries whose values are transposed first: which calls, and what the kernels are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_calls import Recorder, half, ints, packed, recording

from kestrel_attention import prefill_transposed


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch, "sm90a")


def call(queries: int = 8192, page: int = 16, size: int = 128, **changes: Any) -> Any:
    """Two sequences of equal queries, over five pages each; four heads and two KV heads."""
    given: dict[str, Any] = {"q": half(2 * queries, 4, size).to(torch.float8_e4m3fn), "causal": True}
    given |= {name: half(12, page, 2, size).to(torch.float8_e4m3fn) for name in ("k", "v")}
    given |= {"cu_seqlens_q": ints(0, queries, 2 * queries), "cu_seqlens_k": None, "max_seqlen_q": queries}
    given |= {"max_seqlen_k": 5 * page, "seqused_k": ints(3, 5 * page), "block_table": torch.zeros(2, 5).int()}
    return packed(**given | changes)


@pytest.mark.parametrize(("page", "queries"), [(1, 2048), (16, 8192), (40, 2048)])
def test_keys_are_put_in_order_and_values_transposed_first(recorder, page, queries):
    table = torch.zeros(2, 5).int()
    call(queries, page, block_table=table)
    (first, before), (name, given) = recorder.calls
    assert (first, name) == ("prefill_transpose_d128", "prefill_bf16_e4m3_hopper_d128_boxes_large_transposed")
    tokens = -(-5 * page // 128) * 128
    assert before["outK"].shape == before["outV"].shape == given["mK"].shape == (2, tokens, 2, 128)
    assert before["outK"].stride() == (2 * tokens * 128, 128, tokens * 128, 1)
    for out, x in (("outK", "mK"), ("outV", "mV"), ("outTable", "mTable")):
        assert given[x].data_ptr() == before[out].data_ptr()
    assert before["mTable"].data_ptr() == table.data_ptr()
    assert (before["has_block_table"], given["has_block_table"], given["max_keys"]) == (1, 2, 5 * page)
    assert (before["mK"].shape, before["mK"].dtype) == ((12, page, 2, 128), torch.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"queries": 8191},
        {"queries": 2047, "page": 8},
        {"size": 64},
        {"window_left": 64},
        {"q": half(16384, 4, 128)},
        {"k": half(80, 2, 128).to(torch.float8_e4m3fn), "v": half(80, 2, 128).to(torch.float8_e4m3fn)}
        | {"block_table": None, "seqused_k": None, "cu_seqlens_k": ints(0, 50, 80)},
    ],
    ids=[
        "few queries",
        "few over small pages",
        "small heads",
        "a window",
        "bf16 queries",
        "packed keys",
    ],
)
def test_other_calls_read_values_in_place(recorder, changes):
    if "q" in changes:
        changes = changes | {name: half(12, 16, 2, 128) for name in ("k", "v")}
    call(**changes)
    assert [name for name, _ in recorder.calls if "transpose" in name] == []


def test_scratch_memory_is_for_the_most_keys_however_wide_the_block_table(recorder, monkeypatch):
    monkeypatch.setattr(prefill_transposed, "SCRATCH_BYTES", 2 * 2 * 128 * 2 * 128)
    call(block_table=torch.zeros(2, 1000).int())
    (first, before), (_, given) = recorder.calls
    assert first == "prefill_transpose_d128"
    assert before["outK"].shape == before["outV"].shape == (2, 128, 2, 128)
    assert before["outTable"].shape == given["mTable"].shape == (2, 1000)
    assert before["max_keys"] == given["max_keys"] == 80


def test_a_call_of_no_keys_needs_no_scratch_memory(recorder):
    call(max_seqlen_k=0)
    assert [name for name, _ in recorder.calls if "transpose" in name] == []


def test_scratch_memory_is_bounded(recorder, monkeypatch):
    monkeypatch.setattr(prefill_transposed, "SCRATCH_BYTES", 2 * 2 * 128 * 2 * 128 - 1)
    call()
    assert [name for name, _ in recorder.calls if "transpose" in name] == []
