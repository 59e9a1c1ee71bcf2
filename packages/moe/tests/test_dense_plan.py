"""Which kernel a dense layer takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kestrel_moe import _dense
from kestrel_moe._dense import Kernel, Plan

SIZES = (1, 64, 100, 729, 1458, 2916, 9477, 100_000)


@pytest.mark.parametrize("width", [8, 64, 72, 1152, 4304, 14336])
@pytest.mark.parametrize("outputs", [8, 64, 1152, 4304, 28672])
def test_plans_are_kernels_that_exist_and_split_k_only_where_all_ctas_run_at_once(outputs: int, width: int) -> None:
    for tokens in SIZES:
        plan = _dense.choose_tile(tokens, outputs, width)
        assert (plan.columns == 192) == (plan.kernel == Kernel.PING_PONG)
        size = plan.cluster_rows * plan.cluster_columns * plan.splits
        assert size in (1, 2, 4)
        if plan.splits > 1:
            assert width > 64
            rows = -(-tokens // (128 * plan.cluster_rows))
            assert rows * -(-outputs // (plan.columns * plan.cluster_columns)) * size <= 132


def test_tiles_of_record() -> None:
    assert _dense.choose_tile(729, 1152, 4304) == Plan(Kernel.COOPERATIVE, 128, 2, 1, 2)  # 54 tiles: K is divided
    assert _dense.choose_tile(1458, 1152, 4304).cluster_rows == 4  # L2 would be the limit
    assert _dense.choose_on_hopper(16, 8192, 2048) == Plan(Kernel.STREAM, splits=2)
    assert _dense.choose_on_hopper(9477, 1152, 4304).kernel == Kernel.VENDOR


RECORD = json.loads((Path(__file__).parent.parent / "results" / "h200_dense_designs.json").read_text())["designs"]


def sizes(shape: str) -> tuple[int, int, int]:
    """Tokens, outputs and width of "TxK->N"."""
    tokens, width, outputs = map(int, re.split("x|->", shape))
    return tokens, outputs, width


def name(plan: Plan) -> str:
    """As the record names it."""
    tile = {Kernel.STREAM: "s", Kernel.PING_PONG: f"{plan.columns}p"}.get(plan.kernel, str(plan.columns))
    return f"{tile}/{plan.cluster_rows}{plan.cluster_columns}{plan.splits}"


TILES = {shape: us for shape, us in RECORD[1]["us"].items() if sizes(shape)[0] > 64}
STREAMS = RECORD[2]["us"]


@pytest.mark.parametrize("shape", TILES)
def test_the_chosen_tile_is_within_a_tenth_of_the_fastest_that_was_measured(shape: str) -> None:
    tiles = {tile: us for tile, us in TILES[shape].items() if re.match(r"\d+p?/", tile)}
    assert len(tiles) > 8
    assert tiles[name(_dense.choose_tile(*sizes(shape)))] <= 1.1 * min(tiles.values())


@pytest.mark.parametrize("shape", [*TILES, *STREAMS])
def test_kernel_or_vendor_is_within_a_tenth_of_the_faster_one(shape: str) -> None:
    us = (TILES | STREAMS)[shape]
    plan = _dense.choose_on_hopper(*sizes(shape))
    vendor = min(us["torch"], us["mm+epi"])
    ours = min(time for kernel, time in us.items() if re.match(r"s/|\d+p?/", kernel))
    chosen = vendor if plan.kernel == Kernel.VENDOR else us[name(plan)]
    assert chosen <= 1.1 * min(vendor, ours)


@pytest.mark.parametrize(
    ("tokens", "outputs", "width", "splits"),
    [
        (5, 16 * 128, 20 * 64, 5),
        (64, 15 * 128 + 8, 19 * 64 + 8, 5),
        (64, 16 * 128, 19 * 64, 4),
        (64, 17 * 128, 20 * 64, 4),
        (64, 28 * 128, 16 * 64, 4),
        (16, 28 * 128, 15 * 64, 3),
        (16, 29 * 128, 16 * 64, 3),
        (16, 32 * 128, 12 * 64, 3),
        (16, 32 * 128, 11 * 64, 2),
        (16, 33 * 128, 12 * 64, 2),
        (64, 66 * 128, 8 * 64, 2),
        (64, 66 * 128, 7 * 64, 1),
        (64, 67 * 128, 8 * 64, 1),
        (5, 8, 8, 1),
        (5, 2**15, 2**10, 1),
    ],
)
def test_streams_have_the_most_splits_whose_clusters_all_run_at_once(
    tokens: int, outputs: int, width: int, splits: int
) -> None:
    assert _dense.choose_on_hopper(tokens, outputs, width) == Plan(Kernel.STREAM, splits=splits)


@pytest.mark.parametrize(
    ("tokens", "outputs", "width"),
    [
        (17, 32 * 128, 12 * 64),  # three splits
        (5, 2**15, 2**10 + 8),  # a weight of more than 2^25 elements
        (65, 2**12, 2**11 + 8),  # of more than 2^23
        (127, 2**12, 2**11 + 8),
        (191, 1024, 2056),
        (2049, 1024, 2056),
        (192, 1024, 8200),
    ],
)
def test_where_the_vendor_s_product_is_faster(tokens: int, outputs: int, width: int) -> None:
    assert _dense.choose_on_hopper(tokens, outputs, width).kernel == Kernel.VENDOR


@pytest.mark.parametrize(
    ("tokens", "outputs", "width"),
    [(16, 32 * 128, 12 * 64), (65, 2**11, 2**12), (128, 2**12, 2**11 + 8), (192, 1024, 2056), (2048, 1024, 2056)],
)
def test_where_a_kernel_is_faster(tokens: int, outputs: int, width: int) -> None:
    assert _dense.choose_on_hopper(tokens, outputs, width).kernel != Kernel.VENDOR
