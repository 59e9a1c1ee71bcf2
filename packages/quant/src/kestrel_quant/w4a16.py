"""Linear layers with 4-bit weights and 16-bit activations."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import is_fake

from kestrel_runtime import UnsupportedError, check, empty, kernel_op

from . import reference
from ._checks import W4Parts, check_weight_device, check_x_and_weight
from ._launch import kernels
from ._w4_layout import pack_codes
from ._w4_plan import plan

# bf16 scales outside this range: weights whose zero points are all 8 use the kernels for explicit zero points.
# Within it weights are exact; results below the least scale lose bits.
_LEAST_SCALE, _LARGE_SCALE = 2.0**-86, 2.0**35


@dataclass(frozen=True, eq=False)
class W4Weight:
    """A weight [N, K] of 4-bit codes with one scale, and perhaps one zero point, per row and group of columns.

    Made by :func:`pack_w4`, and of checkpoints by :func:`w4_from_gptq`, :func:`w4_from_awq` and
    :func:`w4_from_compressed_tensors`. The layout of its tensors is private to this library, and the same on every
    architecture: read them with :meth:`dequantize`. Two weights compare equal only if they are one object. `torch.save`
    and `torch.load` take it, also with ``weights_only=True``, once this package is imported.
    """

    codes: torch.Tensor
    """int32, unsigned codes in the order of ``_w4_layout``"""
    scales: torch.Tensor
    """[K/G, N]"""
    shape: tuple[int, int]
    """(N, K)"""
    group_size: int
    zeros: torch.Tensor | None = None
    """int16 [K/G, N]; None: 8 everywhere (symmetric)"""
    permutation: torch.Tensor | None = None
    """int64 [K]: the column of x that each packed column multiplies; None: its own"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations this weight multiplies."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def to(self, device: torch.device | str | int) -> W4Weight:
        """The same weight on another device. Raises TypeError for what names no device, such as a dtype."""
        if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
            check.fail("W4Weight.to", "device", "a device", check.shown(device), TypeError)
        zeros = None if self.zeros is None else self.zeros.to(device)
        permutation = None if self.permutation is None else self.permutation.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return W4Weight(codes, scales, self.shape, self.group_size, zeros, permutation)

    def dequantize(self) -> torch.Tensor:
        """[N, K] in :attr:`dtype`: (code - zero) * scale, rounded once."""
        packed = reference.w4_dequant(self.codes, self.scales, self.zeros, self.group_size, self.dtype)
        if self.permutation is None:
            return packed
        weight = torch.empty_like(packed)
        weight[:, self.permutation] = packed
        return weight


torch.serialization.add_safe_globals([W4Weight])  # for torch.load(weights_only=True), the default


def pack_w4(weight: torch.Tensor, group_size: int = 128, *, symmetric: bool = True) -> W4Weight:
    """Quantise a weight to 4 bits with one scale per row and group of columns, and lay it out for the kernel.

    weight: [N, K] bf16, fp16 or float32, K a multiple of group_size, group_size even.
    symmetric: the scale is the largest magnitude of the group / 7, rounded to weight's dtype; codes are -7..7, rounded
    half to even. Otherwise the scale is the distance from the smallest to the largest value, zero among them, / 15; the
    zero point is round(-smallest / scale), codes are 0..15, value = (code - zero) * scale. A group of zeros, and one
    whose scale rounds to 0, has the scale 0 and adds nothing to a product with finite sums. A code whose value would
    overflow weight's dtype is the next one towards zero.

    Returns a :class:`W4Weight` on weight's device, for activations of weight's dtype. This is done once, at load: it
    reads the weight on the host to refuse values that are not finite.

    Raises ValueError or TypeError for a wrong dtype, rank or group size, or a weight with NaN or inf.
    Semantics: the grouped 4-bit weights of Marlin (Frantar et al. 2024) and of GPTQ's quantiser (Frantar et al. 2023),
    each value rounded to the nearest code.

    >>> w = pack_w4(torch.tensor([[7.0, -3.0, 1.0, 14.0]]), group_size=2)  # scales 7 / 7 = 1 and 14 / 7 = 2
    >>> w.dequantize().tolist()  # codes 7, -3 and 0 (1 / 2 is a tie), 7, each times its scale
    [[7.0, -3.0, 0.0, 14.0]]
    >>> pack_w4(torch.tensor([[-5.0, 10.0]]), group_size=2, symmetric=False).dequantize().tolist()  # scale 1, zero 5
    [[-5.0, 10.0]]
    """
    op = "pack_w4"
    check.tensor(op, "weight", weight, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    check_readable(op, weight=weight)
    check_group(op, weight.shape[1], group_size)
    check.flag(op, "symmetric", symmetric)
    weight = weight.detach()
    if not bool(weight.isfinite().all()):
        check.fail(op, "weight", "finite values", "NaN or inf")
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // group_size, group_size)
    if symmetric:
        scales, smallest = reference.quotient(groups.abs().amax(dim=2), 7), None
    else:
        largest, smallest = groups.amax(dim=2).clamp(min=0), groups.amin(dim=2).clamp(max=0)
        scales = reference.quotient(largest, 15) - reference.quotient(smallest, 15)  # their difference may overflow
    scales = scales.to(weight.dtype)
    steps = (
        torch.where(scales > 0, scales, 1.0).float().unsqueeze(2)
    )  # steps of 1 round each value of such a group to 0
    codes = (groups / steps).round()
    codes = torch.where((codes * steps).to(weight.dtype).isinf(), codes - codes.sign(), codes)  # scales are rounded
    if smallest is None:
        return from_codes(codes.clamp(-7, 7).view(rows, columns) + 8, scales, group_size)
    zeros = (-smallest / steps.squeeze(2)).round().clamp(0, 15)
    return from_codes((codes + zeros.unsqueeze(2)).clamp(0, 15).view(rows, columns), scales, group_size, zeros)


def from_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    zeros: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
) -> W4Weight:
    """A W4Weight of codes 0..15 [N, K], scales and zeros [N, K/G]; zeros None: 8. It shares no memory with these."""
    if zeros is None and scales.dtype == torch.bfloat16:
        size = scales.abs()
        if bool(((size >= _LARGE_SCALE) | (size > 0) & (size < _LEAST_SCALE)).any()):
            zeros = torch.full(scales.shape, 8, device=scales.device)
    zeros = None if zeros is None else zeros.t().to(torch.int16, copy=True).contiguous()
    scales = scales.t().clone(memory_format=torch.contiguous_format)
    return W4Weight(pack_codes(codes), scales, (codes.shape[0], codes.shape[1]), group_size, zeros, permutation)


