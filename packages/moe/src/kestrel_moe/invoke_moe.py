"""The grouped matrix products of routed experts, over the blocks of moe_align_block_size."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, empty, kernel_op

from . import reference_experts
from ._checks import check_out

BLOCK_SIZES = (16, 32, 64, 128)

_kernels = Binary("kestrel_moe")


def invoke_cute_moe_up(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    *,
    block_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Up projection of routed experts: row t*K+j of the result is ``[x @ w1[e].T, x @ w2[e].T]`` for x = row t.

    hidden_states: [T, Hd] bf16, fp16 or float32. w1, w2: [E, I, Hd] in its dtype; with w2=None, w1 is [E, 2I, Hd].
    *Constant*: w1, w2. topk_weights: not read, may be None. topk_ids: int32 [T, K], gives T and K.
    sorted_token_ids int32 [S], expert_ids int32 [M], num_tokens_post_pad int32 [1]: as moe_align_block_size
    wrote them, the latter a multiple of block_size.
    Skipped are blocks whose expert is outside 0..E-1, positions at or past num_tokens_post_pad, and pair indices
    outside 0..T*K-1.
    block_size: 16, 32, 64 or 128, the one given to moe_align_block_size; None takes the only one that fits the buffers.
        A size fits when M = ceil(S / block_size). Only the two lengths are compared: buffers longer than the alignment
        needs can fit a wrong size, and the result is then wrong.
    Accumulated in float32, rounded once.

    Returns [T*K, 2I] in the dtype of hidden_states, in ``out`` if it is given; rows of skipped pairs are zero. Reads
    nothing on the host. The kernels take bf16 and fp16 with Hd and I that are multiples of 16; there a row is the same
    bit for bit for every T and block_size. On an H100 or H200 blocks of 64 and 128 have a kernel of their own if the
    rows of ``out`` are aligned to 16 bytes: its sums are rounded differently from those in blocks of 16 and 32. By
    reference on a CPU, another block_size may change a row by rounding.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, for a block_size that does not fit the
    buffers, and for None where no size or several fit.
    Semantics: kestrel-kernels 0.2; vLLM's fused MoE kernel.

    >>> from kestrel_moe import route_and_align
    >>> weights, ids, *aligned = route_and_align(torch.tensor([[0.0, 9.0]]), 1, 16)
    >>> w1, w2 = torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[3.0]], [[4.0]]])
    >>> invoke_cute_moe_up(torch.tensor([[10.0]]), w1, w2, None, ids, *aligned, block_size=16).tolist()
    [[20.0, 40.0]]
    """
    block_size = block_size_of("invoke_cute_moe_up", block_size, sorted_token_ids, expert_ids)
    aligned = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    return _invoke_cute_moe_up(hidden_states, w1, w2, *aligned, out=out)


