"""The launch that the gated activations share: three formulas, one kernel."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, empty

from ._checks import check_gated_input, check_out
from ._rows import as_rows, written

_kernels = Binary("kestrel_moe")


def launch(
    x: torch.Tensor, out: torch.Tensor | None, silu: bool, approximate: str = "none", shift: float = 0.0
) -> torch.Tensor:
    """activation(h) * (g + shift) of x [..., 2F] into ``out``, or a new tensor [..., F]."""
    if out is None:
        *leading, width = x.shape
        out = empty(x, x.dtype, *leading, width // 2)
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
    q, scale = empty(x, torch.float8_e4m3fn, tokens, width // 2), empty(x, torch.float32, tokens, 1)
    _kernels.gated_fp8(q, scale, x, silu, approximate, shift)
    return q, scale
