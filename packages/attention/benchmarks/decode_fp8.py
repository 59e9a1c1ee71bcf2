"""Shapes of record of decoding over an FP8 (e4m3) cache; see decode_shapes.py. Targets in us on one H200."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import decode_shapes
from decode_shapes import Shape

TARGETS = {
    "b1 kv740 32/32 d64 p1": 5.70,
    "b1 kv1024 32/32 d64 p1": 6.33,
    "b4 kv740 32/32 d64 p1": 7.76,
    "b8 kv512 32/32 d64 p1": 8.86,
    "b16 kv256 32/32 d64 p1": 10.9,
    "b32 kv128 32/32 d64 p1": 14.1,
    "b8 kv4096 32/8 d128 p16": 20.9,
    "b64 kv8192 32/8 d128 p16": 271.0,
    "b1 kv32768 32/4 d128 p16": 14.1,
    "b128 kv1024 64/8 d128 p16": 70.6,
}


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    return decode_shapes.make(Shape.parse(shape), count, torch.float8_e4m3fn)


def set_bytes(shape: str) -> int:
    return Shape.parse(shape).cache_bytes(1)


def traffic(shape: str) -> int:
    return Shape.parse(shape).traffic(1)


def operations(shape: str) -> int:
    return Shape.parse(shape).operations()


def candidates() -> dict[str, Callable[..., object]]:
    return decode_shapes.candidates()
