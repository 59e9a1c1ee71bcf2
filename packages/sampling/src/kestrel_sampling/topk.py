"""The k largest of each row, sorted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kestrel_runtime import Binary, UnsupportedError, check, kernel_op

from . import reference
from ._launch import MAX_K
from .kernels.variants import covering

_binary = Binary("kestrel_sampling")
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MOST_ROWS = 2**31 - 1024  # row numbers are 32-bit in the kernels, those of the last block included
_entry_points: dict[tuple[torch.dtype, int, int, int], Callable[..., Any]] = {}


def _check_topk_fwd(scores: torch.Tensor, k: int, softmax: bool = False) -> None:
    op = "topk_fwd"
    check.tensor(op, "scores", scores, dtype=check.FLOATS, last_contiguous=True)
    if scores.ndim == 0:
        check.fail(op, "scores", "at least one dimension", "a scalar")
    check.number(op, "k", k, integer=True, minimum=1)
    if k > scores.shape[-1]:
        check.fail(op, "k", f"at most the row length {scores.shape[-1]}", k)
    check.flag(op, "softmax", softmax)


@kernel_op(reference=reference.topk_fwd, check=_check_topk_fwd, kernel="cute")
def topk_fwd(scores: torch.Tensor, k: int, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row in descending order, with their indices.

    scores: [..., N] bf16, fp16 or float32; the last dimension contiguous, the row stride free.
    k: 1 <= k <= N.
    softmax: normalise over the k values kept, in fp32 with one rounding, as ``torch.softmax`` does.

    Returns (values, indices): values [..., k] in the dtype of ``scores``, bit for bit the scores themselves unless
    ``softmax``; indices int32 [..., k]. Equal scores (-0.0 and +0.0 are equal) come in the order of their indices.
    NaN ranks below everything, -inf included, so a row shows NaN only when fewer than k of its scores are numbers.
    A row does not depend on the rows around it.

    Kernels cover k <= 1024 and up to 2^27 rows (2^31 - 1024 where N <= 4096 and k <= 128); what is beyond runs by
    reference.

    Raises ValueError for k < 1, k > N or a last dimension with a stride, TypeError for another dtype.
    Semantics: ``quack.topk``, with exact values and indices in every dtype.

    >>> values, indices = topk_fwd(torch.tensor([[1.0, 4.0, 2.0, 4.0]]), 3)
    >>> values.tolist(), indices.tolist()
    ([[4.0, 4.0, 2.0]], [[1, 3, 2]])
    """
    if scores.dim() != 2:
        values, indices = _launch(_as_rows(scores, k), k, softmax)
        shape = (*scores.shape[:-1], k)
        return values.view(shape), indices.view(shape)
    return _launch(scores, k, softmax)


def _launch(scores: torch.Tensor, k: int, softmax: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n = scores.shape
    # True and 8.0 are equal to 1 and 8 as keys, so only an int is looked up.
    known = _entry_points.get((scores.dtype, n, k, scores.get_device())) if type(k) is int else None
    launch = known or _entry_point(scores, n, k)
    if rows > _MOST_ROWS:
        raise UnsupportedError("kernels cover up to 2^31 - 1024 rows")
    device = scores.device
    values = torch.empty(rows, k, dtype=scores.dtype, device=device)
    indices = torch.empty(rows, k, dtype=torch.int32, device=device)
    if rows:
        launch(scores, values, indices, softmax)
    return values, indices


def _entry_point(scores: torch.Tensor, n: int, k: int) -> Callable[..., Any]:
    """The compiled kernel for this dtype, row length, k and GPU, remembered from then on."""
    _check_topk_fwd(scores, k)
    variant = covering(_NAMES[scores.dtype], n, k)
    if variant is not None:
        launch = _binary.kernel(variant, scores.device)
    elif k <= MAX_K:
        launch = _binary.topk_rows
    else:
        # The message does not contain n and k, so that the fallback warning is issued once.
        raise UnsupportedError("kernels cover k up to 1024")
    _entry_points[scores.dtype, n, k, scores.get_device()] = launch
    return launch


def _as_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, n]; a view where the strides allow it."""
    if scores.dim() == 0 or not 0 < k <= scores.shape[-1] or scores.stride(-1) != 1:
        _check_topk_fwd(scores, k)
    n = scores.shape[-1]
    return scores.reshape(scores.numel() // n, n)
