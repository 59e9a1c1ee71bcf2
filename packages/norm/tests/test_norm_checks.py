"""Bad input: every case through the check function, the public op and the C++ entry point, before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_norm
from kestrel_norm.fused_add_rms_norm import check_fused_add_rms_norm
from kestrel_norm.layer_norm import check_layer_norm
from kestrel_norm.rms_norm import check_rms_norm
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import BadInput, assert_rejects

BF16 = torch.bfloat16
CHECKS = {
    "layer_norm": check_layer_norm,
    "rms_norm": check_rms_norm,
    "fused_add_rms_norm": check_fused_add_rms_norm,
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
    BadInput(
        "out of another dtype", "out", call(ones(3, 8), out=ones(3, 8, dtype=torch.float32)), TypeError, "float32"
    ),
    BadInput("out of another shape", "out", call(ones(3, 8), out=ones(8, 3)), ValueError, "(3, 8), got (8, 3)"),
    BadInput("transposed out", "out", call(ones(3, 8), out=ones(8, 3).T), ValueError, "stride 3"),
    BadInput(
        "one row of out for all", "out", call(ones(3, 8), out=ones(1, 8).expand(3, 8)), ValueError, "strides (0, 1)"
    ),
    BadInput("weight elsewhere", "weight", call(ones(3, 8), ones(8).to("meta")), ValueError, "meta"),
]
CASES = {
    "layer_norm": [
        *COMMON,
        BadInput("float32 weight", "weight", call(ones(3, 8), ones(8, dtype=torch.float32)), TypeError, "bfloat16"),
        BadInput("short bias", "bias", call(ones(3, 8), ones(8), ones(7)), ValueError, "shape (8,), got (7,)"),
    ],
    "rms_norm": [
        *COMMON,
        BadInput("weight_bias is nan", "weight_bias", call(ones(3, 8), weight_bias=float("nan")), ValueError, "nan"),
    ],
}


def with_residual(case: BadInput) -> BadInput:
    """The same mistake in a call of fused_add_rms_norm."""

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        (x, *rest), kwargs = case.make()
        return (x, torch.ones_like(x), *rest), kwargs

    return BadInput(case.name, case.argument, make, case.error, case.fragment)


CASES["fused_add_rms_norm"] = [
    *(with_residual(case) for case in CASES["rms_norm"] if case.argument != "out"),
    BadInput("residual of another shape", "residual", call(ones(3, 8), ones(2, 8)), ValueError, "(3, 8), got (2, 8)"),
    BadInput("residual of another dtype", "residual", call(ones(3, 8), ones(3, 8, dtype=torch.float32)), TypeError),
    BadInput("one row of x for all", "x", call(ones(1, 8).expand(3, 8), ones(3, 8)), ValueError, "strides (0, 1)"),
    BadInput(
        "one residual for all", "residual", call(ones(3, 8), ones(1, 8).expand(3, 8)), ValueError, "strides (0, 1)"
    ),
    BadInput("transposed residual", "residual", call(ones(3, 8), ones(8, 3).T), ValueError, "stride 3"),
]
EVERY_CASE = [pytest.param(op, case, id=f"{op}-{case.name}") for op, cases in CASES.items() for case in cases]
NOT_FOR_CPP = ("weight elsewhere",)  # a meta tensor does not cross into C++


def entry_point(op: str) -> Callable[..., None]:
    """The C++ entry point, called with the arguments of the public op."""
    try:
        function = Binary("kestrel_norm").function(op)
    except UnsupportedError as error:
        pytest.skip(str(error))

    def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, out: Any = None) -> None:
        function(torch.empty_like(x) if out is None else out, x, weight, bias, eps)

    def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6, *, weight_bias: float = 0.0, out: Any = None) -> None:
        function(torch.empty_like(x) if out is None else out, x, weight, eps, weight_bias)

    def fused_add_rms_norm(
        x: Any, residual: Any, weight: Any = None, eps: float = 1e-6, *, weight_bias: float = 0.0
    ) -> None:
        function(x, residual, weight, eps, weight_bias)

    return {"layer_norm": layer_norm, "rms_norm": rms_norm, "fused_add_rms_norm": fused_add_rms_norm}[op]


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


@pytest.mark.parametrize(("op", "case"), [case for case in EVERY_CASE if case.values[1].name not in NOT_FOR_CPP])
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
    args = (x, x.clone()) if op == "fused_add_rms_norm" else (x,)
    with pytest.raises(ValueError, match=f"{op}: argument 'x': expected a CUDA tensor, got cpu"):
        function(*args)


@pytest.mark.parametrize("op", CHECKS)
def test_not_a_tensor_is_a_type_error(op: str) -> None:
    args = ([1.0], ones(1, 1)) if op == "fused_add_rms_norm" else ([1.0],)
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
    """``out`` is the residual of fused_add_rms_norm; None is what fits x."""
    x, y = torch.ones(shape, dtype=dtype), torch.ones(shape if out is None else out, dtype=dtype)
    w = torch.ones(shape[-1:] if weight is None else weight, dtype=dtype if weight_dtype is None else weight_dtype)
    refused = None
    try:
        if op == "layer_norm":
            got = kestrel_norm.layer_norm(x, w, w, eps, out=y)
        elif op == "rms_norm":
            got = kestrel_norm.rms_norm(x, w, eps, out=y)
        else:
            got = kestrel_norm.fused_add_rms_norm(x, y, w, eps)
    except (ValueError, TypeError) as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith(f"{op}: argument '")
        assert bool((x == 1).all() and (y == 1).all())
    elif op == "fused_add_rms_norm":
        assert got is None
        assert y.shape == shape
        assert bool((y == 2).all())
    else:
        assert got is y
        assert got.shape == shape
