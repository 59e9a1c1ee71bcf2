"""Attention over dense and packed queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch

from kestrel_runtime import check, kernel_op
from kestrel_runtime.paged_cache import as_fp8

from . import arguments, hot_calls, prefill, reference
from .arguments import Dense, Packed, Scales
from .hot_calls import HotCalls
from .launching import LaunchError
from .plans import form

_INPUTS = (*check.FLOATS, *arguments.FP8)
_dense_calls, _packed_calls = HotCalls(), HotCalls()
_is_compiling = torch.compiler.is_dynamo_compiling


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    prefix_len: torch.Tensor | int | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of dense batches.

    B sequences, Sq queries and Sk keys each, H query heads, Hk KV heads (H a multiple of Hk), head size D.

    q: [B, Sq, H, D]. k, v: [B, Sk, Hk, D]. Only the last dimension must be contiguous. One dtype: bf16, fp16, float32,
        or FP8 (float8_e4m3fn or float8_e5m2); k and v may also be FP8 with a bf16, fp16 or float32 q.
    softmax_scale: up to 2 ** 126 in magnitude, also times q_scale and k_scale; default D ** -0.5.
    causal, window_size: query i stands at key position p = Sk - Sq + i (the last query at the last key). causal keeps
        keys <= p; window (left, right) keeps p - left .. p + right, -1 is unbounded.
    softcap: scores become softcap * tanh(scores / softcap); 0 is off.
    prefix_len: an int or int32 [B]; keys below it are visible to all queries whatever causal and window say.
    q_scale, k_scale, v_scale: float32 [1] or [heads], on the device, for FP8 (value = code * scale); None is 1.
    sinks: float32, bf16 or fp16 [H]: one more logit of each head in the sum of exponentials, without a value. The LSE
        includes it; it is that of a query that sees no key.
    return_lse: also return the natural log of the sum of exponentials, float32 [B, H, Sq].
    out: where to write the result, of its shape and dtype; may be q, and overlaps nothing else. Default: a new tensor.

    Returns out [B, Sq, H, D] in q's dtype (bf16 for FP8), or (out, lse). Accumulation in float32, one rounding. A query
    that sees no key gives 0 and LSE -inf. A NaN or inf in a value may reach all queries of its sequence and KV head,
    masked or not. Kernels cover bf16 and fp16 with D up to 512 that are multiples of 8, and FP8 keys and values with
    multiples of 16 up to 256; other calls run by reference. On Hopper, e4m3 queries, keys and values with D up to 128
    are multiplied in e4m3. Weights are rounded to it for the product: those below 2 ** -18 of the row's largest so far
    (2 ** -16.5 where D > 64) count in the sum of exponentials alone.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device.
    Semantics: ``flash_attn_func`` of flash-attn; Dao, "FlashAttention-2", arXiv 2307.08691; sinks: ``s_aux`` of
    transformers, in gpt-oss.

    >>> import torch, kestrel_attention
    >>> q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
    >>> v = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1).repeat(1, 1, 1, 4)
    >>> kestrel_attention.flash_attn_func(q, k, v, causal=True)[0, :, 0, 0]  # equal scores: the mean of what is seen
    tensor([1.0000, 1.5000])
    """
    op, hot, launch = "flash_attn_func", None, None
    if not _is_compiling():
        prefix = prefix_len if isinstance(prefix_len, torch.Tensor) else None
        optional = (None, None, None, None, prefix, sinks, q_scale, k_scale, v_scale)
        numbers = (softmax_scale, causal, softcap, prefix_len if prefix is None else None)
        try:
            hot = _form(numbers, window_size, q, k, v, optional, out)
            launch = _dense_calls.find(*hot)
        except (AttributeError, TypeError, ValueError):  # an argument of another type, which the checks below name
            hot = None
        if launch is not None and type(return_lse) is bool:
            try:
                result, lse = launch(q, k, v, optional, out, return_lse)
            except LaunchError:
                raise
            except Exception:  # the checks below name the mistake, or the reference runs
                pass
            else:
                return result if lse is None else (result, lse)
    left, right = arguments.window(op, window_size)
    length, lengths = arguments.prefix(op, prefix_len)
    others = {}
    if out is not None:
        others = {"k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        others |= {"prefix_len": prefix_len, "sinks": sinks}
    arguments.check_result(op, return_lse, out, q, **others)
    hot_calls.taken()  # a launch that this thread made through torch.ops is not this call's
    result, lse = _flash_attn_func(
        q, k, v, softmax_scale, causal, left, right, softcap, length, lengths, q_scale, k_scale, v_scale, sinks
    )
    if hot is not None and (launch := hot_calls.taken()) is not None:
        _dense_calls.keep(*hot[:2], launch)
    return arguments.deliver(out, result, lse, return_lse)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    prefix_len: torch.Tensor | int | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of sequences of different lengths, packed one after the other; keys packed or in a paged cache.

    B sequences, H query heads, Hk KV heads (H a multiple of Hk), head size D, pages of P slots.

    q: [total_q, H, D]; sequence b has rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1. Rows of no sequence give 0.
    k, v: [total_k, Hk, D], packed the same way by cu_seqlens_k; with block_table caches [blocks, P, Hk, D] as in
        kestrel_kvcache. Only the last dimension must be contiguous. Dtypes as in :func:`flash_attn_func`; a cache may
        also be uint8 (read as e4m3).
    cu_seqlens_q, cu_seqlens_k: int32 [B + 1], ascending from 0. With block_table cu_seqlens_k may be None.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths. A sequence that is longer is cut there.
    block_table: int32 [B, n]: sequence b's keys p*P .. p*P + P - 1 lie in block block_table[b, p]. A negative entry, or
        one past the end of the cache, is no page: its keys do not exist. Not constant: a kernel reads it after its
        wait for the launch before, as it reads the cache.
    seqused_k: int32 [B], on the device: how many keys of each sequence count. With block_table these are the lengths
        (without it, a sequence has at most the keys that cu_seqlens_k gives it). Zero is legal.
    The other arguments, the result's dtype, NaN and errors: see :func:`flash_attn_func`; query i of a sequence of Lq
    queries and Lk keys stands at key position Lk - Lq + i; prefix_len may be int32 [B].

    Returns out [total_q, H, D], or (out, lse) with lse float32 [H, total_q]. A sequence's rows are the same, bit for
    bit, whatever the other sequences, the bounds and the width of block_table.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device.
    Semantics: ``flash_attn_varlen_func`` of flash-attn.

    >>> import torch, kestrel_attention
    >>> q, k = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    >>> v = torch.tensor([1.0, 2.0, 4.0]).reshape(3, 1, 1).repeat(1, 1, 4)
    >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)  # one sequence of 1, one of 2
    >>> kestrel_attention.flash_attn_varlen_func(q, k, v, starts, starts, 2, 2)[:, 0, 0]
    tensor([1., 3., 3.])
    """
    op, hot, launch = "flash_attn_varlen_func", None, None
    if not _is_compiling():
        prefix = prefix_len if isinstance(prefix_len, torch.Tensor) else None
        optional = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, prefix, sinks, q_scale, k_scale, v_scale)
        numbers = (softmax_scale, causal, softcap, prefix_len if prefix is None else None, max_seqlen_q, max_seqlen_k)
        try:
            hot = _form(numbers, window_size, q, k, v, optional, out)
            launch = _packed_calls.find(*hot)
        except (AttributeError, TypeError, ValueError):  # an argument of another type, which the checks below name
            hot = None
        if launch is not None and type(return_lse) is bool:
            try:
                result, lse = launch(q, k, v, optional, out, return_lse)
            except LaunchError:
                raise
            except Exception:  # the checks below name the mistake, or the reference runs
                pass
            else:
                return result if lse is None else (result, lse)
    left, right = arguments.window(op, window_size)
    length, lengths = arguments.prefix(op, prefix_len)
    others = {}
    if out is not None:
        others = {"k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        others |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
        others |= {"block_table": block_table, "prefix_len": prefix_len, "sinks": sinks}
    arguments.check_result(op, return_lse, out, q, **others)
    hot_calls.taken()
    result, lse = _flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        length,
        lengths,
        q_scale,
        k_scale,
        v_scale,
        block_table,
        seqused_k,
        sinks,
    )
    if hot is not None and (launch := hot_calls.taken()) is not None:
        _packed_calls.keep(*hot[:2], launch)
    return arguments.deliver(out, result, lse, return_lse)


def _form(
    numbers: tuple[Any, ...],
    window_size: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: tuple[torch.Tensor | None, ...],
    out: torch.Tensor | None,
) -> tuple[Any, list[torch.Tensor], int | None]:
    """Key, tensors and written tensor of a call, as HotCalls looks it up.

    optional: the fields of prefill.Tensors. Guards never match a tensor that is given twice, so the second of two that
    are often one is left out: cu_seqlens_k, v_scale and out, which may be q.
    """
    starts_q, starts_k, lengths, table, prefix, sinks, q_scale, k_scale, v_scale = optional
    same = (starts_k is starts_q, v_scale is k_scale, out is q)
    if same[0]:
        starts_k = None
    if same[1]:
        v_scale = None
    given = (q, k, v, starts_q, starts_k, lengths, table, prefix, sinks, q_scale, k_scale, v_scale)
    tensors = [x for x in given if x is not None]
    written = None
    if out is not None:
        written = 0 if same[2] else len(tensors)
        if not same[2]:
            tensors.append(out)
    numbers += (*window_size,)
    sizes = (q.shape, k.shape, None if table is None else table.shape, written)
    return (numbers, (*map(type, numbers),), sizes, same, (*[x is None for x in given],)), tensors, written


def _check_inputs(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int) -> None:
    """k and v are of q's dtype, or of one FP8 dtype; heads fit."""
    check.tensor(op, "k", k, dtype=(q.dtype, *arguments.FP8), ndim=rank, last_contiguous=True)
    check.tensor(op, "v", v, dtype=(q.dtype, *arguments.FP8), ndim=rank, last_contiguous=True)
    check.same(op, "dtype", k=k, v=v)
    check.shape(op, "k", k, (*[None] * (rank - 1), q.shape[-1]))
    check.shape(op, "v", v, k.shape)
    arguments.check_groups(op, q, k.shape[-2])


