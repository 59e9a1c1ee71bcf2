"""CUDA graphs on the device of a model, whichever device is current."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], Any], device: torch.device, **options: Any) -> torch.cuda.CUDAGraph:
    """What `work` launches on `device`. options: of ``torch.cuda.graph``, whose own stream is of one device alone."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device), **options):
        work()
    return graph


def replay(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Launch a graph of `device` on its current stream."""
    with torch.cuda.device(device):
        graph.replay()
