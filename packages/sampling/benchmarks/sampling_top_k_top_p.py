"""Shapes of record of top_k_top_p_sampling_from_probs, k = 50 and p = 0.9: rows x V, float32, in L2; us on one H200."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))
import sampling_rows
from sampling_rows import TOP_K, TOP_P, make, operations, traffic

WARM = True
LAUNCHES = 2  # counted in the limit: few rows are split over the GPU, then combined
TARGETS = {
    "1x51200": 7.91,
    "4x51200": 7.82,
    "32x1024": 8.12,
    "128x51200": 9.78,
    "1x128256": 7.94,
    "32x128256": 10.3,
    "256x128256": 38.8,
    "8x128256": 8.00,
    "16x151936": 9.24,
    "512x202048": 108,
}
set_bytes = traffic
__all__ = ["make", "operations", "set_bytes", "traffic"]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(probs: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> Any:
        return kestrel_sampling.top_k_top_p_sampling_from_probs(probs, TOP_K, TOP_P, seed=seed, offset=offset)

    return {"kestrel": kestrel, **sampling_rows.peers(top_k=TOP_K, top_p=TOP_P)}
