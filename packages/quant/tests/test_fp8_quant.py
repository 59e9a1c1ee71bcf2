"""fp8_quant and fp8_dequant against a search over all 256 codes and against NumPy's scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kestrel_quant import fp8_dequant, fp8_quant
from kestrel_runtime.testing import poison

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def nearest_codes(x: np.ndarray) -> np.ndarray:
    """The FP8 codes nearest to float32 values, ties to the even code, saturating: by trying every finite code."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()  # 0 to 448, ascending
    distance = np.abs(np.abs(x.astype(np.float64))[..., None] - values)
    distance[np.isposinf(distance).all(-1)] = -values  # inf: the largest is nearest
    nearest = distance == distance.min(-1, keepdims=True)
    code = np.where(nearest.sum(-1) == 2, (nearest * (np.arange(127) % 2 == 0)).argmax(-1), nearest.argmax(-1))
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def scale_of(amax: np.ndarray, bound: float = np.inf) -> np.ndarray:
    return (np.maximum(np.minimum(amax, np.float32(bound)), np.float32(1e-12)) / np.float32(448)).astype(np.float32)


def codes_of(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def sample(tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator) * torch.logspace(-3, 3, max(tokens, 1))[:tokens, None]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 128), (5, 300)])
def test_rows_get_their_own_scale_and_the_nearest_code(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = sample(*shape, dtype)
    q, scale = fp8_quant(x)
    values = x.float().numpy()
    expected = scale_of(np.abs(values).max(1, keepdims=True))
    assert scale.dtype == torch.float32
    assert q.dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(codes_of(q), nearest_codes(values / expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_gets_one_scale(dtype: torch.dtype) -> None:
    x = sample(5, 96, dtype)
    q, scale = fp8_quant(x, granularity="tensor")
    expected = scale_of(np.abs(x.float().numpy()).max().reshape(1))
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(codes_of(q), nearest_codes(x.float().numpy() / expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "group"), [(256, 128), (300, 128), (64, 128), (30, 7), (5, 1)])
def test_groups_of_columns_get_their_own_scale(width: int, group: int, dtype: torch.dtype) -> None:
    x = sample(3, width, dtype)
    q, scale = fp8_quant(x, granularity="group", group_size=group)
    for g, start in enumerate(range(0, width, group)):
        part = x[:, start : start + group].float().numpy()
        expected = scale_of(np.abs(part).max(1, keepdims=True))
        np.testing.assert_array_equal(scale[:, g : g + 1].numpy(), expected)
        np.testing.assert_array_equal(codes_of(q[:, start : start + group]), nearest_codes(part / expected))
    assert scale.shape == (3, -(-width // group))


@pytest.mark.parametrize("tokens", [1, 3, 4, 16])
def test_column_major_scales_have_the_strides_a_gemm_reads(tokens: int) -> None:
    x = sample(tokens, 300, torch.bfloat16)
    q, scale = fp8_quant(x, granularity="group")
    q_column, scale_column = fp8_quant(x, granularity="group", column_major_scales=True)
    assert torch.equal(scale, scale_column)
    assert torch.equal(q.view(torch.uint8), q_column.view(torch.uint8))
    assert scale_column.stride() == (1, -(-tokens // 4) * 4)


def test_an_upper_bound_saturates_what_is_above_it() -> None:
    x = torch.tensor([[1.0, 100.0], [1.0, 2.0]])
    q, scale = fp8_quant(x, scale_ub=torch.tensor([4.0]))
    np.testing.assert_array_equal(scale.numpy(), scale_of(np.float32([[100.0], [2.0]]), 4.0))
    assert q.float().tolist() == [[112.0, 448.0], [224.0, 448.0]]


@pytest.mark.parametrize("shape", [(1,), (3, 1)])
def test_a_given_scale_is_used_and_returned_as_it_is(shape: tuple[int, ...]) -> None:
    x = sample(3, 50, torch.float16)
    scale = torch.rand(shape) + 0.1
    q, returned = fp8_quant(x, scale)
    assert returned is scale
    np.testing.assert_array_equal(codes_of(q), nearest_codes(x.float().numpy() / scale.numpy()))


@pytest.mark.parametrize("given", [True, False])
def test_codes_are_rounded_quotients(given: bool) -> None:
    """The scale of row s is s; 17 s and 19 s are half way between codes, which a product with 1 / s misses."""
    scales = torch.arange(1.0, 4097.0)[:, None]
    x = scales * torch.tensor([[448.0, 17.0, -19.0]])  # whole numbers below 2^24
    q, scale = fp8_quant(x, scales) if given else fp8_quant(x)
    assert torch.equal(scale, scales)
    assert torch.equal(q.float(), torch.tensor([[448.0, 16.0, -20.0]]).expand(4096, 3))


@pytest.mark.parametrize("granularity", ["row", "tensor", "group"])
def test_a_tensor_of_zeros_gives_zeros_and_a_finite_scale(granularity: str) -> None:
    q, scale = fp8_quant(torch.zeros(3, 130), granularity=granularity)  # type: ignore[arg-type]
    assert not codes_of(q).any()
    assert bool((scale.isfinite() & (scale > 0)).all())


@pytest.mark.parametrize("granularity", ["row", "tensor", "group"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_keep_to_themselves(granularity: str, dtype: torch.dtype) -> None:
    x = sample(4, 140, dtype)
    broken = x.clone()
    largest = int(x.float().abs().argmax())
    positions = [p for p in (3, 150, 290) if p != largest]
    broken.view(-1)[positions[0]], broken.view(-1)[positions[1]] = torch.nan, torch.inf
    broken.view(-1)[positions[2]] = -torch.inf
    cleaned = torch.where(broken.isfinite(), broken, 0.0)
    q, scale = fp8_quant(broken, granularity=granularity)  # type: ignore[arg-type]
    q_clean, scale_clean = fp8_quant(cleaned, granularity=granularity)  # type: ignore[arg-type]
    assert torch.equal(scale, scale_clean)
    flat, flat_clean = codes_of(q).reshape(-1), codes_of(q_clean).reshape(-1)
    assert flat[positions].tolist() == [0x7F, 0x7E, 0xFE]
    untouched = np.setdiff1d(np.arange(flat.size), positions)
    np.testing.assert_array_equal(flat[untouched], flat_clean[untouched])


def test_denormals_and_large_magnitudes() -> None:
    x = torch.tensor([[1e-40, -1e-41], [1e4, -3.0], [3e38, 1e38], [2.0, 2.0]])
    q, scale = fp8_quant(x)
    expected = scale_of(x.abs().amax(1, keepdim=True).numpy())
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(codes_of(q), nearest_codes(x.numpy() / expected))


@pytest.mark.parametrize("tokens", [3, 16, 257, 740, 4096])
def test_a_row_does_not_depend_on_its_batch(tokens: int) -> None:
    x = sample(tokens, 72, torch.bfloat16)
    q, scale = fp8_quant(x)
    for row in (0, tokens // 2, tokens - 1):
        q_row, scale_row = fp8_quant(x[row : row + 1])
        assert torch.equal(scale[row], scale_row[0])
        np.testing.assert_array_equal(codes_of(q[row]), codes_of(q_row[0]))


def test_views_into_wider_buffers_give_the_same_and_leave_the_input_alone() -> None:
    buffer = sample(12, 200, torch.bfloat16)
    before = buffer.clone()
    view = buffer[1::2, 40:140]
    for options in ({}, {"granularity": "tensor"}, {"granularity": "group", "group_size": 32}):
        q, scale = fp8_quant(view, **options)
        q_copy, scale_copy = fp8_quant(view.clone(), **options)
        assert torch.equal(scale, scale_copy)
        np.testing.assert_array_equal(codes_of(q), codes_of(q_copy))
        assert q.is_contiguous()
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(("granularity", "shape"), [("row", (0, 1)), ("tensor", (1,)), ("group", (0, 2))])
def test_no_rows_give_no_rows(granularity: str, shape: tuple[int, ...]) -> None:
    q, scale = fp8_quant(torch.empty(0, 140), granularity=granularity)  # type: ignore[arg-type]
    assert q.shape == (0, 140)
    assert scale.shape == shape
    assert fp8_dequant(q, scale).shape == (0, 140)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}, {"granularity": "group", "group_size": 48}])
def test_dequantising_comes_within_half_a_step(options: dict, dtype: torch.dtype) -> None:
    x = sample(4, 100, torch.float32) / 100
    q, scale = fp8_quant(x, **options)
    back = fp8_dequant(q, scale, group_size=options.get("group_size", 128), dtype=dtype)
    spread = scale.repeat_interleave(48, 1)[:, :100] if "group_size" in options else scale
    exact = (q.double() * spread.double()).float()
    # q.double() * scale is exact, and so is its rounding to float32: 4 + 24 bits; then one rounding to dtype
    assert torch.equal(back, exact.to(dtype))
    # e4m3 has 3 mantissa bits (relative error 2^-4) and denormals in steps of 2^-9 (half of it, times the scale)
    bound = torch.maximum(x.abs() * 2.0**-4, spread * 2.0**-10) * (1 + 2.0**-20)
    assert bool(((exact - x).abs() <= bound).all())


def test_dequantising_reads_scales_of_any_stride_and_fills_out() -> None:
    x = sample(5, 300, torch.float32)
    q, scale = fp8_quant(x, granularity="group", column_major_scales=True)
    expected = fp8_dequant(q, scale.contiguous(), dtype=torch.float16)
    buffer = poison((5, 400), torch.float16)
    result = fp8_dequant(q, scale, dtype=torch.float16, out=buffer[:, 50:350])
    assert result.data_ptr() == buffer[:, 50:].data_ptr()
    assert torch.equal(buffer[:, 50:350], expected)
    assert bool(buffer[:, :50].isnan().all())
    assert bool(buffer[:, 350:].isnan().all())


def test_the_code_nan_dequantises_to_nan() -> None:
    q = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    back = fp8_dequant(q, torch.ones(1), dtype=torch.float32)
    assert back.isnan().tolist() == [[True, True, False]]
    assert back[0, 2] == 1.0
