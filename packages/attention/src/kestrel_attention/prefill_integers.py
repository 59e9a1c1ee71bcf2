"""Launching prefill over INT8 and INT4 caches: dequantised into a cache of the queries' dtype, then as in prefill.py.

Sequences go through a scratch cache in groups, so that its size is bounded whatever the batch.
A sequence whose block table has room for more than MAX_SCRATCH_BYTES of keys and values is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kestrel_runtime import Binary, UnsupportedError

from .arguments import Cached
from .kernels.constants import INT4_PAGE
from .kernels.parameters import AppendIntegerScalars, DequantiseScalars
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
BLOCKS = 16 * MULTIPROCESSORS  # of a launch that dequantises
KEYS_OF_BLOCK = 64


def make_cached(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: Sequence[torch.Tensor], given: Cached
) -> Launch:
    """A launch as decode.py makes them, for more queries than it covers."""
    batch, queries, heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    paged, device = given.block_table is not None, q.device
    pages = 1 if given.block_table is None else given.block_table.shape[1]
    _, integers = given.codes.split(k_cache)
    cache = "int4" if len(integers) > 2 else "int8"
    if q.dtype not in names:
        raise UnsupportedError("kernels cover bf16 and fp16 queries")
    if cache == "int4" and page_size != INT4_PAGE:
        raise UnsupportedError(f"INT4 caches have pages of {INT4_PAGE} slots, this one has {page_size}")
    unit = 64 if cache == "int4" else 16
    if head_dim % unit:
        raise UnsupportedError(f"kernels over {cache.upper()} caches cover heads of a multiple of {unit}")
    if new and head_dim > 256:
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
            has_boxes=True,
            has_sinks=given.sinks is not None,
            **given.scores.of_problem(),
        )
        return kernel_and_memory(problem, q)

    attends = {n: attend_of(n) for n in {min(group, batch - start) for start in starts}} if q.numel() else {}
    dequantise = _binary.kernel(NAMED[f"dequantise_{cache}"], device)
    append_rows = _binary.kernel(NAMED[f"append_half_{cache}"], device) if new and new[0].numel() else None
    scalars = {
        n: DequantiseScalars(
            has_block_table=int(paged),
            appended=appended,
            pages=pages,
            blocks=max(1, min(-(-pages * page_size // KEYS_OF_BLOCK), BLOCKS // n)),
            is_bf16=is_bf16,
        )
        for n in attends
    }
    append_scalars = AppendIntegerScalars(int(paged), is_bf16)
    results, new_steps = Results(q, (batch, heads, queries)), [steps_are_aligned(x) for x in new]
    q_steps = queries_are_aligned(q)
    step = INT4_PAGE if cache == "int4" else max(1, queries)  # which the kernel appends at once
    appends = range(0, queries, step) if append_rows is not None else range(0)
    unread_lse = {n: unread((n, heads, queries), device) for n in attends}
    no_int, no_table = unused(torch.int32, device), unused(torch.int32, device, 2)
    no_channels, no_zeros = unused(torch.float16, device, 3), unused(torch.float32, device, 3)
    no_tail = unused(torch.bfloat16, device, 4)

    def launch(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor | None,
        *,
        k_scale: None,
        v_scale: None,
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
        rows = [aligned(x, steps).view(torch.bfloat16) for x, steps in zip(new, new_steps, strict=True)]
        befores = [
            torch.where(cache_seqlens < 0, cache_seqlens, cache_seqlens + first) if first else cache_seqlens
            for first in appends
        ]
        if len(integers) > 2:
            integers = (*integers[:4], integers[4].view(torch.bfloat16), integers[5])
        scratch = torch.empty(2, group * pages, page_size, kv_heads, head_dim, dtype=q.dtype, device=device)
        as_bf16 = scratch.view(torch.bfloat16)
        table, lengths = (torch.empty(n, dtype=torch.int32, device=device) for n in (group * pages, group))
        memory = {n: allocate() for n, (_, allocate) in attends.items()}
        steps: list[Bound] = []
        for first, before in zip(appends, befores, strict=True):
            assert append_rows is not None
            some = [x[:, first : first + step] for x in rows]
            to_table = no_table if block_table is None else block_table
            steps.append((append_rows, (*some, k_cache, v_cache, before, to_table, *integers, *append_scalars)))

        def prepare(start: int, count: int) -> None:
            """Append before the first group; dequantise a group."""
            of_group = slice(start, start + count)
            of_blocks = slice(None) if paged else of_group
            caches = (k_cache[of_blocks], v_cache[of_blocks], cache_seqlens[of_group])
            given_table = no_table if block_table is None else block_table[of_group]
            if len(integers) > 2:
                codes = (*(x[of_blocks] for x in integers[:4]), integers[4], integers[5][of_group])
            else:
                of_keys, of_values = (x[of_blocks] for x in integers)
                codes = (of_keys, no_channels, of_values, no_zeros, no_tail, no_int)
            given = (*caches, given_table, *codes, as_bf16[0, : count * pages], as_bf16[1, : count * pages])
            of_dequantise = (*given, table, lengths, *scalars[count], count)
            launch_in_order([*(steps if start == 0 else ()), (dequantise, of_dequantise)])

        def attend(start: int, count: int) -> None:
            of_group = slice(start, start + count)
            given_table = table[: count * pages].view(count, pages) if paged else None
            of_prefix = None if prefix_lens is None else prefix_lens[of_group]
            tensors = (None, None, lengths[:count], given_table, of_prefix, sinks, None, None, None)
            to_lse = unread_lse[count] if lse is None else lse[of_group]
            keys, values = (x[: count * pages] for x in scratch)
            given = (q[of_group], keys, values, tensors, result[of_group], to_lse)
            attends[count][0](*given, partial(prepare, start, count), memory[count])

        launch_in_order([(attend, (start, min(group, batch - start))) for start in starts] if attends else steps)
        return (result if out is None or out is result else out.copy_(result)), lse

    return launch
