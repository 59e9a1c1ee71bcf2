"""The ops of this family that have only their reference: against float64, as torch ops, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_norm
from kestrel_runtime.testing import BadInput, assert_close_to_f64, assert_rejects, opcheck

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16


def rows_of(t: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * t + n)
    return (torch.randn(t, n, generator=generator) * 3 + 1).to(dtype)


def exact_rms(
    x: torch.Tensor, weight: torch.Tensor | None, weight_bias: float = 0.0, eps: float = 1e-6
) -> torch.Tensor:
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (weight.double() + weight_bias)


def nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """The FP8 value nearest to each float64 value, by a search over all finite codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    return codes[(values[..., None] - codes).abs().argmin(-1)]


def assert_quantised(q: torch.Tensor, scale: torch.Tensor, normed: torch.Tensor, bound: float | None = None) -> None:
    """Scales to float32; codes as near to the float64 rows as the nearest code, but for float32's own rounding."""
    amax = normed.abs().amax(-1, keepdim=True)
    exact = (amax if bound is None else amax.clamp(max=bound)).clamp(min=1e-12) / 448
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), exact, rtol=1e-6, atol=0)
    values = (normed / exact).clamp(-448, 448)
    error, least = (q.double() - values).abs(), (nearest_codes(values) - values).abs()
    assert bool((error <= least + 2e-6 * values.abs()).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1, 7, 66, 1152, 2048])
