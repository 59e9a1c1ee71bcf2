"""The binary of one kernel family: located next to the family's Python files, loaded at the first launch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cute
from .errors import UnsupportedError

RUN_SM80 = ("86", "89")  # their GPUs run kernels of sm_80 where a build has none for them
OLDEST_DRIVER = 13000  # cuDriverGetVersion of R580, which the machine code needs


@dataclass(frozen=True)
class Manifest:
    """The record of a build, in ``_lib/manifest.json`` next to its binary."""

    family: str
    archs: tuple[str, ...]
    """Architectures that the binary runs on, as nvcc names them: "80", "86", "89", "90a", "100f", "120f"."""
    functions: tuple[str, ...]
    cute: bool
    """True when the binary holds CuTe kernels and needs NVIDIA's runtime library."""


def arch_of(capability: tuple[int, int]) -> str | None:
    """The architecture of our binaries that a GPU of this compute capability runs, or None."""
    major, minor = capability
    if major in (10, 12):  # family-specific code runs on every GPU of the family
        return f"{major}0f"
    return {(8, 0): "80", (8, 6): "86", (8, 9): "89", (9, 0): "90a"}.get((major, minor))


@functools.cache
def _device_arch(index: int) -> str | None:
    return arch_of(torch.cuda.get_device_capability(index))


def _driver_version() -> int:
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _check_driver() -> None:
    driver = _driver_version() if torch.cuda.is_available() else OLDEST_DRIVER
    if driver < OLDEST_DRIVER:
        raise UnsupportedError(f"the NVIDIA driver supports CUDA {driver / 1000:g}; R580 (CUDA 13.0) is the oldest")


class Binary:
    """Entry points of a family's shared library as attributes, each resolved once.

    ``Binary("kestrel_norm").rms_norm(out, x, weight, eps, 0.0)`` loads the library at the first use. Constructing one
    touches no file. A missing library (Python run from the source tree), an entry point that was not built, a GPU
    without machine code, and a driver older than R580 all raise UnsupportedError.
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self._lock = threading.Lock()
        self._module: Any = None

    @property
    def folder(self) -> Path:
        spec = importlib.util.find_spec(self.family)
        if spec is None or spec.origin is None:
            raise UnsupportedError(f"{self.family} is not installed")
        return Path(spec.origin).parent / "_lib"

    @functools.cached_property
    def manifest(self) -> Manifest | None:
        """The record of the build, or None when the family runs from its sources without one."""
        path = self.folder / "manifest.json"
        if not path.is_file():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(fields["family"], tuple(fields["archs"]), tuple(fields["functions"]), fields["cute"])

    def arch(self, device: torch.device | int) -> str:
        """The suffix of the entry points for a GPU, for example ``"sm90a"``."""
        index = device if isinstance(device, int) else device.index
        found = _device_arch(torch.cuda.current_device() if index is None else index)
        built = self.manifest.archs if self.manifest else ()
        if found is None or found not in built:
            capability = torch.cuda.get_device_capability(index)
            have = ", ".join(f"sm_{arch}" for arch in built) or "none"
            raise UnsupportedError(f"no machine code for a GPU of capability {capability} (built: {have})")
        return f"sm{found}"

    def kernel(self, variant: Any, device: torch.device | int) -> Callable[..., Any]:
        """The CuTe kernel of a variant on this GPU: from the library, or compiled now where the DSL is installed."""
        index = device if isinstance(device, int) else device.index
        arch = _device_arch(torch.cuda.current_device() if index is None else index)
        built, archs = (self.manifest.functions, self.manifest.archs) if self.manifest else ((), ())
        function = f"{variant.name}_sm{arch}"
        if function not in built and arch in RUN_SM80 and arch in archs:
            function = f"{variant.name}_sm80"
        if function in built:
            return self.function(function)
        if arch is None or (self.manifest is None and not cute.can_compile()):
            self.arch(device)  # raises, and names what is missing
        _check_driver()
        return cute.compiled(self.family, variant, str(arch))

    def function(self, name: str) -> Callable[..., Any]:
        """The entry point of this name."""
        module = self._load()
        try:
            return module.get_function(name)  # type: ignore[no-any-return]
        except AttributeError:
            raise UnsupportedError(f"the binary of {self.family} has no entry point {name}") from None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self.function(name)
        self.__dict__[name] = found
        return found

    def _load(self) -> Any:
        with self._lock:
            if self._module is None:
                self._module = self._open()
            return self._module

    @functools.cached_property
    def library(self) -> Path | None:
        """The shared library, plain or packed as in release wheels."""
        plain = self.folder / f"{self.family}.so"
        return next((path for path in (plain, packed(plain)) if path.is_file()), None)

    def _open(self) -> Any:
        if self.manifest is not None and not self.manifest.archs:
            raise UnsupportedError(f"{self.family} was built without kernels (KESTREL_ARCHS=none)")
        if self.manifest is None or self.library is None:
            raise UnsupportedError(f"{self.family} has no binary here: it runs from its sources, without a build")
        _check_driver()
        if self.manifest.cute:
            cute.open_runtime_library()
        return _load_library(self.library)


def packed(library: Path) -> Path:
    """The path of a library in a release wheel.

    Kernels of several types and architectures share most of their code. xz, which sees all of them at once, needs a
    quarter of the size that a wheel's own compression reaches.
    """
    return library.with_name(f"{library.name}.xz")


_loading = threading.Lock()


def _load_library(library: Path) -> Any:
    """The module of a library, loaded once per process by whichever thread comes first."""
    with _loading:
        return _loaded(library)


@functools.cache
def _loaded(library: Path) -> Any:
    import tvm_ffi

    tvm_ffi.register_error("UnsupportedError", UnsupportedError)
    if library.suffix == ".so":
        return tvm_ffi.load_module(str(library))
    # From memory first: no file is written, and a temporary folder may be mounted noexec.
    with contextlib.suppress(OSError, RuntimeError), unpacked(library, in_memory=True) as plain:
        return tvm_ffi.load_module(str(plain))
    try:
        with unpacked(library, in_memory=False) as plain:
            return tvm_ffi.load_module(str(plain))
    except OSError as error:
        raise UnsupportedError(
            f"{library.name} cannot be unpacked here: {error}; TMPDIR may name a folder for it"
        ) from error


@contextlib.contextmanager
def unpacked(library: Path, *, in_memory: bool) -> Iterator[Path]:
    """A packed library as a file to load. The file is removed afterwards; a loaded library does not need it."""
    try:
        import lzma
    except ImportError:
        raise UnsupportedError(
            "this Python was built without lzma: it cannot unpack kernels of release wheels"
        ) from None
    if in_memory and not hasattr(os, "memfd_create"):  # built for an old C library
        raise OSError("this Python has no files in memory")
    content = lzma.decompress(library.read_bytes())
    with tempfile.TemporaryDirectory(prefix="kestrel-") as folder, contextlib.ExitStack() as stack:
        plain = Path(folder) / library.stem
        if in_memory:
            file = stack.enter_context(open(os.memfd_create(library.stem), "wb", buffering=0))
            plain.symlink_to(f"/proc/self/fd/{file.fileno()}")
            at = memoryview(content)
            while at:
                at = at[file.write(at) :]
        else:
            plain.write_bytes(content)
        yield plain
