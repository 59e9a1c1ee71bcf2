"""The hatchling build hook of the families with CuTe kernels.

A wheel gets ``<package>/_lib`` with the library and its manifest, and ``<package>/benchmarks``, which ``kestrel-kernels
bench`` times. Without kernels or architectures (KESTREL_ARCHS=none) it gets the manifest alone and stays a pure wheel.
An editable install has them in its source folder.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from . import driver


class CuteBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """What the build requires besides hatchling: ``kernel-dependencies`` of the hook, where kernels are built."""
        return list(self.config.get("kernel-dependencies", [])) if driver.archs_from_environment() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = self.metadata.core.name.replace("-", "_")
        family = driver.Family(Path(self.root) / "src", package)
        if version == "editable":
            output = family.source / package / "_lib"
        else:
            self._folder = tempfile.TemporaryDirectory()
            output = Path(self._folder.name)
        archs = driver.archs_from_environment()
        files = driver.build(family, output, archs)
        if family.has_kernels and archs:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
        if version == "editable":
            for stale in set(output.iterdir()) - set(files):
                stale.unlink()
        else:
            benchmarks = sorted(Path(self.root, "benchmarks").glob("*.py"))
            included = {file: f"{package}/_lib/{file.name}" for file in files}
            included |= {file: f"{package}/benchmarks/{file.name}" for file in benchmarks}
            build_data["force_include"].update({str(file): place for file, place in included.items()})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()
