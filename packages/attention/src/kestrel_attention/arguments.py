"""Arguments that the attention ops share: public forms made simple, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kestrel_runtime import check

from .plan import MAX_SCALE

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Tensors = Mapping[str, Any]  # by the names they have as arguments; None where one is missing


class Scores(NamedTuple):
    """What shapes the scores, in the order of every torch op."""

    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    prefix_len: int
    prefix_lens: torch.Tensor | None

    @property
    def prefix(self) -> torch.Tensor | int:
        """Keys that all queries see, of all sequences or of each."""
        return self.prefix_len if self.prefix_lens is None else self.prefix_lens

    def of_problem(self) -> dict[str, Any]:
        """The fields of a DecodeProblem or PrefillProblem."""
        fields = self._asdict()
        return fields | {"has_prefix_lens": fields.pop("prefix_lens") is not None}


class Scales(NamedTuple):
    """Scales of FP8 queries, keys and values; None is 1."""

    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class Codes(NamedTuple):
    """What comes with a cache of codes: scales, and for INT4 the other four."""

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_zero: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None
    k_tail: torch.Tensor | None = None
    seq_ids: torch.Tensor | None = None

    def split(self, k_cache: torch.Tensor) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        """The scales of an FP8 cache, and the tensors of an INT8 or INT4 cache in the kernels' order.

        No cache has both.
        """
        if self.k_tail is not None:
            return (None, None), (self.k_scale, self.k_zero, self.v_scale, self.v_zero, self.k_tail, self.seq_ids)
        if k_cache.dtype is torch.int8:
            return (None, None), (self.k_scale, self.v_scale)
        return (self.k_scale, self.v_scale), ()


class Dense(NamedTuple):
    """The arguments of flash_attn_func after q, k and v."""

    scores: Scores
    scales: Scales
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, *given: Any) -> Dense:
        """From the arguments of the torch op, in its order."""
        return cls(Scores(*given[:7]), Scales(*given[7:10]), *given[10:])


class Packed(NamedTuple):
    """The arguments of flash_attn_varlen_func after q, k and v."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scores: Scores
    scales: Scales
    block_table: torch.Tensor | None
    seqused_k: torch.Tensor | None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, *given: Any) -> Packed:
        """From the arguments of the torch op, in its order."""
        return cls(*given[:4], Scores(*given[4:11]), Scales(*given[11:14]), *given[14:])


class Cached(NamedTuple):
    """The arguments of attention over a cache after q, the cache, and what is appended."""

    cache_seqlens: torch.Tensor
    block_table: torch.Tensor | None
    codes: Codes
    scores: Scores
    num_splits: int
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, *given: Any, codes: int = 6) -> Cached:
        """From the arguments of a torch op, in its order. codes: how many of them belong to Codes."""
        first = 2 + codes  # of the scores
        return cls(*given[:2], Codes(*given[2:first]), Scores(*given[first : first + 7]), *given[first + 7 :])


