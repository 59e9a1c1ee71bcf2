"""The decode kernels over caches of the dtype of q and of e4m3 against float64, and what every kernel guarantees."""

from __future__ import annotations

import math

import pytest
import torch
from bounds import ELEMENTWISE, assert_lse_alike, assert_outputs_alike, relative
from decode_oracle import LENGTHS, Call, assert_exact, bits, check, made
from decode_oracle import same_bits as same

from kestrel_attention import MORE_WARPS, flash_attn_with_kvcache, merge_attention_states, tau_tail
from kestrel_runtime import backend
from kestrel_runtime.testing import canary, graph_replay, large_allocation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

FP8 = torch.float8_e4m3fn
KINDS = ("same", "e4m3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [1, 8, 16, 24, 64, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (32, 32, 64), (8, 2, 128), (20, 1, 128), (32, 1, 64)]
)
def test_decoding_over_pages(heads, kv_heads, size, page, dtype, kind):
    check(made(kind, heads, kv_heads, size, page, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("size", [16, 48, 72, 80, 96, 112, 136, 160, 192, 240, 256, 512])
def test_head_sizes(size, queries, kind):
    if kind == "e4m3" and size % 16:
        pytest.skip("rows that are no multiple of 16 bytes run by reference")
    check(made(kind, 16, 2, size, 16, (0, 1, 54, 300, 2000), queries), causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(2, 2, 1), (6, 2, 1), (8, 2, 1), (4, 2, 2), (2, 2, 4)])
@pytest.mark.parametrize("size", [128, 256])
def test_up_to_four_rows_of_a_kv_head(size, heads, kv_heads, queries, dtype, kind):
    check(made(kind, heads, kv_heads, size, 16, (0, 1, 54, 300, 2000), queries, dtype), causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"window_size": (0, 0)},
        {"window_size": (7, 2)},
        {"window_size": (100, -1), "causal": True},
        {"window_size": (-1, 3)},
        {"window_size": (2**63 - 1, 2**63 - 1)},
        {"causal": True, "softcap": 2.0},
        {"softmax_scale": -0.5, "softcap": 30.0},
        {"causal": True, "prefix_len": 20},
        {"window_size": (5, 0), "prefix_len": 33},
    ],
)
def test_what_shapes_the_scores(how, queries, kind):
    check(made(kind, 8, 2, 64, 8, queries=queries), **how)


def test_a_prefix_for_each_sequence():
    prefix = torch.tensor([0, 3, 10, 500, 1, 7, 64, 0], dtype=torch.int32, device="cuda")
    check(made("same", 8, 2, 64, 8, queries=4), causal=True, window_size=(2, 0), prefix_len=prefix)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize(("k_heads", "v_heads"), [(1, 1), (2, 2), (1, 2)])
def test_fp8_scales(k_heads, v_heads, queries, size, kind):
    """Three queries of four heads, and eight, have thread blocks of several row blocks over e4m3."""
    k_scale, v_scale = (torch.rand(heads, device="cuda") + 0.5 for heads in (k_heads, v_heads))
    check(made(kind, 8, 2, size, 16, queries=queries), causal=True, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("softmax_scale", [2.0**100, -(2.0**100)])
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("size", [64, 128])
def test_a_score_of_zero_is_zero_however_large_its_scale(size, queries, softmax_scale):
    call = made("e4m3", 8, 2, size, 16, queries=queries)
    call.q.zero_()
    check(call, causal=True, softmax_scale=softmax_scale, k_scale=torch.full((1,), 2.0**100, device="cuda"))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64, 2**40])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_splits(splits, kind):
    check(made(kind, 8, 2, 64, 16, (0, 1, 54, 300, -1, 5000, 17)), num_splits=splits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("splits", [0, 64])
def test_lengths_at_the_boundaries_of_splits(splits, queries, size, kind):
    """Of plan.split_rule, and of its numbers of splits. Most of 64 splits of the shorter sequences have no key."""
    lengths = (16, 64, 65, 192, 193, 272, 273, 512, 513, 768, 769, 1024, 1025, 2176, 2177)
    check(made(kind, 8, 2, size, 16, lengths, queries), causal=True, num_splits=splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (20, 1)])
