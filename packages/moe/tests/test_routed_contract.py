"""What alignment and grouped products promise: bad inputs are named, torch.library agrees, torch.compile traces."""

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
from kestrel_moe.invoke_moe import _invoke_cute_moe_down, _invoke_cute_moe_up
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import OPCHECK_TESTS, BadInput, assert_rejects, opcheck

F8 = torch.float8_e4m3fn
Call = tuple[tuple[Any, ...], dict[str, Any]]
META = {"device": "meta"}

# T = 3, K = 2, E = 4, Hd = 8, I = 6; 6 pairs in blocks of 16: at most (6 + 4 * 15) // 16 = 4 blocks
LOGITS = torch.linspace(-1, 1, 12).view(3, 4).sin()
WEIGHTS, IDS, SORTED, EXPERTS, LENGTH = kestrel_moe.route_and_align(LOGITS, 2, 16)
X, W1, W3 = torch.ones(3, 8), torch.ones(4, 12, 8), torch.ones(4, 8, 6)
INNER = torch.ones(6, 6)
ONE, PAIR_ONE, SCALE = torch.ones(3, 1), torch.ones(6, 1), torch.ones(4)


def ints(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, **options)


def but(args: tuple[Any, ...], position: int, value: Any) -> Callable[[], Call]:
    """The call with one argument replaced; in-place outputs are fresh in every call."""
    return lambda: ((*(a.clone() if i > 2 and torch.is_tensor(a) else a for i, a in enumerate(args[:position])), value,
                     *(a.clone() if torch.is_tensor(a) else a for a in args[position + 1 :])), {})  # fmt: skip


def call(*args: Any, **kwargs: Any) -> Callable[[], Call]:
    return lambda: (args, kwargs)


ALIGN = (IDS, 4, 16, ints(64), ints(4), ints(1))
LORA = (IDS, ints(3), 4, 16, 2, ints(2, 64), ints(2, 4), ints(2), torch.ones(2, dtype=torch.bool))
UP = (X, W1, None, None, IDS, SORTED, EXPERTS, LENGTH)
DOWN = (INNER, W3, WEIGHTS, IDS, SORTED, EXPERTS, LENGTH)
UP8 = (X.to(F8), ONE, W1.to(F8), SCALE, None, None, None, IDS, SORTED, EXPERTS, LENGTH)
DOWN8 = (INNER.to(F8), PAIR_ONE, W3.to(F8), SCALE, WEIGHTS, IDS, SORTED, EXPERTS, LENGTH)

