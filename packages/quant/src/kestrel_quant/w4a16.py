"""Linear layers with 4-bit weights and 16-bit activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel_runtime import check, kernel_op
from kestrel_runtime.reference import pack_int4

from . import reference


@dataclass(frozen=True, eq=False)
class W4Weight:
    """A weight [N, K] of 4-bit codes with one scale per row and group of columns, made by :func:`pack_w4`.

    The layout of ``codes`` and ``scales`` is private to this library: read them with :meth:`dequantize`. Two weights
    compare equal only if they are one object.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]
    """(N, K)"""
    group_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations this weight multiplies."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def to(self, device: torch.device | str) -> W4Weight:
        """The same weight on another device."""
        return W4Weight(self.codes.to(device), self.scales.to(device), self.shape, self.group_size)

    def dequantize(self) -> torch.Tensor:
        """[N, K] in :attr:`dtype`: code * scale, rounded once."""
        return reference.int4_dequant(self.codes, self.scales.float(), self.group_size, self.dtype)


def pack_w4(weight: torch.Tensor, group_size: int = 128) -> W4Weight:
    """Quantise a weight to 4 bits, symmetric, one scale per row and group of columns, and lay it out for the kernel.

    weight: [N, K] bf16, fp16 or float32, K a multiple of group_size, group_size even. The scale is the largest
    magnitude of the group / 7, rounded to weight's dtype (1 where that is zero); codes are -7..7, rounded half to even.

    Returns a :class:`W4Weight` on weight's device, for activations of weight's dtype. This is done once, at load: it
    reads the weight on the host to refuse values that are not finite.

    Raises ValueError or TypeError for a wrong dtype, rank or group size, or a weight with NaN or inf.
    Semantics: the symmetric grouped 4-bit weights that Marlin multiplies (Frantar et al. 2024), each value rounded to
    the nearest code.

    >>> w = pack_w4(torch.tensor([[7.0, -3.0, 1.0, 14.0]]), group_size=2)  # scales 7 / 7 = 1 and 14 / 7 = 2
    >>> w.dequantize().tolist()  # codes 7, -3 and 0 (1 / 2 is a tie), 7, each times its scale
    [[7.0, -3.0, 0.0, 14.0]]
    """
    op = "pack_w4"
    check.tensor(op, "weight", weight, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    check_readable(op, weight=weight)
    check_group(op, weight.shape[1], group_size)
    weight = weight.detach()
    if not bool(weight.isfinite().all()):
        check.fail(op, "weight", "finite values", "NaN or inf")
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // group_size, group_size)
    scales = reference.quotient(groups.abs().amax(dim=2), 7).to(weight.dtype)
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-7, 7).to(torch.int32)
    return from_codes(codes.view(rows, columns), scales, group_size)


def from_codes(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> W4Weight:
    """A W4Weight of codes -8..7 [N, K] and scales [N, K/G]."""
    return W4Weight(pack_int4(codes), scales.contiguous(), (codes.shape[0], codes.shape[1]), group_size)


def check_readable(op: str, **tensors: torch.Tensor) -> None:
    """The tensors have values, which packing reads on the host."""
    for name, value in tensors.items():
        if value.is_meta:
            check.fail(op, name, "a tensor with values, which packing reads", "device meta")


def check_group(op: str, columns: int, group_size: int) -> None:
    """group_size is even and divides the columns."""
    check.number(op, "group_size", group_size, integer=True, minimum=2)
    if group_size % 2 or columns % group_size or columns == 0:
        check.fail(op, "group_size", f"an even divisor of the {columns} columns", group_size)


def w4a16_linear(
    x: torch.Tensor, w: W4Weight, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer with a 4-bit weight: ``x @ weight.T + bias``.

    x: [..., K] of the dtype the weight was packed for (bf16, fp16 or float32), any number of rows. w: from
    :func:`pack_w4`, :func:`w4_from_gptq` or :func:`w4_from_awq`. bias: [N] in x's dtype or None. *Constant*: w, bias.
    The weight is code * scale, exact; accumulated in float32, rounded once.

    Returns [..., N] in x's dtype, in ``out`` if it is given; ``out`` may not overlap ``x``.
    For a fixed number of rows T, a row does not depend on the other rows. Between different T it may differ by
    rounding: the reference's matrix product chooses its order of summation by T.

    Raises ValueError or TypeError for a wrong dtype, shape or device. Semantics: Marlin, Frantar et al. 2024.

    >>> w = pack_w4(torch.tensor([[7.0, -3.0], [0.0, 14.0]]), group_size=2)
    >>> w4a16_linear(torch.tensor([1.0, 2.0]), w).tolist()
    [1.0, 28.0]
    """
    if not isinstance(w, W4Weight):
        check.fail("w4a16_linear", "w", "a W4Weight (see pack_w4)", type(w).__name__, TypeError)
    return _w4a16_linear(x, w.codes, w.scales, w.group_size, bias, out=out)


def _check_w4a16_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    op = "w4a16_linear"
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    check.tensor(op, "w", codes, dtype=torch.uint8, ndim=2)
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if x.ndim == 0 or x.shape[-1] != columns:
        check.fail(op, "x", f"a last dimension of {columns}, as the weight has", f"shape {tuple(x.shape)}")
    check.tensor(op, "w", scales, dtype=check.FLOATS)
    check.shape(op, "w", scales, (rows, columns // group_size))
    check.same(op, "dtype", w=scales, x=x)
    if bias is not None:
        check.tensor(op, "bias", bias, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "bias", bias, (rows,))
    check.same(op, "device", x=x, w=codes, bias=bias)
    if out is not None:
        check.tensor(op, "out", out, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "out", out, (*x.shape[:-1], rows))
        check.disjoint(op, "out", out)
        check.same(op, "device", x=x, out=out)


@kernel_op(reference=reference.w4a16_linear, check=_check_w4a16_linear, out_may_be=())
def _w4a16_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """w4a16_linear on the parts of a W4Weight."""
