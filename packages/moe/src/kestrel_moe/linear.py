"""Linear layers of the feed-forward block: with a residual, for few tokens, and for router logits."""

from __future__ import annotations

import torch

from kestrel_quant import W4Weight
from kestrel_quant.reference import w4a16_linear as reference_of_w4
from kestrel_quant.w4a16 import W4Parts, check_w4_linear, launch_w4a16_linear
from kestrel_runtime import Binary, UnsupportedError, check, empty, kernel_op

from . import reference
from ._checks import check_like, check_linear, check_out, check_overlaps, check_vector
from ._dense import FEW_ELEMENTS, FEW_TOKENS, by_vendor, choose, prepared
from ._rows import as_rows, written

_kernels = Binary("kestrel_moe")
# The largest cases of the kernels. Beyond them the vendor's GEMM is as fast or faster (EXPERIMENTS.md).
_ROUTER_EXPERTS = 1024  # for more than one token
_ROUTER_CTAS = 256
_ROUTER_TOKENS_FLOAT32 = 64


def _router_cluster(width: int) -> int:
    """The CTAs that split K: so many that each of a CTA's four warps has at most three tiles of 64 columns, or 8."""
    return 8 if width > 3072 else 4 if width > 1536 else 2 if width > 768 else 1


def _max_router_tokens(dtype: torch.dtype, experts: int, width: int) -> int:
    """The most tokens that the kernels of router_gemm take; in 16 bits a cluster has a tile of 32 by 32."""
    if dtype == torch.float32:
        return _ROUTER_TOKENS_FLOAT32
    if experts > _ROUTER_EXPERTS:
        return 1
    return 32 * (_ROUTER_CTAS // (_router_cluster(width) * -(-experts // 32 or -1)))


def _prepared(
    op: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as [T, K], the result [..., N], and the tensor [T, N] that a kernel writes."""
    if out is None:
        out = empty(x, dtype, *x.shape[:-1], weight.shape[0])
    if x.ndim == 2:
        return x, out, out

    def check_all() -> None:
        _check_input(op, x)
        check_out(op, out, (*x.shape[:-1], weight.shape[0]), x, dtype=dtype)

    rows, into = as_rows(x, out, check_all)
    return rows, out, into


def _check_input(op: str, x: torch.Tensor) -> None:
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    if x.ndim == 0:
        check.fail(op, "x", "at least 1 dimension [..., K]", f"shape {tuple(x.shape)}")


def _check_fused_linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
) -> None:
    op = "fused_linear_residual"
    _check_input(op, x)
    width = check_linear(op, x, "x", weight, "weight")
    check_vector(op, "bias", bias, width, x)
    check.tensor(op, "residual", residual)
    check_like(op, "residual", residual, (*x.shape[:-1], width), x)
    check_out(op, out, (*x.shape[:-1], width), x)


def fused_linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor | W4Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer added to a residual: ``x @ weight.T + bias + residual``.

    x: [..., K] bf16, fp16 or float32. weight: [N, K], bias: [N] or None, residual: [..., N], all in x's dtype; or a
    4-bit weight for x's dtype, of :func:`kestrel_quant.pack_w4`.
    *Constant*: weight, bias. Accumulated in float32, rounded once; of 4-bit weights and the vendor's GEMM see below.

    Returns [..., N] in x's dtype, in ``out`` if it is given; ``out`` may be ``residual`` but not ``x``.
    With a 4-bit weight this is :func:`kestrel_quant.w4a16_linear` with a residual: what its kernels cover, where a
    product is rounded before the sum and which ranges of T keep the bits of a row is said there. What follows is about
    other weights.
    Kernels cover aligned rows that do not overlap: one token, 2 to 4 tokens with N up to 4096 and N*K up to 2^24, and
    more in 16 bits on an H100 or H200 where they are faster than the vendor's GEMM. There, where it is faster still,
    its own epilogue adds bias and residual. Other cases run the vendor's GEMM, rounded to x's dtype, and then
    torch.add, with torch's switches for reduced precision (TF32, reductions in 16 bits). There a product beyond 65504
    is inf in fp16. Results are bit-identical between calls with the same number of rows T, whether ``out`` is
    ``residual`` or not; the order of summation may depend on T.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: torch.nn.functional.linear.

    >>> fused_linear_residual(torch.tensor([[1.0, 2.0]]), 3 * torch.eye(2), None, torch.ones(1, 2)).tolist()
    [[4.0, 7.0]]
    """
    if isinstance(weight, W4Weight):
        parts = (weight.codes, weight.scales, weight.zeros, weight.permutation, weight.group_size)
        return _fused_linear_residual_w4(x, *parts, bias, residual, out=out)
    if not isinstance(weight, torch.Tensor):
        check.fail("fused_linear_residual", "weight", "a tensor or a W4Weight", type(weight).__name__, TypeError)
    return _fused_linear_residual(x, weight, bias, residual, out=out)


@kernel_op(
    reference=reference.fused_linear_residual,
    check=_check_fused_linear_residual,
    kernel="cuda",
    out_may_be=("residual",),
)
def _fused_linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fused_linear_residual with a weight in x's dtype."""

    def check_all() -> None:
        _check_fused_linear_residual(x, weight, bias, residual, out)

    rows, more, result, into = prepared(x, weight.shape[0], residual, out, check_all)
    try:
        launched = _kernels.fused_linear_residual(into, rows, weight, bias, more, "none", *choose(rows, *weight.shape))
    except UnsupportedError:  # rows that are not aligned
        launched = False
    if not launched:
        by_vendor(rows, weight, bias, more, out=into)
    return written(into, result)


fused_linear_residual.kernel_op = _fused_linear_residual.kernel_op  # type: ignore[attr-defined]


def _check_fused_linear_residual_w4(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
) -> None:
    op = "fused_linear_residual"
    check.tensor(op, "residual", residual)
    w = W4Parts(codes, scales, zeros, permutation, group_size)
    check_w4_linear(op, "weight", x, w, bias, residual, out)


@kernel_op(
    reference=reference_of_w4,
    check=_check_fused_linear_residual_w4,
    kernel="cuda",
    out_may_be=("residual",),
    public="fused_linear_residual",
)
def _fused_linear_residual_w4(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fused_linear_residual on the parts of a W4Weight."""
    if residual is None:
        raise TypeError("residual")  # the op's check, which follows a failed launch, raises the full message
    return launch_w4a16_linear(x, codes, scales, zeros, permutation, group_size, bias, residual, out=out)


def _check_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> None:
    op = "gemv"
    _check_input(op, x)
    width = check_linear(op, x, "x", weight, "weight")
    check_vector(op, "bias", bias, width, x)
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.gemv, check=_check_gemv, kernel="cuda", out_may_be=())
def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer for few tokens: ``x @ weight.T + bias``.

    x: [..., K] bf16, fp16 or float32, any number of rows T. weight: [N, K], bias: [N] or None, in x's dtype.
    *Constant*: weight, bias. Accumulated in float32, rounded once; of the vendor's GEMM see below.

    Returns [..., N] in x's dtype, in ``out`` if it is given; ``out`` may not overlap ``x``.
    The kernel takes rows that are aligned multiples of 16 bytes, T of 1 to 4, and for T of 2 to 4 weights of up to 2^24
    elements. There a row is the same bit for bit for every T. More rows and larger weights take the vendor's GEMM with
    torch's switches for reduced precision: TF32, and reductions in 16 bits, which torch allows unless told otherwise
    and which round partial sums to x's dtype. There and by reference a row may differ by rounding from one T to
    another.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: torch.nn.functional.linear.

    >>> gemv(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, -1.0]])).tolist()
    [3.0, -2.0]
    """
    rows, result, into = _prepared("gemv", x, weight, out, x.dtype)
    tokens = rows.shape[0]
    if tokens > 1 and (tokens > FEW_TOKENS or weight.numel() > FEW_ELEMENTS):
        _check_gemv(x, weight, bias, out)
        check_overlaps("gemv", out, x=x, weight=weight, bias=bias)
        if bias is None:
            torch.mm(rows, weight.T, out=into)
        elif x.dtype == torch.float32:
            torch.addmm(bias, rows, weight.T, out=into)
        else:  # the vendor's epilogue may round before it adds the bias
            torch.add(torch.mm(rows, weight.T, out_dtype=torch.float32), bias, out=into)
    else:
        _kernels.gemv(into, rows, weight, bias)
    return written(into, result)


def _check_router_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> None:
    op = "router_gemm"
    _check_input(op, x)
    experts = check_linear(op, x, "x", weight, "weight")
    check_out(op, out, (*x.shape[:-1], experts), x, dtype=torch.float32)


@kernel_op(reference=reference.router_gemm, check=_check_router_gemm, kernel="cuda", out_may_be=())
def router_gemm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Router logits in float32: ``x @ weight.T`` without the rounding that a linear layer in 16 bits adds.

    x: [..., Hd] bf16, fp16 or float32. weight: [E, Hd] in x's dtype. *Constant*: weight. Accumulated in float32.

    Returns float32 [..., E], in ``out`` if it is given.
    The kernels take rows that are aligned multiples of 16 bytes and T rows: T = 1; in float32 T up to 64; in 16 bits,
    with up to 1024 experts, T up to 32 * (256 // (C * ceil(E / 32))) with C = 1, 2, 4 or 8 for Hd up to 768, 1536, 3072
    or more. That is 1024 rows for 64 experts and Hd 2048, and 128 for 256 experts and Hd 7168. There a row is the same
    bit for bit for every T. More rows take the vendor's GEMM, in float32 with torch's switch for TF32; there and by
    reference a row may differ by rounding from one T to another.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device.
    Semantics: the gate of a routed layer, as vLLM's router GEMM computes it.

    >>> router_gemm(torch.tensor([[1.0, 2**-9]]).bfloat16(), torch.ones(1, 2).bfloat16()).item()
    1.001953125
    """
    rows, result, into = _prepared("router_gemm", x, weight, out, torch.float32)
    tokens = rows.shape[0]
    if tokens > 1 and weight.ndim == 2 and tokens > _max_router_tokens(x.dtype, *weight.shape):
        _check_router_gemm(x, weight, out)
        check_overlaps("router_gemm", out, x=x, weight=weight)
        if x.dtype == torch.float32:
            torch.mm(rows, weight.T, out=into)
        else:
            torch.mm(rows, weight.T, out_dtype=torch.float32, out=into)
    else:
        _kernels.router_gemm(into, rows, weight, _router_cluster(rows.shape[1]))
    return written(into, result)
