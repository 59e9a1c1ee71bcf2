"""Release wheels: platform tag, libraries as xz, and what can only be seen by building and installing them again."""

from __future__ import annotations

import base64
import filecmp
import hashlib
import lzma
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import nox
from workspace import (
    BUILD_ENVIRONMENT,
    CACHE,
    MATRIX,
    PACKAGES,
    ROOT,
    Environment,
    Package,
    Wheel,
    build_environment,
    closure,
    in_parallel,
    requirements,
)

sys.path.insert(0, str(ROOT / "tools" / "wheel_checks"))
from machine_code import section_range

RELEASE = ROOT / "dist" / "release"
# A GPU instruction has 16 bytes: contexts of LZMA by position in an instruction save 3 % against the plain preset.
BEST = 9 | lzma.PRESET_EXTREME
GPU_CODE = [{"id": lzma.FILTER_LZMA2, "preset": BEST, "lc": 0, "lp": 4, "pb": 4}]
HOST_CODE = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": BEST}]
NOT_OURS = ("libtvm_ffi.so", "libcute_dsl_runtime.so")  # found beside other installed packages, never copied in


def has_binary(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(name.endswith(".so") for name in archive.namelist())


def tag(tools: Environment, wheels: Sequence[Wheel]) -> list[Path]:
    """Copies of the wheels in dist/release, those with a binary under the manylinux tag."""
    shutil.rmtree(RELEASE, ignore_errors=True)
    RELEASE.mkdir(parents=True)
    excluded = [word for name in NOT_OURS for word in ("--exclude", name)]

    def release(wheel: Wheel) -> None:
        if not has_binary(wheel.path):
            shutil.copy(wheel.path, RELEASE)
            return
        tools.run(
            *("auditwheel", "repair", "--plat", MATRIX["platform"], "--only-plat", *excluded),
            *("--wheel-dir", RELEASE, wheel.path),
            env=BUILD_ENVIRONMENT,
            silent=True,
        )
        pack(next(RELEASE.glob(f"{wheel.package.module}-*.whl")))

    in_parallel(release, sorted(wheels, key=lambda wheel: -wheel.path.stat().st_size))
    return sorted(RELEASE.glob("*.whl"))


def pack(wheel: Path) -> None:
    """Put every library of a wheel into it as xz, which kestrel_runtime unpacks into memory at the first launch."""
    with zipfile.ZipFile(wheel) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    changed = {}
    for info in list(members):
        if info.filename.endswith(".so"):
            content = compressed(members.pop(info))
            changed[info.filename] = info.filename = f"{info.filename}.xz"
            members[info] = content
    (record,) = (info for info in members if info.filename.endswith(".dist-info/RECORD"))
    lines = [line for line in members[record].decode().splitlines() if line.split(",")[0] not in changed]
    for info, content in members.items():
        if info.filename in changed.values():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{info.filename},sha256={digest},{len(content)}")
    members[record] = "".join(f"{line}\n" for line in lines).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in sorted(members.items(), key=lambda item: (item[0] is record, item[0].filename)):
            info.compress_type = zipfile.ZIP_STORED if info.filename.endswith(".xz") else zipfile.ZIP_DEFLATED
            archive.writestr(info, content)


def compressed(library: bytes) -> bytes:
    """A library as three xz streams in a row, of which the section .text has the filters of host code."""
    host = section_range(library, b".text")
    parts = [(slice(0, host.start), GPU_CODE), (slice(host.start, host.stop), HOST_CODE)]
    parts.append((slice(host.stop, None), GPU_CODE))
    return b"".join(lzma.compress(library[part], filters=filters) for part, filters in parts)


def rebuild(session: nox.Session, tools: Environment, wheels: Sequence[Wheel], every: bool = False) -> None:
    """Wheels with a binary come out byte-identical from their sdists alone, built in another folder.

    By default those that the matrix names: one of each kind of build (CUDA C++, CuTe, both), of the CuTe kernels a few
    of each class, of the family with both one CUDA source. A test checks that the families of a kind declare the same
    build, and no library may hold the name of a temporary file. Some are built in isolation, as pip does it (with
    nothing but what their pyproject requires).
    All are built for one architecture, which compiles fastest: what could differ is in names, paths and times.
    """
    chosen = [each for each in wheels if has_binary(each.path) and (every or each.package.name in MATRIX["rebuilt"])]
    packages = [wheel.package for wheel in sorted(chosen, key=lambda each: -each.path.stat().st_size)]
    ready, archs = build_environment(session, packages), MATRIX["rebuilt_for"]
    variables: dict[str, str | None] = {
        **BUILD_ENVIRONMENT,
        "KESTREL_ARCHS": ";".join(archs),
        "KESTREL_SOURCES": "" if every else MATRIX["rebuilt_sources"],
        "KESTREL_VARIANTS": "" if every else MATRIX["rebuilt_variants"],
    }
    (again := Path(session.create_tmp()) / "again").mkdir(exist_ok=True)

    def build_twice(package: Package) -> None:
        isolated = package.name in MATRIX["isolated"]
        folder = again / package.name
        shutil.rmtree(folder, ignore_errors=True)

        def build(what: str, sources: Path, output: str, alone: bool = False) -> Path:
            isolation = [] if alone else ["--no-isolation"]
            command = ("python", "-m", "build", what, *isolation, "--outdir", folder / output, sources)
            (tools if alone else ready).run(*command, env=variables, silent=True)
            (built,) = (folder / output).iterdir()
            return built

        wheel = build("--wheel", package.path, "first")
        sdist = build("--sdist", package.path, "sdist")
        shutil.unpack_archive(sdist, folder)
        copy = build("--wheel", folder / sdist.name.removesuffix(".tar.gz"), "second", alone=isolated)
        if not filecmp.cmp(copy, wheel, shallow=False):
            session.error(f"{wheel.name} differs when built again: {differences(wheel, copy)}")
        how = "in isolation " if isolated else ""
        session.log(f"{wheel.name}: byte-identical when built {how}for sm_{' sm_'.join(archs)} from its sdist")

    in_parallel(build_twice, packages)


def differences(one: Path, other: Path) -> str:
    """The members in which two wheels differ."""
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(other) as b:
        names = sorted({*a.namelist(), *b.namelist()})
        both = {*a.namelist()} & {*b.namelist()}
        differing = [name for name in names if name not in both or a.read(name) != b.read(name)]
    return ", ".join(differing) or "only in the archive's own fields"


def installs_alone(session: nox.Session, release: Sequence[Path]) -> None:
    """Every wheel installs with nothing but its siblings' wheels, imports, and loads its binary without a GPU.

    torch and what it needs are links to the tests' environment, because a copy for each package would cost minutes;
    everything else that a package needs has to be named by its metadata.
    """
    below = Environment(session, "test")
    below.install(*requirements(list(PACKAGES.values())))
    site = (Path(session.create_tmp()) / "torch").resolve()
    below.run("python", ROOT / "ci" / "link_distribution.py", "torch", site)
    wheel_of = {path.name.split("-")[0]: path for path in release}

    def install(package: Package) -> None:
        shutil.rmtree(CACHE / f"env-alone-{package.name}", ignore_errors=True)
        alone = Environment(session, f"alone-{package.name}", bare=True)
        (own_site,) = alone.path.glob("lib/python*/site-packages")
        (own_site / "torch-below.pth").write_text(f"{site}\n")
        needed = [wheel_of[each.module] for each in closure(package)]
        below.run(
            *("python", "-m", "pip", "--python", alone.python, "install", "-qq", "--no-warn-script-location"),
            *("--constraint", ROOT / "ci" / "constraints.txt", *needed),
        )
        alone.run("python", ROOT / "ci" / "import_alone.py", package.module)
        if package.name == "meta":
            alone.run("kestrel-kernels", "info")
        shutil.rmtree(alone.path)

    in_parallel(install, list(PACKAGES.values()))
