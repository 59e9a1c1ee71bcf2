"""Min-p sampling from probabilities."""

from __future__ import annotations

import torch

from kestrel_runtime import kernel_op

from . import _launch, reference_sampling
from ._parameters import check_keys, check_parameter, check_probs, keys, number_or_tensor, shape_of_draw


def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: float | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row from the entries that reach ``min_p`` times the largest.

    probs: [B, V] float32, bf16 or fp16, any row stride; rows need not sum to 1, negative entries count as 0.
    min_p: a number (rounded to float32), or float32 [B] (or [1]). An entry stays if it is at least the float32 product
        of min_p and the largest; <= 0 keeps all, >= 1 those that equal the largest.
    seed, offset, generator, return_valid: as in :func:`top_p_sampling_from_probs`.

    Returns ids int32 [B]; with return_valid (ids, valid bool [B]). A row that holds NaN or +inf, or has no mass, gives
    id 0 and valid False. A row's draw depends on its own probabilities, seed and offset only. Reads nothing on the
    host. The draw is integer arithmetic, see reference_sampling.py.

    Raises ValueError or TypeError as top_p_sampling_from_probs does.
    Semantics: FlashInfer's min_p_sampling_from_probs; "Turning up the heat", Nguyen et al. 2024.

    >>> min_p_sampling_from_probs(torch.tensor([[0.1, 0.7, 0.2]]), 0.5, seed=5).tolist()
    [1]
    """
    op = "min_p_sampling_from_probs"
    key = keys(op, probs, generator, seed, offset, return_valid)
    ids, valid = _min_p_sampling_from_probs(probs, *number_or_tensor(op, "min_p", min_p), *key)
    return (ids, valid) if return_valid else ids


def _check_min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | None,
    min_p_value: float,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    op = "min_p_sampling_from_probs"
    check_probs(op, probs)
    check_parameter(op, "min_p", min_p, probs, torch.float32)
    check_keys(op, probs, seed, offset, offset_stride)


@kernel_op(
    reference=reference_sampling.min_p_sampling_from_probs,
    check=_check_min_p_sampling_from_probs,
    kernel="cuda",
    shape=shape_of_draw,
)
def _min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | None,
    min_p_value: float,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    key = (seed, seed_value, offset, offset_value, offset_stride)
    return _launch.draw("min_p_sampling_from_probs", probs, key, min_p=(min_p, min_p_value))
