"""Prefill on a GPU: dense, packed and over caches, against float64."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from decode_oracle import same_bits
from prefill_oracle import assert_exact, exact_attention, fp8_attention, of_sequence

from kestrel_attention import (
    decode,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    hot_calls,
    prefill,
)
from kestrel_runtime import backend
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


HOT_CALLS = {
    "kestrel_attention.flash_attn": ("_dense_calls", "_packed_calls"),
    "kestrel_attention.flash_attn_with_kvcache": ("_hot_calls",),
}


@pytest.fixture(params=["hopper", "portable"], autouse=True)
def each_kernel(request, monkeypatch):
    """On Hopper every test runs with its kernel, and with the one of all other GPUs."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has no kernel of its own")
    monkeypatch.setattr(prefill, "USE_HOPPER", request.param == "hopper")
    for plans in (prefill.dense_launches, prefill.packed_launches, decode.launches):
        plans.clear()
    for module, names in HOT_CALLS.items():  # a remembered launch would run the kernel of the test before
        for name in names:
            monkeypatch.setattr(importlib.import_module(module), name, hot_calls.HotCalls())


DTYPES = [torch.bfloat16, torch.float16]
SIZES = [64, 72, 80, 96, 128, 192, 256]
LENGTHS = [(0, 0), (1, 1), (54, 54), (512, 512), (17, 300), (300, 17), (1, 700), (64, 0), (2048, 2048)]


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def scores(batch: int, heads: int) -> dict[str, dict[str, Any]]:
    """Arguments that shape the scores, by a name."""
    torch.manual_seed(1)
    return {
        "full": {},
        "causal": {"causal": True},
        "negative scale": {"causal": True, "softmax_scale": -0.2},
        "scale 0": {"softmax_scale": 0.0, "window_size": (3, 5)},
        "window of 1": {"causal": True, "window_size": (0, 0)},
        "window": {"causal": True, "window_size": (100, -1)},
        "window behind": {"window_size": (-1, 20)},
        "prefix": {"causal": True, "prefix_len": 130},
        "prefix beyond the length": {"causal": True, "prefix_len": 10**9},
        "prefixes and a window": {
            "window_size": (40, 3),
            "prefix_len": ints([0, 200, 7, 90, 10**6, 1, 64, 65, 500][:batch]),
        },
        "soft cap": {"causal": True, "softcap": 5.0, "softmax_scale": 1.0},
        "sinks": {"causal": True, "sinks": torch.randn(heads, device="cuda") * 3},
        "sinks in bf16": {"window_size": (10, 0), "sinks": torch.randn(heads, device="cuda").bfloat16()},
    }


NAMES = [
    "full", "causal", "negative scale", "scale 0", "window of 1", "window", "window behind", "prefix",
    "prefix beyond the length", "prefixes and a window", "soft cap", "sinks", "sinks in bf16",
]  # fmt: skip


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def starts_of(lengths: Any) -> torch.Tensor:
    return ints([0, *torch.tensor(lengths).cumsum(0).tolist()])


