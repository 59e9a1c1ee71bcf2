"""What is compiled ahead of time, and which of it covers a call. Imports without the DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kestrel_runtime.cute_dsl.variants import capability, supports_pdl

DTYPES = ("bf16", "fp16")
EITHER = "half"  # bf16 or fp16, told apart when a kernel runs


@dataclass(frozen=True)
class DecodeVariant:
    """Attention of few queries over a cache (decode.py): head sizes up to ``size``, or just that where not padded."""

    dtype: str  # or EITHER
    cache: str  # "same" as the dtype, "e4m3", "e5m2", "int8" or "int4"
    size: int
    padded: bool
    warps: int
    tiles: int
    slots: int
    pieces: int = 1
    groups: int = 1
    """Of so many warps, each with a chunk of its sequence."""
    residents: int = 3
    split_weights: bool = True
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"decode_{self.dtype}_{self.cache}_d{self.size}{'p' if self.padded else ''}_w{self.groups * self.warps}"

    def slots_in(self, shared_bytes: int, warps: int, pieces: int) -> int:
        """How many slots of a warp so much shared memory holds."""
        bits = {"same": 16, "int4": 4}.get(self.cache, 8)
        slot = self.tiles * 16 * self.size * bits // 8 // pieces
        return shared_bytes // (warps * slot)

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from . import quantised
        from .decode import Decode
        from .tile import E4m3, Plain, Tiles

        dtype = numeric_type(self.dtype)
        caches = {
            "same": lambda: Plain(dtype),
            "e4m3": lambda: E4m3(bit_trick=capability(arch) < 89),
            "e5m2": quantised.E5m2,
            "int8": quantised.Int8,
            "int4": quantised.Int4,
        }
        warps, pieces, slots, residents = self.warps, self.pieces, self.slots, self.residents
        if capability(arch) not in (90, 100):  # which have 227 KB of shared memory for a block; others 99 or more
            if self.size == 512:
                warps, pieces = 4, 4 * self.pieces
            slots = min(slots, self.slots_in(92 * 1024, self.groups * warps, pieces))
        if capability(arch) != 90:  # where registers are filled to the last
            residents = max(1, residents - 1)
        tiles = (quantised.PageTiles if self.cache == "int4" else Tiles)(
            cache=caches[self.cache](),
            size=self.size,
            padded=self.padded,
            shares=warps,
            at_once=self.tiles,
            pieces=pieces,
            slots=slots,
            split_weights=self.split_weights,
        )
        kernel = Decode(dtype, tiles, self.groups, residents, supports_pdl(arch))
        return kernel, decode_arguments(dtype, self.cache)


@dataclass(frozen=True)
class CombineVariant:
    """Joins the chunks of long sequences (combine.py), any head size up to 512."""

    dtype: str
    warps: int
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"combine_{self.dtype}_w{self.warps}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .combine import Combine

        dtype = numeric_type(self.dtype)
        return Combine(dtype, self.warps, supports_pdl(arch)), combine_arguments(dtype)


@dataclass(frozen=True)
class AppendVariant:
    """Writes new keys and values into a cache (append.py, append_integers.py)."""

    dtype: str  # of "same" and "e4m3" caches; EITHER of others
    cache: str
    threads: int = 256
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"append_{self.dtype}_{self.cache}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        from .append import Append
        from .append_integers import AppendInt4, AppendInt8

        dependent = supports_pdl(arch)
        if self.cache in ("int8", "int4"):
            kernel: Any = (AppendInt8 if self.cache == "int8" else AppendInt4)(dependent)
        else:
            codes = "" if self.cache == "same" else self.cache
            kernel = Append(codes, self.threads, dependent, bit_trick=capability(arch) < 89)
        return kernel, append_arguments(numeric_type(self.dtype), self.cache)


@dataclass(frozen=True)
class TauTailVariant:
    """Tau scaling in place (tau_tail.py)."""

    dtype: str
    table: str
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"tau_tail_{self.dtype}_{self.table}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        import cutlass.cute as cute
        from cutlass import Int32

        from kestrel_runtime.cute_dsl import arguments

        from .tau_tail import TauTail

        dtype, table = numeric_type(self.dtype), numeric_type(self.table)
        tokens, scaled = cute.sym_int(), cute.sym_int()
        tensors = (
            arguments.strided(dtype, tokens, cute.sym_int(), unit=128 // dtype.width),
            arguments.strided(dtype, tokens, scaled),
            arguments.strided(table, cute.sym_int(), cute.sym_int()),
            arguments.any_strides(Int32, cute.sym_int()),
        )
        stream = arguments.torch_stream()
        kernel = TauTail(dtype, table, supports_pdl(arch))
        return kernel, (*tensors, Int32(0), Int32(0), Int32(0), stream)


@dataclass(frozen=True)
class MergeVariant:
    """Merging attention over two sets of keys (merge.py)."""

    dtype: str
    vector_loads: bool = True

    @property
    def name(self) -> str:
        return f"merge_{self.dtype}"

    def kernel(self, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """The kernel object and the arguments to compile it with."""
        import cutlass.cute as cute
        from cutlass import Float32

        from kestrel_runtime.cute_dsl import arguments

        from .merge import Merge

        dtype = numeric_type(self.dtype)
        tokens, heads, size = (cute.sym_int() for _ in range(3))
        unit = 128 // dtype.width
        outs = [arguments.strided(dtype, tokens, heads, size, unit=unit) for _ in range(2)]
        lses = [arguments.any_strides(Float32, heads, tokens) for _ in range(2)]
        results = arguments.contiguous(dtype, tokens, heads, size), arguments.contiguous(Float32, heads, tokens)
        stream = arguments.torch_stream()
        return Merge(dtype, supports_pdl(arch)), (outs[0], lses[0], outs[1], lses[1], *results, stream)


def numeric_type(dtype: str) -> Any:
    """The DSL's type of this name; kernels for EITHER see 16-bit elements as bf16."""
    from kestrel_runtime.cute_dsl import numeric

    return numeric.from_name("bf16" if dtype == EITHER else dtype)


