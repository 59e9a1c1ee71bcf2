"""Which kernel a dense layer takes."""

from __future__ import annotations

import pytest

from kestrel_moe import _dense

SIZES = (1, 64, 100, 729, 1458, 2916, 9477, 100_000)


@pytest.mark.parametrize("width", [8, 64, 72, 1152, 4304, 14336])
@pytest.mark.parametrize("outputs", [8, 64, 1152, 4304, 28672])
def test_plans_are_kernels_that_exist_and_split_k_only_where_all_ctas_run_at_once(outputs: int, width: int) -> None:
    for tokens in SIZES:
        plan = _dense.choose_tile(tokens, outputs, width)
        assert (plan.columns == 192) == plan.ping_pong
        size = plan.cluster_rows * plan.cluster_columns * plan.splits
        assert size in (1, 2, 4)
        if plan.splits > 1:
            assert width > 64
            rows = -(-tokens // (128 * plan.cluster_rows))
            assert rows * -(-outputs // (plan.columns * plan.cluster_columns)) * size <= 132


def test_tiles_of_record() -> None:
    assert _dense.choose_tile(729, 1152, 4304) == _dense.Plan(128, False, 2, 1, 2)  # 54 tiles: K is divided
    assert _dense.choose_tile(1458, 1152, 4304).cluster_rows == 4  # L2 would be the limit
