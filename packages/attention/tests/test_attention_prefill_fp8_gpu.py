"""Prefill in FP8 on a GPU: codes of keys and values, and e4m3 products, against float64."""

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
    SPREADS,
    each_kernel,  # noqa: F401
    ints,
    random,
    scores,
    spread_scores,
    starts_of,
)
from prefill_oracle import assert_exact, exact_attention, fp8_attention, of_sequence

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, prefill
from kestrel_runtime import backend

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


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


@pytest.mark.parametrize("queries_in", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_score_of_zero_is_zero_however_large_its_scale(size, queries_in):
    torch.manual_seed(0)
    q = torch.zeros(1, 150, 4, size, device="cuda").to(queries_in)
    k, v = (codes_of(random(1, 200, 2, size, dtype=torch.bfloat16), torch.float8_e4m3fn) for _ in range(2))
    scale = torch.full((1,), 2.0**100, device="cuda")
    got = flash_attn_func(q, k, v, softmax_scale=2.0**100, k_scale=scale, return_lse=True)
    assert same_bits(got, flash_attn_func(q, k, v, return_lse=True))


@pytest.mark.parametrize("kind", SPREADS)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_weights_over_codes_that_outgrow_their_base_are_those_of_float64(size, kind):
    """f16 flushes weights below 2^-31 of the largest, which counts where the values of larger ones are 0."""
    if not prefill.USE_HOPPER:
        pytest.skip("the weights of the portable kernel are bf16 or f16, as over keys of 16 bits")
    torch.manual_seed(0)
    q = random(4, 300, 16, size, dtype=torch.bfloat16)
    k, v = (random(4, 520, 4, size, dtype=torch.bfloat16) for _ in range(2))
    spread_scores(kind, q, k)
    k, v = (codes_of(x, torch.float8_e4m3fn) for x in (k, v))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    for b in (0, 3):
        exact = exact_attention(q[b], k[b].to(q.dtype), v[b].to(q.dtype), causal=True)
        lost = 2**-31 * v[b].double().abs().sum(0).repeat_interleave(4, 0)
        assert_exact(out[b], lse[b], exact._replace(bound=exact.bound + lost))
        one = slice(b, b + 1)
        alone = flash_attn_func(q[one], k[one], v[one], causal=True, return_lse=True)
        assert same_bits(alone, (out[one], lse[one]))


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


@pytest.mark.parametrize("queries_in", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("queries", [20, 300])  # splits, or none
@pytest.mark.parametrize("size", [64, 128, 256])
def test_nan_in_a_scale_of_keys_stays_in_its_head(size, queries, queries_in):
    torch.manual_seed(0)
    q = random(1, queries, 4, size, dtype=torch.bfloat16).to(queries_in)
    k, v = (codes_of(random(1, 2000, 2, size, dtype=torch.bfloat16), torch.float8_e4m3fn) for _ in range(2))
    scales = torch.tensor([0.5, 2.0], device="cuda")
    want = flash_attn_func(q, k, v, k_scale=scales, causal=True, return_lse=True)
    scales[1] = math.nan
    out, lse = flash_attn_func(q, k, v, k_scale=scales, causal=True, return_lse=True)
    assert bool(out[:, :, 2:].isnan().all())
    assert bool(lse[:, 2:].isnan().all())
    assert same_bits((out[:, :, :2], lse[:, :2]), (want[0][:, :, :2], want[1][:, :2]))
    out, lse = flash_attn_func(q, k[:, :10], v[:, :10], k_scale=scales, causal=True, return_lse=True)
    assert bool((out[:, : queries - 10] == 0).all())  # without keys
    assert bool(out[:, queries - 10 :, 2:].isnan().all())


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
    assert_prefill_alike(out, want)
    assert_lse_alike(lse, want_lse)