def invoke_cute_moe_down(
    moe_out: torch.Tensor,
    w3: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    *,
    block_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Down projection of routed experts: ``result[t, j] = topk_weights[t, j] * (moe_out[t*K+j] @ w3[e].T)``.

    moe_out: [T*K, I] bf16, fp16 or float32. w3: [E, Hd, I] in its dtype, *constant*. topk_weights: float32 [T, K].
    topk_ids: int32 [T, K], gives T and K. The rest as in :func:`invoke_cute_moe_up`.
    Accumulated and weighted in float32, rounded once.

    Returns [T, K, Hd] in the dtype of moe_out, in ``out`` if it is given; skipped pairs are zero. moe_sum adds them up.

    Raises ValueError or TypeError as :func:`invoke_cute_moe_up` does. Semantics: kestrel-kernels 0.2.

    >>> from kestrel_moe import route_and_align
    >>> weights, ids, *aligned = route_and_align(torch.tensor([[0.0, 0.0]]), 2, 16)
    >>> w3 = torch.tensor([[[1.0]], [[3.0]]])
    >>> invoke_cute_moe_down(torch.tensor([[10.0], [100.0]]), w3, weights, ids, *aligned, block_size=16).tolist()
    [[[5.0], [150.0]]]
    """
    block_size = block_size_of("invoke_cute_moe_down", block_size, sorted_token_ids, expert_ids)
    aligned = (topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    return _invoke_cute_moe_down(moe_out, w3, topk_weights, *aligned, out=out)


def block_size_of(op: str, block_size: int | None, sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor) -> int:
    """The block size given, once the buffers are known to fit it; for None the only one that they fit."""
    check.tensor(op, "sorted_token_ids", sorted_token_ids, ndim=1)
    check.tensor(op, "expert_ids", expert_ids, ndim=1)
    if block_size is not None:
        check_block_size(op, block_size, sorted_token_ids, expert_ids)
        return block_size
    fitting = _fitting_sizes(sorted_token_ids.shape[0], expert_ids.shape[0])
    if len(fitting) != 1 and sorted_token_ids.shape[0] + expert_ids.shape[0] > 0:  # empty buffers fit every size
        expected = f"a number, for the buffers fit {'several sizes' if fitting else 'no size'}"
        check.fail(op, "block_size", expected, f"None with {_buffers(sorted_token_ids, expert_ids)}")
    return fitting[0]


def check_block_size(op: str, block_size: int, sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor) -> None:
    """block_size is 16, 32, 64 or 128, and M = ceil(S / block_size) for buffers [S] and [M]."""
    check.number(op, "block_size", block_size, integer=True)
    check.choice(op, "block_size", block_size, BLOCK_SIZES)
    if block_size not in _fitting_sizes(sorted_token_ids.shape[0], expert_ids.shape[0]):
        buffers = _buffers(sorted_token_ids, expert_ids)
        check.fail(op, "block_size", f"the size that the buffers were aligned with ({buffers})", block_size)


def _fitting_sizes(positions: int, blocks: int) -> list[int]:
    """The sizes of which ``blocks`` full blocks hold ``positions``; if there is none, with a partial last block."""
    full = [size for size in BLOCK_SIZES if positions == blocks * size]
    return full or [size for size in BLOCK_SIZES if -(-positions // size) == blocks]


def _buffers(sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor) -> str:
    return f"{sorted_token_ids.shape[0]} positions in {expert_ids.shape[0]} blocks"


def check_blocks(
    op: str,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
) -> None:
    check.tensor(op, "topk_ids", topk_ids, dtype=torch.int32, ndim=2, last_contiguous=True)
    check.tensor(op, "sorted_token_ids", sorted_token_ids, dtype=torch.int32, ndim=1, last_contiguous=True)
    check.tensor(op, "expert_ids", expert_ids, dtype=torch.int32, ndim=1, last_contiguous=True)
    check.tensor(op, "num_tokens_post_pad", num_tokens_post_pad, dtype=torch.int32)
    check.shape(op, "num_tokens_post_pad", num_tokens_post_pad, (1,))
    check_block_size(op, block_size, sorted_token_ids, expert_ids)
    check.same(
        op,
        "device",
        x=x,
        topk_ids=topk_ids,
        sorted_token_ids=sorted_token_ids,
        expert_ids=expert_ids,
        num_tokens_post_pad=num_tokens_post_pad,
    )


def check_operands(
    op: str,
    x_name: str,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    rows: int,
    weights: dict[str, torch.Tensor | None],
) -> int:
    """x is [rows, K], with scales [rows, 1] if given; the weights share one shape [E, N, K], and all but the first may
    be None. Returns the sum of N."""
    dtypes = check.FLOATS if x_scale is None else torch.float8_e4m3fn
    check.tensor(op, x_name, x, dtype=dtypes, ndim=2, last_contiguous=True)
    check.shape(op, x_name, x, (rows, None))
    if x_scale is not None:
        check.tensor(op, "x_scale", x_scale, dtype=torch.float32)
        check.shape(op, "x_scale", x_scale, (rows, 1))
        check.same(op, "device", x=x, x_scale=x_scale)
    width = 0
    shape: tuple[int | None, ...] = (None, None, x.shape[1])
    for place, (name, weight) in enumerate(weights.items()):
        if weight is None and place > 0:
            continue
        check.tensor(op, name, weight, dtype=x.dtype, ndim=3, last_contiguous=True)
        assert weight is not None
        check.shape(op, name, weight, shape)
        check.same(op, "device", x=x, **{name: weight})
        if weight.numel() == 0:
            check.fail(op, name, "shape [E, N, K] with each at least 1", f"shape {tuple(weight.shape)}")
        width, shape = width + weight.shape[1], tuple(weight.shape)
    return width


def check_topk_weights(op: str, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    check.tensor(op, "topk_weights", topk_weights, dtype=torch.float32, ndim=2, last_contiguous=True)
    check.shape(op, "topk_weights", topk_weights, topk_ids.shape)
    check.same(op, "device", topk_ids=topk_ids, topk_weights=topk_weights)


def _check_invoke_cute_moe_up(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
    out: torch.Tensor | None = None,
) -> None:
    op = "invoke_cute_moe_up"
    check.tensor(op, "hidden_states", hidden_states, ndim=2)
    check_blocks(op, hidden_states, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    tokens, choices = topk_ids.shape
    width = check_operands(op, "hidden_states", hidden_states, None, tokens, {"w1": w1, "w2": w2})
    check_out(op, out, (tokens * choices, width), hidden_states)


def _check_invoke_cute_moe_down(
    moe_out: torch.Tensor,
    w3: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
    out: torch.Tensor | None = None,
) -> None:
    op = "invoke_cute_moe_down"
    check.tensor(op, "moe_out", moe_out, ndim=2)
    check_blocks(op, moe_out, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    tokens, choices = topk_ids.shape
    width = check_operands(op, "moe_out", moe_out, None, tokens * choices, {"w3": w3})
    check_topk_weights(op, topk_weights, topk_ids)
    check_out(op, out, (tokens, choices, width), moe_out)


def _shape_invoke_cute_moe_up(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor | None, topk_ids: torch.Tensor, *_: object
) -> torch.Tensor:
    width = w1.shape[1] + (0 if w2 is None else w2.shape[1])
    return hidden_states.new_empty((topk_ids.shape[0] * topk_ids.shape[1], width))


def _shape_invoke_cute_moe_down(
    moe_out: torch.Tensor, w3: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: object
) -> torch.Tensor:
    return moe_out.new_empty((*topk_ids.shape, w3.shape[1]))


@kernel_op(
    reference=reference_experts.invoke_cute_moe_up,
    check=_check_invoke_cute_moe_up,
    shape=_shape_invoke_cute_moe_up,
    kernel="cuda",
    out_may_be=(),
)
def _invoke_cute_moe_up(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """invoke_cute_moe_up with a known block size."""
    if out is None:
        columns = w1.shape[1] + (0 if w2 is None else w2.shape[1])
        out = empty(hidden_states, hidden_states.dtype, topk_ids.numel(), columns)
    aligned = (sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    _kernels.invoke_moe_up(out, hidden_states, None, w1, None, w2, None, topk_ids, *aligned)
    return out


@kernel_op(
    reference=reference_experts.invoke_cute_moe_down,
    check=_check_invoke_cute_moe_down,
    shape=_shape_invoke_cute_moe_down,
    kernel="cuda",
    out_may_be=(),
)
def _invoke_cute_moe_down(
    moe_out: torch.Tensor,
    w3: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    block_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """invoke_cute_moe_down with a known block size."""
    if out is None:
        out = empty(moe_out, moe_out.dtype, *topk_ids.shape, w3.shape[1])
    aligned = (sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    _kernels.invoke_moe_down(out, moe_out, None, w3, None, topk_weights, topk_ids, *aligned)
    return out
