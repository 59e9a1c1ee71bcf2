"""The only task runner: `nox -l` lists the sessions, README.md names those that a newcomer needs.

Sessions share a few environments under .nox (see ci/workspace.py), so they use the Python that nox runs with. Wheels
are built once into dist/ and built again when their sources change; tests run against the installed wheels.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent / "ci"))

import release
from workspace import (
    ARCHS,
    CACHE,
    CORES,
    FAMILIES,
    MATRIX,
    PACKAGES,
    ROOT,
    Environment,
    archs_of_this_machine,
    build_environment,
    build_wheels,
    closure,
    files_under,
    gpu_is_present,
    in_parallel,
    requirements,
)

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["demo"]
nox.options.default_venv_backend = "none"

RUN_ON = ["90a"]  # what is built where no GPU says otherwise: the only kernels that have been run
SOURCE_TREE = {"PYTHONPATH": os.pathsep.join(str(package.path / "src") for package in PACKAGES.values())}

EACH_FAMILY = [nox.param(family.name, tags=[family.name]) for family in FAMILIES]
EACH_ARCH = [nox.param(f"sm{arch}", tags=[f"sm{arch}"]) for arch in ARCHS]


def archs_asked(session: nox.Session, default: Sequence[str]) -> list[str]:
    """The architectures in KESTREL_ARCHS, or the default; "none" is no architecture."""
    archs = re.findall("[^;, ]+", os.environ.get("KESTREL_ARCHS", "")) or list(default)
    if archs == ["none"]:
        return []
    if not set(archs) <= set(ARCHS):
        session.error(f"KESTREL_ARCHS: expected none or architectures from {', '.join(ARCHS)}, got {' '.join(archs)!r}")
    return [arch for arch in ARCHS if arch in archs]


def installed(session: nox.Session, names: Sequence[str], archs: Sequence[str], *tools: str) -> Environment:
    """The shared environment with the wheels of these packages, of all they need, and of `tools`."""
    packages = closure(*(PACKAGES[name] for name in names))
    needing = list(PACKAGES.values()) if tools else packages  # of all packages, so that pip resolves them once
    wanted = [*requirements(needing, kernels=bool(archs)), *tools]

    with ThreadPoolExecutor(1) as pool:  # installing and building overlap
        wheels = pool.submit(build_wheels, session, packages, archs)
        environment = Environment(session, "test")
        environment.install(*wanted)
        environment.install_wheels(wheels.result())
    return environment


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: build for the GPU present (no kernels without one), then write text. Arguments go to `generate`."""
    environment = installed(session, ["meta"], archs_asked(session, archs_of_this_machine()))
    environment.run("kestrel-kernels", "generate", *session.posargs)


def empty_folder() -> Path:
    """A working directory from which nothing of the source tree can be imported."""
    folder = CACHE / "empty"
    folder.mkdir(exist_ok=True)
    return folder


def workers() -> list[str]:
    """Options of pytest: CPU tests on up to 8 processors; a GPU runs its tests in one process."""
    return [] if gpu_is_present() else ["-n", str(min(CORES, 8)), "--dist", "worksteal", "-m", "not gpu"]


