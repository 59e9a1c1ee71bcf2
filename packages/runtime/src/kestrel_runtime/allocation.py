"""Allocation of results, at half the host time of torch.empty."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

# The allocation function of TorchInductor's generated code: torch's caching allocator without torch's dispatcher, on
# the current GPU. It is not a public interface of torch; where it is missing, torch.empty is used.
_EmptyStrided = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
_empty_strided: _EmptyStrided | None = None
try:
    from torch._C import _cuda_getDevice as _current_device

    _empty_strided = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
except (ImportError, AttributeError):  # torch was built without CUDA, or has moved these functions
    pass
# Also from TorchInductor's generated code: a view with sizes, strides and an offset, without torch's dispatcher.
_reinterpret = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)


def _on_the_current_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.get_device() == _current_device()


def empty(like: torch.Tensor, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """A contiguous, uninitialised tensor of these sizes and this dtype on the device of ``like``.

    Like torch.empty it allocates for the current stream, and from the graph's pool while a CUDA graph is captured.
    """
    if _empty_strided is None or not _on_the_current_gpu(like):
        return torch.empty(sizes, dtype=dtype, device=like.device)
    if len(sizes) == 2:  # nearly every result, without the loop
        return _empty_strided(sizes, (sizes[1] or 1, 1), dtype)
    return _empty_strided(sizes, contiguous_strides(sizes), dtype)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * (sizes[dim] or 1)
    return tuple(strides)


def empty_strided(
    like: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """:func:`empty` with given sizes and strides, for callers that keep them."""
    if _empty_strided is None or not _on_the_current_gpu(like):
        return _empty_strided_on(like.device, sizes, strides, dtype)
    return _empty_strided(sizes, strides, dtype)


def allocator(like: torch.Tensor) -> _EmptyStrided:
    """The function (sizes, strides, dtype) -> tensor that allocates on the device of ``like``.

    A launch with several results finds the device once.
    """
    if _empty_strided is not None and _on_the_current_gpu(like):
        return _empty_strided
    return functools.partial(_empty_strided_on, like.device)


def allocator_on(device: torch.device) -> Callable[[], _EmptyStrided]:
    """:func:`allocator` for a device that the caller keeps: a function, which is called for each launch."""
    elsewhere = functools.partial(_empty_strided_on, device)
    if _empty_strided is None or device.type != "cuda":
        return lambda: elsewhere
    index, here = device.index, _empty_strided
    return lambda: here if _current_device() == index else elsewhere


def _empty_strided_on(
    device: torch.device, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` elements of a contiguous 1-D tensor, as a view; slicing takes longer on the host."""
    if _reinterpret is None:
        return tensor[:count]
    return _reinterpret(tensor, (count,), (1,), 0)  # type: ignore[no-any-return]


_unread_memory: dict[tuple[torch.device, int], torch.Tensor] = {}


def unread(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of tvm-ffi that kernels write and nothing reads.

    Its memory is shared by all calls on any stream, and never freed: a captured graph writes it at each replay.
    """
    import tvm_ffi

    count = math.prod(sizes)
    bytes_needed = count * dtype.itemsize
    size = 1 << max(0, bytes_needed - 1).bit_length()
    memory = _unread_memory.get((device, size))
    if memory is None:
        memory = _unread_memory[device, size] = torch.empty(size, dtype=torch.uint8, device=device)
    return tvm_ffi.from_dlpack(memory[:bytes_needed].view(dtype).view(sizes))
