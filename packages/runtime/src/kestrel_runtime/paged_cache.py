"""References that kestrel_kvcache and kestrel_attention share: addressing, writing and reading a paged KV cache.

A cache is [blocks, P, ...] with any strides; slot = block * P + offset. Nothing here reads a value on the host.
Formats: plain values; FP8 with a scale [1] or [Hk]; INT8 with a scale per token and head; INT4 after KIVI (Liu et
al., arXiv 2402.02750): keys quantised per channel over the 64 tokens of a page, values per token.
"""

from __future__ import annotations

import torch

from .errors import UnsupportedError
from .reference import pack_int4, quotient, to_fp8, unpack_int4

FP8_OF_NAME = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INT4_PAGE = 64
_INT4_LARGEST = 7.5 * 65504  # the range to each side of the largest fp16 scale


# -- addresses --------------------------------------------------------------------------------------------------------


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A view of FP8 tensors as uint8, which copies and gathers support on every device; other dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x


def as_fp8(cache: torch.Tensor) -> torch.Tensor:
    """A view of a uint8 cache as e4m3; others unchanged."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def slots_of(positions: torch.Tensor, block_table: torch.Tensor | None, page: int) -> torch.Tensor:
    """The slot of each position of each sequence, int64 [B, N]; -1 where there is no slot.

    positions: integers [B, N]; a negative position has no slot. block_table: [B, n], a negative entry is no page; None:
    sequence b owns page b alone.
    """
    positions = positions.long()
    if block_table is None:
        sequences = torch.arange(positions.shape[0], device=positions.device)[:, None]
        return torch.where((positions >= 0) & (positions < page), sequences * page + positions, -1)
    pages = block_table.shape[1]
    if pages == 0:
        return torch.full_like(positions, -1)
    block = block_table.long().gather(1, (positions // page).clamp(0, pages - 1))
    exists = (positions >= 0) & (positions < pages * page) & (block >= 0)
    return torch.where(exists, block * page + positions % page, -1)


def keys_present(lengths: torch.Tensor, block_table: torch.Tensor | None, blocks: int, page: int) -> torch.Tensor:
    """Which keys of :func:`gather_pages` exist, bool [B, n*P]: below the sequence's length, in a page that exists."""
    count = page if block_table is None else block_table.shape[1] * page * (blocks > 0)
    present = torch.arange(count, device=lengths.device) < lengths[:, None]
    if block_table is None or count == 0:
        return present
    named = (block_table >= 0) & (block_table < blocks)
    return present & named.repeat_interleave(page, dim=1)


def without_padding(lengths: torch.Tensor, k_tail: torch.Tensor | None, seq_ids: torch.Tensor | None) -> torch.Tensor:
    """The lengths [B], -1 (padding) for a sequence that has no row in the tail of an INT4 cache."""
    if k_tail is None or seq_ids is None:
        return lengths
    return torch.where((seq_ids >= 0) & (seq_ids < k_tail.shape[0]), lengths, -1)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """cache[slot] = row for every slot in range; the others are skipped.

    cache: [blocks, P, ...], written in place. slots: integers [T], distinct where in range. rows: [T, ...] of the
    cache's dtype. A skipped row repeats the write of the first valid row (equal values, so the order does not matter).
    If all rows are skipped, the write restores the old contents.
    """
    blocks, page = cache.shape[:2]
    if slots.shape[0] == 0 or blocks * page == 0:
        return
    slots = slots.long()
    valid = (slots >= 0) & (slots < blocks * page)
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), valid.int().argmax())
    target = slots[source].clamp(0, blocks * page - 1)
    cache, rows = as_bytes(cache), as_bytes(rows)
    block, offset = target // page, target % page
    cache[block, offset] = torch.where(valid.any(), rows[source], cache[block, offset])


