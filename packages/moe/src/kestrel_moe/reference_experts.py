"""The PyTorch reference of routed experts: alignment of tokens to experts, and the layer over the aligned blocks.

A (token, choice) pair has the flat index ``t * K + j``. Pairs are grouped by expert and every group is padded to whole
blocks, so that each block belongs to one expert. The number of blocks is bounded by T, K and E alone: nothing here
reads a tensor on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kestrel_quant.reference import fp8_quant

from .reference import gated, topk_softmax

_CHUNK_BYTES = 4 * 2**20  # float32 weights gathered at a time: they fit a CPU cache
_LARGEST_BLOCK = 128


def local_experts(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """int64 indices into the local weights; -1 for a pair to skip: id negative, past the end, or mapped elsewhere."""
    ids = ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        mapped = F.pad(expert_map.long(), (0, 1), value=-1)  # one more entry, for ids outside the map
        ids = mapped[torch.where(known, ids, expert_map.shape[0])]
    return torch.where((ids >= 0) & (ids < experts), ids, -1)


def most_blocks(pairs: int, experts: int, block_size: int) -> int:
    """No routing of so many pairs fills more blocks than this."""
    return (pairs + min(pairs, experts) * (block_size - 1)) // block_size


def align(ids: torch.Tensor, experts: int, block_size: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """Group flat pair indices by expert, each group padded to a multiple of block_size.

    ids: int64, -1..experts-1 (-1: dropped). Returns (pair at each position [blocks * block_size], ascending within an
    expert and ``ids.numel()`` in padding; expert of each block [blocks], -1 past the end; padded length [1]), int64.
    Pairs that do not fit into so many blocks are dropped. Memory is proportional to pairs and positions: ``experts``
    may be any number.
    """
    flat = ids.flatten()
    pairs, positions = flat.numel(), blocks * block_size
    key, order = torch.where(flat < 0, experts, flat).sort(stable=True)  # dropped pairs come last
    starts_group = F.pad(key[1:] != key[:-1], (1, 0), value=True)[:pairs]
    group = starts_group.cumsum(0) - 1  # of each sorted pair; at most `pairs` groups
    zeros = group.new_zeros(pairs)
    counts = zeros.scatter_add(0, group, (key < experts).long())  # a group of dropped pairs counts none
    expert = zeros.scatter(0, group, key)
    ends = ((counts + block_size - 1) // block_size * block_size).cumsum(0)
    length = F.pad(ends, (1, 0))[-1:]

    start = F.pad(ends, (1, 0))[:pairs]  # position of each group
    rank = torch.arange(pairs, device=flat.device) - (counts.cumsum(0) - counts)[group]
    position = torch.where(key < experts, start[group] + rank, positions)
    sorted_pairs = torch.full((positions + 1,), pairs, dtype=torch.int64, device=flat.device)
    sorted_pairs = sorted_pairs.scatter(0, position.clamp(max=positions), order)[:positions]

    first = torch.arange(blocks, device=flat.device) * block_size
    block_group = torch.searchsorted(ends, first, right=True)
    expert = F.pad(expert, (0, 1), value=-1)[block_group]
    return sorted_pairs, torch.where(first < length, expert, -1), length


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Write the alignment of all pairs into the three outputs."""
    ids = _known_experts(topk_ids, num_experts, expert_map)
    blocks = most_blocks(ids.numel(), num_experts, block_size)
    pairs, experts, length = align(ids, num_experts, block_size, blocks)
    sorted_token_ids.fill_(ids.numel())
    sorted_token_ids[: pairs.numel()] = pairs.to(torch.int32)
    expert_ids.fill_(-1)
    expert_ids[:blocks] = _mapped(experts, expert_map)
    num_tokens_post_pad.copy_(length)


