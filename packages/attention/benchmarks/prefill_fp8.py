"""Shapes of record of prefill in FP8. See prefill_shapes.py. Targets in us on one H200."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from prefill_shapes import Dtypes, candidates, operations, result

__all__ = ["PRECISION", "TARGETS", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS = {
    "b1 s740 32/32 d64 p1": 9.5,
    "b1 s1024 32/32 d64 p1": 13.2,
    "b8 s2048 32/8 d128 p16": 380.0,
    "b2 s8192 32/8 d128 p16": 1207.339,
    "b1 s16384 32/8 d128 p16": 2270.0,
    "b8 s2048 32/8 d128 p1": 410.0,
    "b2 s8192 32/8 d128 p1": 1300.0,
    "b1 s16384 32/8 d128 p1": 2450.0,
    "b1 s16384 32/8 d128 full": 4150.0,
    "b2 s8192 32/32 d64 p16": 900.0,
    "b1 sq512 kv8192 32/8 d128 p16": 68.0,
    "b1 sq512 kv8192 32/8 d128 p1": 73.4,
    "b4 sq512 kv8192 32/8 d128 p16": 262.0,
    "b4 sq512 kv8192 32/8 d128 p1": 283.0,
    "b1 sq512 kv32768 16/2 d128 p16": 148.0,
    "b1 sq512 kv32768 16/2 d128 p1": 160.0,
    "b1 sq128 kv8192 32/8 d128 p16": 23.0,
    "b1 sq128 kv8192 32/8 d128 p1": 24.8,
}
PRECISION = "fp8"
_dtypes = Dtypes(queries=torch.float8_e4m3fn, keys=torch.float8_e4m3fn)
make, traffic, set_bytes = _dtypes.make, _dtypes.traffic, _dtypes.traffic
