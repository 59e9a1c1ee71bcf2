"""Shapes of record of process_logits: rows x V, float32, penalties and a bitmask; "in place" writes changes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_sampling

sys.path.insert(0, str(Path(__file__).parent))
import sampling_step
from sampling_step import HISTORY, sizes

TARGETS = {"1x151936": None, "8x128256": None, "64x151936": None, "64x151936,in place": None, "256x128256": None}


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """Logits, out, and the other arguments."""
    sets = []
    for _ in range(count):
        logits = sampling_step.logits_of(shape)
        sets.append((logits, logits if "in place" in shape else torch.empty_like(logits), sampling_step.known(shape)))
    return sets


def traffic(shape: str) -> int:
    """In place: half the rows get -inf for half of their tokens, and the history's tokens are 32 bytes each."""
    rows, vocabulary = sizes(shape)
    history_and_mask = rows * (4 * HISTORY + vocabulary // 8)
    if "in place" in shape:
        return history_and_mask + rows * (2 * 32 * HISTORY + vocabulary)
    return history_and_mask + rows * 8 * vocabulary


def set_bytes(shape: str) -> int:
    rows, vocabulary = sizes(shape)
    return rows * 4 * vocabulary


def operations(shape: str) -> int:
    return 0


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda logits, out, given: kestrel_sampling.process_logits(logits, **given, out=out),
        "torch": lambda logits, out, given: out.copy_(sampling_step.torch_process_logits(logits, given)),
    }
