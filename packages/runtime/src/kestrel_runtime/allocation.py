"""Allocation of results, at half the host time of torch.empty."""

from __future__ import annotations

from collections.abc import Callable

import torch

# The allocation function of TorchInductor's generated code: torch's caching allocator without torch's dispatcher, on
# the current GPU. It is no public interface of torch; torch.empty replaces it where it is missing.
_EmptyStrided = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
_empty_strided: _EmptyStrided | None = None
try:
    from torch._C import _cuda_getDevice as _current_device

    _empty_strided = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
except (ImportError, AttributeError):  # a torch without CUDA, or one that moved them
    pass


def _on_the_current_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.get_device() == _current_device()


def empty(like: torch.Tensor, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """A contiguous, uninitialised tensor of these sizes and this dtype on the device of ``like``.

    Like torch.empty it allocates for the current stream, and from the graph's pool while a CUDA graph is captured.
    """
    if _empty_strided is None or not _on_the_current_gpu(like):
        return torch.empty(sizes, dtype=dtype, device=like.device)
    if len(sizes) == 2:
        return _empty_strided(sizes, (sizes[1] or 1, 1), dtype)
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * (sizes[dim] or 1)
    return _empty_strided(sizes, tuple(strides), dtype)


def empty_strided(
    like: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """:func:`empty` of sizes and strides that the caller has at hand, for the hottest calls."""
    if _empty_strided is None or not _on_the_current_gpu(like):
        return torch.empty_strided(sizes, strides, dtype=dtype, device=like.device)
    return _empty_strided(sizes, strides, dtype)
