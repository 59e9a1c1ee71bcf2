"""The rotary ops in plain PyTorch: the specification that kernels are judged by."""

from __future__ import annotations

import torch

from kestrel_runtime.reference import rotate


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
    *,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    max_position = cos_sin_cache.shape[0]
    if max_position == 0:
        return
    valid = (positions >= 0) & (positions < max_position)
    angles = cos_sin_cache[positions.clamp(0, max_position - 1)]
    _rotate_in_place(query, key, head_size, angles, valid, is_neox, rope_dim_offset, inverse)


def _rotate_in_place(
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    angles: torch.Tensor,
    valid: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int,
    inverse: bool,
) -> None:
    """angles [..., R]: each row's cosines, then sines; rows that are not valid [...] keep their bits."""
    cos, sin = angles.float().unsqueeze(-2).chunk(2, dim=-1)  # one angle for all heads of a row
    if inverse:
        sin = -sin
    for x in (query, key):
        if x is None:
            continue
        heads = x if x.ndim == valid.ndim + 2 else x.unflatten(-1, (-1, head_size))
        part = heads[..., rope_dim_offset : rope_dim_offset + angles.shape[-1]]
        turned = rotate(part, cos, sin, is_neox).to(x.dtype)
        part.copy_(torch.where(valid[..., None, None], turned, part))
