"""Shapes of record of sampling_from_probs: rows x V, float32, in L2; us on one H200."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))
import sampling_rows
from sampling_rows import make, operations, traffic

WARM = True
LAUNCHES = 2  # counted in the limit: few rows are split over the GPU, then combined
TARGETS = {
    "1x51200": 6.59,
    "4x51200": 6.53,
    "32x1024": 2.45,
    "128x51200": 9.43,
    "1x128256": 12.8,
    "32x128256": 14.1,
    "256x128256": 37.5,
}
set_bytes = traffic
__all__ = ["make", "operations", "set_bytes", "traffic"]


def candidates() -> dict[str, Callable[..., object]]:
    def kestrel(probs: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> Any:
        return kestrel_sampling.sampling_from_probs(probs, seed=seed, offset=offset)

    return {"kestrel": kestrel, **sampling_rows.peers()}
