"""The sum over a token's choices."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference
from ._checks import check_out

_kernels = Binary("kestrel_moe")


def _check_moe_sum(x: torch.Tensor, out: torch.Tensor | None = None) -> None:
    op = "moe_sum"
    check.tensor(op, "x", x, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check_out(op, out, (x.shape[0], x.shape[2]), x)


@kernel_op(reference=reference.moe_sum, check=_check_moe_sum, kernel="cuda", out_may_be=())
def moe_sum(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Add up the K results of each token, in order of k.

    x: [T, K, N] bf16, fp16 or float32, any K; only the last dimension must be contiguous. Summed in float32 from k = 0
    upwards, rounded once.

    Returns [T, N] in x's dtype, in ``out`` if it is given (of that shape and dtype). A row does not depend on the
    batch around it.

    Raises ValueError or TypeError for a wrong dtype, rank or ``out``. Semantics: vLLM's moe_sum.

    >>> moe_sum(torch.tensor([[[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]])).tolist()
    [[111.0, 222.0]]
    """
    if out is None:
        tokens, _, columns = x.shape
        out = empty(x, x.dtype, tokens, columns)
    _kernels.moe_sum(out, x)
    return out
