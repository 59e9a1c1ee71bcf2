"""What every op promises of bad input: it is named on every path, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from good_calls import (
    BIAS,
    EXPERTS,
    F8,
    FP8_EXPERTS,
    GOOD,
    GOOD_FP8,
    IDS,
    INNER,
    LENGTH,
    LOGITS,
    META,
    SCALE,
    SORTED,
    W1,
    W2,
    W4,
    WEIGHT,
    WEIGHTS,
    X,
    ints,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_moe as M
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import (
    ODD_VALUES,
    BadInput,
    assert_refused,
    assert_rejects,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    refusal_params,
)

gelu, silu, plain_gelu = (cases_of(GOOD[op]) for op in (M.gelu_residual, M.silu_and_mul, M.gelu_and_mul))
gelu8, silu8 = cases_of(GOOD[M.gelu_residual_fp8]), cases_of(GOOD[M.silu_and_mul_fp8])
linear, gemv, router = (cases_of(GOOD[op]) for op in (M.fused_linear_residual, M.gemv, M.router_gemm))
total, mlp, topk = cases_of(GOOD[M.moe_sum]), cases_of(GOOD[M.fused_mlp]), cases_of(GOOD[M.topk_softmax])
align, lora = cases_of(GOOD[M.moe_align_block_size]), cases_of(GOOD[M.moe_lora_align_block_size])
route, experts, experts8 = cases_of(GOOD[M.route_and_align]), cases_of(GOOD[M.fused_experts]), cases_of(FP8_EXPERTS)
up, down = cases_of(GOOD[M.invoke_cute_moe_up]), cases_of(GOOD[M.invoke_cute_moe_down])
up8, down8 = cases_of(GOOD_FP8[M.invoke_cute_moe_up_fp8]), cases_of(GOOD_FP8[M.invoke_cute_moe_down_fp8])

BAD: dict[Callable[..., Any], list[BadInput]] = {
    M.gelu_residual: [
        gelu("a list", "x", [1.0, 2.0], TypeError, "tensor"),
        gelu("float64", "x", X.double(), TypeError, "float64"),
        gelu("integers", "x", X.int(), TypeError, "int32"),
        gelu("odd width", "x", X[:, :7], fragment="even"),
        gelu("no columns", "x", X[:, :0], fragment="even"),
        gelu("scalar", "x", torch.tensor(1.0), fragment="even"),
        gelu("transposed", "x", X.t()[:, :2], fragment="contiguous"),
        gelu("unknown form", "approximate", "erf", fragment="'tanh'"),
        gelu("full-width out", "out", torch.empty(3, 8), fragment="(3, 4)"),
        gelu("half out", "out", torch.empty(3, 4).half(), TypeError, "float32"),
        gelu("out elsewhere", "out", torch.empty(3, 4, **META), fragment="device"),
    ],
    M.silu_and_mul: [
        silu("float64", "x", X.double(), TypeError, "float64"),
        silu("odd width", "x", X[:, :7], fragment="even"),
        silu("transposed", "x", X.t()[:, :2], fragment="contiguous"),
        silu("short out", "out", torch.empty(2, 4), fragment="(3, 4)"),
    ],
    M.gelu_and_mul: [
        plain_gelu("integers", "x", X.int(), TypeError, "int32"),
        plain_gelu("odd width", "x", X[:, :7], fragment="even"),
        plain_gelu("empty form", "approximate", "", fragment="'tanh'"),
        plain_gelu("bf16 out", "out", torch.empty(3, 4).bfloat16(), TypeError, "float32"),
        plain_gelu("strided out", "out", torch.empty(3, 8)[:, ::2], fragment="contiguous"),
        plain_gelu("one row for all", "out", torch.empty(1, 4).expand(3, 4), fragment="share"),
    ],
    M.gelu_residual_fp8: [
        gelu8("three dimensions", "x", X[None], fragment="2-D"),
        gelu8("odd width", "x", X[:, :7], fragment="even"),
        gelu8("integers", "x", X.long(), TypeError, "int64"),
        gelu8("unknown form", "approximate", "TANH", fragment="'tanh'"),
    ],
    M.silu_and_mul_fp8: [
        silu8("FP8", "x", X.to(F8), TypeError, "float8_e4m3fn"),
        silu8("one dimension", "x", X[0], fragment="2-D"),
        silu8("no columns", "x", X[:, :0], fragment="even"),
    ],
    M.gelu_and_mul_fp8: [cases_of(GOOD[M.gelu_and_mul_fp8])("unknown form", "approximate", "x", fragment="'tanh'")],
    M.fused_linear_residual: [
        linear("scalar", "x", torch.tensor(1.0), fragment="dimension"),
        linear("weight of other width", "weight", torch.ones(6, 7), fragment="(any, 8)"),
        linear("weight [in, out]", "weight", torch.ones(8, 6).t(), fragment="contiguous"),
        linear("weight in bf16", "weight", WEIGHT.bfloat16(), TypeError, "float32"),
        linear("bias of other length", "bias", torch.ones(8), fragment="(6,)"),
        linear("bias of every second number", "bias", torch.ones(12)[::2], fragment="contiguous"),
        linear("bias in fp16", "bias", BIAS.half(), TypeError, "float32"),
        linear("residual of other width", "residual", X, fragment="(3, 6)"),
        linear("residual of every second column", "residual", torch.ones(3, 12)[:, ::2], fragment="contiguous"),
        linear("out of other width", "out", torch.empty(3, 8), fragment="(3, 6)"),
    ],
    M.gemv: [
        gemv("integers", "x", X.int(), TypeError, "int32"),
        gemv("weight of other width", "weight", torch.ones(6, 7), fragment="(any, 8)"),
        gemv("weight [in, out]", "weight", torch.ones(8, 6).t(), fragment="contiguous"),
        gemv("weight in fp16", "weight", WEIGHT.half(), TypeError, "float32"),
        gemv("bias of other length", "bias", torch.ones(5), fragment="(6,)"),
        gemv("bias in fp16", "bias", BIAS.half(), TypeError, "float32"),
        gemv("out in fp16", "out", torch.empty(3, 6).half(), TypeError, "float32"),
        gemv("narrow out", "out", torch.empty(3, 5), fragment="(3, 6)"),
    ],
    M.router_gemm: [
        router("float64", "x", X.double(), TypeError, "float64"),
        router("weight in bf16", "weight", WEIGHT.bfloat16(), TypeError, "float32"),
        router("flat weight", "weight", WEIGHT[0], fragment="2-D"),
        router("out in bf16", "out", torch.empty(3, 6).bfloat16(), TypeError, "float32"),
    ],
    M.moe_sum: [
        total("two dimensions", "x", X, fragment="3-D"),
        total("float64", "x", W1.double(), TypeError, "float64"),
        total("last dimension strided", "x", W1.mT, fragment="contiguous"),
        total("out of other shape", "out", torch.empty(4, 12), fragment="(4, 8)"),
        total("one row for all", "out", torch.empty(1, 8).expand(4, 8), fragment="share"),
    ],
    M.fused_mlp: [
        mlp("one row without T", "x", X[0], fragment="2 dimensions"),
        mlp("transposed", "x", torch.ones(8, 3).t(), fragment="contiguous"),
        mlp("w1 of other width", "w1", torch.ones(6, 7), fragment="(any, 8)"),
        mlp("w1 transposed", "w1", torch.ones(8, 6).t(), fragment="contiguous"),
        mlp("w1 in bf16", "w1", WEIGHT.bfloat16(), TypeError, "float32"),
        mlp("b1 of other length", "b1", torch.ones(8), fragment="(6,)"),
        mlp("b1 as matrix", "b1", torch.ones(1, 6), fragment="(6,)"),
        mlp("w2 as w1", "w2", WEIGHT, fragment="(any, 6)"),
        mlp("w2 in fp16", "w2", torch.ones(8, 6).half(), TypeError, "float32"),
        mlp("b2 of other length", "b2", torch.ones(6), fragment="(8,)"),
        mlp("b2 in float64", "b2", torch.ones(8).double(), TypeError, "float64"),
        mlp("residual of other rows", "residual", X[:2], fragment="(3, 8)"),
        mlp("residual in bf16", "residual", X.bfloat16(), TypeError, "float32"),
        mlp("unknown activation", "activation", "relu", fragment="'gelu'"),
        mlp("out of other shape", "out", torch.empty(3, 6), fragment="(3, 8)"),
    ],
    M.topk_softmax: [
        topk("float64", "gating", LOGITS.double(), TypeError, "float64"),
        topk("one dimension", "gating", LOGITS[0], fragment="2-D"),
        topk("transposed", "gating", LOGITS.t(), fragment="contiguous"),
        topk("k of 0", "k", 0, fragment=">= 1"),
        topk("k above E", "k", 5, fragment="4 experts"),
        topk("fractional k", "k", 1.5, TypeError, "integer"),
        topk("k as bool", "k", True, TypeError, "integer"),
        topk("bias of other length", "bias", torch.ones(3), fragment="(4,)"),
        topk("bias in float64", "bias", torch.ones(4).double(), TypeError, "float64"),
        topk("bias of every second number", "bias", torch.ones(8)[::2], fragment="contiguous"),
        topk("num_tokens as number", "num_tokens", 2, TypeError, "tensor"),
        topk("num_tokens in int64", "num_tokens", torch.tensor([2]), TypeError, "int32"),
        topk("scalar num_tokens", "num_tokens", torch.tensor(2).int(), fragment="(1,)"),
    ],
    M.moe_align_block_size: [
        align("float ids", "topk_ids", WEIGHTS, TypeError, "int32"),
        align("flat ids", "topk_ids", IDS.flatten(), fragment="2-D"),
        align("transposed ids", "topk_ids", ints(2, 3).t(), fragment="contiguous"),
        align("no experts", "num_experts", 0, fragment=">= 1"),
        align("experts as float", "num_experts", 4.0, TypeError, "integer"),
        align("experts past int32", "num_experts", 2**31, fragment="<= 2147483647", expert_map=None),
        align("block of 0", "block_size", 0, fragment=">= 1"),
        align("block past int32", "block_size", 2**31, fragment="<= 2147483647"),
        align("short buffer", "sorted_token_ids", ints(63), fragment="at least 64"),
        align("int64 buffer", "sorted_token_ids", ints(64).long(), TypeError, "int32"),
        align("strided buffer", "sorted_token_ids", ints(64, 2)[:, 0], fragment="contiguous"),
        align("few blocks", "expert_ids", ints(3), fragment="at least 4"),
        align("two lengths", "num_tokens_post_pad", ints(2), fragment="(1,)"),
        align("scalar length", "num_tokens_post_pad", torch.tensor(0).int(), fragment="1-D"),
        align("short map", "expert_map", ints(3), fragment="(4,)"),
        align("map in int64", "expert_map", ints(4).long(), TypeError, "int32"),
        align("map of every second entry", "expert_map", ints(8)[::2], fragment="contiguous"),
    ],
    M.moe_lora_align_block_size: [
        lora("mapping of other tokens", "token_lora_mapping", ints(2), fragment="(3,)"),
        lora("mapping in int64", "token_lora_mapping", ints(3).long(), TypeError, "int32"),
        lora("mapping of every second token", "token_lora_mapping", ints(6)[::2], fragment="contiguous"),
        lora("no adapters", "max_loras", 0, fragment=">= 1"),
        lora("flat buffer", "sorted_token_ids", ints(128), fragment="2-D"),
        lora("short buffer", "sorted_token_ids", ints(2, 63), fragment="at least 64"),
        lora("one row of blocks", "expert_ids", ints(1, 4), fragment="(2, any)"),
        lora("few blocks", "expert_ids", ints(2, 3), fragment="at least 4"),
        lora("one length", "num_tokens_post_pad", ints(1), fragment="at least 2"),
        lora("one row for all", "sorted_token_ids", ints(1, 64).expand(2, 64), fragment="strides (0"),
        lora("flags in float", "adapter_enabled", torch.ones(2), TypeError, "bool"),
        lora("flags in bytes", "adapter_enabled", torch.ones(2, dtype=torch.uint8), TypeError, "bool"),
        lora("flags of every second adapter", "adapter_enabled", ints(4)[::2], fragment="contiguous"),
        lora("three lengths", "num_tokens_post_pad", ints(3), fragment="(2,)"),
        lora("three flags", "adapter_enabled", ints(3), fragment="(2,)"),
    ],
    M.route_and_align: [
        route("float64", "logits", LOGITS.double(), TypeError, "float64"),
        route("one row", "logits", LOGITS[0], fragment="2-D"),
        route("transposed", "logits", LOGITS.t(), fragment="contiguous"),
        route("k of 0", "k", 0, fragment=">= 1"),
        route("k above E", "k", 5, fragment="4 experts"),
        route("block of 0", "block_size", 0, fragment=">= 1"),
        route("block past int32", "block_size", 2**31, fragment="<= 2147483647"),
        route("renormalize as number", "renormalize", 1, TypeError, "True"),
        route("long bias", "bias", torch.ones(5), fragment="(4,)"),
        route("bias of every second number", "bias", torch.ones(8)[::2], fragment="contiguous"),
        route("long map", "expert_map", ints(5), fragment="(4,)"),
    ],
    M.invoke_cute_moe_up: [
        up("integers", "hidden_states", X.int(), TypeError, "int32"),
        up("three dimensions", "hidden_states", X[None], fragment="2-D"),
        up("transposed", "hidden_states", torch.ones(8, 3).t(), fragment="contiguous"),
        up("other tokens", "hidden_states", torch.ones(4, 8), fragment="(3, any)"),
        up("w1 in bf16", "w1", W1.bfloat16(), TypeError, "float32"),
        up("w1 of other width", "w1", W2, fragment="(any, any, 8)"),
        up("w1 [in, out]", "w1", torch.ones(4, 8, 12).mT, fragment="contiguous"),
        up("no experts", "w1", W1[:0], fragment="at least 1"),
        up("no outputs", "w1", W1[:, :0], fragment="at least 1"),
        up("no columns", "w1", W1[..., :0], fragment="at least 1", hidden_states=X[:, :0]),
        up("w2 unlike w1", "w2", W1[:, :6], fragment="(4, 12, 8)"),
        up("w2 of other experts", "w2", W1[:3], fragment="(4, 12, 8)"),
        up("ids in int64", "topk_ids", IDS.long(), TypeError, "int32"),
        up("ids of every second column", "topk_ids", ints(3, 4)[:, ::2], fragment="contiguous"),
        up("sorted in int64", "sorted_token_ids", SORTED.long(), TypeError, "int32"),
        up("sorted of every second place", "sorted_token_ids", ints(128)[::2], fragment="contiguous"),
        up("experts in int64", "expert_ids", EXPERTS.long(), TypeError, "int32"),
        up("experts of every second block", "expert_ids", ints(8)[::2], fragment="contiguous"),
        up("experts in two dimensions", "expert_ids", EXPERTS[None], fragment="1-D"),
        up("two lengths", "num_tokens_post_pad", ints(2), fragment="(1,)"),
        up("length in int64", "num_tokens_post_pad", LENGTH.long(), TypeError, "int32"),
        up("block of 0", "block_size", 0, fragment="16, 32, 64, 128"),
        up("block of another length", "block_size", 8, fragment="16, 32, 64, 128"),
        up("block of 16.0", "block_size", 16.0, TypeError, "integer"),
        up("block of 2^31", "block_size", 2**31, fragment="16, 32, 64, 128"),
        up("no block fits", "block_size", None, fragment="no size", sorted_token_ids=ints(260)),
        up("several blocks fit", "block_size", None, fragment="several", sorted_token_ids=ints(7), expert_ids=ints(1)),
        up("out of other width", "out", torch.empty(6, 6), fragment="(6, 12)"),
    ],
    M.invoke_cute_moe_down: [
        down("other pairs", "moe_out", torch.ones(3, 6), fragment="(6, any)"),
        down("float64", "moe_out", INNER.double(), TypeError, "float64"),
        down("w3 as w1", "w3", W1, fragment="(any, any, 6)"),
        down("no inner columns", "w3", W2[..., :0], fragment="at least 1", moe_out=INNER[:, :0]),
        down("weights in bf16", "topk_weights", WEIGHTS.bfloat16(), TypeError, "float32"),
        down("weights of other shape", "topk_weights", WEIGHTS[:, :1], fragment="(3, 2)"),
        down("weights of every second column", "topk_weights", torch.ones(3, 4)[:, ::2], fragment="contiguous"),
        down("flat out", "out", torch.empty(6, 8), fragment="(3, 2, 8)"),
    ],
    M.invoke_cute_moe_up_fp8: [
        up8("bf16 codes", "x_q", X.bfloat16(), TypeError, "float8_e4m3fn"),
        up8("no scale", "x_scale", None, TypeError, "tensor"),
        up8("one scale for all rows", "x_scale", torch.ones(1), fragment="(3, 1)"),
        up8("scales of other rows", "x_scale", torch.ones(2, 1), fragment="(3, 1)"),
        up8("scales in fp16", "x_scale", torch.ones(3, 1).half(), TypeError, "float32"),
        up8("w1 in float", "w1", W1, TypeError, "float8_e4m3fn"),
        up8("no weight scale", "w1_scale", None, fragment="scales"),
        up8("scale per column", "w1_scale", torch.ones(4, 8), fragment="(4, 12)"),
        up8("scale without w2", "w2_scale", SCALE, fragment="None"),
        up8("w2 without scale", "w2_scale", None, fragment="scales", w2=W1.to(F8)),
        up8("block beyond 64 bits", "block_size", 2**70),
        up8("block of another length", "block_size", 8, fragment="16, 32, 64, 128"),
        up8("float out", "out", torch.empty(6, 12), TypeError, "bfloat16"),
    ],
    M.invoke_cute_moe_down_fp8: [
        down8("scales of tokens", "x_scale", torch.ones(3, 1), fragment="(6, 1)"),
        down8("w3 in e5m2", "w3", W2.to(torch.float8_e5m2), TypeError, "float8_e4m3fn"),
        down8("scale in fp16", "w3_scale", SCALE.half(), TypeError, "float32"),
        down8("weights of other shape", "topk_weights", WEIGHTS[:2], fragment="(3, 2)"),
        down8("codes elsewhere", "", INNER.to(F8).to("meta"), fragment="device", key="x_q"),
    ],
    M.fused_experts: [
        experts("three dimensions", "hidden", X[None], fragment="2-D"),
        experts("transposed", "hidden", torch.ones(8, 3).t(), fragment="contiguous"),
        experts("no columns", "hidden", X[:, :0], fragment="Hd at least 1"),
        experts("w1 of one expert", "w1", W1[0], fragment="3-D"),
        experts("w1 of other width", "w1", torch.ones(4, 12, 9), fragment="(any, any, 8)"),
        experts("w1 with odd rows", "w1", torch.ones(4, 11, 8), fragment="2I"),
        experts("w1 without experts", "w1", torch.ones(0, 12, 8), fragment="at least 1"),
        experts("w1 in bf16", "w1", W1.bfloat16(), TypeError, "float32"),
        experts("w1 in int8", "w1", W1.to(torch.int8), TypeError, "float8_e4m3fn"),
        experts("w1 [in, out]", "w1", torch.ones(4, 8, 12).mT, fragment="contiguous"),
        experts("w2 in bf16", "w2", W2.bfloat16(), TypeError, "float32"),
        experts("w2 of other experts", "w2", W2[:3], fragment="(4, 8, 6)"),
        experts("w2 of width 2I", "w2", torch.ones(4, 8, 12), fragment="(4, 8, 6)"),
        experts("weights in bf16", "topk_weights", WEIGHTS.bfloat16(), TypeError, "float32"),
        experts("weights of other rows", "topk_weights", WEIGHTS[:2], fragment="(3, 2)"),
        experts("weights of every second column", "topk_weights", torch.ones(3, 4)[:, ::2], fragment="contiguous"),
        experts("ids of other choices", "topk_ids", IDS[:, :1], fragment="(3, 2)"),
        experts("ids of every second column", "topk_ids", ints(3, 4)[:, ::2], fragment="contiguous"),
        experts("unknown activation", "activation", "gelu", fragment="'silu_and_mul'"),
        experts8("FP8 without scale", "w1_scale", None, fragment="scales"),
        experts8("FP8, one scale", "w2_scale", None, fragment="scales"),
        experts("scale without FP8", "w1_scale", torch.ones(4), fragment="None"),
        experts8("scale per column", "w1_scale", torch.ones(4, 8)),
        experts8("too many tiles", "w2_scale", torch.ones(4, 2, 1)),
        experts8("scale in fp16", "w1_scale", torch.ones(4).half(), TypeError),
        experts("map in int64", "expert_map", torch.arange(4), TypeError, "int32"),
        experts("map as list", "expert_map", [0, 1], TypeError, "tensor"),
        experts("map of every second entry", "expert_map", ints(8)[::2], fragment="contiguous"),
        experts8("scale elsewhere", "w2_scale", torch.ones(4, 8, **META), fragment="device"),
        experts("out in bf16", "out", X.bfloat16(), TypeError, "float32"),
    ],
}
for function, good in (GOOD | GOOD_FP8).items():
    BAD[function] += derived_bad_inputs(function, (), good)


REFUSALS = refusal_params(BAD)


linear_w4 = cases_of(GOOD[M.fused_linear_residual] | {"weight": W4})
BAD_W4 = [
    linear_w4("scalar", "x", torch.tensor(1.0), fragment="dimension"),
    linear_w4("x of other width", "x", X[:, :4], fragment="8"),
    linear_w4("x in bf16", "x", X.bfloat16(), TypeError, "float32 as weight has"),
    linear_w4("weight elsewhere", "weight", W4.to("meta"), fragment="device"),
    linear_w4("bias of other length", "bias", torch.ones(8), fragment="(6,)"),
    linear_w4("bias in fp16", "bias", BIAS.half(), TypeError, "float32"),
    linear_w4("no residual", "residual", None, TypeError, "tensor"),
    linear_w4("residual of other width", "residual", X, fragment="(3, 6)"),
    linear_w4("residual of every second column", "residual", torch.ones(3, 12)[:, ::2], fragment="contiguous"),
    linear_w4("residual elsewhere", "residual", torch.ones(3, 6, **META), fragment="device"),
    linear_w4("out of other width", "out", torch.empty(3, 8), fragment="(3, 6)"),
    linear_w4("out within x", "out", X[:, :6], fragment="'x'"),
]


@pytest.mark.parametrize(("function", "case", "path"), refusal_params({M.fused_linear_residual: BAD_W4}, ("public",)))
def test_bad_input_beside_a_4_bit_weight_is_named(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


@pytest.mark.parametrize(("function", "case", "path"), REFUSALS)
def test_bad_input_is_named_on_every_path(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


SHARED, SQUARE, SHARED_INTS = torch.zeros(3, 14), torch.zeros(8, 8), ints(66)
OVERLAPS: dict[Callable[..., Any], list[BadInput]] = {
    M.gelu_residual: [gelu("out is other rows of x", "out", SQUARE[1:4, :4], fragment="'x'", x=SQUARE[:3])],
    M.gemv: [gemv("out within x", "out", SHARED[:, 6:12], fragment="'x'", x=SHARED[:, :8])],
    M.router_gemm: [router("out is the weight", "out", SQUARE, fragment="'weight'", x=SQUARE + 1, weight=SQUARE)],
    M.moe_sum: [total("out is the first choice", "out", W1[:, 0], fragment="'x'", x=W1)],
    M.fused_linear_residual: [linear("out within x", "out", SHARED[:, 6:12], fragment="'x'", x=SHARED[:, :8])],
    M.fused_mlp: [mlp("out is x", "out", X, fragment="'x'", residual=None)],
    M.moe_align_block_size: [
        align("outputs", "sorted_token_ids", SHARED_INTS[:64], fragment="'expert_ids'", expert_ids=SHARED_INTS[62:])
    ],
}


@pytest.mark.parametrize(("function", "case", "path"), refusal_params(OVERLAPS, ("public", "torch.ops", "kernel")))
def test_results_that_share_memory_with_inputs_are_refused(
    function: Callable[..., Any], case: BadInput, path: str
) -> None:
    assert_refused(function, case, path)


@pytest.mark.parametrize("op", [op for op in OVERLAPS if op.kernel_op.kernel], ids=lambda op: op.__name__)  # type: ignore[attr-defined]
def test_entry_points_refuse_results_that_share_memory_with_inputs(op: Any) -> None:
    if Binary("kestrel_moe").manifest is None:
        pytest.skip("kestrel_moe has no binary here")
    (case,) = OVERLAPS[op]
    said = assert_rejects(op, case)
    args, kwargs = case.make()
    with pytest.raises(ValueError, match="shares no memory") as raised:
        op.kernel_op.launch(*args, **kwargs)
    assert str(raised.value) == said


# Ops whose launch is not a single entry point.
PLAIN = (M.invoke_cute_moe_up, M.invoke_cute_moe_down, M.fused_experts, M.fused_mlp, M.fused_linear_residual)
WITH_ENTRY_POINT = [op for op in GOOD if op not in PLAIN]


@pytest.mark.parametrize("op", WITH_ENTRY_POINT, ids=lambda op: op.__name__)
def test_a_good_call_reaches_the_last_check_of_the_entry_point(op: Any) -> None:
    if Binary("kestrel_moe").manifest is None:
        pytest.skip("kestrel_moe has no binary here")
    with pytest.raises(ValueError, match=f"{op.__name__}: argument .* expected a CUDA tensor, got cpu"):
        op.kernel_op.launch(**GOOD[op])


@pytest.mark.parametrize(
    "counts",
    [ints(3), ints(11), ints(4, 2)[:, 0], torch.zeros(4)],
    ids=["short", "short scratch", "strided", "float32"],
)
def test_the_entry_point_of_routing_refuses_wrong_memory_for_counts(counts: torch.Tensor) -> None:
    try:
        function = Binary("kestrel_moe").topk_softmax
    except UnsupportedError as error:
        pytest.skip(str(error))
    with pytest.raises((ValueError, TypeError), match="topk_softmax: argument 'counts': expected "):
        function(torch.empty(16, 2), ints(16, 2), counts, torch.zeros(16, 4), 2, False, None, None)


ROWS = torch.ones(2, 3, 8)
BAD_LEADING = {
    M.gelu_residual: ((ROWS,), torch.empty(6, 4)),
    M.silu_and_mul: ((ROWS,), torch.empty(3, 2, 4)),
    M.gemv: ((ROWS, WEIGHT), torch.empty(6, 6)),
    M.router_gemm: ((ROWS, WEIGHT), torch.empty(3, 2, 6)),
}


@pytest.mark.parametrize("op", BAD_LEADING, ids=lambda op: op.__name__)
def test_a_launch_refuses_an_out_whose_leading_dimensions_differ(op: Any) -> None:
    arguments, out = BAD_LEADING[op]
    with pytest.raises(ValueError, match=f"{op.__name__}: argument 'out': expected shape"):
        op.kernel_op.launch(*arguments, out=out)


@pytest.mark.parametrize("op", [M.gemv, M.router_gemm], ids=lambda op: op.__name__)
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 6), (8, 0), (0, 0)])
def test_no_inputs_or_no_outputs_reach_the_last_check(op: Any, inputs: int, outputs: int) -> None:
    if Binary("kestrel_moe").manifest is None:
        pytest.skip("kestrel_moe has no binary here")
    with pytest.raises(ValueError, match="expected a CUDA tensor, got cpu"):
        op.kernel_op.launch(torch.ones(1, 3, inputs), torch.ones(outputs, inputs))


ODD = (
    *ODD_VALUES, "gelu", 16, X, X.t(), X[0], X[:0], X[:, :7], X.half(), X.to(F8), IDS, IDS.long(), WEIGHTS, LOGITS, W1,
    W2, W1.to(F8), INNER, SCALE, ints(1), ints(64), ints(2, 64), W4,
)  # fmt: skip


@pytest.mark.parametrize("op", [*GOOD, *GOOD_FP8], ids=lambda op: op.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_either_works_or_is_named(op: Callable[..., Any], data: st.DataObject) -> None:
    good = {**GOOD, **GOOD_FP8}[op]
    args, kwargs = data.draw(odd_calls((), good, ODD))
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    assert_works_or_is_named(op, args, copies)
