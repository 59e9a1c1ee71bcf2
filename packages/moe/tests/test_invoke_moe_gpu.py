"""The grouped GEMMs of routed experts, one projection each, over the blocks of an alignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import FORMS, ODD_ROUTINGS, Ids, layer, quantised, random_ids

from kestrel_moe import (
    invoke_cute_moe_down,
    invoke_cute_moe_down_fp8,
    invoke_cute_moe_up,
    invoke_cute_moe_up_fp8,
    moe_align_block_size,
    reference_experts,
)
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import IN_KERNEL, Variant
from kestrel_quant import fp8_quant
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
    large_allocation,
)

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


# -- all four ops alike -----------------------------------------------------------------------------------------------

OPS = {
    "up": invoke_cute_moe_up,
    "down": invoke_cute_moe_down,
    "up fp8": invoke_cute_moe_up_fp8,
    "down fp8": invoke_cute_moe_down_fp8,
}
BLOCK_SIZES = [16, 32, 64, 128]
EVERY_OP = pytest.mark.parametrize("op", OPS)
EVERY_BLOCK = pytest.mark.parametrize("block_size", BLOCK_SIZES)


class Product:
    """One of the ops on random tensors. up: of one weight of `outputs` rows, 2I."""

    def __init__(
        self,
        op: str,
        tokens: int = 50,
        experts: int = 8,
        choices: int = 2,
        width: int = 272,
        outputs: int = 288,
        dtype: torch.dtype = torch.bfloat16,
        form: str = "channel",
        ids: Ids = random_ids,
    ) -> None:
        torch.manual_seed(tokens + experts + width)
        self.op, self.up, self.fp8 = OPS[op], op.startswith("up"), op.endswith("fp8")
        self.experts, self.outputs, self.dtype = experts, outputs, torch.bfloat16 if self.fp8 else dtype
        self.ids = ids(tokens, experts, choices).to("cuda", torch.int32)
        self.topk_weights = torch.rand(tokens, choices, device="cuda").softmax(-1)
        self.x = torch.randn(tokens * (1 if self.up else choices), width, device="cuda").to(self.dtype)
        weight = (torch.randn(experts, outputs, width, device="cuda") / width**0.5).to(self.dtype)
        self.x_scale, self.scale = None, None
        self.weight, self.weight_in_f64 = weight, weight.double()
        if self.fp8:
            self.x, self.x_scale = fp8_quant(self.x)
            self.weight, self.scale, self.weight_in_f64 = quantised(weight, form)

    def out(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (self.ids.numel(), self.outputs) if self.up else (*self.ids.shape, self.outputs)

    def __call__(self, block_size: int, out: torch.Tensor | None = None, **changed: Any) -> torch.Tensor:
        """changed: other attributes, or `blocks`: an alignment."""
        of = vars(self) | {"blocks": None} | changed
        blocks = aligned(of["ids"], self.experts, block_size) if of["blocks"] is None else of["blocks"]
        operands = (of["x"], of["x_scale"], of["weight"], of["scale"]) if self.fp8 else (of["x"], of["weight"])
        second = ((None, None) if self.fp8 else (None,)) if self.up else ()
        weights = None if self.up else of["topk_weights"]
        return self.op(*operands, *second, weights, of["ids"], *blocks, block_size=block_size, out=out)

    def exact(self) -> torch.Tensor:
        """In float64; zeros for pairs of no expert."""
        x = self.x.double() if self.x_scale is None else self.x.double() * self.x_scale.double()
        if self.up:
            x = x.repeat_interleave(self.ids.shape[1], 0)
        flat = self.ids.flatten()
        result = torch.zeros(flat.numel(), self.outputs, dtype=torch.float64, device="cuda")
        for expert in range(self.experts):
            pairs = (flat == expert).nonzero()[:, 0]
            result[pairs] = x[pairs] @ self.weight_in_f64[expert].T
        if not self.up:
            result *= self.topk_weights.double().view(-1, 1)
        return result.view(self.out())

    def assert_right(self, got: torch.Tensor) -> None:
        """Rounded once, from sums in float32; with FP8 operands from sums of 14 bits."""
        atol = 6e-3 if self.fp8 and torch.cuda.get_device_capability() == (9, 0) else 1e-4
        rtol = 0.51 * torch.finfo(self.dtype).eps
        torch.testing.assert_close(got.double(), self.exact(), rtol=rtol, atol=atol)


LAYERS = [
    (60, 4, 2880, 5760, 7),
    (128, 8, 2048, 1536, 5),
    (256, 8, 7168, 64, 3),
    (5, 5, 144, 32, 100),
    (64, 8, 16, 160, 300),
]


@EVERY_OP
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(("experts", "choices", "width", "outputs", "tokens"), LAYERS)
def test_products_of_layers_of_other_sizes(
    experts: int, choices: int, width: int, outputs: int, tokens: int, block_size: int, op: str
) -> None:
    product = Product(op, tokens, experts, choices, width, outputs)
    product.assert_right(product(block_size))


@EVERY_OP
@EVERY_BLOCK
@pytest.mark.parametrize("routing", ODD_ROUTINGS)
def test_products_of_any_routing(routing: str, block_size: int, op: str) -> None:
    product = Product(op, 90, choices=3, ids=ODD_ROUTINGS[routing])
    got = product(block_size)
    product.assert_right(got)
    if routing == "none":
        assert not bool(got.any())


@EVERY_OP
@EVERY_BLOCK
def test_no_tokens_give_products_without_rows(block_size: int, op: str) -> None:
    product = Product(op, 0)
    assert product(block_size).shape == product.out()


@EVERY_OP
@EVERY_BLOCK
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_nan_or_inf_changes_no_other_row(value: float, block_size: int, op: str) -> None:
    product = Product(op, 90)
    clean = product(block_size)
    row, spoiled = 7, product.x.to(product.dtype)
    spoiled[row, 5] = value
    changed = {"x": spoiled.to(product.x.dtype)}
    if product.fp8 and value == float("inf"):  # codes have no inf; their scales have
        changed = {"x": product.x, "x_scale": product.x_scale.clone()}
        changed["x_scale"][row] = value
    got = product(block_size, **changed)
    pairs = product.ids.shape[1]
    mine = torch.zeros(product.ids.numel(), dtype=torch.bool, device="cuda")
    mine[row * pairs : row * pairs + pairs] = product.up
    mine[row] |= not product.up
    got, clean = got.view(-1, product.outputs), clean.view(-1, product.outputs)
    assert not bool(got[mine].isfinite().any())
    assert_same_bits(got[~mine], clean[~mine], "other rows")


def rows_apart(shape: tuple[int, ...], stride: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a result so far apart, and the memory between them: of sevens."""
    rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
    memory = torch.full((rows, stride), 7.0, dtype=dtype, device="cuda")
    strides = (stride, 1) if len(shape) == 2 else (shape[1] * stride, stride, 1)
    return memory.as_strided(shape, strides), memory[:, columns:]


