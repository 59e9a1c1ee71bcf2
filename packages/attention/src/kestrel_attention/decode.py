"""Launching the decode kernels: which of them covers a call, how sequences are cut into chunks, scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kestrel_runtime import Binary, UnsupportedError

from .kernels.variants import DTYPES, EITHER, NAMED, DecodeVariant, covering, outside
from .plans import Plans

_binary = Binary("kestrel_attention")
_NAMES = dict(zip((torch.bfloat16, torch.float16), DTYPES, strict=True))
_CODES = {
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}
MOST_QUERIES = 16  # longer ones are prefill
_TILE = 16  # keys: chunks are of whole tiles, or of whole pages
ROWS = 8  # of a block: queries x heads of one KV head
_FAR = 2**30
_MOST_KEYS = 2**29
_MOST_SPLITS = 2**25  # chunks are of 16 keys at least: more make no others
_MULTIPROCESSORS = 132  # up to so many blocks, and more than half, take all chunks of a sequence each
_GRID = 65535
_ROUND = 8  # chunks that a warp joins at once
_FLAT = 2.0**-40  # a soft cap below it leaves all weights alike too, and its reciprocal is finite
_INT4_PAGE = 64  # chunks of an INT4 cache are whole pages
_UNALIGNED = "kernels take caches whose rows are aligned to 16 bytes"


@dataclass(frozen=True)
class Chunking:
    """How sequences are cut, by their length alone: what the kernel works out again on the device.

    A sequence is cut so that one alone occupies the GPU, but not into short chunks: a block's start and end, and its
    sums written and read, cost as much as some 100 keys.
    """

    whole: int
    """Sequences of so many keys are one chunk."""
    shorter: int
    """Keys of a chunk at least, of sequences of up to ``middle`` keys."""
    middle: int
    shortest: int
    """The same of longer ones."""
    most: int
    """Chunks of a sequence."""

    def least(self, length: int) -> int:
        """Keys of a chunk of a sequence of this length, if that is not more than ``most`` chunks."""
        return self.whole if length <= self.whole else self.shorter if length <= self.middle else self.shortest

    def slots(self, longest: int) -> int:
        """Chunks that sequences of up to this length have at most."""
        ends = [longest] + [end for end in (self.whole, self.middle) if end < longest]
        return max(1, min(self.most, max(-(-end // self.least(end)) for end in ends)))

    def keys(self, length: int, grain: int = 1) -> int:
        """Of a chunk of a sequence of this length, in a cache whose chunks are of whole ``grain`` keys."""
        grain = max(grain, _TILE)
        return max(self.least(length), -(-length // (grain * self.most)) * grain)


def chunking(num_splits: int, size: int, cache: str, columns: int) -> Chunking:
    """The chunks of a call. size: of a head. columns: blocks that a sequence takes with one chunk."""
    if num_splits > 0:
        return Chunking(16, 16, 0, 16, min(num_splits, _MOST_SPLITS))
    most = max(1, 128 // columns)
    if size > 256:
        return Chunking(512, 512, 8192, 256, most)
    if size > 128:
        # H200, b8 kv4096 16/8 d256 w1024, us for 256, 272 keys: 24.4, 23.7
        return Chunking(272, 272, 2176, 1024 if cache == "same" else 272, most)
    if size > 64 and cache == "same":
        # H200, b8 kv4096 32/8 d128, us for 688, 1024 keys: 37.3, 36.7; b1 kv32768 32/4 for 512, 1024: 21.7, 24.1
        return Chunking(1024, 1024, 8192, 512, 2 * most)
    if size <= 64 and cache != "int4":
        return Chunking(512, 192, 768, 256, most)
    return Chunking(1024, 1024, 0, 1024, most)


@dataclass(frozen=True)
class Plan:
    """What the form of the tensors and the numbers of a call decide."""

    launch: Callable[..., None] | None
    """The decode kernel; None where there is nothing to write."""
    combine: Callable[..., None] | None
    write: Callable[..., None] | None
    """Puts new keys and values into the caches."""
    write_numbers: tuple[int, ...]
    out: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], tuple[int, ...]]
    rows: int
    """Of partial results, over all chunks; 0 where sequences are whole."""
    blocks_of_rows: int
    as_bytes: bool
    group: int
    slots: int
    numbers: tuple[float, ...]
    copied: tuple[bool, bool, bool]
    """q, k and v that have strides of no multiple of 16 bytes: the kernels take copies."""
    anything: torch.Tensor
    """Stands where a tensor is optional; never read."""
    either: tuple[int, ...]
    """(1,) for bf16 and (0,) for fp16 where one kernel serves both, else nothing."""


plans: Plans[Plan] = Plans()


def make_plan(
    key: Any,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
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
    new: tuple[torch.Tensor, ...] = (),
    scales: tuple[torch.Tensor, ...] = (),
) -> Plan:
    """The plan of checked arguments, remembered under ``key``.

    scales: what comes with a cache of integers: k_scale and v_scale; or k_scale, k_zero, v_scale, v_zero, k_tail and
    seq_ids.
    """
    batch, queries, heads, size = q.shape
    variants = _covered(q, k_cache, v_cache, scales)
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    room = page if block_table is None else page * block_table.shape[1]
    if room > _MOST_KEYS:
        raise UnsupportedError(f"kernels cover sequences of up to {_MOST_KEYS} keys")
    group = heads // kv_heads
    columns = max(1, kv_heads * -(-queries * group // ROWS))
    chunks = chunking(num_splits, size, variants[0].cache, columns)
    grain = _INT4_PAGE if variants[0].cache == "int4" else 1
    if grain > 1 and num_splits > 0:
        chunks = Chunking(grain, grain, 0, grain, chunks.most)
    left, right = (-1 if end > _FAR else end for end in (window_left, window_right))  # kernels count in 32 bits
    right = 0 if causal else right
    longest = room  # keys that a block of rows visits at most
    if left >= 0 and right >= 0 and prefix_len == 0 and prefix_lens is None:
        longest = min(longest, left + right + queries + grain - 1)
    slots = chunks.slots(longest)
    if slots * columns // kv_heads > _GRID or batch > _GRID:
        raise UnsupportedError(f"kernels cover up to {_GRID} sequences and splits")
    start = max(0, room - queries - left) // grain * grain if left >= 0 and longest < room else 0
    guessed = chunks.keys(min(room - start, longest), grain), start  # of a sequence that fills its table
    blocks = batch * columns
    variant = variants[0]
    for joining in variants[1:]:  # a block takes all chunks of a sequence
        if 1 < slots <= joining.groups and _MULTIPROCESSORS // 2 < blocks <= _MULTIPROCESSORS:
            variant = joining
    rows = blocks * slots * ROWS if slots > variant.groups else 0
    if rows >= 2**31:
        raise UnsupportedError("too many splits for one call")
    page_shift = 31 + (page - 1).bit_length()
    scale = float(size**-0.5 if softmax_scale is None else softmax_scale)
    cap = max(float(softcap), _FLAT) if softcap else 0.0
    scale_heads = [0 if scale is None else 1 + (scale.shape[0] > 1) for scale in (k_scale, v_scale)]
    numbers = (
        *(int(block_table is not None), room, queries if new else 0, -(-(1 << page_shift) // page), page_shift),
        *(group, 1.0 / max(group, 1), *scale_heads, int(prefix_lens is not None), min(prefix_len, _FAR), left, right),
        *(scale * 2 / cap if cap else scale, cap),
        *(chunks.whole, chunks.shorter, chunks.middle, chunks.shortest, chunks.most, slots, *guessed),
    )
    writer = f"append_{variant.dtype}_{variant.cache}"
    joiner = f"combine_{_NAMES[q.dtype]}_w{1 if slots <= _ROUND else 8}"
    plan = Plan(
        launch=_binary.kernel(variant, q.device) if q.numel() else None,
        combine=_binary.kernel(NAMED[joiner], q.device) if slots > variant.groups else None,
        write=_binary.kernel(NAMED[writer], q.device) if new and new[0].numel() else None,
        write_numbers=(int(block_table is not None), *(() if scales else scale_heads), int(q.dtype == torch.bfloat16)),
        out=(tuple(q.shape), (queries * heads * size, heads * size, size, 1)),
        lse=((batch, heads, queries), (heads * queries, queries, 1)),
        rows=rows,
        blocks_of_rows=batch * columns,
        as_bytes=k_cache.element_size() == 1 and k_cache.dtype != torch.int8,
        group=group,
        slots=slots,
        numbers=numbers,
        copied=tuple(any(stride % 8 for stride in x.stride()[:-1]) for x in (q, *(new or (q, q)))),  # type: ignore[arg-type]
        anything=torch.empty(1, dtype=torch.float32, device=q.device),
        either=(int(q.dtype == torch.bfloat16),) if variant.dtype == EITHER else (),
    )
    return plans.keep(key, plan)


def attend(
    plan: Plan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor | None,
    new: tuple[torch.Tensor, ...] = (),
    scales: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); first writes the new keys and values into the caches, if there are any."""
    device = q.device
    out = torch.empty_strided(*plan.out, dtype=q.dtype, device=device)
    lse = torch.empty_strided(*plan.lse, dtype=torch.float32, device=device)
    if plan.launch is None and plan.write is None:
        return out, lse
    addresses = k_cache.data_ptr() | v_cache.data_ptr()  # which no plan holds
    for x in _aligned_scales(scales) if scales else ():
        addresses |= x.data_ptr()
    if addresses % 16:
        raise UnsupportedError(_UNALIGNED)
    if plan.as_bytes:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    table = cache_seqlens[None] if block_table is None else block_table
    if k_scale is None:
        k_scale = plan.anything
    if v_scale is None:
        v_scale = plan.anything
    part_out = part_lse = plan.anything
    chunks = cache_seqlens
    if plan.combine is not None:
        part_out = torch.empty(plan.rows * q.shape[3], dtype=torch.float32, device=device)
        part_lse = torch.empty(plan.rows, dtype=torch.float32, device=device)
        chunks = torch.empty(plan.blocks_of_rows, dtype=torch.int32, device=device)
    q, result = _aligned(q, plan.copied[0]), out
    if plan.either == (0,):  # fp16, which kernels for either take as bits
        q, result = q.view(torch.bfloat16), out.view(torch.bfloat16)
        new = tuple([x.view(torch.bfloat16) for x in new])
        if len(scales) > 2:
            scales = (*scales[:4], scales[4].view(torch.bfloat16), scales[5])
    if plan.write is not None:  # nothing is allocated from here on: an append that another one repeats counts twice
        rows = [_aligned(x, copied) for x, copied in zip(new, plan.copied[1:], strict=True)]
        plan.write(*rows, k_cache, v_cache, cache_seqlens, table, *(scales or (k_scale, v_scale)), *plan.write_numbers)
    if plan.launch is None:
        return out, lse
    plan.launch(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        table,
        k_scale,
        v_scale,
        cache_seqlens if prefix_lens is None else prefix_lens,
        result,
        lse,
        part_out,
        part_lse,
        chunks,
        *plan.numbers,
        *scales,
        *plan.either,
    )
    if plan.combine is not None:
        plan.combine(out, lse, part_out, part_lse, chunks, plan.group, plan.slots)
    return out, lse


