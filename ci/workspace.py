"""Support of noxfile.py: the packages of this repository, their wheels, and environments that sessions share.

ci/matrix.json holds the packages and architectures as data; everything else about a package is read from its
pyproject.toml.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import nox

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".nox"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
MATRIX: dict[str, Any] = json.loads((ROOT / "ci" / "matrix.json").read_text())
ARCHS: list[str] = MATRIX["archs"]
CORES = len(os.sched_getaffinity(0))
Item = TypeVar("Item")
Result = TypeVar("Result")

# The time of every entry of a wheel, which is a zip file.
BUILD_ENVIRONMENT = {"SOURCE_DATE_EPOCH": "1577836800", "PIP_CONSTRAINT": str(CONSTRAINTS)}


@dataclass(frozen=True)
class Package:
    """One distribution of this repository."""

    name: str
    folder: str

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @cached_property
    def project(self) -> dict[str, Any]:
        return nox.project.load_toml(self.path / "pyproject.toml")

    @property
    def distribution(self) -> str:
        return str(self.project["project"]["name"])

    @property
    def module(self) -> str:
        return self.distribution.replace("-", "_")

    def build_requires(self, kernels: bool) -> list[str]:
        """What the build backend asks for: the backend itself, and the compilers when the wheel holds kernels."""
        requires = list(self.project["build-system"]["requires"])
        if kernels:
            tool = self.project.get("tool", {})
            hooks = tool.get("hatch", {}).get("build", {}).get("targets", {}).get("wheel", {}).get("hooks", {})
            requires += tool.get("scikit-build", {}).get("build", {}).get("requires", [])
            requires += hooks.get("custom", {}).get("kernel-dependencies", [])
        return requires

    @property
    def has_kernels(self) -> bool:
        return self.name not in ("runtime", "meta")

    @property
    def dependencies(self) -> list[str]:
        """Requirements that come from an index."""
        return [each for each in self.project["project"]["dependencies"] if not each.startswith("kestrel-")]

    @property
    def siblings(self) -> list[Package]:
        """Requirements that come from this repository."""
        by_name = {package.distribution: package for package in PACKAGES.values()}
        mentioned = [each for each in self.project["project"]["dependencies"] if each.startswith("kestrel-")]
        return [by_name[each.split("==")[0]] for each in mentioned]

    @property
    def shared_inputs(self) -> list[str]:
        """Folders outside the package that the build reads: those that its sdist includes."""
        tool = self.project.get("tool", {})
        scikit, hatch = tool.get("scikit-build", {}), tool.get("hatch", {}).get("build", {}).get("targets", {})
        taken = [*scikit.get("sdist", {}).get("force-include", {}), *hatch.get("sdist", {}).get("force-include", {})]
        return [str((self.path / each).resolve().relative_to(ROOT)) for each in taken]

    @cached_property
    def source_bytes(self) -> int:
        """How much there is to compile."""
        folders = ("csrc", f"src/{self.module}/kernels")
        files = [path for folder in folders for path in (self.path / folder).glob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    def fingerprint(self, *extra: str) -> str:
        """Changes when anything that this package's build reads changes."""
        digest = hashlib.sha256("\0".join(extra).encode() + CONSTRAINTS.read_bytes())
        for file in files_under(self.folder, *self.shared_inputs):
            if not file.startswith((f"{self.folder}/tests/", f"{self.folder}/results/")):
                digest.update(f"{file}\0".encode())
                digest.update((ROOT / file).read_bytes())
        return digest.hexdigest()


PACKAGES = {name: Package(name, folder) for name, folder in MATRIX["packages"].items()}
FAMILIES = [package for package in PACKAGES.values() if package.has_kernels]


def closure(*packages: Package) -> list[Package]:
    """The packages and every sibling they need, each after what it needs."""
    ordered: dict[str, Package] = {}

    def visit(package: Package) -> None:
        for sibling in package.siblings:
            visit(sibling)
        ordered.setdefault(package.name, package)

    for package in packages:
        visit(package)
    return list(ordered.values())


