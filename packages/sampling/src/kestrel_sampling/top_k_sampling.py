"""Top-k sampling from probabilities, alone and together with top-p."""

from __future__ import annotations

from typing import Literal

import torch

from kestrel_runtime import kernel_op

from . import _launch, reference_sampling
from ._parameters import (
    check_keys,
    check_parameter,
    check_probs,
    count_or_tensor,
    is_joint,
    keys,
    number_or_tensor,
    shape_of_draw,
)


def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: int | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row from its ``top_k`` most probable entries.

    probs: [B, V] float32, bf16 or fp16, any row stride; rows need not sum to 1, negative entries count as 0.
    top_k: a number, or int32 or int64 [B] (or [1]). Exactly k entries are kept, ties to the lower id; k <= 0 or >= V
        keeps all.
    seed, offset, generator, return_valid: as in :func:`top_p_sampling_from_probs`.

    Returns ids int32 [B]; with return_valid (ids, valid bool [B]). A row that holds NaN or +inf, or has no mass, gives
    id 0 and valid False. A row's draw depends on its own probabilities, seed and offset only. Kernels read
    nothing on the host. Filter and draw are integer arithmetic, see reference_sampling.py.

    Raises ValueError or TypeError as top_p_sampling_from_probs does. Semantics: FlashInfer's top_k_sampling_from_probs.

    >>> top_k_sampling_from_probs(torch.tensor([[0.1, 0.4, 0.4, 0.1]]), 1, seed=5).tolist()
    [1]
    """
    op = "top_k_sampling_from_probs"
    key = keys(op, probs, generator, seed, offset, return_valid)
    ids, valid = _top_k_sampling_from_probs(probs, *count_or_tensor(op, "top_k", top_k), *key)
    return (ids, valid) if return_valid else ids


def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: int | torch.Tensor,
    top_p: float | torch.Tensor,
    *,
    filter_apply_order: Literal["top_k_first", "joint"] = "top_k_first",
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row from the entries that top-k and top-p keep.

    probs: [B, V] float32, bf16 or fp16, any row stride; rows need not sum to 1, negative entries count as 0.
    top_k: as in :func:`top_k_sampling_from_probs`. top_p: as in :func:`top_p_sampling_from_probs`.
    filter_apply_order: "top_k_first": top_p counts in the mass that top-k kept. "joint": both apply to the row,
        and what both keep stays.
    seed, offset, generator, return_valid: as in :func:`top_p_sampling_from_probs`.

    Returns ids int32 [B]; with return_valid (ids, valid bool [B]). A row that holds NaN or +inf, or has no mass, gives
    id 0 and valid False. A row's draw depends on its own probabilities, seed and offset only. Kernels read
    nothing on the host. Filters and draw are integer arithmetic, see reference_sampling.py.

    Raises ValueError or TypeError as top_p_sampling_from_probs does, and for an unknown ``filter_apply_order``.
    Semantics: FlashInfer's top_k_top_p_sampling_from_probs.

    >>> top_k_top_p_sampling_from_probs(torch.tensor([[0.1, 0.4, 0.3, 0.2]]), 2, 0.5, seed=5).tolist()
    [1]
    """
    op = "top_k_top_p_sampling_from_probs"
    key = keys(op, probs, generator, seed, offset, return_valid)
    k, p = count_or_tensor(op, "top_k", top_k), number_or_tensor(op, "top_p", top_p)
    ids, valid = _top_k_top_p_sampling_from_probs(probs, *k, *p, is_joint(op, filter_apply_order), *key)
    return (ids, valid) if return_valid else ids


def _check_top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | None,
    top_k_value: int,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    op = "top_k_sampling_from_probs"
    check_probs(op, probs)
    check_parameter(op, "top_k", top_k, probs, torch.int32, torch.int64)
    check_keys(op, probs, seed, offset, offset_stride)


@kernel_op(
    reference=reference_sampling.top_k_sampling_from_probs,
    check=_check_top_k_sampling_from_probs,
    kernel="cuda",
    shape=shape_of_draw,
)
def _top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | None,
    top_k_value: int,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    key = (seed, seed_value, offset, offset_value, offset_stride)
    return _launch.draw("top_k_sampling_from_probs", probs, key, top_k=(top_k, top_k_value))


def _check_top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    joint: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> None:
    op = "top_k_top_p_sampling_from_probs"
    check_probs(op, probs)
    check_parameter(op, "top_k", top_k, probs, torch.int32, torch.int64)
    check_parameter(op, "top_p", top_p, probs, torch.float32)
    check_keys(op, probs, seed, offset, offset_stride)


@kernel_op(
    reference=reference_sampling.top_k_top_p_sampling_from_probs,
    check=_check_top_k_top_p_sampling_from_probs,
    kernel="cuda",
    shape=shape_of_draw,
)
def _top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    joint: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each parameter as a tensor, or None and a number."""
    return _launch.draw(
        "top_k_top_p_sampling_from_probs",
        probs,
        (seed, seed_value, offset, offset_value, offset_stride),
        top_k=(top_k, top_k_value),
        top_p=(top_p, top_p_value),
        joint=joint,
    )
