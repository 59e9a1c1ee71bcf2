"""Ops of a made-up family, for tests of what all ops share."""

from __future__ import annotations

import functools
import sys
import types

import torch

from kestrel_runtime import (
    UnsupportedError,
    check,
    kernel_op,
)

FAMILY = "kestrel_optest"
launches: list[str] = []


@functools.cache
def make_ops() -> types.SimpleNamespace:
    """Ops of a made-up family, so that nothing here collides with a real one.

    torch takes each op once, and the doctest run imports this file under a second name: so tests call this.
    """

    def scale_reference(x, factor=2.0, bias=None):
        y = x.float() * factor
        return (y if bias is None else y + bias.float()).to(x.dtype).transpose(0, 1).contiguous().transpose(0, 1)

    def scale_check(x, factor=2.0, bias=None, *, out=None):
        check.tensor("scale", "x", x, dtype=check.FLOATS, ndim=2)
        check.number("scale", "factor", factor)
        if bias is not None:
            check.shape("scale", "bias", bias, (x.shape[-1],))
        if out is not None:
            check.shape("scale", "out", out, x.shape)
        check.same("scale", "device", x=x, bias=bias, out=out)

    def scale(
        x: torch.Tensor, factor: float = 2.0, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scale."""
        launches.append("scale")
        raise UnsupportedError("float13 is not covered")

    def increment_reference(x, y=None):
        x.add_(1)
        if y is not None:
            y.add_(1)

    def increment_check(x, y=None):
        check.tensor("increment", "x", x, dtype=check.FLOATS)

    def increment(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        """Increment in place."""

    def quotient_check(x, y, by=1):
        check.tensor("quotient", "x", x, dtype=check.FLOATS)
        check.tensor("quotient", "y", y, dtype=check.FLOATS)
        check.number("quotient", "by", by, integer=True, minimum=1)

    def quotient(x: torch.Tensor, y: torch.Tensor, by: int = 1) -> torch.Tensor:
        """Launches without looking at its arguments, as kernels do."""
        return x.new_empty(y.numel() // by + [0][by // 100])

    def product_check(x, w, times=1, power=1.0, negate=False, mode="plain", *, out=None):
        check.tensor("product", "x", x, dtype=check.FLOATS, ndim=2)
        check.tensor("product", "w", w, dtype=check.FLOATS, ndim=2)
        check.number("product", "times", times, integer=True, minimum=0)
        check.number("product", "power", power, above=0)
        check.flag("product", "negate", negate)
        check.choice("product", "mode", mode, ("plain", "double"))

    def product_reference(x, w, times=1, power=1.0, negate=False, mode="plain"):
        y = (x.float() @ w.float()) ** power * times * (2 if mode == "double" else 1)
        return -y if negate else y

    def product(
        x: torch.Tensor,
        w: torch.Tensor,
        times: int = 1,
        power: float = 1.0,
        negate: bool = False,
        mode: str = "plain",
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Matrix product, with a scalar argument of every type."""

    def halves_check(x):
        check.tensor("halves", "x", x, dtype=check.FLOATS, ndim=2)

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two results, which the reference returns as views."""

    for function in (scale, increment, quotient, product, halves):
        function.__module__ = FAMILY
        function.__globals__.update(torch=torch)
    sys.modules.setdefault(FAMILY, types.ModuleType(FAMILY))
    made_scale = kernel_op(reference=scale_reference, check=scale_check, kernel="cuda")(scale)
    made_increment = kernel_op(reference=increment_reference, check=increment_check, mutates=("x", "y"))(increment)
    made_quotient = kernel_op(reference=lambda x, y, by=1: x + y, check=quotient_check, kernel="cuda")(quotient)
    made_product = kernel_op(reference=product_reference, check=product_check, out_may_be=())(product)
    made_halves = kernel_op(reference=lambda x: tuple(x.t().chunk(2)), check=halves_check)(halves)
    return types.SimpleNamespace(
        scale=made_scale, increment=made_increment, quotient=made_quotient, product=made_product, halves=made_halves
    )


def entry_of(public: object) -> object:
    """The object behind a public function, to reach the CUDA implementation with CPU tensors."""
    cells = dict(zip(public.__code__.co_freevars, public.__closure__, strict=True))  # type: ignore[attr-defined]
    return cells["on_cuda"].cell_contents.__self__
