"""The linear layers of a decode step of one sequence with 4-bit weights, with what stands around them."""

from __future__ import annotations

import torch

from kestrel_runtime import UnsupportedError, check, empty, kernel_op

from . import reference
from ._checks import W4Parts, check_weight_device, check_x_and_weight
from ._launch import kernels
from .w4a16 import W4Weight

ACTIVATIONS = ("none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
_TILE = 16  # rows of a tile, of which a gated layer takes one of each half
_MOST_COLUMNS = 40000  # x in the shared memory of any supported GPU
_MOST_NORM_COLUMNS = 8192  # x in the registers of a CTA: kTokenNormPacks of csrc/w4a16_token.cu


def w4a16_token(
    x: torch.Tensor,
    w: W4Weight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer with a 4-bit weight for one token: ``act(norm(x) @ weight.T + bias) + residual``.

    x: [..., K] of the dtype the weight was packed for (bf16, fp16 or float32). w: as in :func:`w4a16_linear`. bias: [N]
    in x's dtype or None.
    norm_weight: [K] in x's dtype: x is normalised, x / sqrt(mean(x^2) + norm_eps) * (norm_weight + norm_weight_bias),
        and rounded to its dtype. None: it is taken as it is.
    activation: "none", or "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul" of the two halves of the product, the
        activated one first.
    residual: added before the result is rounded, in its shape and dtype. *Constant*: w, bias, norm_weight.

    Returns [..., N], or [..., N / 2] with an activation, in x's dtype, in ``out`` if it is given; ``out`` may be
    ``residual`` and may not overlap other inputs. Accumulated in float32. The kernel sums (16 + code) * x, subtracts
    (16 + zero) * sum(x), and scales the difference, by blocks of 128 columns: the rounding of these sums is relative to
    scale * (16 + code) * |x|, not to the product with a small |code - zero|. A scale of 0 (a group of zeros) gives 0.
    The kernel takes one token, and weights of which :func:`w4a16_token_covers` is true; x and norm_weight must be
    aligned to 16 bytes. Other calls are computed by reference, which is slow: use w4a16_linear there. A row may differ
    by rounding from one number of tokens to another. For 16-bit weights: kestrel_norm.rms_norm_linear and
    kestrel_moe.fused_linear_residual, which takes 4-bit ones, too.

    Raises ValueError or TypeError for a wrong dtype, shape, name or device. Semantics: torch.nn.functional.rms_norm,
    Marlin (Frantar et al. 2024), the gate of Llama's feed-forward.

    >>> from kestrel_quant import pack_w4
    >>> w = pack_w4(torch.tensor([[7.0, -3.0], [0.0, 14.0]]), group_size=2)
    >>> w4a16_token(torch.tensor([1.0, 2.0]), w, residual=torch.tensor([0.5, 0.0])).tolist()
    [1.5, 28.0]
    """
    if not isinstance(w, W4Weight):
        check.fail("w4a16_token", "w", "a W4Weight (see pack_w4)", type(w).__name__, TypeError)
    parts = (w.codes, w.scales, w.zeros, w.permutation, w.group_size)
    norm = (norm_weight, norm_eps, norm_weight_bias)
    return _w4a16_token(x, *parts, bias, *norm, activation, residual, out=out)


def w4a16_token_covers(w: W4Weight, *, norm: bool = False, gated: bool = False) -> bool:
    """Whether the kernel of :func:`w4a16_token` takes this weight, on every supported GPU.

    norm: with a norm_weight. gated: with an activation.

    It takes bf16 and fp16, groups of multiples of 128 or whole rows, no permutation, results [N] or [N / 2] that are a
    multiple of 16, and K that is a multiple of 8, up to 40000 (an H100 or H200 takes 100000) and with a norm 8192.
    Raises TypeError for another type of weight.

    >>> from kestrel_quant import pack_w4
    >>> w = pack_w4(torch.ones(48, 128, dtype=torch.bfloat16))
    >>> w4a16_token_covers(w), w4a16_token_covers(w, gated=True)  # 48 and 24 results
    (True, False)
    """
    if not isinstance(w, W4Weight):
        check.fail("w4a16_token_covers", "w", "a W4Weight (see pack_w4)", type(w).__name__, TypeError)
    rows, columns = w.shape
    most = _MOST_NORM_COLUMNS if norm else _MOST_COLUMNS
    return (
        w.dtype in (torch.bfloat16, torch.float16)
        and w.permutation is None
        and (w.group_size % 128 == 0 or w.group_size == columns)
        and rows % (2 * _TILE if gated else _TILE) == 0
        and columns % 8 == 0
        and columns <= most
    )


def _check_w4a16_token(
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
    out: torch.Tensor | None = None,
) -> None:
    op, w = "w4a16_token", W4Parts(codes, scales, zeros, permutation, group_size)
    rows, columns = check_x_and_weight(op, x, w)
    for name, vector, size in (("bias", bias, rows), ("norm_weight", norm_weight, columns)):
        if vector is not None:
            check.tensor(op, name, vector, dtype=x.dtype, last_contiguous=True)
            check.shape(op, name, vector, (size,))
    check.number(op, "norm_eps", norm_eps, minimum=0)
    check.number(op, "norm_weight_bias", norm_weight_bias)
    check.choice(op, "activation", activation, ACTIVATIONS)
    if activation != "none" and rows % 2:
        check.fail(op, "w", "an even number of rows", rows)
    shape = (*x.shape[:-1], rows if activation == "none" else rows // 2)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            check.tensor(op, name, tensor, dtype=x.dtype, last_contiguous=True)
            check.shape(op, name, tensor, shape)
    if out is not None:
        check.disjoint(op, "out", out)
    check_weight_device(op, x, w)
    check.same(op, "device", x=x, bias=bias, norm_weight=norm_weight, residual=residual, out=out)


@kernel_op(
    reference=reference.w4a16_token,
    check=_check_w4a16_token,
    kernel="cuda",
    out_may_be=("residual",),
    public="w4a16_token",
)
def _w4a16_token(
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
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """w4a16_token on the parts of a W4Weight."""
    if permutation is not None:
        raise UnsupportedError("columns in another order")
    rows = scales.shape[1] if activation == "none" else scales.shape[1] // 2
    result = empty(x, x.dtype, *x.shape[:-1], rows) if out is None else out
    into, added = result, residual
    if x.ndim != 2:
        lead = x.shape[:-1]
        tokens = lead.numel()
        if tokens > 1:
            raise UnsupportedError("more than one token")
        shape = (*lead, rows)  # the rest shows in two dimensions, where the entry point checks it
        for name, tensor in (("out", out), ("residual", residual)):
            if tensor is not None and tensor.shape != shape:
                check.shape("w4a16_token", name, tensor, shape)
        x, into = x.reshape(tokens, x.shape[-1]), result.view(tokens, rows)
        if residual is not None:
            added = into if residual is result else residual.view(tokens, rows)
    weight, norm = (codes, scales, zeros, group_size), (norm_weight, norm_eps, norm_weight_bias)
    kernels.w4a16_token(into, x, *weight, bias, *norm, activation, added)
    return result
