"""Launching prefill over caches that are dequantised or copied into a scratch cache of the queries' dtype first.

All INT8 and INT4 caches are, and FP8 caches in calls of many queries: there a key is converted once, in the kernels of
prefill.py once for each block of queries. Caches of the queries' dtype are copied in such calls where their pages are
not multiples of BOX_ROWS: TMA loads keys that lie in order, and no others. In the scratch cache the keys of a head do.
Sequences go through it in groups, so that its size is bounded whatever the batch. A sequence whose block table has room
for more than MAX_SCRATCH_BYTES of keys and values is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kestrel_runtime import Binary, UnsupportedError

from . import prefill
from .arguments import Cached
from .kernels.constants import BOX_ROWS, INT4_PAGE
from .kernels.parameters import AppendIntegerScalars, AppendScalars, DequantiseScalars
from .kernels.variants import NAMED
from .launching import (
    UNALIGNED,
    Bound,
    Launch,
    launch_in_order,
    loaded_as_vectors,
    refuse_uncovered_strides,
    unread,
    unused,
)
from .plan import MULTIPROCESSORS
from .prefill import Results, aligned, kernel_and_memory, names, queries_are_aligned, steps_are_aligned
from .prefill_plan import PrefillProblem

_binary = Binary("kestrel_attention")
SCRATCH_BYTES = 2**30  # of the keys and values of a group of sequences, unless one has more
MAX_SCRATCH_BYTES = 2**33  # of those of one sequence, by the width of the block table
FP8_ROWS = 4096  # queries x query heads of a KV head, from which on an FP8 cache is dequantised first
COPIED_ROWS = 4096  # the same, for the copy of a cache of the queries' dtype whose pages TMA cannot load
COPIED_DIMS = 128  # up to which it is copied
BLOCKS = 16 * MULTIPROCESSORS  # of a launch that dequantises
VECTORS_OF_BLOCK = 1024  # of 16 bytes of keys that a thread block converts at a time: four for each thread


def covers(q: torch.Tensor, k_cache: torch.Tensor, given: Cached) -> bool:
    """Whether a cache of FP8 or of the queries' dtype is dequantised or copied first, for these queries."""
    is_same = k_cache.dtype == q.dtype
    if q.dtype not in names or not (is_same or k_cache.element_size() == 1) or q.shape[3] % (8 if is_same else 16):
        return False
    if is_same and (given.block_table is None or k_cache.shape[1] % BOX_ROWS == 0 or q.shape[3] > COPIED_DIMS):
        return False
    if q.shape[3] > 256:  # which no other kernel covers; this one reads no scales on older GPUs
        return given.codes.split(k_cache)[0] == (None, None) or _binary.arch(q.device) not in ("sm80", "sm86", "sm89")
    if not prefill.uses_wgmma(q.device):  # other kernels read no scales of 16-bit keys
        return False
    if given.scores.window_left >= 0 and given.scores.prefix_lens is None and not given.scores.prefix_len:
        return False  # a window without a prefix hides keys, which the other kernels then do not read
    slots, kv_heads, head_dim = k_cache.shape[1:]
    pages = 1 if given.block_table is None else given.block_table.shape[1]
    sequences = q.shape[0] if is_same else 1  # groups of sequences cost more than a copy saves
    fits = 4 * sequences * pages * slots * kv_heads * head_dim <= SCRATCH_BYTES
    rows = q.shape[1] * (q.shape[2] // kv_heads)
    return fits and rows >= (COPIED_ROWS if is_same else FP8_ROWS)


def make_cached(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: Sequence[torch.Tensor], given: Cached
) -> Launch:
    """A launch as decode.py makes them, for more queries than it covers."""
    batch, queries, heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    paged, device = given.block_table is not None, q.device
    pages = 1 if given.block_table is None else given.block_table.shape[1]
    scales, integers = given.codes.split(k_cache)
    cache = "int4" if len(integers) > 2 else "int8" if integers else "fp8"
    if k_cache.dtype == q.dtype:
        cache = "same"
    if q.dtype not in names:
        raise UnsupportedError("kernels cover bf16 and fp16 queries")
    if cache == "int4" and page_size != INT4_PAGE:
        raise UnsupportedError(f"INT4 caches have pages of {INT4_PAGE} slots, this one has {page_size}")
    unit = {"int4": 64, "same": 8}.get(cache, 16)
    if head_dim % unit:
        raise UnsupportedError(f"kernels over {cache.upper()} caches cover heads of a multiple of {unit}")
    if new and head_dim > 256 and integers:
        raise UnsupportedError(f"kernels append to {cache.upper()} caches of heads of up to 256")
    if pages == 0:
        raise UnsupportedError("the block table has no column")
    refuse_uncovered_strides(cache, (k_cache, v_cache), integers)
    of_sequence = pages * page_size * kv_heads * head_dim
    if pages * page_size >= 2**31 or 4 * of_sequence > MAX_SCRATCH_BYTES:
        raise UnsupportedError("too many keys of a sequence for one call")
    group = max(1, min(batch, SCRATCH_BYTES // (4 * of_sequence)))
    starts = range(0, batch, group)
    is_bf16, appended = int(q.dtype == torch.bfloat16), queries if new else 0
    is_e5m2 = k_cache.dtype is torch.float8_e5m2
    scale_heads = [0 if x is None else 1 + (x.shape[0] > 1) for x in scales]

    def attend_of(sequences: int) -> Any:
        problem = PrefillProblem(
            batch=sequences,
            max_queries=queries,
            max_keys=page_size * pages,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=names[q.dtype],
            has_lengths=True,
            has_block_table=paged,
            in_order=paged,
            has_boxes=True,
            has_sinks=given.sinks is not None,
            k_scale_heads=scale_heads[0],
            v_scale_heads=scale_heads[1],
            **given.scores.of_problem(),
        )
        return kernel_and_memory(problem, q)

    attends = {n: attend_of(n) for n in {min(group, batch - start) for start in starts}} if q.numel() else {}
    of_vector = 16 // k_cache.element_size()
    step_keys = max(1, VECTORS_OF_BLOCK * of_vector // (kv_heads * k_cache.shape[3]))
    dequantise = _binary.kernel(NAMED[f"dequantise_{cache}"], device)
    appender = f"append_half_{'e5m2' if is_e5m2 else cache}"
    if cache in ("fp8", "same") and not is_e5m2:
        appender = f"append_{names[q.dtype]}_{'e4m3' if cache == 'fp8' else cache}"
    append_rows = _binary.kernel(NAMED[appender], device) if new and new[0].numel() else None
    scalars = {
        n: DequantiseScalars(
            has_block_table=int(paged),
            appended=appended,
            pages=pages,
            blocks=max(1, min(-(-pages * page_size // step_keys), BLOCKS // n)),
            step_keys=step_keys,
            is_bf16=is_bf16,
            codes_are_e5m2=int(is_e5m2),
        )
        for n in attends
    }
    append_scalars: AppendIntegerScalars | AppendScalars = AppendIntegerScalars(int(paged), is_bf16)
    if cache in ("fp8", "same"):
        append_scalars = AppendScalars(int(paged), *scale_heads, is_bf16)
    rows_as_bf16 = cache not in ("fp8", "same") or is_e5m2  # whose append kernels take rows of both dtypes as bf16
    results, new_steps = Results(q, (batch, heads, queries)), [steps_are_aligned(x) for x in new]
    q_steps = queries_are_aligned(q)
    step = INT4_PAGE if cache == "int4" else max(1, queries)  # which the kernel appends at once
    appends = range(0, queries, step) if append_rows is not None else range(0)
    unread_lse = {n: unread((n, heads, queries), device) for n in attends}
    no_int, no_table = unused(torch.int32, device), unused(torch.int32, device, 2)
    no_channels, no_zeros = unused(torch.float16, device, 3), unused(torch.float32, device, 3)
    no_tail, no_float = unused(torch.bfloat16, device, 4), unused(torch.float32, device)

    def launch(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor | None,
        *,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        prefix_lens: torch.Tensor | None,
        new: Sequence[torch.Tensor] = (),
        integers: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
        want_lse: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result, lse = results.empty(q, out, want_lse)
        addresses = k_cache.data_ptr() | v_cache.data_ptr()
        for x in loaded_as_vectors(integers):
            addresses |= x.data_ptr()
        if addresses & 15:
            raise UnsupportedError(UNALIGNED)
        if append_rows is not None and k_cache.data_ptr() == v_cache.data_ptr():
            raise ValueError("K and V are appended to the same memory")
        # All memory is allocated before the first kernel runs: a call that fails has written nothing.
        q = aligned(q, q_steps)
        sinks = None if sinks is None else sinks.float()
        rows = [aligned(x, steps) for x, steps in zip(new, new_steps, strict=True)]
        if rows_as_bf16:
            rows = [x.view(torch.bfloat16) for x in rows]
        codes = integers
        if cache in ("fp8", "same"):
            codes = tuple(no_float if scale is None else scale for scale in (k_scale, v_scale))
            if k_cache.dtype is torch.uint8:
                k_cache, v_cache = k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn)
        befores = [
            torch.where(cache_seqlens < 0, cache_seqlens, cache_seqlens + first) if first else cache_seqlens
            for first in appends
        ]
        if len(integers) > 2:
            codes = integers = (*integers[:4], integers[4].view(torch.bfloat16), integers[5])
        scratch = torch.empty(2, kv_heads, group * pages, page_size, head_dim, dtype=q.dtype, device=device)
        scratch = scratch.permute(0, 2, 3, 1, 4)
        as_bf16 = scratch.view(torch.bfloat16)
        table, lengths = (torch.empty(n, dtype=torch.int32, device=device) for n in (group * pages, group))
        memory = {n: allocate() for n, (_, allocate) in attends.items()}
        steps: list[Bound] = []
        for first, before in zip(appends, befores, strict=True):
            assert append_rows is not None
            some = [x[:, first : first + step] for x in rows]
            to_table = no_table if block_table is None else block_table
            steps.append((append_rows, (*some, k_cache, v_cache, before, to_table, *codes, *append_scalars)))
        if cache in ("fp8", "same"):
            raw = torch.uint8 if cache == "fp8" else torch.bfloat16
            k_cache, v_cache = k_cache.view(raw), v_cache.view(raw)

        def prepare(start: int, count: int) -> None:
            """Append before the first group; dequantise a group."""
            of_group = slice(start, start + count)
            of_blocks = slice(None) if paged else of_group
            caches = (k_cache[of_blocks], v_cache[of_blocks], cache_seqlens[of_group])
            given_table = no_table if block_table is None else block_table[of_group]
            if len(integers) > 2:
                scales = (*(x[of_blocks] for x in integers[:4]), integers[4], integers[5][of_group])
            else:
                of_keys, of_values = (x[of_blocks] for x in integers) if integers else (no_zeros, no_zeros)
                scales = (of_keys, no_channels, of_values, no_zeros, no_tail, no_int)
            given = (*caches, given_table, *scales, as_bf16[0, : count * pages], as_bf16[1, : count * pages])
            of_dequantise = (*given, table, lengths, *scalars[count], count)
            launch_in_order([*(steps if start == 0 else ()), (dequantise, of_dequantise)])

        def attend(start: int, count: int) -> None:
            of_group = slice(start, start + count)
            given_table = table[: count * pages].view(count, pages) if paged else None
            of_prefix = None if prefix_lens is None else prefix_lens[of_group]
            tensors = (None, None, lengths[:count], given_table, of_prefix, sinks, None, k_scale, v_scale)
            to_lse = unread_lse[count] if lse is None else lse[of_group]
            keys, values = (x[: count * pages].unflatten(0, (count, pages)).flatten(1, 2) for x in scratch)
            given = (q[of_group], keys, values, tensors, result[of_group], to_lse)
            attends[count][0](*given, partial(prepare, start, count), memory[count])

        launch_in_order([(attend, (start, min(group, batch - start))) for start in starts] if attends else steps)
        return (result if out is None or out is result else out.copy_(result)), lse

    return launch
