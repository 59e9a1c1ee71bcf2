"""What the sampling ops share: parameters that are a number or one per row, and where the randomness comes from."""

from __future__ import annotations

import sys

import torch

from kestrel_runtime import check

Keys = tuple[torch.Tensor | None, int, torch.Tensor | None, int]


def number_or_tensor(op: str, name: str, value: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """A float parameter as (tensor, 0.0) or (None, number). The op rounds the number to float32, as the tensor is."""
    if isinstance(value, torch.Tensor):
        return value, 0.0
    if type(value) is float and value == value:  # the common case takes no checks
        return None, value
    check.number(op, name, value)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        check.fail(op, name, f"at most {sys.float_info.max} in magnitude", "a larger integer")
    return None, float(value)


def count_or_tensor(op: str, name: str, value: int | torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """A count as (tensor, 0) or (None, number)."""
    if isinstance(value, torch.Tensor):
        return value, 0
    if type(value) is not int or not -(2**63) <= value < 2**63:
        check.number(op, name, value, integer=True, minimum=-(2**63), maximum=2**63 - 1)
    return None, value


def is_joint(op: str, filter_apply_order: str) -> bool:
    """Whether top-k and top-p both look at the whole row."""
    if filter_apply_order == "top_k_first":
        return False
    check.choice(op, "filter_apply_order", filter_apply_order, ("top_k_first", "joint"))
    return True


def integer_or_tensor(op: str, name: str, value: int | torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """An integer parameter as (tensor, 0) or (None, number); 64-bit unsigned numbers wrap to signed."""
    if isinstance(value, torch.Tensor):
        return value, 0
    check.number(op, name, value, integer=True, minimum=-(2**63), maximum=2**64 - 1)
    return None, value - 2**64 if value >= 2**63 else value


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the stream of ``device``, which need not be the current device."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def keys(
    op: str,
    probs: torch.Tensor,
    generator: torch.Generator | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    return_valid: bool,
    name: str = "probs",
) -> Keys:
    """(seed tensor, seed, offset tensor, offset) of a call.

    Without a seed one 63-bit seed comes from the generator and row b uses offset b. With one, the offset is 0 unless
    given. Drawing from a generator stays on the device.
    """
    check.flag(op, "return_valid", return_valid)
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor) and generator is None:
        return seed, 0, offset, 0  # as in a captured graph: what they are is for the launch to check
    check.tensor(op, name, probs, ndim=2)
    if probs.is_cuda and not torch.compiler.is_compiling() and is_capturing(probs.device):
        for argument, value in (("seed", seed), ("offset", offset)):
            if not isinstance(value, torch.Tensor):
                check.fail(
                    op, argument, "a tensor while a CUDA graph is captured (a replay must see new numbers)", value
                )
    if seed is None:
        if offset is not None:
            check.fail(op, "offset", "None without a seed", offset)
        if generator is not None and not isinstance(generator, torch.Generator):
            check.fail(op, "generator", "a torch.Generator", type(generator).__name__, TypeError)
        if generator is not None and generator.device.type != probs.device.type:
            check.fail(op, "generator", f"a generator on {probs.device.type}", generator.device.type)
        seed = torch.randint(2**63 - 1, (1,), generator=generator, dtype=torch.int64, device=probs.device)
        offset = torch.arange(probs.shape[0], dtype=torch.int64, device=probs.device)
    elif generator is not None:
        check.fail(op, "generator", "None with a seed", "a generator")
    return (
        *integer_or_tensor(op, "seed", seed),
        *integer_or_tensor(op, "offset", 0 if offset is None else offset),
    )


def check_probs(op: str, probs: torch.Tensor, name: str = "probs") -> None:
    """[B, V] floats, V at least 1."""
    check.tensor(op, name, probs, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    if probs.shape[1] == 0:
        check.fail(op, name, "at least one entry per row", f"shape {tuple(probs.shape)}")


def check_parameter(
    op: str,
    name: str,
    value: torch.Tensor | None,
    rows: torch.Tensor,
    *dtypes: torch.dtype,
    rows_name: str = "probs",
) -> None:
    """A parameter given as a tensor: [1] or [B], of one of the dtypes, where the rows are."""
    if value is not None:
        check.tensor(op, name, value, dtype=dtypes, ndim=1, last_contiguous=True)
        check.shape(op, name, value, (1 if value.shape[0] == 1 else rows.shape[0],))
        check.same(op, "device", **{rows_name: rows, name: value})


def shape_of_draw(probs: torch.Tensor, *_parameters: object) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [B] and valid bool [B]; the references need V as a number."""
    return (
        torch.empty(probs.shape[:1], dtype=torch.int32, device=probs.device),
        torch.empty(probs.shape[:1], dtype=torch.bool, device=probs.device),
    )


def check_keys(
    op: str, rows: torch.Tensor, seed: torch.Tensor | None, offset: torch.Tensor | None, rows_name: str = "probs"
) -> None:
    """Seeds and offsets given as tensors: int64 [1] or [B]."""
    check_parameter(op, "seed", seed, rows, torch.int64, rows_name=rows_name)
    check_parameter(op, "offset", offset, rows, torch.int64, rows_name=rows_name)
