"""flash_attn_func and flash_attn_varlen_func against attention in float64."""

from __future__ import annotations

import sys

import pytest
import torch
from decode_oracle import REFERENCE, Decoded, exact, excess
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, reference
from kestrel_runtime.testing import opcheck

NAN = float("nan")
# Outputs and LSE, both below 8, of the same float32 sums in other blocks: 4 units in the last place.
OTHER_BLOCKS = 4 * 2**-21
WAYS = [
    {},
    {"causal": True},
    {"window_size": (1, 0)},
    {"window_size": (7, 2)},
    {"window_size": (-1, 3)},
    {"window_size": (500, 500)},
    {"causal": True, "window_size": (5, 4), "softcap": 3.0},
    {"causal": True, "prefix_len": 6},
    {"causal": True, "prefix_len": torch.tensor([0, 3, 99], dtype=torch.int32)},
    {"softmax_scale": 0.3, "softcap": 1.0},
]


def assert_rows(out, lse, q, k, v, **how):
    """One sequence against float64, within the bounds of the reference; for sequences too long for the loop."""
    k, v = k.double(), v.double()
    held = Decoded(k, v, torch.ones(len(k), dtype=torch.bool), k.abs(), v.abs().amax(-1))
    errors = excess((out, lse), exact(q, held, how, how.get("prefix_len", 0)), how, REFERENCE)
    assert max(errors) <= 1, errors


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def for_loop(how: dict, sequence: int) -> dict:
    """The same arguments for the loop over one sequence."""
    prefix = how.get("prefix_len", 0)
    return {
        "scale": how.get("softmax_scale"),
        "causal": how.get("causal", False),
        "window": how.get("window_size", (-1, -1)),
        "softcap": how.get("softcap", 0.0),
        "prefix": int(prefix[sequence]) if isinstance(prefix, torch.Tensor) else prefix,
    }


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 17), (13, 5), (1, 33), (6, 0)])
def test_dense_batches(how, queries, keys, in_float64, assert_attends):
    """More queries than keys leaves the first ones without a key under causal."""
    torch.manual_seed(queries)
    q, k, v = torch.randn(3, queries, 4, 64), torch.randn(3, keys, 2, 64), torch.randn(3, keys, 2, 64)
    out, lse = flash_attn_func(q, k, v, return_lse=True, **how)
    assert out.is_contiguous()
    assert lse.shape == (3, 4, queries)
    for b in range(3):
        assert_attends(out[b], lse[b], *in_float64(q[b], k[b], v[b], **for_loop(how, b)), v[b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "size"),
    [(257, 257, 4, 4, 64), (16, 740, 8, 1, 72), (740, 16, 4, 2, 128), (54, 512, 2, 2, 256), (33, 33, 3, 1, 40)],
)
def test_longer_batches(dtype, queries, keys, heads, kv_heads, size):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, size).to(dtype) for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads)))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.dtype == dtype
    for b in range(2):
        assert_rows(out[b], lse[b], q[b], k[b], v[b], causal=True)


