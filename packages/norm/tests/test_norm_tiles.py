"""The tile tables of csrc/dispatch.h: from the length of a row to packs per lane, warps and CTAs."""

from __future__ import annotations

import pytest

from kestrel_runtime import Binary
from kestrel_runtime.testing import skip_without_binary


def tile(packs: int, fused: bool) -> tuple[int, ...]:
    skip_without_binary("kestrel_norm")
    return tuple(Binary("kestrel_norm").rms_norm_tile(packs, fused))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("packs", "warps", "ctas"),
    [(1, 1, 1), (128, 1, 1), (4096, 32, 1), (4097, 5, 8), (5120, 5, 8), (5121, 6, 8), (8192, 8, 8), (16384, 16, 8)],
)
def test_rows_of_more_than_4096_packs_have_a_cluster(packs: int, warps: int, ctas: int, fused: bool) -> None:
    assert tile(packs, fused) == (4, warps, ctas)


@pytest.mark.parametrize("packs", [16385, 2**20])
@pytest.mark.parametrize("fused", [False, True])
def test_the_longest_rows_have_no_tile(packs: int, fused: bool) -> None:
    assert tile(packs, fused) == ()


@pytest.mark.parametrize("fused", [False, True])
def test_every_tile_holds_its_row_and_no_warp_is_without_packs(fused: bool) -> None:
    for packs in range(1, 16385):
        packs_per_lane, warps, ctas = tile(packs, fused)
        assert packs <= 32 * packs_per_lane * warps * ctas, packs
        assert warps == 1 or packs > 32 * packs_per_lane * (warps - 1) * ctas, packs
