"""w4a16_linear with a residual by reference: exact sums, so that one rounding shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kestrel_quant import W4Weight, w4a16_linear
from kestrel_quant.w4a16 import from_codes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
N, K, GROUP = 40, 256, 64


def whole(*shape: int, most: int, seed: int) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed))


def made(dtype: torch.dtype, symmetric: bool, order: torch.Tensor | None = None) -> tuple[W4Weight, torch.Tensor]:
    """A weight of powers of two times small whole numbers, and its values in float64."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (N, K), generator=g)
    scales = 2.0 ** torch.randint(-9, 0, (N, K // GROUP), generator=g)
    zeros = None if symmetric else torch.randint(0, 16, (N, K // GROUP), generator=g)
    shifted = codes - (8 if zeros is None else zeros.repeat_interleave(GROUP, 1))
    values = shifted * scales.double().repeat_interleave(GROUP, 1)
    if order is not None:  # a packed column multiplies the column of x of that number
        packed, values = values, torch.empty_like(values)
        values[:, order] = packed
    return from_codes(codes, scales.to(dtype), GROUP, zeros, order), values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_a_residual_is_added_before_the_only_rounding(
    tokens: int, permuted: bool, with_bias: bool, symmetric: bool, dtype: torch.dtype
) -> None:
    w, values = made(dtype, symmetric, torch.randperm(K) if permuted else None)
    x, bias = whole(tokens, K, most=2, seed=1).to(dtype), whole(N, most=9, seed=2).to(dtype) / 16
    residual = whole(tokens, N, most=255, seed=3).to(dtype) / 8
    product = F.linear(x.double(), values) + (bias.double() if with_bias else 0)
    want = (product + residual.double()).to(dtype)
    assert torch.equal(w4a16_linear(x, w, bias if with_bias else None, residual=residual), want)
    if tokens > 1 and dtype != torch.float32:
        assert not torch.equal(product.to(dtype) + residual, want), "a second rounding would not be seen"


def test_the_residual_may_be_the_result_and_has_strides_of_its_own() -> None:
    w, _ = made(torch.bfloat16, symmetric=True)
    x, residual = whole(6, K, most=2, seed=1).bfloat16(), whole(6, N, most=255, seed=3).bfloat16()
    want = w4a16_linear(x, w, residual=residual)
    wide = torch.full((6, N + 9), torch.nan).bfloat16()
    inside = wide[:, 3 : 3 + N]
    inside.copy_(residual)
    assert torch.equal(w4a16_linear(x, w, residual=inside), want)
    assert torch.equal(inside, residual)
    assert w4a16_linear(x, w, residual=inside, out=inside) is inside
    assert torch.equal(inside, want)
    assert int(wide.isnan().sum()) == 6 * 9
    assert torch.equal(w4a16_linear(x.view(2, 3, K), w, residual=residual.view(2, 3, N)).view(6, N), want)
    assert torch.equal(w4a16_linear(x[0], w, residual=residual[0]), w4a16_linear(x[:1], w, residual=residual[:1])[0])


def test_a_residual_partly_under_the_result_is_refused() -> None:
    w, _ = made(torch.bfloat16, symmetric=True)
    x, memory = whole(6, K, most=2, seed=1).bfloat16(), torch.zeros(7 * N).bfloat16()
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': .* shares no memory with 'residual'"):
        w4a16_linear(x, w, residual=memory[:-N].view(6, N), out=memory[N:].view(6, N))
    assert not bool(memory.any())
