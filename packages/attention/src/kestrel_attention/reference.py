"""The attention ops in plain PyTorch: the specification of the kernels.

Every op brings its queries, keys and values into one padded form and calls :func:`attend`. Nothing reads a CUDA tensor
on the host, so every reference can be captured in a CUDA graph. On a CPU sequences of different lengths are read one at
a time, so that short ones need no padding to the longest. How a paged cache is addressed is shared with
kestrel_kvcache, and lives in kestrel_runtime.paged_cache.
"""

from __future__ import annotations

from typing import Any

import torch

from kestrel_runtime import check
from kestrel_runtime.paged_cache import (
    as_bytes,
    as_fp8,
    encode_fp8,
    keys_present,
    per_head,
    read_cache,
    slots_of,
    without_padding,
    write_int4,
    write_int8,
    write_rows,
)

from .arguments import Cached, Dense, Packed, Scores

_KEYS = 256  # of one block
_QUERIES = 32  # of one chunk: a row of scores per head and query is in memory at once, for all keys
_FAR = 2**62  # positions lie below 2**31; callers say "unbounded" with up to 2**63 - 1, which would overflow


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    present: torch.Tensor,
    first: torch.Tensor,
    scores: Scores,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32 over padded sequences: out [B, Sq, H, D] and its log-sum-exp [B, H, Sq].

    q: [B, Sq, H, D]. k, v: [B, L, Hk, D]; query head h reads KV head h // (H / Hk).
    present: bool [B, L], which keys exist; what the others hold has no effect.
    first: integers [B], the key position at which query 0 of each sequence stands.
    sinks: [H], a logit of each head that counts in the sum of exponentials, without a value.

    A row is the same, bit for bit, whatever the batch around it and whatever L. Sums and matrix products of other
    shapes round differently, so those of a sequence are its own, in chunks of _QUERIES queries and blocks of _KEYS
    keys, added in order: a block past its end adds exact zeros.
    """
    batch, queries, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    out = q.new_zeros(batch, kv_heads, heads // kv_heads, queries, size)
    lse = q.new_full(out.shape[:-1], float("-inf"))
    scale = size**-0.5 if scores.softmax_scale is None else scores.softmax_scale
    rows = (q * scale).unflatten(2, out.shape[1:3]).permute(0, 2, 3, 1, 4)  # [B, Hk, H/Hk, Sq, D]
    present = torch.nn.functional.pad(present, (0, _round_up(keys, _KEYS) - keys))
    position = first[:, None, None] + torch.arange(queries, device=q.device)[:, None]  # [B, Sq, 1]
    if sinks is not None:
        sinks = sinks.float().unflatten(0, out.shape[1:3])[..., None, None]  # [Hk, H/Hk, 1, 1]
        lse = lse.maximum(sinks[..., 0])

    for b in range(batch if keys > 0 else 0):
        k_blocks, v_blocks = _blocks(k[b], present[b]), _blocks(v[b], present[b])
        own = _scores_of(scores, b)
        for start in range(0, queries, _QUERIES):
            chunk = slice(start, start + _QUERIES)
            visible = _visible(present[b], position[b, chunk], own)
            out[b, :, :, chunk], lse[b, :, :, chunk] = _attend_chunk(
                rows[b, :, :, chunk], k_blocks, v_blocks, visible, scores.softcap, sinks
            )
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.flatten(1, 2)


def _attend_chunk(
    rows: torch.Tensor,
    k_blocks: list[torch.Tensor],
    v_blocks: list[torch.Tensor],
    visible: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some queries of one sequence: rows [Hk, H/Hk, N, D] over blocks of k and v [Hk, _KEYS, D]."""
    group = rows.shape[1:3]
    flat = rows.flatten(1, 2).clone(memory_format=torch.contiguous_format)  # laid out alike too
    blocks = [flat @ k.mT for k in k_blocks]
    if softcap > 0:
        blocks = [softcap * torch.tanh(block / softcap) for block in blocks]
    scores = torch.where(visible, torch.cat(blocks, dim=-1).unflatten(1, group), float("-inf")).flatten(1, 2)
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.expand(-1, *group, 1).flatten(1, 2)  # [Hk, H/Hk * N, 1]
        largest = torch.maximum(largest, sinks)
    largest = torch.where(largest == float("-inf"), 0.0, largest)  # a row that sees no key
    total = torch.zeros_like(largest) if sinks is None else torch.exp(sinks - largest)
    weighed = torch.zeros_like(flat)
    for block, v in zip(scores.split(_KEYS, -1), v_blocks, strict=True):
        weights = torch.exp(block - largest)
        total = total + weights.sum(-1, keepdim=True)
        weighed = weighed + weights @ v
    out = torch.where(total == 0, 0.0, weighed / total)
    return out.unflatten(1, group), (total.log() + largest).squeeze(-1).unflatten(1, group)


