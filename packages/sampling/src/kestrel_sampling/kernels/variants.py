"""What is compiled ahead of time, and which of it covers a call. Imports without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        from .topk import TopK

        dtype = numeric(self.dtype)
        kernel = TopK(dtype, self.lanes, self.warps, self.threads, has_dependent_launch(arch))
        return kernel, arguments(dtype)


@dataclass(frozen=True)
class SelectVariant:
    """Rows up to ``longest``, k <= 128: bisection for the k-th key (topk_select.py)."""

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
        from .topk_select import TopKSelect

        dtype = numeric(self.dtype)
        return TopKSelect(dtype, self.warps, self.chunks, self.rows, has_dependent_launch(arch)), arguments(dtype)


def has_dependent_launch(arch: str) -> bool:
    """Programmatic dependent launch came with sm_90."""
    return int(arch.rstrip("af")) >= 90


def numeric(dtype: str) -> Any:
    """The DSL's type of this name."""
    import cutlass

    return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}[dtype]


def arguments(dtype: Any) -> tuple[Any, ...]:
    """scores [rows, n] of any 64-bit row stride and alignment, values and indices [rows, k], softmax, the stream."""
    import cutlass
    import cutlass.cute as cute

    rows, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int()
    scores = cute.runtime.make_fake_tensor(
        dtype, (rows, n), stride=(cute.sym_int64(), 1), assumed_align=dtype.width // 8
    )
    values = cute.runtime.make_fake_compact_tensor(dtype, (rows, k), stride_order=(1, 0))
    indices = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (rows, k), stride_order=(1, 0))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return scores, values, indices, cutlass.Int32(0), stream


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
