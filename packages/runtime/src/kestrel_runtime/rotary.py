"""Argument checks and reference of the rotary ops in kestrel_rope and kestrel_kvcache."""

from __future__ import annotations

import torch

from . import check
from .reference import rotate


def check_rows(op: str, rows: torch.Size, query: torch.Tensor, key: torch.Tensor | None, head_size: int) -> None:
    """query and key (which may be None), to be written, hold whole heads for each row: [..., H*D] or [..., H, D]."""
    check.number(op, "head_size", head_size, integer=True, minimum=1)
    check_heads(op, "query", query, rows, head_size)
    check.disjoint(op, "query", query)
    if key is not None:
        check_heads(op, "key", key, rows, head_size)
        check.disjoint(op, "key", key)
    check.same(op, "dtype", query=query, key=key)


def check_heads(op: str, name: str, x: torch.Tensor, rows: torch.Size, head_size: int) -> None:
    rank = len(rows)
    check.tensor(op, name, x, dtype=check.FLOATS, ndim=(rank + 1, rank + 2), last_contiguous=True)
    check.shape(op, name, x, (*rows, *[None] * (x.ndim - rank)))
    if x.ndim == rank + 2:
        check.shape(op, name, x, (*rows, None, head_size))
    elif x.shape[-1] % head_size:
        check.fail(op, name, f"a last dimension that is a multiple of head_size {head_size}", x.shape[-1])


def check_table(op: str, table: torch.Tensor, query: torch.Tensor, head_size: int, offset: int) -> None:
    """cos_sin_cache is [max_pos, R], float32 or the query's dtype, and R dims fit into a head after the offset."""
    check.tensor(op, "cos_sin_cache", table, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    if table.dtype != torch.float32:
        check.same(op, "dtype", query=query, cos_sin_cache=table)
    rotary_dim = table.shape[1]
    if rotary_dim < 2 or rotary_dim % 2:
        check.fail(op, "cos_sin_cache", "an even number of columns >= 2", rotary_dim)
    check.number(op, "rope_dim_offset", offset, integer=True, minimum=0)
    if offset + rotary_dim > head_size:
        limit = f"at most {head_size - offset} columns (head_size {head_size}, rope_dim_offset {offset})"
        check.fail(op, "cos_sin_cache", limit, rotary_dim)


def rows_at(positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The table's row at each position [..., R], and which positions are in the table, bool [...]."""
    count = table.shape[0]
    valid = (positions >= 0) & (positions < count)
    if count == 0:
        return table.new_zeros(*positions.shape, table.shape[1]), valid
    return table[positions.clamp(0, count - 1)], valid


def rotate_heads(
    x: torch.Tensor,
    head_size: int,
    angles: torch.Tensor,
    valid: torch.Tensor,
    is_neox: bool,
    offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate R dims of every head from the offset on, in place; invalid rows keep their bits.

    x: [..., H*D] or [..., H, D]. angles: [..., R], each row's cosines, then its sines. valid: bool [...].
    """
    cos, sin = angles.float().unsqueeze(-2).chunk(2, dim=-1)  # one angle for all heads of a row
    heads = x if x.ndim == valid.ndim + 2 else x.unflatten(-1, (-1, head_size))
    part = heads[..., offset : offset + angles.shape[-1]]
    turned = rotate(part, cos, -sin if inverse else sin, is_neox).to(x.dtype)
    part.copy_(torch.where(valid[..., None, None], turned, part))
