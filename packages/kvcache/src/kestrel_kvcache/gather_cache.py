"""Reading one sequence from a paged cache of any format."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference
from .checks import check_int4, check_int8, check_pair, check_scale

_kernels = Binary("kestrel_kvcache")
_VALUES = (*check.FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


def check_gather_cache(
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
) -> None:
    op = "gather_cache"
    check.choice(op, "dtype", dtype, check.FLOATS)
    int4 = {"k_zero": k_zero, "v_zero": v_zero, "k_tail": k_tail, "seq_ids": seq_ids}
    if any(x is not None for x in int4.values()):
        shape = check_pair(op, key_cache, value_cache, torch.uint8)
        check_int4(op, shape, check.FLOATS, k_scale, k_zero, v_scale, v_zero, k_tail)
        check.tensor(op, "seq_ids", seq_ids, dtype=torch.int32, ndim=1)
        check.shape(op, "seq_ids", seq_ids, (1,))
    elif isinstance(key_cache, torch.Tensor) and key_cache.dtype == torch.int8:
        check_int8(op, check_pair(op, key_cache, value_cache, torch.int8), k_scale, v_scale)
    else:
        shape = check_pair(op, key_cache, value_cache, _VALUES)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and key_cache.element_size() != 1:
                check.fail(op, name, "None with a cache of values (nothing to scale)", "a tensor")
            check_scale(op, name, scale, shape[2])
    check.tensor(op, "block_table", block_table, dtype=torch.int32, ndim=1, last_contiguous=True)
    check.number(op, "length", length, integer=True, minimum=0)
    caches = {"key_cache": key_cache, "value_cache": value_cache, "block_table": block_table}
    check.same(op, "device", **caches, k_scale=k_scale, v_scale=v_scale, **int4)


@kernel_op(reference=reference.gather_cache, check=check_gather_cache, kernel="cuda")
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
    """Read the keys and values of one sequence from a paged cache.

    L = ``length`` tokens, Hk KV heads of D dims, pages of P slots.

    key_cache, value_cache: [blocks, P, Hk, D] as :func:`reshape_and_cache` writes them (bf16, fp16, float32, FP8; uint8
        is e4m3), int8 as :func:`int8_cache_write` does, uint8 [blocks, 64, Hk, D/2] as :func:`int4_cache_write` does.
    block_table: int32 [n], the sequence's pages in order. A negative entry, or one past the end, is no page.
    length: tokens of the sequence, on the host. The result is 0 for tokens without a page.
    dtype: of the result: bf16, fp16 or float32.
    k_scale, v_scale: FP8: float32 [1] or [Hk], None is 1. INT8: float32 [blocks, P, Hk]. INT4: fp16, [blocks, Hk, D]
        for K and [blocks, 64, Hk] for V.
    k_zero, v_zero, k_tail, seq_ids: for INT4 only, and then all four: see :func:`int4_cache_write`; seq_ids is int32
        [1], on the device. One < 0 or >= seqs is padding: the result is 0.

    Returns (k, v), both [L, Hk, D]: code * scale, or (code - zero) * scale, in float32, rounded once. Raises TypeError
    for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device, UnsupportedError for
    an INT4 cache with a page size other than 64. No argument is constant.
    Semantics: the inverse of the writers of this package, over the paged layout of vLLM (Kwon et al., arXiv
    2309.06180); INT4: Liu et al., "KIVI", arXiv 2402.02750.

    >>> import torch, kestrel_kvcache
    >>> cache = torch.arange(12.0).reshape(3, 2, 1, 2)  # 3 pages of 2 slots, one head of 2
    >>> k, v = kestrel_kvcache.gather_cache(cache, -cache, torch.tensor([2, 0], dtype=torch.int32), 3)
    >>> k[:, 0]
    tensor([[ 8.,  9.],
            [10., 11.],
            [ 0.,  1.]], dtype=torch.bfloat16)
    """
    op = "gather_cache"  # these two make the results; the entry point checks all else
    check.choice(op, "dtype", dtype, check.FLOATS)
    check.number(op, "length", length, integer=True, minimum=0)
    heads, width = key_cache.shape[2:]
    shape = length, heads, width if k_zero is None else 2 * width
    k, v = empty(key_cache, dtype, *shape), empty(key_cache, dtype, *shape)
    _kernels.gather_cache(
        k,
        v,
        key_cache,
        value_cache,
        block_table,
        length,
        k_scale,
        v_scale,
        k_zero,
        v_zero,
        k_tail,
        seq_ids,
    )
    return k, v
