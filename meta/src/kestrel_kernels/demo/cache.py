"""A paged KV cache with pages of one token, and the table that says which page holds which position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import DecoderConfig, DemoError


class PagedCache:
    """Keys and values of every layer in `pages` pages; a page holds one token of one sequence.

    keys, values: one tensor [pages, 1, Hk, D] per layer, uninitialised, of `dtype` or (fp8) float8_e4m3fn.
    Pages are handed out in ascending order, or in the order of `order`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
        order: Sequence[int] | None = None,
    ) -> None:
        self.fp8 = fp8
        self.device = device
        self.pages = pages
        shape = (pages, 1, config.kv_heads, config.head_size)
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.keys = [torch.empty(shape, dtype=stored, device=device) for _ in range(config.layers)]
        self.values = [torch.empty(shape, dtype=stored, device=device) for _ in range(config.layers)]
        self._free = list(range(pages) if order is None else order)[::-1]

    @staticmethod
    def bytes_needed(config: DecoderConfig, pages: int, dtype: torch.dtype, *, fp8: bool) -> int:
        return 2 * config.layers * pages * config.kv_heads * config.head_size * (1 if fp8 else dtype.itemsize)

    @property
    def free(self) -> int:
        return len(self._free)

    def reserve(self, lengths: Sequence[int]) -> PageTable:
        """Pages for sequences of these lengths."""
        if sum(lengths) > self.free:
            raise DemoError(
                f"cache: expected room for {sum(lengths)} tokens ({len(lengths)} sequences), "
                f"got {self.free} free pages of {self.pages}"
            )
        return PageTable(self, [[self._free.pop() for _ in range(length)] for length in lengths])

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


class PageTable:
    """The pages of a batch of sequences: `block_table` int32 [B, longest], -1 where a sequence has no page."""

    def __init__(self, cache: PagedCache, pages: list[list[int]]) -> None:
        self._cache = cache
        self._pages = pages
        longest = max(map(len, pages), default=0)
        rows = [row + [-1] * (longest - len(row)) for row in pages]
        self.block_table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), longest).to(cache.device)

    @property
    def longest(self) -> int:
        return self.block_table.shape[1]

    def slots(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """The slot of each (sequence, position); on the device."""
        return self.block_table[sequences, positions]

    def release(self) -> None:
        for row in self._pages:
            self._cache.give_back(row)
        self._pages = []
