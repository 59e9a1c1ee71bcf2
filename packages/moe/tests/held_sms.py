"""Other work that holds SMs of a GPU while a test runs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HELD_BYTES = 120 * 1024
"""Shared memory of a CTA that holds an SM: an SM has room for one, and beside it for small kernels only."""
SECONDS = 20
"""The longest that SMs are held: whatever waits for them fails its test, and does not run for ever."""


def count_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def _kernel() -> Any:
    utils = pytest.importorskip("torch.cuda._utils")
    source = Path(__file__).with_name("hold_sms.ptx").read_text()
    kernel = utils._cuda_load_module(source, ["hold_sms"])["hold_sms"]
    kernel.set_shared_memory_config(HELD_BYTES)
    return kernel


@contextlib.contextmanager
def held_sms(sms: int) -> Iterator[Callable[[], None]]:
    """Hold so many SMs until the yielded function is called, or the block ends.

    What runs meanwhile must have run before: loading a kernel may wait for all others.
    """
    flags = torch.zeros(sms + 1, dtype=torch.int32).pin_memory()
    started, released = flags[:-1], flags[-1:]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    _kernel()((sms, 1, 1), (1, 1, 1), [started, released, SECONDS * 1000], HELD_BYTES, stream)

    def release() -> None:
        released[0] = 1

    try:
        until(lambda: bool(started.all()), f"{sms} SMs are held")
        yield release
    finally:
        release()
        stream.synchronize()


def until(condition: Callable[[], bool], what: str) -> None:
    """Fails after half of the time for which SMs are held."""
    end = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < end, f"not within {SECONDS / 2} seconds: {what}"
        time.sleep(1e-4)
