"""Routing: softmax over the experts, the k most probable, and how often each was chosen."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, allocator, check, kernel_op, leading

from . import reference

_kernels = Binary("kestrel_moe")
_SINGLE_CTA_TOKENS = 8
_SCRATCH_WORDS = 8  # scratch memory after the counts, for launches of several CTAs


def _check_topk_softmax(
    gating: torch.Tensor,
    k: int,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> None:
    op = "topk_softmax"
    check.tensor(op, "gating", gating, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    experts = gating.shape[1]
    check.number(op, "k", k, integer=True, minimum=1)
    if k > experts:
        check.fail(op, "k", f"at most the {experts} experts", k)
    check.flag(op, "renormalize", renormalize)
    if bias is not None:
        check.tensor(op, "bias", bias, dtype=check.FLOATS, last_contiguous=True)
        check.shape(op, "bias", bias, (experts,))
    if num_tokens is not None:
        check.tensor(op, "num_tokens", num_tokens, dtype=torch.int32)
        check.shape(op, "num_tokens", num_tokens, (1,))
    check.same(op, "device", gating=gating, bias=bias, num_tokens=num_tokens)


@kernel_op(reference=reference.topk_softmax, check=_check_topk_softmax, kernel="cuda")
def topk_softmax(
    gating: torch.Tensor,
    k: int,
    *,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose k experts for each token: softmax over E router logits, then the k largest.

    gating: [T, E] router logits, float32, bf16 or fp16. k: 1..E. The kernel covers E up to 512 and k up to 32; beyond,
        the reference runs.
    renormalize: divide the k weights by their sum.
    bias: [E] float32, bf16 or fp16, added to the probabilities for the selection only; weights stay the probabilities.
    num_tokens: int32 [1] on gating's device: rows at or past it get ids -1 and weights 0 and are not counted. It is
        read on the device, so a captured graph may be replayed with fewer tokens.

    Returns (weights float32 [T, k], ids int32 [T, k], counts int32 [E]). Choices are in descending order of the logits
    (with a bias, of probability + bias), ties to the lower id. NaN counts as -inf; ids stay distinct. The largest
    logits of a row count as e^0 even where they are infinite: several +inf share the mass, a row of -inf is uniform.
    A row's weights and ids do not depend on the batch around it; by reference on a GPU, weights may by rounding, and so
    may ids with a bias. Reads nothing on the host.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, and for k > E.
    Semantics: vLLM's topk_softmax; the bias is that of DeepSeek-V3's routing.

    >>> weights, ids, counts = topk_softmax(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), 2, renormalize=True)
    >>> weights.tolist(), ids.tolist(), counts.tolist()
    ([[0.5, 0.5]], [[1, 2]], [0, 1, 1, 0])
    """
    return launch(gating, k, renormalize, bias, num_tokens)


def launch(
    gating: torch.Tensor,
    k: int,
    renormalize: bool,
    bias: torch.Tensor | None,
    num_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel on CUDA tensors; the entry point checks them."""
    tokens, experts = gating.shape
    new, rows = allocator(gating), (tokens, k)
    weights, ids = new(rows, (k, 1), torch.float32), new(rows, (k, 1), torch.int32)
    if tokens <= _SINGLE_CTA_TOKENS:
        counts = new((experts,), (1,), torch.int32)
        _kernels.topk_softmax(weights, ids, counts, gating, k, renormalize, bias, num_tokens)
        return weights, ids, counts
    counts = new((experts + _SCRATCH_WORDS,), (1,), torch.int32)
    _kernels.topk_softmax(weights, ids, counts, gating, k, renormalize, bias, num_tokens)
    return weights, ids, leading(counts, experts)
