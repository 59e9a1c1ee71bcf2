"""The specification of the rotary ops, in plain PyTorch.

The rotation itself is in kestrel_runtime.rotary, which kestrel_kvcache uses too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel_runtime.rotary import rotate_heads, rows_at


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
    angles, valid = rows_at(positions, cos_sin_cache)
    for x in (query, key):
        if x is not None:
            rotate_heads(x, head_size, angles, valid, is_neox, rope_dim_offset, inverse)


def multimodal_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    mrope_section: Sequence[int],
    is_neox: bool = True,
    *,
    interleaved: bool = False,
) -> None:
    angles, valid = rows_at(positions, cos_sin_cache)  # of each axis: [3, T, R], [3, T]
    frequency = torch.arange(cos_sin_cache.shape[1] // 2, device=positions.device)
    axis = _axis_of(frequency, mrope_section, interleaved).expand(1, positions.shape[1], 2, -1)
    chosen = angles.unflatten(-1, (2, -1)).gather(0, axis)[0].flatten(-2)
    for x in (query, key):
        if x is not None:
            rotate_heads(x, head_size, chosen, valid.all(0), is_neox)


def _axis_of(frequency: torch.Tensor, sections: Sequence[int], interleaved: bool) -> torch.Tensor:
    """The axis (0 time, 1 height, 2 width) whose position each frequency takes."""
    time, height, width = sections
    if not interleaved:
        return (frequency >= time).long() + (frequency >= time + height)
    # Interleaved: time, height and width alternate until height and width have as many frequencies as their sections.
    # All other frequencies belong to time.
    is_height = (frequency % 3 == 1) & (frequency < 3 * height)
    is_width = (frequency % 3 == 2) & (frequency < 3 * width)
    return is_height.long() + 2 * is_width