BAD_INPUTS = {
    "moe_align_block_size": [
        BadInput("float ids", "topk_ids", but(ALIGN, 0, WEIGHTS), TypeError, "int32"),
        BadInput("flat ids", "topk_ids", but(ALIGN, 0, IDS.flatten()), ValueError, "2-D"),
        BadInput("transposed ids", "topk_ids", but(ALIGN, 0, ints(2, 3).t()), ValueError, "contiguous"),
        BadInput("no experts", "num_experts", but(ALIGN, 1, 0), ValueError, ">= 1"),
        BadInput("experts as float", "num_experts", but(ALIGN, 1, 4.0), TypeError, "integer"),
        BadInput("experts past int32", "num_experts", but(ALIGN, 1, 2**31), ValueError, "<= 2147483647"),
        BadInput("experts past 64 bits", "num_experts", but(ALIGN, 1, 2**70), ValueError),
        BadInput("block of 0", "block_size", but(ALIGN, 2, 0), ValueError, ">= 1"),
        BadInput("block past int32", "block_size", but(ALIGN, 2, 2**31), ValueError, "<= 2147483647"),
        BadInput("block past 64 bits", "block_size", but(ALIGN, 2, 2**70), ValueError),
        BadInput("short buffer", "sorted_token_ids", but(ALIGN, 3, ints(63)), ValueError, "at least 64"),
        BadInput("int64 buffer", "sorted_token_ids", but(ALIGN, 3, ints(64).long()), TypeError, "int32"),
        BadInput("buffer elsewhere", "sorted_token_ids", but(ALIGN, 3, ints(64, **META)), ValueError, "device"),
        BadInput("strided buffer", "sorted_token_ids", but(ALIGN, 3, ints(64, 2)[:, 0]), ValueError, "contiguous"),
        BadInput("no buffer", "sorted_token_ids", but(ALIGN, 3, None), TypeError, "tensor"),
        BadInput("few blocks", "expert_ids", but(ALIGN, 4, ints(3)), ValueError, "at least 4"),
        BadInput("two lengths", "num_tokens_post_pad", but(ALIGN, 5, ints(2)), ValueError, "(1,)"),
        BadInput("scalar length", "num_tokens_post_pad", but(ALIGN, 5, torch.tensor(0).int()), ValueError, "1-D"),
        BadInput("short map", "expert_map", call(*ALIGN, ints(3)), ValueError, "(4,)"),
        BadInput("map in int64", "expert_map", call(*ALIGN, ints(4).long()), TypeError, "int32"),
    ],
    "moe_lora_align_block_size": [
        BadInput("mapping of other tokens", "token_lora_mapping", but(LORA, 1, ints(2)), ValueError, "(3,)"),
        BadInput("mapping in int64", "token_lora_mapping", but(LORA, 1, ints(3).long()), TypeError, "int32"),
        BadInput("adapters past 64 bits", "max_loras", but(LORA, 4, 2**70), ValueError),
        BadInput("no adapters", "max_loras", but(LORA, 4, 0), ValueError, ">= 1"),
        BadInput("flat buffer", "sorted_token_ids", but(LORA, 5, ints(128)), ValueError, "2-D"),
        BadInput("short buffer", "sorted_token_ids", but(LORA, 5, ints(2, 63)), ValueError, "at least 64"),
        BadInput("one row of blocks", "expert_ids", but(LORA, 6, ints(1, 4)), ValueError, "(2, any)"),
        BadInput("one length", "num_tokens_post_pad", but(LORA, 7, ints(1)), ValueError, "at least 2"),
        BadInput(
            "one row for all", "sorted_token_ids", but(LORA, 5, ints(1, 64).expand(2, 64)), ValueError, "strides (0"
        ),
        BadInput("flags in float", "adapter_enabled", but(LORA, 8, torch.ones(2)), TypeError, "bool"),
        BadInput("three flags", "adapter_enabled", but(LORA, 8, ints(3)), ValueError, "(2,)"),
    ],
    "route_and_align": [
        BadInput("float64", "logits", call(LOGITS.double(), 2, 16), TypeError, "float64"),
        BadInput("one row", "logits", call(LOGITS[0], 2, 16), ValueError, "2-D"),
        BadInput("k above E", "k", call(LOGITS, 5, 16), ValueError, "4 experts"),
        BadInput("k past 64 bits", "k", call(LOGITS, 2**70, 16), ValueError),
        BadInput("block of 0", "block_size", call(LOGITS, 2, 0), ValueError, ">= 1"),
        BadInput("block past int32", "block_size", call(LOGITS, 2, 2**31), ValueError, "<= 2147483647"),
        BadInput("block past 64 bits", "block_size", call(LOGITS, 2, 2**70), ValueError),
        BadInput("renormalize as number", "renormalize", call(LOGITS, 2, 16, renormalize=1), TypeError, "True"),
        BadInput("long bias", "bias", call(LOGITS, 2, 16, bias=torch.ones(5)), ValueError, "(4,)"),
        BadInput("long map", "expert_map", call(LOGITS, 2, 16, expert_map=ints(5)), ValueError, "(4,)"),
    ],
    "invoke_cute_moe_up": [
        BadInput("integers", "hidden_states", but(UP, 0, X.int()), TypeError, "int32"),
        BadInput("three dimensions", "hidden_states", but(UP, 0, X[None]), ValueError, "2-D"),
        BadInput("other tokens", "hidden_states", but(UP, 0, torch.ones(4, 8)), ValueError, "(3, any)"),
        BadInput("w1 in bf16", "w1", but(UP, 1, W1.bfloat16()), TypeError, "float32"),
        BadInput("w1 of other width", "w1", but(UP, 1, W3), ValueError, "(any, any, 8)"),
        BadInput("no w1", "w1", but(UP, 1, None), TypeError, "tensor"),
        BadInput("no experts", "w1", but(UP, 1, W1[:0]), ValueError, "at least 1"),
        BadInput("no outputs", "w1", but(UP, 1, W1[:, :0]), ValueError, "at least 1"),
        BadInput("no columns", "w1", call(X[:, :0], W1[..., :0], *UP[2:]), ValueError, "at least 1"),
        BadInput("w2 unlike w1", "w2", but(UP, 2, W1[:, :6]), ValueError, "(4, 12, 8)"),
        BadInput("ids in int64", "topk_ids", but(UP, 4, IDS.long()), TypeError, "int32"),
        BadInput("sorted in int64", "sorted_token_ids", but(UP, 5, SORTED.long()), TypeError, "int32"),
        BadInput("experts in two dimensions", "expert_ids", but(UP, 6, EXPERTS[None]), ValueError, "1-D"),
        BadInput("two lengths", "num_tokens_post_pad", but(UP, 7, ints(2)), ValueError, "(1,)"),
        BadInput("length elsewhere", "num_tokens_post_pad", but(UP, 7, ints(1, **META)), ValueError, "device"),
        BadInput("block of 0", "block_size", call(*UP, block_size=0), ValueError, "16, 32, 64, 128"),
        BadInput("no block fits", "block_size", but(UP, 5, ints(260)), ValueError, "no size"),
        BadInput("a block of any length", "block_size", call(*UP, block_size=8), ValueError, "16, 32, 64, 128"),
        BadInput("a block beyond 64 bits", "block_size", call(*UP, block_size=2**70), ValueError, "64 bits"),
        BadInput("a block of 16.0", "block_size", call(*UP, block_size=16.0), TypeError, "integer"),
        BadInput("out of other width", "out", call(*UP, out=torch.empty(6, 6)), ValueError, "(6, 12)"),
    ],
    "invoke_cute_moe_down": [
        BadInput("other pairs", "moe_out", but(DOWN, 0, torch.ones(3, 6)), ValueError, "(6, any)"),
        BadInput("float64", "moe_out", but(DOWN, 0, INNER.double()), TypeError, "float64"),
        BadInput("w3 as w1", "w3", but(DOWN, 1, W1), ValueError, "(any, any, 6)"),
        BadInput("no inner columns", "w3", call(INNER[:, :0], W3[..., :0], *DOWN[2:]), ValueError, "at least 1"),
        BadInput("no weights", "topk_weights", but(DOWN, 2, None), TypeError, "tensor"),
        BadInput("weights in bf16", "topk_weights", but(DOWN, 2, WEIGHTS.bfloat16()), TypeError, "float32"),
        BadInput("weights of other shape", "topk_weights", but(DOWN, 2, WEIGHTS[:, :1]), ValueError, "(3, 2)"),
        BadInput("flat out", "out", call(*DOWN, out=torch.empty(6, 8)), ValueError, "(3, 2, 8)"),
    ],
    "invoke_cute_moe_up_fp8": [
        BadInput("bf16 codes", "x_q", but(UP8, 0, X.bfloat16()), TypeError, "float8_e4m3fn"),
        BadInput("no scale", "x_scale", but(UP8, 1, None), TypeError, "tensor"),
        BadInput("one scale for all rows", "x_scale", but(UP8, 1, torch.ones(1)), ValueError, "(3, 1)"),
        BadInput("w1 in float", "w1", but(UP8, 2, W1), TypeError, "float8_e4m3fn"),
        BadInput("no weight scale", "w1_scale", but(UP8, 3, None), ValueError, "scales"),
        BadInput("scale per column", "w1_scale", but(UP8, 3, torch.ones(4, 8)), ValueError, "(4, 12)"),
        BadInput("scale without w2", "w2_scale", but(UP8, 5, SCALE), ValueError, "None"),
        BadInput("w2 without scale", "w2_scale", but(UP8, 4, W1.to(F8)), ValueError, "scales"),
        BadInput("float out", "out", call(*UP8, out=torch.empty(6, 12)), TypeError, "bfloat16"),
    ],
    "invoke_cute_moe_down_fp8": [
        BadInput("scales of tokens", "x_scale", but(DOWN8, 1, ONE), ValueError, "(6, 1)"),
        BadInput("w3 in e5m2", "w3", but(DOWN8, 2, W3.to(torch.float8_e5m2)), TypeError, "float8_e4m3fn"),
        BadInput("scale in fp16", "w3_scale", but(DOWN8, 3, SCALE.half()), TypeError, "float32"),
        BadInput("weights of other shape", "topk_weights", but(DOWN8, 4, WEIGHTS[:2]), ValueError, "(3, 2)"),
    ],
}
CASES = [pytest.param(op, case, id=f"{op}-{case.name}") for op, cases in BAD_INPUTS.items() for case in cases]

