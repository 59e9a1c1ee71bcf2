"""Writes the table of ops in README.md from the registry of ops; `--check` fails if it is out of date.

Run it with the families importable: `nox -s lint -- --write` does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MATRIX = json.loads((ROOT / "ci" / "matrix.json").read_text())
BLOCK = re.compile(r"(<!-- ops: written by tools/ops_table.py -->\n).*(<!-- end of ops -->\n)", re.DOTALL)
KERNEL = {"cuda": "CUDA C++", "cute": "CuTe DSL", None: "none yet"}


def families() -> list[str]:
    return [f"kestrel_{name}" for name in MATRIX["packages"] if name not in ("runtime", "meta")]


def rows(family: str) -> list[str]:
    from kestrel_runtime import ops

    module = importlib.import_module(family)
    kernel_of = {op.name: KERNEL[op.kernel] for op in ops(family)}
    found = []
    for name in module.__all__:
        function = getattr(module, name)
        if not inspect.isfunction(function):
            continue
        sentence = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")
        sentence = re.sub(r":\w+:(`[^`]*`)", r"\1", sentence).replace("``", "`").replace("|", "\\|")
        found.append(f"| `{family}.{name}` | {kernel_of.get(name, 'not needed')} | {sentence} |")
    return found


def table() -> str:
    archs = ", ".join(f"sm_{arch}" for arch in MATRIX["archs"])
    lines = ["| op | kernel | what it does |", "|---|---|---|"]
    lines += [row for family in families() for row in rows(family)]
    lines += ["", f"Every kernel runs on {archs}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    if not BLOCK.search(text):
        raise SystemExit("README.md has no place for the table of ops")
    fresh = BLOCK.sub(lambda match: match[1] + table() + match[2], text)
    if fresh == text:
        print("README.md: the table of ops is current")
        return 0
    if "--check" in sys.argv[1:]:
        print("README.md: the table of ops is out of date: `nox -s lint -- --write` writes it", file=sys.stderr)
        return 1
    README.write_text(fresh, encoding="utf-8")
    print("README.md: the table of ops was written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
