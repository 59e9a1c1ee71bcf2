"""int8 and int4 quantisation against Python's own round() on exact quotients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kestrel_quant import int4_dequant, int4_quant, int8_dequant, int8_quant
from kestrel_runtime.testing import poison

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def codes_by_hand(values: np.ndarray, scale: np.float32, largest: int) -> list[int]:
    """round() rounds half to even; the quotient is the float32 one."""
    quotients = (values.astype(np.float32) / scale).tolist()
    return [max(-largest, min(largest, round(q))) for q in quotients]


def scale_by_hand(values: np.ndarray, largest: int) -> np.float32:
    scale = np.float32(np.abs(values).max()) / np.float32(largest)
    return scale if scale > 0 else np.float32(1)


def nibbles(q: torch.Tensor) -> list[list[int]]:
    """Two's complement codes of each row, even columns in the low nibble."""
    rows = []
    for row in q.tolist():
        flat = [nibble for byte in row for nibble in (byte % 16, byte // 16)]
        rows.append([code - 16 if code > 7 else code for code in flat])
    return rows


def sample(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(tokens, width, generator=generator) * torch.logspace(-3, 3, max(tokens, 1))[:tokens, None]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 128), (5, 301)])
def test_int8_rows_and_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = sample(*shape, dtype)
    values = x.float().numpy()
    q, scale = int8_quant(x)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (shape[0], 1))
    for row in range(shape[0]):
        expected = scale_by_hand(values[row], 127)
        assert scale[row].item() == expected
        assert q[row].tolist() == codes_by_hand(values[row], expected, 127)
    q, scale = int8_quant(x, granularity="tensor")
    expected = scale_by_hand(values, 127)
    assert scale.tolist() == [expected]
    assert q.flatten().tolist() == codes_by_hand(values.ravel(), expected, 127)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "group"), [(2, 128), (256, 128), (300, 128), (30, 7), (12, 1)])
def test_int4_groups(width: int, group: int, dtype: torch.dtype) -> None:
    x = sample(4, width, dtype)
    values = x.float().numpy()
    q, scale = int4_quant(x, group_size=group)
    assert (q.dtype, q.shape) == (torch.uint8, (4, width // 2))
    assert scale.shape == (4, math.ceil(width / group))
    codes = nibbles(q)
    for row in range(4):
        for g, start in enumerate(range(0, width, group)):
            part = values[row, start : start + group]
            expected = scale_by_hand(part, 7)
            assert scale[row, g].item() == expected
            assert codes[row][start : start + group] == codes_by_hand(part, expected, 7)


def test_halves_round_to_even() -> None:
    q, scale = int8_quant(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert scale.item() == 1.0
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_scales_that_vanish_become_one(value: float) -> None:
    x = torch.full((2, 6), value)
    for q, scale in (int8_quant(x), int8_quant(x, granularity="tensor"), int4_quant(x)):
        assert not q.any()
        assert bool((scale == 1).all())


def with_nan_and_inf(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with NaN and inf, none of them the largest finite number of its row; and the same rows with 0 there."""
    x = sample(3, 20, dtype)
    x[:, 0] = 2 * x.float().abs().amax().to(dtype)
    x[0, 3], x[1, 4], x[1, 5] = math.nan, math.inf, -math.inf
    return x, torch.where(x.isfinite(), x, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_int8_of_nan_is_zero_and_inf_saturates_without_changing_the_scale(granularity: str, dtype: torch.dtype) -> None:
    broken, cleaned = with_nan_and_inf(dtype)
    q, scale = int8_quant(broken, granularity=granularity)
    q_clean, scale_clean = int8_quant(cleaned, granularity=granularity)
    q_clean[1, 4], q_clean[1, 5] = 127, -127
    assert torch.equal(scale, scale_clean)
    assert torch.equal(q, q_clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_of_nan_is_zero_and_inf_saturates_without_changing_the_scale(dtype: torch.dtype) -> None:
    broken, cleaned = with_nan_and_inf(dtype)
    assert torch.equal(int4_quant(broken)[1], int4_quant(cleaned)[1])
    codes, clean = nibbles(int4_quant(broken)[0]), nibbles(int4_quant(cleaned)[0])
    clean[1][4], clean[1][5] = 7, -7
    assert codes == clean


@pytest.mark.parametrize("tokens", [3, 257, 4096])
@pytest.mark.parametrize("op", [int8_quant, lambda x: int4_quant(x, group_size=32)], ids=["int8", "int4"])
def test_a_row_does_not_depend_on_its_batch(
    op: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], tokens: int
) -> None:
    x = sample(tokens, 72, torch.bfloat16)
    together = op(x)
    for row in (0, tokens - 1):
        for got, alone in zip(together, op(x[row : row + 1]), strict=True):
            assert torch.equal(got[row], alone[0]), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantising_is_one_product_rounded_once(dtype: torch.dtype) -> None:
    x = sample(4, 100, torch.float32)
    q, scale = int8_quant(x)
    exact = q.double() * scale.double()
    torch.testing.assert_close(exact, x.double(), rtol=0, atol=scale.max().item() * 0.5001)
    assert torch.equal(int8_dequant(q, scale, dtype=dtype), exact.float().to(dtype))
    q, scale = int4_quant(x, group_size=48)
    exact = torch.tensor(nibbles(q)).double() * scale.double().repeat_interleave(48, 1)[:, :100]
    assert bool(((exact - x).abs() <= scale.repeat_interleave(48, 1)[:, :100] * 0.5001).all())
    assert torch.equal(int4_dequant(q, scale, group_size=48, dtype=dtype), exact.float().to(dtype))


def test_every_int4_code_has_its_value() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, -1)
    values = int4_dequant(packed, torch.full((1, 4), 0.5), dtype=torch.float32)
    assert (values * 2).int().tolist() == nibbles(packed)


def test_views_out_no_rows_and_untouched_inputs() -> None:
    buffer = sample(12, 200, torch.float16)
    before = buffer.clone()
    view = buffer[1::2, 40:140]
    for op in (int8_quant, int4_quant):
        for got, expected in zip(op(view), op(view.clone()), strict=True):
            assert torch.equal(got, expected)
            assert got.is_contiguous()
        assert op(view[:0])[0].shape[0] == 0
    assert torch.equal(buffer, before)
    q, scale = int4_quant(view)
    out = poison((6, 120), torch.float32)
    int4_dequant(q, scale, dtype=torch.float32, out=out[:, 10:110])
    assert torch.equal(out[:, 10:110], int4_dequant(q, scale, dtype=torch.float32))
    assert bool(out[:, :10].isnan().all() and out[:, 110:].isnan().all())
    q, scale = int8_quant(view, granularity="tensor")
    assert torch.equal(int8_dequant(q, scale, out=out.bfloat16()[:, :100]), int8_dequant(q, scale))
