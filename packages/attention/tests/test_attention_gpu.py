"""Attention on a GPU gives what it gives on a CPU, in a captured graph too.

Prefill is compared with float64 in test_attention_prefill_gpu.py; here its references on both devices agree.
"""

from __future__ import annotations

import pytest
import torch
from bounds import LSE, ROUNDING, SUMS, relative

from kestrel_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attention_states,
    tau_tail,
)
from kestrel_runtime import backend
from kestrel_runtime.testing import assert_same_bits, graph_replay, large_allocation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HEADS, KV_HEADS, SIZE, PAGE, BLOCKS = 8, 2, 64, 16, 40


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_gpu(values):
    """Tensors of a list or dict on the GPU, the rest as it is."""
    if isinstance(values, dict):
        return dict(zip(values, on_gpu(list(values.values())), strict=True))
    return [x.cuda() if isinstance(x, torch.Tensor) else x for x in values]


def by_reference(function, *args, **kwargs):
    with backend("reference"):
        return function(*args, **kwargs)


def assert_alike(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """Outputs and LSEs that both round sums in float32, in another order."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=relative(b.dtype, LSE), atol=SUMS)


def decode_inputs(storage: torch.dtype, dtype: torch.dtype, seed: int, queries: int = 1) -> list[torch.Tensor]:
    """q, caches, new k and v, lengths (zero and padding among them), table."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    caches = [random(BLOCKS, PAGE, KV_HEADS, SIZE).to(storage) for _ in range(2)]
    new = [random(4, queries, KV_HEADS, SIZE).to(dtype) for _ in range(2)]
    table = torch.randperm(BLOCKS, generator=generator, dtype=torch.int32)[: 4 * 8].view(4, 8)
    lengths = ints(0, 54, -1, 100)[torch.randperm(4, generator=generator)]
    return [random(4, queries, HEADS, SIZE).to(dtype), *caches, *new, lengths, table]


def decode(q, k_cache, v_cache, k, v, lengths, table):
    return flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_lse=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("queries", [1, 5, 17])
def test_decoding_appends_and_attends_as_on_a_cpu(dtype, fp8, queries):
    inputs = decode_inputs(torch.float8_e4m3fn if fp8 else dtype, dtype, 0, queries)
    given = on_gpu(inputs)
    has_kernel = dtype != torch.float32 and queries <= 16
    got = decode(*given) if has_kernel else by_reference(decode, *given)
    assert_alike(got, by_reference(decode, *inputs))
    assert_same_bits([x.cpu() for x in given], inputs)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_replayed_graph_sees_new_lengths_tables_and_keys(fp8):
    storage = torch.float8_e4m3fn if fp8 else torch.bfloat16
    args, fresh = (on_gpu(decode_inputs(storage, torch.bfloat16, seed)) for seed in (1, 2))
    got = graph_replay(decode, args, fresh)
    assert_alike(got, by_reference(decode, *(x.cpu() for x in fresh)))


# -- prefill, by reference on both devices ----------------------------------------------------------------------------

SCORES = [
    {"causal": True},
    {"causal": True, "window_size": (50, -1), "softcap": 5.0},
    {"causal": True, "prefix_len": 30},
    {"window_size": (9, 0), "prefix_len": ints(0, 200, 7)},
]


@pytest.mark.parametrize("how", SCORES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_packed_sequences_are_those_of_a_cpu(dtype, how):
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, heads, SIZE).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts = ints(0, 100, 100, 300)
    how = how | {"return_lse": True}
    if dtype == torch.float8_e4m3fn:
        how |= {"q_scale": torch.rand(1) + 0.5, "k_scale": torch.rand(KV_HEADS) + 0.5, "v_scale": torch.rand(1) + 0.5}
    want = by_reference(flash_attn_varlen_func, q, k, v, starts, starts, 200, 200, **how)
    given = on_gpu([q, k, v, starts, starts])
    assert_alike(by_reference(flash_attn_varlen_func, *given, 200, 200, **on_gpu(how)), want)


@pytest.mark.parametrize("how", SCORES, ids=str)
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_packed_queries_over_a_paged_cache_are_those_of_a_cpu(storage, how):
    torch.manual_seed(0)
    q = torch.randn(60, HEADS, SIZE).bfloat16()
    codes = torch.float8_e4m3fn if storage == torch.uint8 else storage
    caches = [torch.randn(BLOCKS, PAGE, KV_HEADS, SIZE).to(codes).view(storage) for _ in range(2)]
    how = how | {"return_lse": True, "seqused_k": ints(40, 0, 128)}
    how |= {"block_table": torch.randperm(BLOCKS, dtype=torch.int32)[: 3 * 8].view(3, 8)}
    if storage != torch.bfloat16:
        how |= {"k_scale": torch.rand(KV_HEADS) + 0.5, "v_scale": torch.rand(1) + 0.5}
    starts = ints(0, 20, 21, 60)
    want = by_reference(flash_attn_varlen_func, q, *caches, starts, None, 39, 128, **how)
    given = on_gpu([q, *caches, starts])
    assert_alike(by_reference(flash_attn_varlen_func, *given, None, 39, 128, **on_gpu(how)), want)


@pytest.mark.parametrize("how", SCORES[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_dense_batches_are_those_of_a_cpu(dtype, how):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, SIZE).to(dtype) for n, h in ((70, HEADS), (90, KV_HEADS), (90, KV_HEADS)))
    how = how | {"return_lse": True}
    if dtype == torch.float8_e5m2:
        how |= {"q_scale": torch.rand(HEADS) + 0.5, "k_scale": torch.rand(1) + 0.5}
    want = by_reference(flash_attn_func, q, k, v, **how)
    assert_alike(by_reference(flash_attn_func, *on_gpu([q, k, v]), **on_gpu(how)), want)


# -- around attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_states_are_those_of_a_cpu(dtype):
    torch.manual_seed(0)
    outs, lses = torch.randn(2, 300, HEADS, SIZE).to(dtype), torch.randn(2, HEADS, 300)
    parts = outs[0], lses[0], outs[1], lses[1]
    assert_alike(merge_attention_states(*on_gpu(parts)), by_reference(merge_attention_states, *parts))


@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
def test_tau_tail_in_a_replayed_graph(tokens):
    def given(seed):
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator).bfloat16()
        tok = torch.randn(tokens, HEADS + KV_HEADS, generator=generator).bfloat16()
        table = torch.rand(64, HEADS + KV_HEADS, generator=generator)
        return [qkv, tok, table, torch.randint(-1, 70, (tokens,), generator=generator)]

    args, fresh = (on_gpu(given(seed)) for seed in (1, 2))
    graph_replay(lambda *inputs: tau_tail(*inputs, HEADS, SIZE), args, fresh)
    want = [x.cpu() for x in fresh]
    by_reference(tau_tail, *want, HEADS, SIZE)
    assert_alike((args[0],), (want[0],))


