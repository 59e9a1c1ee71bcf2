"""Shared by the launches of this family: the binary, scratch memory, results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel_runtime import Binary, empty

kernels = Binary("kestrel_quant")

_MAX_BLOCKS = 512  # of a quantisation per tensor: more than any supported GPU keeps resident


def partial_amax(x: torch.Tensor) -> torch.Tensor:
    """Scratch memory for a quantisation per tensor: one maximum per block, uninitialised."""
    return empty(x, torch.float32, _MAX_BLOCKS)


def groups_of(columns: int, group_size: int) -> int:
    """How many groups a row has."""
    if group_size < 1:
        raise ValueError("group_size")  # the op's check, which follows a failed launch, raises the full message
    return -(-columns // group_size)


def result(out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """``out``, which must have this dtype, or a new tensor."""
    if out is None:
        return empty(like, dtype, *shape)
    if out.dtype != dtype:
        raise TypeError("out")  # the op's check, which follows a failed launch, raises the full message
    return out