def _check_scales(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales) -> None:
    if q.dtype in arguments.FP8:
        check.same(op, "dtype", q=q, k=as_fp8(k))
    arguments.check_scale(op, "q_scale", scales.q_scale, q, q.shape[-2])
    arguments.check_scale(op, "k_scale", scales.k_scale, k, k.shape[-2])
    arguments.check_scale(op, "v_scale", scales.v_scale, v, v.shape[-2])


def _check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    op, given = "flash_attn_func", Dense.of(*rest)
    check.tensor(op, "q", q, dtype=_INPUTS, ndim=4, last_contiguous=True)
    _check_inputs(op, q, k, v, 4)
    check.shape(op, "k", k, (q.shape[0], None, None, q.shape[3]))
    _check_scales(op, q, k, v, given.scales)
    arguments.check_scores(op, q.shape[0], given.scores)
    arguments.check_sinks(op, q, given.sinks)
    others = {**given.scales._asdict(), "prefix_len": given.scores.prefix_lens, "sinks": given.sinks}
    check.same(op, "device", q=q, k=k, v=v, **others)


def _check_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    op, given = "flash_attn_varlen_func", Packed.of(*rest)
    cu_seqlens_q, cu_seqlens_k = given.cu_seqlens_q, given.cu_seqlens_k
    check.tensor(op, "q", q, dtype=_INPUTS, ndim=3, last_contiguous=True)
    check.tensor(op, "cu_seqlens_q", cu_seqlens_q, dtype=torch.int32, ndim=1)
    if cu_seqlens_q.shape[0] < 1:
        check.fail(op, "cu_seqlens_q", "at least 1 element (B + 1)", 0)
    batch = cu_seqlens_q.shape[0] - 1
    if given.block_table is None:
        _check_inputs(op, q, k, v, 3)
        check.tensor(op, "cu_seqlens_k", cu_seqlens_k, dtype=torch.int32, ndim=1)
    else:
        arguments.check_cache(op, q, {"k": k, "v": v})
        arguments.check_table(op, "k", k, given.block_table, batch)
        if cu_seqlens_k is None and given.seqused_k is None:
            check.fail(op, "seqused_k", "a tensor, as block_table is given and cu_seqlens_k is None", "None", TypeError)
    if cu_seqlens_k is not None:
        check.tensor(op, "cu_seqlens_k", cu_seqlens_k, dtype=torch.int32, ndim=1)
        check.shape(op, "cu_seqlens_k", cu_seqlens_k, (batch + 1,))
    if given.seqused_k is not None:
        check.tensor(op, "seqused_k", given.seqused_k, dtype=torch.int32, ndim=1)
        check.shape(op, "seqused_k", given.seqused_k, (batch,))
    _check_scales(op, q, k, v, given.scales)
    check.number(op, "max_seqlen_q", given.max_seqlen_q, integer=True, minimum=0)
    check.number(op, "max_seqlen_k", given.max_seqlen_k, integer=True, minimum=0)
    arguments.check_scores(op, batch, given.scores)
    arguments.check_sinks(op, q, given.sinks)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": given.seqused_k}
    others = {**given.scales._asdict(), "prefix_len": given.scores.prefix_lens, "sinks": given.sinks}
    check.same(op, "device", q=q, k=k, v=v, **lengths, block_table=given.block_table, **others)


