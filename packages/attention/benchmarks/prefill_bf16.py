"""Shapes of record of prefill in bf16. See prefill_shapes.py. Targets in us on one H200."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from prefill_shapes import Dtypes, candidates, operations, result

__all__ = ["TARGETS", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS = {
    "b1 s740 32/32 d64 p1": 8.8,
    "b1 s1024 32/32 d64 p1": 12.5,
    "b8 s2048 32/8 d128 p16": 422.0,
    "b2 s8192 32/8 d128 p16": 1556.256,
    "b1 s16384 32/8 d128 p16": 3150.0,
    "b1 s16384 32/8 d128 p16 full": 6230.0,
    "b2 s8192 32/32 d64 p16": 980.0,
    "b8 s2048 32/8 d128 p1": 447.0,
    "b2 s8192 32/8 d128 p1": 1650.0,
    "b1 s16384 32/8 d128 p1": 3340.0,
    "b1 sq512 kv8192 32/8 d128 p16": 106.0,
    "b1 sq512 kv8192 32/8 d128 p1": 112.0,
    "b4 sq512 kv8192 32/8 d128 p16": 400.0,
    "b4 sq512 kv8192 32/8 d128 p1": 424.0,
    "b1 sq512 kv32768 16/2 d128 p16": 218.0,
    "b1 sq512 kv32768 16/2 d128 p1": 231.0,
    "b1 sq128 kv8192 32/8 d128 p16": 33.0,
    "b1 sq128 kv8192 32/8 d128 p1": 35.0,
    "b1 s729 16/16 d72 full": 8.5,
    "b2 s729 16/16 d72 full": 11.5,
    "b4 s729 16/16 d72 full": 19.5,
    "b8 s729 16/16 d72 full": 38.0,
    "b13 s729 16/16 d72 full": 62.0,
    "b4 s1024 16/16 d80 full": 44.0,
    "b4 s2048 32/8 d96 p16": 178.0,
    "b1 s740 32/32 d64 p1 prefix730": 13.5,
    "b2 s4096 16/8 d256 p16": 445.0,
    "b2 s4096 16/8 d256 p16 softcap50": 490.0,
    "b1 s8192 16/8 d256 p16 w1024": 235.0,
}
_dtypes = Dtypes(queries=torch.bfloat16, keys=torch.bfloat16)
make, traffic, set_bytes = _dtypes.make, _dtypes.traffic, _dtypes.traffic
