"""Room for the results of launches, at half the host time of torch.empty."""

from __future__ import annotations

from collections.abc import Callable

import torch

# What TorchInductor's generated code allocates with: torch's caching allocator without torch's dispatcher, on the
# current GPU. It is no public interface of torch; where it is missing, torch.empty stands in.
_EmptyStrided = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
_empty_strided: _EmptyStrided | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)


def empty(like: torch.Tensor, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """A contiguous tensor of these sizes and this dtype on the device of ``like``; its content is not specified.

    As torch.empty it takes memory for the current stream; during the capture of a CUDA graph, from the graph's pool.
    """
    if _empty_strided is None or like.get_device() != _current_device():
        return torch.empty(sizes, dtype=dtype, device=like.device)
    if len(sizes) == 2:
        return _empty_strided(sizes, (sizes[1] or 1, 1), dtype)
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * (sizes[dim] or 1)
    return _empty_strided(sizes, tuple(strides), dtype)
