"""Weights and inputs of the GPU tests of 4-bit layers."""

from __future__ import annotations

import torch

from kestrel_quant import W4Weight, reference
from kestrel_quant.w4a16 import from_codes


def weight(
    n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool = True, size: float | None = None
) -> W4Weight:
    """Random codes. size: of the scales; by default results have the size of x."""
    g = torch.Generator("cuda").manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=g, device="cuda")
    size = 1 / 4 / k**0.5 if size is None else size
    scales = ((torch.rand(n, k // group, generator=g, device="cuda") + 0.5) * size).to(dtype)
    zeros = None if symmetric else torch.randint(0, 17, (n, k // group), generator=g, device="cuda")
    return from_codes(codes, scales, group, zeros)


def exact_weight(w: W4Weight) -> torch.Tensor:
    """[N, K] in float64."""
    return reference.w4_dequant(w.codes, w.scales, w.zeros, w.group_size, torch.float32)[:, : w.shape[1]].double()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)
