"""Checks release wheels without running them: `python tools/wheel_checks [--path PATH]... WHEEL...`

Checks per wheel: the tag; that all files are inside the package; that no file contains a path of the build machine. In
a binary: machine code for every architecture, no stack frame and no local memory in any kernel, 16-byte loads in the
kernels that vector_loads.json names, and no dependence on libraries and symbols that some machines lack. Sizes have
limits: that of all wheels together, and that of attention, which has the most kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import library
import machine_code

HERE = Path(__file__).resolve().parent
MATRIX = json.loads((HERE.parent.parent / "ci" / "matrix.json").read_text())
ALL_ARCHS, PLATFORM = MATRIX["archs"], MATRIX["platform"]
SHOWN = 20  # at most so many problems per wheel
ALL_TOGETHER = 12 * 10**6  # bytes of all wheels, without the model of the demo
MOST_BYTES = {"kestrel_attention": 3_500_000}  # of one wheel
TEMPORARY = (b"tmpxft_", b"_GLOBAL__N_")  # nvcc's files and anonymous namespaces: each build names them otherwise
MODEL = "kestrel_kernels/demo/tiny.pt"


def find_cuobjdump() -> Path:
    """Of the package nvidia-cuda-cuobjdump; nvdisasm, which it calls, lies beside it."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for root in roots:
        for found in Path(root).glob("*/bin/cuobjdump"):
            return found
    raise SystemExit("cuobjdump was not found: install nvidia-cuda-cuobjdump")


def binary_problems(folder: Path, package: str, manifest: dict, cuobjdump: Path) -> tuple[list[str], str]:
    """The problems of a package's library, and a one-line summary of its content."""
    binary = folder / package / "_lib" / f"{package}.so"
    found = library.problems(binary, manifest["functions"])
    content = binary.read_bytes()
    found += [f"holds the name of a temporary file: {name.decode()}" for name in TEMPORARY if name in content]
    kernels = machine_code.kernels(binary, cuobjdump)
    if not kernels:
        return [*found, "holds no kernel"], ""
    present = {kernel.arch for kernel in kernels}
    found += [f"has no machine code for sm_{arch}" for arch in manifest["archs"] if not present & set(runs(arch))]
    if manifest["archs"] != ALL_ARCHS:
        found.append(f"was built for {manifest['archs']} only")
    for kernel in kernels:
        if kernel.stack or kernel.local:
            found.append(f"{kernel.name} for sm_{kernel.arch}: {kernel.stack} B stack, {kernel.local} B local memory")
    found += wide_load_problems(package, kernels)
    most = max(kernel.registers for kernel in kernels)
    wide = sum(kernel.wide_loads > 0 for kernel in kernels)
    holds = (
        f"{len(kernels)} kernels for sm_{' '.join(manifest['archs'])}, {wide} with 16-byte loads, <= {most} registers"
    )
    return found, holds


def runs(arch: str) -> tuple[str, ...]:
    """The architectures, as numbers, whose machine code a GPU of `arch` runs."""
    number = re.sub(r"\D", "", arch)
    return (number, "80") if number in ("86", "89") else (number,)


def wide_load_problems(package: str, kernels: Sequence[machine_code.Kernel]) -> list[str]:
    """Kernels of vector_loads.json without 16-byte loads, and its patterns that match no kernel.

    An entry is a pattern, or {"kernels": pattern, "archs": [...]} for kernels that are empty on other architectures.
    """
    found = []
    for entry in json.loads((HERE / "vector_loads.json").read_text()).get(package, []):
        pattern, archs = (entry, None) if isinstance(entry, str) else (entry["kernels"], entry["archs"])
        claimed = [each for each in kernels if re.search(pattern, each.name) and (archs is None or each.arch in archs)]
        if not claimed:
            found.append(f"vector_loads.json names {pattern!r}, which matches no kernel")
        narrow = [kernel for kernel in claimed if not kernel.wide_loads]
        found += [f"{kernel.name} for sm_{kernel.arch} has no 16-byte load" for kernel in narrow]
    return found


def check(wheel: Path, build_paths: Sequence[str], cuobjdump: Path) -> tuple[list[str], str]:
    """The problems of a wheel, and one line on what it holds. build_paths: what no file in it may contain."""
    package = wheel.name.split("-")[0]
    found = []
    holds = "Python only"
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        folder = Path(name)
        archive.extractall(folder)
        members = [member for member in archive.namelist() if not member.endswith("/")]
        for member in [member for member in members if member.endswith(".so.xz")]:  # as kestrel_runtime loads it
            (folder / member).with_suffix("").write_bytes(lzma.decompress((folder / member).read_bytes()))
            members.append(member.removesuffix(".xz"))
        outside = [member for member in members if not re.match(rf"{package}(-[^/]*\.dist-info)?/", member)]
        found += [f"installs {member} outside its package" for member in outside]
        for member in members:
            content = (folder / member).read_bytes()
            found += [f"{member} contains the path {path}" for path in build_paths if path.encode() in content]
        if f"{package}/py.typed" not in members:
            found.append("has no py.typed")
        if (held := size(wheel)) > (most := MOST_BYTES.get(package, ALL_TOGETHER)):
            found.append(f"has {held / 1e6:.1f} MB: at most {most / 1e6:.1f}")
        if not any(member.endswith("/licenses/LICENSE") for member in members):
            found.append("has no LICENSE")
        manifest_path = folder / package / "_lib" / "manifest.json"
        manifest = json.loads(manifest_path.read_text()) if manifest_path.is_file() else {"archs": []}
        if manifest["archs"]:
            if not wheel.name.endswith(f"-py3-none-{PLATFORM}.whl"):
                found.append(f"has not the tag py3-none-{PLATFORM}")
            wrong, holds = binary_problems(folder, package, manifest, cuobjdump)
            found += wrong
        elif not wheel.name.endswith("-py3-none-any.whl"):
            found.append("holds no binary, but has not the tag py3-none-any")
    return found, holds


def size(wheel: Path) -> int:
    """The size of a wheel in bytes, without the model of the demo."""
    with zipfile.ZipFile(wheel) as archive:
        model = sum(member.compress_size for member in archive.infolist() if member.filename == MODEL)
    return wheel.stat().st_size - model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--path", action="append", default=[], help="a path that no file in a wheel may contain")
    options = parser.parse_args()
    cuobjdump = find_cuobjdump()
    failed = 0
    largest_first = sorted(options.wheels, key=lambda wheel: -wheel.stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # threads wait for cuobjdump
        running = {wheel: pool.submit(check, wheel, options.path, cuobjdump) for wheel in largest_first}
    for wheel in options.wheels:
        found, holds = running[wheel].result()
        print(f"{'FAILED' if found else 'ok':7} {wheel.name} ({wheel.stat().st_size / 1024:.0f} KiB): {holds}")
        for problem in found[:SHOWN]:
            print(f"        {problem}")
        if len(found) > SHOWN:
            print(f"        and {len(found) - SHOWN} more")
        failed += bool(found)
    total = sum(size(wheel) for wheel in options.wheels)
    fits = total <= ALL_TOGETHER
    print(f"{'ok' if fits else 'FAILED':7} together {total / 1e6:.1f} MB: at most {ALL_TOGETHER / 1e6:.0f}")
    failed += not fits
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
