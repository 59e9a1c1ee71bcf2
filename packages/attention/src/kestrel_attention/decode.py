"""Launching the decode kernels: which of them covers a call, how sequences are cut into chunks, scratch memory."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, UnsupportedError

from .kernels.variants import DTYPES, SIZES, DecodeVariant, covering

_binary = Binary("kestrel_attention")
_NAMES = dict(zip((torch.bfloat16, torch.float16), DTYPES, strict=True))
_E4M3 = (torch.float8_e4m3fn, torch.uint8)
MOST_QUERIES = 16  # longer ones are prefill
ROWS = 8  # of a block: queries x heads of one KV head
_FAR = 2**30
_MOST_KEYS = 2**29
_MULTIPROCESSORS = 132  # while all blocks are resident at once, they take as many warps as that allows
_GRID = 65535


def chunking(num_splits: int, size: int, columns: int) -> tuple[int, int]:
    """(shortest, most): keys in a chunk at least, and chunks of a sequence at most, for the kernel to choose by length.

    size: of a head. columns: blocks that a sequence takes with one chunk.

    A sequence is cut so that one alone occupies the GPU, but not into short chunks: a block's start and end, and its
    sums written and read, cost as much as some 100 keys. H200, us per call for 256, 512, 1024 keys at least, four warps
    a block: fp8 b64 kv8192 32/8 d128 357, 321, 291; bf16 b128 kv1024 64/8 d128 172, 165, 137.
    """
    if num_splits > 0:
        return 16, num_splits
    return 1024 if size <= 128 else 256, max(1, 128 // columns)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    num_splits: int,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of checked arguments; first writes the new keys and values into the caches, if there are any."""
    batch, queries, heads, size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    variants, arch = _covered(q, k_cache, v_cache), _binary.arch(q.device)
    if out.numel() == 0:
        return out, lse
    if k_cache.element_size() == 1:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    paged, table = (0, cache_seqlens[None]) if block_table is None else (1, block_table)
    room = page * table.shape[1] if paged else page
    if room > _MOST_KEYS:
        raise UnsupportedError(f"kernels cover sequences of up to {_MOST_KEYS} keys")
    anything = lse.view(-1)  # stands where a tensor is optional
    scales = [anything if scale is None else scale for scale in (k_scale, v_scale)]
    scale_heads = [0 if scale is None else 1 + (scale.shape[0] > 1) for scale in (k_scale, v_scale)]

    added = 0
    if new is not None:
        added = queries
        write = _binary.function(f"append_{variants[0].dtype}_{variants[0].cache}_{arch}")
        write(*map(_aligned, new), k_cache, v_cache, cache_seqlens, table, *scales, paged, *scale_heads)

    group = heads // kv_heads
    columns = kv_heads * -(-queries * group // ROWS)
    shortest, most = chunking(num_splits, size, columns)
    left, right = (-1 if end > _FAR else end for end in (window_left, window_right))  # kernels count in 32 bits
    right = 0 if causal else right
    longest = room  # keys that a block of rows visits at most
    if left >= 0 and right >= 0 and prefix_len == 0 and prefix_lens is None:
        longest = min(longest, left + right + queries)
    slots = max(1, min(most, -(-longest // shortest)))
    if slots * columns // kv_heads > _GRID or batch > _GRID:
        raise UnsupportedError(f"kernels cover up to {_GRID} sequences and splits")
    parts = [anything, anything, cache_seqlens]
    if slots > 1:
        rows = batch * columns * slots * ROWS
        if rows >= 2**31:
            raise UnsupportedError("too many splits for one call")
        parts = [
            torch.empty(rows * size, dtype=torch.float32, device=q.device),
            torch.empty(rows, dtype=torch.float32, device=q.device),
            torch.empty(batch * columns, dtype=torch.int32, device=q.device),
        ]
    prefixes = cache_seqlens if prefix_lens is None else prefix_lens
    page_shift = 31 + (page - 1).bit_length()
    page_inverse = -(-(1 << page_shift) // page)
    fixed_chunk = slots > 1 and -(-room // most) <= shortest  # the shortest, for any length
    blocks = batch * columns * slots
    variant = next((v for v in reversed(variants) if blocks <= _MULTIPROCESSORS * v.residents), variants[0])
    integers = (
        paged,
        room,
        added,
        page_inverse,
        page_shift,
        group,
        1.0 / group,
        *scale_heads,
        int(prefix_lens is not None),
        min(prefix_len, _FAR),
        left,
        right,
    )
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    _binary.function(f"{variant.name}_{arch}")(
        *(_aligned(q), k_cache, v_cache, cache_seqlens, table, *scales, prefixes, out, lse, *parts),
        *(*integers, float(scale), float(softcap), shortest, most, slots, fixed_chunk),
    )
    if slots > 1:
        _binary.function(f"combine_{_NAMES[q.dtype]}_{arch}")(out, lse, *parts, group, slots)
    return out, lse


def _covered(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[DecodeVariant, ...]:
    """The variants for these tensors."""
    if q.dtype not in _NAMES:
        raise UnsupportedError("kernels cover bf16 and fp16 queries")
    if k_cache.dtype != q.dtype and k_cache.dtype not in _E4M3:
        raise UnsupportedError("kernels cover caches of the queries' dtype and of e4m3")
    if q.shape[1] > MOST_QUERIES:
        raise UnsupportedError(f"kernels cover up to {MOST_QUERIES} queries of a sequence")
    cache = "same" if k_cache.dtype == q.dtype else "e4m3"
    variants = covering(_NAMES[q.dtype], cache, q.shape[3]) if q.shape[3] in SIZES else ()
    if not variants:
        raise UnsupportedError(f"no kernel for heads of this size with such a cache (kernels: {SIZES})")
    for cache in (k_cache, v_cache):
        unit = 16 // cache.element_size()
        if cache.data_ptr() % 16 or any(stride % unit for stride in cache.stride()[:3]):
            raise UnsupportedError("kernels take caches whose rows are aligned to 16 bytes")
        if cache.numel() == 0:
            raise UnsupportedError("the cache has no page")
        if (cache.shape[0] - 1) * cache.stride(0) + (cache.shape[1] - 1) * cache.stride(1) >= 2**32 * unit:
            raise UnsupportedError("kernels reach 64 GB of cache")
    return variants


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows that can be loaded 16 bytes at a time: x, or a copy."""
    if x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
