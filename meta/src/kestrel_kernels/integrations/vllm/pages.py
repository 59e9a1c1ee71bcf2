"""Sections of vLLM's pages of quantised keys and values. Imports without vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import BACKEND


def cut(kv_cache: Tensor, page: int, width: int) -> Callable[..., Tensor]:
    """A function (dtype, *shape) that returns the next section of every page: [blocks, *shape], a view.

    kv_cache: vLLM's pages [blocks, Hk, page, width], elements of one byte. The bytes of a page must be one run.
    Raises ValueError for other pages.
    """
    blocks, heads = kv_cache.shape[:2]
    of_page = zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True)
    run = 1 + sum((length - 1) * stride for length, stride in of_page)  # from the first byte to the last
    is_right = kv_cache.element_size() == 1 and kv_cache.shape[2:] == (page, width)
    if not is_right or heads * page * width != run:
        raise ValueError(
            f"{BACKEND}: kv_cache: expected pages [{heads}, {page}, {width}] of one run of bytes, "
            f"got {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    start, step = kv_cache.storage_offset(), kv_cache.stride(0)

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal start
        size = math.prod(shape) * dtype.itemsize
        section = kv_cache.as_strided((blocks, size), (step, 1), start).view(dtype)
        start += size
        return section.view(blocks, *shape)

    return take


def int8_sections(kv_cache: Tensor, size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keys and values int8 [blocks, P, Hk, D] and their float32 scales [blocks, P, Hk].

    kv_cache: vLLM's pages [blocks, Hk, P, 2 D + 8]. A page has four sections: codes of keys, codes of values, scales of
    keys, scales of values. Each starts at a multiple of 16 bytes, as P is one.
    """
    heads, page = kv_cache.shape[1:3]
    take = cut(kv_cache, page, 2 * size + 8)
    keys, values = (take(torch.int8, page, heads, size) for _ in range(2))
    k_scale, v_scale = (take(torch.float32, page, heads) for _ in range(2))
    return keys, values, {"k_scale": k_scale, "v_scale": v_scale}
