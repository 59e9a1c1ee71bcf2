"""merge_attention_states: attention over two sets of keys is attention over their union."""

from __future__ import annotations

import pytest
import torch

from kestrel_attention import flash_attn_func, merge_attention_states
from kestrel_runtime.testing import opcheck

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_two_parts_merge_into_the_whole(dtype, tokens, in_float64):
    torch.manual_seed(tokens)
    q, k, v = torch.randn(1, tokens, 4, 64), torch.randn(1, 50, 2, 64), torch.randn(1, 50, 2, 64)
    parts = [flash_attn_func(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 17), slice(17, 50))]
    (out_a, lse_a), (out_b, lse_b) = ((out[0].to(dtype), lse[0]) for out, lse in parts)
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype
    assert out.is_contiguous()
    # exactly: the two rounded outputs weighed in float64
    weight = torch.sigmoid(lse_a.double() - lse_b.double()).T[..., None]
    exact = weight * out_a.double() + (1 - weight) * out_b.double()
    magnitude = out_a.double().abs() + out_b.double().abs()
    info = torch.finfo(dtype)
    bound = 0.5 * info.eps * (exact.abs() + info.smallest_normal) + 8 * 2**-24 * magnitude
    assert bool(((out.double() - exact).abs() <= bound).all())
    if dtype == torch.float32 and tokens == 3:
        whole, whole_lse = in_float64(q[0], k[0], v[0])
        torch.testing.assert_close(out.double(), whole, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse.double(), whole_lse, rtol=0, atol=2e-6)


def test_a_part_that_saw_no_key_counts_for_nothing():
    out = torch.randn(3, 2, 64)
    lse = torch.randn(2, 3)
    nothing, unseen = torch.full_like(out, float("nan")), torch.full_like(lse, -INF)
    for merged, merged_lse in (
        merge_attention_states(out, lse, nothing, unseen),
        merge_attention_states(nothing, unseen, out, lse),
    ):
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    merged, merged_lse = merge_attention_states(nothing, unseen, nothing, unseen)
    assert torch.equal(merged, torch.zeros_like(out))
    assert torch.equal(merged_lse, unseen)


def test_far_apart_sums_do_not_overflow():
    one, two = torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0)
    high, low = torch.full((1, 1), 1e4), torch.full((1, 1), -1e4)
    out, lse = merge_attention_states(one, high, two, low)
    assert torch.equal(out, one)
    assert torch.equal(lse, high)


def test_nan_stays_in_its_row():
    torch.manual_seed(0)
    out_a, out_b, lse = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(2, 4)
    plain = merge_attention_states(out_a, lse, out_b, lse)
    out_a[1] = float("nan")
    mixed = merge_attention_states(out_a, lse, out_b, lse)
    assert mixed[0][1].isnan().all()
    rest = [0, 2, 3]
    assert torch.equal(mixed[0][rest], plain[0][rest])


def test_no_tokens_give_an_empty_result():
    out, lse = merge_attention_states(*(torch.zeros(0, 2, 8), torch.zeros(2, 0)) * 2)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


def arguments(kind: str):
    torch.manual_seed(0)
    outs, lses = torch.randn(2, 3, 2, 8), torch.randn(2, 2, 3)
    if kind == "transposed":
        outs = outs.transpose(1, 2).contiguous().transpose(1, 2)
        lses = lses.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "sliced":
        outs = torch.cat((outs, outs), dim=-1)[..., :8]
    return outs[0], lses[0], outs[1], lses[1]


KINDS = ("plain", "transposed", "sliced")


@pytest.mark.parametrize("kind", KINDS)
def test_the_registered_op_is_sound(kind):
    opcheck(merge_attention_states, arguments(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()
    compiled = torch.compile(merge_attention_states, fullgraph=True, backend=backend)(*arguments(kind))
    for a, b in zip(merge_attention_states(*arguments(kind)), compiled, strict=True):
        assert torch.equal(a, b)
