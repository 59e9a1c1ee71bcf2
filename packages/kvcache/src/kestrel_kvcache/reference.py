"""The cache ops in plain PyTorch: the specification that kernels are judged by.

How a paged cache is addressed is shared with kestrel_attention, and lives in kestrel_runtime.paged_cache.
"""

from __future__ import annotations

import torch

from kestrel_runtime.paged_cache import FP8_OF_NAME, encode_fp8, write_rows


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    tokens = slot_mapping.shape[0]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = rows[:tokens]
        if kv_cache_dtype != "auto":
            stored = encode_fp8(stored, scale, FP8_OF_NAME[kv_cache_dtype])
        write_rows(cache, slot_mapping, stored)