def test_tau_tail_of_one_token_whose_position_has_a_stride():
    torch.manual_seed(0)
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * SIZE).bfloat16()
    tok, table = torch.randn(1, HEADS + KV_HEADS).bfloat16(), torch.rand(64, HEADS + KV_HEADS)
    want, positions = qkv.clone(), torch.arange(7, 20)[::5][:1]
    by_reference(tau_tail, want, tok, table, positions, HEADS, SIZE)
    got = qkv.cuda()
    tau_tail(got, tok.cuda(), table.cuda(), torch.arange(7, 20, device="cuda")[::5][:1], HEADS, SIZE)
    torch.testing.assert_close(got.cpu(), want, rtol=ROUNDING[want.dtype], atol=0)


@large_allocation(gib=5)
def test_a_block_stride_past_two_to_the_31():
    shape, strides = (2, 1, KV_HEADS, SIZE), (2**31, KV_HEADS * SIZE, SIZE, 1)
    far = torch.zeros(2**31 + KV_HEADS * SIZE, dtype=torch.bfloat16, device="cuda").as_strided(shape, strides)
    near = torch.randn(shape, device="cuda").bfloat16()
    far.copy_(near)
    q, table = torch.randn(1, 1, HEADS, SIZE, device="cuda").bfloat16(), ints(1, 0)[None].cuda()
    given = {"cache_seqlens": ints(2).cuda(), "block_table": table, "return_lse": True}
    assert_same_bits(flash_attn_with_kvcache(q, far, far, **given), flash_attn_with_kvcache(q, near, near, **given))
