"""Grouping of (token, choice) pairs by expert, in blocks, as grouped matrix products read them."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, allocator, check, kernel_op

from . import reference_experts
from .reference_experts import most_blocks
from .topk_softmax import launch as launch_topk

_kernels = Binary("kestrel_moe")
# The largest case that one launch routes and aligns.
_MAX_FUSED_TOKENS, _MAX_FUSED_LOGITS = 16, 2048
_MAX_COUNT = 2**31 - 1  # expert ids and positions are int32


def _check_ids(
    op: str, topk_ids: torch.Tensor, num_experts: int, block_size: int, expert_map: torch.Tensor | None
) -> None:
    check.tensor(op, "topk_ids", topk_ids, dtype=check.INTEGERS, ndim=2, last_contiguous=True)
    check.number(op, "num_experts", num_experts, integer=True, minimum=1, maximum=_MAX_COUNT)
    check.number(op, "block_size", block_size, integer=True, minimum=1, maximum=_MAX_COUNT)
    _check_map(op, num_experts, expert_map)
    check.same(op, "device", topk_ids=topk_ids, expert_map=expert_map)


def _check_map(op: str, experts: int, expert_map: torch.Tensor | None) -> None:
    if expert_map is not None:
        check.tensor(op, "expert_map", expert_map, dtype=torch.int32, last_contiguous=True)
        check.shape(op, "expert_map", expert_map, (experts,))


def _check_buffer(
    op: str, name: str, value: torch.Tensor, leading: tuple[int, ...], least: int, ids: torch.Tensor
) -> None:
    """An int32 output [..., at least `least`] with these leading dimensions."""
    check.tensor(op, name, value, dtype=torch.int32, ndim=len(leading) + 1, last_contiguous=True)
    check.shape(op, name, value, (*leading, None))
    if value.shape[-1] < least:
        check.fail(op, name, f"at least {least} elements (the most these ids can need)", value.shape[-1])
    check.disjoint(op, name, value)
    check.same(op, "device", topk_ids=ids, **{name: value})


def _check_moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    op = "moe_align_block_size"
    _check_ids(op, topk_ids, num_experts, block_size, expert_map)
    blocks = most_blocks(topk_ids.numel(), num_experts, block_size)
    _check_buffer(op, "sorted_token_ids", sorted_token_ids, (), blocks * block_size, topk_ids)
    _check_buffer(op, "expert_ids", expert_ids, (), blocks, topk_ids)
    _check_buffer(op, "num_tokens_post_pad", num_tokens_post_pad, (), 1, topk_ids)
    check.shape(op, "num_tokens_post_pad", num_tokens_post_pad, (1,))


@kernel_op(
    reference=reference_experts.moe_align_block_size,
    check=_check_moe_align_block_size,
    kernel="cuda",
    mutates=("sorted_token_ids", "expert_ids", "num_tokens_post_pad"),
)
def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Sort pairs by expert and pad each expert to whole blocks, in place in the three outputs.

    topk_ids: int32 or int64 [T, K]; the pair (t, j) has the flat index t * K + j. Ids that are negative, >= num_experts
    or mapped to a negative number are dropped. expert_map: int32 [num_experts], the index of each expert in the local
    weights, -1 for experts on other devices. num_experts, block_size: 1 to 2^31 - 1.

    Written in place, all int32:
    sorted_token_ids: [S], flat indices grouped by ascending expert and ascending within one, each group padded to a
        multiple of block_size with T * K; the rest is T * K.
    expert_ids: [M], the expert of each block (``expert_map[e]`` with a map), -1 past the end.
    num_tokens_post_pad: [1], the padded length.

    With B = (T*K + min(T*K, num_experts) * (block_size - 1)) // block_size, the most blocks that can be needed, S must
    be at least B * block_size and M at least B; vLLM's buffers are large enough. Reads nothing on the host. One
    launch at every size, for up to 4901 experts; the result is the same bit for bit however the work is split.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, or too small a buffer.
    Semantics: vLLM's moe_align_block_size.

    >>> outputs = [torch.empty(n, dtype=torch.int32) for n in (6, 3, 1)]
    >>> moe_align_block_size(torch.tensor([[1], [0], [1]]), 2, 2, *outputs)
    >>> [output.tolist() for output in outputs]
    [[1, 3, 0, 2, 3, 3], [0, 1, -1], [4]]
    """
    _kernels.moe_align_block_size(
        topk_ids, num_experts, block_size, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map
    )


