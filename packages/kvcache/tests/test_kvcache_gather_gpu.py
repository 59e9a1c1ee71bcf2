"""gather_cache on a GPU: every element is that of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_buffers import FLOATS, LAYOUTS, Int4, assert_as_reference, caches, comparisons, expect, random, text_of

from kestrel_kvcache import gather_cache, int4_cache_write, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


def assert_gathered(*args: Any, **kwargs: Any) -> None:
    out = FLOATS[len(comparisons) % 3]
    what = f"gather_cache({text_of((*args, *kwargs.values()))}, dtype={out})"
    got = gather_cache(*args, dtype=out, **kwargs)
    want = reference.gather_cache(*args, dtype=out, **kwargs)
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        assert a.dtype == out
        expect(what, ((a != b) & ~(a.isnan() & b.isnan())).any())


def page_table(blocks: int, pages: int) -> torch.Tensor:
    """Pages in random order, one of them negative and one past the end."""
    table = torch.randint(0, blocks, (pages,), generator=torch.Generator().manual_seed(pages)).int()
    table[2::5], table[3::7] = -1, blocks
    return table.cuda()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*FLOATS, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_sequences_are_gathered_from_every_layout(kind: torch.dtype, layout: str) -> None:
    for heads, size in ((8, 64), (1, 128), (3, 72), (2, 65)):
        for page, length in ((1, 1), (16, 54), (64, 512), (3, 100), (256, 700), (16, 0)):
            cache = caches(layout, 12, page, heads, size, kind)
            for one in cache:
                values = random(*one.shape, dtype=torch.float32)
                one.copy_(values.to(torch.uint8) if kind in (torch.uint8, torch.int8) else values.to(kind))
            scales: dict[str, torch.Tensor] = {}
            if kind == torch.int8:
                scales = {name: random(12, page, heads, dtype=torch.float32) for name in ("k_scale", "v_scale")}
            elif kind.itemsize == 1 and length % 4:
                scales = {"k_scale": torch.rand(1).cuda(), "v_scale": torch.rand(heads).cuda()}
            pages = max(1, length // page - 1)  # the last tokens have no entry in the table
            assert_gathered(*cache, page_table(12, pages), length, **scales)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int4_sequences_are_gathered_with_their_tail(dtype: torch.dtype, layout: str) -> None:
    for heads, size in ((8, 64), (3, 72), (2, 66)):
        cache = Int4(4, 3, heads, size, dtype, layout)
        int4_cache_write(*cache.call({0: 54, 1: 200, 2: 128}, shuffle=True, wide=True))
        names = ("k_scale", "k_zero", "v_scale", "v_zero", "k_tail")
        scales = dict(zip(names, cache.tensors[2:], strict=True))
        for sequence, length in ((0, 54), (1, 200), (2, 128), (0, 0), (1, 1), (-1, 54), (3, 54)):
            ids = torch.tensor([sequence], dtype=torch.int32, device="cuda")
            table = cache.table[sequence % 3].int().cuda()
            assert_gathered(*cache.tensors[:2], table, length, **scales, seq_ids=ids)


def test_int4_sequences_that_share_pages_are_gathered_each_with_its_own_tail() -> None:
    """A second sequence begins with two full pages of the first, as after a common prompt."""
    for dtype in FLOATS:
        cache = Int4(4, 2, 4, 64, dtype, "NHD")
        int4_cache_write(*cache.call({0: 150}, shuffle=False, wide=True))
        cache.table[1, :2] = cache.table[0, :2]
        cache.lengths[1] = 128
        args = cache.call({1: 40}, shuffle=False, wide=False)
        assert_as_reference(int4_cache_write, *args)
        int4_cache_write(*args)
        scales = dict(zip(("k_scale", "k_zero", "v_scale", "v_zero", "k_tail"), cache.tensors[2:], strict=True))
        for sequence, length in ((0, 150), (1, 168), (1, 128), (0, 130)):
            ids = torch.tensor([sequence], dtype=torch.int32, device="cuda")
            assert_gathered(*cache.tensors[:2], cache.table[sequence].int().cuda(), length, **scales, seq_ids=ids)
