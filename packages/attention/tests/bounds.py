"""How far two computations of the same call may lie apart, in tests that compare them with each other.

Comparisons with float64 have bounds of their own: conftest.py, decode_oracle.py and prefill_oracle.py.
"""

from __future__ import annotations

import torch

ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
"""Numbers that agree in float32, each rounded once, are at most one unit in the last place apart: eps of them."""
SUMS = 2 * 2.0**-21 * 8
"""Two outputs of decode, each with an error of 2^-21 of the values (measured: EXPERIMENTS.md), which are below 8."""
LSE = 2 * 2.0**-18
"""Two LSEs, each with an error of 2^-18 (1 + |LSE|), the bound of prefill_oracle.py, which decode's are well within."""
ELEMENTWISE = 16 * 2.0**-24
"""Float32 results of some ten operations, of numbers about 1, with a rounding of 2^-24 each and approximate functions
of two units in the last place."""


def relative(dtype: torch.dtype, float32: float) -> float:
    """The bound of results of a dtype, relative to them: one rounding to 16 bits, or what float32 ones may differ."""
    return ROUNDING.get(dtype, float32)


def weights_of(dtype: torch.dtype) -> float:
    """Prefill rounds weights to the dtype of its products: half a unit of the weighed values, which are below 4."""
    return 4 * ROUNDING[dtype] / 2


def assert_outputs_alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """Outputs of decode."""
    torch.testing.assert_close(got, want, rtol=relative(want.dtype, SUMS), atol=SUMS)


def assert_prefill_alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """An output of prefill and one with exact weights."""
    torch.testing.assert_close(got, want, rtol=ROUNDING[want.dtype], atol=weights_of(want.dtype))


def assert_lse_alike(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=LSE, atol=LSE)
