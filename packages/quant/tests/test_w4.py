"""4-bit weights: packing, the linear layer, and checkpoints in GPTQ's and AWQ's layouts made by hand."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F

from kestrel_quant import W4Weight, pack_w4, w4_from_awq, w4_from_gptq, w4a16_linear
from kestrel_runtime import UnsupportedError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "group"), [(128, 128), (256, 128), (64, 32), (12, 4), (6, 2)])
def test_each_group_is_rounded_to_multiples_of_its_scale(columns: int, group: int, dtype: torch.dtype) -> None:
    original = weight(5, columns, dtype)
    packed = pack_w4(original, group)
    assert packed.shape == (5, columns)
    assert packed.dtype == dtype
    back = packed.dequantize()
    assert back.dtype == dtype
    for row in range(5):
        for start in range(0, columns, group):
            part = original[row, start : start + group]
            scale = (part.float().abs().max() / 7).to(dtype).float().item()
            expected = [max(-7, min(7, round(v))) * scale for v in (part.float() / scale).tolist()]
            assert back[row, start : start + group].tolist() == torch.tensor(expected).to(dtype).tolist()


def test_a_group_of_zeros_stays_zero() -> None:
    original = weight(2, 8, torch.float32)
    original[0, 4:] = 0
    assert pack_w4(original, 4).dequantize()[0, 4:].tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 64, 257])
def test_linear_is_the_product_with_the_exact_weight(tokens: int, with_bias: bool, dtype: torch.dtype) -> None:
    packed = pack_w4(weight(48, 256, dtype), 64)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    bias = torch.randn(48).to(dtype) if with_bias else None
    codes = torch.stack((packed.codes % 16, packed.codes // 16), -1).flatten(1).double()
    exact_weight = torch.where(codes > 7, codes - 16, codes) * packed.scales.double().repeat_interleave(64, 1)
    exact = F.linear(x.double(), exact_weight, None if bias is None else bias.double())
    got = w4a16_linear(x, packed, bias)
    assert got.dtype == dtype
    assert_rounded_sum(got, exact, x, exact_weight, bias)


def assert_rounded_sum(
    got: torch.Tensor, exact: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """A float32 sum of K products (and a bias), in any order, then one rounding to the dtype of the result.

    Each of the K products and K additions is off by 2^-24 of a partial sum, and no partial sum exceeds the sum of the
    magnitudes: together less than (2 K + 1) 2^-24 (|x| |w|' + |bias|). The last rounding adds half a unit in the last
    place of what it rounds.
    """
    magnitude = F.linear(x.double().abs(), weight.abs(), None if bias is None else bias.double().abs())
    sum_error = (2 * weight.shape[1] + 1) * 2.0**-24 * magnitude
    rounding = 0.5 * torch.finfo(got.dtype).eps * (exact.abs() + sum_error) + torch.finfo(got.dtype).tiny
    excess = (got.double() - exact).abs() - (sum_error + rounding)
    assert not bool((excess > 0).any()), f"off by {float(excess.max())} more than the bound"


def test_linear_takes_leading_dimensions_views_and_out() -> None:
    packed = pack_w4(weight(24, 32, torch.bfloat16), 16)
    x = torch.randn(6, 32).bfloat16()
    expected = w4a16_linear(x, packed)
    wide = torch.randn(2, 3, 50).bfloat16()
    wide[..., 7:39] = x.view(2, 3, 32)
    assert torch.equal(w4a16_linear(wide[..., 7:39], packed).view(6, 24), expected)
    assert torch.equal(w4a16_linear(x[0], packed), w4a16_linear(x[:1], packed)[0])
    out = torch.full((6, 30), math.nan).bfloat16()
    assert w4a16_linear(x, packed, out=out[:, 3:27]).data_ptr() == out[:, 3:].data_ptr()
    assert torch.equal(out[:, 3:27], expected)
    assert bool(out[:, :3].isnan().all() and out[:, 27:].isnan().all())


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 40, 257])
def test_at_one_number_of_rows_a_row_does_not_depend_on_the_others(tokens: int) -> None:
    w = pack_w4(weight(96, 128, torch.float32), 64)
    x = torch.randn(tokens, 128)
    expected = w4a16_linear(x, w)
    for row in {0, tokens // 2, tokens - 1}:
        others = torch.randn_like(x)
        others[row] = x[row]
        assert torch.equal(w4a16_linear(others, w)[row], expected[row])


def test_a_packed_weight_is_frozen_and_moves() -> None:
    packed = pack_w4(weight(4, 8, torch.float32), 4)
    with pytest.raises(FrozenInstanceError):
        packed.group_size = 8  # type: ignore[misc]
    moved = packed.to("meta")
    assert isinstance(moved, W4Weight)
    assert moved.device.type == "meta"
    assert moved.shape == packed.shape


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def word(nibbles: list[int]) -> int:
    """Eight nibbles, lowest first, as a signed 32-bit word."""
    value = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    return value - 2**32 if value >= 2**31 else value


def checkpoint(
    columns: int, rows: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [K, N], scales [K/G, N] and the weight [N, K] they stand for."""
    g = torch.Generator().manual_seed(columns + rows)
    codes = torch.randint(0, 16, (columns, rows), generator=g)
    scales = (torch.rand(columns // group, rows, generator=g) + 0.5).to(dtype)
    return codes, scales, ((codes - 8) * scales.double().repeat_interleave(group, 0)).t()


def gptq_words(codes: torch.Tensor) -> torch.Tensor:
    columns, rows = codes.shape
    return torch.tensor(
        [[word(codes[start : start + 8, n].tolist()) for n in range(rows)] for start in range(0, columns, 8)],
        dtype=torch.int32,
    )


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return torch.tensor(
        [[word([row[start + i] for i in order]) for start in range(0, len(row), 8)] for row in codes.tolist()],
        dtype=torch.int32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", ["none", "gptq", "gptq_v2"])
def test_gptq_checkpoints_keep_their_values(version: str, dtype: torch.dtype) -> None:
    codes, scales, exact = checkpoint(64, 24, 16, dtype)
    zero = 7 if version == "gptq" else 8  # the older format stores zero points less one
    options = {} if version == "none" else {"checkpoint_format": version}
    qzeros = None if version == "none" else torch.full((4, 3), word([zero] * 8), dtype=torch.int32)
    packed = w4_from_gptq(gptq_words(codes), scales, qzeros, torch.arange(64) // 16, **options)  # type: ignore[arg-type]
    assert packed.shape == (24, 64)
    assert packed.group_size == 16
    assert torch.equal(packed.dequantize(), exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_awq_checkpoints_keep_their_values(dtype: torch.dtype) -> None:
    codes, scales, exact = checkpoint(48, 32, 16, dtype)
    packed = w4_from_awq(awq_words(codes), scales, torch.full((3, 4), word([8] * 8), dtype=torch.int32))
    assert packed.shape == (32, 48)
    assert torch.equal(packed.dequantize(), exact.to(dtype))


def test_a_converted_checkpoint_multiplies_like_its_weight_in_another_dtype() -> None:
    codes, scales, exact = checkpoint(64, 24, 32, torch.float16)
    packed = w4_from_gptq(gptq_words(codes), scales, dtype=torch.float32)
    x = torch.randn(5, 64)
    assert_rounded_sum(w4a16_linear(x, packed), x.double() @ exact.T, x, exact)


def test_asymmetric_zero_points_and_activation_order_are_unsupported() -> None:
    codes, scales, _ = checkpoint(32, 16, 16, torch.float16)
    zeros = torch.full((2, 2), word([8] * 8), dtype=torch.int32)
    zeros[1, 1] = word([8, 8, 8, 9, 8, 8, 8, 8])
    with pytest.raises(UnsupportedError, match="qzeros"):
        w4_from_awq(awq_words(codes), scales, zeros)
    with pytest.raises(UnsupportedError, match="qzeros"):
        w4_from_gptq(gptq_words(codes), scales, zeros, checkpoint_format="gptq_v2")
    with pytest.raises(UnsupportedError, match="g_idx"):
        w4_from_gptq(gptq_words(codes), scales, None, torch.arange(32).flip(0) // 16)
