"""Bad input: every case through the check function, the public op and the C++ entry point, before any work is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_norm
from kestrel_norm.fused_add_layer_norm import check_fused_add_layer_norm
from kestrel_norm.fused_add_rms_norm import check_fused_add_rms_norm
from kestrel_norm.layer_norm import check_layer_norm
from kestrel_norm.rms_norm import check_rms_norm
from kestrel_norm.rms_norm_fp8 import check_fused_add_rms_norm_fp8, check_rms_norm_fp8
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import BadInput, assert_rejects

BF16 = torch.bfloat16
CHECKS = {
    "layer_norm": check_layer_norm,
    "fused_add_layer_norm": check_fused_add_layer_norm,
    "rms_norm": check_rms_norm,
    "fused_add_rms_norm": check_fused_add_rms_norm,
    "rms_norm_fp8": check_rms_norm_fp8,
    "fused_add_rms_norm_fp8": check_fused_add_rms_norm_fp8,
}


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def call(*args: Any, **kwargs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: (args, kwargs)


COMMON = [
    BadInput("float64", "x", call(ones(3, 8, dtype=torch.float64)), TypeError, "float64"),
    BadInput("integers", "x", call(ones(3, 8, dtype=torch.int32)), TypeError, "int32"),
    BadInput("one dimension", "x", call(ones(8)), ValueError, "2-D or 3-D or 4-D"),
    BadInput("five dimensions", "x", call(ones(1, 1, 1, 3, 8)), ValueError, "5-D of shape (1, 1, 1, 3, 8)"),
    BadInput("transposed", "x", call(ones(8, 3).T), ValueError, "stride 3"),
    BadInput("long weight", "weight", call(ones(3, 8), ones(9)), ValueError, "shape (8,), got (9,)"),
    BadInput("weight of rank 2", "weight", call(ones(3, 8), ones(1, 8)), ValueError, "shape (8,), got (1, 8)"),
    BadInput("strided weight", "weight", call(ones(3, 8), ones(16)[::2]), ValueError, "stride 2"),
    BadInput("weight of another dtype", "weight", call(ones(3, 8), ones(8, dtype=torch.float16)), TypeError, "float16"),
    BadInput("negative eps", "eps", call(ones(3, 8), eps=-1.0), ValueError, ">= 0"),
    BadInput("eps is nan", "eps", call(ones(3, 8), eps=float("nan")), ValueError, "nan"),
    BadInput("weight elsewhere", "weight", call(ones(3, 8), ones(8).to("meta")), ValueError, "meta"),
]
OUT = [
    BadInput(
        "out of another dtype", "out", call(ones(3, 8), out=ones(3, 8, dtype=torch.float32)), TypeError, "float32"
    ),
    BadInput("out of another shape", "out", call(ones(3, 8), out=ones(8, 3)), ValueError, "(3, 8), got (8, 3)"),
    BadInput("transposed out", "out", call(ones(3, 8), out=ones(8, 3).T), ValueError, "stride 3"),
    BadInput(
        "one row of out for all", "out", call(ones(3, 8), out=ones(1, 8).expand(3, 8)), ValueError, "strides (0, 1)"
    ),
]
LAYER = [
    BadInput("float32 weight", "weight", call(ones(3, 8), ones(8, dtype=torch.float32)), TypeError, "bfloat16"),
    BadInput("short bias", "bias", call(ones(3, 8), ones(8), ones(7)), ValueError, "shape (8,), got (7,)"),
    BadInput("bias elsewhere", "bias", call(ones(3, 8), ones(8), ones(8).to("meta")), ValueError, "meta"),
]
RMS = [BadInput("weight_bias is nan", "weight_bias", call(ones(3, 8), weight_bias=float("nan")), ValueError, "nan")]
FP8 = [
    BadInput("no columns", "x", call(ones(3, 0)), ValueError, "at least one element, got shape (3, 0)"),
    BadInput("bound in bf16", "scale_ub", call(ones(3, 8), scale_ub=ones(1)), TypeError, "float32, got bfloat16"),
    BadInput(
        "bound of rank 2", "scale_ub", call(ones(3, 8), scale_ub=ones(1, 1, dtype=torch.float32)), ValueError, "1-D"
    ),
    BadInput(
        "bound of rows",
        "scale_ub",
        call(ones(3, 8), scale_ub=ones(3, dtype=torch.float32)),
        ValueError,
        "(1,), got (3,)",
    ),
    BadInput(
        "bound elsewhere",
        "scale_ub",
        call(ones(3, 8), scale_ub=ones(1, dtype=torch.float32).to("meta")),
        ValueError,
        "meta",
    ),
]


def with_residual(case: BadInput) -> BadInput:
    """The same mistake in a call of an op that has a residual."""

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        (x, *rest), kwargs = case.make()
        return (x, torch.ones_like(x), *rest), kwargs

    return BadInput(case.name, case.argument, make, case.error, case.fragment)


RESIDUAL = [
    BadInput("residual of another shape", "residual", call(ones(3, 8), ones(2, 8)), ValueError, "(3, 8), got (2, 8)"),
    BadInput("residual of another dtype", "residual", call(ones(3, 8), ones(3, 8, dtype=torch.float32)), TypeError),
    BadInput(
        "one residual for all", "residual", call(ones(3, 8), ones(1, 8).expand(3, 8)), ValueError, "strides (0, 1)"
    ),
    BadInput("transposed residual", "residual", call(ones(3, 8), ones(8, 3).T), ValueError, "stride 3"),
    BadInput("residual elsewhere", "residual", call(ones(3, 8), ones(3, 8).to("meta")), ValueError, "meta"),
]
IN_PLACE = [
    *RESIDUAL,
    BadInput("one row of x for all", "x", call(ones(1, 8).expand(3, 8), ones(3, 8)), ValueError, "strides (0, 1)"),
]
CASES = {
    "layer_norm": [*COMMON, *OUT, *LAYER],
    "fused_add_layer_norm": [*map(with_residual, COMMON + LAYER), *IN_PLACE],
    "rms_norm": [*COMMON, *OUT, *RMS],
    "fused_add_rms_norm": [*map(with_residual, COMMON + RMS), *IN_PLACE],
    "rms_norm_fp8": [*COMMON, *RMS, *FP8],
    "fused_add_rms_norm_fp8": [*map(with_residual, COMMON + RMS + FP8), *RESIDUAL],
}
EVERY_CASE = [pytest.param(op, case, id=f"{op}-{case.name}") for op, cases in CASES.items() for case in cases]
FOR_CPP = [case for case in EVERY_CASE if "elsewhere" not in case.values[1].name]  # a meta tensor does not cross


def entry_point(op: str) -> Callable[..., None]:
    """The C++ entry point, called with the arguments of the public op: what it writes comes first."""
    try:
        function = Binary("kestrel_norm").function(op)
    except UnsupportedError as error:
        pytest.skip(str(error))

    def call(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(CHECKS[op]).bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        x, out = values["x"], values.pop("out", None)
        written = []
        if "fp8" in op:
            written = [torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(*x.shape[:-1], 1)]
        elif not op.startswith("fused"):
            written = [torch.empty_like(x) if out is None else out]
        function(*written, *values.values())

    return call


@pytest.mark.parametrize(("op", "case"), EVERY_CASE)
def test_check_refuses(op: str, case: BadInput) -> None:
    assert_rejects(CHECKS[op], case, op)


@pytest.mark.parametrize(("op", "case"), EVERY_CASE)
def test_op_refuses_and_writes_nothing(op: str, case: BadInput) -> None:
    args, kwargs = case.make()
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_cpu]
    before = [value.clone() for value in tensors]
    function = getattr(kestrel_norm, op)
    assert_rejects(function, BadInput(case.name, case.argument, lambda: (args, kwargs), case.error, case.fragment), op)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("op", "case"), FOR_CPP)
def test_entry_point_refuses_in_the_same_words(op: str, case: BadInput) -> None:
    function = entry_point(op)
    assert_rejects(function, case, op)
    args, kwargs = case.make()
    with pytest.raises(case.error) as ours:
        CHECKS[op](*args, **kwargs)
    with pytest.raises(case.error) as theirs:
        function(*args, **kwargs)
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("op", CHECKS)
def test_entry_point_checks_the_device_last(op: str) -> None:
    function = entry_point(op)
    x = ones(3, 8)
    args = (x, x.clone()) if op.startswith("fused") else (x,)
    with pytest.raises(ValueError, match=f"{op}: argument 'x': expected a CUDA tensor, got cpu"):
        function(*args)


@pytest.mark.parametrize("op", CHECKS)
def test_not_a_tensor_is_a_type_error(op: str) -> None:
    args = ([1.0], ones(1, 1)) if op.startswith("fused") else ([1.0],)
    with pytest.raises(TypeError, match=f"{op}: argument 'x': expected a tensor, got list"):
        getattr(kestrel_norm, op)(*args)


SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=5).map(tuple)
DTYPES = st.sampled_from([BF16, torch.float16, torch.float32, torch.float64, torch.int64])


@pytest.mark.parametrize("op", CHECKS)
@settings(max_examples=150, deadline=None)
@given(
    shape=SHAPES,
    weight=st.none() | SHAPES,
    dtype=DTYPES,
    weight_dtype=st.none() | DTYPES,
    eps=st.floats(0, 1) | st.floats(allow_nan=True),
    out=st.none() | SHAPES,
)
def test_any_call_either_works_or_names_the_argument(
    op: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...] | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    eps: float,
    out: tuple[int, ...] | None,
) -> None:
    """``out`` is the residual of the ops that have one; None is what fits x."""
    x, y = torch.ones(shape, dtype=dtype), torch.ones(shape if out is None else out, dtype=dtype)
    w = torch.ones(shape[-1:] if weight is None else weight, dtype=dtype if weight_dtype is None else weight_dtype)
    vectors = {"weight": w, "bias": w} if "layer" in op else {"weight": w}
    refused = None
    try:
        if op.startswith("fused"):
            got = getattr(kestrel_norm, op)(x, y, **vectors, eps=eps)
        elif "fp8" in op:
            got = kestrel_norm.rms_norm_fp8(x, **vectors, eps=eps)
        else:
            got = getattr(kestrel_norm, op)(x, **vectors, eps=eps, out=y)
    except (ValueError, TypeError) as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith(f"{op}: argument '")
        assert bool((x == 1).all() and (y == 1).all())
        return
    if op.startswith("fused"):
        assert y.shape == shape
        assert bool((y == 2).all())
    if "fp8" in op:
        assert (got[0].shape, got[1].shape) == (shape, (*shape[:-1], 1))
    else:
        assert got is (None if op.startswith("fused") else y)
