"""INT4 pages of KIVI in vLLM: the sections of a page, and the keys of unfinished pages.

Keys are quantised once a page of 64 tokens is full. Until then they are in a row of their request in the tail, memory
of the layer beside vLLM's pages. vLLM's second model runner says which request each row of a batch is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime import paged_cache

from .pages import cut

INT4 = "int4_per_token_head"
PAGE = paged_cache.INT4_PAGE
HEADS = (64, 128, 256)


def bytes_of_a_cell(size: int) -> int:
    """Bytes of a token and KV head of D = size dims: its codes, and its share of the scales and zeros.

    D / 2 bytes of codes each for key and value, 4 bytes of scale and zero for the value. Those of the key's page are 4
    bytes for each of D channels, shared by 64 tokens.
    """
    return size + 4 + 4 * size // PAGE


def sections(kv_cache: Tensor, size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Codes of keys and values uint8 [blocks, 64, Hk, D / 2], and their scales and zeros in float16.

    kv_cache: vLLM's pages [blocks, Hk, 64, bytes_of_a_cell]. A page has six sections: codes of keys, codes of values,
    scales and zeros [Hk, D] of keys, scales and zeros [64, Hk] of values. Each starts at a multiple of 16 bytes.
    """
    heads, page = kv_cache.shape[1], PAGE
    take = cut(kv_cache, page, bytes_of_a_cell(size))
    keys, values = (take(torch.uint8, page, heads, size // 2) for _ in range(2))
    k_scale, k_zero = (take(torch.float16, heads, size) for _ in range(2))
    v_scale, v_zero = (take(torch.float16, page, heads) for _ in range(2))
    return keys, values, {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero}


class Rows:
    """The row in the tail of each request of a batch, and of each token, on the device, where CUDA graphs find them."""

    def __init__(self, requests: int, tokens: int, device: torch.device) -> None:
        self._of_requests, self._of_tokens = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in (requests, tokens)
        )

    def set(self, requests: np.ndarray, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """requests [B]: their rows. starts [B + 1]: the first token of each. Returns int32 tensors for the batch."""
        rows = requests.astype(np.int32)
        of_tokens = np.repeat(rows, np.diff(starts))
        for buffer, values in ((self._of_requests, rows), (self._of_tokens, of_tokens)):
            buffer[: len(values)].copy_(torch.from_numpy(values))
        return self._of_requests, self._of_tokens
