"""Moondream's gated activation GELU(h) * (g + 1)."""

from __future__ import annotations

import torch

from kestrel_runtime import check, kernel_op

from . import _gated, reference
from ._checks import APPROXIMATIONS, check_gated_input, check_out


def _check_gelu_residual(x: torch.Tensor, approximate: str = "none", out: torch.Tensor | None = None) -> None:
    op = "gelu_residual"
    width = check_gated_input(op, x)
    check.choice(op, "approximate", approximate, APPROXIMATIONS)
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.gelu_residual, check=_check_gelu_residual, kernel="cuda", out_may_be_columns_of=("x",))
def gelu_residual(x: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """Gated activation ``GELU(h) * (g + 1)`` of the two halves of the last dimension.

    x: [..., 2F] bf16, fp16 or float32; h = x[..., :F], g = x[..., F:]. Only the last dimension must be contiguous.
    approximate: "none" (erf) or "tanh". Computed in float32, rounded once.

    Returns [..., F] in x's dtype, in ``out`` if it is given (of that shape and dtype); ``out`` may be one half of x. A
    row does not depend on the batch around it.

    Raises ValueError or TypeError for a wrong dtype, an odd last dimension, an unknown ``approximate`` or a wrong
    ``out``. Semantics: the expert activation of Moondream 3.

    >>> gelu_residual(torch.tensor([[0.0, 1e4, 5.0, 2.0]])).tolist()
    [[0.0, 30000.0]]
    """
    return _gated.launch("gelu_residual", x, out, approximate)