def gather_pages(cache: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
    """The pages of each sequence in order: [B, n, P, ...]. For entries that name no page the contents are arbitrary.

    cache: [blocks, P, ...], or another tensor with one entry per block. block_table: [B, n]; None: sequence b owns
    page b alone, and the result is a view.
    """
    if block_table is None:
        return cache.unsqueeze(1)
    blocks = cache.shape[0]
    if blocks == 0:
        return cache.new_zeros(block_table.shape[0], 0, *cache.shape[1:])
    pages = as_bytes(cache).index_select(0, block_table.clamp(0, blocks - 1).flatten()).view(cache.dtype)
    return pages.reshape(*block_table.shape, *cache.shape[1:])


# -- formats ----------------------------------------------------------------------------------------------------------


def per_head(scale: torch.Tensor) -> torch.Tensor:
    """A scale [1] or [Hk], to be multiplied with [..., Hk, D]."""
    return scale.unsqueeze(-1)


def encode_fp8(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [..., Hk, D] / scale, rounded once to FP8 (nearest even, saturating)."""
    return to_fp8(x.float() if scale is None else x.float() / per_head(scale), dtype)


def encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes -127..127 of the last dimension and their scale: the largest finite magnitude / 127, or 1 for 0.

    Rounds half to even; inf saturates; a NaN makes the scale NaN, so that it propagates.
    """
    x = x.float()
    largest = torch.where(x.isinf(), 0.0, x.abs()).amax(-1)
    scale = torch.where(largest == 0, 1.0, quotient(largest, 127))
    codes = (x / scale.unsqueeze(-1)).round().clamp(-127, 127).nan_to_num(0.0)
    return codes.to(torch.int8), scale


def encode_int4(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0..15 over ``dim`` (int32, not packed), and fp16 scale and zero without it: value = (code - zero) * scale.

    scale = max((max - min) / 15, max |x| / 32768) rounded to fp16, or 1 where that is 0; zero = -min / scale rounded to
    fp16 (which the second bound keeps in its range); code = round half to even of x / scale + zero, clamped. Values
    saturate at 491280, the range of an fp16 scale. A NaN makes scale and zero NaN, so that it propagates.
    """
    x = x.float().clamp(-_INT4_LARGEST, _INT4_LARGEST)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = torch.maximum(quotient(high - low, 15), torch.maximum(low.abs(), high.abs()) / 32768).half()
    scale = torch.where(scale == 0, 1.0, scale)
    zero = ((0.0 - low) / scale.float()).half()
    codes = (x / scale.float() + zero.float()).round().clamp(0, 15).nan_to_num(0.0)
    return codes.int(), scale.squeeze(dim), zero.squeeze(dim)


def write_int8(cache: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Quantise rows [T, Hk, D] into cache int8 [blocks, P, Hk, D] and scales float32 [blocks, P, Hk], in place."""
    codes, scale = encode_int8(rows)
    write_rows(cache, slots, codes)
    write_rows(scales, slots, scale)


def write_int4(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    k_tail: torch.Tensor,
    slots: torch.Tensor,
    seq_ids: torch.Tensor,
) -> None:
    """Quantise key and value [T, Hk, D] into a KIVI cache, in place. Shapes: see kestrel_kvcache.int4_cache_write.

    A page of keys is quantised by the call that fills its row 63: from the rows of this call, and for the others from
    the tail. Rows of pages that stay unfinished go to the tail, one page per sequence.
    """
    _require_int4_page(key_cache)
    tokens, blocks, sequences = slots.shape[0], key_cache.shape[0], k_tail.shape[0]
    if tokens == 0 or blocks == 0 or sequences == 0:
        return
    slots, seq_ids = slots.long(), seq_ids.long()
    valid = (slots >= 0) & (slots < blocks * INT4_PAGE) & (seq_ids >= 0) & (seq_ids < sequences)
    slots = torch.where(valid, slots, -1)
    block, row = slots // INT4_PAGE, slots % INT4_PAGE

    codes, scale, zero = encode_int4(value, -1)
    write_rows(value_cache, slots, pack_int4(codes))
    write_rows(v_scale, slots, scale)
    write_rows(v_zero, slots, zero)

    ordered, order = slots.sort()

    def token_at(slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token of this call with a given slot, and whether there is one."""
        place = torch.searchsorted(ordered, slot).clamp(max=tokens - 1)
        return order[place], (ordered[place] == slot) & (slot >= 0)

    # The finished pages: each holds 64 tokens of this call or began in a tail, which bounds their number.
    most = min(tokens, sequences + tokens // INT4_PAGE)
    finishing = valid & (row == INT4_PAGE - 1)
    last = (~finishing).int().argsort(stable=True)[:most]  # tokens that finish a page, then others
    page = torch.where(finishing[last], block[last], -1)
    rows = torch.arange(INT4_PAGE, device=slots.device)
    source, given = token_at(torch.where(page >= 0, page * INT4_PAGE, -INT4_PAGE)[:, None] + rows)
    before = k_tail[seq_ids[last].clamp(0, sequences - 1)]
    codes, scale, zero = encode_int4(torch.where(given[..., None, None], key[source], before), 1)
    for cache, whole in ((key_cache, pack_int4(codes)), (k_scale, scale), (k_zero, zero)):
        write_rows(cache.unsqueeze(1), page, whole)

    finished = token_at(torch.where(valid, block * INT4_PAGE + INT4_PAGE - 1, -1))[1]
    write_rows(k_tail, torch.where(valid & ~finished, seq_ids * INT4_PAGE + row, -1), key)


def _require_int4_page(key_cache: torch.Tensor) -> None:
    if key_cache.shape[1] != INT4_PAGE:
        raise UnsupportedError(f"INT4 caches have pages of {INT4_PAGE} slots, this one has {key_cache.shape[1]}")


# -- reading ----------------------------------------------------------------------------------------------------------


def read_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_zero: torch.Tensor | None = None,
    v_zero: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    seq_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each sequence as float32 [B, n*P, Hk, D]; arbitrary where keys_present is False."""
    if k_zero is not None:
        assert k_scale is not None
        assert v_scale is not None
        assert v_zero is not None
        _require_int4_page(key_cache)
        codes = unpack_int4(gather_pages(key_cache, block_table), signed=False)
        zero, scale = (gather_pages(x, block_table).unsqueeze(2).float() for x in (k_zero, k_scale))  # [B, n, 1, Hk, D]
        keys = ((codes - zero) * scale).flatten(1, 2)
        keys = _with_tail(keys, lengths, k_tail, seq_ids)
        codes = unpack_int4(gather_pages(value_cache, block_table), signed=False)
        zero, scale = (gather_pages(x, block_table).unsqueeze(-1).float() for x in (v_zero, v_scale))
        return keys, ((codes - zero) * scale).flatten(1, 2)

    def values(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        read = gather_pages(as_fp8(cache), block_table).flatten(1, 2).float()
        if scale is None:
            return read
        if scale.ndim > 1:  # one per token and head
            scale = gather_pages(scale, block_table).flatten(1, 2)
        return read * per_head(scale)

    return values(key_cache, k_scale), values(value_cache, v_scale)


def _with_tail(
    keys: torch.Tensor, lengths: torch.Tensor, k_tail: torch.Tensor | None, seq_ids: torch.Tensor | None
) -> torch.Tensor:
    """keys [B, n*64, Hk, D] with those of each unfinished page taken from the tail."""
    assert k_tail is not None
    assert seq_ids is not None
    if keys.shape[1] == 0 or k_tail.shape[0] == 0:
        return keys
    tail = k_tail[seq_ids.clamp(0, k_tail.shape[0] - 1)].float().repeat(1, keys.shape[1] // INT4_PAGE, 1, 1)
    position = torch.arange(keys.shape[1], device=keys.device)
    unfinished = position >= (lengths // INT4_PAGE * INT4_PAGE)[:, None]
    return torch.where(unfinished[..., None, None], tail, keys)
