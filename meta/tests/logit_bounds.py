"""How far logits in float32 may differ that are computed in two ways."""

from __future__ import annotations

ROUNDING = {"rtol": 0, "atol": 1e-5}
"""Of order 1, after two layers: as much as 168 roundings of 2^-24 that all have one sign."""
ROUNDING_OF_TINY = {"rtol": 0, "atol": 1e-4}
"""Of up to 20, of the demo's trained model after seven layers: as much as 105 roundings of 2^-20."""