@pytest.mark.parametrize("t", [0, 1, 3, 16])
def test_fp8_norm_quantises_the_unrounded_norm(t: int, n: int, dtype: torch.dtype) -> None:
    x, weight = rows_of(t, n, dtype), rows_of(1, n, dtype, seed=5)[0]
    q, scale = kestrel_norm.rms_norm_fp8(x, weight, weight_bias=1.0)
    assert (q.shape, scale.shape, q.dtype) == (x.shape, (t, 1), torch.float8_e4m3fn)
    assert_quantised(q, scale, exact_rms(x, weight, 1.0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fp8_norm_behind_a_residual_writes_only_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = rows_of(16, 96, dtype), rows_of(16, 96, dtype, seed=3), rows_of(1, 96, dtype, seed=5)[0]
    before, total = x.clone(), (x.double() + residual.double()).to(dtype)
    q, scale = kestrel_norm.fused_add_rms_norm_fp8(x, residual, weight)
    assert torch.equal(x, before)
    assert torch.equal(residual, total)
    assert_quantised(q, scale, exact_rms(total, weight))


def test_scale_bound_saturates_what_lies_above_it() -> None:
    x = rows_of(4, 64, BF16)
    q, scale = kestrel_norm.rms_norm_fp8(x, scale_ub=torch.tensor([0.5]))
    assert_quantised(q, scale, exact_rms(x, None), 0.5)
    assert int((q.float().abs() == 448).sum()) > 4


def test_zero_rows_give_zeros_and_a_finite_scale_and_bad_rows_stay_alone() -> None:
    x = rows_of(4, 64, BF16)
    alone = kestrel_norm.rms_norm_fp8(x[:1])
    x[1], x[2, 3], x[3, 4] = 0, float("nan"), float("inf")
    q, scale = kestrel_norm.rms_norm_fp8(x)
    assert torch.equal(q[:1].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(scale[:1], alone[1])
    assert not q[1].float().any()
    assert scale.isfinite().all()
    assert q[2].float().isnan().all()
    assert q[3, 4].float().isnan()


def test_fp8_norm_agrees_with_the_quantiser_of_the_quant_family() -> None:
    quant = pytest.importorskip("kestrel_quant")
    x = rows_of(16, 256, torch.float32)
    q, scale = kestrel_norm.rms_norm_fp8(x)
    want_q, want_scale = quant.fp8_quant(kestrel_norm.rms_norm(x))
    assert torch.equal(scale, want_scale)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [7, 1152, 2048])
def test_fused_add_layer_norm_norms_the_rounded_sum(n: int, dtype: torch.dtype) -> None:
    for t in (0, 1, 3, 257):
        x, residual = rows_of(t, n, dtype), rows_of(t, n, dtype, seed=3)
        weight, bias = rows_of(1, n, dtype, seed=5)[0], rows_of(1, n, dtype, seed=6)[0]
        total = (x.double() + residual.double()).to(dtype)
        exact = torch.nn.functional.layer_norm(total.double(), (n,), weight.double(), bias.double())
        baseline = torch.nn.functional.layer_norm(total, (n,), weight, bias)
        assert kestrel_norm.fused_add_layer_norm(x, residual, weight, bias) is None
        assert torch.equal(residual, total)
        if dtype != torch.float32 and t > 0:
            assert_close_to_f64(x, exact, baseline)
        torch.testing.assert_close(x, exact.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("t", [0, 1, 3, 64, 257])
def test_norm_and_linear_is_as_accurate_as_the_two_calls(t: int, dtype: torch.dtype) -> None:
    x, norm_weight, weight = rows_of(t, 128, dtype), rows_of(1, 128, dtype, 5)[0], rows_of(48, 128, dtype, 6)
    got = kestrel_norm.rms_norm_linear(x, norm_weight, weight)
    normed = torch.nn.functional.rms_norm(x, (128,), norm_weight, 1e-6)
    ours = exact_rms(x, norm_weight).to(dtype)  # what the product sees is the rounded norm
    assert got.shape == (t, 48)
    exact, baseline = ours.double() @ weight.double().t(), normed @ weight.t()
    torch.testing.assert_close(got.double(), exact, rtol=8 * torch.finfo(dtype).eps, atol=0.1)
    if t >= 64 and dtype != torch.float32:
        error = (got.double() - exact_rms(x, norm_weight) @ weight.double().t()).norm()
        assert error <= 1.1 * (baseline.double() - exact_rms(x, norm_weight) @ weight.double().t()).norm()


VIEWS = {
    "wider buffer": lambda: rows_of(6, 100, BF16)[:, 20:84],
    "every second row": lambda: rows_of(12, 64, BF16)[::2],
    "transposed": lambda: rows_of(12, 64, BF16).view(3, 4, 64).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_and_written_where_they_stand(view: str) -> None:
    x, weight = VIEWS[view](), rows_of(1, 64, BF16)[0]
    matrix = rows_of(8, 64, BF16, 9)
    for op, rest in ((kestrel_norm.rms_norm_fp8, (weight,)), (kestrel_norm.rms_norm_linear, (weight, matrix))):
        before = x.clone()
        got, want = op(x, *rest), op(x.contiguous(), *rest)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for a, b in pairs:
            assert a.is_contiguous()
            assert torch.equal(a.float(), b.float())
        assert torch.equal(x, before)
        opcheck(op, (x, *rest))
    residual = VIEWS[view]() * 2
    dense = (x.clone(), residual.clone())
    kestrel_norm.fused_add_layer_norm(x, residual, weight)
    kestrel_norm.fused_add_layer_norm(*dense, weight)
    assert torch.equal(x, dense[0])
    assert torch.equal(residual, dense[1])
    opcheck(kestrel_norm.fused_add_layer_norm, (x, residual, weight))
    opcheck(kestrel_norm.fused_add_rms_norm_fp8, (x, residual, weight))


@pytest.mark.parametrize("shape", [(6, 64), (0, 64), (2, 3, 64), (2, 1, 3, 64)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_and_linear_writes_out_and_nothing_around_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, matrix = rows_of(math.prod(shape[:-1]), 64, dtype).view(shape), rows_of(8, 64, dtype, 9)
    weight = rows_of(1, 64, dtype, 5)[0]
    buffer = torch.full((*shape[:-1], 20), float("nan"), dtype=dtype)
    out = buffer[..., 5:13]
    before = [value.clone() for value in (x, weight, matrix)]
    want = kestrel_norm.rms_norm_linear(x, weight, matrix)
    assert kestrel_norm.rms_norm_linear(x, weight, matrix, out=out) is out
    assert torch.equal(out, want)
    assert bool(buffer[..., :5].isnan().all() and buffer[..., 13:].isnan().all())
    assert all(torch.equal(a, b) for a, b in zip((x, weight, matrix), before, strict=True))
    opcheck(torch.ops.kestrel_norm.rms_norm_linear.out, (x, weight, matrix), {"out": out})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fp8_norms_of_a_prefill(dtype: torch.dtype) -> None:
    x, residual, weight = rows_of(740, 2048, dtype), rows_of(740, 2048, dtype, 3), rows_of(1, 2048, dtype, 5)[0]
    q, scale = kestrel_norm.rms_norm_fp8(x, weight)
    exact = exact_rms(x, weight)
    torch.testing.assert_close(scale.double(), exact.abs().amax(-1, keepdim=True) / 448, rtol=1e-6, atol=0)
    for b in (0, 64, 739):
        assert_quantised(q[b : b + 1], scale[b : b + 1], exact[b : b + 1])
        alone = kestrel_norm.rms_norm_fp8(x[b : b + 1], weight)
        assert torch.equal(alone[0].view(torch.uint8), q[b : b + 1].view(torch.uint8))
        assert torch.equal(alone[1], scale[b : b + 1])
    total = (x.double() + residual.double()).to(dtype)
    q, scale = kestrel_norm.fused_add_rms_norm_fp8(x, residual, weight)
    want_q, want_scale = kestrel_norm.rms_norm_fp8(total, weight)
    assert torch.equal(residual, total)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(scale, want_scale)


def test_compiled_without_a_graph_break() -> None:
    weight, matrix = rows_of(1, 64, BF16)[0], rows_of(8, 64, BF16, 9)

    def block(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kestrel_norm.fused_add_layer_norm(x, residual, weight)
        q, scale = kestrel_norm.fused_add_rms_norm_fp8(x, residual, weight)
        p, other = kestrel_norm.rms_norm_fp8(x)
        y = torch.empty(6, 8, dtype=BF16)
        kestrel_norm.rms_norm_linear(x, weight, matrix, out=y)
        return q.float() * scale, p.float() * other, kestrel_norm.rms_norm_linear(x, weight, matrix), y, residual

    x, residual = rows_of(6, 64, BF16), rows_of(6, 64, BF16, 3)
    want = block(x.clone(), residual.clone())
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x.clone(), residual.clone())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def bad(name: str, argument: str, kind: type[Exception], fragment: str, *args: Any, **kwargs: Any) -> BadInput:
    return BadInput(name, argument, lambda: (args, kwargs), kind, fragment)


X, R, W = ones(3, 8), ones(3, 8), ones(8)
CASES = {
    "rms_norm_fp8": [
        bad("float64", "x", TypeError, "float64", ones(3, 8, dtype=torch.float64)),
        bad("rank", "x", ValueError, "1-D", W),
        bad("transposed", "x", ValueError, "stride 3", ones(8, 3).T),
        bad("no columns", "x", ValueError, "(3, 0)", ones(3, 0)),
        bad("weight shape", "weight", ValueError, "(9,)", X, ones(9)),
        bad("weight dtype", "weight", TypeError, "float16", X, ones(8, dtype=torch.float16)),
        bad("eps", "eps", ValueError, ">= 0", X, W, -1.0),
        bad("bias", "weight_bias", ValueError, "nan", X, W, weight_bias=float("nan")),
        bad("bound is a number", "scale_ub", TypeError, "float", X, scale_ub=1.0),
        bad("bound of rows", "scale_ub", ValueError, "(3,)", X, scale_ub=ones(3, dtype=torch.float32)),
        bad("bound in bf16", "scale_ub", TypeError, "bfloat16", X, scale_ub=ones(1)),
        bad("elsewhere", "weight", ValueError, "meta", X, W.to("meta")),
    ],
    "fused_add_rms_norm_fp8": [
        bad("residual shape", "residual", ValueError, "(2, 8)", X, ones(2, 8)),
        bad("residual dtype", "residual", TypeError, "float32", X, ones(3, 8, dtype=torch.float32)),
        bad("residual missing", "residual", TypeError, "NoneType", X, None),
        bad("weight shape", "weight", ValueError, "(9,)", X, R, ones(9)),
        bad("bound of rows", "scale_ub", ValueError, "(3,)", X, R, scale_ub=ones(3, dtype=torch.float32)),
    ],
    "fused_add_layer_norm": [
        bad("integers", "x", TypeError, "int32", ones(3, 8, dtype=torch.int32), R),
        bad("residual shape", "residual", ValueError, "(2, 8)", X, ones(2, 8)),
        bad("residual stride", "residual", ValueError, "stride 3", X, ones(8, 3).T),
        bad("float32 weight", "weight", TypeError, "float32", X, R, ones(8, dtype=torch.float32)),
        bad("bias shape", "bias", ValueError, "(7,)", X, R, W, ones(7)),
        bad("eps", "eps", ValueError, "nan", X, R, W, W, float("nan")),
        bad("elsewhere", "residual", ValueError, "meta", X, R.to("meta")),
    ],
    "rms_norm_linear": [
        bad("no norm weight", "norm_weight", TypeError, "NoneType", X, None, ones(4, 8)),
        bad("norm weight shape", "norm_weight", ValueError, "(7,)", X, ones(7), ones(4, 8)),
        bad("weight transposed", "weight", ValueError, "(8, 4)", X, W, ones(8, 4)),
        bad("weight dtype", "weight", TypeError, "float32", X, W, ones(4, 8, dtype=torch.float32)),
        bad("weight rank", "weight", ValueError, "2-D", X, W, W),
        bad("eps", "eps", TypeError, "str", X, W, ones(4, 8), "small"),
        bad("weight elsewhere", "weight", ValueError, "meta", X, W, ones(4, 8).to("meta")),
        bad("out is no tensor", "out", TypeError, "list", X, W, ones(4, 8), out=[1.0]),
        bad("out shape", "out", ValueError, "(3, 4), got (4, 3)", X, W, ones(4, 8), out=ones(4, 3)),
        bad("out dtype", "out", TypeError, "float32", X, W, ones(4, 8), out=ones(3, 4, dtype=torch.float32)),
        bad("transposed out", "out", ValueError, "stride 3", X, W, ones(4, 8), out=ones(4, 3).T),
        bad("one row of out", "out", ValueError, "strides (0, 1)", X, W, ones(4, 8), out=ones(1, 4).expand(3, 4)),
        bad("out elsewhere", "out", ValueError, "meta", X, W, ones(4, 8), out=ones(3, 4).to("meta")),
    ],
}


@pytest.mark.parametrize(("op", "case"), [pytest.param(op, c, id=f"{op}-{c.name}") for op in CASES for c in CASES[op]])
def test_op_refuses(op: str, case: BadInput) -> None:
    assert_rejects(getattr(kestrel_norm, op), case, op)


SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple)
DTYPES = st.sampled_from([*FLOATS, torch.float64, torch.int64])


@settings(max_examples=150, deadline=None)
@given(SHAPES, SHAPES, SHAPES, DTYPES, DTYPES, st.floats(allow_nan=True))
def test_any_call_either_works_or_names_the_argument(
    shape: tuple[int, ...],
    other: tuple[int, ...],
    weight: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    eps: float,
) -> None:
    x, r, w = torch.ones(shape, dtype=dtype), torch.ones(other, dtype=dtype), torch.ones(weight, dtype=weight_dtype)
    calls = {
        "rms_norm_fp8": (x, w, eps),
        "fused_add_rms_norm_fp8": (x, r, w, eps),
        "fused_add_layer_norm": (x, r, w, None, eps),
        "rms_norm_linear": (x, w, r, eps),
    }
    for op, args in calls.items():
        refused = None
        try:
            got = getattr(kestrel_norm, op)(*args)
        except (ValueError, TypeError) as error:
            refused = str(error)
        if refused is not None:
            assert refused.startswith(f"{op}: argument '")
            assert bool((r == 1).all())
        elif op == "rms_norm_linear":
            assert got.shape == (*shape[:-1], other[0])
        elif got is not None:
            assert got[0].shape == shape
        r.fill_(1)  # what the ops in place have added
