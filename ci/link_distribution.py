"""`link_distribution.py torch FOLDER`: links to an installed distribution and to what it requires, nothing else."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def closure(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and its requirements without extras, as far as they are installed, by name."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name not in found:
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another platform or version of Python
            return found
        for requirement in found[name].requires or ():
            if "extra ==" not in requirement:
                closure(re.match(r"[\w.-]+", requirement)[0], found)
    return found


def main(name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for each in closure(name, {}).values():
        for file in each.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(each.locate_file(top)).resolve())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
