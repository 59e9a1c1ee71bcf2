"""Captures of CUDA graphs that may fail.

CUDA refuses to end a capture that it has found invalid: the captured code read a value on the host, or left a stream
unjoined. torch (2.11 among others) then stays in the capture. Its allocator frees no memory that a second stream has
used and keeps the graph's pool, its generator raises, and ``torch.cuda.graph`` leaves its stream the current one.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterator

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: work of other threads does not invalidate the capture


@contextlib.contextmanager
def undone_on_error(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """For the block that captures `graph` on `stream`, which it makes current.

    If the block raises, torch is out of the capture afterwards, and the error goes on.
    """
    with torch.cuda.stream(stream):
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                if not _has_ended(graph):
                    _end(graph, stream)
            raise


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:  # raised until torch has ended the capture
        return False
    return True


def _end(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Let torch end an empty capture, which the driver begins on the same stream, in place of the invalid one."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, empty = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    if driver.cuStreamBeginCapture_v2(handle, _RELAXED) != 0:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the empty graph
            graph.capture_end()
    except RuntimeError:  # a torch that was out of the invalid capture already
        if torch.cuda.is_current_stream_capturing():
            driver.cuStreamEndCapture(handle, ctypes.byref(empty))
            driver.cuGraphDestroy(empty)
    graph.reset()  # releases the pool, whose memory may be large
