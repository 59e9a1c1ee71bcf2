"""The PyTorch reference of every op of this family: the specification that the kernels are tested against.

Caches are shared with kestrel_attention (kestrel_runtime.paged_cache), rotation with kestrel_rope
(kestrel_runtime.rotary).
"""

from __future__ import annotations

import torch

from kestrel_runtime.paged_cache import (
    FP8_OF_NAME,
    encode_fp8,
    keys_present,
    read_cache,
    without_padding,
    write_int4,
    write_int8,
    write_rows,
)
from kestrel_runtime.reference import row_sums
from kestrel_runtime.rotary import rotate_heads, rows_at


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


def rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    is_neox: bool = True,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rope_dim_offset: int = 0,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
) -> None:
    angles, valid = rows_at(positions, cos_sin_cache)
    for x, weight in ((query, query_norm), (key, key_norm)):
        if weight is not None:
            normalise_heads(x, head_size, weight, norm_eps, norm_weight_bias)
        rotate_heads(x, head_size, angles, valid, is_neox, rope_dim_offset)
    key, value = (x if x.ndim == 3 else x.unflatten(-1, (-1, head_size)) for x in (key, value))
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def normalise_heads(x: torch.Tensor, head_size: int, weight: torch.Tensor, eps: float, weight_bias: float) -> None:
    """RMSNorm of every head of x [T, H*D] or [T, H, D], in place."""
    heads = x if x.ndim == 3 else x.unflatten(-1, (-1, head_size))
    mean_square = row_sums(heads.double().square()).float() / head_size
    heads.copy_(heads.float() / torch.sqrt(mean_square + eps) * (weight.float() + weight_bias))


def int8_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    tokens = slot_mapping.shape[0]
    if key.shape[2] == 0:
        return
    write_int8(key_cache, k_scale, slot_mapping, key[:tokens])
    write_int8(value_cache, v_scale, slot_mapping, value[:tokens])


def int4_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    k_tail: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_ids: torch.Tensor,
) -> None:
    tokens = slot_mapping.shape[0]
    if key.shape[1] == 0 or key.shape[2] == 0:
        return
    caches = key_cache, value_cache, k_scale, k_zero, v_scale, v_zero, k_tail
    write_int4(key[:tokens], value[:tokens], *caches, slot_mapping, seq_ids)


def gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_zero: torch.Tensor | None = None,
    v_zero: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    seq_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, page = key_cache.shape[:2]
    table = block_table[None, : -(-length // page)]
    lengths = without_padding(torch.full((1,), length, device=block_table.device), k_tail, seq_ids)
    scales = k_scale, v_scale, k_zero, v_zero, k_tail, seq_ids
    present = keys_present(lengths, table, blocks, page)
    results = []
    for read in read_cache(key_cache, value_cache, table, lengths, *scales):
        read = torch.where(present[0, :, None, None], read[0], 0.0)[:length].to(dtype)
        missing = read.new_zeros(length - read.shape[0], *read.shape[1:])
        results.append(torch.cat((read, missing)))
    return results[0], results[1]
