"""Launching the prefill kernel for dense, packed and cached keys: from tensors to a problem, and from its plan to calls.

A call is planned once for each form of its arguments, as in decode.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kestrel_runtime import Binary, UnsupportedError, allocator

from .decode import _UNALIGNED, Launch, _refuse_uncovered_strides, _unread, _unused
from .kernels.parameters import AppendScalars
from .kernels.variants import DTYPES, NAMED
from .plans import Plans
from .prefill_plan import PrefillProblem, plan_prefill

_binary = Binary("kestrel_attention")
_NAMES = dict(zip((torch.bfloat16, torch.float16), DTYPES, strict=True))

Attend = Callable[..., None]
"""(q, k, v, starts_q, starts_k, lengths, block_table, prefix_lens, sinks, out, lse): runs the kernel. All of 4
dimensions as a cache, LSE of 3; None for a tensor that the call does not have."""

dense_launches: Plans[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = Plans()
packed_launches: Plans[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = Plans()


def _attend(problem: PrefillProblem, device: torch.device) -> Attend:
    """The kernel of a problem."""
    plan = plan_prefill(problem)
    kernel = _binary.kernel(plan.variant, device)
    scalars, batch = plan.scalars, problem.batch
    no_int, no_float = _unused(torch.int32, device), _unused(torch.float32, device)
    no_table = _unused(torch.int32, device, 2)

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts_q: torch.Tensor | None,
        starts_k: torch.Tensor | None,
        lengths: torch.Tensor | None,
        block_table: torch.Tensor | None,
        prefix_lens: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: Any,
    ) -> None:
        kernel(
            q,
            k,
            v,
            no_int if starts_q is None else starts_q,
            no_int if starts_k is None else starts_k,
            no_int if lengths is None else lengths,
            no_table if block_table is None else block_table,
            no_int if prefix_lens is None else prefix_lens,
            no_float if sinks is None else sinks.float(),
            out,
            lse,
            *scalars,
            batch,
        )

    return attend


def _name(q: torch.Tensor, k: torch.Tensor) -> str:
    """The dtype of a call that kernels cover."""
    if q.dtype not in _NAMES or k.dtype != q.dtype:
        raise UnsupportedError("kernels for many queries cover bf16 and fp16, with keys and values of the same dtype")
    return _NAMES[q.dtype]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy with rows aligned to 16 bytes: kernels load so many at once."""
    if x.data_ptr() & 15 or any(stride % 8 for stride in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


# -- dense and packed -------------------------------------------------------------------------------------------------


def make_dense(
    key: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The launch of flash_attn_func, of (q, k, v, prefix_lens, sinks), kept under ``key``."""
    batch, queries, heads, head_dim = q.shape
    problem = PrefillProblem(
        batch=batch,
        max_queries=queries,
        max_keys=k.shape[1],
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        page_size=max(1, k.shape[1]),
        dtype=_name(q, k),
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        prefix_len=prefix_len,
        has_prefix_lens=prefix_lens is not None,
        has_sinks=sinks is not None,
    )
    _refuse_empty(k)
    attend = _attend(problem, q.device) if q.numel() else None

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prefix_lens: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty((batch, queries, heads, head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
        if attend is not None:
            attend(_aligned(q), _aligned(k), _aligned(v), None, None, None, None, prefix_lens, sinks, out, lse)
        return out, lse

    return dense_launches.keep(key, launch)


def make_packed(
    key: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The launch of flash_attn_varlen_func, kept under ``key``.

    Of (q, k, v, cu_seqlens_q, cu_seqlens_k, prefix_lens, block_table, seqused_k, sinks).
    """
    total, heads, head_dim = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    paged = block_table is not None
    slots, kv_heads = k.shape[1:3] if paged else k.shape[:2]
    held = block_table.shape[1] * slots if block_table is not None else slots
    problem = PrefillProblem(
        batch=batch,
        max_queries=min(max_seqlen_q, total),
        max_keys=min(max_seqlen_k, held),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=max(1, slots),
        dtype=_name(q, k),
        packed_queries=True,
        key_starts=(2 if paged else 1) if not paged or seqused_k is None else 0,
        has_lengths=seqused_k is not None,
        has_block_table=paged,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        prefix_len=prefix_len,
        has_prefix_lens=prefix_lens is not None,
        has_sinks=sinks is not None,
    )
    if paged:
        _refuse_uncovered_strides("same", (k, v), ())
    else:
        _refuse_empty(k)
    attend = _attend(problem, q.device) if q.numel() and problem.batch and problem.max_queries else None

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor | None,
        prefix_lens: torch.Tensor | None,
        block_table: torch.Tensor | None,
        seqused_k: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if attend is None:
            out = torch.zeros((total, heads, head_dim), dtype=q.dtype, device=q.device)
            return out, torch.full((heads, total), float("-inf"), dtype=torch.float32, device=q.device)
        out = torch.empty((total, heads, head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
        if block_table is None:
            k, v = _aligned(k).unsqueeze(0), _aligned(v).unsqueeze(0)
        elif (k.data_ptr() | v.data_ptr()) & 15:
            raise UnsupportedError(_UNALIGNED)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k)
        q = _aligned(q).unsqueeze(0)
        attend(q, k, v, *lengths, block_table, prefix_lens, sinks, out.unsqueeze(0), lse.unsqueeze(0))
        return out, lse

    return packed_launches.keep(key, launch)


def _refuse_empty(k: torch.Tensor) -> None:
    if k.numel() == 0:
        raise UnsupportedError("there are no keys")


# -- over a cache -----------------------------------------------------------------------------------------------------


def make_cached(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    new: Sequence[torch.Tensor],
) -> Launch:
    """A launch as decode.py makes them, for more queries than it covers."""
    name = _name(q, k_cache)
    batch, queries, heads, head_dim = q.shape
    page_size = k_cache.shape[1]
    problem = PrefillProblem(
        batch=batch,
        max_queries=queries,
        max_keys=page_size * (1 if block_table is None else block_table.shape[1]),
        heads=heads,
        kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        page_size=page_size,
        dtype=name,
        has_lengths=True,
        has_block_table=block_table is not None,
        appended=queries if new else 0,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        prefix_len=prefix_len,
        has_prefix_lens=prefix_lens is not None,
        has_sinks=sinks is not None,
    )
    _refuse_uncovered_strides("same", (k_cache, v_cache), ())
    attend = _attend(problem, q.device) if q.numel() else None
    append = _binary.kernel(NAMED[f"append_{name}_same"], q.device) if new and new[0].numel() else None
    append_scalars = AppendScalars(int(block_table is not None), 0, 0, int(name == "bf16"))
    lse_sizes, dtype = (batch, heads, queries), q.dtype
    unread_lse = _unread(lse_sizes, q.device)
    no_float, no_table = _unused(torch.float32, q.device), _unused(torch.int32, q.device, 2)
    out_strides = (queries * heads * head_dim, heads * head_dim, head_dim, 1)

    def launch(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        prefix_lens: torch.Tensor | None,
        new: Sequence[torch.Tensor] = (),
        integers: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
        want_lse: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        destination = None
        if out is not None and (out.data_ptr() & 15 or not out.is_contiguous()):
            destination, out = out, None
        empty = allocator(q)
        if out is None:
            out = empty((batch, queries, heads, head_dim), out_strides, dtype)
        lse = empty(lse_sizes, (heads * queries, queries, 1), torch.float32) if want_lse else None
        if (k_cache.data_ptr() | v_cache.data_ptr()) & 15:
            raise UnsupportedError(_UNALIGNED)
        q, rows = _aligned(q), [_aligned(x) for x in new]
        sinks = sinks if sinks is None else sinks.float()
        if append is not None:  # all memory is allocated by now: a call that fails has written nothing
            if k_cache.data_ptr() == v_cache.data_ptr():
                raise ValueError("K and V are appended to the same memory")
            table = no_table if block_table is None else block_table
            append(*rows, k_cache, v_cache, cache_seqlens, table, no_float, no_float, *append_scalars)
        if attend is not None:
            target = unread_lse if lse is None else lse
            keys = (k_cache, v_cache, None, None, cache_seqlens, block_table)
            attend(q, *keys, prefix_lens, sinks, out, target)
        return (out if destination is None else destination.copy_(out)), lse

    return launch
