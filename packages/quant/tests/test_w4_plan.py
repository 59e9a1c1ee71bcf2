"""The choice of a kernel for w4a16_linear: its ranges of T, and that its options are those of the kernels."""

from __future__ import annotations

import pytest

from kestrel_quant._w4_plan import TILES, Plan, plan

SMS = 132
SHAPES = [
    (1024, 1024),
    (1024, 4096),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 28672),
    (1000, 2048),
    (1 << 20, 8),
]


def range_of(tokens: int) -> int:
    """The first T of the range that the documentation of w4a16_linear promises."""
    if tokens <= 16:
        return 1
    return 17 if tokens <= 32 else 33 if tokens <= 64 else (tokens - 1) // 32 * 32 + 1


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_within_a_range_of_tokens_the_tiles_are_the_same(rows: int, columns: int) -> None:
    for tokens in range(1, 1100):
        first, own = plan(range_of(tokens), rows, columns, SMS), plan(tokens, rows, columns, SMS)
        assert own == first, tokens
        if own.kernel == "wgmma":
            of_tile = TILES[own.tile].tokens
            assert -(-tokens // of_tile) == -(-range_of(tokens) // of_tile), tokens


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("sms", [8, 78, 132])
def test_slices_have_k_and_memory_of_their_own(rows: int, columns: int, sms: int) -> None:
    for tokens in (*range(17, 1100, 13), 2048, 5000, 20000):
        chosen = plan(tokens, rows, columns, sms)
        if chosen.kernel != "wgmma":
            assert chosen == Plan(chosen.kernel)
            continue
        tile, whole = TILES[chosen.tile], chosen.whole_row_tiles
        row_tiles = -(-rows // tile.rows)
        tiles = -(-tokens // tile.tokens) * (row_tiles - whole)
        assert 1 <= chosen.splits <= min(8, -(-columns // 128))
        assert 0 <= whole < row_tiles
        assert chosen.scratch in (0, chosen.splits * tiles * tile.tokens * tile.rows)
        if whole > 0:  # the sums of slices go through memory
            assert chosen.splits > 1
            assert chosen.scratch > 0
        if chosen.scratch == 0 and chosen.splits > 2:  # in shared memory: sums, and what a CTA of a cluster receives
            received = (chosen.splits - 1) * -(-tile.tokens // chosen.splits)
            assert (tile.tokens + received) * (tile.rows + 4) * 4 < 110_000


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 5000])
def test_without_wgmma_128_rows_are_the_most_of_a_kernel(tokens: int) -> None:
    assert plan(tokens, 8192, 8192, 0) == Plan("mma" if tokens <= 128 else "vendor")


def test_a_small_weight_runs_no_wgmma() -> None:
    assert plan(64, 512, 512, SMS) == Plan("mma")
    assert plan(129, 512, 512, SMS) == Plan("vendor")
