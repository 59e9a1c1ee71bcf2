"""Launching the decode kernels: from tensors to a problem (plan.py), and from its plan to launches and scratch memory.

A call is planned once for each form of its arguments. A later call finds its plan by one look-up and launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kestrel_runtime import Binary, UnsupportedError, allocator

from .arguments import Cached
from .kernels.variants import DTYPES, WIDE_ARCHS
from .launching import UNALIGNED, Launch, loaded_as_vectors, refuse_uncovered_strides, unread, unused
from .plan import DecodePlan, DecodeProblem, plan_decode, serves_both_dtypes, variants_of
from .plans import Plans

_binary = Binary("kestrel_attention")
_NAMES = dict(zip((torch.bfloat16, torch.float16), DTYPES, strict=True))
_CODES = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}

launches: Plans[Launch] = Plans()


def problem_of(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: Cached, *, appends: bool = False
) -> DecodeProblem:
    """The problem of checked arguments; raises UnsupportedError for tensors that no kernel covers."""
    if q.dtype not in _NAMES:
        raise UnsupportedError("kernels cover bf16 and fp16 queries")
    (k_scale, v_scale), integers = given.codes.split(k_cache)
    cache = "int4" if len(integers) > 2 else _CODES.get(k_cache.dtype, "same")
    if cache == "same" and k_cache.dtype != q.dtype:
        raise UnsupportedError("kernels cover caches of the queries' dtype and of codes")
    batch, queries, heads, head_dim = q.shape
    problem = DecodeProblem(
        batch=batch,
        queries=queries,
        heads=heads,
        kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        page_size=k_cache.shape[1],
        pages=None if given.block_table is None else given.block_table.shape[1],
        dtype=_NAMES[q.dtype],
        cache=cache,
        num_splits=given.num_splits,
        k_scale_heads=0 if k_scale is None else 1 + (k_scale.shape[0] > 1),
        v_scale_heads=0 if v_scale is None else 1 + (v_scale.shape[0] > 1),
        appends=appends,
        **given.scores.of_problem(),
    )
    variants_of(problem)
    refuse_uncovered_strides(cache, (k_cache, v_cache), integers)
    return problem


def make_launch(key: Any, problem: DecodeProblem, q: torch.Tensor, new: Sequence[torch.Tensor] = ()) -> Launch:
    """The launch of a problem, kept under ``key``. q, new: give device and strides."""
    device = q.device
    plan = plan_decode(replace(problem, has_wide_kernels=_has_wide_kernels(device)))
    attend = _binary.kernel(plan.variant, device) if q.numel() else None
    append = _binary.kernel(plan.append, device) if plan.append is not None and new[0].numel() else None
    combine = _binary.kernel(plan.combine, device) if plan.combine is not None and q.numel() else None
    copied = [any(stride % 8 for stride in x.stride()[:-1]) for x in (q, *(new or (q, q)))]
    return launches.keep(key, _bound(plan, problem, q, attend, append, combine, copied))


def _has_wide_kernels(device: torch.device) -> bool:
    try:
        return _binary.arch(device).removeprefix("sm") in WIDE_ARCHS
    except UnsupportedError:  # without a binary for the GPU, kernels may still be compiled on first use
        return False


def _bound(
    plan: DecodePlan,
    problem: DecodeProblem,
    like: torch.Tensor,
    attend: Callable[..., None] | None,
    append: Callable[..., None] | None,
    combine: Callable[..., None] | None,
    copied: Sequence[bool],
) -> Launch:
    """A launch with everything that calls of one plan share in local variables.

    copied: whether q, k and v have strides of no multiple of 16 bytes, so that the kernels take copies.
    """
    dtype = like.dtype
    batch, queries, heads, head_dim = problem.batch, problem.queries, problem.heads, problem.head_dim
    out_sizes, lse_sizes = (batch, queries, heads, head_dim), (batch, heads, queries)
    out_strides = (queries * heads * head_dim, heads * head_dim, head_dim, 1)
    lse_strides = (heads * queries, queries, 1)
    partial_rows, partial_elements = (plan.partial_rows,), (plan.partial_rows * head_dim,)
    row_blocks = (plan.row_blocks,)
    unread_lse = unread(lse_sizes, like.device)
    # Stand in for tensors that the call does not have. tvm-ffi's tensors cost a call less than torch's.
    no_float = unused(torch.float32, like.device)
    no_int, no_table = unused(torch.int32, like.device), unused(torch.int32, like.device, 2)
    scalars, append_scalars, combine_scalars = plan.scalars, plan.append_scalars, plan.combine_scalars
    both_dtypes = serves_both_dtypes(plan.variant)
    scalars_after = (int(problem.dtype == "bf16"),) if both_dtypes else ()
    as_bf16 = both_dtypes and dtype == torch.float16
    scalars_at_once = (*scalars, *scalars_after)
    copies_q, copies_k, copies_v = copied
    may_be_bytes = problem.cache == "e4m3"

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
        sinks: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        destination = None
        if out is not None and (out.data_ptr() & 15 or not out.is_contiguous()):
            destination, out = out, None
        empty = allocator(q)
        if out is None:
            out = empty(out_sizes, out_strides, dtype)
        result = out
        lse = empty(lse_sizes, lse_strides, torch.float32) if want_lse else None
        lse_target = unread_lse if lse is None else lse
        if attend is None and append is None:
            return (out if destination is None else destination), lse
        k_address, v_address = k_cache.data_ptr(), v_cache.data_ptr()
        addresses = k_address | v_address
        if len(integers) > 2:
            for x in loaded_as_vectors(integers):
                addresses |= x.data_ptr()
        if addresses & 15:
            raise UnsupportedError(UNALIGNED)
        if may_be_bytes and k_cache.dtype is torch.uint8:
            k_cache, v_cache = k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn)
        if combine is None:
            partial_out, partial_lse, num_splits = no_float, no_float, no_int
        else:
            partial_out = empty(partial_elements, (1,), torch.float32)
            partial_lse = empty(partial_rows, (1,), torch.float32)
            num_splits = empty(row_blocks, (1,), torch.int32)
        if copies_q or q.data_ptr() & 15:
            q = q.clone(memory_format=torch.contiguous_format)
        if as_bf16:  # the kernels for both dtypes take 16-bit elements as bf16
            q, result = q.view(torch.bfloat16), out.view(torch.bfloat16)
            new = [x.view(torch.bfloat16) for x in new]
            if len(integers) > 2:
                integers = (*integers[:4], integers[4].view(torch.bfloat16), integers[5])
        table = no_table if block_table is None else block_table
        k_scale = no_float if k_scale is None else k_scale
        v_scale = no_float if v_scale is None else v_scale
        if append is not None:  # all memory is allocated by now: a call that fails has written nothing
            if k_address == v_address:
                raise ValueError("K and V are appended to the same memory")
            k, v = new
            if copies_k or k.data_ptr() & 15:
                k = k.clone(memory_format=torch.contiguous_format)
            if copies_v or v.data_ptr() & 15:
                v = v.clone(memory_format=torch.contiguous_format)
            if integers:
                append(k, v, k_cache, v_cache, cache_seqlens, table, *integers, *append_scalars)
            else:
                append(k, v, k_cache, v_cache, cache_seqlens, table, k_scale, v_scale, *append_scalars)
        if attend is not None:
            attend(
                q,
                k_cache,
                v_cache,
                cache_seqlens,
                table,
                k_scale,
                v_scale,
                no_int if prefix_lens is None else prefix_lens,
                result,
                lse_target,
                partial_out,
                partial_lse,
                num_splits,
                *((*scalars, *integers, *scalars_after) if integers else scalars_at_once),
            )
        if combine is not None:
            combine(out, lse_target, partial_out, partial_lse, num_splits, *combine_scalars)
        return (out if destination is None else destination.copy_(out)), lse

    return launch
