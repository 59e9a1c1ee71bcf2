"""fused_linear_residual and fused_mlp on a GPU: numbers of rows, values and strides that every op must take."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kestrel_moe import fused_linear_residual, fused_mlp
from kestrel_runtime.testing import (
    ROW_KINDS,
    assert_close_to_f64,
    assert_same_bits,
    canary,
    large_allocation,
    normal,
    rows_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALVES = (torch.bfloat16, torch.float16)
TOKENS = (1, 3, 16, 40, 257, 740, 4096)
WIDTH, INNER = 1152, 2048
Tensor = torch.Tensor


def mlp(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w1 = normal(INNER, WIDTH, dtype=dtype, scale=WIDTH**-0.5, seed=1)
    w2 = normal(WIDTH, INNER, dtype=dtype, scale=INNER**-0.5, seed=2)
    return w1, normal(INNER, dtype=dtype, seed=3), w2, normal(WIDTH, dtype=dtype, seed=4)


def by_torch(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, residual: Tensor, activation: str) -> Tensor:
    h = F.gelu(F.linear(x, w1, b1), approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.linear(h, w2, b2) + residual


VALUES = pytest.mark.parametrize("value", ROW_KINDS)


@VALUES
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_layer_of_rows_of_any_value(dtype: torch.dtype, tokens: int, value: str) -> None:
    x = rows_of(value, normal(tokens, WIDTH, dtype=torch.float32), dtype)
    weight = normal(1000, WIDTH, dtype=dtype, scale=WIDTH**-0.5, seed=1)
    bias, residual = normal(1000, dtype=dtype, seed=2), normal(tokens, 1000, dtype=dtype, seed=3)
    out, assert_intact = canary((tokens, 1000), dtype, "cuda")
    fused_linear_residual(x, weight, bias, residual, out=out)
    assert_intact()
    exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    assert_close_to_f64(out, exact, F.linear(x, weight, bias) + residual)


@VALUES
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_mlp_of_rows_of_any_value(dtype: torch.dtype, tokens: int, activation: str, value: str) -> None:
    x, weights = rows_of(value, normal(tokens, WIDTH, dtype=torch.float32), dtype), mlp(dtype)
    residual = normal(tokens, WIDTH, dtype=dtype, seed=5)
    out, assert_intact = canary((tokens, WIDTH), dtype, "cuda")
    fused_mlp(x, *weights, residual, activation=activation, out=out)
    assert_intact()
    exact = by_torch(x.double(), *(w.double() for w in weights), residual.double(), activation)
    assert_close_to_f64(out, exact, by_torch(x, *weights, residual, activation))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tokens", [3, 16, 40, 257, 740, 4096])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_inf_and_nan_stay_in_their_row(dtype: torch.dtype, tokens: int, value: float) -> None:
    x, weights = normal(tokens, WIDTH, dtype=dtype), mlp(dtype)
    residual = normal(tokens, WIDTH, dtype=dtype, seed=5)
    layer = weights[0], weights[1], normal(tokens, INNER, dtype=dtype, seed=6)
    want = fused_linear_residual(x, *layer), fused_mlp(x, *weights, residual)
    x[1, 700], x[2] = value, value
    for clean, got in zip(want, (fused_linear_residual(x, *layer), fused_mlp(x, *weights, residual)), strict=True):
        assert not bool(got[2].isfinite().any())
        assert not bool(got[1].isfinite().all())
        got[1:3] = clean[1:3]
        assert_same_bits(got, clean)


@pytest.mark.parametrize("tokens", [3, 16, 40, 257, 740])
def test_a_row_does_not_depend_on_the_others(tokens: int) -> None:
    """For one number of rows, which the docstrings promise."""
    x, weights, residual = normal(tokens, WIDTH), mlp(torch.bfloat16), normal(tokens, WIDTH, seed=5)
    layer = weights[0], weights[1], normal(tokens, INNER, seed=6)
    want = fused_linear_residual(x, *layer), fused_mlp(x, *weights, residual)
    for row in (0, tokens // 2, tokens - 1):
        others = normal(tokens, WIDTH, scale=3, seed=7)
        others[row] = x[row]
        got = fused_linear_residual(others, *layer), fused_mlp(others, *weights, residual)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a[row], b[row])


@large_allocation(gib=6)
@pytest.mark.parametrize("tokens", [3, 24, 130, 400, 4096])
def test_rows_of_an_mlp_beyond_two_to_the_31_elements(tokens: int) -> None:
    stride = 2**31 // (tokens - 1) // 8 * 8 + 8
    weights, x, residual = mlp(torch.bfloat16), normal(tokens, WIDTH), normal(tokens, WIDTH, seed=5)
    want = fused_mlp(x, *weights, residual)
    buffer = torch.empty((tokens - 1) * stride + 3 * WIDTH, dtype=x.dtype, device="cuda")
    far_x, far_residual, out = (buffer.as_strided((tokens, WIDTH), (stride, 1), i * WIDTH) for i in range(3))
    far_x.copy_(x), far_residual.copy_(residual)
    fused_mlp(far_x, *weights, far_residual, out=out)
    assert_same_bits(out.contiguous(), want)


@large_allocation(gib=8)
def test_a_weight_of_more_than_two_to_the_31_elements() -> None:
    outputs, width = 65544, 32776
    weight = normal(64, width, scale=width**-0.5, seed=1).repeat(1025, 1)[:outputs]
    last = weight[-64:]
    for tokens in (1, 3, 16, 40, 130, 1030):
        x, residual = normal(tokens, width), normal(tokens, outputs, seed=2)
        got = fused_linear_residual(x, weight, None, residual)[:, -64:]
        added = residual[:, -64:]
        exact = F.linear(x.double(), last.double()) + added.double()
        assert_close_to_f64(got, exact, F.linear(x, last) + added)
        del got, residual, added
