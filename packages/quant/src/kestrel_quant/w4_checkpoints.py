"""4-bit weights of GPTQ and AWQ checkpoints as W4Weight."""

from __future__ import annotations

from typing import Literal

import torch

from kestrel_runtime import check

from .w4a16 import W4Weight, check_readable, from_codes

_ZERO = 8  # the zero point of symmetric codes
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
    fp16 or float32. qzeros: int32 [K/G, N/8], eight zero points of consecutive columns in a word; "gptq" stores them
    less one, "gptq_v2" as they are. None: all are 8. g_idx: int [K], the group of each row, or None for rows in order;
    in activation order the result keeps a permutation of x's columns. dtype: of the scales and activations (default:
    that of scales).

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
    group_size = _check_scales(op, scales, columns=8 * qweight.shape[0], rows=qweight.shape[1])
    check.choice(op, "checkpoint_format", checkpoint_format, ("gptq", "gptq_v2"))
    _check_dtype(op, dtype)
    check.same(op, "device", qweight=qweight, scales=scales)
    zeros = None
    if qzeros is not None:
        check.tensor(op, "qzeros", qzeros, dtype=torch.int32)
        check.shape(op, "qzeros", qzeros, (scales.shape[0], (scales.shape[1] + 7) // 8))
        check.same(op, "device", qweight=qweight, qzeros=qzeros)
        check_readable(op, qzeros=qzeros)
        zeros = _nibbles(qzeros).flatten(1)[:, : scales.shape[1]] + (checkpoint_format == "gptq")
    permutation = None
    if g_idx is not None:
        check.tensor(op, "g_idx", g_idx, dtype=check.INTEGERS)
        check.shape(op, "g_idx", g_idx, (8 * qweight.shape[0],))
        check.same(op, "device", qweight=qweight, g_idx=g_idx)
        check_readable(op, g_idx=g_idx)
        in_order = torch.arange(g_idx.shape[0], device=g_idx.device) // group_size
        of_groups, order = g_idx.long().sort(stable=True)
        if not torch.equal(of_groups, in_order):
            check.fail(op, "g_idx", f"every group of {scales.shape[0]} named {group_size} times", "other counts")
        permutation = None if torch.equal(g_idx.long(), in_order) else order
    codes = _nibbles(qweight).transpose(1, 2).flatten(0, 1)  # [K/8, N, 8] to [K, N]
    codes = codes if permutation is None else codes[permutation]
    return _from_columns(codes, scales.detach().to(dtype or scales.dtype), group_size, zeros, permutation)


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
    return _from_columns(codes, scales.detach().to(dtype or scales.dtype), group_size, zeros)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight nibbles of each int32 word, lowest first: int32 [..., 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts) & 0xF


def _check_scales(op: str, scales: torch.Tensor, columns: int, rows: int) -> int:
    """scales are [K/G, N]; returns G."""
    check.tensor(op, "scales", scales, dtype=check.FLOATS, ndim=2)
    check.shape(op, "scales", scales, (None, rows))
    groups = scales.shape[0]
    if groups == 0 or columns % groups or columns // groups % 2:
        check.fail(op, "scales", f"[K/G, N] with an even G that divides K = {columns}", f"shape {tuple(scales.shape)}")
    return columns // groups


def _check_dtype(op: str, dtype: torch.dtype | None) -> None:
    check.choice(op, "dtype", dtype, (None, *check.FLOATS))


def _from_columns(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None = None,
) -> W4Weight:
    """A W4Weight of codes [K, N], scales and zeros [K/G, N]; zeros that are all 8 are not kept."""
    if zeros is not None:
        zeros = None if bool((zeros == _ZERO).all()) else zeros.t()
    return from_codes(codes.t(), scales.t(), group_size, zeros, permutation)
