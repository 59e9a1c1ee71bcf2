"""Pieces of references that address a paged KV cache: which slots exist, how rows are written, how pages are read.

A cache is [blocks, P, ...] with any strides; slot = block * P + offset. Nothing here reads a value on the host.
"""

from __future__ import annotations

import torch

from .reference import to_fp8

FP8_OF_NAME = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 tensors as uint8 (what copies and gathers support everywhere); other dtypes unchanged. A view."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x


def per_head(scale: torch.Tensor) -> torch.Tensor:
    """A scale [1] or [Hk], to be multiplied with [..., Hk, D]."""
    return scale.unsqueeze(-1)


def encode_fp8(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [..., Hk, D] / scale, rounded once to FP8 (nearest even, saturating)."""
    return to_fp8(x.float() if scale is None else x.float() / per_head(scale), dtype)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """cache[slot] = row for every slot in range; the others are skipped.

    cache: [blocks, P, ...], written in place. slots: integers [T], distinct where in range. rows: [T, ...] of the
    cache's dtype. A skipped row repeats the write of the first row that is not (equal values, so the order does not
    matter), or, where all are skipped, writes back what stands there.
    """
    blocks, page = cache.shape[:2]
    if slots.shape[0] == 0 or blocks * page == 0:
        return
    slots = slots.long()
    valid = (slots >= 0) & (slots < blocks * page)
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), valid.int().argmax())
    target = slots[source].clamp(0, blocks * page - 1)
    cache, rows = as_bytes(cache), as_bytes(rows)
    block, offset = target // page, target % page
    cache[block, offset] = torch.where(valid.any(), rows[source], cache[block, offset])


def slots_of(positions: torch.Tensor, block_table: torch.Tensor | None, page: int) -> torch.Tensor:
    """The slot of each position of each sequence, int64 [B, N]; -1 where there is none.

    positions: integers [B, N]; a negative one has no slot. block_table: [B, n], where a negative entry is no page;
    None: sequence b owns page b alone.
    """
    positions = positions.long()
    if block_table is None:
        sequences = torch.arange(positions.shape[0], device=positions.device)[:, None]
        return torch.where((positions >= 0) & (positions < page), sequences * page + positions, -1)
    pages = block_table.shape[1]
    if pages == 0:
        return torch.full_like(positions, -1)
    block = block_table.long().gather(1, (positions // page).clamp(0, pages - 1))
    exists = (positions >= 0) & (positions < pages * page) & (block >= 0)
    return torch.where(exists, block * page + positions % page, -1)


def gather_pages(cache: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
    """The pages of each sequence in order: [B, n*P, ...]. Entries that name no page give any page's contents.

    cache: [blocks, P, ...]. block_table: [B, n]; None: sequence b owns page b alone, and the cache is returned.
    """
    if block_table is None:
        return cache
    blocks = cache.shape[0]
    if blocks == 0:
        return cache.new_zeros(block_table.shape[0], 0, *cache.shape[2:])
    pages = as_bytes(cache).index_select(0, block_table.clamp(0, blocks - 1).flatten()).view(cache.dtype)
    return pages.unflatten(0, block_table.shape).flatten(1, 2)


def keys_present(lengths: torch.Tensor, block_table: torch.Tensor | None, blocks: int, page: int) -> torch.Tensor:
    """Which keys of :func:`gather_pages` exist, bool [B, n*P]: below the sequence's length, in a page that exists."""
    count = page if block_table is None else block_table.shape[1] * page * (blocks > 0)
    present = torch.arange(count, device=lengths.device) < lengths[:, None]
    if block_table is None or count == 0:
        return present
    named = (block_table >= 0) & (block_table < blocks)
    return present & named.repeat_interleave(page, dim=1)
