"""Shapes of record of prefill with bf16 queries over an FP8 cache. See prefill_shapes.py. Targets in us on one H200."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from prefill_shapes import Dtypes, candidates, operations, result

__all__ = ["TARGETS", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS = {
    "b1 s740 32/32 d64 p1": 12.0,
    "b1 s1024 32/32 d64 p1": 16.5,
    "b8 s2048 32/8 d128 p16": 473.0,
    "b2 s8192 32/8 d128 p16": 1740.0,
    "b1 s16384 32/8 d128 p16": 3530.0,
    "b1 sq512 kv8192 32/8 d128 p16": 119.0,
    "b4 sq512 kv8192 32/8 d128 p16": 448.0,
    "b1 sq512 kv32768 16/2 d128 p16": 244.0,
    "b1 sq128 kv8192 32/8 d128 p16": 37.0,
}
_dtypes = Dtypes(queries=torch.bfloat16, keys=torch.float8_e4m3fn)
make, traffic, set_bytes = _dtypes.make, _dtypes.traffic, _dtypes.traffic
