"""The references of the FP8 norms against float64 and a search over all codes.

The bounds. With u = 2^-24, the norm in float32 has an error of 5.5 u (see test_norm_reference.py). A row's scale has
that error and one rounding more (7 u with second-order terms). A quotient has both errors and a rounding (14 u), so a
code may be as far from the exact quotient as the nearest code, and 14 u of the quotient more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_rows import rows_of

import kestrel_norm
from kestrel_runtime.testing import assert_same_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16
U = 2.0**-24
OPS = ("rms_norm_fp8", "fused_add_rms_norm_fp8")
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def exact_rms(
    x: torch.Tensor, weight: torch.Tensor | None = None, weight_bias: float = 0.0, eps: float = 1e-6
) -> torch.Tensor:
    scale = None if weight is None else weight.double() + weight_bias
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], scale, eps)


def nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """The FP8 value nearest to each float64 value, by a search over all finite codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    return codes[(values[..., None] - codes).abs().argmin(-1)]


def assert_quantised(q: torch.Tensor, scale: torch.Tensor, normed: torch.Tensor, bound: float | None = None) -> None:
    """Scales and codes are those of the float64 rows, within the bounds of the module's docstring."""
    amax = normed.abs().amax(-1, keepdim=True)
    exact = (amax if bound is None else amax.clamp(max=bound)).clamp(min=1e-12) / 448
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), exact, rtol=7 * U, atol=0)
    values = (normed / exact).clamp(-448, 448)
    error, least = (q.double() - values).abs(), (nearest_codes(values) - values).abs()
    assert bool((error <= least + 14 * U * values.abs()).all())


def call(op: str, total: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on rows that it normalises: x, or a residual with x of zeros."""
    if op == "rms_norm_fp8":
        return kestrel_norm.rms_norm_fp8(total, *args, **kwargs)
    return kestrel_norm.fused_add_rms_norm_fp8(torch.zeros_like(total), total.clone(), *args, **kwargs)


@every_dtype
@pytest.mark.parametrize("n", [1, 7, 66, 1152, 2048])
@pytest.mark.parametrize("t", [0, 1, 3, 16])
def test_fp8_norm_quantises_the_unrounded_norm(t: int, n: int, dtype: torch.dtype) -> None:
    x, weight = rows_of(t, n, dtype), rows_of(1, n, dtype, seed=5)[0]
    q, scale = kestrel_norm.rms_norm_fp8(x, weight, weight_bias=1.0)
    assert (q.shape, scale.shape, q.dtype) == (x.shape, (t, 1), torch.float8_e4m3fn)
    assert_quantised(q, scale, exact_rms(x, weight, 1.0))


@every_dtype
def test_fp8_norm_with_a_residual_writes_only_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = rows_of(16, 96, dtype), rows_of(16, 96, dtype, seed=3), rows_of(1, 96, dtype, seed=5)[0]
    before, total = x.clone(), (x.double() + residual.double()).to(dtype)
    q, scale = kestrel_norm.fused_add_rms_norm_fp8(x, residual, weight)
    assert torch.equal(x, before)
    assert torch.equal(residual, total)
    assert_quantised(q, scale, exact_rms(total, weight))


OPTIONS: dict[str, dict[str, Any]] = {
    "eps": {"eps": 0.5},
    "weight_bias": {"weight_bias": 1.0},
    "scale_ub": {"scale_ub": torch.tensor([0.25])},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("op", OPS)
def test_every_option_reaches_the_norm(op: str, option: str) -> None:
    x, weight = rows_of(4, 96, BF16), rows_of(1, 96, BF16, seed=5)[0]
    exact = exact_rms(x, weight, **{k: v for k, v in OPTIONS[option].items() if k != "scale_ub"})
    bound = 0.25 if option == "scale_ub" else None
    q, scale = call(op, x, weight, **OPTIONS[option])
    assert_quantised(q, scale, exact, bound)
    assert not torch.equal(q.float() * scale, torch.mul(*map(torch.Tensor.float, call(op, x, weight))))


@pytest.mark.parametrize("op", OPS)
def test_values_above_the_scale_bound_saturate(op: str) -> None:
    x = rows_of(4, 64, BF16)
    q, scale = call(op, x, scale_ub=torch.tensor([0.5]))
    assert_quantised(q, scale, exact_rms(x), 0.5)
    assert int((q.float().abs() == 448).sum()) > 4


@pytest.mark.parametrize("op", OPS)
def test_zero_rows_give_zeros_and_a_finite_scale_and_bad_rows_stay_alone(op: str) -> None:
    x = rows_of(4, 64, BF16)
    alone = call(op, x[:1])
    x[1], x[2, 3], x[3, 4] = 0, float("nan"), float("inf")
    q, scale = call(op, x)
    assert_same_bits((q[:1], scale[:1]), alone)
    assert not q[1].float().any()
    assert scale.isfinite().all()
    assert q[2].float().isnan().all()
    assert q[3, 4].float().isnan()


def test_fp8_norm_agrees_with_the_quantiser_of_the_quant_family() -> None:
    quant = pytest.importorskip("kestrel_quant")
    x = rows_of(16, 256, torch.float32)
    assert_same_bits(kestrel_norm.rms_norm_fp8(x), quant.fp8_quant(kestrel_norm.rms_norm(x)))


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "wider buffer": lambda: rows_of(6, 100, BF16)[:, 20:84],
    "every second row": lambda: rows_of(12, 64, BF16)[::2],
    "transposed": lambda: rows_of(12, 64, BF16).view(3, 4, 64).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_and_written_in_place(view: str) -> None:
    x, residual, weight = VIEWS[view](), VIEWS[view]() * 2, rows_of(1, 64, BF16)[0]
    got, want = kestrel_norm.rms_norm_fp8(x, weight), kestrel_norm.rms_norm_fp8(x.contiguous(), weight)
    dense = residual.clone(memory_format=torch.contiguous_format)
    got += kestrel_norm.fused_add_rms_norm_fp8(x, residual, weight)
    want += kestrel_norm.fused_add_rms_norm_fp8(x, dense, weight)
    assert torch.equal(residual, dense)
    assert all(part.is_contiguous() for part in got)
    assert_same_bits(got, want)


@every_dtype
@pytest.mark.parametrize("op", OPS)
def test_fp8_rows_of_a_prefill_are_those_of_single_calls(op: str, dtype: torch.dtype) -> None:
    x, weight = rows_of(740, 2048, dtype), rows_of(1, 2048, dtype, 5)[0]
    q, scale = call(op, x, weight)
    for row in (0, 64, 739):
        rows = slice(row, row + 1)
        assert_quantised(q[rows], scale[rows], exact_rms(x[rows], weight))
        assert_same_bits(call(op, x[rows], weight), (q[rows], scale[rows]), f"row {row}")
