"""Attention over a KV cache, paged or contiguous: decoding, and prefill on top of what is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kestrel_runtime import UnsupportedError, check, kernel_op

from . import arguments, decode, hot_calls, prefill, prefill_scratch, reference
from .arguments import Cached, Codes, Scores
from .launching import Launch, LaunchError
from .plan import MAX_QUERIES, MORE_WARPS
from .plans import form

_OP = "flash_attn_with_kvcache"
_hot_calls = hot_calls.HotCalls()
_is_compiling = torch.compiler.is_dynamo_compiling
_TENSOR = object()  # stands for any tensor in the key of a call


class Given:
    """Which of the optional arguments of a call are tensors: bits of an integer, as an IntFlag takes longer to add."""

    BLOCK_TABLE = 1
    NEW = 2  # k and v
    K_SCALE = 4
    V_SCALE = 8
    OWN_V_SCALE = 16  # another tensor than k_scale
    INT4 = 32
    SINKS = 64
    OUT = 128
    OWN_OUT = 256  # another tensor than q


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_zero: torch.Tensor | None = None,
    v_zero: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    seq_ids: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    prefix_len: torch.Tensor | int | None = None,
    num_splits: int = 0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys and values of a cache; with k and v, first append these to it, in place.

    B sequences, Sq queries each, H query heads, Hk KV heads (H a multiple of Hk), head size D, pages of P slots.

    q: [B, Sq, H, D], bf16, fp16 or float32.
    k_cache, v_cache: [blocks, P, Hk, D] with strides as in kestrel_kvcache (only the last dimension contiguous);
        without block_table [B, S, Hk, D]. One of
        - q's dtype;
        - FP8: float8_e4m3fn, float8_e5m2, or uint8 (read as e4m3);
        - INT8: int8, as kestrel_kvcache.int8_cache_write writes it;
        - INT4: uint8 [blocks, 64, Hk, D/2], as kestrel_kvcache.int4_cache_write writes it, with the arguments below.
    k, v: [B, Sq, Hk, D] of q's dtype, both or none. They are stored at positions cache_seqlens ..
        cache_seqlens + Sq - 1, quantised as the cache is, and attended to as stored. This writes the caches in place,
        and for INT8 and INT4 the scales, zeros and tail. A position without a page is skipped.
    cache_seqlens: int32 [B], on the device: keys in the cache before k and v. Zero is legal; a negative length is
        padding: nothing is written, the output is 0 (NaN with a sink of NaN or inf), and its LSE that of a query that
        sees no key.
    block_table: int32 [B, n]: sequence b's keys p*P .. p*P + P - 1 lie in block block_table[b, p]. A negative entry, or
        one past the end of the cache, is no page: its keys do not exist. None: block b belongs to sequence b. The
        table is no constant: kernels read it after their PDL wait, like the cache.
    k_scale, v_scale: value = code * scale, on the device. FP8: float32 [1] or [Hk], None is 1. INT8: float32
        [blocks, P, Hk]. INT4: fp16, [blocks, Hk, D] for K and [blocks, 64, Hk] for V.
    k_zero, v_zero, k_tail, seq_ids: for INT4 only, and then all four. Zeros are fp16, shaped as the scales: value =
        (code - zero) * scale. k_tail [seqs, 64, Hk, D] of q's dtype holds the keys of each sequence's unfinished page,
        the last L % 64 of L; seq_ids int32 [B] is each sequence's row in it. A seq_id < 0 or >= seqs is padding.
    softmax_scale: up to 2 ** 126 in magnitude, also times k_scale; default D ** -0.5.
    causal, window_size: with L keys (k included), query i stands at key position p = L - Sq + i. causal keeps keys
        <= p; window (left, right) keeps p - left .. p + right, -1 is unbounded.
    softcap: scores become softcap * tanh(scores / softcap); 0 is off.
    prefix_len: an int or int32 [B]; keys below it are visible to all queries whatever causal and window say.
    num_splits: the most splits of a sequence (split-KV) where decode kernels run: up to 16 queries, heads as in the
        README. Prefill kernels choose by length. 0: chosen from each length. kestrel_attention.MORE_WARPS (-1): one
        split for a kernel of twice the warps where there is one (Hopper, 16-bit heads of 128), which is faster for few
        short sequences. Changes rounding only.
    sinks: float32, bf16 or fp16 [H]: one more logit of each head in the sum of exponentials, without a value. The LSE
        includes it; it is that of a query that sees no key. Kernels take float32; others are converted by each call.
    return_lse: also return the natural log of the sum of exponentials, float32 [B, H, Sq].
    out: written with the result, of its shape and dtype; may be q, and overlaps nothing else. Default: a new tensor.

    Returns out [B, Sq, H, D] in q's dtype, or (out, lse). Accumulation in float32, one rounding. A query that sees no
    key gives 0 and LSE -inf. The contents of unused slots and table entries have no effect, NaN included. A NaN or inf
    in a value that the sequence holds may reach all queries of that sequence and KV head, masked or not.
    A sequence's rows are the same, bit for bit, whatever the other sequences and the width of block_table; over an FP8
    cache a table with room for more than 1 GiB of a sequence's keys and values in 16 bits may change roundings.
    Kernels cover bf16 and fp16 queries over rows aligned to 16 bytes; the table in the package's README lists the head
    sizes of each cache. Other calls run by reference. A kernel appends k and v bit for bit as the reference does; all
    memory is allocated before it. Limits of kernels:
    - INT4: queries in bf16 are below 2^102. Key scales far below the largest of their page and head lose precision.
    - INT8 and INT4: out has a further error of up to 2^-19 of a row's largest value (root mean square). INT8: where
      value scales are below 2^-100, also of up to 2^-117 for each key.
    - INT8 and INT4 where prefill kernels run (above 16 queries, or heads without a decode kernel): codes are rounded to
      the queries' dtype once dequantised, 1 GiB at a time, or all keys of a sequence that block_table has room for,
      n * P * Hk * D up to 2^31.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device,
    UnsupportedError for an INT4 cache with pages of other than 64 slots.
    Semantics: ``flash_attn_with_kvcache`` of flash-attn; INT4: Liu et al., "KIVI", arXiv 2402.02750.

    >>> import torch, kestrel_attention
    >>> cache = torch.zeros(2, 3, 1, 1, 4)  # K and V: 3 pages of 1 slot, 1 head of 4
    >>> table = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> row = torch.ones(1, 1, 1, 4)
    >>> kestrel_attention.flash_attn_with_kvcache(
    ...     row, cache[0], cache[1], row, 3 * row,
    ...     cache_seqlens=torch.tensor([1], dtype=torch.int32), block_table=table, softmax_scale=0.0)
    tensor([[[[1.5000, 1.5000, 1.5000, 1.5000]]]])
    >>> cache[1, :, 0, 0, 0]  # the new value is in page 0, the second of the sequence
    tensor([3., 0., 0.])
    """
    key = None
    if not _is_compiling():
        tensors: tuple[Any, ...] = (q, k_cache, v_cache, cache_seqlens)
        given = 0
        if block_table is not None:
            tensors += (block_table,)
            given += Given.BLOCK_TABLE
        if k is not None or v is not None:
            tensors += (k, v)
            given += Given.NEW
        if k_scale is not None:
            tensors += (k_scale,)
            given += Given.K_SCALE
        if v_scale is not None:
            given += Given.V_SCALE
            if v_scale is not k_scale:
                tensors += (v_scale,)
                given += Given.OWN_V_SCALE
        if k_tail is not None or k_zero is not None or v_zero is not None or seq_ids is not None:
            tensors += (k_zero, v_zero, k_tail, seq_ids)
            given += Given.INT4
        prefix = prefix_len
        if prefix_len is not None and type(prefix_len) is not int:
            tensors += (prefix_len,)
            prefix = _TENSOR
        if sinks is not None:
            tensors += (sinks,)
            given += Given.SINKS
        if out is not None:
            given += Given.OUT
            if out is not q:
                tensors += (out,)
                given += Given.OWN_OUT
        try:
            result = None
            bound = _hot_calls.repeated(tensors, given, softmax_scale, causal, window_size, softcap, num_splits, prefix)
            if bound is not None and type(return_lse) is bool:
                result = bound(tensors, out, return_lse)
                if result is not None:
                    return result if return_lse else result[0]
            left, right = window_size
            types = (type(softmax_scale), type(causal), type(left), type(right), type(softcap), type(num_splits))
            table = None if block_table is None else block_table.shape  # grows with the sequences
            key = (q.shape, table, given, softmax_scale, causal, left, right, softcap, num_splits, prefix, types)
            written = None if out is None else 0 if out is q else len(tensors) - 1
            hot = _hot_calls.entry(key, tensors, written)
            if hot is not None and type(return_lse) is bool:
                launch, bound = hot.launch
                if bound is not None:
                    result = bound(tensors, out, return_lse)
                    if type(window_size) is tuple:  # a list may hold other numbers the next time
                        numbers = (softmax_scale, causal, window_size, softcap, num_splits, prefix)
                        _hot_calls.remember(hot.matches, bound, given, *numbers)
                if result is None:
                    new = () if k is None else (k, v)
                    scales, integers = Codes(k_scale, v_scale, k_zero, v_zero, k_tail, seq_ids).split(k_cache)
                    result = launch(
                        q,
                        k_cache,
                        v_cache,
                        cache_seqlens,
                        block_table,
                        k_scale=scales[0],
                        v_scale=scales[1],
                        prefix_lens=prefix_len if prefix is _TENSOR else None,
                        new=new,
                        integers=integers,
                        out=out,
                        want_lse=return_lse,
                        sinks=sinks,
                    )
                return result if return_lse else result[0]
        except LaunchError:  # k and v may have been appended
            raise
        except Exception:  # the checks below name the mistake, or the reference runs
            pass

    left, right = arguments.window(_OP, window_size)
    length, lengths = (0, None) if prefix_len is None else arguments.prefix(_OP, prefix_len)
    if out is not None or type(return_lse) is not bool:
        others = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
        others |= {"k_zero": k_zero, "v_zero": v_zero, "k_tail": k_tail, "seq_ids": seq_ids, "sinks": sinks}
        others |= {"cache_seqlens": cache_seqlens, "block_table": block_table, "prefix_len": prefix_len}
        arguments.check_result(_OP, return_lse, out, q, **others)
    scores = (softmax_scale, causal, left, right, softcap, length, lengths, num_splits, sinks)
    cache = (cache_seqlens, block_table, k_scale, v_scale)
    int4 = (k_zero, v_zero, k_tail, seq_ids)
    if key is not None:
        hot_calls.taken()  # a launch that this thread made through torch.ops is not this call's
    if k is None and v is None:
        result, lse = _flash_attn_with_kvcache(q, k_cache, v_cache, *cache, *int4, *scores)
    else:
        for name, x in (("k", k), ("v", v)):
            if x is None:
                check.fail(_OP, name, "a tensor, as k and v are appended together", "None", TypeError)
        if getattr(k_cache, "dtype", None) == torch.int8 or any(x is not None for x in int4):
            result, lse = _flash_attn_with_kvcache_append_int(q, k_cache, v_cache, k, v, *cache, *int4, *scores)
        else:
            result, lse = _flash_attn_with_kvcache_append(q, k_cache, v_cache, k, v, *cache, *scores)
    if key is not None and (launch := hot_calls.taken()) is not None:
        scales, integers = Codes(k_scale, v_scale, k_zero, v_zero, k_tail, seq_ids).split(k_cache)
        paging = cache_seqlens, block_table
        operands = decode.Operands(q, k_cache, v_cache, *paging, *scales, lengths, sinks, k, v, integers, out, None)
        _hot_calls.keep(key, tensors, launch, partial(_bind, launch, tensors, operands))
    return arguments.deliver(out, result, lse, return_lse)


