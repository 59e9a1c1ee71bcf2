"""Rotary position embedding of queries and keys, in place."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op
from kestrel_runtime.rotary import check_rows, check_table

from . import reference

_kernels = Binary("kestrel_rope")


def check_rotary_embedding(
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
    op = "rotary_embedding"
    check.tensor(op, "positions", positions, dtype=check.INTEGERS, ndim=(1, 2))
    check_rows(op, positions.shape, query, key, head_size)
    check_table(op, cos_sin_cache, query, head_size, rope_dim_offset)
    check.flag(op, "is_neox", is_neox)
    check.flag(op, "inverse", inverse)
    check.same(op, "device", positions=positions, query=query, key=key, cos_sin_cache=cos_sin_cache)


@kernel_op(reference=reference.rotary_embedding, check=check_rotary_embedding, kernel="cuda", mutates=("query", "key"))
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
    """Rotate pairs of dimensions of every query and key head by the angle of the row's position, in place.

    T rows (or [B, S] of them), H and Hk heads of D = ``head_size`` dims, R rotated dims, max_pos positions.

    positions: int32 or int64, [T] or [B, S]. A position < 0 or >= max_pos leaves its row untouched.
    query: [T, H*D] or [T, H, D] (or [B, S, ...]), bf16, fp16 or float32. Written in place.
    key: the same with Hk heads, or None. Written in place.
        Only the last dimension must be contiguous, so both may be slices of one packed QKV tensor.
    cos_sin_cache: *constant* [max_pos, R], cosines in the first R/2 columns, sines in the others; float32 or the
        dtype of query. R is even and R + rope_dim_offset <= D. See :func:`build_cos_sin_cache`.
    is_neox: True: pairs are (i, i + R/2), the order of NeoX. False: pairs are (2i, 2i + 1), the order of GPT-J.
    rope_dim_offset: first rotated dim of a head. Dims outside offset .. offset + R stay untouched.
    inverse: rotate back, by the negative angle.

    Returns None. The rotation is float32 and rounded once. A row does not depend on the rows around it, bit for bit.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device, and
    for a query or key that shares memory within itself or with another argument.
    Semantics: ``rotary_embedding`` of vLLM; Su et al., "RoFormer", arXiv 2104.09864.

    >>> import torch, kestrel_rope
    >>> table = kestrel_rope.build_cos_sin_cache(4, 8)
    >>> query = torch.tensor([[1.0, 0.0, 0.0, 0.0]])  # one row, one head of 4
    >>> kestrel_rope.rotary_embedding(torch.tensor([1]), query, None, 4, table)
    >>> query  # the pair (0, 2), rotated by one radian
    tensor([[0.5403, 0.0000, 0.8415, 0.0000]])
    """
    _kernels.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse)