@EVERY_OP
@EVERY_BLOCK
@pytest.mark.parametrize("more", [8, 1])
def test_only_the_rows_of_out_are_written(more: int, block_size: int, op: str) -> None:
    """more: columns between the rows. With one, rows are not aligned to 16 bytes, and blocks of all sizes have the
    kernel of those of 16 and 32."""
    product = Product(op, 90, ids=ODD_ROUTINGS["outside"])
    want = product(block_size if more == 8 else 16)
    out, assert_intact = canary(product.out(), product.dtype, "cuda")
    assert product(block_size, out) is out
    assert_intact()
    assert_same_bits(out, product(block_size), "out=")
    apart, between = rows_apart(product.out(), product.outputs + more, product.dtype)
    product(block_size, apart)
    assert_same_bits(apart, want, "rows apart")
    assert bool((between == 7).all())


@EVERY_OP
def test_a_row_has_the_same_bits_in_every_batch_and_block_of_a_kernel(op: str) -> None:
    product = Product(op, 300, choices=3)
    for sizes in ((16, 32), (64, 128)):
        whole = product(sizes[0]).view(300, -1)
        for block_size in sizes:
            for tokens in (1, 9, 120, 300):
                part = {name: getattr(product, name)[:tokens] for name in ("ids", "topk_weights")}
                for name in ("x", "x_scale"):
                    of = getattr(product, name)
                    part[name] = of if of is None else of[: tokens * (1 if product.up else 3)]
                got = product(block_size, **part).view(tokens, -1)
                assert_same_bits(got, whole[:tokens], f"{tokens} tokens in blocks of {block_size}")


