"""The choice of a kernel for w4a16_linear: its ranges of T, and that its options are those of the kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kestrel_quant import _w4_plan
from kestrel_quant._w4_plan import MAX_STREAM_CTAS, STREAM_TILES, TILES, Plan, Tile, plan

CSRC = Path(__file__).parents[1] / "csrc"

SMS = 132
SHAPES = [
    (1024, 1024),
    (1024, 4096),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 28672),
    (1000, 2048),
    (8192, 128),
    (1 << 20, 8),
]


def tile_of(chosen: Plan) -> Tile:
    return STREAM_TILES[chosen.tile] if chosen.kernel == "stream" else TILES[chosen.tile]


def range_of(tokens: int) -> int:
    """The first T of the range that the documentation of w4a16_linear promises."""
    if tokens <= 16:
        return 1
    return 17 if tokens <= 32 else 33 if tokens <= 64 else (tokens - 1) // 32 * 32 + 1


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_within_a_range_of_tokens_the_tiles_are_the_same(rows: int, columns: int) -> None:
    for tokens in range(1, 4200):
        first, own = plan(range_of(tokens), rows, columns, SMS), plan(tokens, rows, columns, SMS)
        assert own == first, tokens
        if own.tile >= 0:
            of_tile = tile_of(own).tokens
            assert -(-tokens // of_tile) == -(-range_of(tokens) // of_tile), tokens


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("sms", [8, 78, 132])
def test_slices_have_k_and_memory_of_their_own(rows: int, columns: int, sms: int) -> None:
    for tokens in (*range(17, 1100, 13), 2048, 5000, 20000):
        chosen = plan(tokens, rows, columns, sms)
        if chosen.tile < 0:
            assert chosen == Plan(chosen.kernel, scratch=chosen.scratch)
            continue
        tile = tile_of(chosen)
        row_tiles, token_tiles = -(-rows // tile.rows), -(-tokens // tile.tokens)
        if chosen.kernel == "stream":
            row_ctas = chosen.ctas // token_tiles
            if chosen.splits == 2:
                assert row_ctas == 2 * row_tiles
                assert chosen.ctas == row_ctas * token_tiles <= sms
                assert chosen.scratch == chosen.ctas * tile.tokens * tile.rows // 2
                assert columns > 128
                continue
            assert chosen.splits == 1
            assert 1 <= chosen.ctas == row_ctas * token_tiles <= sms
            shared = row_tiles % row_ctas != 0
            assert chosen.scratch == (MAX_STREAM_CTAS + chosen.ctas * tile.tokens * tile.rows if shared else 0)
            continue
        assert chosen.ctas == 0
        assert 1 <= chosen.splits <= min(8, -(-columns // 128))
        assert chosen.splits > 2 or chosen.scratch == 0  # two CTAs are a cluster
        assert chosen.scratch in (0, chosen.splits * row_tiles * token_tiles * tile.tokens * tile.rows)
        if chosen.scratch == 0 and chosen.splits > 2:  # in shared memory: sums, and what a CTA of a cluster receives
            received = (chosen.splits - 1) * -(-tile.tokens // chosen.splits)
            assert (tile.tokens + received) * (tile.rows + 4) * 4 < 110_000


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 5000])
def test_without_wgmma_128_rows_are_the_most_of_a_kernel(tokens: int) -> None:
    assert plan(tokens, 8192, 8192, 0).kernel == ("mma" if tokens <= 128 else "vendor")


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("sms", [8, 132])
def test_up_to_128_tokens_are_never_the_vendor_s(rows: int, columns: int, sms: int) -> None:
    assert "vendor" not in {plan(tokens, rows, columns, sms).kernel for tokens in range(1, 129)}


def test_a_small_weight_runs_no_wgmma() -> None:
    assert plan(64, 512, 512, SMS).kernel == "mma"
    assert plan(64, 1024, 1023, SMS).kernel == "mma"
    assert plan(129, 512, 512, SMS) == Plan("vendor")


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "tile"),
    [
        (17, 1024, 1024, 0),
        (32, 8192, 16376, 0),
        (32, 8192, 16384, 1),  # 2^27 elements
        (33, 1024, 1024, 2),
        (64, 8192, 16376, 2),
        (64, 8192, 16384, 3),
        (128, 2048, 2048, 2),  # 2^22 elements
    ],
)
def test_up_to_64_tokens_and_of_small_weights_up_to_128_have_tiles_of_their_own(
    tokens: int, rows: int, columns: int, tile: int
) -> None:
    chosen = plan(tokens, rows, columns, SMS)
    assert (chosen.kernel, chosen.tile) == ("wgmma", tile)


@pytest.mark.parametrize("sms", [0, SMS])
def test_slices_of_the_kernel_of_few_tokens_have_memory_or_are_a_cluster(sms: int) -> None:
    assert plan(16, 512, 512, sms).scratch == (0 if sms else 8 * 16 * 512)
    assert plan(17, 512, 512, sms).scratch == 8 * 17 * 512


@pytest.mark.parametrize(("function", "tiles"), [("launch_group(", TILES), ("launch_group_stream(", STREAM_TILES)])
def test_the_number_of_a_tile_names_the_kernel_of_its_size(function: str, tiles: tuple[Tile, ...]) -> None:
    source = (CSRC / "w4a16_wgmma_launch.cuh").read_text(encoding="utf-8")
    body = source[source.index(f"void {function}") :].partition("\n}\n")[0]
    cases = re.findall(r"case (\d+):\s+return launch\(WgmmaTile<([\w, ]+)>\(\)\);", body)
    assert [int(number) for number, _ in cases] == list(range(len(tiles)))
    for (_, arguments), tile in zip(cases, tiles, strict=True):
        tokens, _, m_blocks, warpgroups, _, _, ctas, _ = arguments.split(", ")
        assert (int(tokens), 64 * int(m_blocks) * int(warpgroups), int(ctas)) == (tile.tokens, tile.rows, tile.ctas)


@pytest.mark.parametrize(
    ("constant", "file", "of_plan"),
    [
        ("kMaxSplits", "w4a16.cuh", _w4_plan.SPLITS),
        ("kMaxTokens", "w4a16.cu", _w4_plan.MMA_TOKENS),
        ("kStep", "w4a16.cuh", _w4_plan._K_STEP),
        ("kMaxStreamCtas", "w4a16_stream.cuh", MAX_STREAM_CTAS),
    ],
)
def test_the_plan_has_the_limits_of_the_kernels(constant: str, file: str, of_plan: int) -> None:
    found = re.search(rf"constexpr int {constant} = (\d+);", (CSRC / file).read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1]) == of_plan
