"""How far a rotation may be from the exact one, and from another rotation in float32."""

from __future__ import annotations

import torch


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, before: torch.Tensor) -> None:
    """Half a unit in the last place, and the error of x*c - y*s in float32.

    got, before: the heads [..., D] after and before. exact: float64. With M the largest element of a head and
    u = 2^-24: two products, u M each, and their sum, 1.5 u M; at most 4 u M.
    """
    info = torch.finfo(got.dtype)
    largest = before.double().abs().amax(-1, keepdim=True)
    bound = 0.5 * info.eps * (exact.abs() + info.smallest_normal) + 4 * 2**-24 * largest
    error = (got.double() - exact).abs()
    assert bool((error <= bound).all()), f"largest excess {(error - bound).max():.3e}"


def assert_same_rotation(got: torch.Tensor, want: torch.Tensor) -> None:
    """Two float32 rotations, each with two products and a sum that round.

    With M the largest element and u = 2^-24, the products are off by u M each and their sum, at most sqrt(2) M, by
    1.5 u M: 3.5 u M for each side.
    """
    torch.testing.assert_close(got, want, rtol=0, atol=7 * 2**-24 * float(want.abs().max()))
