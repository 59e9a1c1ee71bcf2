"""On a GPU the routed path gives what it gives on a CPU, reads nothing on the host, and can be captured."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from kestrel_moe import (
    fused_experts,
    fused_mlp,
    gelu_residual,
    moe_align_block_size,
    route_and_align,
    topk_softmax,
)
from kestrel_runtime import backend
from kestrel_runtime.testing import assert_same_bits, graph_replay

pytestmark = pytest.mark.gpu

TOKENS = [1, 3, 16, 17, 257]
KERNELS_ONLY = pytest.mark.usefixtures("kernels_only")
DTYPES = [torch.bfloat16, torch.float32]


def kernels_of(dtype: torch.dtype) -> AbstractContextManager[None]:
    """fused_experts has kernels for 16-bit weights: there no fallback is allowed. float32 runs by reference."""
    return backend("auto" if dtype == torch.float32 else "kernel")


def routed(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """hidden, router logits, w1, w2: E = 16, Hd = 64, I = 32."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 64), (tokens, 16), (16, 64, 64), (16, 64, 32))
    hidden, logits, w1, w2 = (torch.randn(shape, generator=g) for shape in shapes)
    return [hidden.to(dtype), logits, (w1 / 8).to(dtype), (w2 / 6).to(dtype)]


def layer(hidden: torch.Tensor, logits: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    weights, ids, _ = topk_softmax(logits, 4, renormalize=True)
    return fused_experts(hidden, w1, w2, weights, ids)


def slack(dtype: torch.dtype) -> float:
    """Another order of summation; in bf16 a rounding of the hidden layer to the other neighbour."""
    return 5e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


@KERNELS_ONLY
@pytest.mark.parametrize("tokens", TOKENS)
def test_routing_and_alignment_give_the_ids_of_the_cpu(tokens: int) -> None:
    logits = routed(tokens, 1)[1]
    weights, *integers = route_and_align(logits.cuda(), 4, 16)
    with backend("auto"):
        want_weights, *want = route_and_align(logits, 4, 16)
    assert_same_bits([x.cpu() for x in integers], want)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1.2e-5, atol=0)  # each within 6e-6 of float64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_layer_of_experts_gives_the_result_of_the_cpu(tokens: int, dtype: torch.dtype) -> None:
    args = routed(tokens, 2, dtype)
    with kernels_of(dtype):
        got = layer(*(a.cuda() for a in args)).cpu()
    torch.testing.assert_close(got, layer(*args), rtol=torch.finfo(dtype).eps, atol=slack(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_replayed_graph_sees_new_tokens(tokens: int, dtype: torch.dtype) -> None:
    first, second = routed(tokens, 3, dtype), routed(tokens, 4, dtype)
    with kernels_of(dtype):
        got = graph_replay(layer, [a.cuda() for a in first], [a.cuda() for a in second])
    torch.testing.assert_close(got.cpu(), layer(*second), rtol=torch.finfo(dtype).eps, atol=slack(dtype))


@KERNELS_ONLY
def test_alignment_in_a_replayed_graph_sees_new_ids() -> None:
    def aligned(ids: torch.Tensor) -> torch.Tensor:
        outputs = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in (320, 20, 1)]
        moe_align_block_size(ids, 16, 16, *outputs)
        return torch.cat(outputs)

    first, second = (torch.randint(0, 16, (20, 4), dtype=torch.int32) for _ in range(2))
    got = graph_replay(aligned, [first.cuda()], [second.cuda()]).cpu()
    with backend("auto"):
        assert torch.equal(got, aligned(second))


@KERNELS_ONLY
@pytest.mark.parametrize("tokens", [1, 257])
def test_gated_activations_give_the_result_of_the_cpu(tokens: int) -> None:
    x = routed(tokens, 5)[0]
    got = gelu_residual(x.cuda()).cpu()
    with backend("auto"):
        torch.testing.assert_close(got, gelu_residual(x), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 257])
def test_the_reference_of_fused_mlp_gives_the_result_of_the_cpu(tokens: int) -> None:
    x, _, w1, w2 = routed(tokens, 5)
    mlp = (x, w1[0], None, w2[0].new_ones(64, 64) / 64, None, x)
    with backend("reference"):
        got = fused_mlp(*(a if a is None else a.cuda() for a in mlp)).cpu()
    torch.testing.assert_close(got, fused_mlp(*mlp), rtol=0, atol=5e-6)
