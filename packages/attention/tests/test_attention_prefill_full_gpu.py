"""Dense queries that see every key, in heads of 72 and 80, on a GPU: a kernel of their own, against float64."""

from __future__ import annotations

import pytest
import torch
from decode_oracle import same_bits
from prefill_gpu import (
    DTYPES,
    each_kernel,  # noqa: F401
    launches_of,
    random,
)
from prefill_oracle import assert_exact, exact_attention

from kestrel_attention import flash_attn_func, prefill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HEADS = 36  # with two blocks of 128 queries enough thread blocks for a launch without splits
KINDS = {
    "normal": lambda k: k,
    "rising": lambda k: k * torch.linspace(0, 30, k.shape[1], device="cuda")[None, :, None, None].to(k.dtype),
    "falling": lambda k: k * torch.linspace(30, 0, k.shape[1], device="cuda")[None, :, None, None].to(k.dtype),
    "large": lambda k: 20 * k,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [72, 80])
@pytest.mark.parametrize("keys", [1, 57, 64, 65, 96, 97, 160, 161, 192, 729, 1024, 1500])
def test_any_number_of_keys_fills_its_tiles(keys, size, dtype):
    torch.manual_seed(0)
    q = random(2, 200, HEADS, size, dtype=dtype)
    k, v = (random(2, keys, HEADS // 4, size, dtype=dtype) for _ in range(2))
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    for b in range(2):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 12])
def test_the_base_of_weights_moves_where_scores_grow(batch, kind):
    torch.manual_seed(0)
    q, k, v = (random(batch, 729, 16, 72, dtype=torch.bfloat16) for _ in range(3))
    k = KINDS[kind](k)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    for b in {0, batch - 1}:
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b]))


@pytest.mark.parametrize("size", [72, 80])
@pytest.mark.parametrize("queries", [129, 191, 192, 193, 385, 729])
def test_nothing_is_written_past_the_last_query(queries, size):
    torch.manual_seed(0)
    q = random(3, queries, HEADS, size, dtype=torch.bfloat16)
    k, v = (random(3, 300, HEADS // 2, size, dtype=torch.bfloat16) for _ in range(2))
    memory = torch.full((q.numel() + 2**17,), 7.0, dtype=torch.bfloat16, device="cuda")
    out = memory[: q.numel()].view(q.shape)
    returned, lse = flash_attn_func(q, k, v, out=out, return_lse=True)
    assert returned.data_ptr() == memory.data_ptr()
    assert bool((memory[q.numel() :] == 7).all())
    for b in range(3):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b], v[b]))


@pytest.mark.parametrize("size", [72, 80])
def test_slices_of_a_fused_qkv_give_the_bits_of_contiguous_tensors(size):
    torch.manual_seed(0)
    qkv = random(2, 729, 3, 16, size, dtype=torch.bfloat16)
    want = flash_attn_func(*(x.contiguous() for x in qkv.unbind(2)), return_lse=True)
    assert same_bits(flash_attn_func(*qkv.unbind(2), return_lse=True), want)


def test_dense_calls_take_the_kernel_and_others_do_not(monkeypatch):
    if not prefill.USE_HOPPER:
        pytest.skip("the kernel is one of Hopper")
    launches = launches_of(monkeypatch, prefill)
    q, k, v = (random(1, 200, HEADS, 72, dtype=torch.bfloat16) for _ in range(3))
    flash_attn_func(q, k, v, softmax_scale=0.123)
    assert [name.split("_")[2] for name in launches.taken()] == ["full"]
    for how in ({"causal": True}, {"window_size": (5, -1)}, {"softcap": 3.0}, {"softmax_scale": -0.123}):
        flash_attn_func(q, k, v, **how)
        assert "full" not in launches.taken()[0].split("_")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 96, 150, 300])
def test_scores_of_minus_infinity_weigh_nothing_wherever_they_are(hidden, dtype):
    """Keys behind them have small logits; a row without others is 0, with an LSE of -inf."""
    q = torch.ones(2, 200, HEADS, 72, dtype=dtype, device="cuda")
    k = torch.full((2, 300, HEADS, 72), -2.36, dtype=dtype, device="cuda")
    k[:, :hidden, :, 0] = -torch.inf
    v = torch.ones(2, 300, HEADS, 72, dtype=dtype, device="cuda")
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    if hidden == 300:
        assert not bool(out.any())
        assert bool((lse == -torch.inf).all())
        return
    for b in range(2):
        assert_exact(out[b], lse[b], exact_attention(q[b], k[b, hidden:], v[b, hidden:]))


def test_a_query_of_nan_stays_in_its_row():
    torch.manual_seed(0)
    q, k, v = (random(2, 300, HEADS, 72, dtype=torch.bfloat16) for _ in range(3))
    clean = flash_attn_func(q, k, v)
    q[1, 7, 3, 5] = torch.nan
    got = flash_attn_func(q, k, v)
    assert bool(got[1, 7, 3].isnan().all())
    got[1, 7, 3] = clean[1, 7, 3]
    assert same_bits((got,), (clean,))


@pytest.mark.parametrize("keys", [57, 96, 153, 180, 300])
def test_an_infinite_value_is_infinite_in_its_dim_alone(keys):
    """Keys that others of their tile do not have hold zeros, not values of other keys."""
    torch.manual_seed(0)
    q, k, v = (random(2, n, HEADS, 72, dtype=torch.bfloat16) for n in (200, keys, keys))
    clean = flash_attn_func(q, k, v)
    for at in {0, keys // 2, keys - 1}:
        v_at = v.clone()
        v_at[1, at, 3, 5] = torch.inf
        got = flash_attn_func(q, k, v_at)
        assert bool((got[1, :, 3, 5] == torch.inf).all())
        got[1, :, 3, 5] = clean[1, :, 3, 5]
        assert same_bits((got,), (clean,))
