"""Prefill of heads of more than 256 dims on a GPU: what test_attention_prefill_gpu.py does not run with them."""

from __future__ import annotations

import pytest
import torch
from prefill_gpu import (
    NAMES,
    each_kernel,  # noqa: F401
    launches_of,
    random,
    scores,
)
from prefill_oracle import assert_exact, exact_attention, of_sequence

from kestrel_attention import flash_attn_func, prefill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]
SIZE = 512


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


@pytest.mark.parametrize("size", [264, 512])
def test_keys_that_tma_loads_are_multiplied_by_wgmma_on_hopper(monkeypatch, size):
    launches = launches_of(monkeypatch, prefill)
    q, k, v = (random(1, 100, 2, size, dtype=torch.bfloat16) for _ in range(3))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert ["hopper" in name for name in launches.taken()] == [prefill.USE_HOPPER]
    assert_exact(out[0], lse[0], exact_attention(q[0], k[0], v[0], causal=True))