def _aligned_scales(scales: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Those of an INT4 cache that kernels read 16 bytes at a time: of channels, and the tail."""
    return (scales[0], scales[1], scales[4]) if len(scales) > 2 else ()


def _covered(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: tuple[torch.Tensor, ...]
) -> tuple[DecodeVariant, ...]:
    """The variants for these tensors."""
    if q.dtype not in _NAMES:
        raise UnsupportedError("kernels cover bf16 and fp16 queries")
    codes = "int4" if len(scales) > 2 else _CODES.get(k_cache.dtype, "same")
    if codes == "same" and k_cache.dtype != q.dtype:
        raise UnsupportedError("kernels cover caches of the queries' dtype and of codes")
    if q.shape[1] > MOST_QUERIES:
        raise UnsupportedError(f"kernels cover up to {MOST_QUERIES} queries of a sequence")
    if codes == "int4" and k_cache.shape[1] != _INT4_PAGE:
        raise UnsupportedError(f"INT4 caches have pages of {_INT4_PAGE} slots, this one has {k_cache.shape[1]}")
    case = _NAMES[q.dtype], codes, q.shape[3]
    variants = () if q.shape[3] % (8 if codes == "same" else 16) else covering(*case) or outside(*case)
    if not variants:
        raise UnsupportedError(f"no kernel for heads of {q.shape[3]} over a cache of {codes}")
    for cache in (k_cache, v_cache):
        unit = 16 // cache.element_size()
        if any(stride % unit for stride in cache.stride()[:3]):
            raise UnsupportedError(_UNALIGNED)
        if cache.numel() == 0:
            raise UnsupportedError("the cache has no page")
        if (cache.shape[0] - 1) * cache.stride(0) + (cache.shape[1] - 1) * cache.stride(1) >= 2**32 * unit:
            raise UnsupportedError("kernels reach 64 GB of cache")
    of_tokens = (scales[2], scales[3]) if codes == "int4" else scales
    if codes == "int4" and any((x.shape[0] - 1) * x.stride(0) >= 2**35 for x in scales[:2]):
        raise UnsupportedError("kernels reach 64 GB of scales")
    for x in of_tokens:
        if (x.shape[0] - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1) >= 2**32:
            raise UnsupportedError("kernels reach 2^32 scales")
    if any(stride % 8 for x in _aligned_scales(scales) for stride in x.stride()[:-1]):
        raise UnsupportedError(_UNALIGNED)
    return variants


def _aligned(x: torch.Tensor, copied: bool) -> torch.Tensor:
    """Rows that can be loaded 16 bytes at a time: x, or a copy."""
    return x.clone(memory_format=torch.contiguous_format) if copied or x.data_ptr() % 16 else x
