"""The variants that are compiled ahead of time, and which of them covers a call. Imports without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrel_runtime.cute_dsl.variants import supports_pdl

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class ListVariant:
    """Rows up to ``longest``, k <= 8: sorted lists of eight in registers (topk.py)."""

    dtype: str
    longest: int
    lanes: int
    warps: int
    threads: int
    vector_loads: bool = True
    largest_k: int = 8

    @property
    def name(self) -> str:
        return f"topk_{self.dtype}_k8_n{self.longest}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from kestrel_runtime.cute_dsl import numeric

        from .topk import TopK

        dtype = numeric.from_name(self.dtype)
        return TopK(dtype, self.lanes, self.warps, self.threads, supports_pdl(arch)), arguments_of(dtype)


@dataclass(frozen=True)
class SelectVariant:
    """Rows up to ``longest``, k <= 128: candidates selected by bisection (topk_select.py)."""

    dtype: str
    longest: int
    warps: int
    chunks: int
    rows: int
    vector_loads: bool = True
    largest_k: int = 128

    @property
    def name(self) -> str:
        return f"topk_{self.dtype}_k128_n{self.longest}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from kestrel_runtime.cute_dsl import numeric

        from .topk_select import TopKSelect

        dtype = numeric.from_name(self.dtype)
        return TopKSelect(dtype, self.warps, self.chunks, self.rows, supports_pdl(arch)), arguments_of(dtype)


def arguments_of(dtype: Any) -> tuple[Any, ...]:
    """scores [rows, n] of any 64-bit row stride and alignment, values and indices [rows, k], softmax, the stream."""
    import cutlass
    import cutlass.cute as cute

    from kestrel_runtime.cute_dsl import arguments

    rows, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int()
    scores = arguments.strided(dtype, rows, n)
    values = arguments.contiguous(dtype, rows, k, align=None)
    indices = arguments.contiguous(cutlass.Int32, rows, k, align=None)
    return scores, values, indices, cutlass.Int32(0), arguments.torch_stream()


# In the order of preference: the first that covers a call runs it.
VARIANTS: tuple[ListVariant | SelectVariant, ...] = tuple(
    variant
    for dtype in DTYPES
    for variant in (
        ListVariant(dtype, 64, lanes=8, warps=1, threads=128),
        ListVariant(dtype, 256, lanes=32, warps=1, threads=192),
        ListVariant(dtype, 1024, lanes=32, warps=4, threads=128),
        ListVariant(dtype, 4096, lanes=32, warps=16, threads=512),
        SelectVariant(dtype, 256, warps=1, chunks=1, rows=2),
        SelectVariant(dtype, 1024, warps=4, chunks=1, rows=1),
        SelectVariant(dtype, 4096, warps=8, chunks=2, rows=1),
    )
)


def covering(dtype: str, n: int, k: int) -> ListVariant | SelectVariant | None:
    """The variant for rows of n and this k, or None."""
    for variant in VARIANTS:
        if variant.dtype == dtype and n <= variant.longest and k <= variant.largest_k:
            return variant
    return None
