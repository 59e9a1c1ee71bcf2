"""fused_linear_residual, gemv, router_gemm and moe_sum against float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kestrel_moe import fused_linear_residual, gemv, linear, moe_sum, router_gemm
from kestrel_quant import pack_w4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def problem(tokens: int, width: int, result: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, residual."""
    g = torch.Generator().manual_seed(tokens + width)
    shapes = ((tokens, width), (result, width), (result,), (tokens, result))
    x, weight, bias, residual = (torch.randn(shape, generator=g) for shape in shapes)
    return x.to(dtype), (weight / width**0.5).to(dtype), bias.to(dtype), residual.to(dtype)


def assert_rounded_once(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor | None) -> None:
    """A float32 sum of n terms in any order is off by at most n 2^-24 times the sum of their magnitudes. The result is
    rounded once, by half an eps of its dtype."""
    terms = [t.double() for t in added if t is not None]
    exact = F.linear(x.double(), weight.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs())
    for term in terms:
        exact, magnitude = exact + term, magnitude + term.abs()
    sum_error = (x.shape[-1] + len(terms)) * 2.0**-24 * magnitude
    finfo = torch.finfo(got.dtype)
    allowed = sum_error + 0.5 * finfo.eps * (exact.abs() + sum_error) + finfo.tiny
    if got.numel():
        worst = ((got.double() - exact).abs() / allowed).max()
        assert worst <= 1, f"{worst:.2f} of the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_with_residual_is_rounded_once(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias, residual = problem(50, 72, 96, dtype)
    bias = bias if with_bias else None
    got = fused_linear_residual(x, weight, bias, residual)
    assert got.dtype == dtype
    assert_rounded_once(got, x, weight, bias, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_linear_with_residual_takes_a_4_bit_weight(
    tokens: int, with_bias: bool, symmetric: bool, dtype: torch.dtype
) -> None:
    x, weight, bias, residual = problem(tokens, 72, 96, dtype)
    w, bias = pack_w4(weight, 24, symmetric=symmetric), bias if with_bias else None
    values = replace(w, scales=w.scales.float()).dequantize()  # not rounded to x's dtype
    got = fused_linear_residual(x, w, bias, residual)
    assert got.dtype == dtype
    assert_rounded_once(got, x, values, bias, residual)
    assert torch.equal(fused_linear_residual(x[None], w, bias, residual[None])[0], got)
    assert fused_linear_residual(x, w, bias, residual, out=residual) is residual
    assert torch.equal(residual, got)


@pytest.mark.parametrize("weight", [None, 3, [1.0]])
def test_a_weight_of_neither_kind_is_named(weight: object) -> None:
    with pytest.raises(
        TypeError, match="fused_linear_residual: argument 'weight': expected a tensor or a W4Weight, got"
    ):
        fused_linear_residual(torch.zeros(1, 2), weight, None, torch.zeros(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 16, 257])
def test_gemv_is_a_linear_layer_rounded_once(tokens: int, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias, _ = problem(tokens, 130, 33, dtype)
    bias = bias if with_bias else None
    assert_rounded_once(gemv(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 17, 740])
def test_router_logits_are_not_rounded_to_the_input_dtype(tokens: int, dtype: torch.dtype) -> None:
    x, weight, _, _ = problem(tokens, 256, 64, dtype)
    got = router_gemm(x, weight)
    assert got.dtype == torch.float32
    assert_rounded_once(got, x, weight)


@pytest.mark.parametrize(
    ("dtype", "experts", "width", "most"),
    [
        (torch.bfloat16, 64, 2048, 1024),
        (torch.bfloat16, 256, 7168, 128),
        (torch.bfloat16, 1024, 4096, 32),
        (torch.bfloat16, 1024, 64, 256),
        (torch.bfloat16, 768, 7168, 32),
        (torch.bfloat16, 800, 7168, 32),
        (torch.bfloat16, 1025, 64, 1),
        (torch.bfloat16, 64, 768, 4096),
        (torch.bfloat16, 64, 776, 2048),
        (torch.float16, 64, 1536, 2048),
        (torch.float16, 64, 1544, 1024),
        (torch.bfloat16, 65, 3072, 32 * 21),
        (torch.bfloat16, 65, 3080, 32 * 10),
        (torch.float16, 4096, 4096, 1),
        (torch.float16, 0, 8, 8192),
        (torch.float32, 64, 2048, 64),
        (torch.float32, 4096, 64, 64),
    ],
)
def test_router_logits_of_too_many_tokens_or_experts_are_the_vendor_s_product(
    dtype: torch.dtype, experts: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[str] = []
    cluster = 1 if width <= 768 else 2 if width <= 1536 else 4 if width <= 3072 else 8

    def kernel(*given: object) -> None:
        assert given[3] == cluster
        took.append("kernel")

    monkeypatch.setattr(linear, "_kernels", SimpleNamespace(router_gemm=kernel))
    monkeypatch.setattr(torch, "mm", lambda *given, **how: took.append("vendor"))
    for tokens in (0, 1, most, most + 1):
        x, weight = torch.empty(tokens, width, dtype=dtype), torch.empty(experts, width, dtype=dtype)
        router_gemm.kernel_op.launch(x, weight)
    assert took == ["kernel", "kernel", "kernel", "vendor"]


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_the_vendor_s_product_gets_no_out_that_overlaps(name: str) -> None:
    """Launches run on CPU tensors here: the products are torch's."""
    given = {"x": torch.zeros(70, 16), "weight": torch.zeros(16, 16), "bias": torch.zeros(16)}
    memory = torch.zeros(140 * 16)
    out = memory[: 70 * 16].view(70, 16)
    refused = f": argument 'out': .* shares no memory with '{name}', got tensors that overlap"
    gemv.kernel_op.launch(**given, out=out)
    overlapping = {**given, name: memory[8 : 8 + given[name].numel()].view_as(given[name])}
    with pytest.raises(ValueError, match="gemv" + refused):
        gemv.kernel_op.launch(**overlapping, out=out)
    del given["bias"], overlapping["bias"]
    if name != "bias":
        router_gemm.kernel_op.launch(**given, out=out)
        with pytest.raises(ValueError, match="router_gemm" + refused):
            router_gemm.kernel_op.launch(**overlapping, out=out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choices", [0, 1, 2, 8, 11])
@pytest.mark.parametrize("tokens", [0, 1, 16, 257])
def test_moe_sum_adds_in_float32_in_order(tokens: int, choices: int, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(tokens, choices, 37)).to(dtype)
    expected = torch.zeros(tokens, 37)
    for k in range(choices):
        expected += x[:, k].float()
    assert torch.equal(moe_sum(x), expected.to(dtype))


def test_moe_sum_rounds_once() -> None:
    x = torch.tensor([[[256.0], [1.0], [1.0]]]).bfloat16()  # in bf16 256 + 1 is 256
    assert moe_sum(x).item() == 258.0


def test_views_leading_dimensions_out_and_untouched_inputs() -> None:
    x, weight, bias, residual = problem(12, 40, 24, torch.bfloat16)
    wide = torch.randn(3, 4, 60).bfloat16()
    wide[..., 10:50] = x.view(3, 4, 40)
    weight_wide = torch.randn(24, 50).bfloat16()
    weight_wide[:, 3:43] = weight
    before = [t.clone() for t in (wide, weight_wide, bias, residual)]
    view, weight_view = wide[..., 10:50], weight_wide[:, 3:43]
    expected = fused_linear_residual(x, weight, bias, residual)
    assert torch.equal(fused_linear_residual(view, weight_view, bias, residual.view(3, 4, 24)).view(12, 24), expected)
    assert torch.equal(gemv(view, weight_view, bias).view(12, 24), gemv(x, weight, bias))
    assert torch.equal(router_gemm(view, weight_view).view(12, 24), router_gemm(x, weight))
    assert torch.equal(gemv(x[0], weight), gemv(x[:1], weight)[0])
    summed = moe_sum(wide.transpose(0, 1)[..., 10:50])
    assert torch.equal(summed, moe_sum(wide.transpose(0, 1)[..., 10:50].contiguous()))
    assert summed.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(before, (wide, weight_wide, bias, residual), strict=True))

    assert fused_linear_residual(x, weight, bias, residual, out=residual) is residual
    assert torch.equal(residual, expected)
    out = torch.empty(12, 24)
    assert router_gemm(x, weight, out=out) is out
    assert torch.equal(out, router_gemm(x, weight))
    total = torch.empty(3, 60).bfloat16()
    assert moe_sum(wide, total) is total
    assert torch.equal(total, moe_sum(wide))


def test_a_nan_row_stays_alone() -> None:
    x, weight, bias, residual = problem(8, 16, 24, torch.float32)
    clean = fused_linear_residual(x, weight, bias, residual), gemv(x, weight, bias), router_gemm(x, weight)
    x[3, 5] = torch.nan
    broken = fused_linear_residual(x, weight, bias, residual), gemv(x, weight, bias), router_gemm(x, weight)
    others = [0, 1, 2, 4, 5, 6, 7]
    for before, after in zip(clean, broken, strict=True):
        assert bool(after[3].isnan().all())
        assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 40, 257])
def test_at_one_number_of_rows_a_row_does_not_depend_on_the_others(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias, residual = problem(tokens, 72, 96, dtype)
    calls = {
        "fused_linear_residual": lambda x: fused_linear_residual(x, weight, bias, residual),
        "gemv": lambda x: gemv(x, weight, bias),
        "router_gemm": lambda x: router_gemm(x, weight),
    }
    for name, op in calls.items():
        expected = op(x)
        for row in {0, tokens // 2, tokens - 1}:
            others = torch.randn_like(x)
            others[row] = x[row]
            assert torch.equal(op(others)[row], expected[row]), f"{name}: row {row}"