def _check_moe_lora_align_block_size(
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
    op = "moe_lora_align_block_size"
    _check_ids(op, topk_ids, num_experts, block_size, expert_map)
    check.tensor(op, "token_lora_mapping", token_lora_mapping, dtype=torch.int32, last_contiguous=True)
    check.shape(op, "token_lora_mapping", token_lora_mapping, (topk_ids.shape[0],))
    check.number(op, "max_loras", max_loras, integer=True, minimum=1)
    blocks = most_blocks(topk_ids.numel(), num_experts, block_size)
    _check_buffer(op, "sorted_token_ids", sorted_token_ids, (max_loras,), blocks * block_size, topk_ids)
    _check_buffer(op, "expert_ids", expert_ids, (max_loras,), blocks, topk_ids)
    _check_buffer(op, "num_tokens_post_pad", num_tokens_post_pad, (), max_loras, topk_ids)
    check.shape(op, "num_tokens_post_pad", num_tokens_post_pad, (max_loras,))
    check.tensor(op, "adapter_enabled", adapter_enabled, dtype=(torch.int32, torch.bool), last_contiguous=True)
    check.shape(op, "adapter_enabled", adapter_enabled, (max_loras,))
    check.same(op, "device", topk_ids=topk_ids, token_lora_mapping=token_lora_mapping, adapter_enabled=adapter_enabled)


@kernel_op(
    reference=reference_experts.moe_lora_align_block_size,
    check=_check_moe_lora_align_block_size,
    kernel="cuda",
    mutates=("sorted_token_ids", "expert_ids", "num_tokens_post_pad"),
)
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
    """One alignment per LoRA adapter, each over the tokens of that adapter, in place in the three outputs.

    topk_ids, num_experts, block_size, expert_map: as in :func:`moe_align_block_size`.
    token_lora_mapping: int32 [T], the adapter of each token; a value outside 0..max_loras-1 stands for no adapter.
    adapter_enabled: bool or int32 [max_loras]; the outputs of a disabled adapter stay untouched.

    Written in place, int32: sorted_token_ids [max_loras, S], expert_ids [max_loras, M], num_tokens_post_pad
    [max_loras], each row as moe_align_block_size writes it; flat indices count all T * K pairs. S and M have the same
    lower bounds. Reads nothing on the host.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, or too small a buffer.
    Semantics: vLLM's moe_lora_align_block_size, with outputs of two dimensions.

    >>> outputs = [torch.zeros(s, dtype=torch.int32) for s in ((2, 4), (2, 2), (2,))]
    >>> ids, mapping = torch.tensor([[0], [1]]), torch.tensor([1, -1], dtype=torch.int32)
    >>> moe_lora_align_block_size(ids, mapping, 2, 2, 2, *outputs, torch.tensor([False, True]))
    >>> [output.tolist() for output in outputs]
    [[[0, 0, 0, 0], [0, 2, 2, 2]], [[0, 0], [0, -1]], [0, 2]]
    """
    _kernels.moe_lora_align_block_size(
        topk_ids,
        token_lora_mapping,
        num_experts,
        block_size,
        max_loras,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        adapter_enabled,
        expert_map,
    )


def _check_route_and_align(
    logits: torch.Tensor,
    k: int,
    block_size: int,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    op = "route_and_align"
    check.tensor(op, "logits", logits, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    experts = logits.shape[1]
    check.number(op, "k", k, integer=True, minimum=1)
    if k > experts:
        check.fail(op, "k", f"at most the {experts} experts", k)
    check.number(op, "block_size", block_size, integer=True, minimum=1, maximum=_MAX_COUNT)
    check.flag(op, "renormalize", renormalize)
    if bias is not None:
        check.tensor(op, "bias", bias, dtype=check.FLOATS, last_contiguous=True)
        check.shape(op, "bias", bias, (experts,))
    _check_map(op, experts, expert_map)
    check.same(op, "device", logits=logits, bias=bias, expert_map=expert_map)


@kernel_op(reference=reference_experts.route_and_align, check=_check_route_and_align, kernel="cuda")
def route_and_align(
    logits: torch.Tensor,
    k: int,
    block_size: int,
    *,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose k experts for each token and align the choices: topk_softmax and moe_align_block_size in one call.

    Up to 16 tokens and 2048 logits it is one launch, beyond that two.

    logits: [T, E] float32, bf16 or fp16. k: 1..E. renormalize, bias: as in :func:`topk_softmax`.
    block_size, expert_map (int32 [E]): as in :func:`moe_align_block_size`.

    Returns (weights float32 [T, k], ids int32 [T, k], sorted_token_ids int32 [B * block_size], expert_ids int32 [B],
    num_tokens_post_pad int32 [1]) with B = (T*k + min(T*k, E) * (block_size - 1)) // block_size. ids are the choices
    before the map. Reads nothing on the host.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, and for k > E.
    Semantics: topk_softmax, then moe_align_block_size, of vLLM.

    >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    >>> weights, ids, sorted_token_ids, expert_ids, length = route_and_align(logits, 1, 2)
    >>> ids.tolist(), sorted_token_ids.tolist(), expert_ids.tolist(), length.tolist()
    ([[1], [0]], [1, 2, 0, 2], [0, 1], [4])
    """
    tokens, experts = logits.shape
    blocks, new, int32 = most_blocks(tokens * k, experts, block_size), allocator(logits), torch.int32
    aligned = new((blocks * block_size,), (1,), int32), new((blocks,), (1,), int32), new((1,), (1,), int32)
    if tokens > _MAX_FUSED_TOKENS or logits.numel() > _MAX_FUSED_LOGITS:
        weights, ids, _ = launch_topk(logits, k, renormalize, bias)
        _kernels.moe_align_block_size(ids, experts, block_size, *aligned, expert_map)
        return weights, ids, *aligned
    weights, ids = new((tokens, k), (k, 1), torch.float32), new((tokens, k), (k, 1), int32)
    _kernels.route_and_align(weights, ids, *aligned, logits, k, block_size, renormalize, bias, expert_map)
    return weights, ids, *aligned
