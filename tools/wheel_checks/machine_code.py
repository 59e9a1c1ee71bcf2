"""Lists the kernels of a shared library: their architecture, resources, and number of wide loads.

nvcc puts its cubins, compressed or not, into the section .nv_fatbin, which cuobjdump reads. CuTe's compiler puts them
into a data section as plain ELF files. These are found by their header and passed to cuobjdump one by one.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"\x7fELF\x02\x01"
MACHINE_CUDA = 190
WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS|UBLKCP)\S*\.(?:128|256)\b|\bUBLKCP\b|\bUTMALDG\b")


@dataclass(frozen=True)
class Kernel:
    arch: str
    """The number alone, "80" or "100": a CuTe cubin does not record the suffix "a" or "f"."""
    name: str
    registers: int
    stack: int
    local: int
    wide_loads: int
    """Global loads of 16 bytes or more, and bulk copies, in the machine code."""


def kernels(library: Path, cuobjdump: Path) -> list[Kernel]:
    """Every kernel of a library."""
    with tempfile.TemporaryDirectory() as folder:
        data = library.read_bytes()
        fatbin = section_range(data, b".nv_fatbin")  # cuobjdump finds its cubins in the library itself
        files = [library] if fatbin else []
        for number, cubin in enumerate(embedded_cubins(data, outside=fatbin)):
            files.append(Path(folder, f"{number}.cubin"))
            files[-1].write_bytes(cubin)
        with ThreadPoolExecutor(2) as pool:
            found = [kernel for each in pool.map(lambda file: _kernels_of(file, cuobjdump), files) for kernel in each]
    return list(dict.fromkeys(found))


def section_range(data: bytes, section: bytes) -> range:
    """The offsets of a section of a library; empty where it has none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    # name, type, flags, address, offset, size
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        if data.startswith(section + b"\0", headers[names][4] + name):
            return range(offset, offset + length)
    return range(0)


def embedded_cubins(data: bytes, outside: range = range(0)) -> Iterator[bytes]:
    """The complete CUDA ELF files inside `data` that do not begin in the range `outside`."""
    position = data.find(MAGIC)
    while position >= 0:
        if position in outside:
            position = data.find(MAGIC, outside.stop)
            continue
        (machine,) = struct.unpack_from("<H", data, position + 18)
        if machine == MACHINE_CUDA:
            programs, sections = struct.unpack_from("<QQ", data, position + 32)
            program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, position + 54)
            size = max(programs + program_size * program_count, sections + section_size * section_count)
            yield data[position : position + size]
        position = data.find(MAGIC, position + 1)


def _kernels_of(file: Path, cuobjdump: Path) -> list[Kernel]:
    loads = _wide_loads(file, cuobjdump)
    found = []
    arch = name = ""
    for line in _run(cuobjdump, "--dump-resource-usage", file):
        if match := re.match(r"\s*arch = sm_(\d+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):$", line):
            name = match[1]
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            where = arch or loads.arch
            registers, stack, local = (int(number) for number in match.groups())
            found.append(Kernel(where, name, registers, stack, local, loads.count[where, name]))
    return found


@dataclass(frozen=True)
class _Loads:
    arch: str
    """The last architecture in the output, which is that of a file with a single cubin."""
    count: Counter[tuple[str, str]]


def _wide_loads(file: Path, cuobjdump: Path) -> _Loads:
    count: Counter[tuple[str, str]] = Counter()
    arch = name = ""
    for line in _run(cuobjdump, "--dump-sass", file):
        if "LDG" in line or "UBLKCP" in line:  # a cheap test first: the output has millions of lines
            if WIDE_LOAD.search(line):
                count[arch, name] += 1
        elif "Function : " in line:
            name = line.split()[-1]
        elif "code for sm_" in line and (match := re.match(r"\s*code for sm_(\d+)", line)):
            arch = match[1]
    return _Loads(arch, count)


def _run(cuobjdump: Path, option: str, file: Path) -> Iterator[str]:
    """The lines of cuobjdump's output, streamed: the machine code of a library is hundreds of megabytes of text."""
    # cuobjdump calls nvdisasm, which is in the same folder.
    environment = {**os.environ, "PATH": f"{cuobjdump.parent}{os.pathsep}{os.environ['PATH']}"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [cuobjdump, option, file], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        yield from process.stdout
        if process.wait():
            errors.seek(0)
            raise SystemExit(f"cuobjdump {option} {file.name} failed:\n{errors.read()}")