def requirements(packages: Sequence[Package], kernels: bool = True) -> list[str]:
    """What the packages need from an index, once each; without kernels, not NVIDIA's runtime of CuTe kernels."""
    needed = sorted({each for package in packages for each in package.dependencies})
    return needed if kernels else [each for each in needed if not each.startswith("nvidia-")]


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item], workers: int = 2) -> list[Result]:
    """The results of calling the function with every item, in the order of the items; the first error is raised."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        running = [pool.submit(function, item) for item in items]
        try:
            return [each.result() for each in running]
        finally:
            pool.shutdown(cancel_futures=True)


def files_under(*folders: str) -> list[str]:
    """Files that git tracks or would track; without git, all but what builds leave behind."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        found = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    else:
        paths = [path for folder in folders for path in [ROOT / folder, *(ROOT / folder).rglob("*")] if path.is_file()]
        found = [str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts]
    return sorted(set(found))


class Environment:
    """A virtual environment that several sessions share, made with the Python that nox runs with."""

    def __init__(self, session: nox.Session, name: str, bare: bool = False) -> None:
        self.session = session
        self.path = CACHE / f"env-{name}"
        self.bin = self.path / "bin"
        self.python = self.bin / "python"
        self.stamps = self.path / "stamps"
        if not (self.path / "pyvenv.cfg").is_file() or not self.python.exists() or self._stamp("python") != sys.version:
            shutil.rmtree(self.path, ignore_errors=True)
            options = ["--without-pip"] if bare else []
            session.run(sys.executable, "-m", "venv", *options, str(self.path), external=True)
            self._write_stamp("python", sys.version)

    @property
    def variables(self) -> dict[str, str | None]:
        """For programs that run in the environment: its own programs first, and nothing of the source tree."""
        return {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.path),
            "PYTHONPATH": None,
            "PYTHONNOUSERSITE": "1",
        }

    def run(self, *command: str | Path, env: dict[str, str | None] | None = None, **options: Any) -> Any:
        program, *arguments = (str(part) for part in command)
        inside = self.bin / program
        if "/" not in program and inside.exists():
            program = str(inside)
        return self.session.run(program, *arguments, env={**self.variables, **(env or {})}, external=True, **options)

    def install(self, *arguments: str) -> None:
        """pip install under the constraints, unless these very arguments were installed before."""
        wanted = hashlib.sha256("\0".join(arguments).encode() + CONSTRAINTS.read_bytes()).hexdigest()
        if self._stamp(wanted):
            return
        self._pip("--constraint", CONSTRAINTS, *arguments)
        self._write_stamp(wanted, " ".join(arguments))

    def install_wheels(self, wheels: Sequence[Wheel]) -> None:
        """Install wheels of this repository in place of older builds of the same version."""
        stale = [wheel for wheel in wheels if self._stamp(wheel.package.module) != wheel.fingerprint]
        if not stale:
            return
        for wheel in stale:
            self._write_stamp(wheel.package.module, "")
        self._pip("--no-deps", "--force-reinstall", *(wheel.path for wheel in stale))
        for wheel in stale:
            self._write_stamp(wheel.package.module, wheel.fingerprint)

    def install_beside(self, requirements: Sequence[str]) -> Path:
        """A folder with these distributions alone, to be put before the environment's own on PYTHONPATH."""
        folder = CACHE / f"beside-{hashlib.sha256(' '.join(requirements).encode()).hexdigest()[:12]}"
        if not folder.is_dir():
            fresh = folder.with_suffix(".part")
            shutil.rmtree(fresh, ignore_errors=True)
            self._pip("--no-deps", "--target", fresh, *requirements)
            fresh.rename(folder)
        return folder

    def _pip(self, *arguments: str | Path) -> None:
        # --no-compile: Python compiles the few modules that are imported, pip would compile all of torch.
        self.run("python", "-m", "pip", "install", "-qq", "--no-compile", "--no-warn-script-location", *arguments)

    def _stamp(self, name: str) -> str:
        path = self.stamps / name
        return path.read_text() if path.is_file() else ""

    def _write_stamp(self, name: str, content: str) -> None:
        self.stamps.mkdir(parents=True, exist_ok=True)
        (self.stamps / name).write_text(content)


