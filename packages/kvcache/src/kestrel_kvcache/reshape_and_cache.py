"""Writing new keys and values into a paged cache, unchanged or as FP8."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op

from . import reference
from .checks import check_rows, check_store

_kernels = Binary("kestrel_kvcache")


def check_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    op = "reshape_and_cache"
    check_rows(op, key, value, slot_mapping)
    check_store(op, key.dtype, *key.shape[1:], key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
    caches = {"key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping}
    check.same(op, "device", key=key, value=value, **caches, k_scale=k_scale, v_scale=v_scale)


@kernel_op(
    reference=reference.reshape_and_cache,
    check=check_reshape_and_cache,
    kernel="cuda",
    mutates=("key_cache", "value_cache"),
)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write one key and one value row per token into the cache slots that ``slot_mapping`` names, in place.

    T tokens, Hk KV heads of D dims, pages of P slots; slot = block * P + offset.

    key, value: [T', Hk, D] with T <= T', bf16, fp16 or float32; rows past T are not read. Row and head strides are
        free.
    key_cache, value_cache: [blocks, P, Hk, D], written in place. Strides are free but for the last dimension, and
        separate for K and V: NHD, HND (a transposed view), K and V as halves of one last dimension, layers interleaved.
        Their dtype is that of key with "auto", else uint8 or the named float8 dtype.
    slot_mapping: int32 or int64 [T]. A slot < 0 or >= blocks * P is skipped. The others must be distinct: if two
        tokens name one slot, each of its elements comes from one of the two, and runs differ.
    kv_cache_dtype: "auto" stores the values unchanged; "fp8" and "fp8_e4m3" (e4m3fn) and "fp8_e5m2" store
        value / scale, computed in float32, rounded to nearest even and saturated at the largest finite code.
    k_scale, v_scale: float32 [1] or [Hk], on the device; None is 1. With "auto" they are not read
        (callers of vLLM's op always pass them).

    Returns None. No argument is constant: the previous launch may write all of them.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, name or device, or a
    cache that shares memory within itself or with another argument. Semantics: ``reshape_and_cache_flash`` of vLLM.

    >>> import torch, kestrel_kvcache
    >>> cache = torch.zeros(2, 2, 2, 1, 4)  # K and V, 2 pages of 2 slots, 1 head of 4
    >>> rows = torch.arange(8.0).reshape(2, 1, 4)
    >>> kestrel_kvcache.reshape_and_cache(rows, -rows, cache[0], cache[1], torch.tensor([3, -1]))
    >>> cache[0, 1, :, 0]  # token 0 went to slot 3, token 1 is padding
    tensor([[0., 0., 0., 0.],
            [0., 1., 2., 3.]])
    """
    _kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
