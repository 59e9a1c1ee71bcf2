"""On a GPU the routed path gives what it gives on a CPU, reads nothing on the host, and can be captured."""

from __future__ import annotations

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
from kestrel_runtime.testing import graph_replay

pytestmark = pytest.mark.gpu

TOKENS = [1, 3, 16, 17, 257]


def routed(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """hidden, router logits, w1, w2: E = 16, Hd = 64, I = 32."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 64), (tokens, 16), (16, 64, 64), (16, 64, 32))
    hidden, logits, w1, w2 = (torch.randn(shape, generator=g) for shape in shapes)
    return [hidden.to(dtype), logits, (w1 / 8).to(dtype), (w2 / 6).to(dtype)]


def layer(hidden: torch.Tensor, logits: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    weights, ids, _ = topk_softmax(logits, 4, renormalize=True)
    return fused_experts(hidden, w1, w2, weights, ids)


@pytest.mark.parametrize("tokens", TOKENS)
def test_routing_and_alignment_give_the_ids_of_the_cpu(tokens: int) -> None:
    logits = routed(tokens, 1)[1]
    for got, expected in zip(route_and_align(logits.cuda(), 4, 16), route_and_align(logits, 4, 16), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=0)  # the integers among them exactly


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_layer_of_experts_gives_the_result_of_the_cpu(tokens: int, dtype: torch.dtype) -> None:
    args = routed(tokens, 2, dtype)
    # another order of summation, and in bf16 a rounding of the hidden layer to the other neighbour
    slack = 5e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    got = layer(*(a.cuda() for a in args)).cpu()
    torch.testing.assert_close(got, layer(*args), rtol=torch.finfo(dtype).eps, atol=slack)


@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_replayed_graph_sees_new_tokens(tokens: int) -> None:
    first, second = routed(tokens, 3), routed(tokens, 4)
    got = graph_replay(layer, [a.cuda() for a in first], [a.cuda() for a in second])
    torch.testing.assert_close(got.cpu(), layer(*second), rtol=0, atol=5e-6)


def test_alignment_in_a_replayed_graph_sees_new_ids() -> None:
    def aligned(ids: torch.Tensor) -> torch.Tensor:
        outputs = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in (320, 20, 1)]
        moe_align_block_size(ids, 16, 16, *outputs)
        return torch.cat(outputs)

    first, second = (torch.randint(0, 16, (20, 4), dtype=torch.int32) for _ in range(2))
    assert torch.equal(graph_replay(aligned, [first.cuda()], [second.cuda()]).cpu(), aligned(second))


@pytest.mark.parametrize("tokens", [1, 257])
def test_dense_ops_give_the_result_of_the_cpu(tokens: int) -> None:
    x, _, w1, w2 = routed(tokens, 5)
    mlp = (x, w1[0], None, w2[0].new_ones(64, 64) / 64, None, x)
    torch.testing.assert_close(
        fused_mlp(*(a if a is None else a.cuda() for a in mlp)).cpu(), fused_mlp(*mlp), rtol=0, atol=5e-6
    )
    torch.testing.assert_close(gelu_residual(x.cuda()).cpu(), gelu_residual(x), rtol=2e-6, atol=1e-7)
