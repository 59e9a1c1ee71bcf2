"""Writing new keys and values into a paged cache as INT8 or INT4, with their scales."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op

from . import reference
from .checks import check_int4, check_int8, check_pair, check_rows, check_written

_kernels = Binary("kestrel_kvcache")


def check_int8_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    op = "int8_cache_write"
    check_rows(op, key, value, slot_mapping)
    shape = check_pair(op, key_cache, value_cache, torch.int8, *key.shape[1:])
    check_written(op, key_cache=key_cache, value_cache=value_cache)
    check_int8(op, shape, k_scale, v_scale)
    check_written(op, k_scale=k_scale, v_scale=v_scale)
    scales = {"k_scale": k_scale, "v_scale": v_scale, "slot_mapping": slot_mapping}
    check.same(op, "device", key=key, value=value, key_cache=key_cache, value_cache=value_cache, **scales)


@kernel_op(
    reference=reference.int8_cache_write,
    check=check_int8_cache_write,
    kernel="cuda",
    mutates=("key_cache", "value_cache", "k_scale", "v_scale"),
)
def int8_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write one key and one value row per token into a cache of INT8 codes, with a scale per token and head, in place.

    T tokens, Hk KV heads of D dims, pages of P slots (any P); slot = block * P + offset. value ≈ code * scale.

    key, value: [T', Hk, D] with T <= T', bf16, fp16 or float32; rows past T are not read.
    key_cache, value_cache: int8 [blocks, P, Hk, D], written in place; strides as in :func:`reshape_and_cache`.
    k_scale, v_scale: float32 [blocks, P, Hk], written in place, with strides of their own.
    slot_mapping: int32 or int64 [T]. A slot < 0 or >= blocks * P is skipped. The others must be distinct, see
        :func:`reshape_and_cache`; if two tokens name one slot, codes of one can meet the scale of the other.

    scale = the largest finite magnitude of the D values / 127, or 1 where that is 0; code = value / scale, computed in
    float32, rounded half to even, -127..127. inf saturates; a NaN makes the scale NaN.
    Returns None. No argument is constant. Raises TypeError for a wrong dtype or a missing tensor, ValueError for a
    wrong shape, stride or device, or a written tensor that shares memory within itself or with another argument.
    Semantics: ``reshape_and_cache_flash`` of vLLM for slots and rows; the format, symmetric INT8 with a scale per token
    and head, is this package's own.

    >>> import torch, kestrel_kvcache
    >>> rows = torch.tensor([-1.27, 0.5]).reshape(1, 1, 2)
    >>> cache, scale = torch.zeros(2, 1, 1, 1, 2, dtype=torch.int8), torch.zeros(2, 1, 1, 1)
    >>> kestrel_kvcache.int8_cache_write(rows, rows, cache[0], cache[1], scale[0], scale[1], torch.tensor([0]))
    >>> cache[0].tolist(), scale[0]
    ([[[[-127, 50]]]], tensor([[[0.0100]]]))
    """
    _kernels.int8_cache_write(key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping)


