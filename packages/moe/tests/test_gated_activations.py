"""The gated activations against float64 formulas written with erf, tanh and exp."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kestrel_moe import (
    gelu_and_mul,
    gelu_and_mul_fp8,
    gelu_residual,
    gelu_residual_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def normal_cdf(h: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.special.erfc(-h / math.sqrt(2))


def tanh_cdf(h: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))  # (1 + tanh(z)) / 2


OPS: dict[str, tuple[Callable[..., torch.Tensor], Formula]] = {
    "gelu_residual": (gelu_residual, lambda h, g: h * normal_cdf(h) * (g + 1)),
    "gelu_residual tanh": (partial(gelu_residual, approximate="tanh"), lambda h, g: h * tanh_cdf(h) * (g + 1)),
    "silu_and_mul": (silu_and_mul, lambda h, g: h * torch.sigmoid(h) * g),
    "gelu_and_mul": (gelu_and_mul, lambda h, g: h * normal_cdf(h) * g),
    "gelu_and_mul tanh": (partial(gelu_and_mul, approximate="tanh"), lambda h, g: h * tanh_cdf(h) * g),
}
FP8_OPS = {
    "gelu_residual": gelu_residual_fp8,
    "gelu_residual tanh": partial(gelu_residual_fp8, approximate="tanh"),
    "silu_and_mul": silu_and_mul_fp8,
    "gelu_and_mul": gelu_and_mul_fp8,
    "gelu_and_mul tanh": partial(gelu_and_mul_fp8, approximate="tanh"),
}
EACH_OP = pytest.mark.parametrize("name", OPS)


def assert_rounded_once(got: torch.Tensor, x: torch.Tensor, formula: Formula) -> None:
    """Half a unit in the last place of the result, plus float32 arithmetic: 16 units of 2^-24, and an absolute part for
    the far left tail, where the argument of exp is large and the result is next to nothing."""
    h, g = x.double().chunk(2, dim=-1)
    exact = formula(h, g)
    finfo = torch.finfo(got.dtype)
    half_ulp = 0.5 * finfo.eps * exact.abs() + 0.5 * finfo.smallest_normal * finfo.eps
    float32 = 2.0**-20 * exact.abs() + 2.0**-32 * h.abs() * (g.abs() + 1)
    kept = exact.abs() <= finfo.max
    assert bool(((got.double() - exact).abs() <= half_ulp + float32)[kept].all())
    assert bool(got[~kept].isinf().all())


@EACH_OP
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (16, 128), (257, 30), (2, 5, 66), (2, 3, 2, 8), (10,)])
def test_matches_the_formula_in_float64(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    op, formula = OPS[name]
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    got = op(x)
    assert got.dtype == dtype
    assert got.shape == (*shape[:-1], shape[-1] // 2)
    assert_rounded_once(got, x, formula)


@EACH_OP
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_small_and_zero_values(name: str, dtype: torch.dtype) -> None:
    op, formula = OPS[name]
    values = [0.0, 1e4, -1e4, 1e-7, -1e-7, 1e-40, 1.0, -30.0, 5.5, -0.1]
    x = torch.tensor([[h, g] for h in values for g in (*values, -1.0)]).to(dtype)
    assert_rounded_once(op(x), x, formula)


@EACH_OP
def test_nan_and_inf_stay_in_their_row(name: str) -> None:
    op, _ = OPS[name]
    x = torch.randn(3, 8)
    x[1] = torch.nan
    x[2, 0], x[2, 4] = torch.inf, 2.0
    got = op(x)
    assert torch.equal(got[0], op(x[:1])[0])
    assert bool(got[1].isnan().all())
    assert got[2, 0] == torch.inf
    assert bool(got[2, 1:].isfinite().all())


@EACH_OP
@pytest.mark.parametrize("tokens", [740, 4096])
def test_a_row_does_not_depend_on_its_batch(name: str, tokens: int) -> None:
    op, _ = OPS[name]
    x = torch.randn(tokens, 38)
    got = op(x)
    for row in (0, tokens // 3, tokens - 1):
        assert torch.equal(got[row], op(x[row]))


@EACH_OP
def test_views_and_out_and_an_untouched_input(name: str) -> None:
    op, _ = OPS[name]
    buffer = torch.randn(4, 6, 40)
    before = buffer.clone()
    view = buffer[::2, :, 4:36].transpose(0, 1)
    expected = op(view.contiguous())
    assert torch.equal(op(view), expected)
    assert op(view).is_contiguous()
    out = torch.full((6, 2, 20), torch.nan)
    assert op(view, out=out[..., 2:18]).data_ptr() == out[..., 2:].data_ptr()
    assert torch.equal(out[..., 2:18], expected)
    assert bool(out[..., :2].isnan().all() and out[..., 18:].isnan().all())
    assert torch.equal(buffer, before)


@EACH_OP
def test_out_may_be_half_of_the_input(name: str) -> None:
    op, _ = OPS[name]
    x = torch.randn(5, 12)
    expected = op(x)
    op(x, out=x[:, :6])
    assert torch.equal(x[:, :6], expected)


@EACH_OP
def test_no_rows_give_no_rows(name: str) -> None:
    op, _ = OPS[name]
    assert op(torch.empty(0, 64)).shape == (0, 32)


# ---- FP8 results ---------------------------------------------------------------------------------------------------


@EACH_OP
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (16, 128), (257, 30)])
def test_fp8_comes_within_half_a_step_of_the_formula(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)
    q, scale = FP8_OPS[name](x)
    assert q.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    h, g = x.double().chunk(2, dim=-1)
    exact = OPS[name][1](h, g)
    # a sum in float32 (g + 1) may cancel, so the largest value is known to 2^-20 of the largest addend
    expected = exact.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    torch.testing.assert_close(scale.double(), expected, rtol=2**-20, atol=0)
    # 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the scale below the smallest normal code
    bound = torch.maximum(exact.abs() * 2.0**-4, scale.double() * 2.0**-10) * (1 + 2.0**-10)
    assert bool(((q.double() * scale.double() - exact).abs() <= bound).all())
    assert bool((q.double().abs().amax(1) == 448).all())


@EACH_OP
def test_fp8_rows_do_not_depend_on_their_batch(name: str) -> None:
    x = torch.randn(64, 38)
    x[7] = 0.0
    q, scale = FP8_OPS[name](x)
    for row in (0, 7, 63):
        q_row, scale_row = FP8_OPS[name](x[row : row + 1])
        assert torch.equal(q[row].view(torch.uint8), q_row[0].view(torch.uint8))
        assert torch.equal(scale[row], scale_row[0])
    assert not q[7].float().any()
    assert scale[7].isfinite()
    assert [t.shape for t in FP8_OPS[name](torch.empty(0, 8))] == [(0, 4), (0, 1)]
