from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kestrel_runtime.testing import kernels_only, pytest_collection_modifyitems, pytest_configure  # noqa: F401

sys.path.append(str(Path(__file__).parent))  # gpu_buffers, which tests import by name

from gpu_buffers import comparisons


@pytest.fixture(autouse=True)
def _compared() -> Iterator[None]:
    comparisons.clear()
    yield
    failed = torch.stack([differs for _, differs in comparisons]).nonzero().flatten().tolist() if comparisons else []
    assert not failed, f"{len(failed)} of {len(comparisons)} differ: {[comparisons[i][0] for i in failed[:5]]}"
