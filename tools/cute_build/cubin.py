"""Registers and stack frame of the kernels of a cubin, from the ELF sections that the driver reads.

``.nv.info`` is a sequence of (format, attribute, size, value): format 4 has a sized value, the others two bytes. The
attributes read here hold pairs of symbol number and value.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_SIZED = 4
_REGISTERS = 0x2F  # EIATTR_REGCOUNT
_FRAME = 0x11  # EIATTR_FRAME_SIZE


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel."""

    registers: int
    frame_bytes: int
    """Local memory per thread: not 0 when registers were spilled or an array was indexed at run time."""


def usage(cubin: bytes) -> Usage:
    """The largest register count and the largest stack frame of the kernels in a cubin."""
    registers = frame = 0
    for info in _sections(cubin, b".nv.info"):
        position = 0
        while position + 4 <= len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, position)
            if form == _SIZED and attribute in (_REGISTERS, _FRAME):
                _, value = struct.unpack_from("<II", info, position + 4)
                if attribute == _REGISTERS:
                    registers = max(registers, value)
                else:
                    frame = max(frame, value)
            position += 4 + (size if form == _SIZED else 0)
    if registers == 0:
        raise ValueError("not a cubin with kernels: no register count found")
    return Usage(registers, frame)


def _sections(elf: bytes, name: bytes) -> list[bytes]:
    """The contents of the sections of this name, by the section headers of ELF64."""
    if elf[:4] != b"\x7fELF" or elf[4] != 2:
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry) for i in range(count)]
    names = headers[names_index][4]
    found = []
    for header in headers:
        start = names + header[0]
        if elf[start : elf.index(b"\0", start)] == name:
            found.append(elf[header[4] : header[4] + header[5]])
    return found