def _bind(
    launch: Launch, tensors: Sequence[torch.Tensor], given: decode.Operands
) -> tuple[Launch, decode.HotLaunch | None]:
    """What is remembered of a call. It has run: whatever fails here only makes further calls slower."""
    try:
        return launch, launch.bind(tensors, given) if isinstance(launch, decode.DecodeLaunch) else None
    except Exception:  # of any kind, as for want of memory
        return launch, None


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: Cached) -> None:
    codes = given.codes
    check.tensor(_OP, "q", q, dtype=check.FLOATS, ndim=4, last_contiguous=True)
    batch = q.shape[0]
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    scales = {name: getattr(codes, name) for name in ("k_scale", "v_scale")}
    int4 = {name: getattr(codes, name) for name in ("k_zero", "v_zero", "k_tail", "seq_ids")}
    if any(x is not None for x in int4.values()):
        arguments.check_int4_cache(_OP, q, caches, scales | int4)
    elif isinstance(k_cache, torch.Tensor) and k_cache.dtype == torch.int8:
        arguments.check_int8_cache(_OP, q, caches, scales)
    else:
        arguments.check_cache(_OP, q, caches)
        arguments.check_scale(_OP, "k_scale", codes.k_scale, k_cache, k_cache.shape[2])
        arguments.check_scale(_OP, "v_scale", codes.v_scale, v_cache, v_cache.shape[2])
    arguments.check_table(_OP, "k_cache", k_cache, given.block_table, batch)
    check.tensor(_OP, "cache_seqlens", given.cache_seqlens, dtype=torch.int32, ndim=1, last_contiguous=True)
    check.shape(_OP, "cache_seqlens", given.cache_seqlens, (batch,))
    arguments.check_scores(_OP, batch, given.scores)
    check.number(_OP, "num_splits", given.num_splits, integer=True, minimum=MORE_WARPS)
    arguments.check_sinks(_OP, q, given.sinks)
    others = {"cache_seqlens": given.cache_seqlens, "block_table": given.block_table, **codes._asdict()}
    check.same(_OP, "device", q=q, **caches, **others, prefix_len=given.scores.prefix_lens, sinks=given.sinks)


