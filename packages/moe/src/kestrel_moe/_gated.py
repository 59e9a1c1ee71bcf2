"""The launches of the gated activations: three formulas, one kernel."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, allocator, empty

from ._checks import check_gated_input, check_out
from ._rows import as_rows, written

_kernels = Binary("kestrel_moe")
# op -> (whether the activation is SiLU instead of GELU, what is added to g)
_FORMULAS = {"silu_and_mul": (True, 0.0), "gelu_and_mul": (False, 0.0), "gelu_residual": (False, 1.0)}


def launch(op: str, x: torch.Tensor, out: torch.Tensor | None, approximate: str = "none") -> torch.Tensor:
    """x [..., 2F] into ``out``, or a new tensor [..., F]."""
    silu, gate_offset = _FORMULAS[op]
    if out is None:
        *leading, width = x.shape
        out = empty(x, x.dtype, *leading, width // 2)
    if x.ndim == 2:
        _kernels.gated(out, x, silu, approximate, gate_offset)
        return out
    rows, into = as_rows(x, out, lambda: check_out(op, out, (*x.shape[:-1], check_gated_input(op, x)), x))
    _kernels.gated(into, rows, silu, approximate, gate_offset)
    return written(into, out)


def launch_fp8(op: str, x: torch.Tensor, approximate: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, 2F] to FP8 codes [T, F] and scales [T, 1]; ``op`` names the formula."""
    silu, gate_offset = _FORMULAS[op]
    tokens, width = x.shape[0], x.shape[1] // 2
    new = allocator(x)
    q, scale = new((tokens, width), (width, 1), torch.float8_e4m3fn), new((tokens, 1), (1, 1), torch.float32)
    _kernels.gated_fp8(q, scale, x, silu, approximate, gate_offset)
    return q, scale
