"""NVIDIA's CuTe DSL runtime library: where pip put it, and opening it before a binary that needs it.

Its licence does not let us ship it inside our wheels, so families with CuTe kernels depend on the distribution
``nvidia-cutlass-dsl-libs-cu13``. Nothing here imports the DSL.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from .errors import UnsupportedError

LIBRARY = "libcute_dsl_runtime.so"
DISTRIBUTION = "nvidia-cutlass-dsl-libs-cu13>=4.7.1,<5"


def runtime_library_path() -> Path | None:
    """Path of NVIDIA's CUDA 13 runtime library for CuTe kernels, or None when it is not installed."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or spec.submodule_search_locations is None:
        return None
    for location in spec.submodule_search_locations:
        path = Path(location) / "cu13" / "lib" / LIBRARY
        if path.is_file():
            return path
    return None


@functools.cache
def open_runtime_library() -> ctypes.CDLL:
    """Open the runtime library once per process; the binaries linked against it then find it already loaded."""
    path = runtime_library_path()
    if path is None:
        raise UnsupportedError(f"NVIDIA's {LIBRARY} is not installed; install {DISTRIBUTION}")
    return ctypes.CDLL(str(path))
