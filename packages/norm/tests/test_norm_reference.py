"""The references against torch.nn.functional and a float64 loop, over the cases of the ops' contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kestrel_norm
from kestrel_runtime.testing import assert_close_to_f64

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (0, 1, 3, 16, 257)
SIZES = (1, 7, 8, 66, 896, 1152, 2048)


def rows_of(t: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * t + n)
    return (torch.randn(t, n, generator=generator) * 3 + 1).to(dtype)


def assert_accurate(got: torch.Tensor, exact: torch.Tensor, baseline: torch.Tensor) -> None:
    """At least as accurate as torch; float32, where luck decides single elements, by the norm of many rows' errors."""
    if got.dtype != torch.float32:
        assert_close_to_f64(got, exact, baseline)
    elif len(got) > 100:
        assert (got - exact).norm() <= 1.1 * (baseline - exact).norm()
    torch.testing.assert_close(got, exact.to(got.dtype), rtol=4 * torch.finfo(got.dtype).eps, atol=1e-6)


def vector_of(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """A loop over rows in float64."""
    y = torch.empty(x.shape, dtype=torch.float64)
    for row, target in zip(x.double().reshape(-1, x.shape[-1]), y.view(-1, x.shape[-1]), strict=True):
        mean = row.sum() / len(row)
        variance = ((row - mean) ** 2).sum() / len(row)
        target.copy_((row - mean) / (variance + eps).sqrt())
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_bias: float = 0.0) -> torch.Tensor:
    """A loop over rows in float64."""
    y = torch.empty(x.shape, dtype=torch.float64)
    for row, target in zip(x.double().reshape(-1, x.shape[-1]), y.view(-1, x.shape[-1]), strict=True):
        target.copy_(row / ((row * row).sum() / len(row) + eps).sqrt())
    return y if weight is None else y * (weight.double() + weight_bias)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_layer_norm_is_as_accurate_as_torch(n: int, dtype: torch.dtype) -> None:
    for t in ROWS:
        x, weight, bias = rows_of(t, n, dtype), vector_of(n, dtype, 1), vector_of(n, dtype, 2)
        got = kestrel_norm.layer_norm(x, weight, bias)
        baseline = torch.nn.functional.layer_norm(x, (n,), weight, bias)
        assert_accurate(got, exact_layer_norm(x, weight, bias, 1e-5), baseline)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_is_as_accurate_as_torch(n: int, dtype: torch.dtype) -> None:
    for t in ROWS:
        x, weight = rows_of(t, n, dtype), vector_of(n, dtype, 1)
        got = kestrel_norm.rms_norm(x, weight)
        baseline = torch.nn.functional.rms_norm(x, (n,), weight, 1e-6)
        assert_accurate(got, exact_rms_norm(x, weight, 1e-6), baseline)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_weight_and_bias_the_row_is_only_normalised(dtype: torch.dtype) -> None:
    x = rows_of(16, 1152, dtype)
    torch.testing.assert_close(kestrel_norm.layer_norm(x), torch.nn.functional.layer_norm(x, (1152,)))
    torch.testing.assert_close(kestrel_norm.rms_norm(x), torch.nn.functional.rms_norm(x, (1152,), eps=1e-6))
    assert torch.equal(kestrel_norm.rms_norm(x, weight_bias=1.0), kestrel_norm.rms_norm(x))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weight_bias_is_added_in_float32(weight_dtype: torch.dtype) -> None:
    x, weight = rows_of(16, 2048, torch.bfloat16), (vector_of(2048, torch.float32, 1) * 1e-3).to(weight_dtype)
    got = kestrel_norm.rms_norm(x, weight, weight_bias=1.0)
    exact = exact_rms_norm(x, weight, 1e-6, 1.0)
    assert_close_to_f64(got, exact, exact.float().to(torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_fused_add_norms_the_rounded_sum(n: int, dtype: torch.dtype) -> None:
    for t in ROWS:
        x, residual, weight = rows_of(t, n, dtype), rows_of(t, n, dtype, seed=9), vector_of(n, dtype, 1)
        want_residual = (x.double() + residual.double()).to(dtype)
        exact = exact_rms_norm(want_residual, weight, 1e-6)
        baseline = torch.nn.functional.rms_norm(want_residual, (n,), weight, 1e-6)
        assert kestrel_norm.fused_add_rms_norm(x, residual, weight) is None
        assert torch.equal(residual, want_residual)
        assert_accurate(x, exact, baseline)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_fused_add_layer_norm_norms_the_rounded_sum(n: int, dtype: torch.dtype) -> None:
    for t in ROWS:
        x, residual = rows_of(t, n, dtype), rows_of(t, n, dtype, seed=9)
        weight, bias = vector_of(n, dtype, 1), vector_of(n, dtype, 2)
        want_residual = (x.double() + residual.double()).to(dtype)
        exact = exact_layer_norm(want_residual, weight, bias, 1e-5)
        baseline = torch.nn.functional.layer_norm(want_residual, (n,), weight, bias)
        assert kestrel_norm.fused_add_layer_norm(x, residual, weight, bias) is None
        assert torch.equal(residual, want_residual)
        assert_accurate(x, exact, baseline)


@pytest.mark.parametrize("value", [1e4, 1e-7, 0.0], ids=["large", "denormal in fp16", "zero"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_tiny_and_equal_rows(value: float, dtype: torch.dtype) -> None:
    equal = torch.full((2, 64), value).to(dtype)
    mixed = (rows_of(2, 64, torch.float32) * value).clamp(-6e4, 6e4).to(dtype)
    for x in (equal, mixed):
        got = kestrel_norm.layer_norm(x)
        assert_accurate(got, exact_layer_norm(x, None, None, 1e-5), torch.nn.functional.layer_norm(x, (64,)))
        got = kestrel_norm.rms_norm(x)
        assert_accurate(got, exact_rms_norm(x, None, 1e-6), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
    assert kestrel_norm.layer_norm(equal).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(bad: float) -> None:
    x = rows_of(3, 64, torch.bfloat16)
    x[1, 5] = bad
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        got = op(x)
        assert torch.equal(got[0], op(x[:1])[0])
        assert torch.equal(got[2], op(x[2:])[0])
        assert got[1].isnan().any()


VIEWS = {
    "columns of a wider buffer": lambda: torch.randn(6, 100)[:, 11:75],
    "every second row": lambda: torch.randn(12, 64)[::2],
    "transposed leading dimensions": lambda: torch.randn(4, 5, 64).transpose(0, 1),
    "heads of a packed projection": lambda: torch.randn(2, 3, 5, 192)[..., 64:128].transpose(1, 2),
    "one row repeated": lambda: torch.randn(1, 64).expand(7, 64),
}


@pytest.mark.parametrize("view", VIEWS)
def test_only_the_last_dimension_needs_to_be_contiguous(view: str) -> None:
    x = VIEWS[view]()
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        got = op(x)
        assert got.is_contiguous()
        assert torch.equal(got, op(x.contiguous()))


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "one row repeated"])
def test_in_place_ops_write_where_views_stand(view: str) -> None:
    for op in (kestrel_norm.fused_add_rms_norm, kestrel_norm.fused_add_layer_norm):
        x, residual = VIEWS[view](), VIEWS[view]()
        dense = x.contiguous().clone(), residual.contiguous().clone()
        op(x, residual)
        op(*dense)
        assert torch.equal(x, dense[0])
        assert torch.equal(residual, dense[1])


def test_out_is_returned_and_may_be_the_input() -> None:
    x = rows_of(16, 64, torch.bfloat16)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        want, wide = op(x), torch.zeros(16, 100, dtype=torch.bfloat16)
        out = wide[:, 7:71]
        assert op(x, out=out) is out
        assert torch.equal(out, want)
        assert not wide[:, :7].any()
        assert not wide[:, 71:].any()
        alias = x.clone()
        assert op(alias, out=alias) is alias
        assert torch.equal(alias, want)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def fused_add_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op on copies, with a residual that is a function of x."""
    y, residual = x.clone(), x / 3
    kestrel_norm.fused_add_rms_norm(y, residual, weight)
    return torch.stack((y, residual), dim=-2)


@pytest.mark.usefixtures("two_threads")  # torch splits a sum to a single number across threads from 32768 terms on
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [7, 1152, 40000])
def test_a_row_does_not_depend_on_its_batch(n: int, dtype: torch.dtype) -> None:
    x, weight = rows_of(37, n, dtype), vector_of(n, dtype, 1)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm, fused_add_rms_norm):
        whole = op(x, weight)
        for row in (0, 5, 36):
            assert torch.equal(whole[row], op(x[row : row + 1], weight)[0])
            assert torch.equal(whole[row], op(x[row].view(1, 1, n), weight)[0, 0])
