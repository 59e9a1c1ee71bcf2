"""On a GPU attention is that of a CPU, in a captured graph too."""

from __future__ import annotations

import pytest
import torch

from kestrel_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attention_states,
    tau_tail,
)
from kestrel_runtime.testing import graph_replay

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, SIZE, PAGE, BLOCKS = 8, 2, 64, 16, 40


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_alike(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """One unit of the one rounding, and float32 sums in another order."""
    for a, b in zip(got, want, strict=True):
        eps = torch.finfo(b.dtype).eps if b.dtype != torch.float32 else 1e-6
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=eps, atol=1e-5)


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
@pytest.mark.parametrize("queries", [1, 5])
def test_decoding_appends_and_attends_as_on_a_cpu(dtype, fp8, queries):
    on_cpu = decode_inputs(torch.float8_e4m3fn if fp8 else dtype, dtype, 0, queries)
    on_gpu = [x.cuda() for x in on_cpu]
    want, got = decode(*on_cpu), decode(*on_gpu)
    assert_alike(got, want)
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_replayed_graph_sees_new_lengths_tables_and_keys(fp8):
    storage = torch.float8_e4m3fn if fp8 else torch.bfloat16
    args, fresh = ([x.cuda() for x in decode_inputs(storage, torch.bfloat16, seed)] for seed in (1, 2))
    got = graph_replay(decode, args, fresh)
    assert_alike(got, decode(*(x.cpu() for x in fresh)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_and_dense_sequences_are_those_of_a_cpu(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, heads, SIZE).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts = ints(0, 100, 100, 300)
    how = {"causal": True, "window_size": (50, -1), "softcap": 5.0, "return_lse": True}
    want = flash_attn_varlen_func(q, k, v, starts, starts, 200, 200, **how)
    cuda = [x.cuda() for x in (q, k, v, starts, starts)]
    assert_alike(flash_attn_varlen_func(*cuda, 200, 200, **how), want)
    dense = [x[None] for x in (q, k, v)]
    assert_alike(flash_attn_func(*(x.cuda() for x in dense), **how), flash_attn_func(*dense, **how))
    (out, lse), (other, other_lse) = want, flash_attn_varlen_func(q, k, v, starts, starts, 200, 200, return_lse=True)
    parts = out, lse, other, other_lse
    assert_alike(merge_attention_states(*(x.cuda() for x in parts)), merge_attention_states(*parts))


@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
def test_tau_tail_in_a_replayed_graph(tokens):
    def given(seed):
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator).bfloat16()
        tok = torch.randn(tokens, HEADS + KV_HEADS, generator=generator).bfloat16()
        table = torch.rand(64, HEADS + KV_HEADS, generator=generator)
        return [qkv, tok, table, torch.randint(-1, 70, (tokens,), generator=generator)]

    args, fresh = ([x.cuda() for x in given(seed)] for seed in (1, 2))
    graph_replay(lambda *inputs: tau_tail(*inputs, HEADS, SIZE), args, fresh)
    want = [x.cpu() for x in fresh]
    tau_tail(*want, HEADS, SIZE)
    assert_alike((args[0],), (want[0],))


def test_a_block_stride_past_two_to_the_31():
    shape, strides = (2, 1, KV_HEADS, SIZE), (2**31, KV_HEADS * SIZE, SIZE, 1)
    far = torch.zeros(2**31 + KV_HEADS * SIZE, dtype=torch.bfloat16, device="cuda").as_strided(shape, strides)
    near = torch.randn(shape, device="cuda").bfloat16()
    far.copy_(near)
    q, table = torch.randn(1, 1, HEADS, SIZE, device="cuda").bfloat16(), ints(1, 0)[None].cuda()
    given = {"cache_seqlens": ints(2).cuda(), "block_table": table, "return_lse": True}
    assert_alike(flash_attn_with_kvcache(q, far, far, **given), flash_attn_with_kvcache(q, near, near, **given))


@pytest.mark.gpu
def test_tau_tail_of_one_token_whose_position_has_a_stride():
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * SIZE).bfloat16()
    tok, table = torch.randn(1, HEADS + KV_HEADS).bfloat16(), torch.rand(64, HEADS + KV_HEADS)
    want, positions = qkv.clone(), torch.arange(7, 20)[::5][:1]
    tau_tail(want, tok, table, positions, HEADS, SIZE)
    got = qkv.cuda()
    tau_tail(got, tok.cuda(), table.cuda(), torch.arange(7, 20, device="cuda")[::5][:1], HEADS, SIZE)
    torch.testing.assert_close(got.cpu(), want, rtol=2**-7, atol=0)
