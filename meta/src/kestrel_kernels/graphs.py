"""CUDA graphs on the device of a model, whichever device is current."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from kestrel_runtime.capture import undone_on_error


@functools.cache
def _stream(index: int) -> tuple[torch.cuda.Stream, threading.RLock]:
    """The stream on which all graphs of a device are captured, one at a time: cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(index), threading.RLock()


def captured(work: Callable[[], Any], device: torch.device, **options: Any) -> torch.cuda.CUDAGraph:
    """What `work` launches on `device`. options: of ``torch.cuda.graph``, whose own stream is of one device alone."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream, lock = _stream(torch.cuda.current_device())
        with lock, undone_on_error(graph, stream), torch.cuda.graph(graph, stream=stream, **options):
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that is invalid by now
                    _join_side_stream(stream)  # or the end of the capture hides the reason
                raise
    return graph


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """Of a high priority, so that its small kernels do not wait for the thread blocks of large ones beside them."""
    return torch.cuda.Stream(index, priority=-1)


def _join_side_stream(stream: torch.cuda.Stream) -> None:
    """Join what blocks of `Beside` left in the capture on this stream."""
    side = _side_stream(torch.cuda.current_device())
    with torch.cuda.stream(side):
        is_part = torch.cuda.is_current_stream_capturing()
    if is_part:
        stream.wait_stream(side)


class Beside:
    """A with-block whose launches a captured graph may run beside those that follow, until `join`.

    Blocks run one after the other, each behind all that was launched before it. Where no graph is captured, nothing
    changes. What a block reads or returns must not be freed before `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream = _side_stream(torch.cuda.current_device())
            self._before = torch.cuda.current_stream()

    def __enter__(self) -> Beside:
        if self._stream is not None:
            self._stream.wait_stream(self._before)
            torch.cuda.set_stream(self._stream)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._before)

    def join(self) -> None:
        """What is launched from now on follows this block and those before it."""
        if self._stream is not None:
            self._before.wait_stream(self._stream)


def replay(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Launch a graph of `device` on its current stream."""
    with torch.cuda.device(device):
        graph.replay()
