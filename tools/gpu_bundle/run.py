#!/usr/bin/env python3
"""Runs this library on a GPU machine without a network, from the bundle in the folder of this script.

dist/gpu/run tests [PYTEST...]      runs the tests that need a GPU, all or those in the given paths
dist/gpu/run sanitize [--tool T] [--launches N] [PYTEST...]
                                    runs the same under compute-sanitizer, except PyTorch's own kernels. T is one of its
                                    tools (default memcheck), N the number of launches to check (default all)
dist/gpu/run bench [...]            runs kestrel_runtime.bench, for the given families or ops, or for all
dist/gpu/run demo [...]             runs kestrel-kernels generate
dist/gpu/run info [...]             runs kestrel-kernels info
dist/gpu/run python [...]           runs Python with the library installed

The wheels are installed into a temporary folder, once per content of the bundle. Nothing else is written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
CHECKOUT = BUNDLE.parent.parent
GPU_MARKER = "markers=gpu: needs a CUDA GPU with a kernel image for it"


def install() -> Path:
    """Install the wheels if necessary; return the folder for PYTHONPATH."""
    files = sorted(path for path in BUNDLE.rglob("*") if path.suffix in (".whl", ".zip"))
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()
    site = Path(tempfile.gettempdir()) / f"kestrel-{digest[:16]}"
    if site.is_dir():
        return site
    fresh = Path(tempfile.mkdtemp(prefix="kestrel-install-"))
    wheels = [str(path) for path in files if path.suffix == ".whl"]
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--no-cache-dir"]
    if subprocess.run([*pip, "--target", str(fresh), *wheels], check=False).returncode != 0:
        shutil.rmtree(fresh)
        raise SystemExit(f"the wheels cannot be installed for {sys.executable}: the bundle is for Python 3.12")
    for path in files:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(fresh)
    fresh.chmod(0o755)
    try:
        fresh.rename(site)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return site


def pytest_arguments(arguments: list[str]) -> list[str]:
    """Arguments of Python that run the GPU tests: those in the given paths, or of every package."""
    if not any((CHECKOUT / word.partition("::")[0]).exists() for word in arguments if not word.startswith("-")):
        arguments = [*arguments, *(str(path) for path in sorted(CHECKOUT.glob("packages/*/tests")))]
        arguments += [str(CHECKOUT / "meta" / "tests")]
    options = ["-m", "gpu", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", GPU_MARKER]
    return ["-m", "pytest", *options, "--rootdir", str(CHECKOUT), *arguments]


def command(name: str, arguments: list[str]) -> list[str]:
    if name == "tests":
        return [sys.executable, *pytest_arguments(arguments)]
    if name == "sanitize":
        options = {"--tool": "memcheck", "--launches": "0"}
        while arguments[:1] and arguments[0] in options:
            options[arguments[0]], arguments = arguments[1], arguments[2:]
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            raise SystemExit("compute-sanitizer was not found")
        checked = ["--tool", options["--tool"], "--launch-count", options["--launches"], "--error-exitcode=99"]
        excluded = [f"--kernel-name-exclude=kernel_substring={name}" for name in ("2at6native", "at_cuda_detail")]
        return [sanitizer, *checked, *excluded, sys.executable, *pytest_arguments(arguments)]
    if name == "bench":
        revision = (BUNDLE / "revision").read_text().strip()
        options = ["--checkout", str(CHECKOUT), "--revision", revision]
        return [sys.executable, "-m", "kestrel_runtime.bench", *options, *arguments]
    if name in ("demo", "info"):
        return [sys.executable, "-m", "kestrel_kernels.cli", "generate" if name == "demo" else name, *arguments]
    if name == "python":
        return [sys.executable, *arguments]
    raise SystemExit(__doc__)


def main() -> int:
    words = command(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:])
    environment = {**os.environ, "PYTHONPATH": str(install()), "PYTHONUNBUFFERED": "1"}
    return subprocess.run(words, cwd=CHECKOUT, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
