"""A draw and its log-probabilities in one launch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from kestrel_runtime import allocator, check, kernel_op

from . import _launch, reference_logits
from ._parameters import (
    Keys,
    check_filters,
    check_keys,
    check_probs,
    count_or_tensor,
    is_joint,
    keys,
    number_or_tensor,
    shape_of_draw,
    temperature_or_tensor,
)
from .token_logprobs import logprob_tensors, shape_of_logprobs

_OP = "sample_with_logprobs"
_NO_FILTERS = (None, 1.0, None, 0, None, 1.0, None, 0.0, False)


class SampledLogprobs(NamedTuple):
    """What :func:`sample_with_logprobs` returns, for B rows and the n most probable tokens."""

    ids: torch.Tensor
    """int32 [B]: the drawn tokens."""
    valid: torch.Tensor
    """bool [B]: whether the row has a distribution."""
    logprobs: torch.Tensor
    """float32 [B]: of the drawn tokens."""
    ranks: torch.Tensor
    """int32 [B]: their places in descending order of the logits, from 1."""
    top_ids: torch.Tensor
    """int32 [B, n]: the tokens with the largest logits."""
    top_logprobs: torch.Tensor
    """float32 [B, n]: of those."""


def sample_with_logprobs(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    *,
    top_n: int = 0,
    processed: bool = False,
    filter_apply_order: Literal["top_k_first", "joint"] = "top_k_first",
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> SampledLogprobs:
    """Draw one id per row of logits, with its log-probability and rank and the ``top_n`` most probable tokens.

    The draw is that of :func:`sample_from_logits` with the same arguments, id for id. The rest is what
    :func:`token_logprobs` gives for the drawn ids: of the logits as they are, or, if ``processed``, of the distribution
    that is drawn from. With a number from 1 to 1024 below V as ``top_k`` a row is read once, in one launch (twice for
    a joint top-p); other calls take the launches of both ops.

    logits: [B, V] float32, bf16 or fp16, any row stride. temperature, top_k, top_p, min_p, filter_apply_order, seed,
    offset, generator: as in :func:`sample_from_logits`. top_n: 0 to V.

    Returns a :class:`SampledLogprobs`. A row that is not valid has id 0, rank 0 and NaN. Nothing is read on the host.

    Raises ValueError or TypeError as the two ops do. Semantics: vLLM's sampler with logprobs.

    >>> drawn = sample_with_logprobs(torch.tensor([[1.0, 3.0, 3.0]]), 0.0, 1, top_n=2, processed=True)
    >>> drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.top_ids.tolist(), drawn.top_logprobs.tolist()
    ([1], [0.0], [[1, 2]], [[0.0, -inf]])
    """
    check.number(_OP, "top_n", top_n, integer=True, minimum=0)
    check.flag(_OP, "processed", processed)
    keyed = keys(_OP, logits, generator, seed, offset, True, name="logits")
    return SampledLogprobs(
        *_sample_with_logprobs(
            logits,
            *temperature_or_tensor(_OP, temperature),
            *count_or_tensor(_OP, "top_k", top_k),
            *number_or_tensor(_OP, "top_p", top_p),
            *number_or_tensor(_OP, "min_p", min_p),
            is_joint(_OP, filter_apply_order),
            top_n,
            processed,
            *keyed,
        )
    )


def check_draw(
    op: str,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
    top_n: int,
    processed: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    """Raise for arguments of :func:`_sample_with_logprobs` that are wrong, as arguments of ``op``."""
    check_probs(op, logits, "logits")
    check_filters(op, logits, temperature, top_k, top_p, min_p)
    check.number(op, "top_n", top_n, integer=True, minimum=0, maximum=logits.shape[1])
    check_keys(op, logits, seed, offset, offset_stride, "logits")


def _check_sample_with_logprobs(*given: Any, **named: Any) -> None:
    check_draw(_OP, *given, **named)


def is_one_launch(top_k: torch.Tensor | None, top_k_value: int, width: int) -> bool:
    """Whether the kernel that draws also computes log-probabilities."""
    return top_k is None and 0 < top_k_value <= _launch.MAX_K and top_k_value < width


def _shape_of_sampled_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
    top_n: int,
    *_parameters: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, valid = shape_of_draw(logits)
    return ids, valid, *shape_of_logprobs(logits, ids, top_n)


@kernel_op(
    reference=reference_logits.sample_with_logprobs,
    check=_check_sample_with_logprobs,
    kernel="cuda",
    shape=_shape_of_sampled_logprobs,
)
def _sample_with_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
    top_n: int,
    processed: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    key = Keys(seed, seed_value, offset, offset_value, offset_stride)
    results = logprob_tensors(logits, top_n)
    filters = (temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value, joint)
    if is_one_launch(top_k, top_k_value, logits.shape[1]):
        allocate, rows = allocator(logits), logits.shape[0]
        ids, valid = allocate((rows,), (1,), torch.int32), allocate((rows,), (1,), torch.bool)
        _launch.binary.sample_with_logprobs(ids, valid, *results, logits, *filters, not processed, *key)
        return ids, valid, *results
    ids, valid = _launch.draw(
        _OP, logits, key, logits=True, temperature=(temperature, temperature_value), top_k=(top_k, top_k_value),
        top_p=(top_p, top_p_value), min_p=(min_p, min_p_value), joint=joint,
    )  # fmt: skip
    _launch.binary.token_logprobs(*results, logits, ids, *(filters if processed else _NO_FILTERS))
    if temperature is not None and not processed:  # which may be NaN
        invalid = valid.logical_not()
        results[0].masked_fill_(invalid, torch.nan)
        results[1].masked_fill_(invalid, 0)
        if top_n:
            results[3].masked_fill_(invalid[:, None], torch.nan)
    return ids, valid, *results
