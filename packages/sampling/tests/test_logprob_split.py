"""How rows of log-probabilities are split over thread blocks, and which of them bulk copies bring (logprob_ring.h)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kestrel_runtime import Binary
from kestrel_runtime.testing import skip_without_binary

VOCABULARIES = [32000, 51200, 128256, 151936, 202048]


class Split(NamedTuple):
    blocks: int
    threads: int
    has_ring: bool


def split(
    rows: int,
    width: int,
    size: int = 4,
    *,
    address: int = 4096,
    row_bytes: int | None = None,
    mask: int = 0,
    mask_row_bytes: int | None = None,
    k: int = 50,
    sms: int = 132,
    capability: int = 90,
    max_smem: int = 232448,
) -> Split:
    """On an H200, of contiguous rows, unless given otherwise."""
    skip_without_binary("kestrel_sampling")
    row_bytes = width * size if row_bytes is None else row_bytes
    mask_row_bytes = (width + 31) // 32 * 4 if mask_row_bytes is None else mask_row_bytes
    given = (rows, width, size, address, row_bytes, mask, mask_row_bytes, k, sms, capability, max_smem)
    blocks, threads, ring = Binary("kestrel_sampling").logprob_split(*given)
    return Split(blocks, threads, bool(ring))


def has_ring(*given: Any, **named: Any) -> bool:
    return split(*given, **named).has_ring


@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize(
    ("rows", "blocks", "threads"),
    [(1, 8, 512), (8, 8, 512), (9, 4, 512), (28, 4, 512), (29, 2, 512), (33, 2, 512), (66, 2, 512), (67, 1, 512),
     (132, 1, 512), (133, 1, 256), (1000, 1, 256)],
)  # fmt: skip
def test_few_rows_have_several_blocks(rows: int, blocks: int, threads: int, width: int) -> None:
    assert split(rows, width)[:2] == (blocks, threads)


@pytest.mark.parametrize("capability", [80, 86, 89])
@pytest.mark.parametrize("rows", [1, 20, 64])
def test_rows_have_one_block_without_clusters(rows: int, capability: int) -> None:
    assert split(rows, 151936, capability=capability)[:2] == (1, 512)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize("rows", [1, 8, 16, 28, 33, 41])
def test_few_rows_have_a_ring(rows: int, width: int, size: int) -> None:
    assert has_ring(rows, width, size)
    assert has_ring(rows, width, size, mask=8192) == (width != 202048)  # 6314 words


@pytest.mark.parametrize(
    ("width", "size", "gains"),
    [(32000, 4, True), (102400, 4, True), (102404, 4, False), (128256, 4, False), (131072, 4, True), (151936, 4, True),
     (163840, 4, True), (163844, 4, False), (202048, 4, False), (128256, 2, True), (202048, 2, True)],
)  # fmt: skip
@pytest.mark.parametrize("rows", [42, 64, 66])
def test_more_rows_have_a_ring_by_their_length(rows: int, width: int, size: int, gains: bool) -> None:
    assert has_ring(rows, width, size) == gains


@pytest.mark.parametrize("rows", [67, 96, 128, 132, 133, 256, 265, 1000])
def test_rows_of_one_block_have_none(rows: int) -> None:
    assert not has_ring(rows, 151936)
    assert not has_ring(rows, 51200, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_multiples_of_16_bytes_at_aligned_addresses(size: int) -> None:
    row_bytes = 50256 * size
    assert has_ring(4, 50256, size)
    assert has_ring(4, 50256, size, row_bytes=row_bytes + 16)
    for more in range(1, 16 // size):
        assert not has_ring(4, 50256 + more, size, row_bytes=row_bytes + 16)
    for shift in range(size, 16, size):
        assert not has_ring(4, 50256, size, address=4096 + shift)
        assert not has_ring(4, 50256, size, row_bytes=row_bytes + shift)


def test_the_bitmask_too_is_a_multiple_of_16_bytes_at_aligned_addresses() -> None:
    assert has_ring(4, 51200, mask=8192)
    assert has_ring(4, 51200, mask=8192, mask_row_bytes=6416)
    assert not has_ring(4, 51200, mask=8196)
    assert not has_ring(4, 51200, mask=8192, mask_row_bytes=6404)
    assert not has_ring(4, 50256, mask=8192, mask_row_bytes=6400)  # 1571 words


def test_the_stride_of_one_row_does_not_matter() -> None:
    assert has_ring(1, 51200, row_bytes=4, mask=8192, mask_row_bytes=4)


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 103, 120])
def test_other_architectures_have_none(capability: int) -> None:
    assert not has_ring(4, 151936, capability=capability)


def test_a_ring_fits_into_shared_memory() -> None:
    assert has_ring(4, 262144 + 1136, mask=8192)  # chunks of several tiles
    assert has_ring(4, 262144, k=1024)
    assert not has_ring(4, 262144, k=1024, mask=8192)
    assert not has_ring(4, 262144, max_smem=163840)
