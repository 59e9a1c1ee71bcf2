"""The grouped products against a loop over pairs in float64, and as a pipeline against fused_experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_moe import (
    fused_experts,
    gelu_residual,
    invoke_cute_moe_down,
    invoke_cute_moe_down_fp8,
    invoke_cute_moe_up,
    invoke_cute_moe_up_fp8,
    moe_sum,
    reference_experts,
    route_and_align,
)

F8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Case:
    hidden: torch.Tensor  # [T, Hd]
    w1: torch.Tensor  # [E, 2I, Hd]
    w3: torch.Tensor  # [E, Hd, I]
    weights: torch.Tensor
    ids: torch.Tensor
    aligned: list[torch.Tensor]
    block: int
    expert_map: list[int]

    def pairs(self) -> list[tuple[int, int, int, int]]:
        """(flat index, token, choice, place of the expert) of every pair that is not skipped."""
        count = self.ids.shape[1]
        places = [[self.expert_map[e] for e in row] for row in self.ids.tolist()]
        return [(t * count + j, t, j, e) for t, row in enumerate(places) for j, e in enumerate(row) if e >= 0]


def case(
    tokens: int,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    choices: int = 2,
    width: int = 40,
    inner: int = 24,
    expert_map: list[int] | None = None,
    experts: int = 8,
    favourite: int | None = None,
) -> Case:
    g = torch.Generator().manual_seed(tokens)
    table = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    logits = torch.randn(tokens, experts, generator=g)
    if favourite is not None:
        logits[:, favourite] = 20
    weights, ids, *aligned = route_and_align(logits, choices, block, expert_map=table)
    return Case(
        torch.randn(tokens, width, generator=g).to(dtype),
        (torch.randn(experts, 2 * inner, width, generator=g) / width**0.5).to(dtype),
        (torch.randn(experts, width, inner, generator=g) / inner**0.5).to(dtype),
        weights,
        ids,
        aligned,
        block,
        expert_map or list(range(experts)),
    )


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, roundings: int) -> None:
    """``magnitude`` is the sum of the magnitudes of the products. Each product takes part in so many float32 roundings:
    those of the sum, in any order, and those of the scales. The result is rounded once more, by half an eps."""
    finfo = torch.finfo(got.dtype)
    sum_error = roundings * 2.0**-24 * magnitude
    allowed = sum_error + 0.5 * finfo.eps * (exact.abs() + sum_error) + finfo.tiny
    assert got.shape == exact.shape
    worst = ((got.double() - exact).abs() / allowed).max()
    assert worst <= 1, f"{worst:.2f} of the bound"


def exact_up(c: Case, x: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
    """Row t*K+j is w1[e] @ x[t] in float64 for every pair that is not skipped; zeros for the others."""
    experts = torch.tensor(c.expert_map)[c.ids.long()]
    rows = torch.einsum("tjnk,tk->tjn", w1.double()[experts], x.double())
    return torch.where((experts >= 0)[..., None], rows, 0.0).flatten(0, 1)


def exact_down(c: Case, x: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    """weights[t, j] * (w3[e] @ x[t*K+j]) in float64."""
    experts = torch.tensor(c.expert_map)[c.ids.long()]
    rows = torch.einsum("tjnk,tjk->tjn", w3.double()[experts], x.view(*c.ids.shape, -1).double())
    return torch.where((experts >= 0)[..., None], rows * c.weights.double()[..., None], 0.0)


def assert_up(got: torch.Tensor, c: Case) -> None:
    magnitude = exact_up(c, c.hidden.abs(), c.w1.abs())
    assert_rounded_once(got, exact_up(c, c.hidden, c.w1), magnitude, c.hidden.shape[1])


def assert_down(got: torch.Tensor, c: Case, x: torch.Tensor) -> None:
    assert_rounded_once(got, exact_down(c, x, c.w3), exact_down(c, x.abs(), c.w3.abs()), x.shape[1] + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("tokens", [1, 3, 16, 60])
def test_up_is_one_product_per_pair(tokens: int, block: int, dtype: torch.dtype) -> None:
    c = case(tokens, block, dtype)
    assert_up(invoke_cute_moe_up(c.hidden, c.w1, None, c.weights, c.ids, *c.aligned, block_size=block), c)
    assert_up(invoke_cute_moe_up(c.hidden, c.w1[:, :24], c.w1[:, 24:], None, c.ids, *c.aligned, block_size=block), c)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 60])
def test_down_is_one_weighted_product_per_pair(tokens: int, dtype: torch.dtype) -> None:
    c = case(tokens, 16, dtype)
    x = torch.randn(2 * tokens, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_down(invoke_cute_moe_down(x, c.w3, c.weights, c.ids, *c.aligned, block_size=16), c, x)


def assert_both_products(c: Case) -> None:
    assert_up(invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=c.block), c)
    x = torch.randn(c.ids.numel(), c.w3.shape[2], generator=torch.Generator().manual_seed(1)).to(c.hidden.dtype)
    assert_down(invoke_cute_moe_down(x, c.w3, c.weights, c.ids, *c.aligned, block_size=c.block), c, x)


@pytest.mark.parametrize("tokens", [3, 257])
@pytest.mark.parametrize(("experts", "choices"), [(60, 4), (64, 8), (256, 8), (512, 10)])
def test_the_expert_counts_of_models(experts: int, choices: int, tokens: int) -> None:
    assert_both_products(case(tokens, 16, choices=choices, width=8, inner=6, experts=experts))


def test_a_prompt_of_740_tokens() -> None:
    assert_both_products(case(740, 64, torch.bfloat16, width=16, inner=8))


@pytest.mark.parametrize("tokens", [1, 50])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    c = case(tokens, 16, choices=1, favourite=5)
    assert bool((c.ids == 5).all())
    assert_both_products(c)


def test_without_a_local_expert_every_row_is_zero() -> None:
    c = case(20, expert_map=[-1] * 8)
    up = invoke_cute_moe_up(c.hidden, c.w1[:1], None, None, c.ids, *c.aligned, block_size=16)
    down = invoke_cute_moe_down(torch.ones(40, 24), c.w3[:1], c.weights, c.ids, *c.aligned, block_size=16)
    assert up.shape == (40, 48)
    assert down.shape == (20, 2, 40)
    assert not up.any()
    assert not down.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_leaves_the_others_as_they_are(dtype: torch.dtype) -> None:
    c = case(20, 16, dtype, favourite=5)  # all rows meet in the blocks of expert 5
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    up = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=16)
    down = invoke_cute_moe_down(x, c.w3, c.weights, c.ids, *c.aligned, block_size=16)
    c.hidden[7], x[14:16] = math.nan, math.nan
    up_nan = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=16).view(20, 2, 48)
    down_nan = invoke_cute_moe_down(x, c.w3, c.weights, c.ids, *c.aligned, block_size=16)
    others = [t for t in range(20) if t != 7]
    assert bool(up_nan[7].isnan().all() and down_nan[7].isnan().all())
    assert torch.equal(up_nan[others], up.view(20, 2, 48)[others])
    assert torch.equal(down_nan[others], down[others])


@pytest.mark.parametrize("tokens", [4, 40])
def test_pairs_that_no_block_names_give_zero_rows(tokens: int) -> None:
    expert_map = [-1, 3, -1, 0, 2, -1, -1, 1]
    c = case(tokens, expert_map=expert_map)
    c.weights.fill_(math.inf)  # a skipped pair does not even meet its weight
    named = {flat for flat, *_ in c.pairs()}
    skipped = [i for i in range(2 * tokens) if i not in named]
    up = invoke_cute_moe_up(c.hidden, c.w1[:4], None, None, c.ids, *c.aligned, block_size=16)
    assert not up[skipped].any()
    assert bool(up[sorted(named)].any(1).all())
    x = torch.rand(2 * tokens, 24) + 1
    down = invoke_cute_moe_down(x, c.w3[:4], c.weights, c.ids, *c.aligned, block_size=16).view(2 * tokens, 40)
    assert not down[skipped].any()
    assert bool(down[sorted(named)].isinf().all())


@pytest.mark.parametrize("block", [16, 64])
def test_with_one_block_size_a_row_is_the_same_bit_for_bit_in_any_batch(block: int) -> None:
    full = case(400, block, width=144, inner=80)
    inner = torch.randn(400, 2, 80, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(400, 8, generator=torch.Generator().manual_seed(2))

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids, *aligned = route_and_align(logits[rows], 2, block)
        up = invoke_cute_moe_up(full.hidden[rows], full.w1, None, None, ids, *aligned, block_size=block)
        down = invoke_cute_moe_down(inner[rows].flatten(0, 1), full.w3, weights, ids, *aligned, block_size=block)
        return up.view(len(rows), 2, -1), down

    up, down = run(torch.arange(400))
    for size in (1, 2, 3, 16, 17, 100, 399):
        rows = torch.randperm(400, generator=torch.Generator().manual_seed(size))[:size]
        part_up, part_down = run(rows)
        assert torch.equal(part_up, up[rows])
        assert torch.equal(part_down, down[rows])


def test_positions_past_the_length_and_experts_past_the_end_are_skipped() -> None:
    c = case(4)
    full = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=16)
    sorted_ids, experts, length = (t.clone() for t in c.aligned)
    length -= 16  # the last block is now past the length
    lost = [i for i in sorted_ids[length.item() : length.item() + 16].tolist() if i < 8]
    sorted_ids[20:28] = -torch.arange(1, 9)  # in a block that stays, where its own pairs end
    experts[0] = 8
    lost += [i for i in c.aligned[0][:16].tolist() if i < 8]
    kept = [i for i in range(8) if i not in lost]
    got = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, sorted_ids, experts, length, block_size=16)
    assert kept
    assert length.item() >= 32
    assert c.aligned[0][20:28].eq(8).all()
    assert not got[lost].any()
    assert torch.equal(got[kept], full[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 60])
def test_the_pipeline_is_fused_experts_but_for_roundings(tokens: int, dtype: torch.dtype) -> None:
    c = case(tokens, 16, dtype)
    up = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=16)
    down = invoke_cute_moe_down(gelu_residual(up), c.w3, c.weights, c.ids, *c.aligned, block_size=16)
    whole = fused_experts(c.hidden, c.w1, c.w3, c.weights, c.ids)
    # up, the inner layer and down are rounded to the dtype: each by half an eps of values of at most some ten
    torch.testing.assert_close(moe_sum(down), whole, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_block_size_follows_from_the_buffers(block: int) -> None:
    c = case(20, block)
    given = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=block)
    assert torch.equal(invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned), given)
    longer = torch.nn.functional.pad(c.aligned[0], (0, 3), value=40)  # vLLM's buffers are no multiple of the block
    experts = torch.nn.functional.pad(c.aligned[1], (0, 1), value=-1)
    assert torch.equal(invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, longer, experts, c.aligned[2]), given)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("given", [16, 32, 64, 128])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_only_the_block_size_of_the_alignment_is_accepted(block: int, given: int, tokens: int) -> None:
    c = case(tokens, block)
    x = torch.randn(2 * tokens, 24)
    codes, one, scale = c.hidden.to(F8), torch.ones(tokens, 1), torch.ones(8)
    inner = (x.to(F8), torch.ones(2 * tokens, 1))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "up": lambda: invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=given),
        "down": lambda: invoke_cute_moe_down(x, c.w3, c.weights, c.ids, *c.aligned, block_size=given),
        "up_fp8": lambda: invoke_cute_moe_up_fp8(
            codes, one, c.w1.to(F8), scale, None, None, None, c.ids, *c.aligned, block_size=given
        ),
        "down_fp8": lambda: invoke_cute_moe_down_fp8(
            *inner, c.w3.to(F8), scale, c.weights, c.ids, *c.aligned, block_size=given
        ),
    }
    for name, call in calls.items():
        if given == block:
            assert call().shape[0] in (tokens, 2 * tokens), name
        else:
            with pytest.raises(ValueError, match=f"invoke_cute_moe_{name}: argument 'block_size': expected the size"):
                call()


@pytest.mark.parametrize(("positions", "blocks", "fits"), [(1, 1, True), (17, 1, False), (17, 2, True), (33, 2, False)])
def test_the_last_block_of_the_buffers_may_be_partial(positions: int, blocks: int, fits: bool) -> None:
    sorted_ids, experts = torch.full((positions,), 2, dtype=torch.int32), torch.zeros(blocks, dtype=torch.int32)
    ids, length = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    arguments = (torch.ones(1, 4), torch.ones(1, 2, 4), None, None, ids, sorted_ids, experts, length)
    if fits:
        assert not invoke_cute_moe_up(*arguments, block_size=16).any()
    else:
        with pytest.raises(ValueError, match=f"{positions} positions in {blocks} blocks"):
            invoke_cute_moe_up(*arguments, block_size=16)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_one_full_block_fits_its_own_size_alone(size: int) -> None:
    ids, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([size], dtype=torch.int32)
    sorted_ids, experts = torch.full((size,), 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    sorted_ids[0] = 0
    arguments = (torch.ones(1, 1), torch.full((1, 1, 1), 3.0), None, None, ids, sorted_ids, experts, length)
    for block_size in (None, size):
        assert invoke_cute_moe_up(*arguments, block_size=block_size).item() == 3
    for other in {16, 32, 64, 128} - {size}:
        with pytest.raises(ValueError, match=f"'block_size': expected the size .* .{size} positions in 1 blocks"):
            invoke_cute_moe_up(*arguments, block_size=other)


def test_a_partial_last_block_names_no_pair_past_its_positions() -> None:
    sorted_ids, experts = torch.full((17,), 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    sorted_ids[0], sorted_ids[16] = 0, 1
    ids, length = torch.arange(2, dtype=torch.int32)[None], torch.tensor([32], dtype=torch.int32)
    w1 = torch.tensor([[[3.0]], [[5.0]]])
    got = invoke_cute_moe_up(torch.ones(1, 1), w1, None, None, ids, sorted_ids, experts, length, block_size=16)
    assert got.tolist() == [[3.0], [5.0]]


def test_views_out_and_untouched_inputs() -> None:
    c = case(12, 16, torch.bfloat16)
    wide = torch.randn(24, 60).bfloat16()
    wide[::2, 10:50] = c.hidden
    w1_wide = torch.randn(8, 48, 50).bfloat16()
    w1_wide[..., 5:45] = c.w1
    before = [t.clone() for t in (wide, w1_wide, *c.aligned)]
    expected = invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=16)
    out = torch.full((24, 60), math.nan).bfloat16()
    view = out[:, 4:52]
    invoke_cute_moe_up(wide[::2, 10:50], w1_wide[..., 5:45], None, None, c.ids, *c.aligned, block_size=16, out=view)
    assert torch.equal(view, expected)
    assert bool(out[:, :4].isnan().all() and out[:, 52:].isnan().all())
    assert all(torch.equal(a, b) for a, b in zip(before, (wide, w1_wide, *c.aligned), strict=True))


@pytest.mark.parametrize("block", [16, None])
def test_no_tokens(block: int | None) -> None:
    c = case(0)
    assert invoke_cute_moe_up(c.hidden, c.w1, None, None, c.ids, *c.aligned, block_size=block).shape == (0, 48)
    x = torch.empty(0, 24)
    assert invoke_cute_moe_down(x, c.w3, c.weights, c.ids, *c.aligned, block_size=block).shape == (0, 2, 40)


# ---- FP8 -------------------------------------------------------------------------------------------------------------


def spread(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scales of any of the three shapes, one per element of the weight [E, N, K]."""
    experts, rows, columns = weight.shape
    if scale.ndim == 3:
        return scale[:, torch.arange(rows) // 128][:, :, torch.arange(columns) // 128]
    return scale.view(experts, -1, 1).expand(experts, rows, columns)


def scales(shape: str, experts: int, rows: int, columns: int) -> torch.Tensor:
    shapes: dict[str, tuple[int, ...]] = {
        "expert": (experts,),
        "row": (experts, rows),
        "tile": (experts, -(-rows // 128), -(-columns // 128)),
    }
    return torch.rand(shapes[shape]) + 0.5


@pytest.mark.parametrize("shape", ["expert", "row", "tile"])
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_fp8_products_are_exact_but_for_one_rounding_to_bf16(tokens: int, shape: str) -> None:
    c = case(tokens, width=160, inner=136)
    x, w1, w3 = c.hidden.to(F8), c.w1.to(F8), c.w3.to(F8)
    x_scale, s1, s3 = torch.rand(tokens, 1) + 0.5, scales(shape, 8, 272, 160), scales(shape, 8, 160, 136)
    inner, inner_scale = torch.randn(2 * tokens, 136).to(F8), torch.rand(2 * tokens, 1) + 0.5
    # the sum, and one rounding each for the scale of the weight, of the row and of the router
    w1_exact, w3_exact = w1.double() * spread(s1, w1).double(), w3.double() * spread(s3, w3).double()
    x_exact, inner_exact = x.double() * x_scale.double(), inner.double() * inner_scale.double()
    up_exact, up_magnitude = exact_up(c, x_exact, w1_exact), exact_up(c, x_exact.abs(), w1_exact.abs())
    down_exact, down_magnitude = exact_down(c, inner_exact, w3_exact), exact_down(c, inner_exact.abs(), w3_exact.abs())
    up = invoke_cute_moe_up_fp8(x, x_scale, w1, s1, None, None, None, c.ids, *c.aligned, block_size=16)
    assert up.dtype == torch.bfloat16
    assert_rounded_once(up, up_exact, up_magnitude, 160 + 3)
    if shape == "row":
        parts = (w1[:, :136], s1[:, :136].contiguous(), w1[:, 136:], s1[:, 136:].contiguous())
        halves = invoke_cute_moe_up_fp8(x, x_scale, *parts, c.weights, c.ids, *c.aligned, block_size=16)
        assert_rounded_once(halves, up_exact, up_magnitude, 160 + 3)
    down = invoke_cute_moe_down_fp8(inner, inner_scale, w3, s3, c.weights, c.ids, *c.aligned, block_size=16)
    assert down.dtype == torch.bfloat16
    assert_rounded_once(down, down_exact, down_magnitude, 136 + 3)


@pytest.mark.parametrize("shape", ["expert", "row", "tile"])
def test_fp8_scales_of_any_magnitude_scale_the_result(shape: str) -> None:
    c = case(5, width=160, inner=136)
    x, w1, x_scale, s1 = c.hidden.to(F8), c.w1.to(F8), torch.rand(5, 1) + 0.5, scales(shape, 8, 272, 160)
    rest = (None, None, None, c.ids, *c.aligned)
    got = invoke_cute_moe_up_fp8(x, x_scale, w1, s1, *rest, block_size=16)
    assert torch.equal(invoke_cute_moe_up_fp8(x, x_scale, w1, s1 * 2.0**40, *rest, block_size=16), got * 2.0**40)


def test_fp8_views_give_what_their_copies_give() -> None:
    c = case(12)
    x, w1, w3 = c.hidden.to(F8), c.w1.to(F8), c.w3.to(F8)
    x_scale, s1, s3 = torch.rand(12, 1) + 0.5, scales("row", 8, 48, 40), scales("row", 8, 40, 24)
    codes, codes_scale = torch.randn(24, 24).to(F8), torch.rand(24, 1) + 0.5

    def strided(values: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(2 * values.shape[0], *values.shape[1:-1], values.shape[-1] + 20).to(F8)
        view = wide[::2, ..., 4:-16]
        view.copy_(values)
        return view

    up_args = (None, None, None, c.ids, *c.aligned)
    up = invoke_cute_moe_up_fp8(x, x_scale, w1, s1, *up_args, block_size=16)
    assert torch.equal(invoke_cute_moe_up_fp8(strided(x), x_scale, strided(w1), s1, *up_args, block_size=16), up)
    down_args = (c.weights, c.ids, *c.aligned)
    down = invoke_cute_moe_down_fp8(codes, codes_scale, w3, s3, *down_args, block_size=16)
    views = (strided(codes), codes_scale, strided(w3), s3)
    assert torch.equal(invoke_cute_moe_down_fp8(*views, *down_args, block_size=16), down)


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_references_read_nothing_on_the_host(tokens: int) -> None:
    with FakeTensorMode():  # a read of a value would raise here
        aligned: Any = [torch.empty(n, dtype=torch.int32) for n in (96, 6, 1)]
        ids, weights = torch.empty(tokens, 2, dtype=torch.int32), torch.empty(tokens, 2)
        up = reference_experts.invoke_cute_moe_up(
            torch.empty(tokens, 40), torch.empty(8, 48, 40), None, ids, *aligned, 16
        )
        codes, one = torch.empty(2 * tokens, 24, dtype=F8), torch.empty(2 * tokens, 1)
        w3 = torch.empty(8, 40, 24, dtype=F8)
        down = reference_experts.invoke_cute_moe_down_fp8(codes, one, w3, torch.empty(8), weights, ids, *aligned, 16)
    assert up.shape == (2 * tokens, 48)
    assert down.shape == (tokens, 2, 40)
