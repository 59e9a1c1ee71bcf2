"""A paged KV cache, and the block table that maps the tokens of a sequence to pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import DecoderConfig, DemoError
from .stores import STORES
from .weights import Weights


class PagedCache:
    """Keys and values of every layer: up to `tokens` tokens of at most `sequences` sequences at a time.

    kind: "auto" (the dtype of the model), "fp8", "int8" or "int4", see stores.py. Pages hold one token, of "int4" 64.
    Pages are allocated in ascending order, or in the order of `order`.
    """

    def __init__(
        self,
        weights: Weights,
        tokens: int,
        *,
        kind: str = "auto",
        sequences: int = 1,
        order: Sequence[int] | None = None,
    ) -> None:
        store = STORES[kind]
        self.kind = kind
        self.page = store.page
        self.device = weights.device
        self.pages = -(-tokens // store.page)
        self.layers = [
            store(weights.config, layer, self.pages, sequences, weights.dtype, weights.device)
            for layer in weights.layers
        ]
        self._free = list(range(self.pages) if order is None else order)[::-1]
        self._numbers = list(range(sequences))[::-1]

    @staticmethod
    def bytes_needed(config: DecoderConfig, tokens: int, dtype: torch.dtype, *, kind: str, sequences: int = 1) -> int:
        store = STORES[kind]
        return config.layers * store.bytes_needed(config, -(-tokens // store.page), sequences, dtype)

    @property
    def free(self) -> int:
        """The number of unallocated pages."""
        return len(self._free)

    def reserve(self, lengths: Sequence[int]) -> PageTable:
        """Allocate pages for sequences of these lengths. Raises DemoError when there are too few."""
        counts = [-(-length // self.page) for length in lengths]
        if sum(counts) > self.free:
            raise DemoError(
                f"cache: expected pages for {sum(lengths)} tokens ({len(lengths)} sequences), "
                f"got {self.free} free pages of {self.pages}"
            )
        if len(lengths) > len(self._numbers):
            raise DemoError(f"cache: expected at most {len(self._numbers)} more sequences, got {len(lengths)}")
        pages = [[self._free.pop() for _ in range(count)] for count in counts]
        return PageTable(self, pages, [self._numbers.pop() for _ in lengths])

    def give_back(self, pages: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
        for row in pages:
            self._free.extend(reversed(row))
        self._numbers.extend(reversed(numbers))


class PageTable:
    """A batch of sequences in a cache.

    block_table: int32 [B, max pages], -1 behind the pages of a sequence. sequences: int64 [B], 0 to B - 1. numbers:
    int32 [B], an id of each sequence, unique in the cache.
    """

    def __init__(self, cache: PagedCache, pages: list[list[int]], numbers: list[int]) -> None:
        self._cache = cache
        self._pages = pages
        self._numbers = numbers
        max_pages = max(map(len, pages), default=0)
        rows = [row + [-1] * (max_pages - len(row)) for row in pages]
        self.block_table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), max_pages).to(cache.device)
        self.numbers = torch.tensor(numbers, dtype=torch.int32).to(cache.device)
        self.sequences = torch.arange(len(rows), device=cache.device)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence."""
        return self.block_table.shape[1] * self._cache.page

    def slots(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """The cache slot of each (sequence, position), computed on the device."""
        page = self._cache.page
        if page == 1:
            return self.block_table[sequences, positions]
        return self.block_table[sequences, positions // page] * page + positions % page

    def release(self) -> None:
        self._cache.give_back(self._pages, self._numbers)
        self._pages, self._numbers = [], []
