"""The launch that the gated activations share: three formulas, one kernel."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary

from ._checks import check_gated_input, check_out
from ._rows import as_rows, written

_kernels = Binary("kestrel_moe")


def launch(
    x: torch.Tensor, out: torch.Tensor | None, silu: bool, approximate: str = "none", shift: float = 0.0
) -> torch.Tensor:
    """activation(h) * (g + shift) of x [..., 2F] into ``out``, or a new tensor [..., F]."""
    if out is None:
        out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if x.ndim == 2:
        _kernels.gated(out, x, silu, approximate, shift)
        return out
    rows, into = as_rows(x, out, lambda: check_out("gated", out, (*x.shape[:-1], check_gated_input("gated", x)), x))
    _kernels.gated(into, rows, silu, approximate, shift)
    return written(into, out)


def launch_fp8(
    x: torch.Tensor, silu: bool, approximate: str = "none", shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of x [T, 2F], quantised to FP8 with a scale per row."""
    tokens, width = x.shape
    q = torch.empty(tokens, width // 2, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    _kernels.gated_fp8(q.view(torch.uint8), scale, x, silu, approximate, shift)
    return q, scale
