"""From the variants of a family to its shared library and manifest."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import worker

ARCHS = ("80", "86", "89", "90a", "100f", "120f")  # those of ci/matrix.json, which no sdist holds
RUNTIME = "libcute_dsl_runtime.so"
MAX_PROCESSES = 16  # each imports the DSL: 0.5 s of CPU time, 0.5 GB of memory


@dataclass(frozen=True)
class Family:
    """What is built: the folder that holds the Python package, and the package's name."""

    source: Path
    package: str

    @property
    def has_kernels(self) -> bool:
        return (self.source / self.package / "kernels" / "variants.py").is_file()

    @property
    def host_sources(self) -> list[Path]:
        """C++ that launches kernels: each file holds the entry point of its name."""
        return sorted(self.source.parent.glob("csrc/*.cpp"))


def archs_from_environment() -> tuple[str, ...]:
    """The architectures to build: those named in KESTREL_ARCHS ("90a", "80;90a"), none ("none"), or all."""
    named = re.findall(r"[^;, ]+", os.environ.get("KESTREL_ARCHS", ""))
    if named == ["none"]:
        return ()
    for arch in named:
        if arch not in ARCHS:
            raise SystemExit(f"KESTREL_ARCHS: expected architectures from {', '.join(ARCHS)}, got {arch!r}")
    return tuple(arch for arch in ARCHS if arch in named) if named else ARCHS


def build(family: Family, output: Path, archs: tuple[str, ...], keep: Path | None = None) -> list[Path]:
    """Write the library and its manifest into ``output`` and return the files.

    Without kernels or architectures that is the manifest alone, and neither the DSL nor a compiler is needed.
    """
    output.mkdir(parents=True, exist_ok=True)
    manifest = output / "manifest.json"
    if not family.has_kernels or not archs:
        _write_manifest(manifest, family, (), [])
        return [manifest]
    library = output / f"{family.package}.so"
    compiler, runtime_folder = _compiler(), find_runtime_folder()
    with tempfile.TemporaryDirectory() as folder:
        objects = Path(folder)
        functions = _compile(family, archs, objects, keep)
        for source in family.host_sources:
            _compile_host(source, objects / f"{source.stem}.o", compiler)
            functions.append(source.stem)
        _link([objects / f"{function}.o" for function in functions], library, compiler, runtime_folder)
    _write_manifest(manifest, family, archs, functions)
    return [library, manifest]


def build_object(family: Family, output: Path, archs: tuple[str, ...], keep: Path | None = None) -> None:
    """Write one object file with every kernel, for a library that CMake links out of CUDA C++ and CuTe kernels."""
    with tempfile.TemporaryDirectory() as folder:
        functions = _compile(family, archs, Path(folder), keep)
        objects = [str(Path(folder, f"{function}.o")) for function in functions]
        subprocess.run([*_compiler(), "-r", "-nostdlib", "-o", str(output), *objects], check=True)


def function_names(family: Family, archs: tuple[str, ...]) -> list[str]:
    """The entry points that a build has. Does not import the DSL."""
    return sorted(f"{name}_sm{arch}" for name, arch in _jobs(family, archs)) if family.has_kernels else []


def _jobs(family: Family, archs: tuple[str, ...]) -> list[tuple[str, str]]:
    """Variants and the architectures to compile them for; those whose names match KESTREL_VARIANTS, if it is set."""
    asked = re.compile(os.environ.get("KESTREL_VARIANTS", ""))
    variants = worker.load_variants(family.source, family.package)
    found = [(name, arch) for name, variant in variants.items() for arch in archs if _is_built(variant, arch, archs)]
    return [(name, arch) for name, arch in found if asked.search(name)]


def _is_built(variant: Any, arch: str, archs: tuple[str, ...]) -> bool:
    """Whether a build for ``archs`` compiles a variant for ``arch``: where the variant lists it, if it lists any.

    GPUs of sm_86 and sm_89 run the kernel of sm_80, but on sm_89 one that ``converts_fp8``.
    """
    shares = ("86",) if getattr(variant, "converts_fp8", False) else ("86", "89")
    return arch in getattr(variant, "archs", archs) and not ("80" in archs and arch in shares)


def _compile(family: Family, archs: tuple[str, ...], objects: Path, keep: Path | None) -> list[str]:
    """Compile every variant for every architecture in one process per CPU, MAX_PROCESSES at most."""
    jobs = _jobs(family, archs)
    count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(jobs))
    shares = [jobs[first::count] for first in range(count)]
    # A build gives the same binary with and without a GPU, so the GPU is hidden.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
    for name in [name for name in environment if name.startswith("CUTE_DSL_")]:
        del environment[name]
    processes = []
    try:
        for share in shares:
            process = subprocess.Popen(
                [sys.executable, worker.__file__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
            work = {"source": str(family.source), "package": family.package, "jobs": share, "objects": str(objects)}
            assert process.stdin is not None
            process.stdin.write(json.dumps({**work, "keep": str(keep) if keep else None}))
            process.stdin.close()
            process.stdin = None
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, text in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"compiling the CuTe kernels of {family.package} failed:\n{text}")
        for line in text.splitlines():
            print(f"  {line}", file=sys.stderr)
    return sorted(f"{name}_sm{arch}" for name, arch in jobs)


def _compiler() -> list[str]:
    """The C++ compiler that links, and the arguments that CXX gives it."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        raise SystemExit(f"no C++ compiler to link with: {compiler[0]!r} was not found; install g++ or set CXX")
    return compiler


def find_runtime_folder() -> Path:
    """The folder of NVIDIA's runtime library for CUDA 13."""
    import nvidia_cutlass_dsl

    folders = [Path(root) / "cu13" / "lib" for root in nvidia_cutlass_dsl.__path__]
    for folder in folders:
        if (folder / RUNTIME).is_file():
            return folder
    searched = ", ".join(map(str, folders))
    raise SystemExit(f"{RUNTIME} for CUDA 13 was not found in {searched}: install nvidia-cutlass-dsl[cu13]")


def _compile_host(source: Path, output: Path, compiler: list[str]) -> None:
    import nvidia
    import tvm_ffi.libinfo

    include = Path(tvm_ffi.libinfo.find_include_path())
    cuda = [folder for root in nvidia.__path__ if (folder := Path(root) / "cu13" / "include").is_dir()]
    # Errors name the file that raises them: without the folders, a wheel is the same wherever it is built.
    maps = [f"-ffile-prefix-map={folder}=." for folder in (include.parents[1], source.parent)]
    options = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *maps]
    includes = [word for folder in (include, *cuda) for word in ("-isystem", folder)]
    command = [*compiler, *options, *includes, "-c", source, "-o", output]
    subprocess.run([str(part) for part in command], check=True)


def _link(objects: list[Path], library: Path, compiler: list[str], runtime_folder: Path) -> None:
    import tvm_ffi.libinfo

    tvm_ffi_folder = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    # The library gets no search path and no build id: kestrel_runtime opens its dependencies first.
    command = [
        *(*compiler, "-shared", "-o", library, *objects),
        *(f"-L{runtime_folder}", f"-l:{RUNTIME}", f"-L{tvm_ffi_folder}", "-ltvm_ffi"),
        *("-Wl,--no-undefined", "-Wl,--exclude-libs,ALL", "-Wl,--build-id=none", "-Wl,--gc-sections", "-Wl,-s"),
    ]
    subprocess.run([str(part) for part in command], check=True)


def _write_manifest(path: Path, family: Family, archs: tuple[str, ...], functions: list[str]) -> None:
    fields = {"family": family.package, "archs": list(archs), "functions": functions, "cute": bool(functions)}
    path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
