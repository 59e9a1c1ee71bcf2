"""A sampling step: penalties, allowed tokens, a draw and its log-probabilities."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch

from kestrel_runtime import check, kernel_op

from . import _launch, reference_logits
from ._parameters import Filters, filters_of, keys
from .process_logits import check_processing, penalties
from .sample_with_logprobs import (
    Sampled,
    SampledLogprobs,
    check_draw,
    draw_then_logprobs,
    sampled_tensors,
    shape_of_sampled,
)

_OP = "process_and_sample"


def process_and_sample(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    *,
    token_ids: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    prompt_lengths: torch.Tensor | None = None,
    repetition_penalty: float | torch.Tensor = 1.0,
    presence_penalty: float | torch.Tensor = 0.0,
    frequency_penalty: float | torch.Tensor = 0.0,
    bitmask: torch.Tensor | None = None,
    top_n: int = 0,
    processed: bool = False,
    filter_apply_order: Literal["top_k_first", "joint"] = "top_k_first",
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> SampledLogprobs:
    """Apply penalties and an allowed-token bitmask to logits, then draw one id per row with its log-probability.

    The result is that of :func:`process_logits` with ``out=logits``, then :func:`sample_with_logprobs`, bit for bit.
    With a number from 1 to 1024 below V as ``top_k`` it takes one launch, and a row is read once (twice for a joint
    top-p); two where the history has more than 4096 ids or does not fit into shared memory beside the row's state.
    Other calls take the launches of both ops. For logit bias call :func:`process_logits`.

    logits: [B, V] float32, bf16 or fp16, any row stride. **They are overwritten**: what they hold afterwards is not
        specified. Those of bf16 and fp16 are rounded to their dtype after the penalties.
    token_ids, lengths, prompt_lengths, repetition_penalty, presence_penalty, frequency_penalty, bitmask: as in
        :func:`process_logits`.
    temperature, top_k, top_p, min_p, top_n, filter_apply_order, seed, offset, generator: as in
        :func:`sample_with_logprobs`. processed: log-probabilities of the distribution that is drawn from, instead of
        those of the logits after penalties and bitmask.

    Returns a :class:`SampledLogprobs`. A row that is not valid, such as one without an allowed token, has id 0, rank 0
    and NaN. Nothing is read on the host.

    Raises ValueError or TypeError as the two ops do. Semantics: vLLM's sampler with logprobs, except that its raw
    log-probabilities are of the logits before penalties and bitmask: :func:`token_logprobs` of a copy gives those.

    >>> logits, seen = torch.tensor([[1.0, 3.0, 2.9]]), torch.tensor([[1]])
    >>> drawn = process_and_sample(logits, 0.0, 1, token_ids=seen, repetition_penalty=2.0, top_n=2)
    >>> drawn.ids.tolist(), drawn.top_ids.tolist(), drawn.ranks.tolist()
    ([2], [[2, 1]], [1])
    """
    if type(top_n) is not int or top_n < 0:
        check.number(_OP, "top_n", top_n, integer=True, minimum=0)
    if type(processed) is not bool:
        check.flag(_OP, "processed", processed)
    key = keys(_OP, logits, generator, seed, offset, True, name="logits")
    return SampledLogprobs(
        *_process_and_sample(
            logits,
            token_ids,
            lengths,
            prompt_lengths,
            *penalties(_OP, token_ids, repetition_penalty, presence_penalty, frequency_penalty),
            bitmask,
            *filters_of(_OP, temperature, top_k, top_p, min_p, filter_apply_order),
            top_n,
            processed,
            *key,
        )
    )


_NAMES = tuple(inspect.signature(reference_logits.process_and_sample).parameters)
_NUM_PROCESSING = _NAMES.index("temperature")  # arguments that process_logits takes too


def _check_process_and_sample(*given: Any, **named: Any) -> None:
    arguments = dict(zip(_NAMES, given, strict=False)) | named
    processing = {name: arguments[name] for name in _NAMES[:_NUM_PROCESSING]}
    check_processing(_OP, **processing, bias_ids=None, bias_values=None)
    check_draw(_OP, arguments)


def _shape_of_step(*given: Any, **named: Any) -> Sampled:
    return shape_of_sampled(dict(zip(_NAMES, given, strict=False)) | named)


@kernel_op(
    reference=reference_logits.process_and_sample,
    check=_check_process_and_sample,
    kernel="cuda",
    mutates=("logits",),
    shape=_shape_of_step,
)
def _process_and_sample(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    lengths: torch.Tensor | None,
    prompt_lengths: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    repetition_penalty_value: float,
    presence_penalty: torch.Tensor | None,
    presence_penalty_value: float,
    frequency_penalty: torch.Tensor | None,
    frequency_penalty_value: float,
    bitmask: torch.Tensor | None,
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
    has_drawn = _launch.binary.process_and_sample(
        *results, logits, token_ids, lengths, prompt_lengths, repetition_penalty, repetition_penalty_value,
        presence_penalty, presence_penalty_value, frequency_penalty, frequency_penalty_value, bitmask, *filters,
        not processed, *key,
    )  # fmt: skip
    if not has_drawn:
        draw_then_logprobs(_OP, results, logits, Filters(*filters), key, processed)
    return results