def part_arguments() -> tuple[Any, ...]:
    """Sums and LSE of chunks, and the number of chunks of each block of rows."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from kestrel_runtime.cute_dsl import arguments

    part_lse, num_splits = (arguments.any_strides(dtype, cute.sym_int()) for dtype in (Float32, Int32))
    return arguments.contiguous(Float32, cute.sym_int64()), part_lse, num_splits


def append_arguments(dtype: Any, cache: str) -> tuple[Any, ...]:
    """See Append.__call__ and those of append_integers.py."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from kestrel_runtime.cute_dsl import arguments

    batch, queries, size, blocks, page, kv_heads = (cute.sym_int() for _ in range(6))
    stored = {"same": dtype, "int8": cutlass.Int8}.get(cache, cutlass.Uint8)
    new = [arguments.strided(dtype, batch, queries, kv_heads, size, unit=8) for _ in range(2)]
    width = cute.sym_int() if cache == "int4" else size
    caches = [arguments.strided(stored, blocks, page, kv_heads, width, unit=16 * 8 // stored.width) for _ in range(2)]
    where = arguments.any_strides(Int32, batch), arguments.any_strides(Int32, cute.sym_int(), cute.sym_int())
    numbers = (Int32(0),) * (2 if cache in ("int8", "int4") else 4)
    if cache == "int4":
        channels, tokens, tail = int4_arguments(dtype, blocks, page, kv_heads, size)
        scales = (*channels, *tokens, tail, arguments.any_strides(Int32, batch))
    else:
        of_tokens = (blocks, page, kv_heads)
        scales = [
            arguments.any_strides(Float32, *(of_tokens if cache == "int8" else (cute.sym_int(),))) for _ in range(2)
        ]
    stream = arguments.torch_stream()
    return (*new, *caches, *where, *scales, *numbers, stream)


def int4_arguments(dtype: Any, blocks: Any, page: Any, kv_heads: Any, size: Any) -> tuple[Any, ...]:
    """Scales and zeros of channels, those of values, and the tail."""
    import cutlass
    import cutlass.cute as cute

    from kestrel_runtime.cute_dsl import arguments

    channels = [arguments.strided(cutlass.Float16, blocks, kv_heads, size, unit=8) for _ in range(2)]
    tokens = [arguments.any_strides(cutlass.Float16, blocks, page, kv_heads) for _ in range(2)]
    return channels, tokens, arguments.strided(dtype, cute.sym_int(), page, kv_heads, size, unit=8)


def decode_arguments(dtype: Any, cache: str) -> tuple[Any, ...]:
    """See Decode.__call__."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint32

    from kestrel_runtime.cute_dsl import arguments

    batch, queries, heads, size, blocks, page, kv_heads = (cute.sym_int() for _ in range(7))
    stored = {"same": dtype, "int8": cutlass.Int8}.get(cache, cutlass.Uint8)
    unit = 16 * 8 // stored.width
    q = arguments.strided(dtype, batch, queries, heads, size, unit=8)
    width = cute.sym_int() if cache == "int4" else size
    caches = [arguments.strided(stored, blocks, page, kv_heads, width, unit=unit) for _ in range(2)]
    lengths, prefixes = arguments.any_strides(Int32, batch), arguments.any_strides(Int32, cute.sym_int())
    table = arguments.any_strides(Int32, cute.sym_int(), cute.sym_int())
    scales = [arguments.any_strides(Float32, cute.sym_int()) for _ in range(2)]
    out = arguments.contiguous(dtype, batch, queries, heads, size)
    lse = arguments.contiguous(Float32, batch, heads, queries)
    parts = part_arguments()
    more: tuple[Any, ...] = ()
    if cache == "int8":
        more = (*(arguments.any_strides(Float32, blocks, page, kv_heads) for _ in range(2)), Int32(0))
    elif cache == "int4":
        channels, tokens, tail = int4_arguments(dtype, blocks, page, kv_heads, size)
        more = (*channels, *tokens, tail, arguments.any_strides(Int32, batch), Int32(0))
    elif cache == "e5m2":
        more = (Int32(0),)
    integers = (Int32(0),) * 9
    page = (Uint32(0), Int32(0), Int32(1), Float32(1.0))
    numbers = (*integers[:3], *page, *integers[3:], Float32(1.0), Float32(0.0), *(Int32(0),) * 8)
    stream = arguments.torch_stream()
    return (q, *caches, lengths, table, *scales, prefixes, out, lse, *parts, *numbers, *more, stream)


def combine_arguments(dtype: Any) -> tuple[Any, ...]:
    """See Combine.__call__."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from kestrel_runtime.cute_dsl import arguments

    batch, queries, heads, size = (cute.sym_int() for _ in range(4))
    out = arguments.contiguous(dtype, batch, queries, heads, size)
    lse = arguments.contiguous(Float32, batch, heads, queries)
    parts = part_arguments()
    stream = arguments.torch_stream()
    return (out, lse, *parts, Int32(0), Int32(0), stream)


def _decode_variants(dtype: str) -> tuple[DecodeVariant, ...]:
    """What a GPU holds of registers decides the residents: 16 warps of 128, 12 of 168, 8 of 255."""
    return (
        DecodeVariant(dtype, "e4m3", 64, False, warps=4, tiles=2, slots=4, residents=4),
        DecodeVariant(dtype, "e4m3", 64, False, warps=4, tiles=2, slots=4, residents=1, groups=4),
        DecodeVariant(dtype, "same", 64, False, warps=4, tiles=1, slots=6, residents=4),
        DecodeVariant(dtype, "same", 64, False, warps=4, tiles=1, slots=6, residents=1, groups=4),
        DecodeVariant(dtype, "e4m3", 128, False, warps=8, tiles=1, slots=4, residents=2),
        DecodeVariant(dtype, "same", 128, False, warps=4, tiles=1, slots=4, residents=3),
        DecodeVariant(dtype, "e4m3", 128, True, warps=4, tiles=1, slots=6, residents=3),
        DecodeVariant(dtype, "e4m3", 256, False, warps=4, tiles=1, slots=4, residents=3),
        DecodeVariant(dtype, "e4m3", 256, True, warps=4, tiles=1, slots=4, residents=2),
        DecodeVariant(dtype, "e4m3", 512, False, warps=4, tiles=1, slots=4, residents=1),
        DecodeVariant(dtype, "same", 128, True, warps=4, tiles=1, slots=4, residents=2),
        DecodeVariant(dtype, "same", 256, False, warps=4, tiles=1, slots=6, residents=2, pieces=2),
        DecodeVariant(dtype, "same", 256, True, warps=4, tiles=1, slots=6, residents=2, pieces=2),
        DecodeVariant(dtype, "same", 512, False, warps=8, tiles=1, slots=3, residents=1, pieces=2),
    )


QUANTISED = (
    DecodeVariant(EITHER, "int4", 128, False, warps=4, tiles=4, slots=2, residents=2),
    DecodeVariant(EITHER, "int4", 64, False, warps=4, tiles=4, slots=4, residents=3),
    DecodeVariant(EITHER, "int8", 64, False, warps=4, tiles=2, slots=4, residents=4),
    DecodeVariant(EITHER, "int8", 128, False, warps=8, tiles=1, slots=4, residents=2),
    DecodeVariant(EITHER, "int8", 256, False, warps=4, tiles=1, slots=4, residents=2),
    DecodeVariant(EITHER, "e5m2", 64, False, warps=4, tiles=2, slots=4, residents=4),
    DecodeVariant(EITHER, "e5m2", 128, False, warps=8, tiles=1, slots=4, residents=2),
)

VARIANTS: tuple[DecodeVariant | CombineVariant | AppendVariant | TauTailVariant | MergeVariant, ...] = (
    *(variant for dtype in DTYPES for variant in _decode_variants(dtype)),
    *QUANTISED,
    *(CombineVariant(dtype, warps) for dtype in DTYPES for warps in (1, 8)),
    *(AppendVariant(dtype, cache) for dtype in DTYPES for cache in ("same", "e4m3")),
    *(AppendVariant(EITHER, cache) for cache in ("e5m2", "int8", "int4")),
    *(TauTailVariant(dtype, table) for dtype in (*DTYPES, "fp32") for table in sorted({dtype, "fp32"})),
    *(MergeVariant(dtype) for dtype in (*DTYPES, "fp32")),
)


NAMED = {variant.name: variant for variant in VARIANTS}


def covering(dtype: str, cache: str, size: int) -> tuple[DecodeVariant, ...]:
    """The decode variants for this head size, with the same results, fewest warps first; none where none covers it."""
    fitting = [v for v in VARIANTS if isinstance(v, DecodeVariant) and v.dtype in (dtype, EITHER) and v.cache == cache]
    exact = tuple(v for v in fitting if v.size == size and not v.padded)
    return exact or tuple(v for v in fitting if v.padded and size < v.size)[:1]


def outside(dtype: str, cache: str, size: int) -> tuple[DecodeVariant, ...]:
    """The variant for a case that the table lacks, to be compiled on first use: other codes of 8 bits as e4m3 ones.

    Scales take registers: at three residents int8 heads of up to 128 spill; heads of 512 do at any number.
    """
    if cache not in ("int8", "e5m2") or size > 256:
        return ()
    found = covering(dtype, "e4m3", size)[:1]
    return tuple(replace(v, dtype=EITHER, cache=cache, residents=min(v.residents, 2)) for v in found)