@pytest.mark.parametrize(
    "how", [{}, {"window_size": (100, 0), "softcap": 20.0}, {"prefix_len": 33, "window_size": (5, 0)}]
)
def test_one_split_for_more_warps(heads, kv_heads, queries, dtype, how):
    """Heads of 128: kernels of eight warps."""
    lengths = (0, 1, 17, 100, 128, 129, 300, -1, 1000, 5000)
    call = made("same", heads, kv_heads, 128, 16, lengths, queries, dtype=dtype)
    check(call, causal=True, num_splits=MORE_WARPS, **how)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "kind"), [(32, 4, 128, "e4m3"), (16, 2, 512, "same")])
def test_long_sequences(heads, kv_heads, size, kind):
    check(made(kind, heads, kv_heads, size, 16, (20000, 3, 9000)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("size", [64, 128])
def test_a_hundred_thousand_keys(size, queries, kind):
    check(made(kind, 4, 1, size, 16, (100_000, 2048, 512, 0), queries), causal=True)


@pytest.mark.parametrize(("size", "kind"), [(80, "e4m3"), (80, "same"), (192, "same")])
def test_what_lies_behind_a_row_of_the_cache_has_no_effect(size, kind):
    """Rows of 256 bytes, or 512, of which a head takes a part; NaN behind it."""
    call = made(kind, 8, 2, size, 16)
    for name in ("k_cache", "v_cache"):
        cache = call.caches[name]
        wide = torch.full((*cache.shape[:3], 256), float("nan"), device="cuda").to(cache.dtype)
        bits(wide)[..., :size] = bits(cache)
        call.caches[name] = wide[..., :size]
    check(call, causal=True)


def test_infinite_keys_that_a_query_does_not_like_get_no_weight():
    call = made("same", 8, 2, 80, 16, (40,))
    call.q[..., 3] = 1.0
    call.caches["k_cache"][call.table[0, 1], 4, :, 3] = -math.inf
    check(call)


def test_a_length_past_the_table_under_a_window():
    call = made("same", 8, 2, 64, 16, (300, 32))
    want = call.run(window_size=(3, 0))
    call.lengths[1] = 2**31 - 1
    got = call.run(window_size=(3, 0))
    assert same((got[0][:1], got[1][:1]), (want[0][:1], want[1][:1]))
    assert bool((got[0][1] == 0).all())
    assert bool((got[1][1] == -math.inf).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128), (8, 2, 512)])
def test_a_sequence_does_not_depend_on_the_width_of_its_table(heads, kv_heads, size, kind):
    call = made(kind, heads, kv_heads, size, 16, (40000, 1, 700, 2100, 4096))
    out, lse = call.run()
    for b in range(1, len(call.lengths)):
        alone = call.alone(b)
        alone.table = alone.table[:, : int(call.lengths[b]) // 16 + 1]
        assert same(alone.run(), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rise", [7, 9])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "kind", "size", "step"),
    [
        (torch.bfloat16, "same", 64, 64),
        (torch.float16, "same", 64, 64),
        (torch.bfloat16, "e4m3", 64, 128),
        (torch.bfloat16, "same", 128, 64),
        (torch.bfloat16, "e4m3", 128, 128),
    ],
)
def test_scores_that_rise_along_the_sequence(dtype, kind, size, step, queries, rise, masked):
    """By less and by more per step than the weights may grow before the sums are rescaled.

    masked: the first steps of all warps but one see no key.
    """
    call = made(kind, 8, 2, size, 16, (6 * step, 3 * step), queries, dtype)
    call.q[..., :32] = size**0.5 / 32  # a score is about the mean of so many dims
    call.q[..., 32:] /= 64
    cache = call.caches["k_cache"]
    for b in range(len(call.lengths)):
        _, block, slot = call.places(b)
        position = torch.arange(len(block), device="cuda")
        ramp = (position - len(block) / 2) * (rise * math.log(2) / step)
        k = call.decoded(b, rounded=False).keys.float()
        k[..., :32] += ramp[:, None, None]
        bits(cache)[block, slot] = bits(k.to(cache.dtype))
    check(call, num_splits=1, **({"window_size": (300, 0), "prefix_len": 1} if masked else {}))


def test_bf16_queries_of_any_magnitude_over_fp8():
    call = made("e4m3", 8, 8, 64, 1)
    call.q *= 10.0 ** torch.arange(-8, 8, 2, device="cuda")[:, None]  # the last past what f16 holds
    check(call, softmax_scale=1e-7)


def test_nan_in_a_query_or_key_stays_with_its_rows():
    call = made("same", 8, 2, 64, 16)
    want = call.run()
    call.q[2, 0, 1] = float("nan")
    call.caches["k_cache"][call.table[3, 0], 0, 1] = float("nan")
    got = call.run()
    touched = torch.zeros(len(LENGTHS), 1, 8, dtype=torch.bool, device="cuda")
    touched[2, 0, 1] = touched[3, 0, 4:] = True
    assert bool(got[0][touched].isnan().all())
    assert torch.equal(got[0][~touched], want[0][~touched])


def test_a_cache_without_a_table():
    generator = torch.Generator("cuda").manual_seed(0)
    k_cache, v_cache, q = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16()
        for shape in ((3, 200, 2, 64), (3, 200, 2, 64), (3, 1, 8, 64))
    )
    lengths = torch.tensor([200, 77, 0], dtype=torch.int32, device="cuda")
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_lse=True)
    table = torch.arange(3, dtype=torch.int32, device="cuda")[:, None]
    given = {"cache_seqlens": lengths, "block_table": table, "return_lse": True}
    assert same((out, lse), flash_attn_with_kvcache(q, k_cache, v_cache, **given))


