"""Prefill on a GPU: dense, packed and over caches, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from bounds import assert_lse_alike, assert_prefill_alike
from decode_oracle import same_bits
from prefill_gpu import (
    DTYPES,
    LENGTHS,
    NAMES,
    SIZES,
    SPREADS,
    each_kernel,  # noqa: F401
    ints,
    packed,
    random,
    scattered,
    scores,
    spread_scores,
    starts_of,
)
from prefill_oracle import assert_exact, exact_attention, of_sequence

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from kestrel_runtime import backend
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


# -- dense and packed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 256, 512])
def test_packed_sequences_are_those_of_float64(size, dtype, name):
    q, k, v, starts_q, starts_k = packed(size, dtype)
    how = scores(len(LENGTHS), 4)[name]
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 2048, 2048, **how, return_lse=True)
    for b in range(len(LENGTHS)):
        queries, keys = (slice(int(starts[b]), int(starts[b + 1])) for starts in (starts_q, starts_k))
        exact = exact_attention(q[queries], k[keys], v[keys], **of_sequence(how, b))
        assert_exact(out[queries], lse[:, queries], exact)


@pytest.mark.parametrize("name", ["full", "causal", "prefix", "soft cap"])
@pytest.mark.parametrize("shape", [(200, 300), (300, 200), (729, 729), (1, 1), (65, 64), (64, 0)], ids=str)
@pytest.mark.parametrize("size", [8, 40, *SIZES])
def test_dense_batches_are_those_of_float64(size, shape, name):
    torch.manual_seed(0)
    queries, keys = shape
    q = random(2, queries, 4, size, dtype=torch.bfloat16)
    k, v = (random(2, keys, 2, size, dtype=torch.bfloat16) for _ in range(2))
    how = scores(2, 4)[name]
    out, lse = flash_attn_func(q, k, v, **how, return_lse=True)
    for b in range(2):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b], **of_sequence(how, b)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_that_of_torch(size, dtype, causal):
    torch.manual_seed(0)
    q, k, v = (random(1, 2048, 4, size, dtype=dtype) for _ in range(3))
    exact = exact_attention(q[0], k[0], v[0], causal=causal).out
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
    ).transpose(1, 2)
    ours, theirs = ((x[0].double() - exact).abs() for x in (flash_attn_func(q, k, v, causal=causal), by_torch))
    assert float(ours.mean()) <= 1.1 * float(theirs.mean())
    assert float(ours.max()) <= 1.1 * float(theirs.max()) + float(exact.abs().max()) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (32, 1), (16, 16), (5, 5), (12, 4)], ids=str)
def test_query_heads_share_keys(heads):
    torch.manual_seed(0)
    q = random(2, 150, heads[0], 64, dtype=torch.bfloat16)
    k, v = (random(2, 150, heads[1], 64, dtype=torch.bfloat16) for _ in range(2))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    for b in range(2):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b], causal=True))


@pytest.mark.parametrize("size", [72, 128])
def test_slices_of_a_fused_qkv_give_the_bits_of_contiguous_tensors(size):
    torch.manual_seed(0)
    qkv = random(700, 8, size, dtype=torch.bfloat16)  # 4 + 2 + 2 heads
    q, k, v = qkv.split((4, 2, 2), dim=1)
    starts = ints([0, 300, 700])
    want = flash_attn_varlen_func(*(x.contiguous() for x in (q, k, v)), starts, starts, 400, 400, return_lse=True)
    assert same_bits(flash_attn_varlen_func(q, k, v, starts, starts, 400, 400, return_lse=True), want)
    odd = [torch.nn.functional.pad(x, (0, 3))[..., :size] for x in (q, k, v)]  # rows that are not aligned
    assert same_bits(flash_attn_varlen_func(*odd, starts, starts, 400, 400, return_lse=True), want)


@pytest.mark.parametrize("size", [64, 80, 128, 256, 512])
def test_values_that_arrive_late_are_waited_for(size):
    """A tile that keys do not fill, with values in as many memory pages as there are keys, out of L2."""
    torch.manual_seed(0)
    keys, heads = 20, torch.cuda.get_device_properties().multi_processor_count
    q, k, v = (random(1, length, heads, size, dtype=torch.bfloat16) for length in (128, keys, keys))
    memory = torch.empty(keys * 2**24, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided(v.shape, (0, 2**24, size, 1)).copy_(v)
    want = flash_attn_func(q, k, v, return_lse=True)
    assert_exact(want[0][0], want[1][0], exact_attention(q[0], k[0], v[0]))
    others = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(10):
        others.zero_()
        assert same_bits(flash_attn_func(q, k, far, return_lse=True), want)


@pytest.mark.parametrize("name", ["full", "causal", "window", "soft cap", "sinks"])
def test_a_batch_of_any_size_gives_the_same_bits(name):
    torch.manual_seed(0)
    q = random(16, 1100, 4, 64, dtype=torch.bfloat16)
    k, v = (random(16, 1100, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    how = scores(1, 4)[name] | {"return_lse": True}
    large = flash_attn_func(q, k, v, **how)
    for b in (0, 15):
        one = slice(b, b + 1)
        assert same_bits(flash_attn_func(q[one], k[one], v[one], **how), tuple(x[one] for x in large))


@pytest.mark.parametrize("batch", [3, 8, 40])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_a_row_whose_first_tile_is_hidden_has_the_bits_of_one_alone(size, batch):
    """Windows: how many tiles of a thread block a row does not see depends on the block's rows, hence on the batch."""
    torch.manual_seed(0)
    q = random(batch, 1100, 16, size, dtype=torch.bfloat16)
    k, v = (random(batch, 1100, 4, size, dtype=torch.bfloat16) for _ in range(2))
    how = {"causal": True, "window_size": (100, -1), "return_lse": True}
    large = flash_attn_func(q, k, v, **how)
    for b in {0, batch - 1}:
        one = slice(b, b + 1)
        assert same_bits(flash_attn_func(q[one], k[one], v[one], **how), tuple(x[one] for x in large))


