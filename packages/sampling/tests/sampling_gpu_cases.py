"""Inputs on a GPU, and the comparison of kernels with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kestrel_runtime import backend
from kestrel_runtime.testing import assert_same_bits, by_reference
from kestrel_sampling import (
    min_p_sampling_from_probs,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS: dict[str, Callable[..., Any]] = {
    "none": sampling_from_probs,
    "top_p": lambda probs, **key: top_p_sampling_from_probs(probs, 0.9, **key),
    "top_p_0.1": lambda probs, **key: top_p_sampling_from_probs(probs, 0.1, **key),
    "top_p_0": lambda probs, **key: top_p_sampling_from_probs(probs, 0.0, **key),
    "top_k": lambda probs, **key: top_k_sampling_from_probs(probs, 50, **key),
    "top_k_1": lambda probs, **key: top_k_sampling_from_probs(probs, 1, **key),
    "both": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 50, 0.9, **key),
    "both_1000": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 1000, 0.9, **key),
    "many": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 9000, 0.8, **key),
    "joint": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 50, 0.3, filter_apply_order="joint", **key),
    "min_p": lambda probs, **key: min_p_sampling_from_probs(probs, 0.05, **key),
}


def on_cpu(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    moved = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
    keys = {name: a.cpu() if isinstance(a, torch.Tensor) else a for name, a in kwargs.items()}
    with backend("auto"):
        return op(*moved, **keys)


def normal(rows: int, width: int, seed: int, sharpness: float = 3.0) -> torch.Tensor:
    return sharpness * torch.randn(rows, width, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def distributions(rows: int, width: int, seed: int = 7, sharpness: float = 3.0) -> torch.Tensor:
    return torch.softmax(normal(rows, width, seed, sharpness), -1)


def keys(rows: int, first: int = 7) -> dict[str, torch.Tensor]:
    return {"seed": (torch.arange(rows) * 7919 - first).cuda(), "offset": (torch.arange(rows) * 5 + first).cuda()}


def assert_draws_as_the_reference(
    op: Callable[..., Any], probs: torch.Tensor, key: dict[str, torch.Tensor] | None = None
) -> None:
    key = key or keys(probs.shape[0])
    ids, valid = op(probs, return_valid=True, **key)
    want, want_valid = by_reference(op, probs, return_valid=True, **key)
    assert torch.equal(valid, want_valid)
    assert torch.equal(ids, want), (ids - want).nonzero()[:5]


def assert_same_probabilities(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """The same entries are kept. Kernels compute weights and their sum with 48 bits or more: results are rounded once,
    and 2e-6 covers the exponentials of softmax."""
    assert torch.equal(got > 0, want > 0), f"{what}: {int(((got > 0) != (want > 0)).sum())} entries"
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}")


def assert_close_logprobs(got: Any, want: Any, what: str = "result") -> None:
    """Ids and ranks are those of the reference. Sums are within 2e-6 of exact ones, and results are rounded once."""
    for name in ("ranks", "top_ids"):
        assert_same_bits(getattr(got, name), getattr(want, name), f"{what}.{name}")
    for name in ("logprobs", "top_logprobs"):
        one, other = getattr(got, name), getattr(want, name)
        same = (one == other) | (one.isnan() & other.isnan())
        error = torch.where(same, 0.0, (one.double() - other.double()).abs())
        bound = 2e-6 + 1.3e-7 * other.double().abs().nan_to_num(0, 0, 0)
        assert bool((error <= bound).all()), f"{what}.{name}: {error.max().item():.3e}"
