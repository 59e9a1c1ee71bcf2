"""What the definitions of gated activations share: shapes that begin with rows x 2F, bf16, and candidates.

An op is activation(h) * (g + shift) of the halves h, g of a row. A set begins with x and where the result goes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled


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


def result(arguments: tuple[torch.Tensor, ...], returned: torch.Tensor | None) -> list[torch.Tensor]:
    return [arguments[1] if returned is None else returned]


def entry_point(silu: bool, shift: float) -> Callable[..., object]:
    gated = Binary("kestrel_moe").gated
    return lambda x, out, *_: gated(out, x, silu, "none", shift)


def ours_and_torch(
    op: Callable[..., torch.Tensor], activation: Callable[[torch.Tensor], torch.Tensor], shift: float
) -> dict[str, Callable[..., object]]:
    def composed(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        h, g = x.chunk(2, dim=-1)
        return activation(h) * (g + shift if shift else g)

    return {
        "kestrel": lambda x, out, *_: op(x, out=out),
        "torch": composed,
        "torch.compile": compiled(composed, dynamic=False),
    }
