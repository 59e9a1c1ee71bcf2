"""Prefill on a GPU: calls without visible keys, cache layouts, many query heads, many codes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_oracle import KINDS, made, same_bits
from decode_random import arrange
from prefill_gpu import each_kernel, ints, random, scattered, starts_of  # noqa: F401
from prefill_oracle import assert_exact, assert_exact_over_cache, exact_attention

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def without_keys(form: str, queries: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of two sequences whose queries see no key."""
    q = random(2, queries, 4, size, dtype=dtype)
    k, v = (random(2, 5000, 2, size, dtype=dtype) for _ in range(2))
    how: dict[str, Any] = {"return_lse": True}
    if form == "dense":
        return flash_attn_func(q, k[:, :0], v[:, :0], **how)
    starts = starts_of([queries] * 2)
    if form == "packed":
        flat = (x.flatten(0, 1) for x in (k, v))
        out, lse = flash_attn_varlen_func(q.flatten(0, 1), *flat, starts, ints([0, 0, 0]), queries, 5000, **how)
    else:
        caches = [x.view(-1, 8, 2, size) for x in (k, v)]
        entry = {"no page": -1, "past the cache": 10**6}[form]
        table, lengths = torch.full((2, 625), entry, dtype=torch.int32, device="cuda"), ints([5000, 20])
        given = {"block_table": table, "seqused_k": lengths, **how}
        out, lse = flash_attn_varlen_func(q.flatten(0, 1), *caches, starts, None, queries, 5000, **given)
    return out.view(q.shape), lse.view(4, 2, queries).transpose(0, 1)


@pytest.mark.parametrize("form", ["dense", "packed", "no page", "past the cache"])
@pytest.mark.parametrize("queries", [1, 17, 300])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16), (512, torch.bfloat16), (128, E4M3), (64, E5M2)],
    ids=str,
)
def test_where_no_query_sees_a_key_all_is_zero(size, dtype, queries, form):
    torch.manual_seed(0)
    torch.full((2**24,), math.nan, device="cuda")  # the allocator's memory is not zero
    out, lse = without_keys(form, queries, size, dtype)
    assert out.shape == (2, queries, 4, size)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("layout", ["HND", "halves", "layers"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_a_cache_changes_no_bit(kind, size, page, layout):
    call = made(kind, 4, 2, size, page, (300, 0, 54, -1, 1000, 64), queries=70)
    want = call.run(causal=True)
    arrange(call, layout)
    assert same_bits(call.run(causal=True), want)


@pytest.mark.parametrize("kind", ["same", "e4m3", "int8"])
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 1), (64, 2), (48, 3)], ids=str)
def test_up_to_32_query_heads_share_keys(heads, kv_heads, size, kind):
    call = made(kind, heads, kv_heads, size, 16, (300, 5, 90), queries=40)
    assert_exact_over_cache(call, call.run(causal=True), {"causal": True})


@pytest.mark.parametrize("values", ["normal", "positive"])
@pytest.mark.parametrize("queries", [40, 2100])
@pytest.mark.parametrize("storage", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_nothing_of_16384_codes_is_lost(size, storage, queries, values):
    """In the scores' sums, and in those of values of one sign; from 2048 queries on they are dequantised first."""
    torch.manual_seed(0)
    q = random(1, queries, 2, size, dtype=torch.bfloat16)
    k, v = (random(1, 16384, 1, size, dtype=torch.bfloat16).to(storage) for _ in range(2))
    if values == "positive":
        v = v.float().abs().to(storage)
    caches, table = [x.view(1024, 16, 1, size) for x in (k, v)], torch.randperm(1024, device="cuda").int()[None]
    given = {"cache_seqlens": ints([16384]), "block_table": table, "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, **given)
    held = (x[table[0].long()].view(16384, 1, size).to(q.dtype) for x in caches)
    rows = slice(queries - 40, queries)  # the last ones see all keys
    exact = exact_attention(q[0, rows], *held, causal=True)
    assert_exact(out[0, rows], lse[0, :, rows], exact)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", [64, 128])
def test_nothing_of_16384_integers_is_lost(size, kind):
    call = made(kind, 2, 1, size, 64, (16384, 2048), queries=40)
    assert_exact_over_cache(call, call.run(causal=True), {"causal": True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_slices_of_a_fused_dense_qkv_give_the_bits_of_contiguous_tensors(size, dtype):
    torch.manual_seed(0)
    qkv = random(2, 300, 8, size, dtype=dtype)  # 4 + 2 + 2 heads
    q, k, v = qkv.split((4, 2, 2), dim=2)
    for how in ({"causal": True}, {}):
        want = flash_attn_func(*(x.contiguous() for x in (q, k, v)), return_lse=True, **how)
        assert same_bits(flash_attn_func(q, k, v, return_lse=True, **how), want)


def test_one_page_serves_every_sequence():
    """Entries of a table may repeat."""
    caches, table, held = scattered([300], 16, 2, 128, torch.bfloat16, False)
    q = random(3, 40, 4, 128, dtype=torch.bfloat16)
    given = {"block_table": table.expand(3, -1).contiguous(), "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=ints([300, 120, 40]), **given)
    for b, length in enumerate((300, 120, 40)):
        assert_exact(out[b], lse[b], exact_attention(q[b], held[0][0][:length], held[0][1][:length], causal=True))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("size", [264, 320, 504])
def test_few_queries_of_heads_without_a_decode_kernel(size, queries):
    call, how = made("same", 16, 2, size, 16, (0, 1, 54, 300, -1, 2000), queries), {"causal": True}
    assert_exact_over_cache(call, call.run(**how), how)
