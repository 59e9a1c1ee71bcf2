"""Values for GPU tests: random ones, and rows of the kinds that every op must take."""

from __future__ import annotations

import torch

ROW_KINDS = ("large", "denormal", "zero", "equal")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Normally distributed on the GPU; the same for the same arguments."""
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)


def rows_of(kind: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of one of ROW_KINDS, made of float32 x of standard deviation 1, in a dtype of 16 bits."""
    rows = {
        "large": x.clamp(-3, 3) * 1e4,
        "denormal": x * (torch.finfo(dtype).smallest_normal / 8),
        "zero": torch.zeros_like(x),
        "equal": torch.full_like(x, 0.3),
    }
    return rows[kind].to(dtype)