def _check_new(q: torch.Tensor, k_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        check.tensor(_OP, name, x, dtype=check.FLOATS, ndim=4, last_contiguous=True)
        check.shape(_OP, name, x, (*q.shape[:2], k_cache.shape[2], q.shape[3]))
    check.same(_OP, "dtype", q=q, k=k, v=v)
    check.same(_OP, "device", q=q, k=k, v=v)


def _check_append(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Cached
) -> None:
    if isinstance(k_cache, torch.Tensor) and k_cache.dtype == torch.int8:
        check.fail(_OP, "k_cache", "values or FP8 (torch.ops: ..._append_int is for INT8)", "int8", TypeError)
    _check(q, k_cache, v_cache, given)
    _check_new(q, k_cache, k, v)
    _check_written(k_cache=k_cache, v_cache=v_cache)


def _check_append_int(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Cached
) -> None:
    check.tensor(_OP, "k_cache", k_cache, dtype=(torch.int8, torch.uint8))
    _check(q, k_cache, v_cache, given)
    if k_cache.dtype == torch.uint8 and given.codes.k_tail is None:
        check.fail(_OP, "k_tail", "a tensor, as for every INT4 cache", "None", TypeError)
    _check_new(q, k_cache, k, v)
    written = given.codes._replace(seq_ids=None)
    _check_written(k_cache=k_cache, v_cache=v_cache, **written._asdict())


def _check_written(**tensors: torch.Tensor | None) -> None:
    """No element of what an append writes shares its memory with another."""
    for name, x in tensors.items():
        if x is not None:
            check.disjoint(_OP, name, x)


def _run(
    check_call: Callable[..., None],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new: tuple[torch.Tensor, ...],
    given: Cached,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a call; the first of a form is checked and planned. new: k and v to append, or nothing.

    The key holds what the checks and the plan depend on, unless the entry point of the kernel that runs first checks
    it.
    """
    scores, table = given.scores, given.block_table
    numbers = (*scores[:-1], given.num_splits)
    cache = (k_cache.shape, k_cache.dtype, k_cache.stride(), v_cache.stride())
    paging = (given.cache_seqlens.stride(), None if table is None else (table.shape, table.stride()))
    tensors = form(q, *new, *given.codes, scores.prefix_lens, given.sinks)
    key = (check_call, tensors, cache, paging, numbers, *map(type, numbers))
    launch = decode.launches.get(key)
    if launch is None:
        check_call(q, k_cache, v_cache, *new, given)
        launch = _make_launch(key, q, k_cache, v_cache, new, given)
    (k_scale, v_scale), integers = given.codes.split(k_cache)
    result = launch(
        q,
        k_cache,
        v_cache,
        given.cache_seqlens,
        table,
        k_scale=k_scale,
        v_scale=v_scale,
        prefix_lens=scores.prefix_lens,
        new=new,
        integers=integers,
        sinks=given.sinks,
    )
    hot_calls.ran(launch)
    return result


def _make_launch(
    key: Any,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new: tuple[torch.Tensor, ...],
    given: Cached,
) -> Launch:
    """The launch of checked arguments, kept under ``key``."""
    if q.shape[1] <= MAX_QUERIES:
        try:
            problem = decode.problem_of(q, k_cache, v_cache, given, appends=bool(new))
            return decode.make_launch(key, problem, q, new)
        except UnsupportedError:  # prefill kernels cover heads of more sizes
            pass
    if given.codes.split(k_cache)[1] or prefill_scratch.covers(q, k_cache, given):
        return decode.launches.keep(key, prefill_scratch.make_cached(q, k_cache, v_cache, new, given))
    return decode.launches.keep(key, prefill.make_cached(q, k_cache, v_cache, new, given))


@kernel_op(
    reference=reference.flash_attn_with_kvcache,
    check=lambda q, k_cache, v_cache, *rest: _check(q, k_cache, v_cache, Cached.of(*rest)),
    shape=reference.padded_shapes,
    kernel="cute",
)
def _flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_zero: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    k_tail: torch.Tensor | None,
    seq_ids: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    num_splits: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_with_kvcache` that only reads the cache: (out, lse)."""
    codes = Codes(k_scale, v_scale, k_zero, v_zero, k_tail, seq_ids)
    scores = Scores(softmax_scale, causal, window_left, window_right, softcap, prefix_len, prefix_lens)
    given = Cached(cache_seqlens, block_table, codes, scores, num_splits, sinks)
    return _run(_check, q, k_cache, v_cache, (), given)


@kernel_op(
    reference=reference.flash_attn_with_kvcache_append,
    check=lambda q, k_cache, v_cache, k, v, *rest: _check_append(q, k_cache, v_cache, k, v, Cached.of(*rest, codes=2)),
    shape=reference.padded_shapes,
    mutates=("k_cache", "v_cache"),
    kernel="cute",
    public=_OP,
)
def _flash_attn_with_kvcache_append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_with_kvcache` that first appends k and v, as they are or as FP8, in place: (out, lse)."""
    codes = Codes(k_scale, v_scale)
    scores = Scores(softmax_scale, causal, window_left, window_right, softcap, prefix_len, prefix_lens)
    given = Cached(cache_seqlens, block_table, codes, scores, num_splits, sinks)
    return _run(_check_append, q, k_cache, v_cache, (k, v), given)


@kernel_op(
    reference=reference.flash_attn_with_kvcache_append_int,
    check=lambda q, k_cache, v_cache, k, v, *rest: _check_append_int(q, k_cache, v_cache, k, v, Cached.of(*rest)),
    shape=reference.padded_shapes,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale", "k_zero", "v_zero", "k_tail"),
    kernel="cute",
    public=_OP,
)
def _flash_attn_with_kvcache_append_int(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    k_zero: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    k_tail: torch.Tensor | None,
    seq_ids: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    prefix_len: int,
    prefix_lens: torch.Tensor | None,
    num_splits: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_with_kvcache` that first appends k and v as INT8 or INT4, with scales, in place: (out, lse)."""
    codes = Codes(k_scale, v_scale, k_zero, v_zero, k_tail, seq_ids)
    scores = Scores(softmax_scale, causal, window_left, window_right, softcap, prefix_len, prefix_lens)
    given = Cached(cache_seqlens, block_table, codes, scores, num_splits, sinks)
    return _run(_check_append_int, q, k_cache, v_cache, (k, v), given)
