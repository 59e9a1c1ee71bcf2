"""Parts of references that several families need, in plain PyTorch for CPU, CUDA and fake tensors."""

from __future__ import annotations

import torch

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool = True) -> torch.Tensor:
    """Rotate pairs of the last dimension (rotary position embedding), in float32.

    x: [..., R]; cos, sin: broadcastable to [..., R/2]. NeoX pairs are (i, i + R/2), GPT-J pairs (2i, 2i + 1).
    Returns float32 [..., R].

    >>> quarter_turn = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(2), torch.ones(2))
    >>> quarter_turn.tolist()
    [-3.0, -4.0, 1.0, 2.0]
    """
    x = x.float()
    if is_neox:
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if is_neox:
        return torch.cat(turned, dim=-1)
    return torch.stack(turned, dim=-1).flatten(-2)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension, [..., N] to [..., 1]. A row's sum has the same bits whatever the other rows are.

    That holds on CPUs; on a GPU torch's order of summation may depend on the number of rows.

    >>> row_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[3.0], [7.0]]
    """
    # torch splits a sum to a single number across threads, so that T = 1 would round differently: add a row, drop it.
    return torch.cat((x, x.new_zeros(1, *x.shape[1:]))).sum(-1, keepdim=True)[:-1]


def to_fp8(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Round float values to FP8: to nearest even, saturating at the largest finite value. NaN stays NaN.

    >>> to_fp8(torch.tensor([1.0, 1e9])).float().tolist()
    [1.0, 448.0]
    """
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)


def quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded. With a Python number CUDA would multiply by the rounded reciprocal."""
    return x / torch.full_like(x, divisor)


def fp8_scale(amax: torch.Tensor, scale_ub: torch.Tensor | None = None) -> torch.Tensor:
    """Dynamic e4m3 scale of a largest magnitude (float32): max(min(amax, scale_ub), 1e-12) / 448."""
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub)
    return quotient(amax.clamp(min=1e-12), 448.0)


def quantise_rows(x: torch.Tensor, scale_ub: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic FP8 per row: codes e4m3fn [..., N] and scales float32 [..., 1] with ``x ≈ codes * scale``.

    x: float32 [..., N]. The scale is :func:`fp8_scale` of the row's largest finite magnitude. scale_ub: float32 [1] or
    None.

    >>> codes, scale = quantise_rows(torch.tensor([[1.0, -2.0]]))
    >>> codes.float().tolist(), (codes.float() * scale).tolist()
    ([[224.0, -448.0]], [[1.0, -2.0]])
    """
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim=-1, keepdim=True)
    scale = fp8_scale(amax, scale_ub)
    return to_fp8(x / scale), scale


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack integer codes (-8..15) of an even last dimension into bytes: even index in the low nibble.

    codes: [..., N] of any integer dtype. Returns uint8 [..., N/2].

    >>> pack_int4(torch.tensor([1, -1])).tolist()
    [241]
    """
    nibbles = codes.to(torch.int32) & 0xF
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8)


def unpack_int4(packed: torch.Tensor, signed: bool = True) -> torch.Tensor:
    """Undo :func:`pack_int4`: int32 codes [..., N], two's complement when ``signed``, else 0..15.

    >>> unpack_int4(torch.tensor([241], dtype=torch.uint8)).tolist()
    [1, -1]
    """
    wide = packed.to(torch.int32)
    codes = torch.stack((wide & 0xF, wide >> 4), dim=-1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes) if signed else codes


def philox4x32(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    key: int64 [..., 2], counter: int64 [..., 4], both holding unsigned 32-bit words, lowest first.
    Returns int64 [..., 4]: four random 32-bit words.
    """
    k0, k1 = key.unbind(-1)
    c0, c1, c2, c3 = counter.unbind(-1)
    for _ in range(10):
        low = c0 * _PHILOX_MULTIPLIERS[0]  # the product wraps in int64; its two 32-bit halves are those of uint64
        high = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _WORD) ^ c1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ c3 ^ k1,
            low & _WORD,
        )
        k0 = (k0 + _PHILOX_WEYL[0]) & _WORD
        k1 = (k1 + _PHILOX_WEYL[1]) & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)
