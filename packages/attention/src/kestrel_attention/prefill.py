"""Launching the prefill kernel for dense, packed and cached keys: from tensors to a problem, from its plan to calls.

A call is planned once for each form of its arguments, as in decode.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kestrel_runtime import Binary, UnsupportedError, allocator, contiguous_strides

from .arguments import Cached, Dense, Packed, Scales, Scores
from .kernels.constants import FIRST_WORK
from .kernels.dtypes import DTYPES
from .kernels.parameters import AppendScalars
from .kernels.prefill_variants import Fp8PrefillVariant
from .kernels.variants import NAMED
from .launching import UNALIGNED, Bound, Launch, launch_in_order, refuse_uncovered_strides, unread, unused
from .plans import Plans
from .prefill_plan import PrefillProblem, plan_prefill

_binary = Binary("kestrel_attention")
names = dict(zip((torch.bfloat16, torch.float16), DTYPES, strict=True))
USE_HOPPER = True
"""Tests set False, to run the portable kernel on Hopper."""
_CODES = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3", torch.float8_e5m2: "e5m2"}


class Tensors(NamedTuple):
    """What the kernel reads beside q, k and v, in its order; None for a tensor that a call does not have."""

    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


_SINKS = Tensors._fields.index("sinks")
_STARTS, _STARTS_K, _LENGTHS = (Tensors._fields.index(name) for name in ("starts_q", "starts_k", "lengths"))
Attend = Callable[..., None]
"""(q, k, v, tensors, out, lse, append=None, memory=None): runs the kernel. All of 4 dimensions as a cache, LSE of 3.

