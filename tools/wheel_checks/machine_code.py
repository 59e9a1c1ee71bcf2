"""Lists the kernels of a shared library: their architecture, resources, and number of wide loads.

nvcc puts its cubins, compressed or not, into the section .nv_fatbin, which cuobjdump reads. CuTe's compiler puts them
into a data section as plain ELF files, one for each kernel. These are found by their header. cuobjdump reads their
resources. nvdisasm takes 0.4 s to start, so it disassembles the code of all those of an architecture at once.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"\x7fELF\x02\x01"  # of 64 bits, little-endian
MACHINE_CUDA = 190  # e_machine. The offsets below are those of the ELF64 header and of its section headers.
WIDE_LOAD = re.compile(r"\bLDG(?:STS)?\S*\.(?:128|256)\b|\bUBLKCP\b|\bUTMALDG\b")


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
    data = library.read_bytes()
    fatbin = section_range(data, b".nv_fatbin")  # cuobjdump finds its cubins in the library itself
    found = _kernels_of(library, cuobjdump) if fatbin else []
    by_arch: dict[str, list[bytes]] = {}
    for cubin in embedded_cubins(data, outside=fatbin):
        by_arch.setdefault(_arch_of(cubin), []).append(cubin)
    with ThreadPoolExecutor(2) as pool:
        for each in pool.map(lambda arch: _embedded_kernels(arch, by_arch[arch], cuobjdump), by_arch):
            found += each
    return list(dict.fromkeys(found))


def section_range(data: bytes, section: bytes) -> range:
    """The offsets of a section of a library; empty where it has none."""
    return next((where for name, where in _sections(data) if name == section), range(0))


def _sections(data: bytes) -> Iterator[tuple[bytes, range]]:
    """The names and offsets of the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    # name, type, flags, address, offset, size
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        yield data[start : data.index(b"\0", start)], range(offset, offset + length)


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


def _arch_of(cubin: bytes) -> str:
    """The second byte of e_flags."""
    (flags,) = struct.unpack_from("<I", cubin, 48)
    return str(flags >> 8 & 0xFF)


def _embedded_kernels(arch: str, cubins: Sequence[bytes], cuobjdump: Path) -> list[Kernel]:
    """The kernels of cubins for one architecture."""
    code, starts, functions = [], [], []  # of all cubins, one after the other
    size = 0
    for index, cubin in enumerate(cubins):
        for name, where in _sections(cubin):
            if name.startswith(b".text."):
                code.append(cubin[where.start : where.stop])
                starts.append(size)
                functions.append((index, name.removeprefix(b".text.").decode()))
                size += len(where)
    loads: Counter[tuple[int, str]] = Counter()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder, f"sm_{arch}.bin")
        together.write_bytes(b"".join(code))
        options = ("--binary", f"SM{arch}", "--no-dataflow", "--no-vliw")
        for line in _run(cuobjdump.with_name("nvdisasm"), *options, together):
            if WIDE_LOAD.search(line) and (match := re.match(r"\s*/\*([0-9a-f]+)\*/", line)):
                loads[functions[bisect_right(starts, int(match[1], 16)) - 1]] += 1
        for index, cubin in enumerate(cubins):
            file = Path(folder, f"{index}.cubin")
            file.write_bytes(cubin)
            for _, name, *resources in _resources(file, cuobjdump):
                found.append(Kernel(arch, name, *resources, loads[index, name]))
    return found


def _kernels_of(file: Path, cuobjdump: Path) -> list[Kernel]:
    loads = _wide_loads(file, cuobjdump)
    return [Kernel(*each, loads[each[0], each[1]]) for each in _resources(file, cuobjdump)]


def _resources(file: Path, cuobjdump: Path) -> Iterator[tuple[str, str, int, int, int]]:
    """Architecture, name, registers, stack and local memory of each kernel; of a plain cubin, no architecture."""
    arch = name = ""
    for line in _run(cuobjdump, "--dump-resource-usage", file):
        if match := re.match(r"\s*arch = sm_(\d+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):$", line):
            name = match[1]
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            registers, stack, local = (int(number) for number in match.groups())
            yield arch, name, registers, stack, local


def _wide_loads(file: Path, cuobjdump: Path) -> Counter[tuple[str, str]]:
    """How many each kernel has, by architecture and name."""
    count: Counter[tuple[str, str]] = Counter()
    arch = name = ""
    for line in _run(cuobjdump, "--dump-sass", file):
        if "LDG" in line or "UBLKCP" in line:  # a cheap test first (UTMALDG too): the output has millions of lines
            if WIDE_LOAD.search(line):
                count[arch, name] += 1
        elif "Function : " in line:
            name = line.split()[-1]
        elif "code for sm_" in line and (match := re.match(r"\s*code for sm_(\d+)", line)):
            arch = match[1]
    return count


def _run(tool: Path, *arguments: str | Path) -> Iterator[str]:
    """The lines of a tool's output, streamed: the machine code of a library is hundreds of megabytes of text."""
    # cuobjdump calls nvdisasm, which is in the same folder.
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [tool, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        yield from process.stdout
        if process.wait():
            errors.seek(0)
            what = " ".join(each.name if isinstance(each, Path) else each for each in (tool, *arguments))
            raise SystemExit(f"{what} failed:\n{errors.read()}")
