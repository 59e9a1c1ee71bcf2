"""CUDA graphs of a model that lies on another GPU than the current one, with torch.cuda replaced by a record."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kestrel_kernels import graphs


@pytest.fixture
def log(monkeypatch):
    """Names of what is called; (call, current device) for what depends on it."""
    found, current = [], ["cuda:0"]

    @contextlib.contextmanager
    def device(of):
        before, current[0] = current[0], current[0] if of.index is None else str(of)
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def graph(of, *, stream, **options):
        found.append(("capture", current[0], stream, options))
        yield
        found.append(("captured", current[0]))

    fakes = {
        "device": device,
        "graph": graph,
        "current_device": lambda: int(current[0].removeprefix("cuda:")),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": lambda of: found.append(("stream", of)) or f"a stream of {of}",
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: found.append(("replay", current[0]))),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs._stream.cache_clear()
    yield found
    graphs._stream.cache_clear()
    assert current == ["cuda:0"]


def test_a_graph_is_captured_on_a_stream_of_the_models_device(log):
    graphs.captured(lambda: log.append("work"), torch.device("cuda:1"), capture_error_mode="thread_local")
    options = {"capture_error_mode": "thread_local"}
    assert log[1:] == [("capture", "cuda:1", "a stream of 1", options), "work", ("captured", "cuda:1")]


def test_all_graphs_of_a_device_are_captured_on_one_stream(log):
    for device in ("cuda:1", "cuda:0", "cuda:1", "cuda"):
        graphs.captured(lambda: None, torch.device(device))
    assert [of for name, of, *_ in log if name == "stream"] == [1, 0]
    streams = [stream for name, _, stream, *_ in (each for each in log if each[0] == "capture")]
    assert streams == ["a stream of 1", "a stream of 0", "a stream of 1", "a stream of 0"]


def test_a_graph_is_replayed_on_the_models_device(log):
    graph = graphs.captured(lambda: None, torch.device("cuda:1"))
    del log[:]
    graphs.replay(graph, torch.device("cuda:1"))
    assert log == [("replay", "cuda:1")]


class Refused(Exception):
    pass


@pytest.mark.parametrize("is_part", [True, False])
def test_work_that_fails_in_a_block_leaves_no_open_block_to_the_end_of_the_capture(log, streams, is_part):
    """Or the error of a capture with unjoined work would hide the work's own."""
    streams.capturing[0] = is_part

    def fail():
        raise Refused

    with pytest.raises(Refused):
        graphs.captured(fail, torch.device("cuda:0"))
    assert streams.log == (["main waits for side"] if is_part else [])


@pytest.fixture
def streams(monkeypatch):
    """Streams that log what waits for what, under a capture."""
    found, current, made = [], [], {}

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            found.append(f"{self.name} waits for {other.name}")

    current.append(Stream("main"))
    capturing = [True]
    fakes = {
        "is_current_stream_capturing": lambda: capturing[0],
        "current_device": lambda: 0,
        "current_stream": lambda: current[-1],
        "set_stream": lambda stream: current.append(stream),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": lambda index, priority=0: made.setdefault(priority, Stream("side" if priority else "main")),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs._side_stream.cache_clear()
    launch = lambda name: found.append(f"{name} on {current[-1].name}")  # noqa: E731
    yield SimpleNamespace(log=found, launch=launch, capturing=capturing)
    graphs._side_stream.cache_clear()


def run_two_blocks(launch):
    launch("first")
    with graphs.Beside(torch.device("cuda")):
        launch("a")
    launch("second")
    with graphs.Beside(torch.device("cuda")) as block:
        launch("b")
    launch("third")
    block.join()
    launch("last")


def test_blocks_of_a_captured_graph_run_beside_what_follows_until_they_are_joined(streams):
    run_two_blocks(streams.launch)
    forks = ["side waits for main", "a on side", "second on main", "side waits for main", "b on side"]
    assert streams.log == ["first on main", *forks, "third on main", "main waits for side", "last on main"]


def test_where_no_graph_is_captured_blocks_run_in_order(streams):
    streams.capturing[0] = False
    run_two_blocks(streams.launch)
    assert streams.log == [f"{name} on main" for name in ("first", "a", "second", "b", "third", "last")]
    graphs.Beside(torch.device("cpu")).join()  # asks no GPU
