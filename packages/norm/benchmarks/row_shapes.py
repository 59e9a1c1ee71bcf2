"""Shared by the benchmarks of this folder: shapes "rows x N" and bf16 tensors of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def sizes(shape: str) -> tuple[int, int]:
    rows, n = shape.split("x")
    return int(rows), int(n)


def elements(shape: str) -> int:
    rows, n = sizes(shape)
    return rows * n


def matrices(shape: str, count: int) -> Iterator[torch.Tensor]:
    return (torch.randn(sizes(shape), dtype=torch.bfloat16, device="cuda") for _ in range(count))


def vectors(shape: str, count: int) -> tuple[torch.Tensor, ...]:
    """Weights, or weights and biases."""
    return tuple(torch.randn(count, sizes(shape)[1], dtype=torch.bfloat16, device="cuda"))


def keeping(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keeps what the op allocates in its set's last argument, a list, until the set is used again.

    A result that is dropped at once has the same address at the next call. 16 MB of it stay in L2, while an ``out`` of
    each set does not (results/h200_large.json, rms_norm 2048x4096).
    """

    def call(*arguments: Any) -> torch.Tensor:
        *given, kept = arguments
        kept[:] = [op(*given)]
        return kept[0]

    return call


class Written:
    """The output of an FP8 op, codes and scales, allocated once per shape."""

    def __init__(self) -> None:
        self._of_shape: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape not in self._of_shape:
            codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
            self._of_shape[x.shape] = codes, torch.empty(len(x), 1, device=x.device)
        return self._of_shape[x.shape]