def test_chunks_and_blocks_change_nothing(monkeypatch):
    """Only the memory: matrix products of fewer queries, and sums of fewer keys, round alike to a few units."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 50, 4, 64), torch.randn(2, 70, 2, 64), torch.randn(2, 70, 2, 64)
    how = {"causal": True, "window_size": (9, -1), "return_lse": True}
    whole = flash_attn_func(q, k, v, **how)
    monkeypatch.setattr(reference, "_QUERIES", 7)
    monkeypatch.setattr(reference, "_KEYS", 16)
    chunked = flash_attn_func(q, k, v, **how)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=OTHER_BLOCKS)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("wide_q", [False, True])
def test_fp8_values_are_code_times_scale(dtype, per_head, wide_q, in_float64, assert_attends):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 64), torch.randn(2, 9, 2, 64).to(dtype), torch.randn(2, 9, 2, 64).to(dtype)
    q_scale, k_scale, v_scale = (torch.rand(heads if per_head else 1) + 0.5 for heads in (4, 2, 2))
    if wide_q:
        q, q_scale, exact_q = q.half(), None, q.half()
    else:
        q = q.to(dtype)
        exact_q = q.double() * q_scale[:, None]
    out = flash_attn_func(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=True)
    assert out.dtype == (torch.float16 if wide_q else torch.bfloat16)
    for b in range(2):
        keys, values = k[b].double() * k_scale[:, None], v[b].double() * v_scale[:, None]
        exact, _ = in_float64(exact_q[b], keys, values, causal=True)
        assert_attends(out[b], None, exact, None, values)


def packed(lengths_q, lengths_k, heads=4, kv_heads=2, size=64, dtype=torch.float32, tail=0):
    """Packed random sequences; tail: further rows that belong to none."""
    q = torch.randn(sum(lengths_q) + tail, heads, size).to(dtype)
    k, v = (torch.randn(sum(lengths_k) + tail, kv_heads, size).to(dtype) for _ in range(2))
    starts = [ints(0, *torch.tensor(lengths).cumsum(0).tolist()) for lengths in (lengths_q, lengths_k)]
    return q, k, v, *starts


def check_packed(out, lse, q, keys, values, cu_q, how, in_float64, assert_attends):
    """keys, values: one tensor per sequence."""
    for b in range(len(keys)):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        exact = in_float64(q[rows], keys[b], values[b], **for_loop(how, b))
        assert_attends(out[rows], lse[:, rows], *exact, values[b])


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_packed_sequences(how, in_float64, assert_attends):
    torch.manual_seed(0)
    lengths_q, lengths_k = [5, 0, 12], [9, 4, 7]
    q, k, v, cu_q, cu_k = packed(lengths_q, lengths_k)
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9, return_lse=True, **how)
    assert lse.shape == (4, 17)
    assert out.is_contiguous()
    keys, values = k.split(lengths_k), v.split(lengths_k)
    check_packed(out, lse, q, keys, values, cu_q, how, in_float64, assert_attends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [96, 192, 512])
def test_head_sizes(dtype, size, in_float64, assert_attends):
    torch.manual_seed(size)
    how = {"causal": True, "window_size": (7, -1)}
    q, k, v = torch.randn(2, 5, 4, size).to(dtype), *torch.randn(2, 2, 9, 2, size).to(dtype)
    out, lse = flash_attn_func(q, k, v, return_lse=True, **how)
    for b in range(2):
        assert_attends(out[b], lse[b], *in_float64(q[b], k[b], v[b], **for_loop(how, b)), v[b])
    lengths_q, lengths_k = [5, 1, 3], [9, 4, 2]
    q, k, v, cu_q, cu_k = packed(lengths_q, lengths_k, size=size, dtype=dtype)
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, return_lse=True, **how)
    check_packed(out, lse, q, k.split(lengths_k), v.split(lengths_k), cu_q, how, in_float64, assert_attends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_packed_sequences(dtype):
    torch.manual_seed(0)
    lengths = [257, 1, 500]
    q, k, v, cu, _ = packed(lengths, lengths, dtype=dtype)
    out, lse = flash_attn_varlen_func(q, k, v, cu, cu, 500, 500, causal=True, return_lse=True)
    for rows in (slice(0, 257), slice(257, 258), slice(258, 758)):
        assert_rows(out[rows], lse[:, rows], q[rows], k[rows], v[rows], causal=True)


def test_rows_of_no_sequence_are_zero_and_harm_nobody():
    torch.manual_seed(0)
    q, k, v, cu_q, cu_k = packed([3, 4], [3, 4], tail=2)
    q[-2:], k[-2:], v[-2:] = NAN, NAN, NAN
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 8, 8, causal=True, return_lse=True)
    inside, inside_lse = flash_attn_varlen_func(q[:7], k[:7], v[:7], cu_q, cu_k, 8, 8, causal=True, return_lse=True)
    assert torch.equal(out[:7], inside)
    assert torch.equal(lse[:, :7], inside_lse)
    assert torch.equal(out[7:], torch.zeros(2, 4, 64))
    assert bool((lse[:, 7:] == -float("inf")).all())


def test_queries_past_the_bound_are_cut():
    torch.manual_seed(0)
    q, k, v, cu_q, cu_k = packed([3, 2, 5], [4, 4, 6])
    want, want_lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, return_lse=True)
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 6, return_lse=True)
    assert torch.equal(out[:8], want[:8])
    assert torch.equal(lse[:, :8], want_lse[:, :8])
    assert not bool(out[8:].any())
    assert bool((lse[:, 8:] == -float("inf")).all())


def test_seqused_k_hides_the_rest_of_each_sequence(in_float64, assert_attends):
    torch.manual_seed(0)
    lengths_q, lengths_k, used = [2, 3, 1], [5, 6, 4], [3, 0, 9]
    q, k, v, cu_q, cu_k = packed(lengths_q, lengths_k)
    keys = [x[:n] for x, n in zip(k.split(lengths_k), used, strict=True)]
    values = [x[:n] for x, n in zip(v.split(lengths_k), used, strict=True)]
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 6, causal=True, return_lse=True, seqused_k=ints(*used))
    check_packed(out, lse, q, keys, values, cu_q, {"causal": True}, in_float64, assert_attends)


@pytest.mark.parametrize("page", [1, 8, 16, 64, 256])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
def test_keys_in_a_paged_cache_are_those_of_flash_attn_with_kvcache(page, storage):
    torch.manual_seed(0)
    lengths = ints(0, 7, 40)
    pages = -(-40 // page) + 1
    table = torch.randperm(3 * pages, dtype=torch.int32).view(3, pages)
    k, v = (torch.randn(3 * pages, page, 2, 64).to(storage) for _ in range(2))
    scales = {} if storage == torch.bfloat16 else {"k_scale": torch.rand(2) + 0.5, "v_scale": torch.rand(1) + 0.5}
    q = torch.randn(9, 4, 64).bfloat16()
    how = {"causal": True, "block_table": table, "return_lse": True, **scales}
    out, lse = flash_attn_varlen_func(q, k, v, ints(0, 3, 6, 9), None, 3, 40, seqused_k=lengths, **how)
    batched, batched_lse = flash_attn_with_kvcache(q.view(3, 3, 4, 64), k, v, cache_seqlens=lengths, **how)
    assert torch.equal(out, batched.flatten(0, 1))
    torch.testing.assert_close(lse, batched_lse.transpose(0, 1).flatten(1), rtol=0, atol=OTHER_BLOCKS)
    # the lengths may also come as cumulative ones
    cumulative = torch.cat((ints(0), lengths.cumsum(0).int()))
    same = flash_attn_varlen_func(q, k, v, ints(0, 3, 6, 9), cumulative, 3, 40, **how)
    assert torch.equal(same[0], out)


def test_a_cache_of_bytes_goes_with_e4m3_queries():
    torch.manual_seed(0)
    k, v = torch.randn(4, 8, 2, 64).to(torch.float8_e4m3fn), torch.randn(4, 8, 2, 64).to(torch.float8_e4m3fn)
    q = torch.randn(3, 4, 64).to(torch.float8_e4m3fn)
    how = {"seqused_k": ints(7, 30), "block_table": ints(2, 0, 1, 3).repeat(2, 1), "k_scale": torch.full((2,), 0.5)}
    starts = ints(0, 1, 3)
    want = flash_attn_varlen_func(q, k, v, starts, None, 2, 30, **how)
    got = flash_attn_varlen_func(q, k.view(torch.uint8), v.view(torch.uint8), starts, None, 2, 30, **how)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (4, 2, 64), (8, 1, 72)])
def test_a_row_does_not_depend_on_the_sequences_around_it(heads, kv_heads, size):
    """Nor on the bounds max_seqlen_q and max_seqlen_k, which come from the others: alone, each has its own."""
    torch.manual_seed(0)
    lengths_q, lengths_k = [7, 9, 4, 1, 33, 70], [30, 12, 4, 257, 300, 513]
    q, k, v, cu_q, cu_k = packed(lengths_q, lengths_k, heads, kv_heads, size)
    k[30:42], v[30:42] = NAN, NAN
    how = {"causal": True, "return_lse": True}
    whole, whole_lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 70, 513, **how)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for b, (queries, keys, values) in enumerate(parts):
        starts = ints(0, len(queries)), ints(0, len(keys))
        alone, lse = flash_attn_varlen_func(queries, keys, values, *starts, len(queries), len(keys), **how)
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        if b == 1:
            assert alone.isnan().all()
            assert whole[rows].isnan().all()
        else:
            assert torch.equal(alone, whole[rows])
            assert torch.equal(lse, whole_lse[:, rows])


@pytest.mark.parametrize("unbounded", [2**62, sys.maxsize])
def test_a_window_as_far_as_integers_go_is_unbounded(unbounded):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 5, 4, 64), torch.randn(1, 9, 2, 64), torch.randn(1, 9, 2, 64)
    assert torch.equal(
        flash_attn_func(q, k, v, window_size=(unbounded, unbounded)), flash_attn_func(q, k, v, window_size=(-1, -1))
    )
    for window in ((-1, unbounded), (unbounded, -1), (unbounded, 2), (2, unbounded)):
        same = tuple(-1 if side == unbounded else side for side in window)
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, window_size=same))


@pytest.mark.parametrize("shape", [(0, 3, 4, 64), (2, 0, 4, 64)])
def test_no_queries_give_an_empty_result(shape):
    q, k = torch.randn(shape), torch.randn(shape[0], 5, 2, 64)
    out, lse = flash_attn_func(q, k, k, return_lse=True)
    assert out.shape == shape
    assert lse.shape == (shape[0], 4, shape[1])


@pytest.mark.parametrize("batch", [0, 2])
def test_no_tokens_give_an_empty_result(batch):
    q, k, starts = torch.randn(0, 4, 64), torch.randn(0, 2, 64), torch.zeros(batch + 1, dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, k, starts, starts, 0, 0, return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


def test_a_batch_of_nothing_leaves_every_row_zero():
    q = torch.randn(3, 4, 64)
    out, lse = flash_attn_varlen_func(q, q, q, ints(0), ints(0), 5, 5, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert bool((lse == -float("inf")).all())


@pytest.mark.parametrize("kind", ["own", "strided", "q itself"])
@pytest.mark.parametrize("op", ["dense", "cache", "packed"])
def test_out_is_where_the_result_goes(op, kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 64), torch.randn(2, 7, 2, 64), torch.randn(2, 7, 2, 64)
    lengths, starts = ints(7, 3), ints(0, 5)
    call, given = {
        "dense": (lambda q, **how: flash_attn_func(q, k, v, causal=True, **how), q),
        "cache": (lambda q, **how: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **how), q),
        "packed": (lambda q, **how: flash_attn_varlen_func(q, k[0, :5], v[0, :5], starts, starts, 5, 5, **how), q[0]),
    }[op]
    want, want_lse = call(given, return_lse=True)
    given = given.clone()
    out = {
        "own": torch.empty_like(given),
        "strided": torch.empty(*given.shape[:-1], 99)[..., 7:71],
        "q itself": given,
    }[kind]
    got, lse = call(given, out=out, return_lse=True)
    assert got is out
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)
    assert call(given if kind != "q itself" else given.clone(), out=out) is out


def test_out_of_fp8_inputs_is_bf16():
    q = torch.randn(1, 3, 2, 64).to(torch.float8_e4m3fn)
    out = torch.empty(1, 3, 2, 64, dtype=torch.bfloat16)
    assert torch.equal(flash_attn_func(q, q, q, out=out), flash_attn_func(q, q, q))


def test_large_scores_do_not_overflow():
    q = torch.full((1, 2, 1, 64), 1e4)
    k = torch.stack((torch.full((1, 64), 1e4), torch.full((1, 64), -1e4)))[None]
    v = torch.tensor([1.0, 2.0])[None, :, None, None].repeat(1, 1, 1, 64)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full((1, 1, 2), 64 * 1e8 / 8), rtol=1e-6, atol=0)


# -- the ops ----------------------------------------------------------------------------------------------------------


def dense_arguments(kind: str):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 64), torch.randn(2, 7, 2, 64), torch.randn(2, 7, 2, 64)
    if kind == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if kind == "sliced":
        q, k, v = torch.randn(2, 7, 8, 64).split((4, 2, 2), dim=2)
    return q, k, v, None, True, 3, -1, 2.0, 0, ints(0, 2), None, None, None


def packed_arguments(kind: str):
    torch.manual_seed(0)
    q, k, v, cu_q, cu_k = packed([3, 0, 4], [5, 2, 6])
    table = used = None
    if kind == "transposed":
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    if kind == "paged":
        k, v = torch.randn(2, 6, 4, 2, 64).unbind()
        cu_k, used, table = None, ints(5, 2, 6), torch.arange(6, dtype=torch.int32).view(3, 2)
    return q, k, v, cu_q, cu_k, 4, 6, None, True, -1, -1, 0.0, 2, None, None, None, None, table, used


@pytest.mark.parametrize("kind", ["transposed", "sliced"])
def test_the_registered_dense_op_is_sound(kind):
    opcheck(torch.ops.kestrel_attention.flash_attn_func.default, dense_arguments(kind))


@pytest.mark.parametrize("kind", ["transposed", "paged"])
def test_the_registered_packed_op_is_sound(kind):
    opcheck(torch.ops.kestrel_attention.flash_attn_varlen_func.default, packed_arguments(kind))


@pytest.mark.parametrize("kind", ["plain", "transposed", "paged"])
def test_the_references_read_nothing_on_the_host(kind):
    """Fake tensors have no values to read: a reference that asked for one would fail here."""
    calls = packed_arguments(kind), dense_arguments("sliced")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args] for args in calls]
        out, _ = reference.flash_attn_varlen_func(*fakes[0])
        reference.flash_attn_func(*fakes[1])
    assert out.shape == (7, 4, 64)


@pytest.mark.parametrize(
    ("kind", "backend"), [("plain", "inductor"), ("transposed", "aot_eager"), ("sliced", "inductor")]
)
def test_dense_compiles_without_graph_breaks(kind, backend):
    q, k, v = dense_arguments(kind)[:3]
    how = {"causal": True, "window_size": (3, -1), "prefix_len": ints(0, 2), "return_lse": True}
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=backend)(q, k, v, **how)
    for a, b in zip(flash_attn_func(q, k, v, **how), compiled, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "backend"), [("plain", "aot_eager"), ("transposed", "aot_eager"), ("paged", "inductor")]
)
def test_packed_compiles_without_graph_breaks(kind, backend):
    *first, table, used = packed_arguments(kind)
    how = {"causal": True, "softcap": 2.0, "block_table": table, "seqused_k": used, "return_lse": True}
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend=backend)(*first[:7], **how)
    for a, b in zip(flash_attn_varlen_func(*first[:7], **how), compiled, strict=True):
        assert torch.equal(a, b)


def test_a_compiled_function_takes_other_batch_sizes_without_compiling_again():
    torch._dynamo.reset()
    counter = CompileCounter()
    function = torch.compile(flash_attn_func, fullgraph=True, backend=counter, dynamic=True)
    for batch in (2, 3, 5, 7):
        q = torch.randn(batch, 4 + batch, 4, 64)
        assert torch.equal(function(q, q, q), flash_attn_func(q, q, q))
    assert counter.frame_count == 1
