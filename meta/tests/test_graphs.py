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