append: is called before the kernel, when all memory is allocated.
memory: what the kernel writes beside its results. Calls that run one after the other may share it. Where it is given,
nothing is allocated: queries are aligned (see queries_are_aligned), and sinks float32.
"""
PrefillLaunch = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]
"""(q, k, v, tensors, out=None, want_lse=True) -> (out, lse) of dense or packed keys; lse None if it is not wanted."""

dense_launches: Plans[PrefillLaunch] = Plans()
packed_launches: Plans[PrefillLaunch] = Plans()


class Memory(NamedTuple):
    """What a kernel writes beside its results."""

    splits: tuple[Any, Any, Any]
    """Partial results, their LSE, and how many splits each block of rows has."""
    works: Any
    """A counter of works taken, or the list of works."""


def uses_wgmma(device: torch.device) -> bool:
    """Whether calls on the GPU run the kernels of warpgroup matrix products."""
    return USE_HOPPER and _binary.arch(device) == "sm90a"


def kernel_for(problem: PrefillProblem, like: torch.Tensor) -> Attend:
    """The kernel of a problem. like: the queries, which give device and strides."""
    return kernel_and_memory(problem, like)[0]


def kernel_and_memory(problem: PrefillProblem, like: torch.Tensor) -> tuple[Attend, Callable[[], Memory]]:
    """The kernel of a problem, and a function that allocates its memory. like: as kernel_for has it."""
    device, q_steps = like.device, queries_are_aligned(like)
    arch = _binary.arch(device).removeprefix("sm")
    plan = plan_prefill(replace(problem, arch=arch, hopper=uses_wgmma(device)))
    kernel = _binary.kernel(plan.variant, device)
    scalars, batch, codes = plan.scalars, problem.batch, problem.cache != "same"
    fp8_products = isinstance(plan.variant, Fp8PrefillVariant)
    rows, split_blocks = plan.partial_rows * problem.heads, batch * problem.heads * scalars.split_blocks
    combine = None
    if scalars.num_splits > 1:
        combine = _binary.kernel(NAMED[f"prefill_combine_{problem.dtype}"], device)
    list_works, list_words = None, 0
    if scalars.listed_works:
        list_works = _binary.kernel(NAMED["prefill_works"], device)
        list_words = FIRST_WORK + 2 * (scalars.listed_works + plan.works.listed_blocks)
    no_int, no_float = unused(torch.int32, device), unused(torch.float32, device)
    no_table = unused(torch.int32, device, 2)
    absent = Tensors(no_int, no_int, no_int, no_table, no_int, no_float, no_float, no_float, no_float)

    def allocate() -> Memory:
        splits: tuple[Any, Any, Any] = (no_float, no_float, no_int)
        if combine is not None:
            partial_out = torch.empty(rows * problem.head_dim, dtype=torch.float32, device=device)
            partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
            splits = (partial_out, partial_lse, torch.empty(split_blocks, dtype=torch.int32, device=device))
        works = no_int
        if list_works is not None:
            works = torch.empty(list_words, dtype=torch.int32, device=device)
        elif scalars.has_counter:
            works = torch.empty(1, dtype=torch.int32, device=device)
        return Memory(splits, works)

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        lse: Any,
        append: Callable[[], None] | None = None,
        memory: Memory | None = None,
    ) -> None:
        if codes:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        if memory is None:
            if problem.has_sinks:
                given = Tensors._make(given)
                given = given._replace(sinks=given.sinks.float())
            if fp8_products:
                q = aligned(q, q_steps).view(torch.uint8)
            elif problem.fp8_queries:  # bf16 holds their codes
                q = q.to(torch.bfloat16, memory_format=torch.contiguous_format)
            else:
                q = aligned(q, q_steps)
            memory = allocate()
        tensors = [x if y is None else y for x, y in zip(absent, given, strict=True)]
        splits, works = memory
        if scalars.has_counter and list_works is None:
            works.zero_()
        kernels: list[Bound] = [] if append is None else [(append, ())]
        if list_works is not None:
            of_list = tensors[_STARTS], tensors[_STARTS_K], tensors[_LENGTHS], works, *plan.works, batch
            kernels.append((list_works, of_list))
        kernels.append((kernel, (q, k, v, *tensors, out, lse, *splits, works, *scalars, batch)))
        if combine is not None:
            of_combine = out, lse, *splits, tensors[_SINKS], tensors[_STARTS], works, *plan.combine, batch
            kernels.append((combine, of_combine))
        launch_in_order(kernels)

    return attend, allocate


def _fields(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, scores: Scores, sinks: torch.Tensor | None
) -> dict[str, Any]:
    """Fields of a problem, however its keys lie. Raises UnsupportedError where no kernel covers them."""
    cache = "same" if k.dtype == q.dtype and q.dtype in names else _CODES.get(k.dtype)
    dtype = names.get(torch.bfloat16 if q.element_size() == 1 else q.dtype)
    if cache is None or dtype is None:
        raise UnsupportedError("kernels for many queries cover bf16, fp16 and FP8, with keys of the same dtype or FP8")
    fields = {"heads": q.shape[-2], "kv_heads": k.shape[-2], "head_dim": q.shape[-1], "dtype": dtype, "cache": cache}
    fields["fp8_queries"] = q.element_size() == 1
    fields["has_boxes"] = all(_are_boxes(x) for x in (k, v))
    for name, scale in scales._asdict().items():
        fields[f"{name}_heads"] = 0 if scale is None else 1 + (scale.shape[0] > 1)
    return fields | scores.of_problem() | {"has_sinks": sinks is not None}


def steps_are_aligned(x: torch.Tensor) -> bool:
    """Whether all rows of x are aligned to 16 bytes if the first is: kernels load so many at once."""
    return not any(stride * x.element_size() & 15 for stride in x.stride()[:-1])


def queries_are_aligned(q: torch.Tensor) -> bool:
    """Whether kernels load these queries in place if their first row is aligned."""
    return steps_are_aligned(q) and _are_boxes(q)


def _are_boxes(x: torch.Tensor) -> bool:
    """Whether TMA can load from x."""
    return all(0 < stride < 2**36 for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def aligned(x: torch.Tensor, steps_are_aligned: bool) -> torch.Tensor:
    """x, or a copy with aligned rows."""
    if steps_are_aligned and not x.data_ptr() & 15:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Results:
    """The results of calls of one form: contiguous tensors, of which the LSE is float32."""

    def __init__(self, q: torch.Tensor, lse_sizes: tuple[int, ...]) -> None:
        self.dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
        self.sizes, self.lse_sizes = tuple(q.shape), lse_sizes
        self.strides, self.lse_strides = contiguous_strides(self.sizes), contiguous_strides(lse_sizes)

    def empty(
        self, q: torch.Tensor, out: torch.Tensor | None, want_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where kernels write: ``out`` if they can, else new memory; and the LSE, or None where it is not wanted."""
        new = allocator(q)
        if out is None or out.data_ptr() & 15 or not out.is_contiguous():
            out = new(self.sizes, self.strides, self.dtype)
        return out, new(self.lse_sizes, self.lse_strides, torch.float32) if want_lse else None


