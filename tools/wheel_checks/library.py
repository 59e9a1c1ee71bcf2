"""Checks of what a family's shared library needs from the machine that loads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile

# Of glibc and GCC, which every Linux machine has, and of the packages that kestrel_runtime opens first.
ALLOWED = frozenset(
    {
        "libtvm_ffi.so",
        "libcute_dsl_runtime.so",
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "librt.so.1",
        "libstdc++.so.6",
        "ld-linux-x86-64.so.2",
    }
)
# Symbols of CPython's C API would tie the library to one version of Python.
PYTHON_SYMBOL = re.compile(r"_?Py[A-Z_]")


def problems(library: Path, functions: Sequence[str]) -> list[str]:
    """Needed libraries that are not allowed, search paths, symbols of CPython, and missing entry points."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    needed = [tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"]
    found = [f"needs {name}, which is not an allowed library" for name in needed if name not in ALLOWED]
    found += [
        f"has a search path ({tag.entry.d_tag})" for tag in dynamic if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")
    ]
    undefined = [symbol.name for symbol in symbols if symbol.entry.st_shndx == "SHN_UNDEF"]
    found += [f"uses {name} of CPython" for name in undefined if PYTHON_SYMBOL.match(name)]
    exported = {symbol.name for symbol in symbols if symbol.entry.st_shndx != "SHN_UNDEF"}
    missing = [name for name in functions if f"__tvm_ffi_{name}" not in exported]
    found += [f"does not export {name}, which the manifest names" for name in missing]
    return found
