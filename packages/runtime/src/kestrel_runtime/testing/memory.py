"""Large tensors on a GPU that several test processes share."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_BYTES = 2**30


@contextlib.contextmanager
def large_allocation(gib: float) -> Iterator[None]:
    """A test, or a part of one, whose tensors take up to ``gib`` GiB of the current GPU; from some 2 GiB on.

    One process at a time runs such a part on each GPU: a lock of a file in the folder for temporary files. No memory
    stays cached after it. Skips where the GPU has less memory in all. Fails if the tensors took more than ``gib``.
    As a decorator it stands above ``pytest.mark.parametrize`` or below it.

    >>> @large_allocation(gib=5)
    ... def test_rows_far_apart(): ...
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if gpu.total_memory < gib * _BYTES:
        pytest.skip(f"needs {gib} GiB of memory, {gpu.name} has {gpu.total_memory / _BYTES:.1f}")
    with Path(tempfile.gettempdir(), f"kestrel-tests-{gpu.uuid}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file, or the end of the process, releases it
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
            most = torch.cuda.max_memory_allocated() / _BYTES
            assert most <= gib, f"took {most:.2f} GiB, not {gib} at most"
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold the tensors
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # after an illegal access, which is the error to report
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
