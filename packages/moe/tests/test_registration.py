"""What every op promises of torch: it means the same under autocast, torch.library agrees, torch.compile traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from good_calls import (
    ALIGNED,
    BIAS,
    F8,
    FP8_EXPERTS,
    GOOD,
    GOOD_FP8,
    INNER,
    LOGITS,
    SCALE,
    W1,
    W2,
    W4,
    WEIGHT,
    WEIGHTS,
    Values,
    X,
    ints,
)

import kestrel_moe as M
from kestrel_moe import invoke_moe, invoke_moe_fp8
from kestrel_moe.linear import _fused_linear_residual_w4
from kestrel_runtime.testing import assert_registered, assert_same_bits, opcheck, twins

# ---- autocast --------------------------------------------------------------------------------------------------------


def in_sixteen_bits(values: Values) -> Values:
    """The call with bf16 inputs whose products bf16 cannot hold; weights of the router stay float32."""
    noise = torch.Generator().manual_seed(0)
    return {
        name: (x + torch.rand(x.shape, generator=noise)).bfloat16()
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and name not in ("topk_weights", "bias")
        else x
        for name, x in values.items()
    }


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("op", "inputs"),
    [(op, "as given") for op in (*GOOD, *GOOD_FP8)] + [(op, "bf16") for op in GOOD],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_an_op_means_the_same_under_autocast(op: Callable[..., Any], inputs: str, autocast: torch.dtype) -> None:
    values = {**GOOD, **GOOD_FP8}[op]
    if inputs == "bf16":
        values = in_sixteen_bits(values)
        if "bias" in values and op in (M.gemv, M.fused_linear_residual):
            values["bias"] = values["bias"].bfloat16()
    plain, cast = (dict(zip(values, twins(values.values()), strict=True)) for _ in range(2))
    expected = op(**plain)
    with torch.autocast("cpu", autocast):
        got = op(**cast)
    assert_same_bits(got, expected, op.__name__)
    for name in values:
        assert_same_bits(cast[name], plain[name], name)


def test_router_logits_keep_their_bits_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = M.router_gemm(torch.tensor([[1.0, 2.0**-9]]).bfloat16(), torch.ones(1, 2).bfloat16())
    assert logits.item() == 1 + 2.0**-9


# ---- registration and compilation ------------------------------------------------------------------------------------


def test_every_op_is_registered_documented_and_exported() -> None:
    assert_registered(M)


BLOCKS = {**ALIGNED, "block_size": 16}
UP8, DOWN8 = ({k: v for k, v in good.items() if k != "topk_weights"} for good in (GOOD_FP8.values()))
DOWN8 = DOWN8 | {"topk_weights": WEIGHTS}
# Ops that share schema and reference code with one of these are not listed twice.
REGISTERED: dict[str, tuple[Any, Values, str]] = {
    "gelu_residual": (M.gelu_residual, {"x": X.half(), "approximate": "tanh"}, "sliced"),
    "gelu_residual out": (M.gelu_residual, {"x": X, "out": torch.empty(3, 4)}, "contiguous"),
    "silu_and_mul 3-D": (M.silu_and_mul, {"x": W1.bfloat16()}, "transposed"),
    "gelu_and_mul_fp8": (M.gelu_and_mul_fp8, {"x": X, "approximate": "tanh"}, "sliced"),
    "fused_linear_residual": (M.fused_linear_residual, GOOD[M.fused_linear_residual], "sliced"),
    "fused_linear_residual_w4": (
        _fused_linear_residual_w4,
        {"x": X, "codes": W4.codes, "scales": W4.scales, "zeros": None, "permutation": None, "group_size": 4}
        | {"bias": BIAS, "residual": torch.ones(3, 6)},
        "sliced",
    ),
    "gemv": (M.gemv, {"x": W1, "weight": WEIGHT}, "transposed"),
    "gemv out": (M.gemv, GOOD[M.gemv] | {"out": torch.empty(3, 6)}, "contiguous"),
    "router_gemm": (M.router_gemm, {"x": X.half(), "weight": WEIGHT.half()}, "sliced"),
    "moe_sum": (M.moe_sum, {"x": W1.bfloat16()}, "transposed"),
    "moe_sum out": (M.moe_sum, {"x": W1, "out": torch.empty(4, 8)}, "contiguous"),
    "fused_mlp": (M.fused_mlp, GOOD[M.fused_mlp], "sliced"),
    "topk_softmax": (M.topk_softmax, GOOD[M.topk_softmax] | {"renormalize": True}, "sliced"),
    "moe_align_block_size": (M.moe_align_block_size, GOOD[M.moe_align_block_size], "contiguous"),
    "moe_lora_align_block_size": (M.moe_lora_align_block_size, GOOD[M.moe_lora_align_block_size], "contiguous"),
    "route_and_align": (M.route_and_align, GOOD[M.route_and_align], "sliced"),
    "fused_experts": (M.fused_experts, GOOD[M.fused_experts], "sliced"),
    "fused_experts out": (M.fused_experts, GOOD[M.fused_experts] | {"out": torch.empty(3, 8)}, "contiguous"),
    "fused_experts fp8": (M.fused_experts, FP8_EXPERTS, "contiguous"),
    "up": (invoke_moe._invoke_cute_moe_up, {"hidden_states": X, "w1": W1, "w2": W1, **BLOCKS}, "sliced"),
    "down": (
        invoke_moe._invoke_cute_moe_down,
        {"moe_out": INNER, "w3": W2, "topk_weights": WEIGHTS, **BLOCKS, "out": torch.empty(3, 2, 8)},
        "contiguous",
    ),
    "up_fp8": (invoke_moe_fp8._invoke_cute_moe_up_fp8, UP8, "contiguous"),
    "down_fp8": (invoke_moe_fp8._invoke_cute_moe_down_fp8, DOWN8, "contiguous"),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_registration_agrees_with_torch(name: str) -> None:
    op, values, layout = REGISTERED[name]
    parameters = inspect.signature(op).parameters
    assert set(values) <= set(parameters), f"{name}: {set(values) - set(parameters)}"
    opcheck(op, (), values, layout=layout, views=[next(iter(values))])


def test_public_functions_compile_into_one_graph() -> None:
    def layer(x: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
        weights, ids, counts = M.topk_softmax(logits, 2, renormalize=True)
        _, _, *aligned = M.route_and_align(logits, 2, 16)
        up = M.invoke_cute_moe_up(x, W1, None, None, ids, *aligned)
        down = M.invoke_cute_moe_down(up[:, :6], W2, weights, ids, *aligned, block_size=16)
        codes, one = x.to(F8), torch.ones(3, 1)
        up8 = M.invoke_cute_moe_up_fp8(codes, one, W1.to(F8), SCALE, None, None, None, ids, *aligned)
        down8 = M.invoke_cute_moe_down_fp8(
            up8[:, :6].to(F8), torch.ones(6, 1), W2.to(F8), SCALE, weights, ids, *aligned,
            out=torch.empty(3, 2, 8).bfloat16(),
        )  # fmt: skip
        buffers = [torch.empty(n, dtype=torch.int32) for n in (64, 4, 1)]
        M.moe_align_block_size(ids, 4, 16, *buffers)
        stacked = [torch.zeros(shape, dtype=torch.int32) for shape in ((2, 64), (2, 4), (2,))]
        M.moe_lora_align_block_size(ids, ints(3), 4, 16, 2, *stacked, torch.tensor([True, False]))
        routed = M.fused_experts(x, W1, W2, weights, ids)
        routed8 = M.fused_experts(x, W1.to(F8), W2.to(F8), weights, ids, w1_scale=SCALE, w2_scale=SCALE)
        dense = M.fused_mlp(x, WEIGHT, BIAS, torch.ones(8, 6), None, routed, out=torch.empty_like(x))
        linear = M.fused_linear_residual(x, WEIGHT, BIAS, M.gemv(x, WEIGHT))
        linear = M.fused_linear_residual(x, W4, None, linear, out=torch.empty_like(linear))
        quantised = (*M.silu_and_mul_fp8(x), *M.gelu_residual_fp8(x), *M.gelu_and_mul_fp8(x, approximate="tanh"))
        gated = (M.gelu_residual(x), M.silu_and_mul(x), M.gelu_and_mul(x, out=torch.empty_like(x[:, :4])))
        more = (M.router_gemm(x, WEIGHT), M.moe_sum(torch.stack((x, x), 1)))
        floats = [part.float() for part in quantised]
        routing = [weights, ids, counts, *aligned, *buffers, *stacked]
        return [*routing, up, down, up8, down8, routed, routed8, dense, linear, *floats, *gated, *more]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for index, (got, expected) in enumerate(zip(compiled(X, LOGITS), layer(X, LOGITS), strict=True)):
        assert torch.equal(got, expected), f"result {index}"
        assert got.stride() == expected.stride(), f"result {index}"
