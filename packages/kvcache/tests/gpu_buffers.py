"""Buffers of the tests on a GPU, and their comparison with what the reference leaves, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kestrel_kvcache import reference
from kestrel_runtime.testing import twins

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("NHD", "HND", "halves", "layers", "unequal", "odd base")

comparisons: list[tuple[str, torch.Tensor]] = []
"""What each comparison of a test was of, and whether it failed. They are read once, when the test ends: reading one
waits for the GPU."""


def expect(what: str, differs: torch.Tensor) -> None:
    comparisons.append((what, differs))


def text_of(values: Iterable[Any]) -> str:
    """Arguments for the message of a failed comparison."""
    texts = (f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in values)
    return ", ".join(texts).replace("torch.", "")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3).to(dtype)


def memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of 0x7F, which no test writes, with 64 elements before and 64 behind in the same storage."""
    count = torch.Size(shape).numel()
    buffer = torch.full(((count + 128) * dtype.itemsize,), 0x7F, dtype=torch.uint8, device="cuda")
    return buffer.view(dtype)[64 : 64 + count].view(shape)


def caches(layout: str, blocks: int, page: int, heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """K and V [blocks, page, heads, size]."""
    if layout == "HND":
        return [memory(blocks, heads, page, size, dtype=dtype).transpose(1, 2) for _ in range(2)]
    if layout == "halves":
        return list(memory(blocks, page, heads, 2 * size, dtype=dtype).split(size, dim=-1))
    if layout == "layers":
        layers = memory(blocks, 3, 2, page, heads, size, dtype=dtype)
        return [layers[:, 1, 0], layers[:, 1, 1]]
    if layout == "unequal":
        wide = memory(blocks, page, heads + 1, size + 8, dtype=dtype)[:, :, :heads, :size]
        return [wide, memory(blocks, heads, page, size, dtype=dtype).transpose(1, 2)]
    if layout == "odd base":
        flat = memory(2, blocks * page * heads * size + 1, dtype=dtype)
        return [one[1:].view(blocks, page, heads, size) for one in flat]
    return [memory(blocks, page, heads, size, dtype=dtype) for _ in range(2)]


def some_slots(tokens: int, count: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> torch.Tensor:
    """Distinct slots below count, with padding and slots past the end between them."""
    slots = torch.randperm(count, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")[:tokens]
    slots[1::5] = -1
    slots[3::7] = count + 3
    if dtype == torch.int64:
        slots[5::11] = 2**40 + count // 2
    return slots.to(dtype)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Every byte of the storage behind a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def assert_as_reference(op: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run the kernel and the reference on equal buffers; no byte may differ, inside the tensors or around them."""
    ours, wanted = twins((*args, *kwargs.values())), twins((*args, *kwargs.values()))
    for values, function in ((ours, op), (wanted, getattr(reference, op.__name__))):
        positional, named = values[: len(args)], values[len(args) :]
        function(*positional, **dict(zip(kwargs, named, strict=True)))
    for i, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        if isinstance(a, torch.Tensor):
            expect(f"argument {i} of {op.__name__}({text_of(ours)})", (whole(a) != whole(b)).any())


class Int4:
    """An INT4 cache of some sequences with pages in random order, and how long each sequence is."""

    def __init__(self, pages: int, sequences: int, heads: int, size: int, dtype: torch.dtype, layout: str) -> None:
        blocks = pages * sequences
        self.heads, self.size, self.dtype = heads, size, dtype
        of_pages = [memory(blocks, heads + 1, size + 8, dtype=torch.float16)[:, :heads, :size] for _ in range(2)]
        of_tokens = [memory(blocks, 64, heads, dtype=torch.float16) for _ in range(2)]
        tail = memory(sequences, heads, 64, size, dtype=dtype).transpose(1, 2)
        self.tensors = [*caches(layout, blocks, 64, heads, size // 2, torch.uint8), *of_pages, *of_tokens, tail]
        self.table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).view(sequences, pages)
        self.lengths = [0] * sequences

    def call(self, counts: dict[int, int], *, shuffle: bool, wide: bool) -> tuple[torch.Tensor, ...]:
        """Arguments that append so many tokens to each of these sequences, with padding among them."""
        slots, sequences = [-1, 5, 64 * self.table.numel()], [0, -1, 0]
        for s, count in counts.items():
            places = range(self.lengths[s], self.lengths[s] + count)
            slots += [int(self.table[s, i // 64]) * 64 + i % 64 for i in places]
            sequences += [s] * count
            self.lengths[s] += count
        order = torch.randperm(len(slots)) if shuffle else torch.arange(len(slots))
        index = torch.int64 if wide else torch.int32
        ids = [torch.tensor(x)[order].to("cuda", index) for x in (slots, sequences)]
        seed = sum(self.lengths)
        rows = [random(len(slots) + 2, self.heads, self.size, dtype=self.dtype, seed=seed + i) for i in range(2)]
        return (*rows, *self.tensors, *ids)
