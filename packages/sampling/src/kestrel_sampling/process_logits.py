"""Penalties, bias and allowed tokens: what an engine does to logits before it samples."""

from __future__ import annotations

from typing import Any

import torch

from kestrel_runtime import check, empty, kernel_op

from . import reference_logits
from ._launch import binary
from ._parameters import check_parameter, check_probs, number_or_tensor

_OP = "process_logits"
_NEUTRAL = (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0))
Penalties = tuple[torch.Tensor | None, float, torch.Tensor | None, float, torch.Tensor | None, float]


def process_logits(
    logits: torch.Tensor,
    *,
    token_ids: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    prompt_lengths: torch.Tensor | None = None,
    repetition_penalty: float | torch.Tensor = 1.0,
    presence_penalty: float | torch.Tensor = 0.0,
    frequency_penalty: float | torch.Tensor = 0.0,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply logit bias, repetition, frequency and presence penalties and an allowed-token bitmask to logits.

    The steps run in this order, each rounded to float32:

    1. bias: ``logit + sum of the token's bias_values``, the sum in float64.
    2. repetition: a token of the history gets ``logit / penalty`` if its logit is positive, else ``logit * penalty``.
    3. frequency: ``logit - penalty * count``, the count in the output tokens.
    4. presence: ``logit - penalty`` for every token of the output.
    5. bitmask: -inf for every token whose bit is 0, whatever the steps before gave.

    logits: [B, V] float32, bf16 or fp16, any row stride.
    token_ids: int32 or int64 [B, L], any row stride: prompt and output tokens of each row, needed by the penalties.
        Ids below 0 or not below V are ignored.
    lengths: int32 or int64 [B] (or [1]): the history is ``token_ids[b, :lengths[b]]``; None: all L.
    prompt_lengths: int32 or int64 [B] (or [1]): the first of them are the prompt, whose tokens only the repetition
        penalty counts; None: all are output.
    repetition_penalty: a number > 0, or float32 [B] (or [1]); 1 is off. presence_penalty, frequency_penalty: a number,
        or float32 [B] (or [1]); 0 is off. Numbers are rounded to float32.
    bias_ids, bias_values: int32 or int64 [B, N] and float32 [B, N], any row stride: tokens and what is added to their
        logits. A token may occur more than once; ids outside the vocabulary are ignored.
    bitmask: int32 [B, ceil(V / 32)], any row stride: token i is allowed if bit i % 32 of word i // 32 is 1, as xgrammar
        and llguidance write it. A row of -1 allows every token.

    Returns float32 [B, V], in ``out`` if it is given (float32 or the dtype of logits, rounded once more; it may be
    ``logits``). A row without an allowed token becomes -inf; sample_from_logits then gives id 0 and valid False.
    Nothing is read on the host. In place, the kernel touches only what changes. It covers up to 4096 biases a row.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, a penalty without token_ids, bias_ids
    without bias_values, and a repetition penalty that is not positive.
    Semantics: vLLM's sampler; transformers' RepetitionPenaltyLogitsProcessor; xgrammar's apply_token_bitmask_inplace.

    >>> logits, history = torch.tensor([[2.0, -1.0, 4.0, 0.5]]), torch.tensor([[0, 1, 1]])
    >>> process_logits(logits, token_ids=history, repetition_penalty=2.0).tolist()
    [[1.0, -2.0, 4.0, 0.5]]
    >>> allowed = torch.tensor([[0b0111]], dtype=torch.int32)
    >>> process_logits(logits, token_ids=history, frequency_penalty=0.5, bitmask=allowed).tolist()
    [[1.5, -2.0, 4.0, -inf]]
    """
    return _process_logits(
        logits,
        token_ids,
        lengths,
        prompt_lengths,
        *penalties(_OP, token_ids, repetition_penalty, presence_penalty, frequency_penalty),
        bias_ids,
        bias_values,
        bitmask,
        out=out,
    )


def penalties(
    op: str,
    token_ids: torch.Tensor | None,
    repetition: float | torch.Tensor,
    presence: float | torch.Tensor,
    frequency: float | torch.Tensor,
) -> Penalties:
    """Each penalty as a tensor, or None and a number; those that are not neutral need a history."""
    if (  # the common case takes no further checks
        type(repetition) is float
        and repetition > 0.0
        and type(presence) is float
        and presence == presence  # no NaN
        and type(frequency) is float
        and frequency == frequency
        and (token_ids is not None or (repetition == 1.0 and presence == frequency == 0.0))
    ):
        return None, repetition, None, presence, None, frequency
    if not isinstance(repetition, torch.Tensor):
        check.number(op, "repetition_penalty", repetition, above=0)
    found = (
        *number_or_tensor(op, "repetition_penalty", repetition),
        *number_or_tensor(op, "presence_penalty", presence),
        *number_or_tensor(op, "frequency_penalty", frequency),
    )
    if token_ids is None:
        for i, (name, neutral) in enumerate(_NEUTRAL):
            if found[2 * i] is not None or found[2 * i + 1] != neutral:
                check.fail(op, "token_ids", f"a tensor with a {name}", "None")
    return found


def _check_ids(op: str, name: str, ids: torch.Tensor, logits: torch.Tensor) -> None:
    check.tensor(op, name, ids, dtype=check.INTEGERS, ndim=2, last_contiguous=True)
    check.shape(op, name, ids, (logits.shape[0], None))
    check.same(op, "device", logits=logits, **{name: ids})


def check_processing(
    op: str,
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
    bias_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    bitmask: torch.Tensor | None,
) -> None:
    """Raise for arguments of :func:`_process_logits` that are wrong, as arguments of ``op``."""
    check_probs(op, logits, "logits")
    if token_ids is not None:
        _check_ids(op, "token_ids", token_ids, logits)
    for name, value in (("lengths", lengths), ("prompt_lengths", prompt_lengths)):
        if value is not None and token_ids is None:
            check.fail(op, name, "None without token_ids", "a tensor")
        check_parameter(op, name, value, logits, *check.INTEGERS, rows_name="logits")
    check_parameter(op, "repetition_penalty", repetition_penalty, logits, torch.float32, rows_name="logits")
    check_parameter(op, "presence_penalty", presence_penalty, logits, torch.float32, rows_name="logits")
    check_parameter(op, "frequency_penalty", frequency_penalty, logits, torch.float32, rows_name="logits")
    if (bias_ids is None) != (bias_values is None):
        missing, given = ("bias_ids", "bias_values") if bias_ids is None else ("bias_values", "bias_ids")
        check.fail(op, missing, f"a tensor with {given}", "None")
    if bias_ids is not None and bias_values is not None:
        _check_ids(op, "bias_ids", bias_ids, logits)
        check.tensor(op, "bias_values", bias_values, dtype=torch.float32, ndim=2, last_contiguous=True)
        check.shape(op, "bias_values", bias_values, tuple(bias_ids.shape))
        check.same(op, "device", logits=logits, bias_values=bias_values)
    if bitmask is not None:
        check.tensor(op, "bitmask", bitmask, dtype=torch.int32, ndim=2, last_contiguous=True)
        check.shape(op, "bitmask", bitmask, (logits.shape[0], (logits.shape[1] + 31) // 32))
        check.same(op, "device", logits=logits, bitmask=bitmask)


def _check_process_logits(logits: torch.Tensor, *given: Any, out: torch.Tensor | None = None, **named: Any) -> None:
    check_processing(_OP, logits, *given, **named)
    if out is not None:
        check.tensor(_OP, "out", out, dtype=tuple(dict.fromkeys((torch.float32, logits.dtype))), last_contiguous=True)
        check.shape(_OP, "out", out, tuple(logits.shape))
        check.disjoint(_OP, "out", out)
        check.same(_OP, "device", logits=logits, out=out)


def _shape_of_logits(logits: torch.Tensor, *_parameters: object) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@kernel_op(
    reference=reference_logits.process_logits,
    check=_check_process_logits,
    kernel="cuda",
    out_may_be=("logits",),
    shape=_shape_of_logits,
)
def _process_logits(
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
    bias_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    bitmask: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each penalty as a tensor, or None and a number."""
    if out is None:
        out = empty(logits, torch.float32, *logits.shape)
    binary.process_logits(
        out, logits, token_ids, lengths, prompt_lengths, repetition_penalty, repetition_penalty_value,
        presence_penalty, presence_penalty_value, frequency_penalty, frequency_penalty_value, bias_ids, bias_values,
        bitmask,
    )  # fmt: skip
    return out
