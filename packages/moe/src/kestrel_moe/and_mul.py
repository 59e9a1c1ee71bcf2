"""The gated activations SiLU(h) * g and GELU(h) * g."""

from __future__ import annotations

import torch

from kestrel_runtime import check, kernel_op

from . import _gated, reference
from ._checks import APPROXIMATIONS, check_gated_input, check_out


def _check_silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> None:
    op = "silu_and_mul"
    width = check_gated_input(op, x)
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.silu_and_mul, check=_check_silu_and_mul, kernel="cuda", out_may_be_columns_of=("x",))
def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Gated activation ``SiLU(h) * g`` of the two halves of the last dimension, SiLU(h) = h / (1 + exp(-h)).

    x: [..., 2F] bf16, fp16 or float32; h = x[..., :F], g = x[..., F:]. Only the last dimension must be contiguous.
    Computed in float32, rounded once.

    Returns [..., F] in x's dtype, in ``out`` if it is given (of that shape and dtype); ``out`` may be one half of x. A
    row does not depend on the batch around it.

    Raises ValueError or TypeError for a wrong dtype, an odd last dimension or a wrong ``out``.
    Semantics: vLLM's silu_and_mul; "GLU variants improve transformer", Shazeer 2020.

    >>> silu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]])).tolist()
    [[0.0, 200.0]]
    """
    return _gated.launch("silu_and_mul", x, out)


def _check_gelu_and_mul(x: torch.Tensor, approximate: str = "none", out: torch.Tensor | None = None) -> None:
    op = "gelu_and_mul"
    width = check_gated_input(op, x)
    check.choice(op, "approximate", approximate, APPROXIMATIONS)
    check_out(op, out, (*x.shape[:-1], width), x)


@kernel_op(reference=reference.gelu_and_mul, check=_check_gelu_and_mul, kernel="cuda", out_may_be_columns_of=("x",))
def gelu_and_mul(x: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """Gated activation ``GELU(h) * g`` of the two halves of the last dimension.

    x: [..., 2F] bf16, fp16 or float32; h = x[..., :F], g = x[..., F:]. Only the last dimension must be contiguous.
    approximate: "none" (erf) or "tanh". Computed in float32, rounded once.

    Returns [..., F] in x's dtype, in ``out`` if it is given (of that shape and dtype); ``out`` may be one half of x. A
    row does not depend on the batch around it.

    Raises ValueError or TypeError for a wrong dtype, an odd last dimension, an unknown ``approximate`` or a wrong
    ``out``. Semantics: vLLM's gelu_and_mul and gelu_tanh_and_mul; "GLU variants improve transformer", Shazeer 2020.

    >>> gelu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]])).tolist()
    [[0.0, 200.0]]
    """
    return _gated.launch("gelu_and_mul", x, out, approximate)
