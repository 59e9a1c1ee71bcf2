"""Formats of the pages of a KestrelCache: the model's dtype, FP8, INT8 and INT4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kestrel_kvcache import int4_cache_write, int8_cache_write, reshape_and_cache


class Pages:
    """Keys and values of one layer in the model's dtype: [blocks, P, Hk, D] each.

    `block_tensors`: tensors whose first dimension is the block; `sequence_tensors`: those with a row per sequence.
    """

    stored = "auto"
    prefills = True
    """Whether prefill kernels read these pages."""

    def __init__(
        self, blocks: int, page: int, heads: int, size: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (blocks, page, heads, size)
        self.keys, self.values = (torch.zeros(shape, dtype=self.code_dtype(dtype), device=device) for _ in range(2))
        self.block_tensors = [self.keys, self.values]
        self.sequence_tensors: list[Tensor] = []

    @staticmethod
    def code_dtype(dtype: torch.dtype) -> torch.dtype:
        return dtype

    def write(self, key: Tensor, value: Tensor, slots: Tensor, sequences: Tensor) -> None:
        """key, value: [T, Hk, D]; slots int64 [T], -1 for padding; sequences int32 [T]."""
        reshape_and_cache(key, value, self.keys, self.values, slots, self.stored)

    def reading(self, sequences: Tensor) -> dict[str, Any]:
        """The arguments of flash_attn_with_kvcache and gather_cache for this format, besides the two caches."""
        return {}

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.block_tensors, *self.sequence_tensors))


class FP8Pages(Pages):
    """e4m3 codes of scale 1: values up to 448 keep a relative precision of 2^-4."""

    stored = "fp8"

    @staticmethod
    def code_dtype(dtype: torch.dtype) -> torch.dtype:
        return torch.float8_e4m3fn


class INT8Pages(Pages):
    """INT8 codes with a float32 scale per token and head."""

    prefills = False

    def __init__(
        self, blocks: int, page: int, heads: int, size: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(blocks, page, heads, size, sequences, torch.int8, device)
        self.k_scale, self.v_scale = (torch.zeros(blocks, page, heads, device=device) for _ in range(2))
        self.block_tensors += [self.k_scale, self.v_scale]

    def write(self, key: Tensor, value: Tensor, slots: Tensor, sequences: Tensor) -> None:
        int8_cache_write(key, value, self.keys, self.values, self.k_scale, self.v_scale, slots)

    def reading(self, sequences: Tensor) -> dict[str, Any]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


class INT4Pages(Pages):
    """KIVI: values quantised per token, keys per channel when their page of 64 tokens is full, until then in a tail."""

    prefills = False

    def __init__(
        self, blocks: int, page: int, heads: int, size: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys, self.values = (zeros(blocks, page, heads, size // 2, dtype=torch.uint8) for _ in range(2))
        k_scale, k_zero = (zeros(blocks, heads, size, dtype=torch.float16) for _ in range(2))
        v_scale, v_zero = (zeros(blocks, page, heads, dtype=torch.float16) for _ in range(2))
        tail = zeros(sequences, page, heads, size, dtype=dtype)
        self.read = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero, "k_tail": tail}
        self.written = (self.keys, self.values, k_scale, k_zero, v_scale, v_zero, tail)
        self.block_tensors = [self.keys, self.values, k_scale, k_zero, v_scale, v_zero]
        self.sequence_tensors = [tail]

    def write(self, key: Tensor, value: Tensor, slots: Tensor, sequences: Tensor) -> None:
        int4_cache_write(key, value, *self.written, slots, sequences)

    def reading(self, sequences: Tensor) -> dict[str, Any]:
        return {**self.read, "seq_ids": sequences}


FORMATS: dict[str, type[Pages]] = {"auto": Pages, "fp8": FP8Pages, "int8": INT8Pages, "int4": INT4Pages}
