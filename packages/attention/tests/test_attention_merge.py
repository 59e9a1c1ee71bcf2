"""merge_attention_states: attention over two sets of keys is attention over their union."""

from __future__ import annotations

import pytest
import torch

from kestrel_attention import flash_attn_func, merge_attention_states
from kestrel_runtime.testing import assert_same_bits, in_layout, opcheck

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_two_parts_merge_into_the_whole(dtype, tokens, in_float64, assert_attends):
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
    # a sum of exponentials between 1 and 2, its logarithm, and one rounding of the result
    exact_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    assert bool(((lse.double() - exact_lse).abs() <= 6 * 2**-24 + 2**-24 * exact_lse.abs()).all())
    if dtype == torch.float32 and tokens == 3:
        whole, whole_lse = in_float64(q[0], k[0], v[0])
        assert_attends(out, lse, whole, whole_lse, v)


def test_a_part_that_saw_no_key_counts_for_nothing():
    out = torch.randn(3, 2, 64)
    lse = torch.randn(2, 3)
    nothing, unseen = torch.full_like(out, float("nan")), torch.full_like(lse, -INF)
    assert_same_bits(merge_attention_states(out, lse, nothing, unseen), (out, lse), "the second part is empty")
    assert_same_bits(merge_attention_states(nothing, unseen, out, lse), (out, lse), "the first part is empty")
    both = merge_attention_states(nothing, unseen, nothing, unseen)
    assert_same_bits(both, (torch.zeros_like(out), unseen), "both parts are empty")


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
    out_a, lse_a, out_b, lse_b = outs[0], lses[0], outs[1], lses[1]
    if kind == "strided":
        out_a, lse_a = in_layout(out_a, "transposed"), lse_a.T.contiguous().T
        out_b, lse_b = in_layout(out_b, "sliced"), in_layout(lse_b, "sliced")
    return out_a, lse_a, out_b, lse_b


def test_the_registered_op_is_sound():
    opcheck(merge_attention_states, arguments("strided"))


@pytest.mark.parametrize(("kind", "backend"), [("strided", "aot_eager"), ("strided", "inductor")])
def test_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()
    compiled = torch.compile(merge_attention_states, fullgraph=True, backend=backend)(*arguments(kind))
    assert_same_bits(compiled, merge_attention_states(*arguments(kind)))