GOOD_CALLS: dict[str, Call] = {
    "moe_align_block_size": (ALIGN, {"expert_map": ints(4)}),
    "moe_lora_align_block_size": (LORA, {"expert_map": None}),
    "route_and_align": ((LOGITS, 2, 16), {"renormalize": True, "bias": SCALE, "expert_map": ints(4)}),
    "invoke_cute_moe_up": (UP, {"block_size": 16, "out": None}),
    "invoke_cute_moe_down": (DOWN, {"block_size": None}),
    "invoke_cute_moe_up_fp8": (UP8, {"block_size": None, "out": None}),
    "invoke_cute_moe_down_fp8": (DOWN8, {"block_size": 16}),
}
ODD_VALUES = [
    None, True, 0, -1, 2, 2.5, float("nan"), "x", [1], X, X.t(), X[0], X.half(), X.double(), X.to(F8), IDS, IDS.long(),
    WEIGHTS, W1, W3, W1.to(F8), INNER, ONE, SCALE, ints(1), ints(64), ints(2, 64), torch.tensor(1.0),
]  # fmt: skip


def copies(args: tuple[Any, ...]) -> list[Any]:
    return [value.clone() if torch.is_tensor(value) else value for value in args]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_bad_input_is_named(op: str, case: BadInput) -> None:
    assert_rejects(getattr(kestrel_moe, op), case)


