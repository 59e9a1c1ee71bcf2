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
    "1x51200": 24.5,
    "4x51200": 24.3,
    "32x1024": 8.12,
    "128x51200": 35.4,
    "1x128256": 26.2,
    "32x128256": 31.1,
    "256x128256": 67.3,
}
set_bytes = traffic
__all__ = ["make", "operations", "set_bytes", "traffic"]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(probs: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> Any:
        return kestrel_sampling.top_k_top_p_sampling_from_probs(probs, TOP_K, TOP_P, seed=seed, offset=offset)

    return {"kestrel": kestrel, **sampling_rows.peers(top_k=TOP_K, top_p=TOP_P)}