def _unread_row(k: torch.Tensor) -> torch.Tensor:
    """In place of keys and values of no row: with one, which kernels do not read."""
    sizes = (*k.shape[:-3], 1, *k.shape[-2:])
    return torch.empty(sizes, dtype=k.dtype, device=k.device)


def _refuse_uncovered_keys(k: torch.Tensor, v: torch.Tensor) -> None:
    """Dense and packed keys: offsets are 32-bit numbers of 16 bytes. Rows that are not aligned are copied."""
    for x in (k, v):
        reach = sum((x.shape[i] - 1) * x.stride(i) for i in range(x.ndim - 2))
        if reach * x.element_size() >= 2**36:
            raise UnsupportedError("kernels reach 64 GB of keys or values")


# -- dense and packed -------------------------------------------------------------------------------------------------


def make_dense(key: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Dense) -> PrefillLaunch:
    """The launch of flash_attn_func, kept under ``key``."""
    batch, queries, heads, _ = q.shape
    problem = PrefillProblem(
        batch=batch,
        max_queries=queries,
        max_keys=k.shape[1],
        page_size=max(1, k.shape[1]),
        **_fields(q, k, v, given.scales, given.scores, given.sinks),
    )
    _refuse_uncovered_keys(k, v)
    attend = kernel_for(problem, q) if q.numel() else None
    results, unread_lse = Results(q, (batch, heads, queries)), unread((batch, heads, queries), q.device)
    k_steps, v_steps = steps_are_aligned(k), steps_are_aligned(v)
    no_keys = k.shape[1] == 0

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        out: torch.Tensor | None = None,
        want_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result, lse = results.empty(q, out, want_lse)
        if no_keys:
            k = v = _unread_row(k)
        if attend is not None:
            attend(q, aligned(k, k_steps), aligned(v, v_steps), tensors, result, unread_lse if lse is None else lse)
        return (result if out is None or out is result else out.copy_(result)), lse

    return dense_launches.keep(key, launch)


