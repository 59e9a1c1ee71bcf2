"""Sampling from probabilities without a filter."""

from __future__ import annotations

import torch

from kestrel_runtime import kernel_op

from . import _launch, reference_sampling
from ._parameters import check_keys, check_probs, keys, shape_of_draw


def sampling_from_probs(
    probs: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row in proportion to its probability.

    probs: [B, V] float32, bf16 or fp16, any row stride; rows need not sum to 1, negative entries count as 0.
    seed, offset, generator, return_valid: as in :func:`top_p_sampling_from_probs`.

    Returns ids int32 [B]; with return_valid (ids, valid bool [B]). A row that holds NaN or +inf, or has no mass, gives
    id 0 and valid False. A row's draw depends on its own probabilities, seed and offset only. Reads nothing on the
    host. The draw is integer arithmetic, see reference_sampling.py.

    Raises ValueError or TypeError as top_p_sampling_from_probs does. Semantics: FlashInfer's sampling_from_probs.

    >>> sampling_from_probs(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]), seed=1, return_valid=True)[1].tolist()
    [True, False]
    """
    op = "sampling_from_probs"
    ids, valid = _sampling_from_probs(probs, *keys(op, probs, generator, seed, offset, return_valid))
    return (ids, valid) if return_valid else ids


def _check_sampling_from_probs(
    probs: torch.Tensor,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    op = "sampling_from_probs"
    check_probs(op, probs)
    check_keys(op, probs, seed, offset, offset_stride)


@kernel_op(
    reference=reference_sampling.sampling_from_probs,
    check=_check_sampling_from_probs,
    kernel="cuda",
    shape=shape_of_draw,
)
def _sampling_from_probs(
    probs: torch.Tensor,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    return _launch.draw("sampling_from_probs", probs, (seed, seed_value, offset, offset_value, offset_stride))