@pytest.mark.parametrize("size", [64, 128, 256])
def test_packed_sequences_of_few_queries_have_the_bits_of_each_alone(size):
    """Heads share the works of few queries, so a row may be in either warpgroup."""
    torch.manual_seed(0)
    lengths = [40, 64, *[57] * 40, *[1] * 40]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (random(sum(lengths), heads, size, dtype=torch.bfloat16) for heads in (16, 2, 2))
    how = {"causal": True, "window_size": (20, -1), "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, starts, starts, 64, 64, **how)
    for b in (0, 1, 2, 41, 42):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        alone = starts[b : b + 2] - starts[b]
        got = flash_attn_varlen_func(q[rows], k[rows], v[rows], alone, alone, 64, 64, **how)
        assert same_bits(got, (out[rows], lse[:, rows]))


@pytest.mark.parametrize("kind", SPREADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_weights_that_outgrow_their_base_are_those_of_float64(size, dtype, kind):
    """In larger thread blocks too."""
    torch.manual_seed(0)
    q = random(40, 300, 16, size, dtype=dtype)
    k, v = (random(40, 520, 4, size, dtype=dtype) for _ in range(2))
    spread_scores(kind, q, k)
    how = {"causal": True, "return_lse": True}
    out, lse = flash_attn_func(q, k, v, **how)
    for b in (0, 39):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b], causal=True))
        alone = (x[b : b + 1].contiguous() for x in (q, k, v))
        assert same_bits(flash_attn_func(*alone, **how), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [200, 729])
@pytest.mark.parametrize("size", [64, 72, 96, 128])
def test_a_batch_that_takes_larger_thread_blocks_gives_the_same_bits(size, queries, causal):
    torch.manual_seed(0)
    q, k, v = (random(16, queries, heads, size, dtype=torch.bfloat16) for heads in (36, 4, 4))
    how = {"causal": causal, "return_lse": True}
    large = flash_attn_func(q, k, v, **how)
    for some in (slice(0, 1), slice(15, 16), slice(3, 5), slice(4, 8), slice(2, 10)):
        assert same_bits(flash_attn_func(q[some], k[some], v[some], **how), tuple(x[some] for x in large))
    assert_exact(large[0][3], large[1][3], exact_attention(q[3], k[3], v[3], causal=causal))


