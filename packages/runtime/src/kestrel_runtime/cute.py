"""NVIDIA's CuTe DSL: its runtime library, and compilation on first use of kernels that the binary lacks.

The licence of the runtime library forbids shipping it inside our wheels, so families with CuTe kernels depend on the
distribution ``nvidia-cutlass-dsl-libs-cu13``. The DSL itself comes with a family's extra ``[jit]``. It is imported only
when a kernel is compiled.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import UnsupportedError

LIBRARY = "libcute_dsl_runtime.so"
DISTRIBUTION = "nvidia-cutlass-dsl-libs-cu13>=4.7.1,<5"
_DSL = "nvidia-cutlass-dsl"
_compiling = threading.Lock()  # the DSL is not thread-safe
_loaded: list[Any] = []  # modules stay alive as long as the process: their functions are in use


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


@functools.cache
def compiled(family: str, variant: Any, arch: str) -> Callable[..., Any]:
    """The entry point of a variant (see a family's kernels/variants.py) for an architecture such as "90a".

    It is compiled on first use, which takes seconds, and kept on disk as an object file. The file's name changes with
    the kernel sources, the variant, the DSL and the processor. Two processes may compile the same kernel; each replaces
    the file as a whole. If the folder cannot be written, each process compiles its own, and one warning says so.

    Raises UnsupportedError where the DSL is not installed; the message names the extra that installs it.
    """
    if not can_compile():
        extra = f"{family.replace('_', '-')}[jit]"
        raise UnsupportedError(f"this case has no kernel in the wheel; the extra {extra} compiles one")
    function = f"{variant.name}_sm{arch}"
    folder = cache_folder()
    file = folder / family / f"{function}-{_digest(family, variant, arch)}.o" if folder else None
    with _compiling:
        if file is not None and file.is_file():
            try:
                return _load(file, function)
            except Exception as error:
                warnings.warn(f"{file} cannot be loaded and is compiled again: {error}", RuntimeWarning, stacklevel=2)
        return _compile(variant, arch, function, file)


def cache_folder() -> Path | None:
    """The folder of compiled kernels: ``kestrel-kernels`` in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "kestrel-kernels"
    except RuntimeError:
        return None


@functools.cache
def can_compile() -> bool:
    """Whether the DSL itself is installed, not only its runtime library, which shares its package folder."""
    try:
        importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError:
        return False
    return runtime_library_path() is not None


def _digest(family: str, variant: Any, arch: str) -> str:
    digest = hashlib.sha256()
    for package in (f"{family}.kernels", "kestrel_runtime.cute_dsl"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for source in sorted(Path(spec.origin).parent.glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = [importlib.metadata.version(name) for name in (_DSL, "apache-tvm-ffi")]
    digest.update(repr((variant, arch, versions, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """The instruction set of this processor: host code is compiled for it, and machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(variant: Any, arch: str, function: str, file: Path | None) -> Callable[..., Any]:
    import cutlass.cute as cute

    kernel, arguments = variant.kernel(arch)
    made = cute.compile(kernel, *arguments, options=f"--enable-tvm-ffi --gpu-arch sm_{arch}")
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / f"{function}.o"
        made.export_to_c(str(fresh), function_name=function, export_only_tvm_ffi_symbols=True)
        if file is not None:
            _keep(fresh, file)
        return _load(fresh, function)


def _keep(fresh: Path, file: Path) -> None:
    """Put a copy in place atomically; warn once where the folder cannot be written."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            Path(shutil.copy(fresh, folder)).replace(file)
    except OSError as error:
        _say_once(f"compiled kernels cannot be kept in {file.parent}: {error.strerror or error}")


def _load(file: Path, function: str) -> Callable[..., Any]:
    import cutlass.cute as cute

    module = cute.runtime.load_module(str(file), enable_tvm_ffi=True)
    _loaded.append(module)
    return getattr(module, function)  # type: ignore[no-any-return]


@functools.cache
def _say_once(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=4)
