"""CUDA graphs on the device of a model, whichever device is current."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _stream(index: int) -> tuple[torch.cuda.Stream, threading.RLock]:
    """The stream on which all graphs of a device are captured, one at a time: cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(index), threading.RLock()


def captured(work: Callable[[], Any], device: torch.device, **options: Any) -> torch.cuda.CUDAGraph:
    """What `work` launches on `device`. options: of ``torch.cuda.graph``, whose own stream is of one device alone."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream, lock = _stream(torch.cuda.current_device())
        with lock, torch.cuda.graph(graph, stream=stream, **options):
            work()
    return graph


def replay(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Launch a graph of `device` on its current stream."""
    with torch.cuda.device(device):
        graph.replay()
