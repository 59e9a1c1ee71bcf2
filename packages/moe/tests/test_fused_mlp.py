"""fused_mlp against float64, held to the error of torch's own composition in the same dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kestrel_moe import fused_mlp
from kestrel_runtime.testing import assert_close_to_f64

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compose(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    residual: torch.Tensor | None,
    approximate: str,
) -> torch.Tensor:
    y = F.linear(F.gelu(F.linear(x, w1, b1), approximate=approximate), w2, b2)
    return y if residual is None else residual + y


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "approximate"), [("gelu_tanh", "tanh"), ("gelu", "none")])
@pytest.mark.parametrize(("bias", "residual"), [(True, True), (True, False), (False, True), (False, False)])
def test_error_is_that_of_torch_in_the_same_dtype(
    dtype: torch.dtype, activation: str, approximate: str, bias: bool, residual: bool
) -> None:
    args = problem(40, 72, 135, 72, dtype, bias=bias, residual=residual)
    exact = compose(*(None if t is None else t.double() for t in args), approximate)
    got = fused_mlp(*args, activation=activation)
    assert got.dtype == dtype
    assert_close_to_f64(got, exact, compose(*args, approximate))


@pytest.mark.parametrize("tokens", [1, 3, 16, 257, 740])
def test_any_number_of_tokens_and_a_result_of_another_width(tokens: int) -> None:
    args = problem(tokens, 31, 50, 17, torch.float32, bias=True, residual=True)
    exact = compose(*(t.double() for t in args), "tanh")
    # float32 sums of 31 and 50 products of order one: a handful of units of 2^-23
    torch.testing.assert_close(fused_mlp(*args).double(), exact, rtol=0, atol=5e-6)


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
