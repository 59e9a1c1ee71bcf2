"""A dense two-layer MLP with GELU, biases and residual."""

from __future__ import annotations

import torch

from kestrel_runtime import UnsupportedError, check, empty, kernel_op

from . import reference
from ._checks import check_like, check_linear, check_out, check_vector
from ._dense import by_vendor, choose, kernels, padded, prepared
from ._dense_plan import Kernel, choose_second
from ._rows import written


def _check_fused_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str = "gelu_tanh",
    out: torch.Tensor | None = None,
) -> None:
    op = "fused_mlp"
    check.tensor(op, "x", x, dtype=check.FLOATS, last_contiguous=True)
    if x.ndim < 2:
        check.fail(op, "x", "at least 2 dimensions [..., N]", f"shape {tuple(x.shape)}")
    inner = check_linear(op, x, "x", w1, "w1")
    check_vector(op, "b1", b1, inner, x)
    width = check_linear(op, x, "x", w2, "w2", width=inner)
    check_vector(op, "b2", b2, width, x)
    check_like(op, "residual", residual, (*x.shape[:-1], width), x)
    check.choice(op, "activation", activation, ("gelu_tanh", "gelu"))
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.fused_mlp, check=_check_fused_mlp, kernel="cuda", out_may_be=("residual",))
def fused_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Two linear layers with GELU between them: ``residual + act(x @ w1.T + b1) @ w2.T + b2``.

    x: [..., N] bf16, fp16 or float32, at least 2-D. w1: [I, N], w2: [M, I], b1: [I] or None, b2: [M] or None,
    residual: [..., M] or None, all in x's dtype. *Constant*: w1, b1, w2, b2.
    activation: "gelu_tanh" (tanh approximation) or "gelu" (erf).
    Accumulated in float32; the hidden layer is rounded once to x's dtype (it is the operand of the second product),
    the result once.

    Returns [..., M] in x's dtype, in ``out`` if it is given; ``out`` may be ``residual`` but not ``x``.
    Each layer runs as :func:`fused_linear_residual` does; the vendor's GEMM has an epilogue for "gelu_tanh". Results
    are bit-identical between calls with the same number of rows T, whether ``out`` is ``residual`` or not; the order of
    summation may depend on T.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, or an unknown ``activation``.
    Semantics: torch.nn.functional.linear and gelu.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> fused_mlp(x, 10 * torch.eye(2), None, torch.eye(2), torch.tensor([0.5, 0.5]), residual=x).tolist()
    [[11.5, 22.5]]
    """

    def check_all() -> None:
        _check_fused_mlp(x, w1, b1, w2, b2, residual, activation, out)

    if x.ndim < 2:
        check_all()
    rows, more, result, into = prepared(x, w2.shape[0], residual, out, check_all)
    tokens, inner = rows.shape[0], w1.shape[0]
    up = choose(rows, *w1.shape, activation)
    down = choose_second(tokens, *w2.shape, up, choose(rows, *w2.shape))
    tiles = (Kernel.COOPERATIVE, Kernel.PING_PONG)
    by_tiles = up.kernel in tiles or (up.kernel == Kernel.VENDOR_EPILOGUE and down.kernel in tiles)
    stride = padded(inner) if by_tiles else inner
    hidden = empty(x, x.dtype, tokens, stride)
    if stride != inner:
        hidden = hidden[:, :inner]
    try:
        launched = kernels.fused_mlp(into, hidden, rows, w1, b1, w2, b2, more, activation, *up, *down)
    except UnsupportedError:  # rows that are not aligned
        launched = 0
    if launched < 1:
        by_vendor(rows, w1, b1, None, activation, out=hidden)
    if launched < 2:
        by_vendor(hidden, w2, b2, more, out=into)
    return written(into, result)
