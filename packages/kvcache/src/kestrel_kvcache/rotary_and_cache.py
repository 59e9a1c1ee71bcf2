"""Rotating queries and keys and writing keys and values into a paged cache, in one op."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op
from kestrel_runtime.rotary import check_heads, check_table
from kestrel_runtime.rotary import check_rows as check_rotary_rows

from . import reference
from .checks import check_slots, check_store

_kernels = Binary("kestrel_kvcache")


def check_rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    is_neox: bool = True,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rope_dim_offset: int = 0,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
) -> None:
    op = "rotary_and_cache"
    check.tensor(op, "positions", positions, dtype=check.INTEGERS, ndim=1, last_contiguous=True)
    if key is None:
        check.fail(op, "key", "a tensor", "NoneType", TypeError)
    check_rotary_rows(op, positions.shape, query, key, head_size)
    check_heads(op, "value", value, positions.shape, head_size)
    check.same(op, "dtype", query=query, value=value)
    heads = _heads(key, head_size)
    if _heads(value, head_size) != heads:
        check.fail(op, "value", f"{heads} heads, as key has", _heads(value, head_size))
    check.flag(op, "is_neox", is_neox)
    check_table(op, cos_sin_cache, query, head_size, rope_dim_offset)
    check_slots(op, slot_mapping, positions.shape[0])
    check_store(op, key.dtype, heads, head_size, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
    norms = {"query_norm": query_norm, "key_norm": key_norm}
    for (name, norm), other in zip(norms.items(), reversed(norms), strict=True):
        if norm is not None and norms[other] is None:
            check.fail(op, name, f"None, as {other} is", "a tensor", TypeError)
        if norm is not None:
            check.tensor(op, name, norm, dtype=check.FLOATS, last_contiguous=True)
            check.shape(op, name, norm, (head_size,))
            check.same(op, "dtype", query=query, **{name: norm})
    check.number(op, "norm_eps", norm_eps, minimum=0)
    check.number(op, "norm_weight_bias", norm_weight_bias)
    rows = {"query": query, "key": key, "value": value, "cos_sin_cache": cos_sin_cache}
    caches = {"key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping}
    more = {"k_scale": k_scale, "v_scale": v_scale, **norms}
    check.same(op, "device", positions=positions, **rows, **caches, **more)


def _heads(x: torch.Tensor, head_size: int) -> int:
    return x.shape[1] if x.ndim == 3 else x.shape[1] // head_size


@kernel_op(
    reference=reference.rotary_and_cache,
    check=check_rotary_and_cache,
    kernel="cuda",
    mutates=("query", "key", "key_cache", "value_cache"),
)
def rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    is_neox: bool = True,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rope_dim_offset: int = 0,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
) -> None:
    """Rotate queries and keys in place, then write keys and values into the cache, in place.

    The same as kestrel_rope.rotary_embedding followed by :func:`reshape_and_cache`, in one pass.
    T rows, H query heads and Hk KV heads of D = ``head_size`` dims, R rotated dims, pages of P slots.

    positions: int32 or int64 [T]. A position < 0 or >= max_pos does not rotate its query and key: they stay unchanged,
        or are normalised alone; the key is still cached.
    query: [T, H*D] or [T, H, D], bf16, fp16 or float32. Written in place.
    key: [T, Hk*D] or [T, Hk, D]. Written in place: it holds the rotated key, which is also what the cache gets.
    value: [T, Hk*D] or [T, Hk, D]. Not written.
        Only the last dimension must be contiguous, so the three may be slices of one packed QKV tensor.
    cos_sin_cache: *constant* [max_pos, R], cosines, then sines; float32 or the dtype of query.
    key_cache, value_cache: [blocks, P, Hk, D], written in place; see :func:`reshape_and_cache`.
    slot_mapping: int32 or int64 [T] or shorter. A slot < 0 or >= blocks * P is not written (its row is still
        rotated). The others must be distinct, see :func:`reshape_and_cache`.
    is_neox: rotate pairs (i, i + R/2); if False, pairs (2i, 2i + 1) as GPT-J.
    kv_cache_dtype, k_scale, v_scale: the cache's format, see :func:`reshape_and_cache`.
    rope_dim_offset: first rotated dim of a head.
    query_norm, key_norm: *constant* [D] of query's dtype, both or none: weights of an RMSNorm of each head of query and
        key before the rotation, rounded to their dtype as by kestrel_norm.rms_norm; its sum may be of another order, so
        the last bit may differ. The kernel needs is_neox, R = D, heads aligned to 16 bytes, and 16, 32, 64, 128, 256 or
        512 bytes in D / 2 elements; other calls run the reference.
    norm_eps: added to the mean square of these norms, >= 0.
    norm_weight_bias: added to every weight of these norms in float32; 1.0 is Gemma's form.

    Returns None. The rotation runs in float32 and is rounded to the dtype of key, which is then what is quantised.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range, name or device,
    or a written tensor that shares memory within itself or with another argument.
    Semantics: ``rotary_embedding``, then ``reshape_and_cache_flash``, of vLLM.

    >>> import torch, kestrel_kvcache
    >>> table = torch.tensor([[0.0, 1.0]])  # position 0: cos 0, sin 1, a rotation by 90 degrees
    >>> query, key, value = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    >>> cache = torch.zeros(2, 1, 1, 1, 2)  # K and V: one page of one slot, one head of 2
    >>> at = torch.tensor([0])
    >>> kestrel_kvcache.rotary_and_cache(at, query, key, value, 2, table, cache[0], cache[1], at)
    >>> query, cache.flatten().tolist()
    (tensor([[-2.,  1.]]), [-4.0, 3.0, 5.0, 6.0])
    """
    _kernels.rotary_and_cache(
        positions,
        query,
        key,
        value,
        head_size,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        is_neox,
        kv_cache_dtype,
        k_scale,
        v_scale,
        rope_dim_offset,
        query_norm,
        key_norm,
        norm_eps,
        norm_weight_bias,
    )
