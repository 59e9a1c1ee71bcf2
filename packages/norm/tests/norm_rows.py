"""Rows that the tests of the references normalise."""

from __future__ import annotations

import torch


def rows_of(t: int, n: int, dtype: torch.dtype, seed: int = 0, mean: float = 1.0) -> torch.Tensor:
    """[t, n], normally distributed with standard deviation 3; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed + 1000 * t + n)
    return (torch.randn(t, n, generator=generator) * 3 + mean).to(dtype)
