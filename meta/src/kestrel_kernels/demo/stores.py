"""Formats of the KV cache of one layer: the model's dtype, FP8, INT8 and INT4.

Each store rotates and writes new rows with the ops of its format, and returns the arguments with which
kestrel_attention.flash_attn_with_kvcache reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kestrel_kvcache import int4_cache_write, int8_cache_write, rotary_and_cache
from kestrel_rope import rotary_embedding
from kestrel_runtime.paged_cache import INT4_PAGE

from .config import DecoderConfig
from .weights import Layer

if TYPE_CHECKING:
    from .model import Step


class Store:
    """Stores in the dtype of the model. `page`: slots per page; keys, values: [pages, page, Hk, D], uninitialised."""

    page = 1
    stored = "auto"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __init__(
        self, config: DecoderConfig, layer: Layer, pages: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (pages, self.page, config.kv_heads, config.head_size)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    @classmethod
    def bytes_needed(cls, config: DecoderConfig, pages: int, sequences: int, dtype: torch.dtype) -> int:
        return 2 * pages * config.kv_heads * config.head_size * dtype.itemsize

    def rotate_and_write(self, step: Step, query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> None:
        """Rotate the queries [T, H, D] and keys [T, Hk, D] of a step in place, then write keys and values."""
        rotary_and_cache(
            step.positions,
            query,
            key,
            value,
            query.shape[-1],
            table,
            self.keys,
            self.values,
            step.slots,
            kv_cache_dtype=self.stored,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def reading(self, sequences: Tensor) -> dict[str, Any]:
        """The arguments of flash_attn_with_kvcache for this format and the sequences with these ids [B]."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


class FP8Store(Store):
    """e4m3 codes with a scale per head from the model."""

    stored = "fp8"

    def __init__(
        self, config: DecoderConfig, layer: Layer, pages: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, layer, pages, sequences, torch.float8_e4m3fn, device)
        self.k_scale, self.v_scale = layer.k_scale, layer.v_scale

    @classmethod
    def bytes_needed(cls, config: DecoderConfig, pages: int, sequences: int, dtype: torch.dtype) -> int:
        return super().bytes_needed(config, pages, sequences, torch.float8_e4m3fn)


class INT8Store(Store):
    """INT8 codes with a scale per token and head."""

    def __init__(
        self, config: DecoderConfig, layer: Layer, pages: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, layer, pages, sequences, torch.int8, device)
        shape = (pages, self.page, config.kv_heads)
        k_scale, v_scale = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        self.k_scale, self.v_scale = k_scale, v_scale
        self.written = (self.keys, self.values, k_scale, v_scale)

    @classmethod
    def bytes_needed(cls, config: DecoderConfig, pages: int, sequences: int, dtype: torch.dtype) -> int:
        return 2 * pages * config.kv_heads * (config.head_size + 4)

    def rotate_and_write(self, step: Step, query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> None:
        rotary_embedding(step.positions, query, key, query.shape[-1], table)
        int8_cache_write(key, value, *self.written, step.slots)


class INT4Store(Store):
    """KIVI: 4-bit codes. Values are quantised per token, keys per channel once a page of 64 tokens is complete.
    The keys of each sequence's incomplete page are in the tail [sequences, 64, Hk, D]."""

    page = INT4_PAGE

    def __init__(
        self, config: DecoderConfig, layer: Layer, pages: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, size = config.kv_heads, config.head_size

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.keys, self.values = (empty(pages, self.page, heads, size // 2, dtype=torch.uint8) for _ in range(2))
        k_scale, k_zero = (empty(pages, heads, size, dtype=torch.float16) for _ in range(2))
        v_scale, v_zero = (empty(pages, self.page, heads, dtype=torch.float16) for _ in range(2))
        tail = empty(sequences, self.page, heads, size, dtype=dtype)
        self.read = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero, "k_tail": tail}
        self.written = (self.keys, self.values, k_scale, k_zero, v_scale, v_zero, tail)

    @classmethod
    def bytes_needed(cls, config: DecoderConfig, pages: int, sequences: int, dtype: torch.dtype) -> int:
        heads, size = config.kv_heads, config.head_size
        codes = pages * cls.page * heads * size
        return codes + 4 * pages * heads * (size + cls.page) + sequences * cls.page * heads * size * dtype.itemsize

    def rotate_and_write(self, step: Step, query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> None:
        rotary_embedding(step.positions, query, key, query.shape[-1], table)
        int4_cache_write(key, value, *self.written, step.slots, step.numbers)

    def reading(self, sequences: Tensor) -> dict[str, Any]:
        return {**self.read, "seq_ids": sequences}


STORES: dict[str, type[Store]] = {"auto": Store, "fp8": FP8Store, "int8": INT8Store, "int4": INT4Store}
