"""Comparison of results: distance in ulps or FP8 codes, error against float64, equality of bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .buffers import INTEGER_OF_WIDTH, twins


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, so that neighbours differ by one; both zeros map to 0."""
    width = 8 * x.element_size()
    bits = x.contiguous().view(INTEGER_OF_WIDTH[x.element_size()]).to(torch.int64) & ((1 << width) - 1)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits >> (width - 1) == 1, -magnitude, magnitude)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Steps from one representable value to the next between each pair, int64: 1 for neighbours, 0 for +0 and -0.

    0 where both are NaN, 2^62 where one is.
    """
    assert a.dtype == b.dtype, f"{a.dtype} against {b.dtype}"
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    distance = (_ordered(a) - _ordered(b)).abs()
    nan_a, nan_b = (x.isnan() if x.element_size() > 1 else x.float().isnan() for x in (a, b))
    distance = torch.where(nan_a & nan_b, torch.zeros_like(distance), distance)
    return torch.where(nan_a ^ nan_b, torch.full_like(distance, 2**62), distance)


def fp8_code_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """:func:`ulp_distance` for FP8 tensors (of the same float8 dtype)."""
    return ulp_distance(a, b)


def assert_close_to_f64(got: torch.Tensor, exact: torch.Tensor, baseline: torch.Tensor, slack: float = 1.1) -> None:
    """The error of ``got`` against the float64 ``exact`` is at most ``slack`` times that of ``baseline``.

    For kernels on a GPU: ``baseline`` is PyTorch's own composition in the dtype of ``got``. On a CPU its error depends
    on the machine, so tests of references use a bound in ulps instead. Both the Euclidean and the largest error count.
    The largest may in addition be half a unit in the last place of its element, which one rounding can cost; with fewer
    than 64 elements so may the Euclidean error. NaN and inf must be in the same places as in ``exact``. Elements where
    only ``baseline`` is not finite (it overflows in between) count in no error.
    """
    assert got.dtype == baseline.dtype, f"{got.dtype} against {baseline.dtype}"
    assert got.shape == exact.shape, f"{tuple(got.shape)} against {tuple(exact.shape)}"
    rounded = exact.to(got.dtype)
    finite = rounded.isfinite()
    torch.testing.assert_close(got[~finite], rounded[~finite], rtol=0, atol=0, equal_nan=True)
    assert bool(got[finite].isfinite().all()), "NaN or inf where the exact result is finite"
    finite &= baseline.isfinite()
    exact64 = exact.double()[finite]
    ours = (got.double()[finite] - exact64).abs()
    theirs = (baseline.double()[finite] - exact64).abs()
    half_ulp = 0.5 * torch.finfo(got.dtype).eps * exact64.abs() + 0.5 * torch.finfo(got.dtype).smallest_normal
    if ours.numel() == 0:
        return
    limit = slack * theirs.norm() + half_ulp.norm() * (ours.numel() < 64)  # few elements: its error is random
    assert ours.norm() <= limit, f"error {ours.norm():.3e} against {theirs.norm():.3e} of the baseline"
    worst = (ours - half_ulp).max()
    assert worst <= slack * theirs.max(), f"largest error {ours.max():.3e} against {theirs.max():.3e} of the baseline"


def _bits(x: torch.Tensor, any_nan: bool) -> torch.Tensor:
    if any_nan and x.dtype.is_floating_point:
        nan = x.isnan() if x.element_size() > 1 else x.float().isnan()
        x = x.clone()
        x.view(INTEGER_OF_WIDTH[x.element_size()]).masked_fill_(nan, 0x7F)
    return x.contiguous().view(INTEGER_OF_WIDTH.get(x.element_size(), torch.uint8))


def assert_same_bits(got: Any, want: Any, what: str = "result", *, any_nan: bool = False) -> None:
    """Two tensors, or two equal structures of tensors, agree in dtype, shape and every bit.

    any_nan: a NaN equals every other NaN. The message names the part that differs and its first elements.
    """
    if isinstance(want, (tuple, list)):
        assert isinstance(got, (tuple, list)), f"{what}: {type(got).__name__} against {type(want).__name__}"
        assert len(got) == len(want), f"{what}: {len(got)} against {len(want)} parts"
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(one, other, f"{what}[{index}]", any_nan=any_nan)
        return
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{what}: {got!r} against {want!r}"
        return
    assert isinstance(got, torch.Tensor), f"{what}: {type(got).__name__} against a tensor"
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (
        f"{what}: {got.dtype} {tuple(got.shape)} against {want.dtype} {tuple(want.shape)}"
    )
    differ = _bits(got, any_nan) != _bits(want, any_nan)
    if bool(differ.any()):
        flat = differ.flatten().nonzero().flatten()
        first = flat[:4].tolist()
        pairs = [(got.flatten()[i].item(), want.flatten()[i].item()) for i in first]
        raise AssertionError(f"{what}: {len(flat)} of {got.numel()} elements differ, at {first}: {pairs}")


def assert_runs_repeat(function: Callable[..., Any], *args: Any, runs: int = 2, **kwargs: Any) -> Any:
    """Every run on copies of the arguments gives the same bits, in results and in arguments; returns the result."""
    first: Any = None
    for run in range(runs):
        copies = twins((*args, *kwargs.values()))
        result = function(*copies[: len(args)], **dict(zip(kwargs, copies[len(args) :], strict=True)))
        left = [x for x in copies if isinstance(x, torch.Tensor)]
        if run == 0:
            first = (result, left)
            continue
        assert_same_bits(result, first[0], f"run {run + 1}: result")
        assert_same_bits(left, first[1], f"run {run + 1}: arguments")
    return first[0]