def entry_point(op: str) -> Callable[..., None]:
    """The C++ entry point of an alignment, called with the arguments of the public op."""
    try:
        function = Binary("kestrel_moe").function(op)
    except UnsupportedError as error:
        pytest.skip(str(error))

    def moe_align_block_size(*args: Any, expert_map: Any = None) -> None:
        function(*args, *([expert_map] * (len(args) == 6)))

    def moe_lora_align_block_size(*args: Any, expert_map: Any = None) -> None:
        function(*args, expert_map)

    def route_and_align(
        logits: Any, k: Any, block_size: Any, renormalize: Any = False, bias: Any = None, expert_map: Any = None
    ) -> None:
        results = (torch.empty(0), ints(0), ints(0), ints(0), ints(0))  # checked after the arguments
        function(*results, logits, k, block_size, renormalize, bias, expert_map)

    return locals()[op]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("op", "case"), [case for case in CASES if "align" in case.values[0] and " elsewhere" not in case.values[1].name]
)
def test_the_entry_point_refuses_in_the_same_words(op: str, case: BadInput) -> None:
    if case.fragment == "tensor":
        pytest.skip("what is no tensor does not cross into C++")
    if "64 bits" in case.name:
        pytest.skip("an integer beyond 64 bits does not cross into C++")
    args, kwargs = case.make()
    said = []
    for function in (getattr(kestrel_moe, op), entry_point(op)):
        with pytest.raises((ValueError, TypeError)) as raised:
            function(*args, **kwargs)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_good_call_reaches_the_last_check_of_the_entry_point() -> None:
    for op in ("moe_align_block_size", "moe_lora_align_block_size"):
        with pytest.raises(ValueError, match=f"{op}: argument 'topk_ids': expected a CUDA tensor, got cpu"):
            entry_point(op)(*copies(GOOD_CALLS[op][0]))


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
    values = dict(enumerate(copies(args))) | kwargs
    for which in data.draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=2)):
        value = data.draw(st.sampled_from(ODD_VALUES))
        values[which] = value.clone() if torch.is_tensor(value) else value
    try:
        getattr(kestrel_moe, op)(*(values[i] for i in range(len(args))), **{k: values[k] for k in kwargs})
    except (ValueError, TypeError) as error:
        if not re.match(rf"{op}: argument '\w+': expected .+, got .+", str(error), re.DOTALL):
            raise AssertionError("the message names neither op nor argument") from error


