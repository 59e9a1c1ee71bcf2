"""The choice of a kernel for w4a16_linear: its ranges of T, and that its options are those of the kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kestrel_quant import _w4_plan
from kestrel_quant._w4_plan import MAX_STREAM_CTAS, PAIR_TILES, STREAM_TILES, TILES, Plan, Tile, plan

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
    return {"wgmma": TILES, "stream": STREAM_TILES, "pairs": PAIR_TILES}[chosen.kernel][chosen.tile]


def range_of(tokens: int) -> int:
    """The first T of the range that the documentation of w4a16_linear promises."""
    return next(
        (first for first, most in ((1, 8), (9, 16), (17, 32), (33, 64)) if tokens <= most), (tokens - 1) // 32 * 32 + 1
    )


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (4608, 4096), (28672, 4096)])
@pytest.mark.parametrize("sms", [78, 114, 132])
def test_within_a_range_of_tokens_the_tiles_are_the_same(rows: int, columns: int, sms: int) -> None:
    for tokens in range(1, 4200, 1 if sms == SMS else 5):
        first, own = plan(range_of(tokens), rows, columns, sms), plan(tokens, rows, columns, sms)
        assert own == first, tokens
        if own.kernel == "stream":
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
            assert chosen.splits == 1
            assert 1 <= chosen.ctas == row_ctas * token_tiles <= sms
            shared = row_tiles % row_ctas != 0
            assert chosen.scratch == (MAX_STREAM_CTAS + chosen.ctas * tile.tokens * tile.rows if shared else 0)
            continue
        if chosen.kernel == "pairs":
            assert chosen == Plan("pairs", chosen.tile, 2, chosen.ctas)
            assert 2 * row_tiles * token_tiles <= chosen.ctas <= sms * tile.ctas  # those of the most tokens of a range
            assert columns > tile.step
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
    ("tokens", "rows", "columns", "kernel", "tile"),
    [
        (8, 14336, 4096, "mma", None),
        (8, 28672, 4096, "wgmma", (16, 128)),
        (16, 4096, 4096, "mma", None),
        (16, 14336, 4096, "pairs", (16, 128)),
        (32, 14336, 4096, "pairs", (32, 128)),
        (64, 28672, 4096, "wgmma", (64, 256)),
        (128, 2048, 2048, "pairs", (32, 128)),
        (384, 2048, 2048, "pairs", (96, 128)),
        (512, 4096, 4096, "stream", (128, 128)),
        (1024, 14336, 4096, "stream", (256, 128)),
    ],
)
def test_the_plan_is_the_one_that_was_measured_to_be_fastest(
    tokens: int, rows: int, columns: int, kernel: str, tile: tuple[int, int] | None
) -> None:
    chosen = plan(tokens, rows, columns, SMS)
    assert (chosen.kernel, None if chosen.tile < 0 else tile_of(chosen)[:2]) == (kernel, tile)


@pytest.mark.parametrize("sms", [0, SMS])
def test_slices_of_the_kernel_of_few_tokens_have_memory_or_are_a_cluster(sms: int) -> None:
    assert plan(16, 512, 512, sms).scratch == (0 if sms else 8 * 16 * 512)
    assert plan(17, 512, 512, sms).scratch == 8 * 17 * 512


@pytest.mark.parametrize(
    ("function", "tiles"),
    [("launch_group(", TILES), ("launch_group_stream(", STREAM_TILES), ("launch_group_pairs(", PAIR_TILES)],
)
def test_the_number_of_a_tile_names_the_kernel_of_its_size(function: str, tiles: tuple[Tile, ...]) -> None:
    source = (CSRC / "w4a16_wgmma_launch.cuh").read_text(encoding="utf-8")
    body = source[source.index(f"bool {function}") :].partition("\n}\n")[0]
    cases = re.findall(r"case (\d+):\s+return launch\(WgmmaTile<([\w, ]+)>\(\)\);", body)
    assert [int(number) for number, _ in cases] == list(range(len(tiles)))
    for (_, arguments), tile in zip(cases, tiles, strict=True):
        tokens, _, m_blocks, warpgroups, step, _, ctas, _ = arguments.split(", ")
        rows = 64 * int(m_blocks) * int(warpgroups)
        assert (int(tokens), rows, int(ctas), int(step)) == (tile.tokens, tile.rows, tile.ctas, tile.step)


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
