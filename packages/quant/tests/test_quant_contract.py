"""What every op of the family promises: bad inputs are named, torch.library agrees, torch.compile traces."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_quant
from kestrel_quant.fp8_quant import _fp8_quant, _fp8_quant_static
from kestrel_quant.w4a16 import _w4a16_linear
from kestrel_quant.w4a16_token import _w4a16_token
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import (
    OPCHECK_TESTS,
    BadInput,
    assert_refused,
    assert_registered,
    assert_rejects,
    assert_same_bits,
    derived_bad_inputs,
    opcheck,
    refusal_params,
)

F8 = torch.float8_e4m3fn
X = torch.linspace(-3, 3, 36).view(3, 12)
CODES, SCALE = kestrel_quant.fp8_quant(X)
CODES8, SCALE8 = kestrel_quant.int8_quant(X)
CODES4, SCALE4 = kestrel_quant.int4_quant(X, group_size=4)
W4 = kestrel_quant.pack_w4(torch.ones(6, 12), 4)
W4A = kestrel_quant.pack_w4(torch.ones(6, 12), 4, symmetric=False)
WORDS, GROUPS = torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 8)  # GPTQ: K = 16, N = 8, G = 8
CT_WORDS, CT_SCALES = torch.zeros(8, 2, dtype=torch.int32), torch.ones(8, 2)  # K = 16, N = 8, G = 8
AWQ_WORDS, AWQ_ZEROS = torch.zeros(16, 1, dtype=torch.int32), torch.full((2, 1), -0x77777778, dtype=torch.int32)


def call(*args: Any, **kwargs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: (args, kwargs)


BAD_INPUTS = {
    "fp8_quant": [
        BadInput("no tensor", "x", call([1.0]), TypeError, "tensor"),
        BadInput("None", "x", call(None), TypeError),
        BadInput("float64", "x", call(X.double()), TypeError, "float64"),
        BadInput("integers", "x", call(X.int()), TypeError, "int32"),
        BadInput("one dimension", "x", call(X[0]), ValueError, "2-D"),
        BadInput("three dimensions", "x", call(X[None]), ValueError, "2-D"),
        BadInput("transposed", "x", call(X.t()), ValueError, "contiguous"),
        BadInput("no columns", "x", call(X[:, :0]), ValueError, "column"),
        BadInput("unknown granularity", "granularity", call(X, granularity="column"), ValueError, "'row'"),
        BadInput("unknown with scale", "granularity", call(X, SCALE, granularity="column"), ValueError, "'row'"),
        BadInput("an array", "granularity", call(X, granularity=np.ones(2)), ValueError, "array"),
        BadInput("an array with scale", "granularity", call(X, SCALE, granularity=np.ones(2)), ValueError, "array"),
        BadInput("group of 0", "group_size", call(X, granularity="group", group_size=0), ValueError, ">= 1"),
        BadInput("fractional group", "group_size", call(X, granularity="group", group_size=1.5), TypeError, "integer"),
        BadInput("number as bound", "scale_ub", call(X, scale_ub=3.0), TypeError, "tensor"),
        BadInput("wide bound", "scale_ub", call(X, scale_ub=torch.ones(3)), ValueError, "(1,)"),
        BadInput("half bound", "scale_ub", call(X, scale_ub=torch.ones(1).half()), TypeError, "float32"),
        BadInput("bound elsewhere", "scale_ub", call(X, scale_ub=torch.ones(1, device="meta")), ValueError, "device"),
        BadInput("column-major rows", "column_major_scales", call(X, column_major_scales=True), ValueError, "group"),
        BadInput("flag as text", "column_major_scales", call(X, column_major_scales="no"), TypeError, "True or False"),
        BadInput("scale per column", "scale", call(X, torch.ones(1, 12)), ValueError, "(3, 1)"),
        BadInput("scale for other rows", "scale", call(X, torch.ones(2, 1)), ValueError, "(3, 1)"),
        BadInput("flat scales", "scale", call(X, torch.ones(3)), ValueError, "(1,)"),
        BadInput("number as scale", "scale", call(X, 0.5), TypeError, "tensor"),
        BadInput("half scale", "scale", call(X, torch.ones(1).half()), TypeError, "float32"),
        BadInput("scale elsewhere", "scale", call(X, torch.ones(1, device="meta")), ValueError, "device"),
        BadInput("scale and bound", "scale_ub", call(X, SCALE, scale_ub=torch.ones(1)), ValueError, "None"),
        BadInput("scale and group", "granularity", call(X, SCALE, granularity="group"), ValueError, "given scale"),
        BadInput("scale, column-major", "column_major_scales", call(X, SCALE, column_major_scales=True), ValueError),
    ],
    "fp8_dequant": [
        BadInput("floats", "q", call(X, SCALE), TypeError, "float8_e4m3fn"),
        BadInput("e5m2", "q", call(CODES.to(torch.float8_e5m2), SCALE), TypeError, "float8_e4m3fn"),
        BadInput("one dimension", "q", call(CODES[0], SCALE), ValueError, "2-D"),
        BadInput("transposed", "q", call(CODES.t(), torch.ones(1)), ValueError, "contiguous"),
        BadInput("no scale", "scale", call(CODES, None), TypeError, "tensor"),
        BadInput("half scale", "scale", call(CODES, SCALE.half()), TypeError, "float32"),
        BadInput("too many groups", "scale", call(CODES, torch.ones(3, 5), group_size=4), ValueError, "(3, 3)"),
        BadInput("flat scales", "scale", call(CODES, torch.ones(3)), ValueError, "(1,)"),
        BadInput("negative group", "group_size", call(CODES, SCALE, group_size=-1), ValueError, ">= 1"),
        BadInput("to integers", "dtype", call(CODES, SCALE, dtype=torch.int8), ValueError, "bfloat16"),
        BadInput("out of other dtype", "out", call(CODES, SCALE, out=torch.empty(3, 12)), TypeError, "bfloat16"),
        BadInput("out of other shape", "out", call(CODES, SCALE, out=torch.empty(3, 6).bfloat16()), ValueError),
        BadInput(
            "out, strided", "out", call(CODES, SCALE, out=torch.empty(3, 24).bfloat16()[:, ::2]), ValueError, "contig"
        ),
    ],
    "int8_quant": [
        BadInput("float64", "x", call(X.double()), TypeError, "float64"),
        BadInput("one dimension", "x", call(X[0]), ValueError, "2-D"),
        BadInput("transposed", "x", call(X.t()), ValueError, "contiguous"),
        BadInput("no columns", "x", call(X[:, :0]), ValueError, "column"),
        BadInput("groups", "granularity", call(X, granularity="group"), ValueError, "'tensor'"),
    ],
    "int8_dequant": [
        BadInput("uint8", "q", call(CODES4, SCALE8), TypeError, "int8"),
        BadInput("scale per column", "scale", call(CODES8, torch.ones(3, 12)), ValueError, "(3, 1)"),
        BadInput("scale in fp16", "scale", call(CODES8, SCALE8.half()), TypeError, "float32"),
        BadInput("number as scale", "scale", call(CODES8, 0.5), TypeError, "tensor"),
        BadInput("scale elsewhere", "scale", call(CODES8, torch.ones(1, device="meta")), ValueError, "device"),
        BadInput("to float64", "dtype", call(CODES8, SCALE8, dtype=torch.float64), ValueError, "bfloat16"),
        BadInput("out of other shape", "out", call(CODES8, SCALE8, out=torch.ones(3, 6).bfloat16()), ValueError),
    ],
    "int4_quant": [
        BadInput("integers", "x", call(X.int()), TypeError, "int32"),
        BadInput("odd columns", "x", call(X[:, :11]), ValueError, "even"),
        BadInput("group of 0", "group_size", call(X, group_size=0), ValueError, ">= 1"),
        BadInput("group as float", "group_size", call(X, group_size=4.0), TypeError, "integer"),
    ],
    "int4_dequant": [
        BadInput("int8", "q", call(CODES8, SCALE4), TypeError, "uint8"),
        BadInput("scale of other groups", "scale", call(CODES4, SCALE4), ValueError, "(3, 1)"),
        BadInput("flat scale", "scale", call(CODES4, torch.ones(3), group_size=4), ValueError, "2-D"),
        BadInput("group of 0", "group_size", call(CODES4, SCALE4, group_size=0), ValueError, ">= 1"),
        BadInput("out of packed width", "out", call(CODES4, SCALE4, group_size=4, out=X[:, :6].bfloat16()), ValueError),
    ],
    "pack_w4": [
        BadInput("float64", "weight", call(X.double(), 4), TypeError, "float64"),
        BadInput("one dimension", "weight", call(X[0], 4), ValueError, "2-D"),
        BadInput("NaN", "weight", call(torch.full((2, 4), float("nan")), 4), ValueError, "finite"),
        BadInput("group that does not divide", "group_size", call(X, 8), ValueError, "divisor"),
        BadInput("odd group", "group_size", call(X, 3), ValueError, "even"),
        BadInput("no columns", "group_size", call(X[:, :0], 4), ValueError, "0 columns"),
        BadInput("group as text", "group_size", call(X, "4"), TypeError, "integer"),
        BadInput("symmetric as a number", "symmetric", call(X, 4, symmetric=1), TypeError, "True"),
    ],
    "w4a16_linear": [
        BadInput("float64", "x", call(X.double(), W4), TypeError, "float64"),
        BadInput("other dtype", "x", call(X.half(), W4), TypeError, "float32"),
        BadInput("other width", "x", call(X[:, :8], W4), ValueError, "12"),
        BadInput("plain weight", "w", call(X, X), TypeError, "W4Weight"),
        BadInput("weight elsewhere", "w", call(X, W4.to("meta")), ValueError, "device"),
        BadInput("bias of other length", "bias", call(X, W4, torch.ones(12)), ValueError, "(6,)"),
        BadInput("number as bias", "bias", call(X, W4, 1.0), TypeError, "tensor"),
        BadInput("bias in bf16", "bias", call(X, W4, torch.ones(6).bfloat16()), TypeError, "float32"),
        BadInput("every second bias", "bias", call(X, W4, torch.ones(12)[::2]), ValueError, "contiguous"),
        BadInput("bias elsewhere", "bias", call(X, W4, torch.ones(6, device="meta")), ValueError, "device"),
        BadInput("transposed", "x", call(torch.ones(12, 3).t(), W4), ValueError, "contiguous"),
        BadInput("scalar", "x", call(torch.tensor(1.0), W4), ValueError, "a last dimension of 12"),
        BadInput("residual of other width", "residual", call(X, W4, residual=X), ValueError, "(3, 6)"),
        BadInput("one residual for all rows", "residual", call(X, W4, residual=X[:1, :6]), ValueError, "(3, 6)"),
        BadInput("residual in fp16", "residual", call(X, W4, residual=X[:, :6].half()), TypeError, "float16"),
        BadInput("residual elsewhere", "residual", call(X, W4, residual=X[:, :6].to("meta")), ValueError, "device"),
        BadInput("residual, strided", "residual", call(X, W4, residual=X[:, ::2]), ValueError, "contiguous"),
        BadInput("number as residual", "residual", call(X, W4, residual=1.0), TypeError, "tensor"),
        BadInput("wide out", "out", call(X, W4, out=torch.empty(3, 7)), ValueError, "(3, 6)"),
        BadInput("every second column", "out", call(X, W4, out=torch.empty(3, 12)[:, ::2]), ValueError, "contiguous"),
        BadInput("out in bf16", "out", call(X, W4, out=torch.ones(3, 6).bfloat16()), TypeError, "float32"),
    ],
    "w4a16_token": [
        BadInput("float64", "x", call(X.double(), W4), TypeError, "float64"),
        BadInput("other dtype", "x", call(X.half(), W4), TypeError, "float32"),
        BadInput("other width", "x", call(X[:, :8], W4), ValueError, "12"),
        BadInput("plain weight", "w", call(X, X), TypeError, "W4Weight"),
        BadInput("weight elsewhere", "w", call(X, W4.to("meta")), ValueError, "device"),
        BadInput("bias of other length", "bias", call(X, W4, torch.ones(12)), ValueError, "(6,)"),
        BadInput("norm of other length", "norm_weight", call(X, W4, norm_weight=torch.ones(6)), ValueError, "(12,)"),
        BadInput("norm in bf16", "norm_weight", call(X, W4, norm_weight=torch.ones(12).bfloat16()), TypeError),
        BadInput(
            "every second norm", "norm_weight", call(X, W4, norm_weight=torch.ones(24)[::2]), ValueError, "contig"
        ),
        BadInput("norm elsewhere", "norm_weight", call(X, W4, norm_weight=X[0].to("meta")), ValueError, "device"),
        BadInput("residual elsewhere", "residual", call(X, W4, residual=X[:, :6].to("meta")), ValueError, "device"),
        BadInput("residual, strided", "residual", call(X, W4, residual=X[:, ::2]), ValueError, "contiguous"),
        BadInput("one row as out", "out", call(X, W4, out=torch.empty(1, 6).expand(3, 6)), ValueError, "share"),
        BadInput("negative eps", "norm_eps", call(X, W4, norm_eps=-1.0), ValueError, ">= 0"),
        BadInput("NaN as bias of a norm", "norm_weight_bias", call(X, W4, norm_weight_bias=float("nan")), ValueError),
        BadInput("unknown activation", "activation", call(X, W4, activation="relu"), ValueError, "'relu'"),
        BadInput(
            "residual of a gate", "residual", call(X, W4, activation="silu_and_mul", residual=X[:, :6]), ValueError
        ),
        BadInput("residual in fp16", "residual", call(X, W4, residual=torch.ones(3, 6).half()), TypeError, "float16"),
        BadInput("out in bf16", "out", call(X, W4, out=torch.ones(3, 6).bfloat16()), TypeError, "float32"),
    ],
    "w4a16_token_covers": [BadInput("plain weight", "w", call(X), TypeError, "W4Weight")],
    "w4_from_gptq": [
        BadInput("words in int64", "qweight", call(WORDS.long(), GROUPS), TypeError, "int32"),
        BadInput("scales of other rows", "scales", call(WORDS, torch.ones(2, 7)), ValueError, "(any, 8)"),
        BadInput("groups that do not divide", "scales", call(WORDS, torch.ones(6, 8)), ValueError, "divides"),
        BadInput("groups of one column", "scales", call(WORDS, torch.ones(16, 8)), ValueError, "even G"),
        BadInput("no group", "scales", call(WORDS, torch.ones(0, 8)), ValueError, "divides"),
        BadInput("zeros of other rows", "qzeros", call(WORDS, GROUPS, WORDS), ValueError, "(2, 1)"),
        BadInput("zeros elsewhere", "qzeros", call(WORDS, GROUPS, AWQ_ZEROS.to("meta")), ValueError, "got meta"),
        BadInput("one group", "g_idx", call(WORDS, GROUPS, None, torch.zeros(16).int()), ValueError, "8 times"),
        BadInput("short g_idx", "g_idx", call(WORDS, GROUPS, None, torch.arange(8)), ValueError, "(16,)"),
        BadInput("g_idx in float", "g_idx", call(WORDS, GROUPS, None, torch.ones(16)), TypeError, "int32"),
        BadInput("unknown format", "checkpoint_format", call(WORDS, GROUPS, checkpoint_format="awq"), ValueError),
        BadInput("to integers", "dtype", call(WORDS, GROUPS, dtype=torch.int8), ValueError, "float16"),
    ],
    "w4_from_awq": [
        BadInput("flat words", "qweight", call(AWQ_WORDS[:, 0], GROUPS, AWQ_ZEROS), ValueError, "2-D"),
        BadInput("scales in float64", "scales", call(AWQ_WORDS, GROUPS.double(), AWQ_ZEROS), TypeError, "float64"),
        BadInput("scales of other rows", "scales", call(AWQ_WORDS, GROUPS[:, :4], AWQ_ZEROS), ValueError, "(any, 8)"),
        BadInput("no zeros", "qzeros", call(AWQ_WORDS, GROUPS, None), TypeError, "tensor"),
        BadInput("zeros of other groups", "qzeros", call(AWQ_WORDS, GROUPS, AWQ_WORDS), ValueError, "(2, 1)"),
        BadInput("words of the gemv layout", "scales", call(AWQ_WORDS.t().contiguous(), GROUPS, AWQ_ZEROS), ValueError),
        BadInput("to float64", "dtype", call(AWQ_WORDS, GROUPS, AWQ_ZEROS, dtype=torch.float64), ValueError),
    ],
    "w4_from_compressed_tensors": [
        BadInput("codes as bytes", "weight_packed", call(CT_WORDS.byte(), CT_SCALES), TypeError, "int32"),
        BadInput("experts", "weight_packed", call(CT_WORDS[None], CT_SCALES), ValueError, "2-D"),
        BadInput("one scale", "weight_scale", call(CT_WORDS, torch.ones(1)), ValueError, "2-D"),
        BadInput("scales of other rows", "weight_scale", call(CT_WORDS, torch.ones(7, 2)), ValueError, "(8, any)"),
        BadInput("odd groups", "weight_scale", call(CT_WORDS, torch.ones(8, 16)), ValueError, "divides"),
        BadInput("scales in float64", "weight_scale", call(CT_WORDS, CT_SCALES.double()), TypeError, "float64"),
        BadInput(
            "zeros that are not packed", "weight_zero_point", call(CT_WORDS, CT_SCALES, CT_SCALES.char()), TypeError
        ),
        BadInput("zeros along K", "weight_zero_point", call(CT_WORDS, CT_SCALES, CT_WORDS), ValueError, "(1, 2)"),
        BadInput(
            "one group", "weight_g_idx", call(CT_WORDS, CT_SCALES, None, torch.zeros(16).int()), ValueError, "8 times"
        ),
        BadInput("short g_idx", "weight_g_idx", call(CT_WORDS, CT_SCALES, None, torch.arange(8)), ValueError, "(16,)"),
        BadInput(
            "shape of 8 bits",
            "weight_shape",
            call(CT_WORDS, CT_SCALES, weight_shape=torch.tensor([8, 8])),
            ValueError,
            "4 bits",
        ),
        BadInput(
            "shape of other rows",
            "weight_shape",
            call(CT_WORDS, CT_SCALES, weight_shape=torch.tensor([9, 16])),
            ValueError,
        ),
        BadInput(
            "shape of no columns",
            "weight_shape",
            call(CT_WORDS[:, :0], CT_SCALES, weight_shape=torch.tensor([8, -4])),
            ValueError,
        ),
        BadInput(
            "shape as a tuple", "weight_shape", call(CT_WORDS, CT_SCALES, weight_shape=(8, 16)), TypeError, "tensor"
        ),
        BadInput("to float64", "dtype", call(CT_WORDS, CT_SCALES, dtype=torch.float64), ValueError),
    ],
}
KERNELS = ("fp8_quant", "fp8_dequant", "int8_quant", "int8_dequant", "int4_quant", "int4_dequant")

# One good call of each op, and the torch op and arguments behind it.
GOOD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "fp8_quant": ((X, None), {"granularity": "group", "group_size": 5, "scale_ub": None, "column_major_scales": True}),
    "fp8_dequant": ((CODES, SCALE), {"group_size": 4}),
    "int8_quant": ((X,), {"granularity": "tensor"}),
    "int8_dequant": ((CODES8, SCALE8), {"dtype": torch.float16, "out": None}),
    "int4_quant": ((X,), {"group_size": 4}),
    "int4_dequant": ((CODES4, SCALE4), {"group_size": 4, "out": None}),
    "pack_w4": ((X, 4), {"symmetric": False}),
    "w4a16_linear": ((X, W4, None), {"residual": X[:, :6], "out": None}),
    "w4a16_token": ((X, W4, None), {"norm_weight": None, "activation": "silu_and_mul", "out": None}),
    "w4_from_gptq": ((WORDS, GROUPS, None, None), {"checkpoint_format": "gptq", "dtype": None}),
    "w4_from_awq": ((AWQ_WORDS, GROUPS, AWQ_ZEROS), {"dtype": None}),
    "w4_from_compressed_tensors": ((CT_WORDS, CT_SCALES, None, None), {"weight_shape": None, "dtype": None}),
}
ODD_VALUES = [
    None, True, 0, -1, 3, 2.5, float("nan"), "row", [1], torch.float16, X, X.t(), X[0], X[:0], X.half(), X.double(),
    X.int(), CODES, SCALE, CODES8, CODES4, SCALE4, W4, WORDS, GROUPS, AWQ_ZEROS, torch.ones(1), torch.tensor(1.0),
]  # fmt: skip


REFUSALS = {getattr(kestrel_quant, op): cases for op, cases in BAD_INPUTS.items()}
DERIVED = {
    getattr(kestrel_quant, op): derived_bad_inputs(getattr(kestrel_quant, op), args, kwargs)
    for op, (args, kwargs) in GOOD_CALLS.items()
    if op in KERNELS
}


REFUSED = [
    param
    for param in (*refusal_params(REFUSALS), *refusal_params(DERIVED))
    if not (param.values[2] == "launch" and param.values[1].argument == "dtype")  # C++ sees the result instead
]


@pytest.mark.parametrize(("function", "case", "path"), REFUSED)
def test_a_bad_input_is_refused_and_named(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


def refusals() -> list[Any]:
    """Of every good call: each tensor on another device, each required argument None, one at a time."""
    found = []
    for op, (args, kwargs) in GOOD_CALLS.items():
        parameters = inspect.signature(getattr(kestrel_quant, op)).parameters
        values = dict(zip(parameters, args, strict=False)) | kwargs
        elsewhere = [name for name, value in values.items() if isinstance(value, torch.Tensor | kestrel_quant.W4Weight)]
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
    function = getattr(kestrel_quant, op)
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
        getattr(kestrel_quant, op)(*(values[i] for i in range(len(args))), **{k: values[k] for k in kwargs})
    except UnsupportedError:
        pass  # zero points that are not symmetric
    except (ValueError, TypeError) as error:
        if not re.match(rf"{op}: argument '\w+': expected .+, got .+", str(error), re.DOTALL):
            raise AssertionError("the message names neither op nor argument") from error


BUFFER = torch.randn(6, 40)
OPCHECKS = [  # the public functions are thin; these are the registered ops, with views as inputs
    (_fp8_quant, (X, "row", 128, None, False)),
    (_fp8_quant, (BUFFER[::2, 3:33], "group", 8, torch.ones(1), True)),
    (_fp8_quant, (BUFFER[:, 1:38].bfloat16(), "tensor", 128, None, False)),
    (kestrel_quant.int8_quant, (BUFFER[::2, 3:33].half(),)),
    (kestrel_quant.int8_dequant, (CODES8[::2, 1:9], SCALE8[::2])),
    (kestrel_quant.int4_quant, (BUFFER[::2, 3:33],)),
    (kestrel_quant.int4_dequant, (CODES4[::2, 1:5], torch.rand(1, 2).t())),
    (_w4a16_linear, (BUFFER[::2, 3:15], W4.codes, W4.scales, None, None, 4, torch.randn(6))),
    (_w4a16_linear, (X, W4A.codes, W4A.scales, W4A.zeros, torch.arange(12).flip(0), 4)),
    (_w4a16_linear, (X, W4.codes, W4.scales, None, None, 4, None, BUFFER[::2, 5:11])),
    (_w4a16_token, (X[None, :1], W4.codes, W4.scales, None, None, 4, torch.ones(6), torch.ones(12))),
    (_w4a16_token, (X, W4A.codes, W4A.scales, W4A.zeros, None, 4, None, None, 0.0, 0.0, "silu_and_mul", X[:, :3])),
    (_fp8_quant_static, (X, torch.ones(3, 1))),
    (_fp8_quant_static, (BUFFER[::2, 3:33].half(), torch.ones(1))),
]


@pytest.mark.parametrize(("op", "args"), OPCHECKS, ids=lambda value: getattr(value, "__name__", ""))
def test_registration_agrees_with_torch(op: Any, args: tuple[Any, ...]) -> None:
    opcheck(op, args)


@pytest.mark.parametrize(("q", "scale"), [(CODES, SCALE), (CODES[::2, 1:9], torch.rand(2, 2).t())])
def test_registration_of_fp8_dequant_agrees_with_torch(q: torch.Tensor, scale: torch.Tensor) -> None:
    # test_schema compares its inputs by a multiplication that torch lacks for float8
    tests = [name for name in OPCHECK_TESTS if name != "test_schema"]
    op = torch.ops.kestrel_quant.fp8_dequant
    torch.library.opcheck(op.default, (q, scale), {"group_size": 4, "dtype": torch.float16}, test_utils=tests)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    torch.library.opcheck(op.out, (q, scale), {"group_size": 4, "out": out}, test_utils=tests)


OUTS: list[tuple[str, tuple[Any, ...], torch.Tensor]] = [
    ("int8_dequant", (CODES8, SCALE8), torch.empty(3, 12).bfloat16()),
    ("int4_dequant", (CODES4, SCALE4, 4), torch.empty(3, 12).bfloat16()),
    ("w4a16_linear", (X, W4.codes, W4.scales, None, None, 4), torch.empty(3, 6)),
    ("w4a16_token", (X, W4.codes, W4.scales, None, None, 4), torch.empty(3, 6)),
]


@pytest.mark.parametrize(("op", "args", "out"), OUTS)
def test_registration_of_outs_agrees_with_torch(op: str, args: tuple[Any, ...], out: torch.Tensor) -> None:
    kwargs = {"group_size": args[2]} if op == "int4_dequant" else {}
    opcheck(getattr(torch.ops.kestrel_quant, op).out, args[:2] if kwargs else args, {**kwargs, "out": out})


def test_every_op_is_registered_checked_and_documented() -> None:
    assert_registered(kestrel_quant)


@pytest.mark.parametrize("x", [pytest.param(X, id="contiguous"), pytest.param(BUFFER[::2, 2:20], id="a view")])
def test_public_functions_compile_into_one_graph(x: torch.Tensor) -> None:
    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for options in ({}, {"granularity": "tensor"}, {"granularity": "group", "column_major_scales": True}):
            results.extend(kestrel_quant.fp8_quant(x, **options))
        q, scale = kestrel_quant.fp8_quant(x, torch.ones(1, device=x.device))
        results.extend((*kestrel_quant.int8_quant(x), *kestrel_quant.int4_quant(x, group_size=4)))
        results.append(kestrel_quant.int8_dequant(*kestrel_quant.int8_quant(x, granularity="tensor")))
        results.append(kestrel_quant.int4_dequant(*kestrel_quant.int4_quant(x)))
        results.append(kestrel_quant.w4a16_linear(x[:, :12], W4, torch.ones(6), residual=x[:, 1:7]))
        return [*results, q, kestrel_quant.fp8_dequant(q, scale, out=torch.empty_like(x).bfloat16())]

    assert_compiles(everything, x, "aot_eager")


@pytest.mark.parametrize("name", ["fp8_quant", "fp8_dequant", "int4_quant", "int4_dequant"])
def test_a_group_size_may_change_under_compile(name: str) -> None:
    torch._dynamo.reset()

    def call(group: int) -> tuple[torch.Tensor, ...]:
        if name == "fp8_quant":
            return kestrel_quant.fp8_quant(X, granularity="group", group_size=group)
        if name == "int4_quant":
            return kestrel_quant.int4_quant(X, group_size=group)
        quantise = {"fp8_dequant": kestrel_quant.fp8_quant, "int4_dequant": kestrel_quant.int4_quant}[name]
        options = {"granularity": "group"} if name == "fp8_dequant" else {}
        q, scale = quantise(X, group_size=group, **options)
        return (getattr(kestrel_quant, name)(q, scale, group_size=group),)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for group in (4, 6, 12, 40):
        assert_same_bits(compiled(group), call(group), f"group_size {group}")


def test_inductor_keeps_the_strides_of_results() -> None:
    """Calls of ops alone, for which inductor compiles no C++."""

    def there_and_back(x: torch.Tensor) -> list[torch.Tensor]:
        q, scale = kestrel_quant.fp8_quant(x, granularity="group", group_size=5, column_major_scales=True)
        return [q, scale, kestrel_quant.fp8_dequant(q, scale, group_size=5), *kestrel_quant.int8_quant(x)]

    assert_compiles(there_and_back, X, "inductor")


def assert_compiles(function: Callable[[torch.Tensor], list[torch.Tensor]], x: torch.Tensor, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for i, (got, expected) in enumerate(zip(compiled(x), function(x), strict=True)):
        assert torch.equal(got.float(), expected.float()), f"result {i}"
        assert got.stride() == expected.stride(), f"result {i}"


# ---- the C++ entry points: the same refusals in the same words, the device last --------------------------------------

ELSEWHERE = {
    "no tensor", "None", "number as bound", "number as scale", "no scale", "bound elsewhere", "scale elsewhere",
    # refused by the public function, which chooses between two entry points
    "scale and bound", "scale and group", "scale, column-major", "unknown with scale", "flag as text", "an array",
    "an array with scale",
    # FP8 codes cross as bytes, and the dtype of a result as the result
    "floats", "e5m2", "to integers", "to float64", "out of other dtype",
}  # fmt: skip
ENTRY_POINT_CASES = [
    pytest.param(op, case, id=f"{op}-{case.name}")
    for op in KERNELS
    for case in BAD_INPUTS[op]
    if case.name not in ELSEWHERE
]


def entry_point(op: str) -> Callable[..., None]:
    """The entry point, called as the public op, with results of whatever shape: arguments are checked first."""
    try:
        function = Binary("kestrel_quant").function(op)
    except UnsupportedError as error:
        pytest.skip(str(error))
    static = Binary("kestrel_quant").fp8_quant_static

    def fp8_quant(
        x: Any,
        scale: Any = None,
        *,
        granularity: Any = "row",
        group_size: Any = 128,
        scale_ub: Any = None,
        column_major_scales: bool = False,
    ) -> None:
        q = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
        if scale is not None:
            return static(q, x, scale)
        shape = (1,) if granularity == "tensor" else (len(x), 1)
        return function(q, torch.empty(shape), None, x, granularity, group_size, scale_ub, column_major_scales)

    def dequant(q: Any, scale: Any, *, group_size: Any = 128, out: Any = None) -> None:
        width = q.shape[-1] * (2 if op == "int4_dequant" else 1)
        out = torch.empty(*q.shape[:-1], width) if out is None else out
        function(out, q, scale, *(() if op == "int8_dequant" else (group_size,)))

    return {
        "fp8_quant": fp8_quant,
        "int8_quant": lambda x, granularity="row": function(
            torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1), None, x, granularity
        ),
        "int4_quant": lambda x, group_size=128: function(
            torch.empty(len(x), x.shape[-1] // 2, dtype=torch.uint8), torch.empty(len(x), 1), x, group_size
        ),
    }.get(op, dequant)


@pytest.mark.parametrize(("op", "case"), ENTRY_POINT_CASES)
def test_entry_point_refuses_in_the_same_words(op: str, case: BadInput) -> None:
    function = entry_point(op)
    assert_rejects(function, case, op)
    args, kwargs = case.make()
    with pytest.raises(case.error) as ours:
        getattr(kestrel_quant, op)(*args, **kwargs)
    with pytest.raises(case.error) as theirs:
        function(*args, **kwargs)
    assert str(theirs.value) == str(ours.value)


def good_call(op: str) -> tuple[torch.Tensor, ...]:
    x = torch.linspace(-3, 3, 36).view(3, 12)
    return (x,) if op.endswith("_quant") else getattr(kestrel_quant, op.replace("dequant", "quant"))(x)


@pytest.mark.parametrize("op", KERNELS)
def test_entry_point_checks_the_device_last(op: str) -> None:
    function, args = entry_point(op), good_call(op)
    with pytest.raises(ValueError, match=rf"{op}: argument '[xq]': expected a CUDA tensor, got cpu"):
        function(*args)


# A result that is not what Python allocates: (argument, what is wrong, how it is made of the right one).
WRONG_RESULTS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("q", "fewer rows", lambda q: q[:2]),
    ("q", "fewer columns", lambda q: q[:, :-1]),
    ("q", "fp16", lambda q: q.half()),
    ("q", "transposed", lambda q: q.t().contiguous().t()),
    ("scale", "fewer rows", lambda scale: scale[:2]),
    ("scale", "flat", lambda scale: scale.view(-1)),
    ("scale", "float64", lambda scale: scale.double()),
    ("scale", "a column of a wider buffer", lambda scale: torch.empty(3, 2)[:, :1]),
]


@pytest.mark.parametrize(
    ("name", "change"), [pytest.param(name, change, id=f"{name}: {what}") for name, what, change in WRONG_RESULTS]
)
@pytest.mark.parametrize("op", [op for op in KERNELS if op.endswith("_quant")])
def test_results_that_the_kernel_would_write_past_are_refused(
    op: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    entry_point(op)
    function = Binary("kestrel_quant").function(op)
    dtype = {"fp8_quant": torch.float8_e4m3fn, "int8_quant": torch.int8, "int4_quant": torch.uint8}[op]
    x = torch.ones(3, 12)
    results = {"q": torch.empty(3, 6 if op == "int4_quant" else 12, dtype=dtype), "scale": torch.empty(3, 1)}
    results[name] = change(results[name])
    partial, rest = ((), (128,)) if op == "int4_quant" else ((None,), ("row",))
    with pytest.raises((ValueError, TypeError), match=f"{op}: argument '{name}': expected .+, got .+"):
        function(*results.values(), *partial, x, *rest, *((128, None, False) if op == "fp8_quant" else ()))


@pytest.mark.parametrize(
    ("partial_amax", "error"),
    [
        pytest.param(torch.empty(0), ValueError, id="empty"),
        pytest.param(torch.empty(4).half(), TypeError, id="fp16"),
        pytest.param(None, TypeError, id="None"),
    ],
)
@pytest.mark.parametrize("op", ["fp8_quant", "int8_quant"])
def test_scratch_memory_that_holds_no_maximum_is_refused(
    op: str, partial_amax: torch.Tensor | None, error: type[Exception]
) -> None:
    entry_point(op)
    x, scale, rest = torch.ones(3, 12), torch.empty(1), (128, None, False) if op == "fp8_quant" else ()
    q = torch.empty(3, 12, dtype=torch.float8_e4m3fn if op == "fp8_quant" else torch.int8)
    with pytest.raises(error, match=f"{op}: argument 'partial_amax': expected .+, got .+"):
        Binary("kestrel_quant").function(op)(q, scale, partial_amax, x, "tensor", *rest)


def test_out_that_shares_memory_with_itself_is_refused() -> None:
    q, scale = kestrel_quant.int8_quant(torch.ones(3, 12))
    case = BadInput(
        "one row for all", "out", lambda: ((q, scale), {"out": torch.empty(1, 12).bfloat16().expand(3, 12)})
    )
    assert_rejects(kestrel_quant.int8_dequant, case)
    assert_rejects(entry_point("int8_dequant"), case, "int8_dequant")
