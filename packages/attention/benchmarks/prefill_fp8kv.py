"""Shapes of record of prefill with bf16 queries over an FP8 cache. See prefill_shapes.py. Targets in us on one H200."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import prefill_shapes
from prefill_shapes import Shape

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


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    return prefill_shapes.make(shape, count, torch.bfloat16, torch.float8_e4m3fn)


def set_bytes(shape: str) -> int:
    return traffic(shape)


def traffic(shape: str) -> int:
    return Shape.parse(shape).traffic(2, 1)


def operations(shape: str) -> int:
    return Shape.parse(shape).operations()


def result(_: tuple[Any, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    return prefill_shapes.candidates()
