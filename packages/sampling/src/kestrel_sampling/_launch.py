"""The launches that the sampling ops share."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kestrel_runtime import Binary, allocator, allocator_on, empty, unread

from ._parameters import KeyFields

binary = Binary("kestrel_sampling")
MAX_K = 1024  # kMaxK in csrc/top_k_candidates.cuh: the largest k of a top-k that kernels keep in shared memory
_NONE = (None, 0)  # top-k off
_ONE = (None, 1.0)  # top-p off, temperature 1
_ZERO = (None, 0.0)  # min-p off


def draw(
    op: str,
    rows: torch.Tensor,
    keys: KeyFields,
    *,
    logits: bool = False,
    temperature: tuple[torch.Tensor | None, float] = _ONE,
    top_k: tuple[torch.Tensor | None, int] = _NONE,
    top_p: tuple[torch.Tensor | None, float] = _ONE,
    min_p: tuple[torch.Tensor | None, float] = _ZERO,
    joint: bool = False,
    blocks: int = 0,
    threads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row; returns ids int32 [B] and valid bool [B].

    blocks (1, 2, 4, 8), threads (a multiple of 32 up to 640): how a long row is split on the GPU; 0 leaves the choice
    to the binary. Ids do not depend on it.
    """
    allocate, shape = allocator(rows), (rows.shape[0],)
    ids, valid = allocate(shape, (1,), torch.int32), allocate(shape, (1,), torch.bool)
    binary.sample(
        op, ids, valid, rows, logits, *temperature, *top_k, *top_p, *min_p, joint, *keys, blocks, threads
    )  # fmt: skip
    return ids, valid


def draw_by_numbers(
    op: str,
    logits: torch.Tensor,
    keys: KeyFields,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    return_valid: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`draw` from logits where every parameter is a number: ids, with ``return_valid`` (ids, valid)."""
    shape = (logits.shape[0],)
    allocator_now, valid = _results_on(logits.get_device(), shape)
    allocate = allocator_now()
    ids = allocate(shape, (1,), torch.int32)
    if return_valid:
        valid = allocate(shape, (1,), torch.bool)
    binary.sample(
        op, ids, valid, logits, True, None, temperature, None, top_k, None, top_p, None, min_p, False, *keys, 0, 0
    )  # fmt: skip
    return (ids, valid) if return_valid else ids


@functools.cache
def _results_on(device: int, shape: tuple[int]) -> tuple[Any, Any]:
    """For results on a GPU: allocator_on, and where flags go that nothing reads."""
    gpu = torch.device("cuda", device)
    return allocator_on(gpu), unread(shape, torch.bool, gpu)


def probabilities(
    op: str,
    rows: torch.Tensor,
    out: torch.Tensor | None,
    *,
    logits: bool = False,
    temperature: tuple[torch.Tensor | None, float] = _ONE,
    top_k: tuple[torch.Tensor | None, int] = _NONE,
    top_p: tuple[torch.Tensor | None, float] = _ONE,
) -> torch.Tensor:
    """float32 like ``rows``, in ``out`` if it is given."""
    if out is None:
        out = empty(rows, torch.float32, *rows.shape)
    binary.probabilities(op, out, rows, logits, *temperature, *top_k, *top_p, 0, 0)
    return out
