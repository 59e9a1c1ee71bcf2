"""The contract of a family's ``kernels/variants.py``, and what a variant asks about its architecture."""

from __future__ import annotations

from typing import Any, Protocol


class Variant(Protocol):
    """One kernel that is compiled ahead of time: a frozen dataclass, listed in ``VARIANTS``.

    ``kernels/variants.py`` must import without the DSL. The repr of a variant is part of the key under which a kernel
    that was compiled on first use is kept on disk, so it must hold every field that changes the code.

    A variant may list its architectures in ``archs``. GPUs of sm_86 and sm_89 run the kernel of sm_80, so ``kernel``
    returns equal objects for them. A variant whose attribute ``converts_fp8`` is true has another kernel for sm_89.
    """

    @property
    def name(self) -> str:
        """The entry point without its architecture, for example ``"topk_bf16_n64"``."""

    @property
    def vector_loads(self) -> bool:
        """Whether the kernel claims 16-byte loads; a build checks the PTX."""

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments for ``cute.compile``. Imports the DSL."""


def capability(arch: str) -> int:
    """The compute capability of an architecture: 89 of ``"89"``, 90 of ``"90a"``."""
    return int(arch.rstrip("af"))


def supports_pdl(arch: str) -> bool:
    """Whether the architecture has programmatic dependent launch (PDL): sm_90 and later."""
    return capability(arch) >= 90