def moe_lora_align_block_size(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    adapter_enabled: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """The same, once per adapter over its own tokens; a disabled adapter's outputs stay as they are."""
    outputs = (sorted_token_ids, expert_ids, num_tokens_post_pad)
    for adapter in range(max_loras):
        own = torch.where((token_lora_mapping == adapter).unsqueeze(1), topk_ids, -1)
        fresh = [torch.empty_like(output[adapter : adapter + 1].flatten()) for output in outputs]
        moe_align_block_size(own, num_experts, block_size, *fresh, expert_map)
        enabled = adapter_enabled[adapter] != 0
        for output, new in zip(outputs, fresh, strict=True):
            output[adapter] = torch.where(enabled, new.view(output[adapter].shape), output[adapter])


def route_and_align(
    logits: torch.Tensor,
    k: int,
    block_size: int,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_softmax, then the alignment of its ids."""
    weights, ids, _ = topk_softmax(logits, k, renormalize, bias)
    experts = logits.shape[1]
    blocks = most_blocks(ids.numel(), experts, block_size)
    pairs, block_experts, length = align(_known_experts(ids, experts, expert_map), experts, block_size, blocks)
    return weights, ids, pairs.to(torch.int32), _mapped(block_experts, expert_map), length.to(torch.int32)


def _known_experts(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """int64 ids; -1 where they are negative, past the end, or mapped to a negative number."""
    known = (ids >= 0) & (ids < experts)
    if expert_map is not None:
        known = known & (expert_map[torch.where(known, ids, 0).long()] >= 0)
    return torch.where(known, ids, -1).long()


def _mapped(block_experts: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """The expert of each block as its index in the local weights, int32; -1 stays."""
    if expert_map is not None:
        block_experts = torch.where(block_experts >= 0, expert_map[block_experts.clamp(min=0)], -1)
    return block_experts.to(torch.int32)


def invoke_cute_moe_up(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Row t*K+j holds [x @ w1[e].T, x @ w2[e].T]."""
    blocks = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    parts = [_over_blocks(hidden_states, None, w, None, topk_ids.shape[1], *blocks) for w in (w1, w2) if w is not None]
    return torch.cat(parts, dim=1).to(hidden_states.dtype)


def invoke_cute_moe_up_fp8(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """The same with FP8 operands, in bf16."""
    blocks = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    pairs = [(w, s) for w, s in ((w1, w1_scale), (w2, w2_scale)) if w is not None]
    parts = [_over_blocks(x_q, x_scale, w, scale, topk_ids.shape[1], *blocks) for w, scale in pairs]
    return torch.cat(parts, dim=1).to(torch.bfloat16)


def invoke_cute_moe_down(
    moe_out: torch.Tensor,
    w3: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Each pair's row times its expert, times its router weight."""
    blocks = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    rows = _over_blocks(moe_out, None, w3, None, 1, *blocks, topk_weights)
    return rows.view(*topk_ids.shape, w3.shape[1]).to(moe_out.dtype)


def invoke_cute_moe_down_fp8(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    w3: torch.Tensor,
    w3_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """The same with FP8 operands, in bf16."""
    blocks = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    rows = _over_blocks(x_q, x_scale, w3, w3_scale, 1, *blocks, topk_weights)
    return rows.view(*topk_ids.shape, w3.shape[1]).to(torch.bfloat16)


def _over_blocks(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    pairs_per_row: int,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [T * K, N]: each pair's row of x times its block's expert; rows of pairs in no block are zero."""
    count, width, blocks = topk_ids.numel(), weight.shape[1], expert_ids.shape[0]
    results = torch.zeros((count + 1, width), dtype=torch.float32, device=x.device)
    if count == 0:
        return results[:0]
    positions = torch.arange(blocks * block_size, device=x.device)
    pairs = F.pad(sorted_token_ids.long(), (0, blocks * block_size), value=count)[: blocks * block_size]
    expert = torch.where((expert_ids >= 0) & (expert_ids < weight.shape[0]), expert_ids, -1).long()
    named = (pairs >= 0) & (pairs < count) & (positions < num_tokens_post_pad) & (expert[positions // block_size] >= 0)
    pairs = torch.where(named, pairs, count)  # the last row receives the results of padding

    step = max(1, _CHUNK_BYTES // (4 * weight[0].numel()))
    for start in range(0, blocks, step):
        pair = pairs[start * block_size : (start + step) * block_size]
        row = (pair // pairs_per_row).clamp(max=x.shape[0] - 1)
        operand = x.view(torch.uint8)[row].view(x.dtype) if x.dtype == torch.float8_e4m3fn else x[row]
        row_scale = None if x_scale is None else x_scale[row]
        chunk = expert[start : start + step].clamp(min=0)
        results.index_copy_(0, pair, _grouped(operand.float(), row_scale, weight, scale, chunk))
    results = results[:count]
    if topk_weights is None:
        return results
    reached = torch.zeros(count + 1, dtype=torch.bool, device=x.device).index_fill_(0, pairs, True)[:count, None]
    return torch.where(reached, results * topk_weights.reshape(-1, 1), 0.0)


def fused_experts(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "gelu_residual",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole layer: gather, up, activation, down, weighted sum over the choices in their order."""
    tokens, choices = topk_ids.shape
    pairs, experts, width = tokens * choices, w1.shape[0], w2.shape[1]
    if pairs == 0:
        return hidden.new_zeros((tokens, width))
    ids = local_experts(topk_ids, experts, expert_map)
    # Up to 16 tokens every pair is a block of its own; beyond, blocks hold several pairs of one expert.
    block_size = 1 if tokens <= 16 else min(_LARGEST_BLOCK, 1 << (pairs // experts).bit_length())
    blocks = most_blocks(pairs, experts, block_size)
    sorted_pairs, block_experts, _ = align(ids, experts, block_size, blocks)

    inputs, input_scale = _operand(hidden, w1_scale, blocks=w1_scale is not None and w1_scale.ndim == 3)
    results = torch.zeros((pairs + 1, width), dtype=torch.float32, device=hidden.device)
    step = max(1, _CHUNK_BYTES // (4 * max(w1[0].numel(), w2[0].numel())))
    for start in range(0, blocks, step):
        expert = block_experts[start : start + step].clamp(min=0)  # the products of padding go to row `pairs`
        pair = sorted_pairs[start * block_size : (start + step) * block_size]
        token = (pair // choices).clamp(max=tokens - 1)
        up = _grouped(inputs[token], None if input_scale is None else input_scale[token], w1, w1_scale, expert)
        inner = gated(up, activation)
        inner = inner if w2_scale is not None else inner.to(hidden.dtype)
        inner, inner_scale = _operand(inner, w2_scale, blocks=True)
        results.index_copy_(0, pair, _grouped(inner, inner_scale, w2, w2_scale, expert))

    weighted = results[:pairs].view(tokens, choices, width) * topk_weights.unsqueeze(2)
    weighted = torch.where((ids >= 0).unsqueeze(2), weighted, 0.0)
    total = weighted[:, 0]
    for choice in range(1, choices):
        total = total + weighted[:, choice]
    return total.to(hidden.dtype)


def _operand(
    x: torch.Tensor, weight_scale: torch.Tensor | None, blocks: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x as the left operand of a product: float32 as it is, or FP8 codes (as float32) with one scale per row.

    With ``blocks`` x has a scale per row and 128 columns, which its values here include.
    """
    if weight_scale is None:
        return x.float(), None
    if blocks:
        codes, scale = fp8_quant(x, granularity="group", group_size=128)
        return codes.float() * scale.repeat_interleave(128, dim=1)[:, : x.shape[1]], None
    codes, scale = fp8_quant(x)
    return codes.float(), scale


def _grouped(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    expert: torch.Tensor,
) -> torch.Tensor:
    """x [blocks * b, K] times the weight [N, K] of each block's expert: float32 [blocks * b, N]."""
    gathered = _gather(weight, expert)
    if scale is not None and scale.ndim == 3:  # one scale per 128 x 128 tile
        tiles = scale[expert].repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
        gathered = gathered * tiles[:, : weight.shape[1], : weight.shape[2]]
    y = torch.bmm(x.view(expert.shape[0], -1, x.shape[1]), gathered.transpose(1, 2))
    if scale is not None and scale.ndim < 3:  # one per expert, or one per expert and output
        y = y * scale[expert].view(expert.shape[0], 1, -1)
    y = y.flatten(0, 1)
    return y if x_scale is None else y * x_scale


def _gather(weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """weight[expert] in float32."""
    if weight.dtype != torch.float8_e4m3fn:
        return weight.index_select(0, expert).float()
    # A table of the 256 values: on a CPU four times as fast as converting.
    values = torch.arange(256, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn).float()
    codes = weight.view(torch.uint8).index_select(0, expert)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)