def window(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """The two ends of a window."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        check.fail(op, "window_size", "a pair (left, right)", check.shown(window_size), TypeError)
    return left, right


def prefix(op: str, prefix_len: torch.Tensor | int | None) -> tuple[int, torch.Tensor | None]:
    """A prefix for all sequences, or one for each."""
    if prefix_len is None:
        return 0, None
    if isinstance(prefix_len, torch.Tensor):
        return 0, prefix_len
    if isinstance(prefix_len, (int, torch.SymInt)):
        return prefix_len, None  # type: ignore[return-value]
    check.fail(op, "prefix_len", "an integer, a tensor or None", type(prefix_len).__name__, TypeError)


def check_result(op: str, return_lse: bool, out: torch.Tensor | None, q: torch.Tensor, **others: Any) -> None:
    """out has q's shape and device and the dtype of the result, and may be written; q is checked with the rest.

    others: arguments that out may not overlap; it may be the same view as q.
    """
    check.flag(op, "return_lse", return_lse)
    if out is None or not isinstance(q, torch.Tensor):
        return
    dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    check.tensor(op, "out", out, dtype=dtype, ndim=q.ndim, last_contiguous=True)
    check.shape(op, "out", out, q.shape)
    check.same(op, "device", q=q, out=out)
    if out.requires_grad and torch.is_grad_enabled():
        expected = "a tensor without requires_grad, or torch.no_grad() (ops here have no autograd)"
        check.fail(op, "out", expected, "requires_grad=True")
    check.disjoint(op, "out", out)
    if torch.compiler.is_dynamo_compiling():  # addresses are not known
        return
    if out.is_inference() and not torch.is_inference_mode_enabled():
        check.fail(op, "out", "a tensor that may be written outside torch.inference_mode", "an inference tensor")
    check.no_overlap(op, "out", out, "q", q, may_be_same=True)
    for name, other in others.items():
        if isinstance(other, torch.Tensor):
            check.no_overlap(op, "out", out, name, other)


def deliver(
    out: torch.Tensor | None, result: torch.Tensor, lse: torch.Tensor, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result, in ``out`` if that is given, with the LSE on request."""
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


def check_scores(op: str, batch: int, scores: Scores) -> None:
    """Checks of the arguments that shape the scores."""
    if scores.softmax_scale is not None:
        _check_magnitude(op, "softmax_scale", scores.softmax_scale, MAX_SCALE)
    check.flag(op, "causal", scores.causal)
    check.number(op, "window_size", scores.window_left, integer=True, minimum=-1)
    check.number(op, "window_size", scores.window_right, integer=True, minimum=-1)
    _check_magnitude(op, "softcap", scores.softcap, torch.finfo(torch.float32).max, minimum=0.0)
    check.number(op, "prefix_len", scores.prefix_len, integer=True, minimum=0)
    if scores.prefix_lens is not None:
        check.tensor(op, "prefix_len", scores.prefix_lens, dtype=torch.int32, ndim=1, last_contiguous=True)
        check.shape(op, "prefix_len", scores.prefix_lens, (batch,))


def _check_magnitude(op: str, name: str, value: float, largest: float, **bounds: float) -> None:
    """A finite number, of either sign, up to ``largest``."""
    check.number(op, name, value, **bounds)
    if abs(value) > largest:
        check.fail(op, name, f"a finite number of magnitude <= {largest:.8g}", value)


def check_sinks(op: str, q: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """sinks is None, or a floating tensor with one logit per query head."""
    if sinks is not None:
        check.tensor(op, "sinks", sinks, dtype=check.FLOATS, ndim=1, last_contiguous=True)
        check.shape(op, "sinks", sinks, (q.shape[-2],))


def check_groups(op: str, q: torch.Tensor, kv_heads: int) -> None:
    """The query heads fall into equal groups, one per KV head; a head has at least one dimension."""
    heads, size = q.shape[-2:]
    if size < 1:
        check.fail(op, "q", "a head size >= 1", size)
    if kv_heads < 1 or heads % kv_heads:
        check.fail(op, "q", f"a number of heads that is a multiple of the {kv_heads} KV heads", heads)


def check_scale(op: str, name: str, scale: torch.Tensor | None, x: torch.Tensor, heads: int) -> None:
    """A scale is None, or float32 [1] or [heads] with an FP8 tensor."""
    if scale is None:
        return
    if x.element_size() != 1:
        check.fail(op, name, f"None with {str(x.dtype).removeprefix('torch.')} (nothing to scale)", "a tensor")
    check.tensor(op, name, scale, dtype=torch.float32, ndim=1, last_contiguous=True)
    if scale.shape[0] not in (1, heads):
        check.fail(op, name, f"shape (1,) or ({heads},)", f"({scale.shape[0]},)")


def check_table(op: str, name: str, cache: torch.Tensor, block_table: torch.Tensor | None, batch: int) -> None:
    """block_table is int32 [B, n]; without it the cache (which is called ``name``) has a block per sequence."""
    if block_table is not None:
        check.tensor(op, "block_table", block_table, dtype=torch.int32, ndim=2, last_contiguous=True)
        check.shape(op, "block_table", block_table, (batch, None))
    elif cache.shape[0] != batch:
        check.fail(op, name, f"{batch} blocks, one per sequence, as block_table is None", cache.shape[0])


def check_cache(op: str, q: torch.Tensor, caches: Tensors) -> None:
    """K and V (by name, in this order) are caches [blocks, P, Hk, D] of one dtype: q's, or FP8 (uint8 is e4m3)."""
    _check_caches(op, q, caches, (q.dtype, *FP8, torch.uint8), q.shape[-1])


def check_int8_cache(op: str, q: torch.Tensor, caches: Tensors, scales: Tensors) -> None:
    """K and V are int8 [blocks, P, Hk, D], their scales float32 [blocks, P, Hk]."""
    shape = _check_caches(op, q, caches, torch.int8, q.shape[-1])
    for name, scale in scales.items():
        check.tensor(op, name, scale, dtype=torch.float32, ndim=3, last_contiguous=True)
        check.shape(op, name, scale, shape[:3])


def check_int4_cache(op: str, q: torch.Tensor, caches: Tensors, more: Tensors) -> None:
    """K and V are uint8 [blocks, P, Hk, D/2]; more: their scales and zeros, k_tail and seq_ids, all of them given."""
    size = q.shape[-1]
    if size % 2:
        check.fail(op, "q", "an even head size with an INT4 cache", size)
    blocks, page, kv_heads, _ = _check_caches(op, q, caches, torch.uint8, size // 2)
    per_channel, per_token = (blocks, kv_heads, size), (blocks, page, kv_heads)
    shapes = {"k_scale": per_channel, "k_zero": per_channel, "v_scale": per_token, "v_zero": per_token}
    for name, shape in shapes.items():
        check.tensor(op, name, more[name], dtype=torch.float16, ndim=3, last_contiguous=True)
        check.shape(op, name, more[name], shape)
    tail = more["k_tail"]
    check.tensor(op, "k_tail", tail, dtype=q.dtype, ndim=4, last_contiguous=True)
    check.shape(op, "k_tail", tail, (None, page, kv_heads, size))
    check.tensor(op, "seq_ids", more["seq_ids"], dtype=torch.int32, ndim=1, last_contiguous=True)
    check.shape(op, "seq_ids", more["seq_ids"], (q.shape[0],))


def _check_caches(
    op: str, q: torch.Tensor, caches: Tensors, dtype: torch.dtype | tuple[torch.dtype, ...], width: int
) -> torch.Size:
    """The shape of both: [blocks, P, Hk, width]."""
    for name, cache in caches.items():
        check.tensor(op, name, cache, dtype=dtype, ndim=4, last_contiguous=True)
    (k_name, k_cache), (v_name, v_cache) = caches.items()
    check.shape(op, k_name, k_cache, (None, None, None, width))
    if k_cache.shape[1] < 1:
        check.fail(op, k_name, "a page size >= 1", k_cache.shape[1])
    check.shape(op, v_name, v_cache, k_cache.shape)
    check.same(op, "dtype", **caches)
    check_groups(op, q, k_cache.shape[2])
    return k_cache.shape
