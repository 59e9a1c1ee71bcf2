"""The hatchling build hook of tools/cute_build, which is found in the checkout and in the sdist."""

import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (_here / "tools", _here.parents[1] / "tools") if folder.is_dir()]

from cute_build.hook import CuteBuildHook  # noqa: E402


def get_build_hook() -> type[CuteBuildHook]:
    return CuteBuildHook
