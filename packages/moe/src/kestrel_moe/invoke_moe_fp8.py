"""The grouped matrix products of routed experts with FP8 operands."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference_experts
from ._checks import check_out
from .fused_experts import check_weight_scale
from .invoke_moe import block_size_of, check_blocks, check_operands, check_topk_weights

_kernels = Binary("kestrel_moe")


def invoke_cute_moe_up_fp8(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    *,
    block_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`invoke_cute_moe_up` with FP8 operands and a bf16 result.

    x_q: float8_e4m3fn [T, Hd], x_scale: float32 [T, 1]. w1, w2: float8_e4m3fn [E, I, Hd] (w2=None: w1 is [E, 2I, Hd]
    and w2_scale is None). w1_scale, w2_scale: float32 [E], [E, N] or [E, ceil(N/128), ceil(Hd/128)], told apart by
    shape; value = code * scale. *Constant*: weights and their scales. The other arguments as there.

    Returns bf16 [T*K, 2I], in ``out`` if it is given; rows of skipped pairs are zero.

    Raises ValueError or TypeError as :func:`invoke_cute_moe_up` does. Semantics: kestrel-kernels 0.2.

    >>> from kestrel_moe import route_and_align
    >>> weights, ids, *aligned = route_and_align(torch.tensor([[0.0, 9.0]]), 1, 16)
    >>> w1 = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]).to(torch.float8_e4m3fn)
    >>> x, one, scale = torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1, 1), torch.tensor([1.0, 0.5])
    >>> invoke_cute_moe_up_fp8(x, one, w1, scale, None, None, None, ids, *aligned, block_size=16).tolist()
    [[1.5, 2.0]]
    """
    block_size = block_size_of("invoke_cute_moe_up_fp8", block_size, sorted_token_ids, expert_ids)
    aligned = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    return _invoke_cute_moe_up_fp8(x_q, x_scale, w1, w1_scale, w2, w2_scale, *aligned, out=out)


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
    *,
    block_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`invoke_cute_moe_down` with FP8 operands and a bf16 result.

    x_q: float8_e4m3fn [T*K, I], x_scale: float32 [T*K, 1]. w3: float8_e4m3fn [E, Hd, I], w3_scale: float32 [E], [E, Hd]
    or [E, ceil(Hd/128), ceil(I/128)], told apart by shape. *Constant*: w3, w3_scale. The other arguments as there.

    Returns bf16 [T, K, Hd], in ``out`` if it is given; skipped pairs are zero.

    Raises ValueError or TypeError as :func:`invoke_cute_moe_up` does. Semantics: kestrel-kernels 0.2.

    >>> from kestrel_moe import route_and_align
    >>> weights, ids, *aligned = route_and_align(torch.tensor([[0.0, 9.0]]), 1, 16)
    >>> w3, scale = torch.tensor([[[1.0]], [[3.0]]]).to(torch.float8_e4m3fn), torch.tensor([1.0, 0.5])
    >>> x, two = torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor([[2.0]])
    >>> round(invoke_cute_moe_down_fp8(x, two, w3, scale, weights, ids, *aligned, block_size=16).item(), 2)
    3.0
    """
    block_size = block_size_of("invoke_cute_moe_down_fp8", block_size, sorted_token_ids, expert_ids)
    aligned = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    return _invoke_cute_moe_down_fp8(x_q, x_scale, w3, w3_scale, topk_weights, *aligned, out=out)


def _check_scale(op: str, name: str, scale: torch.Tensor | None, weight: torch.Tensor | None, weight_name: str) -> None:
    if weight is None:
        if scale is not None:
            check.fail(op, name, f"None without {weight_name}", "scales")
        return
    check_weight_scale(op, name, scale, weight)
    check.same(op, "device", **{weight_name: weight, name: scale})


def _check_invoke_cute_moe_up_fp8(
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
    out: torch.Tensor | None = None,
) -> None:
    op = "invoke_cute_moe_up_fp8"
    check.tensor(op, "x_q", x_q, ndim=2)
    check.tensor(op, "x_scale", x_scale)
    check_blocks(op, x_q, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    tokens, choices = topk_ids.shape
    width = check_operands(op, "x_q", x_q, x_scale, tokens, {"w1": w1, "w2": w2})
    _check_scale(op, "w1_scale", w1_scale, w1, "w1")
    _check_scale(op, "w2_scale", w2_scale, w2, "w2")
    check_out(op, out, (tokens * choices, width), x_q, dtype=torch.bfloat16)


def _check_invoke_cute_moe_down_fp8(
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
    out: torch.Tensor | None = None,
) -> None:
    op = "invoke_cute_moe_down_fp8"
    check.tensor(op, "x_q", x_q, ndim=2)
    check.tensor(op, "x_scale", x_scale)
    check_blocks(op, x_q, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    tokens, choices = topk_ids.shape
    width = check_operands(op, "x_q", x_q, x_scale, tokens * choices, {"w3": w3})
    _check_scale(op, "w3_scale", w3_scale, w3, "w3")
    check_topk_weights(op, topk_weights, topk_ids)
    check_out(op, out, (tokens, choices, width), x_q, dtype=torch.bfloat16)


def _shape_invoke_cute_moe_up_fp8(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    width = w1.shape[1] + (0 if w2 is None else w2.shape[1])
    return x_q.new_empty((topk_ids.shape[0] * topk_ids.shape[1], width), dtype=torch.bfloat16)


def _shape_invoke_cute_moe_down_fp8(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    w3: torch.Tensor,
    w3_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return x_q.new_empty((*topk_ids.shape, w3.shape[1]), dtype=torch.bfloat16)


@kernel_op(
    reference=reference_experts.invoke_cute_moe_up_fp8,
    check=_check_invoke_cute_moe_up_fp8,
    shape=_shape_invoke_cute_moe_up_fp8,
    kernel="cuda",
    out_may_be=(),
)
def _invoke_cute_moe_up_fp8(
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
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """invoke_cute_moe_up_fp8 with a known block size."""
    if out is None:
        columns = w1.shape[1] + (0 if w2 is None else w2.shape[1])
        out = empty(x_q, torch.bfloat16, topk_ids.numel(), columns)
    aligned = (sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    _kernels.invoke_moe_up(out, x_q, x_scale, w1, w1_scale, w2, w2_scale, topk_ids, *aligned)
    return out


@kernel_op(
    reference=reference_experts.invoke_cute_moe_down_fp8,
    check=_check_invoke_cute_moe_down_fp8,
    shape=_shape_invoke_cute_moe_down_fp8,
    kernel="cuda",
    out_may_be=(),
)
def _invoke_cute_moe_down_fp8(
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
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """invoke_cute_moe_down_fp8 with a known block size."""
    if out is None:
        out = empty(x_q, torch.bfloat16, *topk_ids.shape, w3.shape[1])
    aligned = (sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    _kernels.invoke_moe_down(out, x_q, x_scale, w3, w3_scale, topk_weights, topk_ids, *aligned)
    return out
