"""Tensors of any leading dimensions as the rows that entry points take."""

from __future__ import annotations

from collections.abc import Callable

import torch


def as_rows(x: torch.Tensor, out: torch.Tensor, check: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as [T, K] and the result [..., N] as [T, N], or a copy of it where its rows are no one run.

    What shows in the rows is for the entry point to check. What does not, unequal leading dimensions and last
    dimensions with gaps, which a copy would close, is left to ``check``; it is called only where there may be such.
    """
    leading = x.shape[:-1]
    if out.shape[:-1] != leading:
        check()
    tokens = leading.numel()
    rows, into = x.reshape(tokens, x.shape[-1]), out.reshape(tokens, out.shape[-1])
    if rows.data_ptr() != x.data_ptr() or into.data_ptr() != out.data_ptr():
        check()
    return rows, into


def written(rows: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result, once its rows are written."""
    if rows.data_ptr() != result.data_ptr():
        result.copy_(rows.view(result.shape))
    return result
