"""Kernel against reference on random calls: shapes, strides, dtypes, options and distributions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kestrel_moe import (
    gelu_and_mul,
    gelu_residual,
    moe_align_block_size,
    moe_sum,
    route_and_align,
    silu_and_mul,
    topk_softmax,
)
from kestrel_moe.reference_experts import most_blocks
from kestrel_runtime.testing import RandomCase, assert_same_bits, compare_at_random

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SECONDS = 10.0


def size(rng: random.Random, largest: int) -> int:
    """Sizes of every magnitude up to the largest; 0 is rare."""
    return 0 if rng.random() < 0.03 else rng.randint(1, 2 ** rng.randint(0, largest.bit_length() - 1))


def logits(rng: random.Random, tokens: int, experts: int) -> torch.Tensor:
    kind = rng.choice(("normal", "wide", "ties", "special"))
    x = torch.randn(tokens, experts + 8, device="cuda") * (30.0 if kind == "wide" else 3.0)
    if kind == "ties":
        x = x.round()
    if kind == "special":
        x = torch.where(torch.rand_like(x) < 0.2, rng.choice((float("inf"), float("-inf"), float("nan"))), x)
    start = rng.choice((0, 0, 3, 4))
    return x.to(rng.choice(FLOATS))[:, start : start + experts]


def same_choices(got: Any, want: Any, what: str) -> None:
    """Ids, counts and alignment agree in every bit; weights are each within 6e-6 of float64."""
    assert_same_bits(got[1:], want[1:], what)
    torch.testing.assert_close(got[0], want[0], rtol=1.2e-5, atol=1e-37)


def routing(rng: random.Random) -> RandomCase:
    experts = rng.randint(1, 512)
    x, k = logits(rng, size(rng, 4096), experts), rng.randint(1, min(experts, 32))
    options: dict[str, Any] = {"renormalize": rng.random() < 0.5}
    if rng.random() < 0.5:
        options["num_tokens"] = torch.tensor([rng.randint(-1, x.shape[0] + 2)], dtype=torch.int32, device="cuda")
    return RandomCase(topk_softmax, (x, k), options, same_choices)


def routing_and_alignment(rng: random.Random) -> RandomCase:
    experts = rng.randint(1, 512)
    x, k = logits(rng, size(rng, 256), experts), rng.randint(1, min(experts, 32))
    arguments = (x, k, rng.choice((1, 16, 64, 100)))
    return RandomCase(route_and_align, arguments, {"expert_map": table(rng, experts)}, same_choices)


def table(rng: random.Random, experts: int) -> torch.Tensor | None:
    if rng.random() < 0.5:
        return None
    return torch.randint(-experts // 4 - 1, experts, (experts,), dtype=torch.int32, device="cuda")


def alignment(rng: random.Random) -> RandomCase:
    experts, block = rng.randint(1, rng.choice((64, 256, 2000))), rng.choice((1, 16, 64, 100))
    tokens, choices, spare = size(rng, 8192), rng.randint(1, 10), rng.randint(0, 3)
    ids = torch.randint(-2, experts + 2, (tokens, choices + 4), device="cuda")
    start = rng.randint(0, 4)
    ids = ids[:, start : start + choices].to(rng.choice((torch.int32, torch.int64)))
    ids = ids.contiguous() if rng.random() < 0.5 else ids
    blocks = most_blocks(ids.numel(), experts, block) + spare
    outputs = [torch.full((n,), -7, dtype=torch.int32, device="cuda") for n in (blocks * block + spare, blocks, 1)]
    arguments = (ids, experts, block, *outputs, table(rng, experts))
    return RandomCase(moe_align_block_size, arguments, compare=assert_same_bits, writes=(3, 4, 5))


def gated(rng: random.Random) -> RandomCase:
    width, rows, dtype = size(rng, 8192) or 1, size(rng, 2048), rng.choice(FLOATS)
    start = rng.choice((0, 0, 1, 8))
    x = rng.choice((1.0, 8.0)) * torch.randn(rows, 2 * width + 8, device="cuda")
    x = x.to(dtype)[:, start : start + 2 * width]
    op = rng.choice((gelu_residual, silu_and_mul, gelu_and_mul))
    options = {} if op is silu_and_mul else {"approximate": rng.choice(("none", "tanh"))}
    h, g = x.float().chunk(2, dim=1)
    # Each is rounded once, to neighbours at most one eps apart; before that they are within 2^-16 of the value, and in
    # the tail, where the activation vanishes, within 2^-30 of h * (g + 1).
    tail = 2.0**-30 * h.abs() * (g.abs() + 1) + torch.finfo(dtype).tiny

    def compare(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
        allowed = (1.01 * torch.finfo(dtype).eps + 2.0**-16) * want.float().abs() + tail
        assert bool(((got.float() - want.float()).abs() <= allowed)[want.isfinite()].all()), what
        assert_same_bits(got[~want.isfinite()], want[~want.isfinite()], what)

    return RandomCase(op, (x,), options, compare)


def sums(rng: random.Random) -> RandomCase:
    tokens, choices, width = size(rng, 1024), rng.randint(0, 12), size(rng, 4096)
    x = torch.randn(tokens, choices + 1, width + 8, device="cuda").to(rng.choice(FLOATS))
    return RandomCase(moe_sum, (x[:, :choices, rng.choice((0, 1, 8)) :][..., :width],))


DRAWS = (routing, routing_and_alignment, alignment, gated, sums)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_random_calls_agree_with_the_reference(draw: Any) -> None:
    compare_at_random(draw, SECONDS, least=20)
