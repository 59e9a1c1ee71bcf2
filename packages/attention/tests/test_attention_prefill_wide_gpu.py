"""Prefill of heads of more than 256 dims on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from decode_oracle import same_bits
from prefill_gpu import (
    DTYPES,
    LENGTHS,
    NAMES,
    each_kernel,  # noqa: F401
    ints,
    launches_of,
    packed,
    random,
    scattered,
    scores,
    starts_of,
)
from prefill_oracle import assert_exact, exact_attention, of_sequence

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, prefill
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]
SIZE = 512


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("page", [7, 16, 64, 256])
def test_paged_caches_are_those_of_float64(page, holes, name):
    lengths, queries = [300, 0, 54, -1, 1000, 17, 600], 70
    caches, table, held = scattered(lengths, page, 2, SIZE, torch.bfloat16, holes)
    q = random(len(lengths), queries, 4, SIZE, dtype=torch.bfloat16)
    how = scores(len(lengths), 4)[name]
    given = {"block_table": table, **how, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(lengths), **given)
    starts = starts_of([queries] * len(lengths))
    packed_out, packed_lse = flash_attn_varlen_func(
        q.flatten(0, 1), *caches, starts, None, queries, 1000, seqused_k=ints(lengths).clamp(min=0), **given
    )
    for b, (k, v, exists) in enumerate(held):
        exact = exact_attention(q[b], k, v, exists=exists, **of_sequence(how, b))
        assert_exact(out[b], lse[b], exact)
        rows = slice(b * queries, (b + 1) * queries)
        assert_exact(packed_out[rows], packed_lse[:, rows], exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [(3, 1), (8, 1), (5, 5)], ids=str)
def test_query_heads_share_keys(heads, name):
    torch.manual_seed(0)
    q = random(2, 200, heads[0], SIZE, dtype=torch.bfloat16)
    k, v = (random(2, 333, heads[1], SIZE, dtype=torch.bfloat16) for _ in range(2))
    how = scores(2, heads[0])[name]
    out, lse = flash_attn_func(q, k, v, **how, return_lse=True)
    for b in range(2):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b], **of_sequence(how, b)))


@pytest.mark.parametrize("name", NAMES)
def test_few_queries_over_many_keys_are_those_of_float64_whatever_the_batch(name):
    torch.manual_seed(0)
    lengths, queries = [5000, 0, 300, 2100], 40
    caches, table, held = scattered(lengths, 16, 2, SIZE, torch.bfloat16, False)
    q, how = random(4, queries, 4, SIZE, dtype=torch.bfloat16), scores(4, 4)[name] | {"return_lse": True}
    given = {"cache_seqlens": ints(lengths), "block_table": table, **how}
    out, lse = flash_attn_with_kvcache(q, *caches, **given)
    for b, (k, v, _) in enumerate(held):
        of_sequence_b = {key: x for key, x in of_sequence(how, b).items() if key != "return_lse"}
        assert_exact(out[b], lse[b], exact_attention(q[b], k, v, **of_sequence_b))
        one = slice(b, b + 1)
        columns = -(-max(1, lengths[b]) // 16)
        alone = given | {"cache_seqlens": ints(lengths[one]), "block_table": table[one, :columns].contiguous()}
        if isinstance(how.get("prefix_len"), torch.Tensor):
            alone["prefix_len"] = how["prefix_len"][one]
        assert same_bits(flash_attn_with_kvcache(q[one], *caches, **alone), (out[one], lse[one]))


@pytest.mark.parametrize("name", ["causal", "window", "prefixes and a window", "soft cap"])
def test_a_sequence_alone_gives_the_same_bits(name):
    q, k, v, starts_q, starts_k = packed(SIZE, torch.bfloat16)
    how = scores(len(LENGTHS), 4)[name]
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 2048, 2048, **how, return_lse=True)
    for b in (2, 3, 4, 8):
        queries, keys = (slice(int(starts[b]), int(starts[b + 1])) for starts in (starts_q, starts_k))
        count = queries.stop - queries.start
        starts = ints([0, count]), ints([0, keys.stop - keys.start])
        how_alone = how | {"prefix_len": how["prefix_len"][b : b + 1]} if "prefix_len" in how else how
        given = q[queries].clone(), k[keys].clone(), v[keys].clone(), *starts, count, 10**6
        assert same_bits(
            flash_attn_varlen_func(*given, **how_alone, return_lse=True), (out[queries], lse[:, queries].contiguous())
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_hundred_sequences_are_those_of_a_loop(dtype):
    torch.manual_seed(0)
    lengths = torch.randint(1, 300, (300,)).tolist()
    starts = starts_of(lengths)
    q, k, v = (random(sum(lengths), 2, SIZE, dtype=dtype) for _ in range(3))
    out = flash_attn_varlen_func(q, k, v, starts, starts, 4000, 4000, causal=True)
    for b in range(0, 300, 7):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        want = flash_attn_func(*(x[rows][None].contiguous() for x in (q, k, v)), causal=True)[0]
        assert torch.equal(out[rows], want)


@pytest.mark.parametrize("queries", [17, 130])
def test_a_hundred_thousand_keys(queries):
    lengths = [100_000, 99]
    caches, table, held = scattered(lengths, 16, 1, SIZE, torch.bfloat16, False)
    q = random(2, queries, 2, SIZE, dtype=torch.bfloat16)
    given = {"cache_seqlens": ints(lengths), "block_table": table, "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, **given)
    for b, (k, v, _) in enumerate(held):
        assert_exact(out[b], lse[b], exact_attention(q[b], k, v, causal=True))


def test_a_replayed_graph_sees_other_lengths_tables_and_keys():
    def call(q, k_cache, v_cache, lengths, table):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, return_lse=True
        )

    def inputs(seed, lengths):
        caches, table, _ = scattered([700, 700], 16, 2, SIZE, torch.bfloat16, False)
        torch.manual_seed(seed)
        return [random(2, 90, 4, SIZE, dtype=torch.bfloat16), *caches, ints(lengths), table.roll(seed, 0)]

    args, fresh = inputs(1, [700, 3]), inputs(2, [64, 513])
    got = graph_replay(call, args, fresh)
    assert same_bits(tuple(got), tuple(call(*fresh)))


@pytest.mark.parametrize("size", [264, 512])
def test_keys_that_tma_loads_are_multiplied_by_wgmma_on_hopper(monkeypatch, size):
    launches = launches_of(monkeypatch, prefill)
    q, k, v = (random(1, 100, 2, size, dtype=torch.bfloat16) for _ in range(3))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert ["hopper" in name for name in launches.taken()] == [prefill.USE_HOPPER]
    assert_exact(out[0], lse[0], exact_attention(q[0], k[0], v[0], causal=True))
