"""Bad input, through every entry path of every op: refused in one wording, before anything is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_norm
from kestrel_runtime import Binary
from kestrel_runtime.testing import (
    BadInput,
    assert_launch_agrees,
    assert_refused,
    assert_same_bits,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    refusal_params,
    skip_without_binary,
)

BF16 = torch.bfloat16
OPS = tuple(name for name in kestrel_norm.__all__ if name != "rms_norm_linear")


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def good_call(op: str) -> dict[str, Any]:
    """Every argument of an op, all valid."""
    values: dict[str, Any] = {"x": ones(3, 8)}
    if op == "rms_norm_linear":
        return values | {"norm_weight": ones(8), "weight": ones(4, 8), "eps": 1e-6, "out": ones(3, 4)}
    if op.startswith("fused"):
        values["residual"] = ones(3, 8)
    values |= {"weight": ones(8), "eps": 1e-6}
    values |= {"bias": ones(8)} if "layer" in op else {"weight_bias": 1.0}
    if "fp8" in op:
        values["scale_ub"] = ones(1, dtype=torch.float32)
    elif not op.startswith("fused"):
        values["out"] = ones(3, 8)
    return values


def cases(op: str) -> list[BadInput]:
    good = good_call(op)
    bad = cases_of(good)
    vector = "norm_weight" if op == "rms_norm_linear" else "weight"
    found = [
        bad("float64", "x", ones(3, 8, dtype=torch.float64), TypeError, "float64"),
        bad("integers", "x", ones(3, 8, dtype=torch.int32), TypeError, "int32"),
        bad("a list", "x", [1.0], TypeError, "a tensor, got list"),
        bad("one dimension", "x", ones(8), fragment="2-D or 3-D or 4-D"),
        bad("five dimensions", "x", ones(1, 1, 1, 3, 8), fragment="5-D of shape (1, 1, 1, 3, 8)"),
        bad("transposed", "x", ones(8, 3).T, fragment="stride 3"),
        bad("too long", vector, ones(9), fragment="shape (8,), got (9,)"),
        bad("of rank 2", vector, ones(1, 8), fragment="shape (8,), got (1, 8)"),
        bad("strided", vector, ones(16)[::2], fragment="stride 2"),
        bad("of another dtype", vector, ones(8, dtype=torch.float16), TypeError, "float16"),
        bad("negative", "eps", -1.0, fragment=">= 0"),
        bad("nan", "eps", float("nan"), fragment="nan"),
        bad("text", "eps", "small", TypeError, "str"),
    ]
    if "out" in good:
        width = good["out"].shape[1]
        found += [
            bad("of another dtype", "out", ones(3, width, dtype=torch.float32), TypeError, "float32"),
            bad("of another shape", "out", ones(width, 3), fragment=f"(3, {width}), got ({width}, 3)"),
            bad("transposed", "out", ones(width, 3).T, fragment="stride 3"),
            bad("one row for all", "out", ones(1, width).expand(3, width), fragment="strides (0, 1)"),
        ]
    if "bias" in good:
        found += [
            bad("too short", "bias", ones(7), fragment="shape (8,), got (7,)"),
            bad("float32", "weight", ones(8, dtype=torch.float32), TypeError, "bfloat16"),
        ]
    if "weight_bias" in good:
        found.append(bad("nan", "weight_bias", float("nan"), fragment="nan"))
    if "scale_ub" in good:
        found += [
            bad("no columns", "x", ones(3, 0), fragment="at least one element", weight=None, **empty_residual(good)),
            bad("bf16", "scale_ub", ones(1), TypeError, "float32, got bfloat16"),
            bad("of rank 2", "scale_ub", ones(1, 1, dtype=torch.float32), fragment="1-D"),
            bad("one per row", "scale_ub", ones(3, dtype=torch.float32), fragment="(1,), got (3,)"),
        ]
    if "residual" in good:
        found += [
            bad("of another shape", "residual", ones(2, 8), fragment="(3, 8), got (2, 8)"),
            bad("of another dtype", "residual", ones(3, 8, dtype=torch.float32), TypeError),
            bad("one row for all", "residual", ones(1, 8).expand(3, 8), fragment="strides (0, 1)"),
            bad("transposed", "residual", ones(8, 3).T, fragment="stride 3"),
        ]
        if "fp8" not in op:  # which only reads x
            found.append(bad("one row for all", "x", ones(1, 8).expand(3, 8), fragment="strides (0, 1)"))
    if op == "rms_norm_linear":
        found += [
            bad("missing", "norm_weight", None, TypeError, "NoneType"),
            bad("transposed", "weight", ones(8, 4), fragment="(8, 4)"),
            bad("of another dtype", "weight", ones(4, 8, dtype=torch.float32), TypeError, "float32"),
            bad("of rank 1", "weight", ones(8), fragment="2-D"),
        ]
    if "residual" in good:  # where x is wrong, the residual fits it
        found = [like_x(case) if case.argument == "x" and case.name != "a list" else case for case in found]
    return found + derived(op)


def empty_residual(good: dict[str, Any]) -> dict[str, Any]:
    return {"residual": ones(3, 0)} if "residual" in good else {}


def like_x(case: BadInput) -> BadInput:
    """The same case with a residual that fits x."""

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = case.make()
        return args, {**kwargs, "residual": torch.ones_like(kwargs["x"])}

    return BadInput(case.name, case.argument, make, case.error, case.fragment)


def derived(op: str) -> list[BadInput]:
    return derived_bad_inputs(getattr(kestrel_norm, op), (), good_call(op))


TABLE = {getattr(kestrel_norm, op): cases(op) for op in kestrel_norm.__all__}


@pytest.mark.parametrize(("function", "case", "path"), refusal_params(TABLE))
def test_bad_input_is_refused_and_named(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


BUFFER = ones(64)
ROWS, SHIFTED, ROW = BUFFER[:24].view(3, 8), BUFFER[1:25].view(3, 8), BUFFER[8:16]
OVERLAPPING_ROWS = BUFFER.as_strided((3, 8), (1, 1))


def overlaps(op: str) -> list[BadInput]:
    """Written arguments that share memory within themselves or with another argument."""
    bad = cases_of(good_call(op))
    if op == "rms_norm_linear":
        return [
            bad("rows that overlap", "out", BUFFER.as_strided((3, 4), (1, 1)), fragment="share memory"),
            bad("columns of x", "out", ROWS[:, :4], fragment="'x'", x=ROWS),
            bad("rows of the weight", "out", ROWS[:, :4], fragment="'weight'", weight=BUFFER[:32].view(4, 8)),
        ]
    if not op.startswith("fused"):
        return [
            bad("rows that overlap", "out", OVERLAPPING_ROWS, fragment="share memory"),
            bad("x, one element on", "out", SHIFTED, fragment="'x'", x=ROWS),
            bad("with the weight in it", "out", ROWS, fragment="'weight'", weight=ROW),
        ]
    written, other = ("residual", "'x'") if "fp8" in op else ("x", "'residual'")
    found = [
        bad("rows that overlap", "residual", OVERLAPPING_ROWS, fragment="share memory"),
        bad("x and residual are one", written, ROWS, fragment=other, x=ROWS, residual=ROWS),
        bad("x and residual overlap", written, ROWS, fragment=other, x=ROWS, residual=SHIFTED, key="x"),
        bad("with the weight in it", "residual", ROWS, fragment="'weight'", weight=ROW),
    ]
    return found if "fp8" in op else [*found, bad("rows that overlap", "x", OVERLAPPING_ROWS, fragment="share memory")]


OVERLAPS = {getattr(kestrel_norm, op): overlaps(op) for op in kestrel_norm.__all__ if op != "rms_norm_fp8"}
OVERLAP_PARAMS = refusal_params(OVERLAPS, paths=("public", "torch.ops", "kernel"))


@pytest.mark.parametrize(("function", "case", "path"), OVERLAP_PARAMS)
def test_a_written_argument_shares_no_memory(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


@pytest.mark.parametrize(("function", "case", "_path"), refusal_params(OVERLAPS, paths=("launch",)))
def test_entry_point_refuses_overlaps_in_the_same_words(function: Any, case: BadInput, _path: str) -> None:
    assert_launch_agrees(function, case)


@pytest.mark.parametrize("op", kestrel_norm.__all__)
def test_entry_point_checks_the_device_last(op: str) -> None:
    skip_without_binary("kestrel_norm")
    function, values = Binary("kestrel_norm").function(op), good_call(op)
    out = values.pop("out", None)
    written = [] if out is None else [out]
    if "fp8" in op:
        written = [ones(3, 8, dtype=torch.float8_e4m3fn), ones(3, 1, dtype=torch.float32)]
    parameters = [name for name in inspect.signature(getattr(kestrel_norm, op)).parameters if name != "out"]
    with pytest.raises(ValueError, match=f"{op}: argument 'x': expected a CUDA tensor, got cpu"):
        function(*written, *(values[name] for name in parameters))


@pytest.mark.parametrize("op", kestrel_norm.__all__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_call_either_works_or_names_the_argument(op: str, data: st.DataObject) -> None:
    args, kwargs = data.draw(odd_calls((), good_call(op)))
    assert_works_or_is_named(getattr(kestrel_norm, op), args, kwargs)


SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=5).map(tuple)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, weight=st.none() | SHAPES, written=st.none() | SHAPES)
def test_shapes_that_fit_give_results_of_that_shape_and_others_write_nothing(
    op: str, shape: tuple[int, ...], weight: tuple[int, ...] | None, written: tuple[int, ...] | None
) -> None:
    """``written`` is the shape of the residual, or of ``out``; None is one that fits x."""
    x, y = ones(*shape), ones(*(shape if written is None else written))
    kwargs: dict[str, Any] = {"weight": ones(*(shape[-1:] if weight is None else weight))}
    if op.startswith("fused"):
        kwargs["residual"] = y
    elif "fp8" not in op:
        kwargs["out"] = y
    fits = 2 <= len(shape) <= 4 and kwargs["weight"].shape == shape[-1:]
    fits &= shape[-1:] != (0,) if "fp8" in op else True
    fits &= y.shape == shape or op == "rms_norm_fp8"
    refused = None
    try:
        got = getattr(kestrel_norm, op)(x, **kwargs)
    except (ValueError, TypeError) as error:
        refused = str(error)
    assert (refused is None) == fits, refused
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


@pytest.mark.parametrize("op", kestrel_norm.__all__)
def test_a_tangent_is_refused(op: str) -> None:
    values = good_call(op)
    values.pop("out", None)
    values |= {name: value.float() for name, value in values.items() if isinstance(value, torch.Tensor)}
    x = values.pop("x")
    with pytest.raises(ValueError, match=f"{op}: argument 'x': expected a tensor without"):
        torch.func.jvp(lambda x: getattr(kestrel_norm, op)(x, **values), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", kestrel_norm.__all__)
def test_autocast_changes_nothing(op: str, autocast: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def fresh() -> dict[str, Any]:
        generator.manual_seed(0)
        values = {name: value for name, value in good_call(op).items() if name != "out"}
        return {
            name: torch.randn(value.shape, generator=generator) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    outside, inside = fresh(), fresh()
    want = getattr(kestrel_norm, op)(**outside)
    with torch.autocast("cpu", autocast):
        got = getattr(kestrel_norm, op)(**inside)
    assert_same_bits(got, want)
    tensors = [name for name, value in inside.items() if isinstance(value, torch.Tensor)]
    assert_same_bits([inside[name] for name in tensors], [outside[name] for name in tensors])
