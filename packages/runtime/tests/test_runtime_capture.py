"""What a capture that fails leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kestrel_runtime.bench import timer
from kestrel_runtime.capture import undone_on_error

MEGABYTE = 2**20


class Broken(Exception):
    pass


# -- without a GPU -----------------------------------------------------------------------------------------------------


class Graph:
    """A graph of which torch has ended the capture, or has not."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return 1, 0


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that are opened: none of them is there."""
    found: list[str] = []

    def opened(name: str) -> None:
        found.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", opened)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return found


@pytest.mark.parametrize("ended", [True, False])
def test_the_error_of_the_block_is_the_one_that_is_raised(drivers: list[str], ended: bool) -> None:
    graph: Any = Graph(ended)
    with pytest.raises(Broken), undone_on_error(graph, None):  # type: ignore[arg-type]
        raise Broken
    assert drivers == ([] if ended else ["libcuda.so.1"])  # torch is out of a capture that it has ended


def test_a_capture_that_succeeds_is_left_alone(drivers: list[str]) -> None:
    graph: Any = Graph(ended=False)
    with undone_on_error(graph, None):  # type: ignore[arg-type]
        pass
    assert drivers == []


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def by_the_timer(work: Callable[[], Any]) -> None:
    timer.capture(work, [()], 1)


def by_torch(work: Callable[[], Any]) -> None:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with undone_on_error(graph, stream), torch.cuda.graph(graph, stream=stream):
        work()


def raises(x: torch.Tensor) -> None:
    raise Broken


def reads_the_host(x: torch.Tensor) -> None:
    x.add_(1).item()


def does_not_join(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)


@pytest.fixture(params=[by_the_timer, by_torch])
def way(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], None]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[raises, reads_the_host, does_not_join])
def fail(request: pytest.FixtureRequest, way: Callable[[Callable[[], Any]], None]) -> Iterator[Callable[[], None]]:
    """A capture that allocates 64 MB, launches, and fails."""
    x = torch.ones(1, device="cuda")

    def work() -> None:
        torch.empty(64 * MEGABYTE, dtype=torch.uint8, device="cuda").fill_(1)
        request.param(x)

    def fail() -> None:
        try:
            way(work)
        except (Broken, RuntimeError):
            return
        pytest.fail("the capture did not fail")

    before = torch.cuda.current_stream()
    yield fail
    torch.cuda.set_stream(before)


@pytest.mark.gpu
def test_the_current_stream_is_that_of_before(fail: Callable[[], None]) -> None:
    before = torch.cuda.current_stream()
    fail()
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.gpu
def test_memory_that_two_streams_have_used_is_freed(fail: Callable[[], None]) -> None:
    fail()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    made = torch.empty(MEGABYTE, dtype=torch.uint8, device="cuda")
    made.record_stream(torch.cuda.Stream())
    del made
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator frees blocks that other streams are done with
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == before


@pytest.mark.gpu
def test_the_memory_of_the_capture_is_released(fail: Callable[[], None]) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    fail()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 64 * MEGABYTE


@pytest.mark.gpu
def test_random_numbers_can_be_drawn(fail: Callable[[], None]) -> None:
    fail()
    assert 0 <= float(torch.rand(1, device="cuda")) < 1


@pytest.mark.gpu
def test_another_graph_can_be_captured(fail: Callable[[], None]) -> None:
    fail()
    x = torch.zeros(4, device="cuda")
    graph = timer.capture(lambda: x.add_(torch.rand_like(x)), [()], 1)
    assert not x.any()
    graph.replay()
    once = x.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((once > 0).all())
    assert bool((x > once).all())
    assert not torch.equal(x - once, once)  # other numbers in each replay
