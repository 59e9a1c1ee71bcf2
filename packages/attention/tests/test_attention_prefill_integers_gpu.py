"""Prefill over INT8 and INT4 caches on a GPU: float64 over what they hold, rounded to the queries' dtype."""

from __future__ import annotations

import pytest
import torch
from decode_oracle import Call, made, same_bits
from prefill_gpu import NAMES, each_kernel, scores  # noqa: F401
from prefill_oracle import assert_exact_over_cache

from kestrel_attention import prefill_scratch
from kestrel_runtime import backend
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

KINDS = ["int8", "int4"]
LENGTHS = (300, 0, 54, -1, 1000, 17, 128, 64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_shapes_the_scores(kind, name):
    call, how = made(kind, 4, 2, 64, 16, LENGTHS, queries=70), scores(len(LENGTHS), 4)[name]
    assert_exact_over_cache(call, call.run(**how), how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128), (4, 1, 256), (2, 2, 192)])
@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_and_sizes(kind, page, heads, kv_heads, size, dtype):
    if kind == "int4" and page != 64:
        pytest.skip("INT4 pages have 64 slots")
    call = made(kind, heads, kv_heads, size, page, LENGTHS, queries=130, dtype=dtype)
    assert_exact_over_cache(call, call.run(causal=True), {"causal": True})


@pytest.mark.parametrize("queries", [17, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_few_queries_with_sinks(kind, queries):
    """Fewer ones are decode: test_attention_decode_sinks_gpu.py."""
    call, how = made(kind, 4, 2, 128, 16, LENGTHS, queries), scores(len(LENGTHS), 4)["sinks"]
    assert_exact_over_cache(call, call.run(**how), how)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_sequences_give_the_bits_of_one(kind, paged, monkeypatch):
    """Scratch memory for two sequences at a time, of five."""
    call = made(kind, 4, 2, 64, 64, (300, 200, 7, 64, 1), queries=40, extra_keys=40)
    if not paged:  # one block for each sequence
        call.table, call.lengths = None, call.lengths.clamp(max=64)
        call.caches = {name: x if name in ("k_tail", "seq_ids") else x[:5] for name, x in call.caches.items()}
        for name, x in call.caches.items():
            if x.is_floating_point():
                call.caches[name] = x.float().nan_to_num(0.5).to(x.dtype)
    how = scores(5, 4)["prefixes and a window"]
    want = call.run(**how)
    assert_exact_over_cache(call, want, how)
    of_sequence_bytes = (
        4 * call.caches["k_cache"].shape[1] * 2 * 64 * (1 if call.table is None else call.table.shape[1])
    )
    monkeypatch.setattr(prefill_scratch, "SCRATCH_BYTES", 2 * of_sequence_bytes)
    assert same_bits(call.run(**how, num_splits=1), want)  # another form of call, so another launch


@pytest.mark.parametrize("queries", [17, 64, 150])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_are_appended_and_attended_to(kind, dtype, queries):
    call = made(kind, 8, 2, 64, 16, (0, 54, 62, -1, 300, 64), queries, dtype, extra_keys=queries)
    k, v = (torch.randn(6, queries, 2, 64, device="cuda").to(dtype) for _ in range(2))
    other = call.clone()
    with backend("reference"):
        other.run(k, v, causal=True)
    got = call.run(k, v, causal=True)
    if kind == "int4":  # other rows of the tail may hold keys of pages that are complete
        for b, length in enumerate(call.lengths.tolist()):
            unused = slice((length + queries) % 64 if length >= 0 else 0, None)
            for caches in (call.caches, other.caches):
                caches["k_tail"][int(caches["seq_ids"][b]), unused] = 0
    assert same_bits(tuple(call.caches.values()), tuple(other.caches.values()))
    call.lengths = torch.where(call.lengths >= 0, call.lengths + queries, call.lengths)
    assert same_bits(call.run(causal=True), got)
    assert_exact_over_cache(call, got, {"causal": True})


def test_a_sequence_without_a_tail_is_padding():
    call = made("int4", 4, 2, 64, 64, (100, 70, 5), queries=30)
    call.caches["seq_ids"][1] = -1
    out, lse = call.run(causal=True)
    assert not out[1].any()
    assert bool(lse[1].isneginf().all())
    assert_exact_over_cache(call, (out, lse), {"causal": True})


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_do_not_exist_are_not_seen(kind):
    call = made(kind, 4, 2, 64, 64, (300, 100, 64), queries=30)
    assert call.table is not None
    call.table[0, 1], call.table[1, 0], call.table[2, 0] = -1, 10**6, -7
    assert_exact_over_cache(call, call.run(), {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_graph_sees_other_lengths_and_contents(kind):
    calls = [
        made(kind, 4, 2, 64, 64, lengths, 40, seed=seed) for seed, lengths in ((1, (600, 3, 64)), (2, (9, 600, 70)))
    ]
    names = list(calls[0].caches)

    def run(q, lengths, table, *caches):
        return Call(kind, q, dict(zip(names, caches, strict=True)), table, lengths).run(causal=True)

    args, fresh = ([c.q, c.lengths, c.table, *c.caches.values()] for c in calls)
    got = graph_replay(run, args, fresh)
    assert same_bits(tuple(got), tuple(run(*fresh)))