@pytest.mark.parametrize("layout", ["HND", "halves", "layers"])
def test_layouts(layout):
    call = made("same", 8, 2, 64, 16)
    want = call.run()
    k_cache, v_cache = call.caches["k_cache"], call.caches["v_cache"]
    blocks, page, kv_heads, size = k_cache.shape
    if layout == "HND":
        call.caches["k_cache"] = k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "halves":
        both = torch.cat((k_cache, v_cache), dim=-1)
        call.caches = {"k_cache": both[..., :size], "v_cache": both[..., size:]}
    else:
        both = torch.zeros(blocks, 3, page, kv_heads, size, dtype=torch.bfloat16, device="cuda")
        both[:, 1] = k_cache
        call.caches["k_cache"] = both[:, 1]
    assert same(call.run(), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128)])
def test_a_sequence_does_not_depend_on_its_batch(heads, kv_heads, size, kind):
    call = made(kind, heads, kv_heads, size, 16, (5000, 1, 700, 2100, 0))
    out, lse = call.run()
    for b in range(len(call.lengths)):
        assert same(call.alone(b).run(), (out[b : b + 1], lse[b : b + 1]))


# Query heads, KV heads and queries of calls whose rows of a KV head, in brackets, do not fit into a block of 8.
MANY_ROWS = [
    pytest.param(8, 2, 3, id="3x4 rows"),
    pytest.param(16, 4, 4, id="4x4 rows"),
    pytest.param(3, 1, 6, id="6x3 rows"),
    pytest.param(16, 2, 3, id="3x8 rows"),
    pytest.param(8, 2, 8, id="8x4 rows"),
    pytest.param(10, 2, 8, id="8x5 rows"),
    pytest.param(16, 2, 16, id="16x8 rows"),
    pytest.param(3, 3, 9, id="9x1 rows"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "queries"), MANY_ROWS)
def test_many_rows_of_a_kv_head(heads, kv_heads, queries, dtype, size, kind):
    call = made(kind, heads, kv_heads, size, 16, (0, 1, 54, 300, -1, 2100, queries - 1), queries, dtype=dtype)
    for how in ({}, {"causal": True}, {"causal": True, "window_size": (70, -1), "softcap": 2.0, "prefix_len": 20}):
        check(call, **how)
    check(call, causal=True, num_splits=7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "queries"), MANY_ROWS)
def test_many_rows_do_not_depend_on_their_batch(heads, kv_heads, queries, size, kind):
    call = made(kind, heads, kv_heads, size, 16, (5000, 1, 700, 2100, 0), queries)
    out, lse = call.run(causal=True)
    for b in range(len(call.lengths)):
        assert same(call.alone(b).run(causal=True), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 128])
