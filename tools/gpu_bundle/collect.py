"""Collects dist/gpu: wheels and a script to run this library on a GPU machine without a network.

    python tools/gpu_bundle/collect.py WHEEL...

The machine needs Python 3.12 on x86-64, torch, numpy, pytest, hypothesis, typer and rich. The bundle holds the given
wheels, apache-tvm-ffi for that Python and, if a wheel has CuTe kernels, the runtime library from NVIDIA's wheel.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUNDLE = ROOT / "dist" / "gpu"
DOWNLOADS = ROOT / ".nox" / "downloads"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
LIMIT = 40 * 2**20  # bytes of the bundle

RUNTIME_WHEEL = "nvidia-cutlass-dsl-libs-cu13"
RUNTIME_LIBRARY = "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so"

PYTHON = ("--python-version", "3.12", "--implementation", "cp")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]


def pinned(distribution: str) -> str:
    """The requirement of ci/constraints.txt for a distribution."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{distribution}=="))


def download(requirement: str) -> Path:
    """Download the wheel for the GPU machine's Python, or return the one downloaded before."""
    folder = DOWNLOADS / requirement
    found = list(folder.glob("*.whl"))
    if not found:
        fresh = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", *PYTHON]
        subprocess.run([*command, *platforms, "--dest", str(fresh), requirement], check=True)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
        found = list(folder.glob("*.whl"))
    return found[0]


def holds_cute_kernels(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        manifests = [name for name in archive.namelist() if name.endswith("/_lib/manifest.json")]
        return any(json.loads(archive.read(name))["cute"] for name in manifests)


def revision() -> str:
    """The git revision of the bundle, recorded because the GPU machine may have no git history."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def collect(wheels: list[Path]) -> None:
    fresh = BUNDLE.with_name(".gpu-fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "wheels").mkdir(parents=True)
    for wheel in [*wheels, download(pinned("apache-tvm-ffi"))]:
        shutil.copy(wheel, fresh / "wheels")
    if any(holds_cute_kernels(wheel) for wheel in wheels):
        version = pinned("nvidia-cutlass-dsl").partition("==")[2]
        with zipfile.ZipFile(download(f"{RUNTIME_WHEEL}=={version}")) as source:
            library = source.read(RUNTIME_LIBRARY)
        with zipfile.ZipFile(fresh / "cute_runtime.zip", "w", zipfile.ZIP_DEFLATED) as target:
            target.writestr(zipfile.ZipInfo(RUNTIME_LIBRARY), library, zipfile.ZIP_DEFLATED)
    shutil.copy(Path(__file__).with_name("run.py"), fresh / "run")
    (fresh / "run").chmod(0o755)
    (fresh / "revision").write_text(f"{revision()}\n")
    size = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
    if size > LIMIT:
        raise SystemExit(f"the bundle has {size / 2**20:.1f} MiB; the limit is {LIMIT // 2**20} MiB")
    shutil.rmtree(BUNDLE, ignore_errors=True)
    fresh.rename(BUNDLE)
    print(f"{BUNDLE.relative_to(ROOT)}: {size / 2**20:.1f} MiB")
    for path in sorted(BUNDLE.rglob("*")):
        if path.is_file():
            print(f"  {path.relative_to(BUNDLE)}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    collect([Path(argument) for argument in sys.argv[1:]])