def check_readable(op: str, **tensors: torch.Tensor) -> None:
    """The tensors have values, which packing reads on the host."""
    for name, value in tensors.items():
        if value.is_meta or is_fake(value):
            got = "device meta" if value.is_meta else "a fake tensor"
            check.fail(op, name, "a tensor with values, which packing reads", got)


def check_group(op: str, columns: int, group_size: int) -> None:
    """group_size is even and divides the columns."""
    check.number(op, "group_size", group_size, integer=True, minimum=2)
    if group_size % 2 or columns % group_size or columns == 0:
        check.fail(op, "group_size", f"an even divisor of the {columns} columns", group_size)


def w4a16_linear(
    x: torch.Tensor,
    w: W4Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer with a 4-bit weight: ``x @ weight.T + bias + residual``.

    x: [..., K] of the dtype the weight was packed for (bf16, fp16 or float32), any number of rows T. w: from
    :func:`pack_w4` or a checkpoint. bias: [N] in x's dtype or None. residual: [..., N] in x's dtype or None.
    *Constant*: w, bias.
    The weight is (code - zero) * scale, exact; accumulated in float32, rounded once. Of symmetric bf16 weights, kernels
    that round each weight first sum products scaled by 2^-40: results below 2^-86 may lose bits.

    Returns [..., N] in x's dtype, in ``out`` if it is given; ``out`` may be ``residual`` and may not overlap ``x``.
    The kernels take bf16 and fp16, N and K that are multiples of 8, rows of x that are aligned to 16 bytes, and groups
    of 32, 64, multiples of 128 or whole rows. A row is the same bit for bit within a range of T; "Ranges of rows" in
    the README lists ranges, kernels, and which of them round each weight to x's dtype first. Other weights are computed
    by reference. On an H100 or H200 kernels add the residual of up to 64 rows, for groups of multiples of 128 and whole
    rows of other than 32 or 64; otherwise the product may be rounded to x's dtype before the sum.
    Many rows, and rows that are not aligned, take the vendor's GEMM: the weight is first written in x's dtype, into
    N * K * 2 bytes of scratch memory, and without a bias torch's switch for reductions in 16 bits lets it round partial
    sums to x's dtype. There and by reference a row may differ by rounding from one T to another; for a fixed T it does
    not depend on the other rows. A weight that is rounded to fp16 is inf beyond 65504.

    Raises ValueError or TypeError for a wrong dtype, shape or device. Semantics: Marlin, Frantar et al. 2024.

    >>> w = pack_w4(torch.tensor([[7.0, -3.0], [0.0, 14.0]]), group_size=2)
    >>> w4a16_linear(torch.tensor([1.0, 2.0]), w).tolist()
    [1.0, 28.0]
    """
    if not isinstance(w, W4Weight):
        check.fail("w4a16_linear", "w", "a W4Weight (see pack_w4)", type(w).__name__, TypeError)
    return _w4a16_linear(x, w.codes, w.scales, w.zeros, w.permutation, w.group_size, bias, residual, out=out)


def check_w4_linear(
    op: str,
    weight_name: str,
    x: torch.Tensor,
    w: W4Parts,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """The arguments of a linear layer with a 4-bit weight fit each other. op, weight_name: for messages."""
    rows, _ = check_x_and_weight(op, x, w, weight_name)
    if bias is not None:
        check.tensor(op, "bias", bias, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "bias", bias, (rows,))
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            check.tensor(op, name, tensor, dtype=x.dtype, last_contiguous=True)
            check.shape(op, name, tensor, (*x.shape[:-1], rows))
    if out is not None:
        check.disjoint(op, "out", out)
    check_weight_device(op, x, w, weight_name)
    check.same(op, "device", x=x, bias=bias, residual=residual, out=out)


def _check_w4a16_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    w = W4Parts(codes, scales, zeros, permutation, group_size)
    check_w4_linear("w4a16_linear", "w", x, w, bias, residual, out)


@kernel_op(
    reference=reference.w4a16_linear,
    check=_check_w4a16_linear,
    kernel="cuda",
    out_may_be=("residual",),
    public="w4a16_linear",
)
def _w4a16_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """w4a16_linear on the parts of a W4Weight."""
    rows, columns, lead = scales.shape[1], x.shape[-1], x.shape[:-1]
    tokens = lead.numel()
    result = into = empty(x, x.dtype, *lead, rows) if out is None else out
    added = residual
    chosen = plan(tokens, rows, columns, _wgmma_sms(x.get_device()) if x.is_cuda else 0)
    by_kernel = chosen.kernel != "vendor"
    if x.ndim != 2 or not by_kernel or permutation is not None:
        if permutation is None:
            shows = _shows_as_matrices(x, result, residual, rows)
        else:
            shows = out is None and residual is None and _fits(permutation, x)
        if not (by_kernel and shows):
            _check_arguments(x, W4Parts(codes, scales, zeros, permutation, group_size), bias, residual, out)
        if permutation is not None:
            x = x.index_select(-1, permutation)
        x, into = x.reshape(tokens, columns), result.reshape(tokens, rows)
        if residual is not None:
            added = into if residual is result else residual.reshape(tokens, rows)
    if by_kernel:
        scratch = empty(x, torch.float32, chosen.scratch) if chosen.scratch and x.is_cuda else None
        of_plan = (scratch, chosen.tile, chosen.splits, chosen.ctas)
        try:
            layer = (codes, scales, zeros, group_size, bias)
            if not kernels.w4a16_linear(into, x, *layer, added, *of_plan):  # no kernel adds the residual
                product = empty(x, x.dtype, tokens, rows)
                kernels.w4a16_linear(product, x, *layer, None, *of_plan)
                torch.add(product, added, out=into)
        except UnsupportedError:
            if x.data_ptr() % 16 == 0 and (tokens == 1 or x.stride(0) % 8 == 0):
                raise  # of the weight, or a plan that the kernel does not take
            by_kernel = False  # rows of x that are not aligned; if it is also the weight, w4_dequant refuses it too
    if not by_kernel:
        weight = empty(x, x.dtype, rows, columns)
        kernels.w4_dequant(weight, codes, scales, zeros, group_size)
        if bias is None and added is None:
            torch.mm(x, weight.T, out=into)
        elif bias is None:
            torch.addmm(added, x, weight.T, out=into)
        else:  # the vendor's epilogue may round before it adds the bias
            product = torch.mm(x, weight.T, out_dtype=torch.float32)
            torch.add(product if added is None else product.add_(added), bias, out=into)
    if into.data_ptr() != result.data_ptr():
        result.copy_(into.view(result.shape))
    return result


launch_w4a16_linear = _w4a16_linear.kernel_op.launch  # type: ignore[attr-defined]
"""The launch alone, for an op of another family that has its own check and reference."""


def _shows_as_matrices(x: torch.Tensor, result: torch.Tensor, residual: torch.Tensor | None, rows: int) -> bool:
    """Whether [T, K] and [T, N] are views of x, result and residual, which show the entry point what may be wrong."""
    shape = (*x.shape[:-1], rows)
    shows = x.is_contiguous() and result.is_contiguous() and result.shape == shape
    return shows and (residual is None or (residual.is_contiguous() and residual.shape == shape))


def _fits(permutation: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether x's columns in another order, a copy, show the entry point all that may be wrong with x."""
    return permutation.dtype == torch.int64 and permutation.shape == x.shape[-1:] and x.stride(-1) == 1


def _check_arguments(
    x: torch.Tensor,
    w: W4Parts,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """What the kernel's launch checks: the arguments fit each other, and ``out`` overlaps no input."""
    check_w4_linear("w4a16_linear", "w", x, w, bias, residual, out)
    if out is None:
        return
    if residual is not None:
        check.no_overlap("w4a16_linear", "out", out, "residual", residual, may_be_same=True)
    for name, part in (("x", x), ("bias", bias), ("w", w.codes), ("w", w.scales), ("w", w.zeros)):
        if part is not None:
            check.no_overlap("w4a16_linear", "out", out, name, part)


@functools.cache
def _wgmma_sms(device: int) -> int:
    """SMs of a GPU that has wgmma, else 0."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