def packed(size: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    """q, k, v and their starts, of the sequences of LENGTHS."""
    torch.manual_seed(0)
    queries, keys = ([pair[i] for pair in LENGTHS] for i in range(2))
    q = random(sum(queries), heads, size, dtype=dtype)
    k, v = (random(sum(keys), kv_heads, size, dtype=dtype) for _ in range(2))
    return [q, k, v, starts_of(queries), starts_of(keys)]


# -- dense and packed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
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
    if keys == 0:
        with backend("reference"):
            out, lse = flash_attn_func(q, k, v, **how, return_lse=True)
    else:
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


@pytest.mark.parametrize("size", [64, 80, 128, 256])
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
@pytest.mark.parametrize("size", [64, 128])
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
@pytest.mark.parametrize("size", [72, 128, 256])
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


def test_three_hundred_sequences_are_those_of_a_loop():
    torch.manual_seed(0)
    lengths = torch.randint(1, 300, (300,)).tolist()
    starts = starts_of(lengths)
    q, k, v = (random(sum(lengths), 2, 64, dtype=torch.bfloat16) for _ in range(3))
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


# -- FP8 --------------------------------------------------------------------------------------------------------------


def codes_of(x: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    return (2 * x.float()).to(storage)


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("queries_in", [torch.bfloat16, torch.float16, "FP8"], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("size", [48, 64, 128, 256])
def test_codes_count_as_their_value_times_their_scale(size, per_head, queries_in, storage):
    torch.manual_seed(0)
    q = random(2, 150, 4, size, dtype=torch.bfloat16)
    k, v = (codes_of(random(2, 200, 2, size, dtype=torch.bfloat16), storage) for _ in range(2))
    heads = {"q_scale": 4, "k_scale": 2, "v_scale": 2}
    scales = {name: torch.rand(n if per_head else 1, device="cuda") + 0.1 for name, n in heads.items()}
    if queries_in == "FP8":
        q, dtype = codes_of(q, storage), torch.bfloat16
    else:
        q, dtype = q.to(queries_in), queries_in
        del scales["q_scale"]
    out, lse = flash_attn_func(q, k, v, causal=True, **scales, return_lse=True)
    assert out.dtype == dtype
    values = {
        x: given.double() * scales.get(f"{x}_scale", torch.ones(1, device="cuda")).double()[:, None]
        for x, given in {"q": q.float(), "k": k.float(), "v": v.float()}.items()
    }
    for b in range(2):
        given = [values[x][b] for x in "qkv"]
        if queries_in == "FP8" and fp8_products(storage, size):
            exact = fp8_attention(*given, causal=True)
        else:
            exact = exact_attention(*given, causal=True, dtype=dtype)
        assert_exact(out[b], lse[b], exact)


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_queries_of_any_magnitude_attend_to_codes(size, storage):
    torch.manual_seed(0)
    q = random(2, 150, 4, size, dtype=torch.bfloat16)
    k, v = (codes_of(random(2, 200, 2, size, dtype=torch.bfloat16), storage) for _ in range(2))
    want = flash_attn_func(q, k, v, causal=True, softmax_scale=0.1, return_lse=True)
    for power in (-60, 60):
        scaled = flash_attn_func(q * 2.0**power, k, v, causal=True, softmax_scale=0.1 * 2.0**-power, return_lse=True)
        assert same_bits(scaled, want)
    q[:, :, :, 0] *= 2.0**20  # of a dim whose keys are zeros
    k.view(torch.uint8)[..., 0] = 0
    q[:, 7] = 0
    out, lse = flash_attn_func(q, k, v, causal=True, softmax_scale=0.1, return_lse=True)
    for b in range(2):
        exact = exact_attention(q[b], k[b].to(q.dtype), v[b].to(q.dtype), causal=True, softmax_scale=0.1)
        assert_exact(out[b], lse[b], exact)


@pytest.mark.parametrize("queries_in", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_nan_stays_in_its_row_or_head(size, queries_in):
    torch.manual_seed(0)
    q = random(1, 300, 4, size, dtype=torch.bfloat16).to(queries_in)
    k, v = (codes_of(random(1, 300, 2, size, dtype=torch.bfloat16), torch.float8_e4m3fn) for _ in range(2))
    want = flash_attn_func(q, k, v, causal=True)
    nan = q.float()
    nan[0, 130, 1, 3] = math.nan
    nan = nan.to(queries_in)
    out = flash_attn_func(nan, k, v, causal=True)
    assert bool(out[0, 130, 1].isnan().all())
    out[0, 130, 1] = want[0, 130, 1]
    assert same_bits((out,), (want,))
    k.view(torch.uint8)[0, 200, 1, 5] = 0x7F
    out = flash_attn_func(q, k, v, causal=True)
    assert bool(out[0, 200:, 2:].isnan().all())
    assert same_bits((out[0, :200], out[0, :, :2]), (want[0, :200], want[0, :, :2]))


def fp8_products(storage: torch.dtype, size: int) -> bool:
    """Whether queries, keys and values of a dtype are multiplied as they are."""
    return prefill.USE_HOPPER and storage == torch.float8_e4m3fn and size <= 128


def only_fp8_products() -> None:
    if not prefill.USE_HOPPER:
        pytest.skip("the portable kernel computes in bf16")


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [16, 64, 80, 128])
def test_fp8_products_of_packed_sequences_are_those_of_float64(size, name):
    only_fp8_products()
    torch.manual_seed(0)
    queries, keys = ([pair[i] for pair in LENGTHS] for i in range(2))
    q, k, v = (e4m3(sum(lengths), heads, size) for lengths, heads in ((queries, 4), (keys, 2), (keys, 2)))
    starts_q, starts_k = starts_of(queries), starts_of(keys)
    how = scores(len(LENGTHS), 4)[name]
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 2048, 2048, **how, return_lse=True)
    for b in range(len(LENGTHS)):
        rows, of_keys = (slice(int(starts[b]), int(starts[b + 1])) for starts in (starts_q, starts_k))
        given = q[rows].float(), k[of_keys].float(), v[of_keys].float()
        assert_exact(out[rows], lse[:, rows], fp8_attention(*given, **of_sequence(how, b)))


@pytest.mark.parametrize("values", ["normal", "positive"])
@pytest.mark.parametrize("scale", [None, 0.005])
@pytest.mark.parametrize("size", [64, 128])
def test_fp8_products_lose_nothing_over_many_keys(size, scale, values):
    """wgmma keeps some 14 bits of FP8 sums; over 16384 keys of one sign a quarter of the result would be lost."""
    only_fp8_products()
    torch.manual_seed(0)
    q, k, v = e4m3(200, 2, size), e4m3(16384, 1, size), e4m3(16384, 1, size)
    if values == "positive":
        v = v.float().abs().to(torch.float8_e4m3fn)
    starts = [ints([0, n]) for n in (200, 16384)]
    out, lse = flash_attn_varlen_func(q, k, v, *starts, 200, 16384, softmax_scale=scale, return_lse=True)
    exact = fp8_attention(q.float(), k.float(), v.float(), softmax_scale=scale)
    assert_exact(out, lse, exact)
    error = (out.double() - exact.out).norm() / exact.out.norm()
    # Splits of 64 dims have bases of their own, so that most weights have other codes, up to 2^-4 apart; bases of 128
    # dims are powers of two. 64 missing keys would give 2^-4.
    assert float(error) <= (2**-6 if size > 64 else 2**-4.5)


@pytest.mark.parametrize("queries", [17, 128])
@pytest.mark.parametrize("size", [64, 128])
def test_fp8_products_of_split_keys_are_those_of_float64(size, queries):
    torch.manual_seed(0)
    q, k, v = e4m3(2, queries, 4, size), e4m3(2, 5000, 2, size), e4m3(2, 5000, 2, size)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    for b in range(2):
        given = q[b].float(), k[b].float(), v[b].float()
        assert_exact(out[b], lse[b], fp8_attention(*given, causal=True, rounded=size > 64))


@pytest.mark.parametrize("queries", [200, 700])
def test_fp8_batches_that_take_larger_thread_blocks_give_the_same_bits(queries):
    torch.manual_seed(0)
    q, k, v = (e4m3(16, queries, heads, 64) for heads in (36, 4, 4))
    how = {"causal": True, "return_lse": True}
    large = flash_attn_func(q, k, v, **how)
    for b in (0, 15):
        one = slice(b, b + 1)
        assert same_bits(flash_attn_func(q[one], k[one], v[one], **how), tuple(x[one] for x in large))


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("size", [64, 128])
def test_fp8_pages_and_batches_give_the_bits_of_packed_keys(size, page, storage):
    torch.manual_seed(0)
    lengths, queries = [300, 1000, 54, 17, 129], 70
    q, k, v = e4m3(len(lengths) * queries, 4, size), e4m3(sum(lengths), 2, size), e4m3(sum(lengths), 2, size)
    starts_q, starts_k = starts_of([queries] * len(lengths)), starts_of(lengths)
    how = {"causal": True, "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, queries, 1000, **how)
    columns = -(-1000 // page) + 1
    table = torch.randperm(len(lengths) * columns).view(len(lengths), columns)
    caches = [torch.full((table.numel(), page, 2, size), 0x7F, dtype=torch.uint8) for _ in range(2)]  # NaN
    for b, length in enumerate(lengths):
        at = torch.arange(length)
        rows = slice(int(starts_k[b]), int(starts_k[b + 1]))
        for cache, x in zip(caches, (k, v), strict=True):
            cache[table[b, at // page], at % page] = x[rows].view(torch.uint8).cpu()
    paged = [cache.cuda().view(storage) for cache in caches]
    given = {"block_table": table.int().cuda(), "seqused_k": ints(lengths)}
    assert same_bits(flash_attn_varlen_func(q, *paged, starts_q, None, queries, 1000, **given, **how), (out, lse))
    for b, length in enumerate(lengths):
        rows, keys = slice(b * queries, (b + 1) * queries), slice(int(starts_k[b]), int(starts_k[b + 1]))
        alone = q[rows].clone(), k[keys].clone(), v[keys].clone(), ints([0, queries]), ints([0, length]), queries, 4000
        assert same_bits(flash_attn_varlen_func(*alone, **how), (out[rows], lse[:, rows].contiguous()))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_keys_are_appended_to_fp8_caches(dtype, storage, page):
    torch.manual_seed(0)
    lengths, queries, blocks = [200, 0, 54, -1], 100, 1600 // page
    codes = torch.float8_e4m3fn if storage == torch.uint8 else storage
    caches = [codes_of(random(blocks, page, 2, 128, dtype=dtype), codes).view(storage) for _ in range(2)]
    table = torch.randperm(blocks, device="cuda").int()[: 4 * (320 // page)].view(4, -1)
    copies = [x.clone() for x in caches]
    q, k, v = (random(4, queries, heads, 128, dtype=dtype) for heads in (4, 2, 2))
    scales = {"k_scale": torch.rand(2, device="cuda") + 0.1, "v_scale": torch.rand(1, device="cuda") + 0.1}
    given = {"cache_seqlens": ints(lengths), "block_table": table, "causal": True, "return_lse": True, **scales}
    out, lse = flash_attn_with_kvcache(q, *caches, k, v, **given)
    with backend("reference"):
        want, want_lse = flash_attn_with_kvcache(q, *copies, k, v, **given)
    assert same_bits(tuple(caches), tuple(copies))
    torch.testing.assert_close(out, want, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


# -- over caches ------------------------------------------------------------------------------------------------------


def scattered(lengths: list[int], page: int, kv_heads: int, size: int, dtype: torch.dtype, holes: bool) -> Any:
    """Caches in which everything that no sequence holds is NaN, their table, and k, v, exists of each sequence."""
    torch.manual_seed(0)
    columns = max(1, -(-max(lengths) // page)) + 2
    used = [max(0, -(-length // page)) for length in lengths]
    blocks = sum(used) + 3
    caches = [torch.full((blocks, page, kv_heads, size), math.nan, dtype=dtype, device="cuda") for _ in range(2)]
    table = torch.full((len(lengths), columns), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(blocks).tolist()
    held = []
    for b, length in enumerate(lengths):
        k, v = (random(max(length, 0), kv_heads, size, dtype=dtype) for _ in range(2))
        exists = torch.ones(max(length, 0), dtype=torch.bool, device="cuda")
        for column in range(used[b]):
            if holes and column % 3 == 1:
                table[b, column] = (-1, blocks, -(2**31))[column % 9 // 3]
                exists[column * page : (column + 1) * page] = False
                continue
            block = free.pop()
            table[b, column] = block
            rows = slice(column * page, min((column + 1) * page, length))
            for cache, x in zip(caches, (k, v), strict=True):
                cache[block, : rows.stop - rows.start] = x[rows]
        held.append((k, v, exists))
    return caches, table.cuda(), held


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("page", [1, 7, 16, 64, 256])
def test_paged_caches_are_those_of_float64(page, holes, name):
    lengths, queries = [300, 0, 54, -1, 1000, 17, 600], 70
    caches, table, held = scattered(lengths, page, 2, 64, torch.bfloat16, holes)
    q = random(len(lengths), queries, 4, 64, dtype=torch.bfloat16)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("queries", [100, 400])
def test_pages_of_one_key_give_the_bits_of_dense_keys(queries, size, dtype):
    """The former are copied by cp.async, the latter by TMA where there is a kernel for both."""
    torch.manual_seed(0)
    q = random(3, queries, 4, size, dtype=dtype)
    k, v = (random(3, 700, 2, size, dtype=dtype) for _ in range(2))
    table = torch.randperm(2100, device="cuda").int().view(3, 700)
    caches = [torch.empty(2100, 1, 2, size, dtype=dtype, device="cuda") for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[table.long().flatten(), 0] = x.flatten(0, 1)
    how = {"causal": True, "return_lse": True}
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
    torch.testing.assert_close(out, want, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    again = flash_attn_with_kvcache(q, *caches, **given | {"cache_seqlens": ints([300, 100, 154, -1])})
    assert same_bits(again, (out, lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_without_keys_have_their_sink_as_lse_however_small(dtype):
    sizes = ((70, 4), (6, 2), (6, 2))
    q, k, v = (random(1, length, heads, 64, dtype=torch.bfloat16).to(dtype) for length, heads in sizes)
    sinks = torch.tensor([-88.0, -100.0, -65504.0, 3.0], device="cuda")
    out, lse = flash_attn_func(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :64].any()
    torch.testing.assert_close(lse[0, :, :64], sinks[:, None].expand(4, 64), rtol=1e-6, atol=1e-6)
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


def test_a_replayed_graph_sees_other_lengths_tables_and_keys():
    def call(q, k_cache, v_cache, lengths, table):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, return_lse=True
        )

    def inputs(seed, lengths):
        caches, table, _ = scattered([700, 700], 16, 2, 64, torch.bfloat16, False)
        torch.manual_seed(seed)
        return [random(2, 90, 4, 64, dtype=torch.bfloat16), *caches, ints(lengths), table.roll(seed, 0)]

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
