"""The reference of the FP8 norms against float64 and a search over all codes."""

from __future__ import annotations

import pytest
import torch

import kestrel_norm
from kestrel_runtime.testing import opcheck

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


VIEWS = {
    "wider buffer": lambda: rows_of(6, 100, BF16)[:, 20:84],
    "every second row": lambda: rows_of(12, 64, BF16)[::2],
    "transposed": lambda: rows_of(12, 64, BF16).view(3, 4, 64).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_and_written_where_they_stand(view: str) -> None:
    x, residual, weight = VIEWS[view](), VIEWS[view]() * 2, rows_of(1, 64, BF16)[0]
    got, want = kestrel_norm.rms_norm_fp8(x, weight), kestrel_norm.rms_norm_fp8(x.contiguous(), weight)
    dense = residual.clone(memory_format=torch.contiguous_format)
    got += kestrel_norm.fused_add_rms_norm_fp8(x, residual, weight)
    want += kestrel_norm.fused_add_rms_norm_fp8(x, dense, weight)
    assert torch.equal(residual, dense)
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        assert torch.equal(a.float(), b.float())
    opcheck(kestrel_norm.rms_norm_fp8, (x, weight))
    opcheck(kestrel_norm.fused_add_rms_norm_fp8, (x, residual, weight))


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