@EVERY_OP
@EVERY_BLOCK
def test_blocks_past_the_number_of_positions_and_of_no_expert_are_skipped(block_size: int, op: str) -> None:
    product = Product(op, 150)
    pairs, experts, length = aligned(product.ids, 8, block_size)
    whole = product(block_size).view(300, -1)
    length -= block_size  # one block fewer
    experts[0], experts[1] = 8, -1  # past the end; none
    kept = torch.zeros(301, dtype=torch.bool, device="cuda")
    kept[pairs[2 * block_size : int(length)].clamp(max=300).long()] = True
    assert bool(kept[:300].any())
    assert not bool(kept[:300].all())
    got = product(block_size, blocks=(pairs, experts, length)).view(300, -1)
    assert_same_bits(got, torch.where(kept[:300, None], whole, 0.0), "blocks that are left")


@EVERY_OP
@EVERY_BLOCK
def test_runs_repeat_and_a_replayed_graph_sees_other_rows_and_routing(block_size: int, op: str) -> None:
    first, second = Product(op, 200), Product(op, 200, ids=ODD_ROUTINGS["outside"])
    assert_runs_repeat(first, block_size)
    names = ["ids", "topk_weights", "x", *(["x_scale"] if first.fp8 else [])]

    def run(*values: torch.Tensor) -> torch.Tensor:
        return first(block_size, **dict(zip(names, values, strict=True)))

    args, others = ([getattr(each, name) for name in names] for each in (first, second))
    want = run(*others)
    assert_same_bits(graph_replay(run, args, others), want, "a replay")


@EVERY_OP
@EVERY_BLOCK
def test_two_streams_do_not_meet(block_size: int, op: str) -> None:
    products = [Product(op, tokens) for tokens in (2000, 130)]
    want = [product(block_size) for product in products]
    streams = [torch.cuda.Stream() for _ in products]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for product, stream, results in zip(products, streams, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(product(block_size))
    torch.cuda.synchronize()
    for results, each in zip(got, want, strict=True):
        for result in results:
            assert_same_bits(result, each, "a stream")


@large_allocation(gib=10)
@EVERY_OP
@pytest.mark.parametrize("block_size", [32, 128])
def test_rows_of_x_and_out_may_lie_2_to_the_31_elements_apart(block_size: int, op: str) -> None:
    product = Product(op, 3, choices=1)
    want = product(block_size)
    stride = (2**31 + 2**20) // 2 // 16 * 16  # of three rows the last one begins past 2^31 elements
    x = torch.empty(2 * stride + 272, dtype=product.x.dtype, device="cuda").as_strided((3, 272), (stride, 1))
    x.copy_(product.x)
    assert_same_bits(product(block_size, x=x), want, "x")
    del x
    memory = torch.empty(2 * stride + 288, dtype=product.dtype, device="cuda")
    strides = (stride, 1) if product.up else (stride, stride, 1)
    assert_same_bits(product(block_size, memory.as_strided(product.out(), strides)), want, "out")


@large_allocation(gib=6)
@EVERY_OP
@pytest.mark.parametrize("block_size", [32, 128])
def test_experts_may_lie_beyond_2_to_the_31_elements(block_size: int, op: str) -> None:
    near = Product(op, 150, experts=1, choices=1, width=1024, outputs=2080)
    want, experts = near(block_size), 1010
    weight = torch.empty(experts, 2080, 1024, dtype=near.weight.dtype, device="cuda")
    assert weight[:-1].numel() > 2**31
    weight[-1].view(torch.uint8).copy_(near.weight[0].view(torch.uint8))
    near.experts = experts
    scale = None if near.scale is None else near.scale.expand(experts, -1).contiguous()
    got = near(block_size, weight=weight, scale=scale, ids=torch.full_like(near.ids, experts - 1))
    assert_same_bits(got, want, "the last expert")


@EVERY_OP
@EVERY_BLOCK
def test_a_product_waits_for_the_launch_that_writes_its_rows(block_size: int, op: str) -> None:
    product = Product(op, 24, choices=1, width=256, outputs=256)
    hidden, w1, w2, weights, ids = layer(24, 8, 2, 256, 128)
    rows = [hidden, torch.randn_like(hidden)]
    blocks = aligned(product.ids, 8, block_size)

    def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
        changed = {"x": by_variant(Variant(IN_KERNEL, 8), rows[i], w1, w2, weights, ids)}
        between()
        if product.fp8:
            changed["x"], changed["x_scale"] = fp8_quant(changed["x"])
            between()
        return [product(block_size, blocks=blocks, **changed)]

    assert_waits_for_the_launch_before(chain, repetitions=200)
