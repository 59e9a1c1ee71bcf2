"""The grouped GEMMs of routed experts, one projection each, over the blocks of an alignment."""

from __future__ import annotations

import pytest
import torch
from expert_cases import FORMS, layer, quantised

from kestrel_moe import (
    invoke_cute_moe_down,
    invoke_cute_moe_down_fp8,
    invoke_cute_moe_up,
    invoke_cute_moe_up_fp8,
    moe_align_block_size,
    reference_experts,
)
from kestrel_quant import fp8_quant
from kestrel_runtime import backend
from kestrel_runtime.testing import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALF = [torch.bfloat16, torch.float16]


def aligned(ids: torch.Tensor, experts: int, block_size: int) -> list[torch.Tensor]:
    blocks = reference_experts.most_blocks(ids.numel(), experts, block_size)
    buffers = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (blocks * block_size, blocks, 1)]
    moe_align_block_size(ids, experts, block_size, *buffers)
    return buffers


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("two", [True, False], ids=["two weights", "one weight"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_products_equal_the_reference_and_skipped_pairs_are_zero(
    block_size: int, two: bool, dtype: torch.dtype
) -> None:
    hidden, w1, w3, weights, ids = layer(50, 8, 2, 256, 144, dtype)
    ids[0, 0], ids[7, 1] = -1, 99
    blocks = aligned(ids, 8, block_size)
    parts = (w1[:, :144], w1[:, 144:]) if two else (w1, None)
    inner = torch.randn(100, 144, device="cuda").to(dtype)
    up = invoke_cute_moe_up(hidden, *parts, None, ids, *blocks, block_size=block_size)
    down = invoke_cute_moe_down(inner, w3, weights, ids, *blocks, block_size=block_size)
    pair_weights = weights.flatten()
    for t, j in ((t, j) for t in range(50) for j in range(2)):
        pair, expert = 2 * t + j, int(ids[t, j])
        if not 0 <= expert < 8:
            assert not bool(up[pair].any() | down[t, j].any()), f"pair {pair}"
            continue
        want_up = hidden[t].double() @ w1[expert].double().T
        want_down = inner[pair].double() @ w3[expert].double().T * pair_weights[pair].double()
        # One rounding of a sum in float32, whose own error is far below.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(up[pair].double(), want_up, rtol=0.51 * eps, atol=1e-5)
        torch.testing.assert_close(down[t, j].double(), want_down, rtol=0.51 * eps, atol=1e-5)


@pytest.mark.parametrize("hole", [0, 5, 64])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_pair_may_be_missing_anywhere_in_a_block(block_size: int, hole: int) -> None:
    hidden, w1, _, _, ids = layer(150, 4, 1, 256, 128, ids=lambda t, e, k: torch.zeros(t, k))
    sorted_pairs, *blocks = aligned(ids, 4, block_size)
    want = invoke_cute_moe_up(hidden, w1, None, None, ids, sorted_pairs, *blocks, block_size=block_size)
    want[int(sorted_pairs[hole])] = 0
    sorted_pairs[hole] = -1
    got = invoke_cute_moe_up(hidden, w1, None, None, ids, sorted_pairs, *blocks, block_size=block_size)
    assert_same_bits(got, want, f"without the pair at {hole}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("two", [True, False], ids=["two weights", "one weight"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_fp8_products_equal_the_reference(block_size: int, two: bool, form: str) -> None:
    hidden, w1, w3, weights, ids = layer(50, 8, 2, 384, 256)
    ids[3, 0] = -1
    blocks = aligned(ids, 8, block_size)
    if two:
        (a, a_scale, _), (b, b_scale, _) = (quantised(w, form) for w in (w1[:, :256], w1[:, 256:]))
        parts = (a, a_scale, b, b_scale)
    else:
        codes, scale, _ = quantised(w1, form)
        parts = (codes, scale, None, None)
    w3_codes, w3_scale, _ = quantised(w3, form)
    x, x_scale = fp8_quant(hidden)
    inner, inner_scale = fp8_quant(torch.randn(100, 256, device="cuda").bfloat16())

    def products() -> list[torch.Tensor]:
        up = invoke_cute_moe_up_fp8(x, x_scale, *parts, None, ids, *blocks, block_size=block_size)
        down = (inner, inner_scale, w3_codes, w3_scale, weights, ids, *blocks)
        return [up, invoke_cute_moe_down_fp8(*down, block_size=block_size)]

    got = products()
    with backend("reference"):
        want = products()
    # Both round their sums once, to bf16. wgmma keeps 14 bits of the sum at each of K / 32 additions: sums of some 4
    # here, so 12 * 2^-13 * 4 at most.
    atol = 6e-3 if torch.cuda.get_device_capability() == (9, 0) else 1e-4
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=atol)