def test_nan_in_a_query_stays_with_its_row_of_many(size, kind):
    call = made(kind, 16, 2, size, 16, (300, 90), 4)
    want, want_lse = call.run(causal=True)
    call.q[0, 2, 5, 3] = math.nan
    got, got_lse = call.run(causal=True)
    assert bool(got[0, 2, 5].isnan().all())
    got[0, 2, 5], got_lse[0, 5, 2] = want[0, 2, 5], want_lse[0, 5, 2]
    assert_outputs_alike(got, want)
    assert_lse_alike(got_lse, want_lse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_combines_its_own_splits_gives_the_bits_of_the_combine_kernel(kind):
    """Three sequences of 32 heads are 96 blocks, which combine their splits; one alone has a block for each split."""
    call = made(kind, 32, 32, 64, 16, (740, 1000, 130))
    check(call)
    out, lse = call.run()
    for b in range(len(call.lengths)):
        assert same(call.alone(b).run(), (out[b : b + 1], lse[b : b + 1]))


def test_three_queries_at_once_are_those_one_by_one():
    """Each sees what it sees when the keys after it are not appended yet."""
    three = made("same", 8, 2, 64, 16, (54, 300, 1000), queries=3)
    out, lse = three.run(causal=True)
    for i in range(3):
        one = Call(three.kind, three.q[:, i : i + 1], three.caches, three.table, three.lengths - 2 + i)
        got, got_lse = one.run(causal=True)
        assert_outputs_alike(got[:, 0], out[:, i])
        assert_lse_alike(got_lse[..., 0], lse[..., i])


@pytest.mark.parametrize("storage", [torch.bfloat16, FP8])
@pytest.mark.parametrize("page", [1, 16, 24])
def test_appending_writes_what_the_reference_writes_and_nothing_else(page, storage):
    generator = torch.Generator("cuda").manual_seed(page)
    columns = -(-60 // page)
    shape = (4 * columns + 2, page, 2, 64)
    table = torch.randperm(shape[0], generator=generator, device="cuda")[: 4 * columns].view(4, columns).int()
    table[3, -1] = -1
    lengths = torch.tensor([0, columns * page - 2, -1, columns * page - 3], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn((4, 3, heads, 64), generator=generator, device="cuda").bfloat16() * 3 for heads in (8, 2, 2))
    k[0, 0, 0, :4] = torch.tensor([float("inf"), -float("inf"), 1e5, -1e-9])
    scales = {"k_scale": torch.full((1,), 0.7, device="cuda"), "v_scale": torch.tensor([0.3, 1.9], device="cuda")}
    scales = scales if storage is FP8 else {}
    source = [torch.randn(shape, generator=generator, device="cuda").bfloat16().to(storage) for _ in range(2)]
    guarded = [canary(shape, torch.uint8 if storage is FP8 else storage, "cuda") for _ in range(2)]
    caches = [cache.view(storage) for cache, _ in guarded]
    wanted = [cache.clone() for cache in source]
    for cache, original in zip(caches, source, strict=True):
        bits(cache).copy_(bits(original))
    given = {"cache_seqlens": lengths, "block_table": table, "causal": True, "return_lse": True, **scales}
    got = flash_attn_with_kvcache(q, *caches, k, v, **given)
    with backend("reference"):
        flash_attn_with_kvcache(q, *wanted, k, v, **given)
    assert same(tuple(caches), tuple(wanted))
    for _, assert_intact in guarded:
        assert_intact()
    finite = [1, 2, 3]
    kind = "e4m3" if storage is FP8 else "same"
    held = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    lengths = torch.where(lengths < 0, lengths, lengths + 3)
    call = Call(kind, q[finite], held, table[finite], lengths[finite])
    assert_exact(call, (got[0][finite], got[1][finite]), causal=True, **scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [0, 4])
def test_a_replayed_graph_sees_new_contents(splits, kind):
    def given(seed: int) -> list[torch.Tensor]:
        lengths = LENGTHS if seed == 1 else tuple(reversed(LENGTHS))
        call = made(kind, 8, 2, 64, 16, lengths, seed=seed)
        return [call.q, *call.caches.values(), call.lengths, call.table]

    def decode(q, k_cache, v_cache, lengths, table):
        how = {"cache_seqlens": lengths, "block_table": table, "num_splits": splits, "return_lse": True}
        return flash_attn_with_kvcache(q, k_cache, v_cache, **how)

    fresh = given(2)
    assert same(graph_replay(decode, given(1), fresh), decode(*fresh))


def test_compiled_without_a_graph_break():
    call = made("same", 8, 2, 64, 16)

    def decode(q, k_cache, v_cache, lengths, table):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, return_lse=True
        )

    inputs = call.q, *call.caches.values(), call.lengths, call.table
    with backend("auto"):
        got = torch.compile(decode, fullgraph=True)(*inputs)
    assert same(got, decode(*inputs))


BAD_AFTER_GOOD = [
    ("cache_seqlens", lambda x: x.long()),
    ("cache_seqlens", lambda x: x[:1]),
    ("block_table", lambda x: x.long()),
    ("block_table", lambda x: x[:1]),
    ("v_cache", lambda x: x.half()),
    ("v_cache", lambda x: x[1:]),
    ("v_cache", lambda x: x[:, :, :1]),
    ("v_cache", lambda x: x.to("meta")),
    ("k_cache", lambda x: x.half()),
    ("k_cache", lambda x: x[..., ::2]),
    ("q", lambda x: x.clone().requires_grad_()),
    ("q", lambda x: x.half()),
    ("k_scale", lambda x: torch.ones(1, device="cuda")),
]


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize(("name", "change"), BAD_AFTER_GOOD, ids=[f"{i}-{x[0]}" for i, x in enumerate(BAD_AFTER_GOOD)])
def test_a_bad_call_after_good_ones_of_its_form_is_refused(name, change, appends):
    """What is known of earlier calls skips no check; nothing is written."""
    call = made("same", 8, 2, 64, 16, (54, 300), extra_keys=8)
    given = {"q": call.q, **call.caches, "cache_seqlens": call.lengths, "block_table": call.table, "causal": True}
    if appends:
        given |= {name: torch.randn(2, 1, 2, 64, device="cuda").bfloat16() for name in ("k", "v")}
    want = [flash_attn_with_kvcache(**given) for _ in range(3)]
    before = tuple(x.clone() for x in call.caches.values())
    with pytest.raises((ValueError, TypeError), match="^flash_attn_with_kvcache: argument"):
        flash_attn_with_kvcache(**given | {name: change(given.get(name))})
    assert same(before, tuple(call.caches.values()))
    assert same((flash_attn_with_kvcache(**given),), (want[0],))


def test_runs_on_the_current_stream():
    call, stream = made("same", 8, 2, 128, 16, (3000, 20)), torch.cuda.Stream()
    want = call.run(num_splits=4)
    scratch, q = torch.zeros(1 << 28, device="cuda"), call.q
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        call.q = torch.zeros_like(q).copy_(q)
        got = call.run(num_splits=4)
    stream.synchronize()
    assert same(got, want)


@large_allocation(gib=11)
@pytest.mark.parametrize("storage", [torch.bfloat16, FP8])
def test_a_block_far_past_two_to_the_31_elements(storage):
    shape, strides = (2, 16, 2, 64), (5 * 2**30, 2 * 64, 64, 1)
    base = torch.zeros(5 * 2**30 + 16 * 2 * 64, dtype=torch.uint8 if storage is FP8 else storage, device="cuda")
    far = base.as_strided(shape, strides).view(storage)
    near = torch.randn(shape, device="cuda").to(storage)
    bits(far).copy_(bits(near))
    q = torch.randn(1, 1, 8, 64, device="cuda").bfloat16()
    table = torch.tensor([[1, 0]], dtype=torch.int32, device="cuda")
    given = {"cache_seqlens": torch.full((1,), 20, dtype=torch.int32, device="cuda"), "block_table": table}
    given["return_lse"] = True
    assert same(flash_attn_with_kvcache(q, far, far, **given), flash_attn_with_kvcache(q, near, near, **given))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "lengths", "table", "k_scale", "v_scale"])
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(name):
    """1000 times in one graph: merging with an empty part copies the bits of the input, and the decode call follows."""
    contents = 5
    kind = "e4m3" if name.endswith("scale") else "same"
    calls = [made(kind, 8, 2, 64, 16, (40, 333, 17 + seed, 90), seed=seed) for seed in range(contents)]
    scales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(contents)]
    for call in calls:  # the tables of others lead to pages that its own sequences leave NaN
        for which, x in call.caches.items():
            call.caches[which] = torch.where(x.float().isnan(), torch.randn_like(x.float()), x.float()).to(x.dtype)

    def inputs(i: int) -> dict[str, torch.Tensor]:
        call = calls[i]
        found = {"q": call.q, **call.caches, "lengths": call.lengths, "table": call.table}
        return found | {"k_scale": scales[i][0], "v_scale": scales[i][1]}

    fixed = inputs(0)

    def copied(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            rows = x.reshape(-1, 1, 64)
            seen = torch.zeros(1, rows.shape[0], device="cuda")
            return merge_attention_states(rows, seen, rows, torch.full_like(seen, -math.inf))[0].view(x.shape)
        numbers = x.reshape(1, -1).view(torch.float32)
        rows = torch.zeros(numbers.shape[1], 1, 8, dtype=torch.bfloat16, device="cuda")
        merged = merge_attention_states(rows, numbers, rows, torch.full_like(numbers, -math.inf))[1]
        return merged.view(x.dtype).view(x.shape)

    def once(i: int) -> tuple[torch.Tensor, ...]:
        given = fixed | {name: copied(inputs(i)[name])}
        how = {"cache_seqlens": given["lengths"], "block_table": given["table"], "return_lse": True}
        if kind == "e4m3":
            how |= {"k_scale": given["k_scale"], "v_scale": given["v_scale"]}
        return flash_attn_with_kvcache(given["q"], given["k_cache"], given["v_cache"], **how)

    want = []
    for i in range(contents):
        source = inputs(i)[name]
        read = torch.ones_like(source).bool()
        if name == "table":
            read = (source >= 0) & (source < len(calls[i].caches["k_cache"]))
        assert torch.equal(bits(copied(source))[read], bits(source)[read])
        want.append(once(i))
        torch.cuda.synchronize()
        assert all(bool(x.isfinite().all()) for x in want[i])
    assert not any(same(want[i], want[i - 1]) for i in range(contents))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [once(i % contents) for i in range(1000)]
    graph.replay()
    torch.cuda.synchronize()
    for i in range(contents):
        for mine in got[i::contents]:
            assert same(mine, want[i])


# -- around attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "columns"), [(32, 32, 64), (32, 32, 32), (8, 2, 10)])
def test_tau_tail_is_the_reference(heads, kv_heads, columns, dtype, integers, tokens):
    torch.manual_seed(tokens)
    width = (heads + 2 * kv_heads) * 64
    rows, assert_intact = canary((tokens, width + 64), dtype, "cuda")
    rows.copy_(torch.randn(tokens, width + 64))
    qkv = rows[:, :width]
    linear = torch.randn(tokens, heads + kv_heads, device="cuda").to(dtype)
    positions = torch.randint(-2, 70, (tokens,), device="cuda").to(integers)
    if integers is torch.int64:
        positions[:1] = 2**32 + 1
    for table in (torch.rand(64, columns, device="cuda"), torch.rand(64, columns, device="cuda").to(dtype)):
        want = qkv.clone()
        with backend("reference"):
            tau_tail(want, linear, table, positions, heads, 64)
        tau_tail(qkv, linear, table, positions, heads, 64)
        assert_intact()
        torch.testing.assert_close(qkv, want, rtol=relative(dtype, ELEMENTWISE), atol=ELEMENTWISE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 4, 64), (1, 1, 8), (5, 3, 72), (300, 32, 128)])
def test_merging_is_the_reference(tokens, heads, size, dtype):
    torch.manual_seed(size)
    out_a, out_b = (torch.randn(tokens, heads, size, device="cuda").to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(heads, tokens, device="cuda") * 5 for _ in range(2))
    if tokens > 3:
        lse_a[0, 0] = lse_b[1, 1] = lse_a[2, 2] = lse_b[2, 2] = -math.inf
        out_a[0, 0] = float("nan")  # saw no key: not read
    got = merge_attention_states(out_a, lse_a, out_b, lse_b)
    with backend("reference"):
        want = merge_attention_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(got[0], want[0], rtol=relative(dtype, 2 * ELEMENTWISE), atol=ELEMENTWISE)
    torch.testing.assert_close(got[1], want[1], rtol=2 * ELEMENTWISE, atol=2 * ELEMENTWISE)
