"""Decode with sinks on a GPU: the results without sinks, in float64, with one more logit in the sum of exponentials."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bounds import ROUNDING, assert_lse_alike
from decode_oracle import KINDS, Call, Result, made, same_bits
from prefill_oracle import assert_exact_over_cache

from kestrel_attention import MORE_WARPS, flash_attn_with_kvcache
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

LENGTHS = (300, 0, 54, -1, 5000, 17, 1, 64)


def sinks_of(heads: int) -> torch.Tensor:
    """A sink that outweighs every key, one that none notices, none at all, and ordinary ones."""
    sinks = torch.randn(heads, device="cuda") * 3
    sinks[: min(heads, 4)] = torch.tensor([80.0, -100.0, -torch.inf, 0.0], device="cuda")[:heads]
    return sinks


def assert_has_sinks(got: Result, plain: Result, sinks: torch.Tensor) -> None:
    """plain: the same call without sinks, which other tests compare with float64."""
    (out, lse), (plain_out, plain_lse) = got, plain
    assert not plain_lse.isnan().any()
    want_lse = torch.logaddexp(plain_lse.double(), sinks.double()[:, None].expand_as(plain_lse))
    share = torch.exp(plain_lse.double() - want_lse).nan_to_num(0.0).mT[..., None]  # -inf - -inf: no key, no sink
    rounding = 2 * ROUNDING[out.dtype]  # that of plain, and that of out
    torch.testing.assert_close(out.double(), plain_out.double() * share, rtol=rounding, atol=2.0**-24)
    assert_lse_alike(lse, want_lse.float())


def check(call: Call, **how: Any) -> None:
    sinks = sinks_of(call.q.shape[2])
    with_sinks = call.run(**how, sinks=sinks)
    assert_has_sinks(with_sinks, call.run(**how), sinks)
    assert same_bits(call.run(**how, sinks=sinks), with_sinks)  # by the path of calls seen before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "queries"),
    [(8, 2, 64, 1), (64, 8, 64, 1), (8, 8, 128, 1), (8, 2, 128, 3), (16, 2, 128, 1), (8, 1, 128, 4), (4, 2, 256, 2)],
)
def test_caches_and_groups(heads, kv_heads, size, queries, kind, dtype):
    """Of one warp's rows, and of thread blocks of several row blocks."""
    check(made(kind, heads, kv_heads, size, 64, LENGTHS, queries, dtype), causal=True)


@pytest.mark.parametrize("kind", ["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(64, 8, 64), (16, 2, 128)])
def test_decode_with_sinks_is_exact(heads, kv_heads, size, queries, kind):
    call = made(kind, heads, kv_heads, size, 16, (2048, 0, 54, -1, 1, 512), queries)
    torch.manual_seed(1)
    for how in ({}, {"window_size": (127, 0)}):
        given = {"causal": True, "sinks": torch.randn(heads, device="cuda") * 3, **how}
        assert_exact_over_cache(call, call.run(**given), given)


@pytest.mark.parametrize("size", [72, 80, 96, 192, 320, 512])
@pytest.mark.parametrize("queries", [1, 5])
def test_head_sizes(size, queries):
    check(made("same", 8, 2, size, 16, LENGTHS, queries), causal=True)


@pytest.mark.parametrize("splits", [MORE_WARPS, 0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [64, 128])
def test_any_number_of_splits(size, splits):
    check(made("same", 8, 2, size, 16, LENGTHS), num_splits=splits)


def test_splits_that_a_block_combines():
    """Some hundred thread blocks, of sequences of two splits."""
    check(made("same", 32, 32, 64, 16, (500, 300, 54)))


@pytest.mark.parametrize(
    "how", [{"window_size": (127, 0)}, {"causal": True, "softcap": 5.0}, {"prefix_len": 20}], ids=str
)
@pytest.mark.parametrize("queries", [1, 4])
def test_what_shapes_the_scores(how, queries):
    check(made("same", 64, 8, 64, 16, LENGTHS, queries), **how)


@pytest.mark.parametrize("queries", [1, 4, 8])
@pytest.mark.parametrize("kind", ["same", "e4m3"])
def test_thread_blocks_of_a_warpgroup(kind, queries):
    check(made(kind, 32, 8, 128, 16, LENGTHS, queries), causal=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sink_of_nan_or_inf_spoils_its_head_alone(bad):
    call, sinks = made("same", 8, 2, 64, 16, LENGTHS), sinks_of(8)
    want = call.run(sinks=sinks)
    sinks[5] = bad
    out, lse = call.run(sinks=sinks)
    assert bool(out[:, :, 5].isnan().all())
    assert not bool(lse[:, 5].isfinite().any())
    others = [0, 1, 2, 3, 4, 6, 7]
    assert same_bits((out[:, :, others], lse[:, others]), (want[0][:, :, others], want[1][:, others]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_of_a_16_bit_model(dtype):
    call, sinks = made("same", 8, 2, 64, 16, LENGTHS), sinks_of(8).to(dtype)
    want = call.run(sinks=sinks.float())
    for _ in range(3):  # the first call is planned, a later one finds its launch
        assert same_bits(call.run(sinks=sinks), want)


def test_a_row_has_the_same_bits_in_any_batch():
    call, sinks = made("same", 16, 2, 64, 16, LENGTHS), sinks_of(16)
    out, lse = call.run(sinks=sinks)
    for b in range(len(LENGTHS)):
        assert same_bits(call.alone(b).run(sinks=sinks), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("kind", ["same", "int4"])
def test_new_keys_are_appended(kind):
    call = made(kind, 8, 2, 64, 64, (5000, 0, 54, 64, 17), extra_keys=1)
    k, v = (torch.randn(5, 1, 2, 64, device="cuda").bfloat16() for _ in range(2))
    other, sinks = call.clone(), sinks_of(8)
    first = other.clone()
    with_sinks = first.run(k, v, sinks=sinks)
    assert_has_sinks(with_sinks, other.run(k, v), sinks)
    for _ in range(6):  # of the same form, later ones as one graph
        again = call.clone()
        assert same_bits(again.run(k, v, sinks=sinks), with_sinks)
        for name, cache in again.caches.items():
            assert same_bits((cache,), (first.caches[name],))


def test_a_captured_graph_reads_the_sinks_and_lengths_of_its_replay():
    call, sinks = made("same", 8, 2, 64, 16, LENGTHS), sinks_of(8)

    def decode(q: torch.Tensor, lengths: torch.Tensor, sinks: torch.Tensor) -> Result:
        caches = call.caches["k_cache"], call.caches["v_cache"]
        given = {"cache_seqlens": lengths, "block_table": call.table, "sinks": sinks, "return_lse": True}
        return flash_attn_with_kvcache(q, *caches, **given)

    fresh = call.q.flip(0), call.lengths.flip(0).clamp(max=17), sinks.flip(0)
    assert same_bits(graph_replay(decode, (call.q.clone(), call.lengths.clone(), sinks), fresh), decode(*fresh))
