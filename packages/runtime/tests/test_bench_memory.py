"""Between shapes, memory is freed, and the driver has time to clear it before the next figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kestrel_runtime.bench import rows

GB = 10**9


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose allocator holds 600 GB, of which 200 GB are in use; notes what happens, in order."""
    found = SimpleNamespace(reserved=600 * GB, done=[])

    def empty_cache() -> None:
        found.done.append("free")
        found.reserved = min(found.reserved, 200 * GB)

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: found.reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(rows.time, "sleep", found.done.append)
    return found


def test_freed_memory_is_waited_for_at_the_rate_of_the_driver(gpu: SimpleNamespace) -> None:
    rows._free_cached_memory()
    assert gpu.done == ["free", 400 * GB / 2e11]
    rows._free_cached_memory()
    assert gpu.done[2:] == ["free", 0.0]


def test_memory_is_freed_after_each_shape_that_is_timed(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(benchmark: object, shape: str, *_: object) -> list[str]:
        gpu.done.append(shape)
        return [shape]

    monkeypatch.setattr(rows, "_measure_shape", measured)
    benchmark = SimpleNamespace(candidates=dict, targets=dict.fromkeys(("a", "b", "c")), name="x")
    assert list(rows.measure(benchmark, ["a", "c"])) == [["a"], ["c"]]
    assert gpu.done == ["a", "free", 2.0, "c", "free", 0.0]