@pytest.mark.parametrize("name", ["causal", "window", "prefixes and a window", "soft cap"])
@pytest.mark.parametrize("size", [64, 128, 512])
def test_a_sequence_alone_gives_the_same_bits(size, name):
    q, k, v, starts_q, starts_k = packed(size, torch.bfloat16)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [72, 128, 256, 512])
def test_few_queries_over_many_keys_are_those_of_float64_whatever_the_batch(size, name):
    torch.manual_seed(0)
    lengths, queries = [5000, 0, 300, 2100], 40
    caches, table, held = scattered(lengths, 16, 2, size, torch.bfloat16, False)
    q, how = random(4, queries, 4, size, dtype=torch.bfloat16), scores(4, 4)[name] | {"return_lse": True}
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


def test_rows_of_no_sequence_and_past_the_bounds_are_zero():
    torch.manual_seed(0)
    q, k, v = (random(400, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    starts = ints([10, 100, 100, 380])
    torch.full((2**22,), math.nan, device="cuda")  # the allocator's memory is not zero
    out, lse = flash_attn_varlen_func(q, k, v, starts, starts, 200, 150, return_lse=True, causal=True)
    for rows in (slice(0, 10), slice(300, 400)):
        assert not out[rows].any()
        assert bool((lse[:, rows] == -math.inf).all())
    exists = torch.arange(280, device="cuda") < 150
    exact = exact_attention(q[100:380], k[100:380], v[100:380], causal=True, exists=exists)
    first = type(exact)(exact.out[:200], exact.lse[:, :200], exact.bound[:200], exact.lse_bound[:, :200])
    assert_exact(out[100:300], lse[:, 100:300], first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 512])
def test_three_hundred_sequences_are_those_of_a_loop(size, dtype):
    torch.manual_seed(0)
    lengths = torch.randint(1, 300, (300,)).tolist()
    starts = starts_of(lengths)
    q, k, v = (random(sum(lengths), 2, size, dtype=dtype) for _ in range(3))
    out = flash_attn_varlen_func(q, k, v, starts, starts, 4000, 4000, causal=True)
    for b in range(0, 300, 7):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        want = flash_attn_func(*(x[rows][None].contiguous() for x in (q, k, v)), causal=True)[0]
        assert torch.equal(out[rows], want)


@pytest.mark.parametrize("out_of", ["fresh", "q"])
def test_out_takes_the_result(out_of):
    torch.manual_seed(0)
    q, k, v = (random(1, 100, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    want = flash_attn_func(q, k, v)
    out = q if out_of == "q" else torch.empty_like(q)
    assert flash_attn_func(q, k, v, out=out) is out
    assert torch.equal(out, want)


# -- over caches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("page", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("size", [64, 512])
def test_paged_caches_are_those_of_float64(size, page, holes, name):
    lengths, queries = [300, 0, 54, -1, 1000, 17, 600], 70
    caches, table, held = scattered(lengths, page, 2, size, torch.bfloat16, holes)
    q = random(len(lengths), queries, 4, size, dtype=torch.bfloat16)
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


@pytest.mark.parametrize("size", [64, 128, 512])
@pytest.mark.parametrize("queries", [17, 130])
def test_a_hundred_thousand_keys(queries, size):
    lengths = [100_000, 99]
    caches, table, held = scattered(lengths, 16, 2, size, torch.bfloat16, False)
    q = random(2, queries, 4, size, dtype=torch.bfloat16)
    given = {"cache_seqlens": ints(lengths), "block_table": table, "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, **given)
    for b, (k, v, _) in enumerate(held):
        assert_exact(out[b], lse[b], exact_attention(q[b], k, v, causal=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [size for size in SIZES if size <= 256])
@pytest.mark.parametrize("queries", [100, 400])
@pytest.mark.parametrize("window", [(-1, -1), (100, -1)], ids=str)
def test_pages_of_one_key_give_the_bits_of_dense_keys(window, queries, size, dtype):
    """The former are copied by cp.async, the latter by TMA where there is a kernel for both."""
    torch.manual_seed(0)
    q = random(3, queries, 4, size, dtype=dtype)
    k, v = (random(3, 700, 2, size, dtype=dtype) for _ in range(2))
    table = torch.randperm(2100, device="cuda").int().view(3, 700)
    caches = [torch.empty(2100, 1, 2, size, dtype=dtype, device="cuda") for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[table.long().flatten(), 0] = x.flatten(0, 1)
    how = {"causal": True, "window_size": window, "return_lse": True}
    want = flash_attn_func(q, k, v, **how)
    assert same_bits(flash_attn_with_kvcache(q, *caches, cache_seqlens=ints([700] * 3), block_table=table, **how), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_appended_and_attended_to(paged, size, dtype):
    lengths, queries = [200, 0, 54, -1], 100
    torch.manual_seed(0)
    if paged:
        caches, table, _ = scattered([max(0, n) + queries for n in lengths], 16, 2, size, dtype, False)
    else:
        caches, table = [random(4, 320, 2, size, dtype=dtype) for _ in range(2)], None
    copies = [x.clone() for x in caches]
    q, k, v = (random(4, queries, heads, size, dtype=dtype) for heads in (4, 2, 2))
    given = {"cache_seqlens": ints(lengths), "block_table": table, "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, k, v, **given)
    with backend("reference"):
        want, want_lse = flash_attn_with_kvcache(q, *copies, k, v, **given)
    assert same_bits(tuple(caches), tuple(copies))
    assert_prefill_alike(out, want)
    assert_lse_alike(lse, want_lse)
    again = flash_attn_with_kvcache(q, *caches, **given | {"cache_seqlens": ints([300, 100, 154, -1])})
    assert same_bits(again, (out, lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_without_keys_have_their_sink_as_lse_however_small(dtype):
    sizes = ((70, 4), (6, 2), (6, 2))
    q, k, v = (random(1, length, heads, 64, dtype=torch.bfloat16).to(dtype) for length, heads in sizes)
    sinks = torch.tensor([-88.0, -100.0, -65504.0, 3.0], device="cuda")
    out, lse = flash_attn_func(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :64].any()
    assert_lse_alike(lse[0, :, :64], sinks[:, None].expand(4, 64))
    assert out.isfinite().all()


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_few_queries_with_sinks_run_as_kernels(queries):
    lengths = [300, 0, 54]
    caches, table, held = scattered(lengths, 16, 2, 128, torch.bfloat16, False)
    q, sinks = random(3, queries, 8, 128, dtype=torch.bfloat16), torch.randn(8, device="cuda")
    given = {"cache_seqlens": ints(lengths), "block_table": table, "causal": True, "sinks": sinks, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, **given)
    for b, (k, v, _) in enumerate(held):
        assert_exact(out[b], lse[b], exact_attention(q[b], k, v, causal=True, sinks=sinks))
    repeated = flash_attn_with_kvcache(q, *caches, **given)  # which takes the path of calls seen before
    assert same_bits(repeated, (out, lse))


@pytest.mark.parametrize("size", [64, 512])
def test_a_replayed_graph_sees_other_lengths_tables_and_keys(size):
    def call(q, k_cache, v_cache, lengths, table):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, return_lse=True
        )

    def inputs(seed, lengths):
        caches, table, _ = scattered([700, 700], 16, 2, size, torch.bfloat16, False)
        torch.manual_seed(seed)
        return [random(2, 90, 4, size, dtype=torch.bfloat16), *caches, ints(lengths), table.roll(seed, 0)]

    args, fresh = inputs(1, [700, 3]), inputs(2, [64, 513])
    got = graph_replay(call, args, fresh)
    assert same_bits(tuple(got), tuple(call(*fresh)))


def test_a_replayed_graph_counts_its_works_from_zero():
    """Blocks of a long causal call take their work from a counter."""

    def call(q, k, v):
        first = flash_attn_func(q, k, v, causal=True, return_lse=True)
        return *first, *flash_attn_func(q, k, v, causal=True, return_lse=True)

    def inputs(seed):
        torch.manual_seed(seed)
        return [random(16, 1100, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]

    fresh = inputs(2)
    got = graph_replay(call, inputs(1), fresh)
    want = [flash_attn_func(*(x[b : b + 1] for x in fresh), causal=True, return_lse=True) for b in range(16)]
    out, lse = (torch.cat(parts) for parts in zip(*want, strict=True))
    assert same_bits(tuple(got), (out, lse, out, lse))
