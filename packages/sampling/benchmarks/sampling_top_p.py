"""Shapes of record of top_p_sampling_from_probs, p = 0.9: rows x V, float32, in L2; us on one H200."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))
import sampling_rows
from sampling_rows import TOP_P, make, operations, traffic

WARM = True
LAUNCHES = 2  # counted in the limit: few rows are split over the GPU, then combined
TARGETS = {
    "1x51200": 8.35,
    "4x51200": 8.28,
    "32x1024": 5.27,
    "128x51200": 16.5,
    "1x128256": 16.7,
    "32x128256": 31.6,
    "256x128256": 51.2,
}
set_bytes = traffic
__all__ = ["make", "operations", "set_bytes", "traffic"]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(probs: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> Any:
        return kestrel_sampling.top_p_sampling_from_probs(probs, TOP_P, seed=seed, offset=offset)

    return {"kestrel": kestrel, **sampling_rows.peers(top_p=TOP_P)}
