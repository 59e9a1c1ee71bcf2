"""One version for every distribution: `version.py check` compares all places, `version.py bump X.Y.Z` rewrites them.

The version is a literal in every pyproject.toml, in every package's `__version__` and in the `==` pins between
siblings.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+")

IN_PYPROJECT = re.compile(r'^version = "(?P<version>[^"]*)"', re.MULTILINE)
IN_INIT = re.compile(r'^__version__ = "(?P<version>[^"]*)"', re.MULTILINE)
# Every mention of a sibling as a requirement, with whatever follows its name.
SIBLING = re.compile(r'"(?P<name>kestrel-[a-z]+)(?:\[[a-z,]*\])?(?P<pin>==(?P<version>[^"; ]*)|[^"]*)"')


@dataclass(frozen=True)
class Place:
    """One spot that must name the version: `start` and `end` are its bounds in the file's text."""

    path: Path
    what: str
    version: str
    start: int
    end: int


def folders() -> list[Path]:
    return [*sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")), ROOT / "meta"]


def only(pattern: re.Pattern[str], path: Path, what: str) -> Place:
    found = list(pattern.finditer(path.read_text()))
    if len(found) != 1:
        raise SystemExit(f"{path.relative_to(ROOT)}: expected one {what}, found {len(found)}")
    return Place(path, what, found[0]["version"], *found[0].span("version"))


def dependencies(pyproject: Path) -> Iterator[Place]:
    text = pyproject.read_text()
    body = text[text.index("\ndependencies = [") :] if "\ndependencies = [" in text else ""
    offset = len(text) - len(body)
    for match in SIBLING.finditer(body):
        if match["version"] is None:
            line = text.count("\n", 0, offset + match.start()) + 1
            raise SystemExit(f"{pyproject.relative_to(ROOT)}:{line}: {match['name']} must be pinned with ==")
        start, end = match.span("version")
        yield Place(pyproject, f"pin of {match['name']}", match["version"], offset + start, offset + end)


def places() -> list[Place]:
    found = []
    for folder in folders():
        inits = list(folder.glob("src/*/__init__.py"))
        if len(inits) != 1:
            raise SystemExit(f"{folder.relative_to(ROOT)}: expected one package under src, found {len(inits)}")
        found.append(only(IN_PYPROJECT, folder / "pyproject.toml", "version"))
        found.append(only(IN_INIT, inits[0], "__version__"))
        found.extend(dependencies(folder / "pyproject.toml"))
    return found


def check() -> int:
    found = places()
    versions = sorted({place.version for place in found})
    if len(versions) == 1 and VERSION.fullmatch(versions[0]):
        print(f"version {versions[0]} in all {len(found)} places of {len(folders())} distributions")
        return 0
    print(f"one version is expected everywhere, found {', '.join(versions)}", file=sys.stderr)
    for place in found:
        print(f"  {place.version:10} {place.path.relative_to(ROOT)}: {place.what}", file=sys.stderr)
    return 1


def bump(version: str) -> int:
    if not VERSION.fullmatch(version):
        raise SystemExit(f"expected a version like 1.2.3, got {version!r}")
    found = places()
    texts = {place.path: place.path.read_text() for place in found}
    for place in sorted(found, key=lambda place: place.start, reverse=True):
        text = texts[place.path]
        texts[place.path] = text[: place.start] + version + text[place.end :]
    for path, text in texts.items():
        path.write_text(text)
    return check()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="every place names the same version")
    commands.add_parser("bump", help="write a new version everywhere").add_argument("version")
    arguments = parser.parse_args()
    return check() if arguments.command == "check" else bump(arguments.version)


if __name__ == "__main__":
    raise SystemExit(main())
