"""What the definitions of gated activations share: shapes that begin with rows x 2F, bf16."""

from __future__ import annotations

import math
import re

import torch


def sizes(shape: str) -> tuple[int, int]:
    """Rows and 2F of "8x2048->1024" or "2048x2x4096"."""
    rows, *width = map(int, re.findall("[0-9]+", shape.split("->")[0]))
    return rows, math.prod(width)


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    rows, width = sizes(shape)
    x = (torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(one, torch.empty(rows, width // 2, dtype=one.dtype, device="cuda")) for one in x]


def set_bytes(shape: str) -> int:
    return 2 * math.prod(sizes(shape))


def traffic(shape: str) -> int:
    return 3 * math.prod(sizes(shape))
