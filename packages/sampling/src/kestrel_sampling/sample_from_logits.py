"""Sampling straight from logits."""

from __future__ import annotations

from typing import Literal

import torch

from kestrel_runtime import kernel_op

from . import _launch, reference_sampling
from ._parameters import (
    check_filters,
    check_keys,
    check_probs,
    filters_of,
    keys,
    keys_of_an_eager_call,
    shape_of_draw,
)


def sample_from_logits(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    *,
    filter_apply_order: Literal["top_k_first", "joint"] = "top_k_first",
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row of logits: temperature, min-p, top-k and top-p in one call, without writing probabilities.

    logits: [B, V] float32, bf16 or fp16, any row stride; -inf is an entry without mass. An entry's weight is
        ``exp((logit - largest) / temperature)`` in float32.
    temperature: a number >= 0 (rounded to float32), or float32 [B] (or [1]). 0 (and below, in a tensor) takes the
        largest logit, ties to the lower id.
    top_k, top_p, min_p, filter_apply_order: as in :func:`top_k_top_p_sampling_from_probs` and
        :func:`min_p_sampling_from_probs`; off by default. min_p drops first, then top-k and top-p see what is left.
        Entries are ordered by their logits, ties to the lower id.
    seed, offset, generator, return_valid: as in :func:`top_p_sampling_from_probs`.

    Returns ids int32 [B]; with return_valid (ids, valid bool [B]). A row that holds NaN or +inf, or only -inf, gives id
    0 and valid False. A row's draw depends on its own logits, seed and offset only. Kernels read nothing on the host.
    Filters and draw are integer arithmetic on the weights, see reference_sampling.py.

    Raises ValueError or TypeError as top_p_sampling_from_probs does, for a negative temperature, and for an unknown
    ``filter_apply_order``. Semantics: FlashInfer's top_k_top_p_sampling_from_logits.

    >>> sample_from_logits(torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 9.0]]), temperature=0.0).tolist()
    [1, 2]
    """
    op = "sample_from_logits"
    key = None
    if (  # the common case takes no further checks in Python
        type(temperature) is float
        and temperature >= 0.0
        and type(top_k) is int
        and type(top_p) is float
        and type(min_p) is float
        and top_p == top_p  # no NaN
        and min_p == min_p
        and type(return_valid) is bool
        and type(filter_apply_order) is str
        and filter_apply_order == "top_k_first"
    ):
        try:
            key = keys_of_an_eager_call(logits, generator, seed, offset)
            if key is not None:
                return _launch.draw_by_numbers(op, logits, key, temperature, top_k, top_p, min_p, return_valid)
        except Exception:  # of any kind, as in kernel_op: arguments are not checked yet. A failed launch fails again
            pass
    if key is None:
        key = keys(op, logits, generator, seed, offset, return_valid, name="logits")
    ids, valid = _sample_from_logits(
        logits,
        *filters_of(op, temperature, top_k, top_p, min_p, filter_apply_order),
        *key,
    )
    return (ids, valid) if return_valid else ids


def _check_sample_from_logits(
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
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    op = "sample_from_logits"
    check_probs(op, logits, "logits")
    check_filters(op, logits, temperature, top_k, top_p, min_p)
    check_keys(op, logits, seed, offset, offset_stride, "logits")


@kernel_op(
    reference=reference_sampling.sample_from_logits,
    check=_check_sample_from_logits,
    kernel="cuda",
    shape=shape_of_draw,
)
def _sample_from_logits(
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
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    return _launch.draw(
        "sample_from_logits",
        logits,
        (seed, seed_value, offset, offset_value, offset_stride),
        logits=True,
        temperature=(temperature, temperature_value),
        top_k=(top_k, top_k_value),
        top_p=(top_p, top_p_value),
        min_p=(min_p, min_p_value),
        joint=joint,
    )
