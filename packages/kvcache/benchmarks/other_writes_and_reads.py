"""The other cache ops, 32 query and 8 KV heads of 128, bf16: case, tokens. Pages of 16 slots, INT4 of 64.

Without times to reach. int4_cache_write is two launches; the limit counts one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kestrel_kvcache
from kestrel_kvcache import reference

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
ROW = KV_HEADS * SIZE  # elements of a token's key or value


def rows(tokens: int, heads: int = KV_HEADS) -> torch.Tensor:
    return torch.randn(tokens, heads, SIZE, dtype=torch.bfloat16, device="cuda")


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def pages_for(tokens: int, page: int = PAGE) -> int:
    return -(-tokens // page)


def slots_of(tokens: int, count: int) -> torch.Tensor:
    """[count, tokens], all distinct, in a random order."""
    return torch.randperm(count * tokens, device="cuda").view(count, tokens)


def rotary(dtype: torch.dtype, *how: Any) -> Callable[[int, int], list[tuple[Any, ...]]]:
    def make(tokens: int, count: int) -> list[tuple[Any, ...]]:
        caches = zeros(2, pages_for(count * tokens), PAGE, KV_HEADS, SIZE, dtype=dtype)
        table = torch.rand(4096, SIZE, device="cuda")
        positions = torch.randint(0, 4096, (count, tokens), device="cuda")
        return [
            (where, rows(tokens, HEADS), rows(tokens), rows(tokens), SIZE, table, *caches, slots.clone(), *how)
            for where, slots in zip(positions, slots_of(tokens, count), strict=True)
        ]

    return make


def int8_writes(tokens: int, count: int) -> list[tuple[Any, ...]]:
    blocks = pages_for(count * tokens)
    caches = zeros(2, blocks, PAGE, KV_HEADS, SIZE, dtype=torch.int8)
    scales = zeros(2, blocks, PAGE, KV_HEADS, dtype=torch.float32)
    return [(rows(tokens), rows(tokens), *caches, *scales, slots.clone()) for slots in slots_of(tokens, count)]


def int4_cache(blocks: int, sequences: int) -> tuple[torch.Tensor, ...]:
    caches = zeros(2, blocks, 64, KV_HEADS, SIZE // 2, dtype=torch.uint8)
    of_pages = zeros(2, blocks, KV_HEADS, SIZE, dtype=torch.float16)
    of_tokens = zeros(2, blocks, 64, KV_HEADS, dtype=torch.float16)
    return (*caches, *of_pages, *of_tokens, zeros(sequences, 64, KV_HEADS, SIZE, dtype=torch.bfloat16))


def int4_prompts(tokens: int, count: int) -> list[tuple[Any, ...]]:
    """Arguments for whole prompts, one sequence per set."""
    pages = pages_for(tokens, 64)
    cache, place = int4_cache(count * pages, count), torch.arange(tokens, device="cuda")
    tables = torch.randperm(count * pages, device="cuda").view(count, pages)
    return [
        (rows(tokens), rows(tokens), *cache, table[place // 64] * 64 + place % 64, torch.full_like(place, i))
        for i, table in enumerate(tables)
    ]


def int4_steps(tokens: int, count: int) -> list[tuple[Any, ...]]:
    """Arguments for a decode step: one token per sequence, at a random position of its page."""
    cache = int4_cache(count * tokens, count * tokens)
    pages = slots_of(tokens, count)
    places = torch.randint(0, 64, (count, tokens), device="cuda")
    return [
        (rows(tokens), rows(tokens), *cache, page * 64 + place, page) for page, place in zip(pages, places, strict=True)
    ]


def gathers(dtype: torch.dtype) -> Callable[[int, int], list[tuple[Any, ...]]]:
    """Keep each result until its set is used again, so that results are as cold as the cache."""

    def make(tokens: int, count: int) -> list[tuple[Any, ...]]:
        int4 = dtype == torch.uint8
        pages = pages_for(tokens, 64 if int4 else PAGE)
        blocks = count * pages
        scales: tuple[Any, ...] = ()
        if int4:
            *caches, k_scale, k_zero, v_scale, v_zero, tail = int4_cache(blocks, count)
            scales = k_scale, v_scale, k_zero, v_zero, tail
        else:
            caches = list(torch.randn(2, blocks, PAGE, KV_HEADS, SIZE, device="cuda").to(dtype))
            if dtype == torch.int8:
                scales = tuple(torch.rand(2, blocks, PAGE, KV_HEADS, device="cuda"))
        tables = torch.randperm(blocks, device="cuda").int().view(count, pages)
        ids = torch.arange(count, dtype=torch.int32, device="cuda").view(count, 1)
        return [
            ([None], *caches, table.clone(), tokens, *scales, *([one.clone()] if int4 else []))
            for table, one in zip(tables, ids, strict=True)
        ]

    return make


def gathering(op: Callable[..., Any]) -> Callable[..., None]:
    def call(kept: list[Any], key_cache: Any, value_cache: Any, table: Any, length: int, *scales: Any) -> None:
        names = ("k_scale", "v_scale", "k_zero", "v_zero", "k_tail", "seq_ids")
        kept[0] = op(key_cache, value_cache, table, length, **dict(zip(names, scales, strict=False)))

    return call


def rotating(op: Callable[..., Any]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        positional, how = arguments[:9], arguments[9:]
        op(*positional, **dict(zip(("kv_cache_dtype", "k_scale", "v_scale"), how, strict=False)))

    return call


def one_scale() -> torch.Tensor:
    return torch.full((1,), 0.03, device="cuda")


@dataclass(frozen=True)
class Case:
    """One op in one format; bytes per token that it reads and that it writes."""

    op: str
    make: Callable[[int, int], list[tuple[Any, ...]]]
    read: float
    written: float
    how: Callable[[Callable[..., Any]], Callable[..., None]] = lambda op: op


INT4_OF_VALUES = ROW / 2 + 4 * KV_HEADS
INT4_OF_KEYS = ROW / 2 + 4 * ROW / 64
TURNED = 2 * HEADS * SIZE + 2 * ROW  # a query and a key
CASES = {
    "rotary": Case("rotary_and_cache", rotary(torch.bfloat16), TURNED + 2 * ROW + 16, TURNED + 4 * ROW, rotating),
    "rotary fp8": Case(
        "rotary_and_cache",
        lambda tokens, count: rotary(torch.uint8, "fp8", one_scale(), one_scale())(tokens, count),
        TURNED + 2 * ROW + 16,
        TURNED + 2 * ROW,
        rotating,
    ),
    "int8": Case("int8_cache_write", int8_writes, 4 * ROW + 8, 2 * ROW + 8 * KV_HEADS),
    "int4 prompt": Case("int4_cache_write", int4_prompts, 4 * ROW + 16, INT4_OF_KEYS + INT4_OF_VALUES),
    "int4 step": Case("int4_cache_write", int4_steps, 4 * ROW + 16, 2 * ROW + INT4_OF_VALUES),
    "gather": Case("gather_cache", gathers(torch.bfloat16), 4 * ROW, 4 * ROW, gathering),
    "gather fp8": Case("gather_cache", gathers(torch.float8_e4m3fn), 2 * ROW, 4 * ROW, gathering),
    "gather int8": Case("gather_cache", gathers(torch.int8), 2 * ROW + 8 * KV_HEADS, 4 * ROW, gathering),
    "gather int4": Case("gather_cache", gathers(torch.uint8), INT4_OF_KEYS + INT4_OF_VALUES, 4 * ROW, gathering),
}
WHOLE_PAGES = ("int4 prompt", "gather int4")
TARGETS = dict.fromkeys(
    [f"{case} {tokens}" for case in CASES for tokens in ((64, 1024) if case in WHOLE_PAGES else (32, 1024))]
)


def sizes(shape: str) -> tuple[Case, int]:
    case, _, tokens = shape.rpartition(" ")
    return CASES[case], int(tokens)


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    case, tokens = sizes(shape)
    return [(case, *arguments) for arguments in case.make(tokens, count)]


def set_bytes(shape: str) -> int:
    """The bytes that are read, so that they are cold whatever is written."""
    case, tokens = sizes(shape)
    return int(tokens * case.read)


def traffic(shape: str) -> int:
    case, tokens = sizes(shape)
    return int(tokens * (case.read + case.written))


def operations(shape: str) -> int:
    return 0


def ours(case: Case, *arguments: Any) -> None:
    case.how(getattr(kestrel_kvcache, case.op))(*arguments)


def by_torch(case: Case, *arguments: Any) -> None:
    case.how(getattr(reference, case.op))(*arguments)


def candidates() -> dict[str, Callable[..., object]]:
    return {"kestrel": ours, "torch": by_torch}
