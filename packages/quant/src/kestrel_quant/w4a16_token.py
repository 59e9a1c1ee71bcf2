"""The linear layers of a decode step of one sequence with 4-bit weights, with what stands around them."""

from __future__ import annotations

import torch

from kestrel_runtime import UnsupportedError, check, empty, kernel_op

from . import reference
from ._checks import check_x_and_weight
from ._launch import kernels
from .w4a16 import W4Weight

ACTIVATIONS = ("none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


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
    ``residual`` and may not overlap other inputs. Products are accumulated in float32.
    The kernel takes bf16 and fp16, one token, groups that are multiples of 128 or whole rows, weights without a
    permutation, K that is a multiple of 8 and, with a norm, up to 8192, and results that are multiples of 16; x and
    norm_weight must be aligned to 16 bytes, and x must fit into shared memory. Several tokens are computed by
    reference, which is slow: use w4a16_linear there. A row may differ by rounding from one number of tokens to another.
    For 16-bit weights: kestrel_norm.rms_norm_linear and kestrel_moe.fused_linear_residual.

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
    op = "w4a16_token"
    rows, columns = check_x_and_weight(op, x, codes, scales, zeros, permutation, group_size)
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
    for part in (codes, scales, zeros, permutation):
        check.same(op, "device", x=x, w=part)
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
        tokens = x.shape[:-1].numel()
        if tokens > 1:
            raise UnsupportedError("more than one token")
        shape = (*x.shape[:-1], rows)  # the rest shows in two dimensions, where the entry point checks it
        for name, tensor in (("out", result), ("residual", residual)):
            if tensor is not None and tensor.shape != shape:
                check.shape("w4a16_token", name, tensor, shape)
        x, into = x.reshape(tokens, x.shape[-1]), result.view(tokens, rows)
        added = None if residual is None else residual.view(tokens, rows)
    weight, norm = (codes, scales, zeros, group_size), (norm_weight, norm_eps, norm_weight_bias)
    kernels.w4a16_token(into, x, *weight, bias, *norm, activation, added)
    return result
