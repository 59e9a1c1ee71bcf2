"""Tensors of any leading dimensions as the 2-D tensors that entry points take."""

from __future__ import annotations

from collections.abc import Callable

import torch


def as_rows(x: torch.Tensor, out: torch.Tensor, check: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as [T, K] and out [..., N] as [T, N]; copies where the leading dimensions cannot be merged.

    The entry point checks the 2-D tensors. ``check`` must raise for errors that the 2-D tensors do not show: leading
    dimensions that differ, and a last dimension that is not contiguous. It is called only where these are possible.
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
    """The result, whose rows have been written."""
    if rows.data_ptr() != result.data_ptr():
        result.copy_(rows.view(result.shape))
    return result