def check_int4_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    k_tail: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_ids: torch.Tensor,
) -> None:
    op = "int4_cache_write"
    check_rows(op, key, value, slot_mapping)
    heads, size = key.shape[1:]
    if size % 2:
        check.fail(op, "key", "an even head size", size)
    shape = check_pair(op, key_cache, value_cache, torch.uint8, heads, size // 2)
    check_written(op, key_cache=key_cache, value_cache=value_cache)
    check_int4(op, shape, key.dtype, k_scale, k_zero, v_scale, v_zero, k_tail)
    check_written(op, k_scale=k_scale, k_zero=k_zero, v_scale=v_scale, v_zero=v_zero, k_tail=k_tail)
    check.tensor(op, "seq_ids", seq_ids, dtype=check.INTEGERS, ndim=1, last_contiguous=True)
    check.shape(op, "seq_ids", seq_ids, slot_mapping.shape)
    caches = {"key_cache": key_cache, "value_cache": value_cache, "k_scale": k_scale, "k_zero": k_zero}
    more = {"v_scale": v_scale, "v_zero": v_zero, "k_tail": k_tail, "slot_mapping": slot_mapping, "seq_ids": seq_ids}
    check.same(op, "device", key=key, value=value, **caches, **more)


@kernel_op(
    reference=reference.int4_cache_write,
    check=check_int4_cache_write,
    kernel="cuda",
    mutates=("key_cache", "value_cache", "k_scale", "k_zero", "v_scale", "v_zero", "k_tail"),
)
def int4_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    k_tail: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_ids: torch.Tensor,
) -> None:
    """Write one key and one value row per token into a cache of INT4 codes after KIVI, in place.

    T tokens, Hk KV heads of D dims (even), pages of 64 slots; slot = block * 64 + row. value ≈ (code - zero) * scale
    with codes 0..15. Values are quantised per token; keys per channel over the 64 tokens of a page, once it is full.

    key, value: [T', Hk, D] with T <= T', bf16, fp16 or float32; rows past T are not read.
    key_cache, value_cache: uint8 [blocks, 64, Hk, D/2], written in place: two codes a byte, the even dim in the low
        nibble; strides as in :func:`reshape_and_cache`.
    k_scale, k_zero: fp16 [blocks, Hk, D], written in place when a page fills.
    v_scale, v_zero: fp16 [blocks, 64, Hk], written in place.
    k_tail: [seqs, 64, Hk, D] of key's dtype, written in place: the keys of each sequence's unfinished page, row =
        slot % 64. The write that fills row 63 quantises the page, from the rows of this call and of the tail. Readers
        take the keys of the last length % 64 tokens from here; the contents of the other rows are unspecified.
    slot_mapping: int32 or int64 [T]. A slot < 0 or >= blocks * 64 is skipped. The others must be distinct, and a
        sequence fills its pages in order and each page from row 0 on: only its last page is unfinished.
    seq_ids: int32 or int64 [T]: each token's row of k_tail. A token with one < 0 or >= seqs is skipped.

    scale = max((max - min) / 15, max |x| / 32768) rounded to fp16, or 1 where that is 0; zero = -min / scale rounded to
    fp16; code = x / scale + zero, computed in float32, rounded half to even, clamped to 0..15. Values saturate at
    491280; a NaN makes scale and zero NaN.
    Returns None. No argument is constant. Raises TypeError for a wrong dtype or a missing tensor, ValueError for a
    wrong shape, stride or device, or a written tensor that shares memory within itself or with another argument,
    UnsupportedError for a page size other than 64. Semantics: Liu et al., "KIVI", arXiv 2402.02750.

    >>> import torch, kestrel_kvcache
    >>> codes = torch.zeros(2, 2, 64, 1, 1, dtype=torch.uint8)  # K and V: two pages, one head of 2
    >>> of_page, of_token = torch.zeros(2, 2, 1, 2).half(), torch.zeros(2, 2, 64, 1).half()
    >>> tail = torch.zeros(1, 64, 1, 2)
    >>> rows = torch.stack((torch.arange(65.0) % 16, torch.arange(65.0) % 16 * 2 - 15), dim=1).reshape(65, 1, 2)
    >>> slots = torch.arange(65)  # one sequence of 65 tokens: a full page, and one token of the next
    >>> kestrel_kvcache.int4_cache_write(
    ...     rows, rows, codes[0], codes[1], of_page[0], of_page[1], of_token[0], of_token[1], tail, slots, 0 * slots)
    >>> of_page[:, 0, 0].tolist()  # channel 0 holds 0, 1 .. 15; channel 1 holds -15, -13 .. 15
    [[1.0, 2.0], [0.0, 7.5]]
    >>> codes[0, 0, 3, 0].item(), rows[3].tolist()  # 3 = (3 - 0) * 1 and -9 = (3 - 7.5) * 2: 3 + 16 * 3
    (51, [[3.0, -9.0]])
    >>> tail[0, 0]  # the key of token 64, whose page is not full: row 0 of the sequence's tail
    tensor([[  0., -15.]])
    """
    _kernels.int4_cache_write(
        key,
        value,
        key_cache,
        value_cache,
        k_scale,
        k_zero,
        v_scale,
        v_zero,
        k_tail,
        slot_mapping,
        seq_ids,
    )