def _blocks(x: torch.Tensor, present: torch.Tensor) -> list[torch.Tensor]:
    """x [L, Hk, D] as blocks [Hk, _KEYS, D] that are all laid out alike, 0 where no key is: by its bits, for NaN."""
    blocks = []
    for part, exists in zip(x.split(_KEYS), present.split(_KEYS), strict=True):
        block = part.new_empty(_KEYS, *part.shape[1:])
        block[: part.shape[0]] = part
        block.view(torch.int32).mul_(exists[:, None, None])  # 5 times as fast as where() on a CPU
        blocks.append(block.transpose(0, 1))
    return blocks


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _visible(present: torch.Tensor, position: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Which keys each query of a sequence sees, bool [N, L]: those in its window (-1 is unbounded) or below the prefix.

    present: bool [L]. position: integers [N, 1].
    """
    left, right = scores.window_left, 0 if scores.causal else scores.window_right
    if left < 0 and right < 0:
        return present.expand(position.shape[0], -1)
    left, right = min(left, _FAR), min(right, _FAR)
    key = torch.arange(present.shape[-1], device=present.device)
    inside = key <= position + right if right >= 0 else key >= position - left
    if left >= 0 and right >= 0:
        inside = inside & (key >= position - left)
    return present & (inside | (key < scores.prefix))


def _decode(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Values or codes [..., heads, D] as float32, times their scale [1] or [heads]."""
    return x.float() if scale is None else x.float() * per_head(scale)


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.element_size() == 1 else q.dtype


# -- over a cache -----------------------------------------------------------------------------------------------------


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend_to_cache(q, k_cache, v_cache, Cached.of(*rest))


def flash_attn_with_kvcache_append(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given = Cached.of(*rest, codes=2)
    lengths = append(k_cache, v_cache, k, v, given)
    return _attend_to_cache(q, k_cache, v_cache, given._replace(cache_seqlens=lengths))


def flash_attn_with_kvcache_append_int(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given = Cached.of(*rest)
    lengths = append_int(k_cache, v_cache, k, v, given)
    return _attend_to_cache(q, k_cache, v_cache, given._replace(cache_seqlens=lengths))


def _attend_to_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: Cached
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _on_host(q) or q.shape[0] == 0:
        return _attend_padded(q, k_cache, v_cache, given)
    parts = [
        _attend_padded(q[b : b + 1], *_of_sequence(k_cache, v_cache, given, b, length))
        for b, length in enumerate(given.cache_seqlens.tolist())
    ]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def _of_sequence(
    k_cache: torch.Tensor, v_cache: torch.Tensor, given: Cached, b: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, Cached]:
    """The arguments of sequence b alone, with the pages that its length needs."""
    one, codes, table = slice(b, b + 1), given.codes, given.block_table
    if table is None:
        keys = slice(None) if codes.k_zero is not None else slice(0, max(length, 1))  # INT4 has whole pages
        k_cache, v_cache = k_cache[one, keys], v_cache[one, keys]
        of_keys = {name: x for name, x in codes._asdict().items() if x is not None and x.ndim == 3}
        codes = codes._replace(**{name: x[one, keys] for name, x in of_keys.items()})
    else:
        table = table[one, : _round_up(max(length, 0), k_cache.shape[1]) // k_cache.shape[1]]
    if codes.seq_ids is not None:
        codes = codes._replace(seq_ids=codes.seq_ids[one])
    scores, lengths = _scores_of(given.scores, b), given.cache_seqlens[one]
    return k_cache, v_cache, given._replace(cache_seqlens=lengths, block_table=table, codes=codes, scores=scores)


def _scores_of(scores: Scores, b: int) -> Scores:
    """Those of sequence b."""
    return scores if scores.prefix_lens is None else scores._replace(prefix_lens=scores.prefix_lens[b : b + 1])


def _on_host(q: torch.Tensor) -> bool:
    """Whether lengths may be read here."""
    return q.is_cpu and check.has_memory(q)


def _attend_padded(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: Cached
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = without_padding(given.cache_seqlens, given.codes.k_tail, given.codes.seq_ids)
    k, v = read_cache(k_cache, v_cache, given.block_table, lengths, *given.codes)
    present = keys_present(lengths, given.block_table, *k_cache.shape[:2])
    out, lse = attend(q.float(), k, v, present, lengths - q.shape[1], given.scores, given.sinks)
    return out.to(q.dtype), lse


def append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Cached
) -> torch.Tensor:
    """Write new keys and values into a cache of values or FP8, in place; the new lengths."""
    slots, lengths = _append_at(given.cache_seqlens, k.shape[1], given.block_table, k_cache.shape[1])
    for new, cache, scale in ((k, k_cache, given.codes.k_scale), (v, v_cache, given.codes.v_scale)):
        cache, rows = as_fp8(cache), new.flatten(0, 1)
        write_rows(cache, slots, rows if cache.dtype == rows.dtype else encode_fp8(rows, scale, cache.dtype))
    return lengths


def append_int(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Cached
) -> torch.Tensor:
    """Write new keys and values into a cache of INT8 or INT4, with their scales, in place; the new lengths."""
    codes = given.codes
    cache_seqlens = without_padding(given.cache_seqlens, codes.k_tail, codes.seq_ids)
    slots, lengths = _append_at(cache_seqlens, k.shape[1], given.block_table, k_cache.shape[1])
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    if codes.seq_ids is None:
        write_int8(k_cache, codes.k_scale, slots, keys)
        write_int8(v_cache, codes.v_scale, slots, values)
    else:
        caches = k_cache, v_cache, codes.k_scale, codes.k_zero, codes.v_scale, codes.v_zero, codes.k_tail
        write_int4(keys, values, *caches, slots, codes.seq_ids.repeat_interleave(k.shape[1]))
    return lengths


def _append_at(
    cache_seqlens: torch.Tensor, added: int, block_table: torch.Tensor | None, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots [B * added] of new keys (-1 for padding and where there is no page), and the new lengths [B]."""
    padding = cache_seqlens < 0
    positions = cache_seqlens[:, None] + torch.arange(added, device=cache_seqlens.device)
    positions = torch.where(padding[:, None], -1, positions)
    lengths = torch.where(padding, cache_seqlens.long(), cache_seqlens.long() + added)
    return slots_of(positions, block_table, page).flatten(), lengths


# -- dense and packed -------------------------------------------------------------------------------------------------


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = Dense.of(*rest)
    batch, keys = k.shape[:2]
    decoded = [_decode(x, scale) for x, scale in zip((q, k, v), given.scales, strict=True)]
    present = torch.ones(batch, keys, dtype=torch.bool, device=q.device)
    first = torch.full((batch,), keys - q.shape[1], device=q.device)
    out, lse = attend(*decoded, present, first, given.scores, given.sinks)
    return out.to(_out_dtype(q)), lse


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given = Packed.of(*rest)
    cu_seqlens_q, cu_seqlens_k = given.cu_seqlens_q, given.cu_seqlens_k
    total, heads, _ = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    out = q.new_zeros(q.shape, dtype=_out_dtype(q))
    lse = q.new_full((heads, total), float("-inf"), dtype=torch.float32)
    if total == 0 or batch == 0 or given.max_seqlen_q == 0:
        return out, lse
    if not _on_host(q):
        return _attend_packed(q, k, v, given)

    starts_q = cu_seqlens_q.tolist()
    starts_k = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
    for b in range(batch):
        rows, one = slice(*starts_q[b : b + 2]), slice(b, b + 1)
        if q[rows].shape[0] == 0:
            continue
        keys = slice(None) if given.block_table is not None else slice(*starts_k[b : b + 2])
        held = starts_k[b + 1] - starts_k[b] if given.seqused_k is None else int(given.seqused_k[b])
        alone = given._replace(
            cu_seqlens_q=cu_seqlens_q[b : b + 2] - starts_q[b],
            cu_seqlens_k=None if starts_k is None else cu_seqlens_k[b : b + 2] - starts_k[b],
            max_seqlen_k=min(given.max_seqlen_k, max(held, 0)),
            scores=_scores_of(given.scores, b),
            block_table=None if given.block_table is None else given.block_table[one],
            seqused_k=None if given.seqused_k is None else given.seqused_k[one],
        )
        out[rows], lse[:, rows] = _attend_packed(q[rows], k[keys], v[keys], alone)
    return out, lse


def _attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Packed
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences padded to the longest, and back."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = given[:4]
    scales, total, batch = given.scales, q.shape[0], cu_seqlens_q.shape[0] - 1
    max_seqlen_q = min(max_seqlen_q, total)  # bounds may be far above what the tensors hold
    lengths_q = cu_seqlens_q.diff()
    lengths_k = cu_seqlens_k.diff() if given.seqused_k is None else given.seqused_k
    if given.block_table is None:
        max_seqlen_k = min(max_seqlen_k, k.shape[0])
        lengths_k = torch.minimum(lengths_k, cu_seqlens_k.diff())
        present = torch.arange(max_seqlen_k, device=q.device) < lengths_k[:, None]
        k = _decode(_unpack(k, cu_seqlens_k, max_seqlen_k), scales.k_scale)
        v = _decode(_unpack(v, cu_seqlens_k, max_seqlen_k), scales.v_scale)
    else:
        table = given.block_table[:, : -(-max_seqlen_k // k.shape[1])]
        held = lengths_k.clamp(max=min(max_seqlen_k, 2**31 - 1))
        present = keys_present(held, table, *k.shape[:2])
        k, v = read_cache(k, v, table, held, scales.k_scale, scales.v_scale)

    rows = _unpack(q, cu_seqlens_q, _round_up(max_seqlen_q, _QUERIES))  # whole chunks, see attend
    first = lengths_k - lengths_q
    out, lse = attend(_decode(rows, scales.q_scale), k, v, present, first, given.scores, given.sinks)
    # Back to packed rows; those that belong to no sequence stay 0 and -inf.
    token = torch.arange(total, device=q.device, dtype=cu_seqlens_q.dtype)
    sequence = (torch.searchsorted(cu_seqlens_q, token, right=True) - 1).clamp(0, batch - 1)
    index = token - cu_seqlens_q[sequence]
    owned = (index >= 0) & (index < lengths_q[sequence]) & (index < max_seqlen_q)
    index = index.clamp(0, max_seqlen_q - 1)
    packed = torch.where(owned[:, None, None], out[sequence, index], 0.0)
    packed_lse = torch.where(owned, lse[sequence, :, index].T, float("-inf"))
    return packed.to(_out_dtype(q)), packed_lse


def _unpack(x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Packed rows [total, heads, D] as padded sequences [B, longest, heads, D]; padding holds some row."""
    starts = cu_seqlens[:-1, None]
    if x.shape[0] == 0:
        return x.new_zeros(starts.shape[0], longest, *x.shape[1:])
    rows = (starts + torch.arange(longest, device=x.device)).clamp(0, x.shape[0] - 1)
    return as_bytes(x)[rows].view(x.dtype)


# -- shapes, for fake tensors: the references above loop over sequences, which would fix B in a trace ------------------


def padded_shapes(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = q.shape
    out = torch.empty_like(q, dtype=_out_dtype(q), memory_format=torch.contiguous_format)
    return out, q.new_empty((batch, heads, queries), dtype=torch.float32)


def packed_shapes(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    total, heads, _ = q.shape
    out = torch.empty_like(q, dtype=_out_dtype(q), memory_format=torch.contiguous_format)
    return out, q.new_empty((heads, total), dtype=torch.float32)


# -- around attention -------------------------------------------------------------------------------------------------


def tau_tail(
    qkv: torch.Tensor,
    tok_qv_linear: torch.Tensor,
    tau_pos_table: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    head_size: int,
) -> None:
    max_position = tau_pos_table.shape[0]
    if max_position == 0:
        return
    heads = qkv.unflatten(-1, (-1, head_size))  # [T, H + 2 Hk, D]
    kv_heads = (heads.shape[1] - num_heads) // 2
    at = tau_pos_table[positions.clamp(0, max_position - 1)].float()
    if at.shape[1] == num_heads:  # one table for q and v
        at = torch.cat((at, at), dim=1)
    scale = torch.tanh(tok_qv_linear.float()) + at
    valid = ((positions >= 0) & (positions < max_position))[:, None, None]
    for part, s in (
        (heads[:, :num_heads], scale[:, :num_heads]),
        (heads[:, num_heads + kv_heads :], scale[:, num_heads:]),
    ):
        scaled = (part.float() * s.unsqueeze(-1)).to(part.dtype)
        part.copy_(torch.where(valid, scaled, part))


def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = torch.exp(lse_a - largest), torch.exp(lse_b - largest)
    total = weight_a + weight_b
    merged = torch.zeros_like(out_a, dtype=torch.float32)
    for out, weight in ((out_a, weight_a), (out_b, weight_b)):
        share = (weight / total).T.unsqueeze(-1)  # [T, H, 1]
        merged = merged + torch.where((weight == 0).T.unsqueeze(-1), 0.0, share * out.float())
    return merged.to(out_a.dtype), total.log() + largest
