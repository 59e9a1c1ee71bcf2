"""What the launches of attention over a cache share: refused strides, and stand-ins for tensors that a call lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import kestrel_runtime
from kestrel_runtime import UnsupportedError

UNALIGNED = "kernels take caches whose rows are aligned to 16 bytes"

Launch = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]
"""(q, k_cache, v_cache, cache_seqlens, block_table, *, k_scale, v_scale, prefix_lens, new, integers, out, want_lse,
sinks) -> (out, lse), or (out, None) where no LSE is wanted.

new: k and v to append, or nothing. k_scale, v_scale, integers: as Codes.split has them.
"""


Bound = tuple[Callable[..., None], tuple[Any, ...]]
"""A kernel and its arguments."""


class LaunchError(RuntimeError):
    """A kernel was not launched, and others of its call may have been: the call must not run a second time."""


def launch_in_order(kernels: Sequence[Bound]) -> None:
    """Launch the kernels of a call. Raises LaunchError where one fails behind the first."""
    for index, (kernel, arguments) in enumerate(kernels):
        try:
            kernel(*arguments)
        except Exception as error:
            if index:
                raise LaunchError(str(error)) from error
            raise


def refuse_uncovered_strides(cache: str, caches: Sequence[torch.Tensor], integers: Sequence[torch.Tensor]) -> None:
    """Rows are loaded 16 bytes at a time, and offsets are 32-bit numbers of 16 bytes, scales or pages of scales."""

    def reach(x: torch.Tensor, dims: int) -> int:
        return sum((x.shape[i] - 1) * x.stride(i) for i in range(dims))

    for x in caches:
        unit = 16 // x.element_size()
        if any(stride % unit for stride in x.stride()[:3]):
            raise UnsupportedError(UNALIGNED)
        if x.numel() == 0:
            raise UnsupportedError("the cache has no page")
        if reach(x, 2) >= 2**32 * unit:
            raise UnsupportedError("kernels reach 64 GB of cache")
    of_tokens = (integers[2], integers[3]) if cache == "int4" else integers
    if cache == "int4" and any(reach(x, 1) >= 2**32 * 8 for x in integers[:2]):
        raise UnsupportedError("kernels reach 64 GB of scales")
    if any(reach(x, 2) >= 2**32 for x in of_tokens):
        raise UnsupportedError("kernels reach 2^32 scales")
    if any(stride % 8 for x in loaded_as_vectors(integers) for stride in x.stride()[:-1]):
        raise UnsupportedError(UNALIGNED)


def loaded_as_vectors(integers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Those of an INT4 cache that are loaded 16 bytes at a time: scales and zeros of channels, and the tail."""
    return (integers[0], integers[1], integers[4]) if len(integers) > 2 else ()


def unread(sizes: tuple[int, ...], device: torch.device) -> Any:
    """A float32 tensor that kernels write and nothing reads, see kestrel_runtime.unread."""
    return kestrel_runtime.unread(sizes, torch.float32, device)


def unused(dtype: torch.dtype, device: torch.device, rank: int = 1) -> Any:
    """A tensor that kernels are given and do not read."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(torch.empty((1,) * rank, dtype=dtype, device=device))