def run_tests(session: nox.Session, names: Sequence[str]) -> None:
    """The tests and the documentation's examples of these packages, against their installed wheels."""
    archs = archs_asked(session, archs_of_this_machine(default=RUN_ON))
    environment = installed(session, names, archs, *MATRIX["test_tools"])
    packages = [PACKAGES[name] for name in names]
    modules = [package.module for package in packages]
    # Inductor's cache does not tell processors apart: code compiled for another one would give wrong results.
    compiled = CACHE / f"inductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}"
    with session.chdir(empty_folder()):
        environment.run("python", ROOT / "ci" / "installed.py", *modules)
        environment.run(
            *("pytest", "-c", ROOT / "ci" / "pytest.ini", "--rootdir", ROOT, "-q", "--durations=15", *workers()),
            # benchmarks are loaded by the harness alone
            *("--doctest-modules", "--ignore-glob=/*/site-packages/kestrel_*/benchmarks/*"),
            *("--pyargs", *modules, *(package.path / "tests" for package in packages), *session.posargs),
            env={"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(compiled)},
        )


@nox.session
def tests(session: nox.Session) -> None:
    """The tests of every package; `tests-norm` of one. Arguments go to pytest."""
    run_tests(session, list(PACKAGES))


@nox.session
def oldest_runtimes(session: nox.Session) -> None:
    """The binaries load, and their checks of arguments work, with the oldest libraries that engines bring."""
    archs = archs_asked(session, archs_of_this_machine(default=RUN_ON))
    environment = installed(session, list(PACKAGES), archs, *MATRIX["test_tools"])
    # Only these files are collected: collecting all takes longer than the tests.
    files = [path for package in FAMILIES for path in sorted((package.path / "tests").glob("test_*.py"))]
    files = [path for path in files if gpu_is_present() or not path.stem.endswith("_gpu")]
    files = [path for path in files if re.search("entry_point|launch", path.name + path.read_text(encoding="utf-8"))]
    for requirements_below in MATRIX["oldest_runtimes"]:
        folder = environment.install_beside(requirements_below)
        older: dict[str, str | None] = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        with session.chdir(empty_folder()):
            environment.run("python", ROOT / "ci" / "import_alone.py", *(each.module for each in FAMILIES), env=older)
            environment.run(
                *("pytest", "-c", ROOT / "ci" / "pytest.ini", "--rootdir", ROOT, "-q", *workers()),
                *("-k", "entry_point or launch", *files),
                env=older,
            )


def tests_of_one(package: str) -> None:
    def run(session: nox.Session) -> None:
        run_tests(session, [package])

    run.__doc__ = f"The tests of {package}."
    nox.session(name=f"tests-{package}", default=False, tags=[package])(run)
    nox.session(name=f"tests(package='{package}')", default=False)(run)  # as nox names a parametrised session


for each in PACKAGES:
    tests_of_one(each)


@nox.session
@nox.parametrize("arch", EACH_ARCH)
@nox.parametrize("package", EACH_FAMILY)
def build(session: nox.Session, package: str, arch: str) -> None:
    """The wheel of one family with machine code for one architecture, in dist/<arch>."""
    (wheel,) = build_wheels(session, [PACKAGES[package]], [arch.removeprefix("sm")])
    session.log(f"{wheel.path.relative_to(ROOT)}: {wheel.path.stat().st_size / 1024:.0f} KiB")


@nox.session
def develop(session: nox.Session) -> None:
    """Compile the binaries of the families named into their source folders, and only what changed: `-- norm`."""
    archs = archs_asked(session, archs_of_this_machine(default=RUN_ON))
    for package in [PACKAGES[name] for name in session.posargs]:
        environment = build_environment(session, [package])
        built = CACHE / "develop" / package.name
        variables: dict[str, str | None] = {"KESTREL_ARCHS": ";".join(archs)}
        if (package.path / "CMakeLists.txt").is_file():
            options = ["-G", "Ninja", f"-DPython_EXECUTABLE={environment.python}", "-DCMAKE_BUILD_TYPE=Release"]
            environment.run("cmake", "-S", package.path, "-B", built, *options, env=variables, silent=True)
            environment.run("cmake", "--build", built, env=variables)
            environment.run("cmake", "--install", built, "--prefix", built / "installed", silent=True)
            found = built / "installed" / package.module / "_lib"
        else:
            environment.run("python", ROOT / "tools" / "cute_build", package.path, built, env=variables)
            found = built
        shutil.copytree(found, package.path / "src" / package.module / "_lib", dirs_exist_ok=True)


@nox.session
def wheels(session: nox.Session) -> None:
    """Release wheels of all architectures in dist/release, checked, rebuilt byte for byte, and installed alone.

    One family of each kind of build is rebuilt, with few of its CuTe kernels; `-- every` rebuilds all.
    """
    tools = Environment(session, "wheels")
    tools.install(*MATRIX["wheel_tools"])
    built = build_wheels(session, list(PACKAGES.values()), ARCHS)
    tagged = release.tag(tools, built)
    build_paths = [word for path in (ROOT, Path.home(), tempfile.gettempdir()) for word in ("--path", f"{path}/")]
    tools.run("python", ROOT / "tools" / "wheel_checks", *build_paths, *tagged)
    release.rebuild(session, tools, built, every="every" in session.posargs)
    release.installs_alone(session, tagged)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, clang-format, mypy on runtime and meta, the READMEs' tables; `-- --write` fixes what it can."""
    write = "--write" in session.posargs
    tools, third_party = Environment(session, "lint"), Environment(session, "test")
    tools.install(*MATRIX["lint_tools"])
    third_party.install(*requirements(list(PACKAGES.values())))
    sources = [name for name in files_under("packages", "tools") if name.endswith((".cpp", ".cu", ".cuh", ".h"))]

    def ruff_check() -> None:
        tools.run("ruff", "check", *(["--fix"] if write else []), ".")

    def ruff_format() -> None:
        tools.run("ruff", "format", *([] if write else ["--check"]), ".")

    def clang_format() -> None:
        if sources:
            tools.run("clang-format", *(["-i"] if write else ["--dry-run", "--Werror"]), *sources)

    def mypy() -> None:
        tools.run("mypy", "--python-executable", third_party.python, "packages/runtime/src", "meta/src")

    def table_of_ops() -> None:
        third_party.run("python", "tools/ops_table.py", *([] if write else ["--check"]), env=SOURCE_TREE)

    def tables_of_results() -> None:
        third_party.run("python", "tools/results.py", "--check", env=SOURCE_TREE)
        third_party.run("python", "tools/model_results.py", "tables", "--check", env=SOURCE_TREE)

    def failed(check: Callable[[], None]) -> bool:
        try:
            check()
        except CommandFailed:
            return True
        return False

    checks = (mypy, ruff_check, ruff_format, clang_format, table_of_ops, tables_of_results)
    found = in_parallel(failed, checks, workers=1 if write else 2)  # several write the same files
    names = [check.__name__ for check, wrong in zip(checks, found, strict=True) if wrong]
    if names:
        session.error(f"failed: {', '.join(names)}")


@nox.session
def versions(session: nox.Session) -> None:
    """One version in every pyproject.toml, every `__version__` and every pin between siblings."""
    session.run(sys.executable, "tools/version.py", *(session.posargs or ["check"]), external=True)


@nox.session
def gpu_bundle(session: nox.Session) -> None:
    """Everything an offline GPU machine needs, in dist/gpu. Arguments name packages; KESTREL_ARCHS, architectures."""
    packages = closure(*(PACKAGES[name] for name in session.posargs or PACKAGES))
    built = build_wheels(session, packages, archs_asked(session, RUN_ON))
    collect = ROOT / "tools" / "gpu_bundle" / "collect.py"
    Environment(session, "build").run("python", collect, *(each.path for each in built))


@nox.session
def bench(session: nox.Session) -> None:
    """Times ops on the GPU present into packages/*/results. Arguments: families or ops, options of the harness."""
    environment = installed(session, ["meta"], archs_asked(session, archs_of_this_machine(default=RUN_ON)))
    environment.run("python", "-m", "kestrel_runtime.bench", *session.posargs, "--checkout", ROOT, "--record")


@nox.session
def results(session: nox.Session) -> None:
    """Writes the tables and plots of packages/*/results into the READMEs."""
    environment = Environment(session, "test")
    environment.install(*requirements(list(PACKAGES.values())))
    environment.install(*MATRIX["plot_tools"])
    environment.run("python", "tools/results.py", *session.posargs, env=SOURCE_TREE)


@nox.session(default=False)
def engines(session: nox.Session) -> None:
    """The plugins on the CPU: in vLLM, against SGLang's classes, and continuous batching; downloads 1 GB."""
    environment = installed(session, list(PACKAGES), [], *MATRIX["test_tools"])
    for engine, test in (("vllm", "vllm"), ("sglang", "sglang"), ("transformers", "batching")):
        listed = (ROOT / "ci" / f"{engine}.txt").read_text().splitlines()
        folder = environment.install_beside([line for line in listed if not line.startswith("#")])
        with session.chdir(empty_folder()):
            environment.run(
                *("pytest", "-c", ROOT / "ci" / "pytest.ini", "--rootdir", ROOT, "-q", "--durations=0"),
                *(PACKAGES["meta"].path / "tests" / f"test_integrations_{test}.py", *session.posargs),
                env={"PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(CORES)},
            )


@nox.session
def sanitize(session: nox.Session) -> None:
    """The GPU tests under NVIDIA's compute-sanitizer. Arguments go to pytest."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        session.error("compute-sanitizer was not found: it comes with NVIDIA's CUDA toolkit and needs a GPU")
    archs = archs_asked(session, archs_of_this_machine(default=RUN_ON))
    environment = installed(session, list(PACKAGES), archs, *MATRIX["test_tools"])
    tests_of_all = [str(package.path / "tests") for package in PACKAGES.values()]
    environment.run(
        *(sanitizer, "--error-exitcode=1", "--require-cuda-init=no", environment.python, "-m", "pytest"),
        *("--import-mode=importlib", "-m", "gpu", "-q", *(session.posargs or tests_of_all)),
    )
