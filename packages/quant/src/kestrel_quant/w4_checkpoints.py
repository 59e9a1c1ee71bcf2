"""4-bit weights of GPTQ, AWQ and compressed-tensors checkpoints as W4Weight."""

from __future__ import annotations

from typing import Literal

import torch

from kestrel_runtime import check

from .w4a16 import W4Weight, check_readable, from_codes

_ZERO = 8  # the zero point of symmetric codes
_ONES = 0x1111_1111  # 1 in each nibble of a word
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of an AWQ word holds, lowest nibble first


def w4_from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
    *,
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq",
    dtype: torch.dtype | None = None,
) -> W4Weight:
    """Convert a 4-bit GPTQ weight, as AutoGPTQ and GPTQModel store it.

    qweight: int32 [K/8, N], eight codes of consecutive rows of K in a word, lowest nibble first. scales: [K/G, N] bf16,
    fp16 or float32. qzeros: int32 [K/G, ceil(N/8)], eight zero points of consecutive columns in a word. "gptq_v2"
    stores them as they are; "gptq" stores each word less 0x11111111, so that a zero point of 0 borrows from the next,
    as GPTQModel writes it. None: all are 8. g_idx: int [K], the group of each row, or None for rows in order; in
    activation order the result keeps a permutation of x's columns. dtype: of the scales and activations (default: that
    of scales).

    Returns a :class:`W4Weight` [N, K] with the same values: (code - zero) * scale. Reads its arguments on the host:
    this is done once, at load.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, and for a g_idx that does not name every
    group G times. Semantics: QuantLinear of AutoGPTQ and of GPTQModel.

    >>> qweight = torch.tensor([[0x1918_1817]], dtype=torch.int32)  # K = 8, N = 1: codes 7, 1, 8, 1, 8, 1, 9, 1
    >>> w4_from_gptq(qweight, torch.tensor([[2.0]])).dequantize().int().tolist()
    [[-2, -14, 0, -14, 0, -14, 2, -14]]
    """
    op = "w4_from_gptq"
    check.tensor(op, "qweight", qweight, dtype=torch.int32, ndim=2)
    columns = 8 * qweight.shape[0]
    group_size = _check_scales(op, scales, columns, rows=qweight.shape[1])
    check.choice(op, "checkpoint_format", checkpoint_format, ("gptq", "gptq_v2"))
    _check_dtype(op, dtype)
    check.same(op, "device", qweight=qweight, scales=scales)
    zeros = None
    if qzeros is not None:
        _check_part(op, "qzeros", qzeros, torch.int32, (scales.shape[0], (scales.shape[1] + 7) // 8), qweight=qweight)
        words = qzeros.long() + _ONES if checkpoint_format == "gptq" else qzeros
        zeros = _nibbles(words).flatten(1)[:, : scales.shape[1]]
    permutation = None
    if g_idx is not None:
        _check_part(op, "g_idx", g_idx, check.INTEGERS, (columns,), qweight=qweight)
        permutation = _permutation(op, "g_idx", g_idx, group_size)
    codes = _nibbles(qweight).transpose(1, 2).flatten(0, 1)  # [K/8, N, 8] to [K, N]
    return _weight(codes.t(), scales.t(), group_size, None if zeros is None else zeros.t(), permutation, dtype)


def w4_from_awq(
    qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor, *, dtype: torch.dtype | None = None
) -> W4Weight:
    """Convert a 4-bit AWQ weight (the "gemm" layout of AutoAWQ).

    qweight: int32 [K, N/8], eight codes of consecutive columns of N in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from
    the lowest nibble. scales: [K/G, N] bf16, fp16 or float32. qzeros: int32 [K/G, N/8], packed like qweight.
    dtype: of the scales and activations (default: that of scales).

    Returns a :class:`W4Weight` [N, K] with the same values: (code - zero) * scale. Reads its arguments on the host:
    this is done once, at load.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: WQLinear_GEMM of AutoAWQ.

    >>> qweight = torch.tensor([[0x7777_7779], [0x7777_7779]], dtype=torch.int32)  # K = 2, N = 8
    >>> zeros = torch.tensor([[-0x7777_7778]], dtype=torch.int32)  # 0x88888888
    >>> w4_from_awq(qweight, torch.ones(1, 8), zeros).dequantize().int().tolist()[:2]
    [[1, 1], [-1, -1]]
    """
    op = "w4_from_awq"
    check.tensor(op, "qweight", qweight, dtype=torch.int32, ndim=2)
    group_size = _check_scales(op, scales, columns=qweight.shape[0], rows=8 * qweight.shape[1])
    check.tensor(op, "qzeros", qzeros, dtype=torch.int32)
    check.shape(op, "qzeros", qzeros, (scales.shape[0], qweight.shape[1]))
    _check_dtype(op, dtype)
    check.same(op, "device", qweight=qweight, scales=scales, qzeros=qzeros)
    check_readable(op, qzeros=qzeros)
    place = torch.tensor(_AWQ_ORDER, device=qweight.device).argsort()  # the nibble that holds each column
    codes = _nibbles(qweight)[:, :, place].flatten(1)  # [K, N/8, 8] to [K, N]
    zeros = _nibbles(qzeros)[:, :, place].flatten(1)
    return _weight(codes.t(), scales.t(), group_size, zeros.t(), dtype=dtype)


def w4_from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    weight_shape: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> W4Weight:
    """Convert a 4-bit weight of compressed-tensors ("pack-quantized"), as llm-compressor writes it for vLLM.

    The parameters are named as in the checkpoint. weight_packed: int32 [N, ceil(K/8)], eight codes of consecutive
    columns in a word, lowest nibble first; codes -8..7 are stored plus 8. weight_scale: [N, K/G] bf16, fp16 or float32
    (strategy "group"; "channel" has G = K). weight_zero_point: int32 [ceil(N/8), K/G], eight zero points of consecutive
    rows in a word, stored plus 8; None: all are 0. weight_g_idx: int [K], the group of each column, or None, or with
    -1 in it, for columns in order. weight_shape: int [2], N and K; None: K is eight for each word.
    dtype: of the scales and activations (default: that of weight_scale).

    Returns a :class:`W4Weight` [N, K] with the same values: (code - zero) * scale. Reads its arguments on the host:
    this is done once, at load.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, for other numbers of bits or one scale for
    a tensor, and for a weight_g_idx that does not name every group G times. Semantics: PackedQuantizationCompressor of
    compressed-tensors.

    >>> packed = torch.tensor([[0x1918_1817]], dtype=torch.int32)  # N = 1, K = 8: codes -1, -7, 0, -7, 0, -7, 1, -7
    >>> w4_from_compressed_tensors(packed, torch.tensor([[2.0]])).dequantize().int().tolist()
    [[-2, -14, 0, -14, 0, -14, 2, -14]]
    """
    op = "w4_from_compressed_tensors"
    check.tensor(op, "weight_packed", weight_packed, dtype=torch.int32, ndim=2)
    rows, columns = weight_packed.shape[0], 8 * weight_packed.shape[1]
    if weight_shape is not None:
        _check_part(op, "weight_shape", weight_shape, check.INTEGERS, (2,))
        named = tuple(weight_shape.tolist())
        if named[0] != rows or named[1] < 1 or (named[1] + 7) // 8 != weight_packed.shape[1]:
            expected = f"({rows}, {max(columns - 7, 1)}) to ({rows}, {columns}), of 4 bits as weight_packed has"
            check.fail(op, "weight_shape", expected, named)
        columns = named[1]
    check.tensor(op, "weight_scale", weight_scale, dtype=check.FLOATS, ndim=2)
    check.shape(op, "weight_scale", weight_scale, (rows, None))
    groups = weight_scale.shape[1]
    group_size = _group_size(op, "weight_scale", weight_scale, groups, columns)
    _check_dtype(op, dtype)
    check.same(op, "device", weight_packed=weight_packed, weight_scale=weight_scale)
    zeros = None
    if weight_zero_point is not None:
        shape = ((rows + 7) // 8, groups)
        _check_part(op, "weight_zero_point", weight_zero_point, torch.int32, shape, weight_packed=weight_packed)
        zeros = _nibbles(weight_zero_point).transpose(1, 2).flatten(0, 1)[:rows]  # [N/8, K/G, 8] to [N, K/G]
    permutation = None
    if weight_g_idx is not None:
        _check_part(op, "weight_g_idx", weight_g_idx, check.INTEGERS, (columns,), weight_packed=weight_packed)
        unset = bool((weight_g_idx == -1).any())
        permutation = None if unset else _permutation(op, "weight_g_idx", weight_g_idx, group_size)
    codes = _nibbles(weight_packed).flatten(1)[:, :columns]
    return _weight(codes, weight_scale, group_size, zeros, permutation, dtype)


def _check_part(
    op: str,
    name: str,
    part: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    **codes: torch.Tensor,
) -> None:
    """A part of a checkpoint whose values are read; on the device of the codes, if these are given."""
    check.tensor(op, name, part, dtype=dtype)
    check.shape(op, name, part, shape)
    check.same(op, "device", **codes, **{name: part})
    check_readable(op, **{name: part})


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight nibbles of the low 32 bits of each word, lowest first: [..., 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts) & 0xF


def _check_scales(op: str, scales: torch.Tensor, columns: int, rows: int) -> int:
    """scales are [K/G, N]; returns G."""
    check.tensor(op, "scales", scales, dtype=check.FLOATS, ndim=2)
    check.shape(op, "scales", scales, (None, rows))
    return _group_size(op, "scales", scales, scales.shape[0], columns)


def _group_size(op: str, name: str, scales: torch.Tensor, groups: int, columns: int) -> int:
    """G of so many groups of K columns: it divides K and is even."""
    if groups == 0 or columns == 0 or columns % groups or columns // groups % 2:
        check.fail(op, name, f"K/G groups with an even G that divides K = {columns}", f"shape {tuple(scales.shape)}")
    return columns // groups


def _check_dtype(op: str, dtype: torch.dtype | None) -> None:
    check.choice(op, "dtype", dtype, (None, *check.FLOATS))


def _permutation(op: str, name: str, g_idx: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """The columns sorted by their group, those of a group in order; None where they already are."""
    columns = g_idx.shape[0]
    in_order = torch.arange(columns, device=g_idx.device) // group_size
    of_groups, order = g_idx.long().sort(stable=True)
    if not torch.equal(of_groups, in_order):
        expected = f"every group of {columns // group_size} named {group_size} times"
        check.fail(op, name, expected, "other counts")
    return None if torch.equal(g_idx.long(), in_order) else order


def _weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> W4Weight:
    """A W4Weight of codes [N, K] in the checkpoint's order, scales and zeros [N, K/G]; zeros that are all 8 go."""
    codes = codes if permutation is None else codes[:, permutation]
    if zeros is not None and bool((zeros == _ZERO).all()):
        zeros = None
    return from_codes(codes, scales.detach().to(dtype or scales.dtype), group_size, zeros, permutation)
