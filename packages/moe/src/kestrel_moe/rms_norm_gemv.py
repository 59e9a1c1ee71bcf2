"""RMSNorm of one token, the linear layer after it, and a gated activation, in one launch."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference
from ._checks import check_linear, check_out, check_vector
from ._rows import as_rows, written

_kernels = Binary("kestrel_moe")
ACTIVATIONS = ("none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


def _check_rms_norm_gemv(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    activation: str = "none",
    out: torch.Tensor | None = None,
) -> None:
    op = "rms_norm_gemv"
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    if x.ndim == 0:
        check.fail(op, "x", "at least 1 dimension [..., K]", f"shape {tuple(x.shape)}")
    check_vector(op, "norm_weight", norm_weight, x.shape[-1], x)
    rows = check_linear(op, x, "x", weight, "weight")
    check_vector(op, "bias", bias, rows, x)
    check.number(op, "eps", eps, minimum=0)
    check.number(op, "weight_bias", weight_bias)
    check.choice(op, "activation", activation, ACTIVATIONS)
    if activation != "none" and rows % 2:
        check.fail(op, "weight", "an even number of rows", rows)
    check_out(op, out, (*x.shape[:-1], rows // 2 if activation != "none" else rows), x)


@kernel_op(reference=reference.rms_norm_gemv, check=_check_rms_norm_gemv, kernel="cuda", out_may_be=())
def rms_norm_gemv(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    activation: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of one token, a linear layer, and its gated activation: ``act(norm(x) @ weight.T + bias)``.

    x: [..., K] bf16, fp16 or float32. norm_weight: [K], weight: [N, K], bias: [N] or None, in x's dtype. *Constant*:
    all but x.
    eps, weight_bias: of the norm, x / sqrt(mean(x^2) + eps) * (norm_weight + weight_bias).
    activation: "none", or "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul" of the two halves of the product, the
        activated one first.
    Nothing is rounded before the result: the factor of the norm multiplies the sums, in float32.

    Returns [..., N], or [..., N / 2] with an activation, in x's dtype, in ``out`` if it is given; ``out`` may not
    overlap the inputs. The kernel takes one token whose K elements are a multiple of 16 bytes, aligned to 16 bytes.

    Raises ValueError or TypeError for a wrong dtype, rank, shape, name or device.
    Semantics: torch.nn.functional.rms_norm, then torch.nn.functional.linear, then the gate of Llama's feed-forward.

    >>> x, ones, weight = torch.tensor([[1.0, -1.0]]), torch.ones(2), torch.tensor([[2.0, 1.0], [0.0, 2.0]])
    >>> rms_norm_gemv(x, ones, weight, eps=0.0).tolist()
    [[1.0, -2.0]]
    >>> rms_norm_gemv(x, ones, weight, eps=0.0, activation="silu_and_mul").shape
    torch.Size([1, 1])
    """
    rows = weight.shape[0] // 2 if activation != "none" else weight.shape[0]
    result = empty(x, x.dtype, *x.shape[:-1], rows) if out is None else out
    if x.ndim == 2:
        _kernels.rms_norm_gemv(result, x, norm_weight, weight, bias, eps, weight_bias, activation)
        return result

    def check_all() -> None:
        _check_rms_norm_gemv(x, norm_weight, weight, bias, eps, weight_bias, activation, out)

    tokens, into = as_rows(x, result, check_all)
    _kernels.rms_norm_gemv(into, tokens, norm_weight, weight, bias, eps, weight_bias, activation)
    return written(into, result)