@kernel_op(reference=reference.flash_attn_func, check=_check_dense, shape=reference.padded_shapes, kernel="cute")
def _flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_func` with simple arguments: (out, lse)."""
    numbers = (softmax_scale, causal, window_left, window_right, softcap, prefix_len)
    scales = (q_scale, k_scale, v_scale)
    of_scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    tensors = prefill.Tensors(prefix_lens=prefix_lens, sinks=sinks, **of_scales)
    key = (form(q, k, v, *tensors), numbers, *map(type, numbers))
    launch = prefill.dense_launches.get(key)
    if launch is None:
        given = (*numbers, prefix_lens, *scales, sinks)
        _check_dense(q, k, v, *given)
        launch = prefill.make_dense(key, q, k, v, Dense.of(*given))
    return _launched(launch, q, k, v, tensors)


@kernel_op(
    reference=reference.flash_attn_varlen_func, check=_check_varlen, shape=reference.packed_shapes, kernel="cute"
)
def _flash_attn_varlen_func(
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
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_varlen_func` with simple arguments: (out, lse)."""
    numbers = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left, window_right, softcap, prefix_len)
    scales = (q_scale, k_scale, v_scale)
    tensors = prefill.Tensors(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, prefix_lens, sinks, *scales)
    key = (form(q, k, v, *tensors), numbers, *map(type, numbers))
    launch = prefill.packed_launches.get(key)
    if launch is None:
        given = (cu_seqlens_q, cu_seqlens_k, *numbers, prefix_lens, *scales, block_table, seqused_k, sinks)
        _check_varlen(q, k, v, *given)
        launch = prefill.make_packed(key, q, k, v, Packed.of(*given))
    return _launched(launch, q, k, v, tensors)


def _launched(
    launch: prefill.PrefillLaunch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: prefill.Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = launch(q, k, v, tensors)
    assert lse is not None
    hot_calls.ran(launch)
    return out, lse