def make_packed(key: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Packed) -> PrefillLaunch:
    """The launch of flash_attn_varlen_func, kept under ``key``."""
    total, heads, _ = q.shape
    batch = given.cu_seqlens_q.shape[0] - 1
    paged = given.block_table is not None
    slots = k.shape[1] if paged else k.shape[0]
    held = slots if given.block_table is None else given.block_table.shape[1] * slots
    problem = PrefillProblem(
        batch=batch,
        max_queries=min(given.max_seqlen_q, total),
        max_keys=min(given.max_seqlen_k, held),
        page_size=max(1, slots),
        packed_queries=True,
        total_queries=total,
        key_starts=(2 if paged else 1) if not paged or given.seqused_k is None else 0,
        has_lengths=given.seqused_k is not None,
        has_block_table=paged,
        **_fields(q, k, v, given.scales, given.scores, given.sinks),
    )
    if paged:
        refuse_uncovered_strides("same", (k, v), ())
    else:
        _refuse_uncovered_keys(k, v)
    attend: Attend | None = None
    if q.numel() and problem.batch and problem.max_queries:
        from . import prefill_transposed  # which imports this module

        pages = given.block_table.shape[1] if given.block_table is not None else 0
        if prefill_transposed.covers(problem, q.device) and k.shape[0]:
            attend = prefill_transposed.attend_of(problem, q, pages)
        else:
            attend = kernel_for(problem, q)
    results, unread_lse = Results(q, (heads, total)), unread((1, heads, total), q.device)
    k_steps, v_steps = steps_are_aligned(k), steps_are_aligned(v)
    no_keys = k.shape[0] == 0 and not paged

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        out: torch.Tensor | None = None,
        want_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result, lse = results.empty(q, out, want_lse)
        if attend is None:
            result.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        else:
            if no_keys:
                k = v = _unread_row(k)
            if not paged:
                k, v = aligned(k, k_steps)[None], aligned(v, v_steps)[None]
            elif (k.data_ptr() | v.data_ptr()) & 15:
                raise UnsupportedError(UNALIGNED)
            attend(q[None], k, v, tensors, result[None], unread_lse if lse is None else lse[None])
        return (result if out is None or out is result else out.copy_(result)), lse

    return packed_launches.keep(key, launch)


# -- over a cache -----------------------------------------------------------------------------------------------------


def make_cached(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: Sequence[torch.Tensor], given: Cached
) -> Launch:
    """A launch as decode.py makes them, for more queries than it covers."""
    scales = Scales(None, given.codes.k_scale, given.codes.v_scale)
    batch, queries, heads, _ = q.shape
    page_size, paged = k_cache.shape[1], given.block_table is not None
    problem = PrefillProblem(
        batch=batch,
        max_queries=queries,
        max_keys=page_size * (1 if given.block_table is None else given.block_table.shape[1]),
        page_size=page_size,
        has_lengths=True,
        has_block_table=paged,
        appended=queries if new else 0,
        **_fields(q, k_cache, v_cache, scales, given.scores, given.sinks),
    )
    refuse_uncovered_strides("same", (k_cache, v_cache), ())
    attend = kernel_for(problem, q) if q.numel() else None
    cache = problem.cache
    appender = "append_half_e5m2" if cache == "e5m2" else f"append_{problem.dtype}_{cache}"
    append_rows = _binary.kernel(NAMED[appender], q.device) if new and new[0].numel() else None
    heads_of_scales = (problem.k_scale_heads, problem.v_scale_heads)
    append_scalars = AppendScalars(int(paged), *heads_of_scales, int(problem.dtype == "bf16"))
    results, unread_lse = Results(q, (batch, heads, queries)), unread((batch, heads, queries), q.device)
    no_float, no_table = unused(torch.float32, q.device), unused(torch.int32, q.device, 2)
    new_steps = [steps_are_aligned(x) for x in new]

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
        if (k_cache.data_ptr() | v_cache.data_ptr()) & 15:
            raise UnsupportedError(UNALIGNED)
        if k_cache.dtype is torch.uint8:
            k_cache, v_cache = k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn)
        rows = [aligned(x, steps) for x, steps in zip(new, new_steps, strict=True)]
        if cache == "e5m2":  # whose append kernel takes rows of both dtypes as bf16
            rows = [x.view(torch.bfloat16) for x in rows]
        append = None
        if append_rows is not None:
            if k_cache.data_ptr() == v_cache.data_ptr():
                raise ValueError("K and V are appended to the same memory")
            table = no_table if block_table is None else block_table
            of_heads = [no_float if scale is None else scale for scale in (k_scale, v_scale)]
            append = partial(append_rows, *rows, k_cache, v_cache, cache_seqlens, table, *of_heads, *append_scalars)
        if attend is not None:
            tensors = (None, None, cache_seqlens, block_table, prefix_lens, sinks, None, k_scale, v_scale)
            attend(q, k_cache, v_cache, tensors, result, unread_lse if lse is None else lse, append)
        elif append is not None:
            append()
        return (result if out is None or out is result else out.copy_(result)), lse

    return launch
