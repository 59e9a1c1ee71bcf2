"""The PyTorch reference of every op of this family: the specification that the kernels are tested against.

Scales come from the largest *finite* magnitude, so inf and NaN do not change the codes of other elements: a NaN becomes
the FP8 code NaN or the integer code 0, an inf saturates. ``value = code * scale`` throughout; codes are ``x / scale``
with a true float32 division, rounded once to nearest even.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kestrel_runtime.reference import fp8_scale, pack_int4, quotient, row_sums, to_fp8, unpack_int4

from ._w4_layout import unpack_codes


def fp8_quant(
    x: torch.Tensor,
    granularity: str = "row",
    group_size: int = 128,
    scale_ub: torch.Tensor | None = None,
    column_major_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic FP8. Column-major scales are returned as their buffer: [groups, T rounded up to a multiple of 4]."""
    values = x.float()
    scale = fp8_scale(_amax(values, granularity, group_size), scale_ub)
    codes = to_fp8(values / _per_element(scale, values, group_size))
    if column_major_scales:
        rows = x.shape[0]
        scale = F.pad(scale.t(), (0, (rows + 3) // 4 * 4 - rows))
    return codes, scale


def fp8_quant_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 with a given scale, [1] or [T, 1]."""
    return to_fp8(x.float() / scale)


def fp8_dequant(
    q: torch.Tensor, scale: torch.Tensor, group_size: int = 128, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """code * scale, rounded once to dtype."""
    values = q.float()
    return (values * _per_element(scale, values, group_size)).to(dtype)


def int8_quant(x: torch.Tensor, granularity: str = "row") -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes -127..127."""
    values = x.float()
    scale = _integer_scale(_amax(values, granularity, 1), 127)
    return _integer_codes(values / scale, 127).to(torch.int8), scale


def int8_dequant(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """code * scale, rounded once to dtype."""
    return (q.float() * scale).to(dtype)


def int4_quant(x: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes -7..7 per group of columns, two to a byte."""
    values = x.float()
    scale = _integer_scale(_amax(values, "group", group_size), 7)
    return pack_int4(_integer_codes(values / _per_element(scale, values, group_size), 7)), scale


def int4_dequant(
    q: torch.Tensor, scale: torch.Tensor, group_size: int = 128, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """code * scale, rounded once to dtype."""
    codes = unpack_int4(q).float()
    return (codes * _per_element(scale, codes, group_size)).to(dtype)


def w4_dequant(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """(code - zero) * scale [N, K], in the packed order of columns, rounded once to dtype."""
    groups, rows = scales.shape
    values = unpack_codes(codes, rows, groups * group_size).float().view(rows, groups, group_size)
    zero = 8.0 if zeros is None else zeros.t().float().unsqueeze(2)
    return ((values - zero) * scales.t().float().unsqueeze(2)).flatten(1).to(dtype)


def w4a16_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias + residual, weight = (code - zero) * scale, exact in float32; x's columns are permuted."""
    weight = w4_dequant(codes, scales, zeros, group_size, torch.float32)
    columns = x if permutation is None else x[..., permutation]
    product = F.linear(columns.float(), weight, None if bias is None else bias.float())
    return (product if residual is None else product + residual.float()).to(x.dtype)


def w4a16_token(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
    activation: str = "none",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(norm(x) @ weight.T + bias) + residual; the norm is rounded to x's dtype, and then the result."""
    if norm_weight is not None:
        mean_square = (
            row_sums(x.reshape(-1, x.shape[-1]).double().square()).float().view(*x.shape[:-1], 1) / x.shape[-1]
        )
        x = (x.float() / torch.sqrt(mean_square + norm_eps) * (norm_weight.float() + norm_weight_bias)).to(x.dtype)
    wide = None if bias is None else bias.float()
    product = w4a16_linear(x.float(), codes, scales, zeros, permutation, group_size, wide)
    if activation != "none":
        product = _gated(product, activation)
    return (product if residual is None else product + residual.float()).to(x.dtype)


def _gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(h) * g of the halves h and g of the last dimension, in float32."""
    h, g = x.chunk(2, dim=-1)
    if activation == "gelu_and_mul":
        return 0.5 * h * torch.erfc(h * -math.sqrt(0.5)) * g
    slope = h if activation == "silu_and_mul" else 2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h)
    return h / (1 + torch.exp(-slope)) * g


def _integer_scale(amax: torch.Tensor, largest: int) -> torch.Tensor:
    """amax / largest; 1 where that is zero."""
    scale = quotient(amax, largest)
    return torch.where(scale > 0, scale, 1.0)


def _integer_codes(quotients: torch.Tensor, largest: int) -> torch.Tensor:
    """Round half to even and saturate; NaN, for which integers have no code, becomes 0."""
    return quotients.nan_to_num(0.0, largest, -largest).round().clamp(-largest, largest).to(torch.int32)


def _amax(values: torch.Tensor, granularity: str, group_size: int) -> torch.Tensor:
    """The largest finite magnitude: [T, 1], [1] or [T, groups]."""
    magnitude = torch.where(values.isfinite(), values.abs(), 0.0)
    if granularity == "row":
        return magnitude.amax(dim=1, keepdim=True)
    if granularity == "tensor":
        return F.pad(magnitude, (0, 0, 0, 1)).amax().view(1)  # a row of zeros, as T may be 0
    rows, columns = magnitude.shape
    group_size = min(group_size, columns)
    groups = (columns + group_size - 1) // group_size
    return F.pad(magnitude, (0, groups * group_size - columns)).view(rows, groups, group_size).amax(dim=2)


def _per_element(scale: torch.Tensor, values: torch.Tensor, group_size: int) -> torch.Tensor:
    """A scale of shape [1] or [T, 1] broadcasts; [T, groups] is repeated over the columns of each group."""
    if scale.ndim == 1 or scale.shape[1] == 1:
        return scale
    columns = values.shape[1]
    return scale.repeat_interleave(min(group_size, max(columns, 1)), dim=1)[:, :columns]
