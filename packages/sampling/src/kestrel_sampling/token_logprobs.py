"""Log-probabilities of drawn tokens and of the most probable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from kestrel_runtime import allocator, check, kernel_op

from . import reference_logits
from ._launch import binary
from ._parameters import check_filters, check_probs, filters_of

_OP = "token_logprobs"


class TokenLogprobs(NamedTuple):
    """What :func:`token_logprobs` returns, for B rows and the n most probable tokens."""

    logprobs: torch.Tensor
    """float32 [B]: of the given tokens."""
    ranks: torch.Tensor
    """int32 [B]: their places in descending order of the logits, from 1."""
    top_ids: torch.Tensor
    """int32 [B, n]: the tokens with the largest logits."""
    top_logprobs: torch.Tensor
    """float32 [B, n]: of those."""


def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    top_n: int = 0,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    *,
    filter_apply_order: Literal["top_k_first", "joint"] = "top_k_first",
) -> TokenLogprobs:
    """Give the log-probability and the rank of one token per row, and the ``top_n`` most probable tokens.

    With logits and ids alone they are those before any filter (vLLM's logprobs_mode "raw_logprobs"). With the
    parameters of sample_from_logits they are those of the distribution that it draws from ("processed_logprobs"): a
    token that the filters drop has -inf, and at temperature 0 the largest logit has 0 and every other token -inf.

    logits: [B, V] float32, bf16 or fp16, any row stride. ids: int32 or int64 [B]. top_n: 0 to V.
    temperature, top_k, top_p, min_p, filter_apply_order: as in :func:`sample_from_logits`, with the same exact filters.

    Returns a :class:`TokenLogprobs`: logprobs float32 [B], ranks int32 [B], top_ids int32 [B, n] and top_logprobs
    float32 [B, n]. Sums are float64, and results are rounded once. Rank r is the place of the token in descending order
    of the logits, ties to the lower id; top_ids are the first n of that order. An id outside the vocabulary has -inf
    and rank 0 in any row. Other ids of a row that holds NaN or +inf, or only -inf, have NaN and rank 0.
    Nothing is read on the host. Kernels cover top_n up to 1024. Their results are within 2e-6 of the exact ones before
    they are rounded, for V up to 2^20, and a row does not depend on the rows around it. The order of float sums depends
    on whether a row is aligned to 16 bytes: results of equal rows of other alignment may differ by an ulp.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, a negative temperature, top_n outside 0 to
    V, and an unknown ``filter_apply_order``. Semantics: vLLM's logprobs, but for ties, which vLLM counts into the rank.

    >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 8.0, 9.0]])
    >>> found = token_logprobs(logits, torch.tensor([1, 2]), 2, top_k=1)
    >>> found.logprobs.tolist(), found.ranks.tolist(), found.top_ids.tolist()
    ([-inf, 0.0], [2, 1], [[0, 1], [2, 1]])
    """
    if type(top_n) is not int or top_n < 0:
        check.number(_OP, "top_n", top_n, integer=True, minimum=0)
    return TokenLogprobs(
        *_token_logprobs(
            logits,
            ids,
            top_n,
            *filters_of(_OP, temperature, top_k, top_p, min_p, filter_apply_order),
        )
    )


def _check_token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    top_n: int,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
) -> None:
    check_probs(_OP, logits, "logits")
    check.tensor(_OP, "ids", ids, dtype=check.INTEGERS, ndim=1, last_contiguous=True)
    check.shape(_OP, "ids", ids, logits.shape[:1])
    check.same(_OP, "device", logits=logits, ids=ids)
    check.number(_OP, "top_n", top_n, integer=True, minimum=0, maximum=logits.shape[1])
    check_filters(_OP, logits, temperature, top_k, top_p, min_p)


def shape_of_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, top_n: int, *_parameters: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, device = logits.shape[0], logits.device
    return (
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, top_n, dtype=torch.int32, device=device),
        torch.empty(rows, top_n, dtype=torch.float32, device=device),
    )


@kernel_op(
    reference=reference_logits.token_logprobs, check=_check_token_logprobs, kernel="cuda", shape=shape_of_logprobs
)
def _token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    top_n: int,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    results = logprob_tensors(allocator(logits), logits.shape[0], top_n)
    binary.token_logprobs(
        *results, logits, ids, temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p,
        min_p_value, joint,
    )  # fmt: skip
    return results


def logprob_tensors(
    allocate: Callable[..., torch.Tensor], rows: int, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised logprobs, ranks, top_ids and top_logprobs."""
    return (
        allocate((rows,), (1,), torch.float32),
        allocate((rows,), (1,), torch.int32),
        allocate((rows, top_n), (top_n, 1), torch.int32),
        allocate((rows, top_n), (top_n, 1), torch.float32),
    )
