"""The pytest plugin: the marker ``gpu`` and the fixture ``kernels_only``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ..state import backend


def pytest_configure(config: Any) -> None:
    """Register the marker, and call each of MKL's vector functions once."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU with a kernel image for it")
    settle_vector_functions()


def settle_vector_functions() -> None:
    """Call MKL's vector functions from one thread, before any reference does.

    Where several threads make the first call of one, a thread may get a kernel of 11 bits: pytorch/pytorch#188792.
    """
    for dtype in (torch.float32, torch.float64):
        x = torch.full((16,), 0.5, dtype=dtype)
        for name in (
            "exp",
            "expm1",
            "log",
            "log1p",
            "log2",
            "log10",
            "sqrt",
            "sin",
            "cos",
            "tan",
            "tanh",
            "erf",
            "erfc",
        ):
            getattr(torch, name)(x)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip the tests marked gpu where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture  # type: ignore[untyped-decorator]
def kernels_only() -> Iterator[None]:
    """The test fails where an op would run its reference.

    For a module: ``pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]``.
    """
    with backend("kernel"):
        yield