@dataclass(frozen=True)
class Wheel:
    """A built wheel and what it was built from."""

    package: Package
    path: Path
    fingerprint: str


def build_environment(session: nox.Session, packages: Sequence[Package], kernels: bool = True) -> Environment:
    """The environment of all builds, with what the builds of these packages require: none needs isolation."""
    environment = Environment(session, "build")
    tools = MATRIX["kernel_build_tools"] if kernels else []
    environment.install(*sorted({*MATRIX["build_tools"], *tools}))
    environment.install(*sorted({each for package in packages for each in package.build_requires(kernels)}))
    return environment


def build_wheels(session: nox.Session, packages: Sequence[Package], archs: Sequence[str]) -> list[Wheel]:
    """A wheel of each package with machine code for `archs`, in dist/<archs>; without archs, wheels without kernels.

    Wheels that are up to date are kept. The others are built in parallel.
    """
    key = "all" if list(archs) == ARCHS else "-".join(archs) or "none"
    folder = ROOT / "dist" / key
    folder.mkdir(parents=True, exist_ok=True)
    found = {package.name: _existing_wheel(package, archs, folder) for package in packages}
    stale = [package for package in packages if found[package.name] is None]
    if stale:
        environment = build_environment(session, stale, kernels=bool(archs))
        workers = min(len(stale), max(2, CORES // 2))
        largest_first = sorted(stale, key=lambda package: -package.source_bytes)
        built = in_parallel(lambda package: _build_wheel(environment, package, archs, folder), largest_first, workers)
        found |= {wheel.package.name: wheel for wheel in built}
    return [wheel for wheel in found.values() if wheel is not None]


def _existing_wheel(package: Package, archs: Sequence[str], folder: Path) -> Wheel | None:
    stamp = folder / f".{package.module}.json"
    if not stamp.is_file():
        return None
    known = json.loads(stamp.read_text())
    fingerprint = package.fingerprint(*archs)
    current = known["fingerprint"] == fingerprint and (folder / known["wheel"]).is_file()
    return Wheel(package, folder / known["wheel"], fingerprint) if current else None


def _build_wheel(environment: Environment, package: Package, archs: Sequence[str], folder: Path) -> Wheel:
    log = environment.session.log
    fingerprint = package.fingerprint(*archs)
    what = f"kernels for {' '.join(f'sm_{arch}' for arch in archs)}" if archs else "references alone"
    what = what if package.has_kernels else "Python alone"
    log(f"{package.name}: building ({what})")
    started = time.monotonic()
    fresh = folder / f".building-{package.module}"
    shutil.rmtree(fresh, ignore_errors=True)
    variables: dict[str, str | None] = {
        **BUILD_ENVIRONMENT,
        "KESTREL_ARCHS": ";".join(archs) or "none",
        "KESTREL_SOURCES": None,  # which leave kernels out
        "KESTREL_VARIANTS": None,
        "CMAKE_BUILD_PARALLEL_LEVEL": str(CORES),
    }
    command = ["python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(fresh), package.folder]
    environment.run(*command, env=variables, silent=True, log=False)
    (built,) = fresh.glob("*.whl")
    for old in folder.glob(f"{package.module}-*.whl"):
        old.unlink()
    path = built.replace(folder / built.name)
    shutil.rmtree(fresh)
    (folder / f".{package.module}.json").write_text(json.dumps({"fingerprint": fingerprint, "wheel": path.name}))
    log(f"{package.name}: built in {time.monotonic() - started:.0f} s ({path.stat().st_size / 1024:.0f} KiB)")
    return Wheel(package, path, fingerprint)


def _capability() -> tuple[int, int] | None:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        major, minor = (int(part) for part in answer.splitlines()[0].strip().split("."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return major, minor


def gpu_is_present() -> bool:
    return _capability() is not None


def archs_of_this_machine(default: Sequence[str] = ()) -> list[str]:
    """The architecture of ours that the first GPU runs; `default` without a GPU that has one."""
    major, minor = _capability() or (0, 0)
    spelled = (f"{major}{minor}", f"{major}{minor}a", f"{major}0f")
    return [arch for arch in ARCHS if arch in spelled] or list(default)
