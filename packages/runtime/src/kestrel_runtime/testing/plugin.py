"""The pytest plugin: the marker ``gpu`` and the fixture ``kernels_only``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ..state import backend


def pytest_configure(config: Any) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU with a kernel image for it")


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
