"""4-bit weights: packing, the linear layer, and checkpoints packed with the formulas of their libraries."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from kestrel_quant import (
    W4Weight,
    pack_w4,
    w4_from_awq,
    w4_from_compressed_tensors,
    w4_from_gptq,
    w4a16_linear,
    w4a16_token,
)
from kestrel_quant._w4_layout import pack_codes, unpack_codes
from kestrel_quant.w4a16 import _w4a16_linear, from_codes

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "group"), [(128, 128), (64, 32), (6, 2)])
def test_an_asymmetric_group_spans_its_values_and_zero(columns: int, group: int, dtype: torch.dtype) -> None:
    original = weight(5, columns, dtype) + 0.02
    original[1], original[2] = original[1].abs(), -original[2].abs()  # groups on one side of zero
    packed = pack_w4(original, group, symmetric=False)
    assert packed.zeros is not None
    assert all(part.is_contiguous() for part in (packed.codes, packed.scales, packed.zeros))  # as kernels read them
    back = packed.dequantize()
    for row in range(5):
        for at, start in enumerate(range(0, columns, group)):
            part = original[row, start : start + group].float()
            scale = packed.scales[at, row].item()
            width = part.max().clamp(min=0).item() - part.min().clamp(max=0).item()
            assert scale == pytest.approx(width / 15, rel=2 * torch.finfo(dtype).eps)
            zero = max(0, min(15, round(-part.min().clamp(max=0).item() / scale)))
            assert packed.zeros[at, row].item() == zero
            codes = [max(0, min(15, round(v) + zero)) for v in (part / scale).tolist()]
            expected = torch.tensor([(code - zero) * scale for code in codes]).to(dtype)
            assert torch.equal(back[row, start : start + group], expected)


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (5, 12), (40, 200)])
def test_packed_codes_are_fragments_of_sixteen_rows_and_eight_columns(rows: int, columns: int) -> None:
    codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(0))
    words = pack_codes(codes)
    assert torch.equal(unpack_codes(words, rows, columns), codes.to(torch.uint8))
    unsigned = (words.long() & 0xFFFFFFFF).tolist()
    padded = F.pad(codes, (0, -columns % 64, 0, -rows % 16)).tolist()  # what completes a block is 0
    for row in range(len(padded)):
        for column in range(len(padded[0])):
            r, g = divmod(row % 16, 8)
            j, p, q, e = (column // 16 % 4, column // 8 % 2, column // 2 % 4, column % 2)
            word = unsigned[row // 16][column // 64][4 * g + q][j]
            bit = 4 * (4 * e + 2 * p + r) + 3  # of a word that continues with itself
            assert (word | word << 32) >> bit & 15 == padded[row][column]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_has_the_scale_0(symmetric: bool, dtype: torch.dtype) -> None:
    original = weight(3, 8, dtype)
    original[0, 4:] = 0
    original[1, 4:] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # a group whose scale rounds to 0
    packed = pack_w4(original, 4, symmetric=symmetric)
    assert (packed.zeros is None) == symmetric  # 0 is no extreme scale of bf16
    assert packed.scales[1].tolist() == [0.0, 0.0, pytest.approx(packed.scales[1, 2].item())]
    assert packed.scales[1, 2] > 0
    for row in range(2):
        assert packed.dequantize()[row, 4:].tolist() == [0.0] * 4
    assert torch.equal(packed.dequantize()[:, :4], pack_w4(original[:, :4], 4, symmetric=symmetric).dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_zeros_give_the_bias_alone(symmetric: bool, dtype: torch.dtype) -> None:
    packed, bias = pack_w4(torch.zeros(16, 64, dtype=dtype), 32, symmetric=symmetric), torch.randn(16).to(dtype)
    x = (torch.randn(2, 64) * torch.pow(10.0, torch.rand(2, 64) * 6 - 3)).to(dtype)
    for op in (w4a16_linear, w4a16_token):
        assert torch.equal(op(x, packed), torch.zeros(2, 16, dtype=dtype))
        assert torch.equal(op(x, packed, bias), bias.expand(2, 16))


def test_codes_are_rounded_half_to_even() -> None:
    original = torch.tensor([[14.0, 1.0, 3.0, -1.0, -3.0, 5.0]])  # in steps of 2: 7, and five ties
    assert pack_w4(original, 6).dequantize().tolist() == [[14.0, 0.0, 4.0, 0.0, -4.0, 4.0]]


@pytest.mark.parametrize(("exponent", "has_zeros"), [(-100, True), (-80, False), (30, False), (45, True)])
def test_symmetric_codes_with_extreme_scales_of_bf16_have_their_zero_points(exponent: int, has_zeros: bool) -> None:
    original = weight(5, 128, torch.bfloat16)
    packed, same = pack_w4(original * 2.0**exponent, 64), pack_w4(original, 64)
    assert (packed.zeros is not None) == has_zeros
    assert torch.equal(packed.dequantize(), same.dequantize() * 2.0**exponent)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 64, 257])
def test_linear_is_the_product_with_the_exact_weight(
    tokens: int, with_bias: bool, symmetric: bool, dtype: torch.dtype
) -> None:
    packed = pack_w4(weight(48, 256, dtype), 64, symmetric=symmetric)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    bias = torch.randn(48).to(dtype) if with_bias else None
    codes = unpack_codes(packed.codes, 48, 256).double()
    zeros = 8 if packed.zeros is None else packed.zeros.double().t().repeat_interleave(64, 1)
    exact_weight = (codes - zeros) * packed.scales.double().t().repeat_interleave(64, 1)
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
def test_every_part_of_a_weight_moves(permuted: bool, zeros: bool, device: str) -> None:
    parts = {"zeros": torch.randint(0, 16, (4, 2)) if zeros else None}
    parts["permutation"] = torch.tensor([3, 1, 2, 0, 7, 6, 5, 4]) if permuted else None
    packed = from_codes(torch.randint(0, 16, (4, 8)), torch.rand(4, 2), 4, **parts)
    moved = packed.to(device)
    assert (moved.shape, moved.group_size) == ((4, 8), 4)
    for name in ("codes", "scales", "zeros", "permutation"):
        old, new = getattr(packed, name), getattr(moved, name)
        assert (new is None) == (old is None), name
        if old is not None:
            assert (new.shape, new.dtype, new.device.type) == (old.shape, old.dtype, device), name
    if device == "cpu":
        assert torch.equal(moved.dequantize(), packed.dequantize())


def test_groups_have_128_columns_unless_told() -> None:
    assert pack_w4(weight(4, 256, torch.float32)).group_size == 128


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    broken = weight(4, 8, torch.float32)
    broken[3, 7] = value
    with pytest.raises(ValueError, match="pack_w4: argument 'weight': expected finite values"):
        pack_w4(broken, 4)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def word(nibbles: list[int]) -> int:
    """Eight nibbles, lowest first, as a signed 32-bit word."""
    value = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    return value - 2**32 if value >= 2**31 else value


def checkpoint(
    columns: int, rows: int, group: int, dtype: torch.dtype, zeros: str = "any"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [K, N], scales and zero points [K/G, N], as both libraries have them before they pack."""
    g = torch.Generator().manual_seed(columns + rows)
    codes = torch.randint(0, 16, (columns, rows), generator=g)
    scales = (torch.rand(columns // group, rows, generator=g) + 0.5).to(dtype)
    lowest, end = {"any": (1, 16), "zero too": (0, 16), "eight": (8, 9)}[zeros]
    return codes, scales, torch.randint(lowest, end, scales.shape, generator=g)


def gptq_words(codes: torch.Tensor) -> torch.Tensor:
    """QuantLinear.pack of AutoGPTQ 0.7: qweight[row] |= intweight[j] << (4 * (j - i)) over eight rows."""
    columns, rows = codes.shape
    return torch.tensor(
        [[word(codes[start : start + 8, n].tolist()) for n in range(rows)] for start in range(0, columns, 8)],
        dtype=torch.int32,
    )


def gptq_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """The same of qzeros[:, col] |= zeros[:, j] << (4 * (j - i)), over eight columns."""
    return gptq_words(zeros.t()).t().contiguous()


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """WQLinear_GEMM.from_linear of AutoAWQ 0.2: qweight[:, col] |= intweight[:, 8 * col + order_map[i]] << (4 * i)."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    return torch.tensor(
        [[word([row[start + i] for i in order_map]) for start in range(0, len(row), 8)] for row in codes.tolist()],
        dtype=torch.int32,
    )


def dequantised(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, g_idx: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [N, K] of both libraries, scales[g_idx] * (codes - zeros[g_idx]): in their dtype, and exactly."""
    in_dtype = scales[g_idx] * (codes - zeros[g_idx]).to(scales.dtype)
    return in_dtype.t(), (scales.double()[g_idx] * (codes - zeros[g_idx])).t()


GROUPS = [(64, 16), (128, 32), (128, 64), (256, 128), (96, 96)]  # K, G


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", ["none", "gptq", "gptq_v2"])
@pytest.mark.parametrize(("columns", "group"), GROUPS)
def test_gptq_checkpoints_keep_their_values(columns: int, group: int, version: str, dtype: torch.dtype) -> None:
    codes, scales, zeros = checkpoint(columns, 24, group, dtype, "eight" if version == "none" else "any")
    g_idx = torch.arange(columns) // group
    stored = zeros - int(version == "gptq")  # AutoGPTQ: zeros -= 1 before it packs them, zeros + 1 when it reads them
    options = {} if version == "none" else {"checkpoint_format": version}
    qzeros = None if version == "none" else gptq_zeros(stored)
    packed = w4_from_gptq(gptq_words(codes), scales, qzeros, g_idx, **options)  # type: ignore[arg-type]
    assert packed.shape == (24, columns)
    assert packed.permutation is None
    assert packed.group_size == group
    assert torch.equal(packed.dequantize(), dequantised(codes, scales, zeros, g_idx)[0])


@pytest.mark.parametrize("rows", [8, 16, 24])
def test_a_zero_point_of_zero_borrows_from_the_next_one(rows: int) -> None:
    """GPTQModel makes the older format of the newer one: qzeros -= 0x11111111, of whole words."""
    codes, scales, zeros = checkpoint(32, rows, 16, torch.float16, "zero too")
    zeros[0, :8] = torch.tensor([0, 0, 15, 0, 1, 8, 15, 0])
    zeros[1, :8] = torch.tensor([15, 7, 1, 1, 8, 2, 3, 1])
    words = (gptq_zeros(zeros).long() - 0x11111111 + 2**31) % 2**32 - 2**31  # of 32 bits
    packed = w4_from_gptq(gptq_words(codes), scales, words.int())
    assert torch.equal(packed.zeros, zeros.short())
    assert torch.equal(packed.dequantize(), dequantised(codes, scales, zeros, torch.arange(32) // 16)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", ["eight", "zero too"])
@pytest.mark.parametrize(("columns", "group"), GROUPS)
def test_awq_checkpoints_keep_their_values(columns: int, group: int, zeros: str, dtype: torch.dtype) -> None:
    codes, scales, points = checkpoint(columns, 32, group, dtype, zeros)
    packed = w4_from_awq(awq_words(codes), scales, awq_words(points))
    assert packed.shape == (32, columns)
    assert (packed.zeros is None) == (zeros == "eight")
    assert torch.equal(packed.dequantize(), dequantised(codes, scales, points, torch.arange(columns) // group)[0])


def compressed(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Codes and zero points 0..15, [K, N] and [K/G, N], as the tensors of pack-quantized compressed-tensors.

    pack_to_int32 adds 8 to values -8..7 and fills words from the lowest nibble on, along K and, of zero points, along
    N; what completes the last word is 0.
    """
    columns, rows = codes.shape
    parts = {"weight_packed": gptq_words(F.pad(codes, (0, 0, 0, -columns % 8))).t(), "weight_scale": scales.t()}
    if zeros is not None:
        parts["weight_zero_point"] = gptq_zeros(F.pad(zeros, (0, -rows % 8))).t()
    if g_idx is not None:
        parts["weight_g_idx"] = g_idx
    return {name: part.contiguous() for name, part in parts.items()} | {"weight_shape": torch.tensor([rows, columns])}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", ["none", "eight", "zero too"])
@pytest.mark.parametrize("rows", [9, 24])
@pytest.mark.parametrize(("columns", "group"), [*GROUPS, (20, 20), (36, 12)])
def test_compressed_tensors_keep_their_values(
    columns: int, group: int, rows: int, zeros: str, dtype: torch.dtype
) -> None:
    codes, scales, points = checkpoint(columns, rows, group, dtype, "eight" if zeros == "none" else zeros)
    packed = w4_from_compressed_tensors(**compressed(codes, scales, None if zeros == "none" else points))
    assert (packed.shape, packed.group_size) == ((rows, columns), group)
    assert (packed.zeros is None) == (zeros != "zero too")
    assert torch.equal(packed.dequantize(), dequantised(codes, scales, points, torch.arange(columns) // group)[0])


def test_words_that_compressed_tensors_packed_are_read() -> None:
    """Words that pack_to_int32 of compressed-tensors 0.20 made: of codes along K, of zero points along N."""
    codes, zeros = [-8, -7, -1, 0, 1, 5, 6, 7, 3, -2], [-7, 0, 5]
    words = torch.tensor([[-19298544, 107]] * 3, dtype=torch.int32)
    points, shape = torch.tensor([[3457]], dtype=torch.int32), torch.tensor([3, 10])
    packed = w4_from_compressed_tensors(words, torch.full((3, 1), 2.0), points, weight_shape=shape)
    assert packed.dequantize().tolist() == [[2.0 * (code - zero) for code in codes] for zero in zeros]


LIBRARIES = json.loads((Path(__file__).parent / "w4_libraries.json").read_text(encoding="utf-8"))["layers"]
PARTS = {"qweight": (torch.int32, (4, 32)), "scales": (torch.float16, (2, 32)), "qzeros": (torch.int32, (2, 4))}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_that_a_library_packed_has_the_weight_that_it_dequantises(library: str) -> None:
    """The libraries themselves made the file: 32 columns and rows in groups of 16, with zero points."""

    def read(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).view(shape)

    layer = LIBRARIES[library]
    parts = {name: read(text, *PARTS.get(name, (torch.int32, (32,)))) for name, text in layer["tensors"].items()}
    if layer["from"] == "awq":
        packed = w4_from_awq(**parts | {"qweight": parts["qweight"].view(32, 4)})
    else:
        packed = w4_from_gptq(**parts, checkpoint_format=layer["from"])
    assert torch.equal(packed.dequantize(), read(layer["dequantized"], torch.float16, (32, 32)).t())
    assert packed.group_size == 16
    assert (packed.permutation is None) == (library in ("AutoGPTQ 0.7.1", "AutoAWQ 0.2.9"))


@pytest.mark.parametrize("unset", [[-1] * 32, [*range(31), -1]])
def test_an_order_that_is_not_set_is_that_of_the_columns(unset: list[int]) -> None:
    codes, scales, zeros = checkpoint(32, 8, 16, torch.float16)
    packed = w4_from_compressed_tensors(**compressed(codes, scales, zeros, torch.tensor(unset)))
    assert packed.permutation is None
    assert torch.equal(packed.dequantize(), dequantised(codes, scales, zeros, torch.arange(32) // 16)[0])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("library", ["gptq", "compressed-tensors"])
def test_an_activation_order_is_kept_as_a_permutation(library: str, symmetric: bool) -> None:
    """GPTQ with desc_act: the columns keep their places, and g_idx names the group of each."""
    codes, scales, zeros = checkpoint(128, 24, 32, torch.bfloat16, "eight" if symmetric else "any")
    g_idx = (torch.randperm(128, generator=torch.Generator().manual_seed(1)) // 32).to(torch.int32)
    if library == "gptq":
        packed = w4_from_gptq(gptq_words(codes), scales, gptq_zeros(zeros - 1), g_idx)
    else:
        packed = w4_from_compressed_tensors(**compressed(codes, scales, None if symmetric else zeros, g_idx))
    in_dtype, exact = dequantised(codes, scales, zeros, g_idx.long())
    assert packed.permutation is not None
    assert torch.equal(packed.dequantize(), in_dtype)
    x = torch.randn(2, 5, 128).bfloat16()
    assert_rounded_sum(w4a16_linear(x, packed), x.double() @ exact.T, x, exact)
    out = torch.empty(2, 5, 24).bfloat16()
    assert w4a16_linear(x, packed, out=out) is out
    assert torch.equal(out, w4a16_linear(x, packed))
    moved = packed.to("meta")
    assert moved.permutation is not None
    assert moved.permutation.is_meta


def test_groups_of_unequal_sizes_are_named() -> None:
    codes, scales, _ = checkpoint(32, 16, 16, torch.float16)
    g_idx = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(ValueError, match="w4_from_gptq: argument 'g_idx': expected every group of 2 named 16 times"):
        w4_from_gptq(gptq_words(codes), scales, None, g_idx)


@pytest.mark.parametrize("rows", [9, 15, 17])
def test_zero_points_of_rows_that_do_not_fill_a_word_are_kept(rows: int) -> None:
    codes, scales, zeros = checkpoint(32, rows, 16, torch.float16)
    filled = F.pad(zeros, (0, -rows % 8), value=1)
    packed = w4_from_gptq(gptq_words(codes), scales, gptq_zeros(filled - 1))
    assert torch.equal(packed.dequantize(), dequantised(codes, scales, zeros, torch.arange(32) // 16)[0])


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_checkpoints_take_the_dtype_that_is_asked_for(dtype: torch.dtype | None) -> None:
    codes, scales, zeros = checkpoint(64, 24, 32, torch.float16)
    for packed in (
        w4_from_gptq(gptq_words(codes), scales, gptq_zeros(zeros - 1), dtype=dtype),
        w4_from_awq(awq_words(codes), scales, awq_words(zeros), dtype=dtype),
        w4_from_compressed_tensors(**compressed(codes, scales, zeros), dtype=dtype),
    ):
        assert packed.dtype == packed.dequantize().dtype == (dtype or torch.float16)


@pytest.mark.parametrize("groups", [1, 2])
def test_converted_weights_share_no_memory_with_their_checkpoint(groups: int) -> None:
    codes, scales, zeros = checkpoint(32, 16, 32 // groups, torch.bfloat16)
    for convert, parts in (
        (w4_from_gptq, {"qweight": gptq_words(codes), "scales": scales, "qzeros": gptq_zeros(zeros - 1)}),
        (w4_from_awq, {"qweight": awq_words(codes), "scales": scales, "qzeros": awq_words(zeros)}),
        (w4_from_compressed_tensors, compressed(codes, scales, zeros)),
    ):
        given = {name: part.clone() for name, part in parts.items()}
        packed = convert(**given)
        exact = packed.dequantize().clone()
        for part in given.values():
            part.zero_()
        assert torch.equal(packed.dequantize(), exact), convert.__name__


def test_a_converted_checkpoint_multiplies_like_its_weight_in_another_dtype() -> None:
    codes, scales, zeros = checkpoint(64, 24, 32, torch.float16)
    packed = w4_from_gptq(gptq_words(codes), scales, gptq_zeros(zeros - 1), dtype=torch.float32)
    _, exact = dequantised(codes, scales, zeros, torch.arange(64) // 32)
    x = torch.randn(5, 64)
    assert_rounded_sum(w4a16_linear(x, packed), x.double() @ exact.T, x, exact)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_finite_values_stay_finite(dtype: torch.dtype, symmetric: bool) -> None:
    largest = torch.finfo(dtype).max
    weight = torch.linspace(-1, 1, 64).mul(largest).repeat(40, 1)
    weight *= torch.linspace(0.5, 1, 40)[:, None]  # rows of many scales, some of which are rounded up
    weight[:, 63] = largest
    packed = pack_w4(weight.to(dtype), 64, symmetric=symmetric)
    value = packed.dequantize()
    assert bool(value.isfinite().all())
    error = (value.double() - weight.to(dtype).double()).abs()
    assert bool((error <= 1.01 * packed.scales.double().t()).all())  # half a step; a whole one where that overflows


@pytest.mark.parametrize("part", ["scales", "zeros", "permutation"])
def test_a_weight_on_two_devices_is_refused(part: str) -> None:
    w = pack_w4(torch.randn(8, 32), 16, symmetric=False)
    value = torch.arange(32) if part == "permutation" else getattr(w, part)
    with pytest.raises(ValueError, match="w4a16_linear: argument 'w': expected device cpu as x has, got meta"):
        w4a16_linear(torch.randn(2, 32), replace(w, **{part: value.to("meta")}))


@pytest.mark.parametrize("group_size", [16.0, True, None, "16", -16, 1, 2**70], ids=repr)
def test_a_weight_with_a_wrong_group_size_is_refused(group_size: object) -> None:
    w = replace(pack_w4(torch.randn(8, 32), 16), group_size=group_size)
    with pytest.raises((TypeError, ValueError), match=r"w4a16_linear: argument 'w.group_size': expected an integer"):
        w4a16_linear(torch.randn(2, 32), w)


@pytest.mark.parametrize("op", [w4a16_linear, w4a16_token], ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("codes", lambda codes: codes[:1], r"shape \(2, 2, 32, 4\)"),
        ("codes", lambda codes: codes[:, :1], r"shape \(2, 2, 32, 4\)"),
        ("codes", lambda codes: codes.long(), "dtype int32"),
        ("scales", lambda scales: scales.double(), "dtype bfloat16 or float16 or float32"),
        ("scales", lambda scales: scales[None], "a 2-D tensor"),
        ("zeros", lambda zeros: zeros[:2], r"shape \(4, 24\)"),
        ("zeros", lambda zeros: zeros.int(), "dtype int16"),
        ("permutation", lambda _: torch.arange(127), r"shape \(128,\)"),
        ("permutation", lambda _: torch.arange(128).int(), "dtype int64"),
    ],
)
def test_a_weight_whose_parts_do_not_fit_is_refused(op: Any, part: str, change: Any, expected: str) -> None:
    w = pack_w4(weight(24, 128, torch.float32), 32, symmetric=False)
    with pytest.raises((TypeError, ValueError), match=f"{op.__name__}: argument 'w': expected {expected}, got "):
        op(torch.ones(1, 128), replace(w, **{part: change(getattr(w, part))}))


@pytest.mark.parametrize("device", [torch.float16, None, True], ids=repr)
def test_a_weight_moves_to_devices_alone(device: object) -> None:
    with pytest.raises(TypeError, match=r"W4Weight.to: argument 'device': expected a device, got "):
        pack_w4(torch.randn(8, 32), 16).to(device)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["symmetric", "zero points"])
def test_normal_weights_change_by_as_much_as_the_record_says(kind: str, group: int) -> None:
    record = json.loads((Path(__file__).parents[1] / "results" / "w4_error.json").read_text(encoding="utf-8"))
    original = weight(512, 1024, torch.bfloat16)
    back = pack_w4(original, group, symmetric=kind == "symmetric").dequantize()
    error = float((back.float() - original.float()).norm() / original.float().norm())
    assert error == pytest.approx(record["relative_error"][kind][f"groups of {group}"], rel=0.01)


def full_weight() -> W4Weight:
    w = pack_w4(weight(24, 64, torch.bfloat16), 32, symmetric=False)
    return replace(w, permutation=torch.randperm(64, generator=torch.Generator().manual_seed(0)))


def assert_same_parts(a: W4Weight, b: W4Weight) -> None:
    assert (a.shape, a.group_size) == (b.shape, b.group_size)
    for name in ("codes", "scales", "zeros", "permutation"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype, name
            assert torch.equal(x, y), name


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_a_saved_weight_is_loaded(full: bool, weights_only: bool) -> None:
    w = full_weight() if full else pack_w4(weight(24, 64, torch.float16), 32)
    file = io.BytesIO()
    torch.save({"layer": w}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)["layer"]
    assert_same_parts(loaded, w)
    x = torch.randn(3, 64).to(w.dtype)
    assert torch.equal(w4a16_linear(x, loaded), w4a16_linear(x, w))


def test_a_weight_is_equal_to_itself_alone_and_a_key() -> None:
    w = full_weight()
    twin = replace(w)
    assert w == w
    assert w != twin
    assert {w: 1, twin: 2}[w] == 1
    with pytest.raises(FrozenInstanceError):
        w.group_size = 16  # type: ignore[misc]


def test_a_copied_weight_has_memory_of_its_own() -> None:
    w = full_weight()
    for made in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert_same_parts(made, w)
        assert made.codes.data_ptr() != w.codes.data_ptr()
    assert w.to("cpu").codes.data_ptr() == w.codes.data_ptr()  # as with torch's tensors
    moved = w.to("meta")
    assert {part.device.type for part in (moved.codes, moved.scales, moved.zeros, moved.permutation)} == {"meta"}
    assert (moved.device.type, moved.shape, moved.dtype) == ("meta", w.shape, w.dtype)


def test_a_fake_weight_is_not_packed() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="pack_w4: argument 'weight': .* got a fake tensor"):
        pack_w4(torch.randn(8, 32), 16)


@pytest.mark.parametrize("name", ["x", "bias"])
def test_the_vendor_s_product_gets_no_out_that_overlaps(name: str) -> None:
    """The launch refuses it before it dequantises the weight, so CPU tensors will do."""
    w = pack_w4(torch.randn(32, 32), 16)
    out = torch.zeros(200, 32)
    given = {"x": torch.zeros(200, 32), "bias": torch.zeros(32)}
    given[name] = out if name == "x" else out[3]
    with pytest.raises(ValueError, match=f"w4a16_linear: argument 'out': .* shares no memory with '{name}'"):
        _w4a16_linear.kernel_op.launch(given["x"], w.codes, w.scales, None, None, 16, given["bias"], out=out)
