"""Shapes of record of decoding over a bf16 cache; see decode_shapes.py. Targets in us on one H200."""

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
    "b1 kv740 32/32 d64 p1": 5.26,
    "b4 kv740 32/32 d64 p1": 7.22,
    "b32 kv128 32/32 d64 p1": 10.1,
    "b8 kv4096 32/8 d128 p16": 34.8,
    "b64 kv8192 32/8 d128 p16": 496.0,
    "b1 kv32768 32/4 d128 p16": 18.7,
    "b128 kv1024 64/8 d128 p16": 136.0,
    "b8 kv4096 16/8 d256 p16 w1024": 20.1,
    "b8 kv4096 16/2 d512 p16": 34.8,
    "b1 kv16384 16/2 d512 p16": 22.5,
    "b8 kv4096 16/8 d256 p16": 68.6,
}
TARGET_OF = {"b64 kv8192 32/8 d128 p16": "flashinfer"}


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    return decode_shapes.make(Shape.parse(shape), count, torch.bfloat16)


def set_bytes(shape: str) -> int:
    return Shape.parse(shape).cache_bytes(2)


def traffic(shape: str) -> int:
    return Shape.parse(shape).traffic(2)


def operations(shape: str) -> int:
    return Shape.parse(shape).operations()


def candidates() -> dict[str, Callable[..., object]]:
    return decode_shapes.candidates()
