"""fused_mlp against float64, within bounds that follow from its roundings."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kestrel_moe import fused_mlp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def problem(
    tokens: int, width: int, inner: int, result: int, dtype: torch.dtype, *, bias: bool, residual: bool
) -> list:
    g = torch.Generator().manual_seed(tokens + inner)
    tensors = [
        torch.randn(tokens, width, generator=g),
        torch.randn(inner, width, generator=g) / width**0.5,
        torch.randn(inner, generator=g) if bias else None,
        torch.randn(result, inner, generator=g) / inner**0.5,
        torch.randn(result, generator=g) if bias else None,
        torch.randn(tokens, result, generator=g) if residual else None,
    ]
    return [None if t is None else t.to(dtype) for t in tensors]


U = 2.0**-24  # unit roundoff of float32
GELU_SLOPE = 1.13  # the largest slope of GELU, of either form


def assert_within_bounds(got: torch.Tensor, args: list[torch.Tensor | None], activation: str = "gelu_tanh") -> None:
    """Error analysis of the two products, whatever the order of their sums.

    A float32 sum of n products is off by at most n U times the sum of their magnitudes; a bias is one more term. GELU
    passes that on times its slope and adds 2^-20 of its argument for its own arithmetic. The hidden layer is rounded to
    the dtype, half an eps, and the result once more.
    """
    x, w1, b1, w2, b2, residual = (None if t is None else t.double() for t in args)
    eps = torch.finfo(got.dtype).eps
    pre = F.linear(x, w1, b1)
    pre_error = (x.shape[-1] + 1) * U * F.linear(x.abs(), w1.abs(), None if b1 is None else b1.abs())
    hidden = F.gelu(pre, approximate="none" if activation == "gelu" else "tanh")
    hidden_error = GELU_SLOPE * pre_error + 2.0**-20 * pre.abs() + 0.5 * eps * hidden.abs()
    exact = F.linear(hidden, w2, b2)
    magnitude = F.linear(hidden.abs(), w2.abs(), None if b2 is None else b2.abs())
    if residual is not None:
        exact, magnitude = exact + residual, magnitude + residual.abs()
    bound = F.linear(hidden_error, w2.abs()) + (w2.shape[1] + 2) * U * magnitude
    # the hidden error itself is in the sums, hence 1 % more; half an eps for the result
    allowed = 1.01 * bound + 0.5 * eps * (exact.abs() + bound) + torch.finfo(got.dtype).tiny
    worst = ((got.double() - exact).abs() / allowed).max()
    assert worst <= 1, f"{worst:.2f} of the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize(("bias", "residual"), [(True, True), (True, False), (False, True), (False, False)])
def test_errors_stay_within_those_of_float32_sums_and_two_roundings(
    dtype: torch.dtype, activation: str, bias: bool, residual: bool
) -> None:
    args = problem(40, 72, 135, 72, dtype, bias=bias, residual=residual)
    got = fused_mlp(*args, activation=activation)
    assert got.dtype == dtype
    assert_within_bounds(got, args, activation)


def test_the_hidden_layer_is_rounded_to_the_dtype_of_the_input() -> None:
    # GELU(3) = 2.9959502... in float32; 3.0 and 2.984375 are its neighbours in bf16, and 3.0 is nearer
    x, ones = torch.tensor([[3.0]]).bfloat16(), torch.ones(1, 1).bfloat16()
    wide = torch.full((1, 1), 256.0).bfloat16()
    residual = torch.full((1, 1), -768.0).bfloat16()
    assert fused_mlp(x, ones, None, wide, None, residual, activation="gelu").item() == 0.0  # 256 * 3.0 - 768


def test_what_gelu_takes_and_what_the_residual_is_added_to_are_not_rounded() -> None:
    # -2 - 2^-7 is half way between two numbers of bf16, of which GELU(-2) is one and a half steps off
    pair, one = torch.ones(1, 2).bfloat16(), torch.ones(1, 1).bfloat16()
    got = fused_mlp(pair, torch.tensor([[-2.0, -(2.0**-7)]]).bfloat16(), None, one, None, activation="gelu")
    assert got.item() == torch.tensor(-2.0078125 * 0.5 * math.erfc(2.0078125 / math.sqrt(2))).bfloat16().item()
    # 32 and 32 through GELU, then 32 + 1/8, which bf16 has not, less 32
    residual = torch.tensor([[-32.0]]).bfloat16()
    got = fused_mlp(
        pair, 16 * torch.ones(2, 2).bfloat16(), None, torch.tensor([[1.0, 2.0**-8]]).bfloat16(), None, residual
    )
    assert got.item() == 0.125


@pytest.mark.parametrize("tokens", [1, 3, 16, 257])
def test_any_number_of_tokens_and_a_result_of_another_width(tokens: int) -> None:
    args = problem(tokens, 31, 50, 17, torch.float32, bias=True, residual=True)
    assert_within_bounds(fused_mlp(*args), args)


def test_leading_dimensions_views_out_and_untouched_inputs() -> None:
    x, w1, b1, w2, b2, residual = problem(24, 48, 64, 48, torch.bfloat16, bias=True, residual=True)
    expected = fused_mlp(x, w1, b1, w2, b2, residual)
    wide = torch.randn(2, 12, 100).bfloat16()
    wide[..., 20:68] = x.view(2, 12, 48)
    w1_wide = torch.randn(64, 60).bfloat16()
    w1_wide[:, 5:53] = w1
    before = [t.clone() for t in (wide, w1_wide, w2, residual)]
    got = fused_mlp(wide[..., 20:68], w1_wide[:, 5:53], b1, w2, b2, residual.view(2, 12, 48))
    assert torch.equal(got.view(24, 48), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, (wide, w1_wide, w2, residual), strict=True))
    assert fused_mlp(x, w1, b1, w2, b2, residual, out=residual) is residual
    assert torch.equal(residual, expected)


def test_a_nan_row_stays_alone() -> None:
    x, *rest = problem(8, 16, 24, 16, torch.float32, bias=True, residual=False)
    clean = fused_mlp(x, *rest)
    x[3, 5] = torch.nan
    got = fused_mlp(x, *rest)
    assert bool(got[3].isnan().all())
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 40, 257])
def test_at_one_number_of_rows_a_row_does_not_depend_on_the_others(tokens: int, dtype: torch.dtype) -> None:
    x, w1, b1, w2, b2, residual = problem(tokens, 64, 72, 64, dtype, bias=True, residual=True)
    expected = fused_mlp(x, w1, b1, w2, b2, residual)
    for row in {0, tokens // 2, tokens - 1}:
        others, other_residual = torch.randn_like(x), torch.randn_like(residual)
        others[row], other_residual[row] = x[row], residual[row]
        assert torch.equal(fused_mlp(others, w1, b1, w2, b2, other_residual)[row], expected[row])


def test_no_rows_give_no_rows() -> None:
    args = problem(0, 16, 24, 8, torch.float16, bias=True, residual=True)
    assert fused_mlp(*args).shape == (0, 8)
