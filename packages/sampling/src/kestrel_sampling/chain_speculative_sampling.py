"""Speculative sampling: which draft tokens a target model accepts, and the token after them."""

from __future__ import annotations

import torch

from kestrel_runtime import allocator, check, kernel_op

from . import reference_speculative
from ._launch import binary
from ._parameters import check_keys, keys

_OP = "chain_speculative_sampling"
_ACCEPTED, _EMITTED = "maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"


def chain_speculative_sampling(
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Accept draft tokens so that what is emitted follows the target model, whatever the draft model is.

    Draft token x at position i is accepted with probability ``min(1, target_probs[b, i, x] / draft_probs[b, i, x])``.
    The row ends at the first token that is not accepted, with a token drawn from
    ``max(0, target_probs[b, i] - draft_probs[b, i])``. If all S are accepted, a token from ``target_probs[b, S]``
    follows them.

    draft_probs: [B, S, V] float32, bf16 or fp16; None for draft tokens without probabilities, as from a greedy or
        n-gram draft: token x is then accepted with probability ``target_probs[b, i, x]``.
    draft_token_ids: int32 or int64 [B, S]. An id outside the vocabulary, such as -1, ends the row's draft: its position
        gets a token from ``target_probs``.
    target_probs: [B, S + 1, V] float32, bf16 or fp16. Of all three, the last dimension is contiguous. Rows of
        probabilities sum to 1, as softmax and the renorm ops give them; negative entries count as 0.
    maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: int32 [B], to which the counts of this call
        are added; None: new tensors.
    seed, offset, generator: as in :func:`top_p_sampling_from_probs`; one offset per row and call. Position i uses two
        words of Philox with counter (offset, i); see reference_speculative.py.

    Returns (ids, accepted, emitted); with return_valid also valid bool [B]. ids: int32 [B, S + 1], the accepted draft
    tokens, the drawn one, then -1. accepted: int32 [B], draft tokens that pass their test, those behind the first
    failure included. emitted: int32 [B], draft tokens in ids; the drawn one is not counted. If the distribution that
    the last token is drawn from holds NaN or +inf, or has no mass, that token is 0 and valid False. A row depends on
    its own probabilities, seed and offset only.
    Nothing is read on the host.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, counts that share memory, and as
    top_p_sampling_from_probs does for seed, offset and generator.
    Semantics: FlashInfer's chain_speculative_sampling; "Accelerating Large Language Model Decoding with Speculative
    Sampling", Chen et al. 2023.

    >>> target = torch.eye(4)[[2, 3, 1]].unsqueeze(0)  # a target model that is sure of 2, 3, 1
    >>> ids, accepted, emitted = chain_speculative_sampling(None, torch.tensor([[2, 0]]), target, seed=1)
    >>> ids.tolist(), accepted.tolist(), emitted.tolist()
    ([[2, 3, -1]], [1], [1])
    """
    if not isinstance(target_probs, torch.Tensor) or target_probs.ndim != 3:  # the op checks the rest
        check.tensor(_OP, "target_probs", target_probs, ndim=3)
    if 0 in target_probs.shape[1:]:
        shape = tuple(target_probs.shape)
        check.fail(_OP, "target_probs", "at least one position and one entry per row", f"shape {shape}")
    key = keys(_OP, target_probs[:, 0], generator, seed, offset, return_valid, name="target_probs")
    accepted, emitted = maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num
    if accepted is None or emitted is None:
        totals = torch.zeros(2, target_probs.shape[0], dtype=torch.int32, device=target_probs.device)
        accepted = totals[0] if accepted is None else accepted
        emitted = totals[1] if emitted is None else emitted
    ids, valid = _chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, accepted, emitted, *key)
    return (ids, accepted, emitted, valid) if return_valid else (ids, accepted, emitted)


def _check_chain_speculative_sampling(
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor,
    maybe_output_emitted_draft_token_num: torch.Tensor,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    check.tensor(_OP, "draft_token_ids", draft_token_ids, dtype=check.INTEGERS, ndim=2, last_contiguous=True)
    rows, steps = draft_token_ids.shape
    if draft_probs is not None:
        check.tensor(_OP, "draft_probs", draft_probs, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check.tensor(_OP, "target_probs", target_probs, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check.shape(_OP, "target_probs", target_probs, (rows, steps + 1, None))
    width = target_probs.shape[2]
    if width == 0:
        check.fail(_OP, "target_probs", "at least one entry per row", f"shape {tuple(target_probs.shape)}")
    if draft_probs is not None:
        check.shape(_OP, "draft_probs", draft_probs, (rows, steps, width))
    counts = ((_ACCEPTED, maybe_output_accepted_token_num), (_EMITTED, maybe_output_emitted_draft_token_num))
    for name, value in counts:
        check.tensor(_OP, name, value, dtype=torch.int32, ndim=1, last_contiguous=True)
        check.shape(_OP, name, value, (rows,))
    tensors = {"draft_probs": draft_probs, "draft_token_ids": draft_token_ids, "target_probs": target_probs}
    check.same(_OP, "device", **tensors, **dict(counts))
    check_keys(_OP, target_probs, seed, offset, offset_stride, "target_probs")


def _shape_of_chain(
    draft_probs: torch.Tensor | None, draft_token_ids: torch.Tensor, target_probs: torch.Tensor, *_parameters: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(target_probs.shape[:2], dtype=torch.int32, device=target_probs.device),
        torch.empty(target_probs.shape[:1], dtype=torch.bool, device=target_probs.device),
    )


@kernel_op(
    reference=reference_speculative.chain_speculative_sampling,
    check=_check_chain_speculative_sampling,
    kernel="cuda",
    mutates=(_ACCEPTED, _EMITTED),
    shape=_shape_of_chain,
)
def _chain_speculative_sampling(
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor,
    maybe_output_emitted_draft_token_num: torch.Tensor,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts to add to, and each key as a tensor, or None and a number."""
    allocate, (rows, places) = allocator(target_probs), target_probs.shape[:2]
    ids, valid = allocate((rows, places), (places, 1), torch.int32), allocate((rows,), (1,), torch.bool)
    binary.chain_speculative_sampling(
        ids, valid, draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num,
        maybe_output_emitted_draft_token_num, seed, seed_value, offset, offset_value, offset_stride,
    )  # fmt: skip
    return ids, valid