# ---- registration and compilation ------------------------------------------------------------------------------------

WIDE = torch.randn(4, 6, 30).transpose(0, 1)  # [6, 4, 30]
REGISTERED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (kestrel_moe.moe_align_block_size, ALIGN, {}),
    (kestrel_moe.moe_align_block_size, (ints(6, 4)[1:4, 1:3], *ALIGN[1:], ints(4)), {}),
    (kestrel_moe.moe_lora_align_block_size, LORA, {}),
    (kestrel_moe.route_and_align, (LOGITS, 2, 16), {}),
    (kestrel_moe.route_and_align, (WIDE[:3, 0, 5:9].half(), 2, 16), {"bias": SCALE, "expert_map": ints(4)}),
    (_invoke_cute_moe_up, (X, W1, None, IDS, SORTED, EXPERTS, LENGTH, 16), {}),
    (_invoke_cute_moe_up, (WIDE[::2, 0, 3:11], W1[:, :6], W1[:, 6:], IDS, SORTED, EXPERTS, LENGTH, 16), {}),
    (_invoke_cute_moe_down, (WIDE[:, 0, 2:8], W3, WEIGHTS, IDS, SORTED, EXPERTS, LENGTH, 16), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), REGISTERED)
def test_registration_agrees_with_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    opcheck(op, copies(args), kwargs)


@pytest.mark.parametrize("name", ["up", "down", "up_fp8", "down_fp8"])
def test_registration_of_outs_and_of_fp8_agrees_with_torch(name: str) -> None:
    aligned = (IDS, SORTED, EXPERTS, LENGTH, 16)
    args, out = {
        "up": ((X, W1, None, *aligned), torch.empty(6, 12)),
        "down": ((INNER, W3, WEIGHTS, *aligned), torch.empty(3, 2, 8)),
        "up_fp8": ((*UP8[:6], *aligned), torch.empty(6, 12).bfloat16()),
        "down_fp8": ((*DOWN8[:5], *aligned), torch.empty(3, 2, 8).bfloat16()),
    }[name]
    packet = getattr(torch.ops.kestrel_moe, f"invoke_cute_moe_{name}")
    # test_schema compares its inputs by a multiplication that torch lacks for float8
    tests = [test for test in OPCHECK_TESTS if test != "test_schema" or "fp8" not in name]
    torch.library.opcheck(packet.default, args, test_utils=tests)
    torch.library.opcheck(packet.out, args, {"out": out}, test_utils=tests)


def test_public_functions_compile_into_one_graph() -> None:
    def layer(x: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
        weights, ids, *aligned = kestrel_moe.route_and_align(logits, 2, 16)
        up = kestrel_moe.invoke_cute_moe_up(x, W1, None, None, ids, *aligned)
        down = kestrel_moe.invoke_cute_moe_down(up[:, :6], W3, weights, ids, *aligned, block_size=16)
        up8 = kestrel_moe.invoke_cute_moe_up_fp8(x.to(F8), ONE, W1.to(F8), SCALE, None, None, None, ids, *aligned)
        down8 = kestrel_moe.invoke_cute_moe_down_fp8(
            up8[:, :6].to(F8), PAIR_ONE, W3.to(F8), SCALE, weights, ids, *aligned, out=torch.empty(3, 2, 8).bfloat16()
        )
        buffers = [torch.empty(n, dtype=torch.int32) for n in (64, 4, 1)]
        kestrel_moe.moe_align_block_size(ids, 4, 16, *buffers)
        stacked = [torch.zeros(shape, dtype=torch.int32) for shape in ((2, 64), (2, 4), (2,))]
        kestrel_moe.moe_lora_align_block_size(ids, ints(3), 4, 16, 2, *stacked, torch.tensor([True, False]))
        return [weights, ids, *aligned, up, down, up8, down8, *buffers, *stacked]

    x = torch.randn(3, 8)
    for got, expected in zip(torch.compile(layer, fullgraph=True)(x, LOGITS), layer(x, LOGITS), strict=True):
        assert torch.equal(got, expected)
