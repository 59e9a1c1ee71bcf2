"""A draw and its log-probabilities in one launch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from kestrel_runtime import allocator, check, kernel_op

from . import _launch, reference_logits
from ._parameters import (
    Filters,
    KeyFields,
    check_filters,
    check_keys,
    check_probs,
    filters_of,
    keys,
    shape_of_draw,
)
from .token_logprobs import logprob_tensors, shape_of_logprobs

_OP = "sample_with_logprobs"


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


Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The fields of :class:`SampledLogprobs`."""


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
    if type(top_n) is not int or top_n < 0:
        check.number(_OP, "top_n", top_n, integer=True, minimum=0)
    if type(processed) is not bool:
        check.flag(_OP, "processed", processed)
    key = keys(_OP, logits, generator, seed, offset, True, name="logits")
    return SampledLogprobs(
        *_sample_with_logprobs(
            logits,
            *filters_of(_OP, temperature, top_k, top_p, min_p, filter_apply_order),
            top_n,
            processed,
            *key,
        )
    )


_NAMES = tuple(inspect.signature(reference_logits.sample_with_logprobs).parameters)


def check_draw(op: str, given: Mapping[str, Any]) -> None:
    """Raise for arguments of :func:`_sample_with_logprobs`, by name, that are wrong as arguments of ``op``."""
    logits = given["logits"]
    check_probs(op, logits, "logits")
    check_filters(op, logits, given["temperature"], given["top_k"], given["top_p"], given["min_p"])
    check.number(op, "top_n", given["top_n"], integer=True, minimum=0, maximum=logits.shape[1])
    check_keys(op, logits, given["seed"], given["offset"], given["offset_stride"], "logits")


def shape_of_sampled(given: Mapping[str, Any]) -> Sampled:
    """The results of a draw with log-probabilities, of its arguments by name."""
    ids, valid = shape_of_draw(given["logits"])
    return ids, valid, *shape_of_logprobs(given["logits"], ids, given["top_n"])


def _check_sample_with_logprobs(*given: Any, **named: Any) -> None:
    check_draw(_OP, dict(zip(_NAMES, given, strict=False)) | named)


def _shape_of_sampled_logprobs(*given: Any, **named: Any) -> Sampled:
    return shape_of_sampled(dict(zip(_NAMES, given, strict=False)) | named)


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
) -> Sampled:
    """Each parameter as a tensor, or None and a number."""
    filters = (temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value, joint)
    key = (seed, seed_value, offset, offset_value, offset_stride)
    results = sampled_tensors(logits, top_n)
    if not _launch.binary.sample_with_logprobs(*results, logits, *filters, not processed, *key):
        draw_then_logprobs(_OP, results, logits, Filters(*filters), key, processed)
    return results


def sampled_tensors(logits: torch.Tensor, top_n: int) -> Sampled:
    """Uninitialised results."""
    allocate, rows = allocator(logits), logits.shape[0]
    return (
        allocate((rows,), (1,), torch.int32),
        allocate((rows,), (1,), torch.bool),
        *logprob_tensors(allocate, rows, top_n),
    )


def draw_then_logprobs(
    op: str, results: Sampled, logits: torch.Tensor, filters: Filters, key: KeyFields, processed: bool
) -> None:
    """The launches of a call that one launch does not cover."""
    ids, valid, *logprobs = results
    _launch.binary.sample(op, ids, valid, logits, True, *filters, *key, 0, 0)
    if not processed:  # of the logits alone; NaN where the temperature is
        filters = Filters(None if filters.temperature is None else filters.temperature.clamp(1.0, 1.0))
    _launch.binary.token_logprobs(*logprobs, logits, ids, *filters)
