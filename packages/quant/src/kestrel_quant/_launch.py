"""What the launches of this family share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel_runtime import Binary, empty

kernels = Binary("kestrel_quant")

_MOST_BLOCKS = 512  # of a quantisation per tensor: more than any GPU here keeps resident


def slots(x: torch.Tensor) -> torch.Tensor:
    """Room for one maximum per block of a quantisation per tensor; what it holds does not matter."""
    return empty(x, torch.float32, _MOST_BLOCKS)


def groups_of(columns: int, group_size: int) -> int:
    """How many groups a row has."""
    if group_size < 1:
        raise ValueError("group_size")  # the check that follows a failed launch finds the words
    return -(-columns // group_size)


def result(out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """``out``, which must have this dtype, or a new tensor."""
    if out is None:
        return empty(like, dtype, *shape)
    if out.dtype != dtype:
        raise TypeError("out")  # the check that follows a failed launch finds the words
    return out
