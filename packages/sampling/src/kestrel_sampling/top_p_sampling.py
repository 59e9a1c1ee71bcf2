"""Nucleus (top-p) sampling from probabilities."""

from __future__ import annotations

import torch

from kestrel_runtime import kernel_op

from . import _launch, reference_sampling
from ._parameters import check_keys, check_parameter, check_probs, keys, number_or_tensor, shape_of_draw


def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: float | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row from the smallest set of entries whose mass reaches ``top_p`` of the row's.

    probs: [B, V] float32, bf16 or fp16, any row stride; rows need not sum to 1, negative entries count as 0.
    top_p: a number (rounded to float32), or float32 [B] (or [1]). Entries are taken in descending order, ties to the
        lower id; >= 1 takes all, <= 0 takes one.
    seed, offset: an int, int64 [1] or int64 [B]. Row b uses the words of Philox4x32-10 with key = its seed and
        counter = its offset: rows of one seed and offset draw with the same numbers, so give each row, and each step,
        its own. The offset is 0 if only a seed is given.
    generator: without a seed, seed and successive offsets of the rows come from it (default: the device's own
        generator), without synchronisation. Not under torch.compile. While a CUDA graph is captured seed and offset
        must be tensors.

    Returns ids int32 [B]; with return_valid (ids, valid bool [B]). A row that holds NaN or +inf, or has no mass, gives
    id 0 and valid False. A row's draw depends on its own probabilities, seed and offset only. Kernels read
    nothing on the host. Filter and draw are integer arithmetic, see reference_sampling.py, so that every kernel draws
    the same id.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, an offset without a seed, a generator with
    one, or numbers instead of tensors during capture.
    Semantics: FlashInfer's top_p_sampling_from_probs; "The curious case of neural text degeneration", Holtzman 2020.

    >>> probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    >>> top_p_sampling_from_probs(probs, 0.5, seed=0).tolist()
    [0, 2]
    >>> top_p_sampling_from_probs(probs, 1.0, seed=7, offset=torch.tensor([3, 4])).shape
    torch.Size([2])
    """
    op = "top_p_sampling_from_probs"
    key = keys(op, probs, generator, seed, offset, return_valid)
    ids, valid = _top_p_sampling_from_probs(probs, *number_or_tensor(op, "top_p", top_p), *key)
    return (ids, valid) if return_valid else ids


def _check_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | None,
    top_p_value: float,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    op = "top_p_sampling_from_probs"
    check_probs(op, probs)
    check_parameter(op, "top_p", top_p, probs, torch.float32)
    check_keys(op, probs, seed, offset, offset_stride)


@kernel_op(
    reference=reference_sampling.top_p_sampling_from_probs,
    check=_check_top_p_sampling_from_probs,
    kernel="cuda",
    shape=shape_of_draw,
)
def _top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | None,
    top_p_value: float,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    key = (seed, seed_value, offset, offset_value, offset_stride)
    return _launch.draw("top_p_sampling_from_probs", probs, key, top_p=(top_p, top_p_value))
