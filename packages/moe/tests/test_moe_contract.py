"""What every op of the family promises: bad inputs are named, torch.library agrees, torch.compile traces."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_moe
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import OPCHECK_TESTS, BadInput, assert_rejects, opcheck

F8 = torch.float8_e4m3fn
Call = tuple[tuple[Any, ...], dict[str, Any]]

# T = 3, Hd = 8, E = 4, I = 6, K = 2
X = torch.linspace(-2, 2, 24).view(3, 8)
W1, B1, W2, B2 = torch.ones(6, 8), torch.ones(6), torch.ones(8, 6), torch.ones(8)
GATING = torch.linspace(-1, 1, 12).view(3, 4)
EXPERTS1, EXPERTS2 = torch.ones(4, 12, 8), torch.ones(4, 8, 6)
WEIGHTS, IDS = torch.full((3, 2), 0.5), torch.tensor([[0, 1], [2, -1], [3, 0]], dtype=torch.int32)
ROUTED = (X, EXPERTS1, EXPERTS2, WEIGHTS, IDS)
FP8 = (X, EXPERTS1.to(F8), EXPERTS2.to(F8), WEIGHTS, IDS)
SCALES = {"w1_scale": torch.ones(4), "w2_scale": torch.ones(4, 8)}
META = {"device": "meta"}


def call(*args: Any, **kwargs: Any) -> Callable[[], Call]:
    return lambda: (args, kwargs)


def but(args: tuple[Any, ...], position: int, value: Any) -> Callable[[], Call]:
    """The call with one argument replaced."""
    return lambda: ((*args[:position], value, *args[position + 1 :]), {})


MLP = (X, W1, B1, W2, B2, X)
LINEAR = (X, W1, B1, torch.ones(3, 6))
BAD_INPUTS = {
    "gelu_residual": [
        BadInput("no tensor", "x", call([1.0, 2.0]), TypeError, "tensor"),
        BadInput("None", "x", call(None), TypeError, "tensor"),
        BadInput("float64", "x", call(X.double()), TypeError, "float64"),
        BadInput("integers", "x", call(X.int()), TypeError, "int32"),
        BadInput("odd width", "x", call(X[:, :7]), ValueError, "even"),
        BadInput("no columns", "x", call(X[:, :0]), ValueError, "even"),
        BadInput("scalar", "x", call(torch.tensor(1.0)), ValueError, "even"),
        BadInput("transposed", "x", call(X.t()[:, :2]), ValueError, "contiguous"),
        BadInput("unknown form", "approximate", call(X, approximate="erf"), ValueError, "'tanh'"),
        BadInput("full-width out", "out", call(X, out=torch.empty(3, 8)), ValueError, "(3, 4)"),
        BadInput("half out", "out", call(X, out=torch.empty(3, 4).half()), TypeError, "float32"),
        BadInput("out elsewhere", "out", call(X, out=torch.empty(3, 4, **META)), ValueError, "device"),
    ],
    "silu_and_mul": [
        BadInput("float64", "x", call(X.double()), TypeError, "float64"),
        BadInput("odd width", "x", call(X[:, :7]), ValueError, "even"),
        BadInput("transposed", "x", call(X.t()[:, :2]), ValueError, "contiguous"),
        BadInput("full-width out", "out", call(X, out=torch.empty(3, 8)), ValueError, "(3, 4)"),
    ],
    "gelu_and_mul": [
        BadInput("integers", "x", call(X.int()), TypeError, "int32"),
        BadInput("odd width", "x", call(X[:, :7]), ValueError, "even"),
        BadInput("unknown form", "approximate", call(X, approximate=True), ValueError, "'tanh'"),
        BadInput("bf16 out", "out", call(X, out=torch.empty(3, 4).bfloat16()), TypeError, "float32"),
    ],
    "gelu_residual_fp8": [
        BadInput("float64", "x", call(X.double()), TypeError, "float64"),
        BadInput("three dimensions", "x", call(X[None]), ValueError, "2-D"),
        BadInput("odd width", "x", call(X[:, :7]), ValueError, "even"),
        BadInput("unknown form", "approximate", call(X, approximate="erf"), ValueError, "'tanh'"),
    ],
    "silu_and_mul_fp8": [
        BadInput("FP8", "x", call(X.to(F8)), TypeError, "float8_e4m3fn"),
        BadInput("one dimension", "x", call(X[0]), ValueError, "2-D"),
        BadInput("no columns", "x", call(X[:, :0]), ValueError, "even"),
    ],
    "gelu_and_mul_fp8": [
        BadInput("no tensor", "x", call(None), TypeError, "tensor"),
        BadInput("one dimension", "x", call(X[0]), ValueError, "2-D"),
        BadInput("unknown form", "approximate", call(X, approximate=None), ValueError, "'tanh'"),
    ],
    "fused_linear_residual": [
        BadInput("float64", "x", but(LINEAR, 0, X.double()), TypeError, "float64"),
        BadInput("scalar", "x", but(LINEAR, 0, torch.tensor(1.0)), ValueError, "dimension"),
        BadInput("weight of other width", "weight", but(LINEAR, 1, torch.ones(6, 7)), ValueError, "(any, 8)"),
        BadInput("weight [in, out]", "weight", but(LINEAR, 1, torch.ones(8, 6).t()), ValueError, "contiguous"),
        BadInput("weight in bf16", "weight", but(LINEAR, 1, W1.bfloat16()), TypeError, "float32"),
        BadInput("bias of other length", "bias", but(LINEAR, 2, B2), ValueError, "(6,)"),
        BadInput("no residual", "residual", but(LINEAR, 3, None), TypeError, "tensor"),
        BadInput("residual of other width", "residual", but(LINEAR, 3, X), ValueError, "(3, 6)"),
        BadInput("residual elsewhere", "residual", but(LINEAR, 3, torch.ones(3, 6, **META)), ValueError, "device"),
        BadInput("out of other width", "out", call(*LINEAR, out=X), ValueError, "(3, 6)"),
    ],
    "gemv": [
        BadInput("integers", "x", call(X.int(), W1), TypeError, "int32"),
        BadInput("weight of other width", "weight", call(X, W2), ValueError, "(any, 8)"),
        BadInput("no weight", "weight", call(X, None), TypeError, "tensor"),
        BadInput("bias in fp16", "bias", call(X, W1, B1.half()), TypeError, "float32"),
        BadInput("out in fp16", "out", call(X, W1, out=torch.empty(3, 6).half()), TypeError, "float32"),
    ],
    "router_gemm": [
        BadInput("float64", "x", call(X.double(), W1), TypeError, "float64"),
        BadInput("weight in bf16", "weight", call(X, W1.bfloat16()), TypeError, "float32"),
        BadInput("flat weight", "weight", call(X, W1[0]), ValueError, "2-D"),
        BadInput("out in bf16", "out", call(X.half(), W1.half(), out=torch.empty(3, 6).half()), TypeError, "float32"),
    ],
    "moe_sum": [
        BadInput("two dimensions", "x", call(X), ValueError, "3-D"),
        BadInput("float64", "x", call(EXPERTS1.double()), TypeError, "float64"),
        BadInput("last dimension strided", "x", call(EXPERTS1.mT), ValueError, "contiguous"),
        BadInput("out of other shape", "out", call(EXPERTS1, torch.empty(4, 12)), ValueError, "(4, 8)"),
    ],
    "fused_mlp": [
        BadInput("float64", "x", but(MLP, 0, X.double()), TypeError, "float64"),
        BadInput("one row without T", "x", but(MLP, 0, X[0]), ValueError, "2 dimensions"),
        BadInput("transposed", "x", but(MLP, 0, torch.ones(8, 3).t()), ValueError, "contiguous"),
        BadInput("w1 of other width", "w1", but(MLP, 1, torch.ones(6, 7)), ValueError, "(any, 8)"),
        BadInput("w1 transposed", "w1", but(MLP, 1, torch.ones(8, 6).t()), ValueError, "contiguous"),
        BadInput("w1 in bf16", "w1", but(MLP, 1, W1.bfloat16()), TypeError, "float32"),
        BadInput("no w1", "w1", but(MLP, 1, None), TypeError, "tensor"),
        BadInput("w1 elsewhere", "w1", but(MLP, 1, torch.ones(6, 8, **META)), ValueError, "device"),
        BadInput("b1 of other length", "b1", but(MLP, 2, torch.ones(8)), ValueError, "(6,)"),
        BadInput("b1 as matrix", "b1", but(MLP, 2, torch.ones(1, 6)), ValueError, "(6,)"),
        BadInput("w2 as w1", "w2", but(MLP, 3, W1), ValueError, "(any, 6)"),
        BadInput("w2 in fp16", "w2", but(MLP, 3, W2.half()), TypeError, "float32"),
        BadInput("b2 of other length", "b2", but(MLP, 4, torch.ones(6)), ValueError, "(8,)"),
        BadInput("b2 in float64", "b2", but(MLP, 4, B2.double()), TypeError, "float64"),
        BadInput("residual of other rows", "residual", but(MLP, 5, X[:2]), ValueError, "(3, 8)"),
        BadInput("residual in bf16", "residual", but(MLP, 5, X.bfloat16()), TypeError, "float32"),
        BadInput("unknown activation", "activation", call(*MLP, activation="relu"), ValueError, "'gelu'"),
        BadInput("out of other shape", "out", call(*MLP, out=torch.empty(3, 6)), ValueError, "(3, 8)"),
    ],
    "topk_softmax": [
        BadInput("float64", "gating", call(GATING.double(), 2), TypeError, "float64"),
        BadInput("one dimension", "gating", call(GATING[0], 2), ValueError, "2-D"),
        BadInput("transposed", "gating", call(GATING.t(), 2), ValueError, "contiguous"),
        BadInput("k of 0", "k", call(GATING, 0), ValueError, ">= 1"),
        BadInput("k above E", "k", call(GATING, 5), ValueError, "4 experts"),
        BadInput("fractional k", "k", call(GATING, 1.5), TypeError, "integer"),
        BadInput("k as bool", "k", call(GATING, True), TypeError, "integer"),
        BadInput("renormalize as text", "renormalize", call(GATING, 2, renormalize="yes"), TypeError, "True"),
        BadInput("bias of other length", "bias", call(GATING, 2, bias=torch.ones(3)), ValueError, "(4,)"),
        BadInput("bias in float64", "bias", call(GATING, 2, bias=torch.ones(4).double()), TypeError, "float64"),
        BadInput("bias elsewhere", "bias", call(GATING, 2, bias=torch.ones(4, **META)), ValueError, "device"),
        BadInput("num_tokens as number", "num_tokens", call(GATING, 2, num_tokens=2), TypeError, "tensor"),
        BadInput(
            "num_tokens in int64", "num_tokens", call(GATING, 2, num_tokens=torch.tensor([2])), TypeError, "int32"
        ),
        BadInput(
            "scalar num_tokens", "num_tokens", call(GATING, 2, num_tokens=torch.tensor(2).int()), ValueError, "(1,)"
        ),
    ],
    "fused_experts": [
        BadInput("float64", "hidden", but(ROUTED, 0, X.double()), TypeError, "float64"),
        BadInput("three dimensions", "hidden", but(ROUTED, 0, X[None]), ValueError, "2-D"),
        BadInput("transposed", "hidden", but(ROUTED, 0, torch.ones(8, 3).t()), ValueError, "contiguous"),
        BadInput("no columns", "hidden", but(ROUTED, 0, X[:, :0]), ValueError, "Hd at least 1"),
        BadInput("w1 of one expert", "w1", but(ROUTED, 1, EXPERTS1[0]), ValueError, "3-D"),
        BadInput("w1 of other width", "w1", but(ROUTED, 1, torch.ones(4, 12, 9)), ValueError, "(any, any, 8)"),
        BadInput("w1 with odd rows", "w1", but(ROUTED, 1, torch.ones(4, 11, 8)), ValueError, "2I"),
        BadInput("w1 without experts", "w1", but(ROUTED, 1, torch.ones(0, 12, 8)), ValueError, "at least 1"),
        BadInput("w1 in bf16", "w1", but(ROUTED, 1, EXPERTS1.bfloat16()), TypeError, "float32"),
        BadInput("w1 in int8", "w1", but(ROUTED, 1, EXPERTS1.to(torch.int8)), TypeError, "float8_e4m3fn"),
        BadInput("w1 [in, out]", "w1", but(ROUTED, 1, torch.ones(4, 8, 12).mT), ValueError, "contiguous"),
        BadInput("w2 in bf16", "w2", but(ROUTED, 2, EXPERTS2.bfloat16()), TypeError, "float32"),
        BadInput("w2 of other experts", "w2", but(ROUTED, 2, EXPERTS2[:3]), ValueError, "(4, 8, 6)"),
        BadInput("w2 of width 2I", "w2", but(ROUTED, 2, torch.ones(4, 8, 12)), ValueError, "(4, 8, 6)"),
        BadInput("weights in bf16", "topk_weights", but(ROUTED, 3, WEIGHTS.bfloat16()), TypeError, "float32"),
        BadInput("weights of other rows", "topk_weights", but(ROUTED, 3, WEIGHTS[:2]), ValueError, "(3, 2)"),
        BadInput("no weights", "topk_weights", but(ROUTED, 3, None), TypeError, "tensor"),
        BadInput("ids in int64", "topk_ids", but(ROUTED, 4, IDS.long()), TypeError, "int32"),
        BadInput("ids of other choices", "topk_ids", but(ROUTED, 4, IDS[:, :1]), ValueError, "(3, 2)"),
        BadInput("ids elsewhere", "topk_ids", but(ROUTED, 4, torch.zeros(3, 2, **META).int()), ValueError, "device"),
        BadInput("unknown activation", "activation", call(*ROUTED, activation="gelu"), ValueError, "'silu_and_mul'"),
        BadInput("FP8 without scale", "w1_scale", call(*FP8), ValueError, "scales"),
        BadInput("FP8, one scale", "w2_scale", call(*FP8, w1_scale=SCALES["w1_scale"]), ValueError, "scales"),
        BadInput("scale without FP8", "w1_scale", call(*ROUTED, w1_scale=torch.ones(4)), ValueError, "None"),
        BadInput("scale per column", "w1_scale", call(*FP8, **SCALES | {"w1_scale": torch.ones(4, 8)}), ValueError),
        BadInput("too many tiles", "w2_scale", call(*FP8, **SCALES | {"w2_scale": torch.ones(4, 2, 1)}), ValueError),
        BadInput("scale in fp16", "w1_scale", call(*FP8, **SCALES | {"w1_scale": torch.ones(4).half()}), TypeError),
        BadInput("map in int64", "expert_map", call(*ROUTED, expert_map=torch.arange(4)), TypeError, "int32"),
        BadInput("map as list", "expert_map", call(*ROUTED, expert_map=[0, 1]), TypeError, "tensor"),
        BadInput("out in bf16", "out", call(*ROUTED, out=X.bfloat16()), TypeError, "float32"),
    ],
}
CASES = [pytest.param(op, case, id=f"{op}-{case.name}") for op, cases in BAD_INPUTS.items() for case in cases]

GOOD_CALLS: dict[str, Call] = {
    "gelu_residual": ((X,), {"approximate": "tanh"}),
    "silu_and_mul": ((X,), {"out": None}),
    "gelu_and_mul": ((X,), {"approximate": "tanh", "out": None}),
    "gelu_residual_fp8": ((X,), {"approximate": "tanh"}),
    "silu_and_mul_fp8": ((X,), {}),
    "gelu_and_mul_fp8": ((X,), {"approximate": "tanh"}),
    "fused_linear_residual": (LINEAR, {"out": None}),
    "gemv": (LINEAR[:3], {"out": None}),
    "router_gemm": (LINEAR[:2], {"out": None}),
    "moe_sum": ((EXPERTS1, None), {}),
    "fused_mlp": (MLP, {"activation": "gelu"}),
    "topk_softmax": ((GATING, 2), {"renormalize": True, "bias": torch.ones(4), "num_tokens": torch.tensor([2]).int()}),
    "fused_experts": (FP8, {**SCALES, "activation": "silu_and_mul", "expert_map": torch.arange(4).int()}),
}
ODD_VALUES = [
    None, True, 0, -1, 2, 2.5, float("nan"), "gelu", [1], torch.float16, X, X.t(), X[0], X[:0], X[:, :7], X.half(),
    X.double(), X.int(), IDS, IDS.long(), WEIGHTS, GATING, EXPERTS1, EXPERTS2, EXPERTS1.to(F8), torch.ones(4, 1, 1),
    torch.ones(1), torch.tensor(1.0),
]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_bad_input_is_named(op: str, case: BadInput) -> None:
    assert_rejects(getattr(kestrel_moe, op), case)


@pytest.mark.parametrize("case", BAD_INPUTS["topk_softmax"], ids=lambda case: case.name)
def test_the_entry_point_of_routing_refuses_in_the_same_words(case: BadInput) -> None:
    try:
        function = Binary("kestrel_moe").topk_softmax
    except UnsupportedError as error:
        pytest.skip(str(error))
    if case.fragment in ("tensor", "device"):
        pytest.skip("what is no tensor, or a meta tensor, does not cross into C++")
    args, kwargs = case.make()
    options = {"renormalize": False, "bias": None, "num_tokens": None} | kwargs
    said = []
    for call_it in (
        lambda: kestrel_moe.topk_softmax(*args, **kwargs),
        # the results are checked after the arguments
        lambda: function(torch.empty(0), torch.empty(0), torch.empty(0), None, *args, *options.values()),
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            call_it()
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("scratch", [torch.zeros(2, dtype=torch.int64), torch.zeros(3)], ids=["short", "float32"])
def test_the_entry_point_of_routing_refuses_scratch_memory_too_small_for_its_blocks_to_meet(scratch: Any) -> None:
    try:
        function = Binary("kestrel_moe").topk_softmax
    except UnsupportedError as error:
        pytest.skip(str(error))
    weights, ids, counts = torch.empty(16, 2), torch.empty(16, 2, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match="topk_softmax: argument 'scratch': expected "):
        function(weights, ids, counts, scratch, torch.zeros(16, 4), 2, False, None, None)


def refusals() -> list[Any]:
    """Of every good call: each tensor on another device, each required argument None, one at a time."""
    found = []
    for op, (args, kwargs) in GOOD_CALLS.items():
        parameters = inspect.signature(getattr(kestrel_moe, op)).parameters
        values = dict(zip(parameters, args, strict=False)) | kwargs
        elsewhere = [name for name, value in values.items() if torch.is_tensor(value)]
        elsewhere = elsewhere * (len(elsewhere) > 1) + ["out"] * ("out" in parameters)
        found.extend(pytest.param(op, name, True, id=f"{op}-{name} elsewhere") for name in elsewhere)
        required = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and "None" not in str(parameter.annotation)
        ]
        found.extend(pytest.param(op, name, False, id=f"{op}-no {name}") for name in required)
    return found


@pytest.mark.parametrize(("op", "name", "elsewhere"), refusals())
def test_a_tensor_elsewhere_or_a_missing_argument_is_named(op: str, name: str, elsewhere: bool) -> None:
    function = getattr(kestrel_moe, op)
    args, kwargs = GOOD_CALLS[op]
    values = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
    named = name
    if elsewhere:
        # the first argument sets the device: where it is the odd one, another one is named
        named = r"\w+" if name == next(iter(values)) else name
        values[name] = (function(**values) if name == "out" else values[name]).to("meta")
    else:
        values[name] = None
    with pytest.raises((ValueError, TypeError), match=rf"^{op}: argument '{named}': expected .+, got .+"):
        function(**values)


@pytest.mark.parametrize("op", GOOD_CALLS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_either_works_or_is_named(op: str, data: st.DataObject) -> None:
    args, kwargs = GOOD_CALLS[op]
    values = dict(enumerate(args)) | kwargs
    for which in data.draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=2)):
        values[which] = data.draw(st.sampled_from(ODD_VALUES))
    try:
        getattr(kestrel_moe, op)(*(values[i] for i in range(len(args))), **{k: values[k] for k in kwargs})
    except (ValueError, TypeError) as error:
        if not re.match(rf"{op}: argument '\w+': expected .+, got .+", str(error), re.DOTALL):
            raise AssertionError("the message names neither op nor argument") from error


# ---- registration and compilation ---------------------------------------------------------------------------------

BUFFER = torch.randn(8, 6, 40)
VIEW = BUFFER.transpose(0, 1)[::2, :, 3:35]  # [3, 8, 32], transposed and sliced
LINEAR1, LINEAR2 = torch.randn(10, 40)[:, :32], torch.randn(32, 16)[:, 3:13]
LARGER = (
    BUFFER[:5, 0, :32].bfloat16(),
    torch.randn(24, 4, 32).transpose(0, 1).bfloat16(),
    torch.randn(4, 32, 20)[..., 4:16].bfloat16(),
    torch.rand(5, 4)[:, 1:3],
    torch.randint(-1, 5, (5, 2), dtype=torch.int32),
)
REGISTERED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("gelu_residual", (X,), {}),
    ("gelu_residual", (VIEW.half(),), {"approximate": "tanh"}),
    ("gelu_residual", (VIEW,), {"out": torch.empty(3, 8, 16)}),
    ("silu_and_mul", (VIEW.bfloat16(),), {}),
    ("silu_and_mul", (VIEW,), {"out": torch.empty(3, 8, 16)}),
    ("gelu_and_mul", (VIEW,), {"approximate": "tanh"}),
    ("gelu_and_mul", (X,), {"out": torch.empty(3, 4)}),
    ("gelu_residual_fp8", (VIEW[:, 0],), {}),
    ("silu_and_mul_fp8", (VIEW[:, 0],), {}),
    ("gelu_and_mul_fp8", (VIEW[0].half(),), {"approximate": "tanh"}),
    ("fused_linear_residual", (VIEW, LINEAR1, None, torch.randn(8, 3, 10).transpose(0, 1)), {}),
    ("fused_linear_residual", LINEAR, {"out": torch.empty(3, 6)}),
    ("gemv", (VIEW, LINEAR1, torch.randn(10)), {}),
    ("gemv", LINEAR[:2], {"out": torch.empty(3, 6)}),
    ("router_gemm", (VIEW.half(), LINEAR1.half()), {}),
    ("router_gemm", LINEAR[:2], {"out": torch.empty(3, 6)}),
    ("moe_sum", (VIEW.bfloat16(),), {}),
    ("moe_sum", (VIEW,), {"out": torch.empty(3, 32)}),
    ("fused_mlp", MLP, {}),
    ("fused_mlp", (VIEW, LINEAR1, None, LINEAR2, None, VIEW), {"activation": "gelu"}),
    ("fused_mlp", (X, W1, None, W2, B2), {"out": torch.empty(3, 8)}),
    ("topk_softmax", (GATING, 2), {}),
    ("topk_softmax", (BUFFER[::2, 1, 3:33].half(), 5), {"renormalize": True, "bias": torch.randn(60)[::2].clone()}),
    ("topk_softmax", (GATING, 2), {"num_tokens": torch.tensor([2], dtype=torch.int32)}),
    ("fused_experts", ROUTED, {}),
    ("fused_experts", LARGER, {"activation": "gelu_and_mul", "expert_map": torch.tensor([3, -1, 0]).int()}),
    ("fused_experts", ROUTED, {"out": torch.empty(3, 8)}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), REGISTERED)
def test_registration_agrees_with_torch(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packet = getattr(torch.ops.kestrel_moe, op)
    opcheck(packet.out if "out" in kwargs else packet.default, args, kwargs)


def test_registration_of_fp8_experts_agrees_with_torch() -> None:
    # test_schema compares its inputs by a multiplication that torch lacks for float8
    tests = [name for name in OPCHECK_TESTS if name != "test_schema"]
    torch.library.opcheck(torch.ops.kestrel_moe.fused_experts.default, FP8, SCALES, test_utils=tests)


@pytest.mark.parametrize("tokens", [3, 20])
def test_public_functions_compile_into_one_graph(tokens: int) -> None:
    def block(x: torch.Tensor, gating: torch.Tensor) -> list[torch.Tensor]:
        up = kestrel_moe.gelu_residual(torch.cat((x, x), dim=-1))
        weights, ids, counts = kestrel_moe.topk_softmax(gating, 2, renormalize=True)
        routed = kestrel_moe.fused_experts(x, EXPERTS1, EXPERTS2, weights, ids)
        routed8 = kestrel_moe.fused_experts(x, *FP8[1:3], weights, ids, **SCALES)
        dense = kestrel_moe.fused_mlp(x, W1, B1, W2, B2, routed, out=torch.empty_like(x))
        codes, scale = kestrel_moe.silu_and_mul_fp8(x)
        more = [codes.float(), scale, *(part.float() for part in kestrel_moe.gelu_residual_fp8(x))]
        more.extend(part.float() for part in kestrel_moe.gelu_and_mul_fp8(x, approximate="tanh"))
        linear = kestrel_moe.fused_linear_residual(x, W1, B1, kestrel_moe.gemv(x, W1))
        more.extend((linear, kestrel_moe.router_gemm(x, W1), kestrel_moe.moe_sum(torch.stack((x, x), 1))))
        more.extend((kestrel_moe.silu_and_mul(x), kestrel_moe.gelu_and_mul(x, out=torch.empty_like(x[:, :4]))))
        return [up, weights, ids, counts, routed, routed8, dense, *more]

    x, gating = torch.randn(tokens, 8), torch.randn(tokens, 4)
    for got, expected in zip(torch.compile(block, fullgraph=True)(x, gating), block(x, gating), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
