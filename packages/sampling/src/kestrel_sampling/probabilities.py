"""Probabilities of a vocabulary: softmax with a temperature, and renormalisation after a filter."""

from __future__ import annotations

import torch

from kestrel_runtime import check, kernel_op

from . import _launch, reference_sampling
from ._parameters import check_parameter, check_probs, count_or_tensor, number_or_tensor, temperature_or_tensor


def softmax(
    logits: torch.Tensor, temperature: float | torch.Tensor = 1.0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Probabilities of logits: ``softmax(logits / temperature)`` over the last dimension.

    logits: [B, V] float32, bf16 or fp16, any row stride. temperature: a number >= 0 (rounded to float32), or float32
    [B] (or [1]); 0 (and below, in a tensor) puts all mass on the largest logit, ties to the lower id. Computed from
    ``logit - largest`` in float32, so that no temperature overflows.

    Returns float32 [B, V], in ``out`` if it is given (float32; it may be ``logits``). A row with NaN or +inf, or only
    -inf, becomes NaN.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, or a negative temperature.
    Semantics: FlashInfer's softmax.

    >>> softmax(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), temperature=0.0).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return _softmax(logits, *temperature_or_tensor("softmax", temperature), out=out)


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: float | torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Keep the smallest set of entries whose mass reaches ``top_p`` of the row's and divide it by its sum.

    probs: [B, V] float32, bf16 or fp16, any row stride. top_p: as in :func:`top_p_sampling_from_probs`, with the same
    exact filter.

    Returns float32 [B, V], zero outside the set, in ``out`` if it is given (float32; it may be ``probs``). A row with
    NaN or +inf becomes NaN, one without mass zeros.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: FlashInfer's top_p_renorm_probs.

    >>> top_p_renorm_probs(torch.tensor([[0.5, 0.25, 0.25]]), 0.5).tolist()
    [[1.0, 0.0, 0.0]]
    """
    return _top_p_renorm_probs(probs, *number_or_tensor("top_p_renorm_probs", "top_p", top_p), out=out)


def top_k_renorm_probs(
    probs: torch.Tensor, top_k: int | torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Keep the ``top_k`` most probable entries and divide them by their sum.

    probs: [B, V] float32, bf16 or fp16, any row stride. top_k: as in :func:`top_k_sampling_from_probs`, exactly k.

    Returns float32 [B, V], zero outside the set, in ``out`` if it is given (float32; it may be ``probs``). A row with
    NaN or +inf becomes NaN, one without mass zeros.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device. Semantics: FlashInfer's top_k_renorm_probs.

    >>> top_k_renorm_probs(torch.tensor([[0.25, 0.5, 0.25]]), 2).tolist()
    [[0.3333333432674408, 0.6666666865348816, 0.0]]
    """
    return _top_k_renorm_probs(probs, *count_or_tensor("top_k_renorm_probs", "top_k", top_k), out=out)


def _check_out(op: str, out: torch.Tensor | None, like: torch.Tensor) -> None:
    if out is not None:
        check.tensor(op, "out", out, dtype=torch.float32, last_contiguous=True)
        check.shape(op, "out", out, tuple(like.shape))
        check.disjoint(op, "out", out)
        check.same(op, "device", input=like, out=out)


def _check_softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    out: torch.Tensor | None = None,
) -> None:
    check_probs("softmax", logits, "logits")
    check_parameter("softmax", "temperature", temperature, logits, torch.float32, rows_name="logits")
    _check_out("softmax", out, logits)


def _check_top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | None, top_p_value: float, out: torch.Tensor | None = None
) -> None:
    check_probs("top_p_renorm_probs", probs)
    check_parameter("top_p_renorm_probs", "top_p", top_p, probs, torch.float32)
    _check_out("top_p_renorm_probs", out, probs)


def _check_top_k_renorm_probs(
    probs: torch.Tensor, top_k: torch.Tensor | None, top_k_value: int, out: torch.Tensor | None = None
) -> None:
    check_probs("top_k_renorm_probs", probs)
    check_parameter("top_k_renorm_probs", "top_k", top_k, probs, torch.int32, torch.int64)
    _check_out("top_k_renorm_probs", out, probs)


def _shape_of_probabilities(probs: torch.Tensor, *_parameters: object) -> torch.Tensor:
    return torch.empty(probs.shape, dtype=torch.float32, device=probs.device)


@kernel_op(
    reference=reference_sampling.softmax,
    check=_check_softmax,
    kernel="cuda",
    out_may_be=("logits",),
    shape=_shape_of_probabilities,
)
def _softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The temperature as a tensor, or None and a number."""
    return _launch.probabilities("softmax", logits, out, logits=True, temperature=(temperature, temperature_value))


@kernel_op(
    reference=reference_sampling.top_p_renorm_probs,
    check=_check_top_p_renorm_probs,
    kernel="cuda",
    out_may_be=("probs",),
    shape=_shape_of_probabilities,
)
def _top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | None, top_p_value: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """p as a tensor, or None and a number."""
    return _launch.probabilities("top_p_renorm_probs", probs, out, top_p=(top_p, top_p_value))


@kernel_op(
    reference=reference_sampling.top_k_renorm_probs,
    check=_check_top_k_renorm_probs,
    kernel="cuda",
    out_may_be=("probs",),
    shape=_shape_of_probabilities,
)
def _top_k_renorm_probs(
    probs: torch.Tensor, top_k: torch.Tensor | None, top_k_value: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """k as a tensor, or None and a number."""
    return _launch.probabilities("top_k_renorm_probs", probs, out, top_k=(top_k, top_k_value))
