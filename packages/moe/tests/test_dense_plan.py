"""Which kernel a dense layer takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kestrel_moe import _dense, _dense_plan
from kestrel_moe._dense_plan import Kernel, Plan

SIZES = (1, 64, 100, 729, 1458, 2916, 9477, 100_000)


@pytest.mark.parametrize("width", [8, 64, 72, 1152, 4304, 14336])
@pytest.mark.parametrize("outputs", [8, 64, 1152, 4304, 28672])
def test_plans_are_kernels_that_exist_and_split_k_only_where_all_ctas_run_at_once(outputs: int, width: int) -> None:
    for tokens in SIZES:
        _, plan = _dense_plan.choose_tile(tokens, outputs, width)
        assert plan.columns in (
            _dense_plan._COLUMNS if plan.kernel == Kernel.COOPERATIVE else _dense_plan._PING_PONG_COLUMNS
        )
        size = plan.cluster_rows * plan.cluster_columns * plan.splits
        assert size in (1, 2, 4, 8)
        assert plan.columns % (8 * plan.cluster_rows) == 0
        if plan.splits > 1:
            assert width > 64
            rows = -(-tokens // (128 * plan.cluster_rows))
            assert rows * -(-outputs // (plan.columns * plan.cluster_columns)) * size <= 132


@pytest.mark.parametrize("layer", [(8, 64), (1152, 1152), (4304, 1152), (2048, 4096), (28672, 14336)], ids=str)
def test_the_time_of_tiles_depends_on_whole_tiles_of_tokens(layer: tuple[int, int]) -> None:
    """So a choice estimates them once for these, and no plan depends on which T of them came first."""
    for tokens in (129, 200, 255, 257, 729, 1458, 9477, 100_000):
        whole, half = -(-tokens // 128) * 128, -(-tokens // 64) * 64
        assert _dense_plan._fastest_tiles(tokens, *layer) == _dense_plan._fastest_tiles(whole, *layer)
        assert _dense_plan._fastest_vendor_tile(tokens, *layer) == _dense_plan._fastest_vendor_tile(half, *layer)


RESULTS = Path(__file__).parent.parent / "results"
TILES = json.loads((RESULTS / "h200_dense_pipelines.json").read_text())["designs"][0]["us"]
VENDOR = json.loads((RESULTS / "h200_dense_vendor.json").read_text())
WITH_EPILOGUE = {
    shape: us for shape, us in {**VENDOR["sweep"], **VENDOR["rows"]}.items() if not shape.startswith("mlp")
}
"""By shape and what the epilogue adds: "lt" is the vendor's product with its epilogue, "kestrel" the tile `plan`."""
ACTIVATIONS = {"gelu": "gelu_tanh", "residual": "none"}


def sizes(shape: str) -> tuple[int, int, int]:
    """Tokens, outputs and width of "TxK->N"."""
    tokens, width, outputs = map(int, re.split("x|->", shape))
    return tokens, outputs, width


def name(plan: Plan) -> str:
    """As the record of tiles names it."""
    tile = {Kernel.STREAM: "s", Kernel.PING_PONG: f"{plan.columns}p"}.get(plan.kernel, str(plan.columns))
    return f"{tile}/{plan.cluster_rows}{plan.cluster_columns}{plan.splits}"


def of_torch(shape: str) -> float:
    """The time of the vendor's product with a residual in its epilogue, in torch's: of the nearest T on record."""
    tokens, *layer = sizes(shape)
    near = [
        (abs(sizes(found)[0] / tokens - 1), us["lt"][0] / us["torch"][0])
        for found, us in ((key.removesuffix(" residual"), us) for key, us in WITH_EPILOGUE.items() if "gelu" not in key)
        if list(sizes(found)[1:]) == layer
    ]
    return min(near)[1]


CHOICES = [
    (f"{shape}, run {number}", shape, us)
    for number, run in enumerate(json.loads((RESULTS / "h200_dense_choices.json").read_text())["runs"])
    for shape, us in run["layers"].items()
]


def chosen(tokens: int, outputs: int, width: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of a layer with a residual for any number of tokens on an H200."""
    monkeypatch.setattr(_dense, "_is_hopper", lambda device: True)
    x: Any = SimpleNamespace(shape=(tokens, width), is_cuda=True, get_device=lambda: 0, element_size=lambda: 2)
    return _dense.choose(x, outputs, width)


def measured(us: dict[str, Any], plan: Plan) -> float:
    """The time of a plan in a row of CHOICES."""
    if us["plan"] == list(plan) and plan.kernel != Kernel.VENDOR:  # which launches what torch does
        return float(us["kestrel"][0])
    names = {Kernel.VENDOR: "torch", Kernel.VENDOR_EPILOGUE: "lt", Kernel.STREAM: "stream", Kernel.FEW_TOKENS: "gemv"}
    return float(us[names.get(plan.kernel, name(plan))][0])


@pytest.mark.parametrize(("shape", "us"), [case[1:] for case in CHOICES], ids=[case[0] for case in CHOICES])
def test_a_layer_takes_no_longer_than_torch_and_is_near_the_fastest(
    shape: str, us: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the designs that were timed beside it. Runs differ by some percent."""
    time = measured(us, chosen(*sizes(shape), monkeypatch))
    assert time <= 1.02 * us["torch"][0]
    fastest = min(value[0] for key, value in us.items() if key not in ("plan", "before plan"))
    assert time <= 1.12 * fastest


LAYERS = {shape: us for shape, us in TILES.items() if sizes(shape)[0] > 64 and "torch" in us}


@pytest.mark.parametrize("shape", LAYERS)
def test_a_measured_layer_takes_no_longer_than_the_vendor_s(shape: str) -> None:
    """Its plan was measured, or is the vendor's product. Runs differ by some percent."""
    plan = _dense_plan.choose_on_hopper(*sizes(shape))
    if plan.kernel != Kernel.VENDOR and name(plan) in LAYERS[shape]:
        assert LAYERS[shape][name(plan)] <= 1.02 * LAYERS[shape]["torch"]


@pytest.mark.parametrize("shape", LAYERS)
def test_the_plan_of_a_measured_layer_is_near_the_fastest(shape: str) -> None:
    us = LAYERS[shape]
    plan = _dense_plan.choose_on_hopper(*sizes(shape))
    ours = min(time for kernel, time in us.items() if re.match(r"\d+p?/", kernel))
    if plan.kernel == Kernel.VENDOR_EPILOGUE:
        chosen = us["torch"] * of_torch(shape)
    else:
        chosen = us["torch"] if plan.kernel == Kernel.VENDOR else us.get(name(plan), ours)
    assert chosen <= 1.12 * min(us["torch"], ours)


@pytest.mark.parametrize("case", WITH_EPILOGUE)
def test_a_layer_measured_with_the_vendor_s_epilogue_takes_no_longer_than_torch(case: str) -> None:
    shape, added = case.split()
    us, plan = WITH_EPILOGUE[case], _dense_plan.choose_on_hopper(*sizes(shape), ACTIVATIONS[added])
    times = {name: us[name][0] for name in ("lt", "torch", "kestrel") if name in us}
    if plan.kernel == Kernel.STREAM:
        return  # was not timed in these runs; see CHOICES
    if plan.kernel in (Kernel.VENDOR, Kernel.VENDOR_EPILOGUE):
        chosen = times["lt" if plan.kernel == Kernel.VENDOR_EPILOGUE else "torch"]
    else:
        assert us["plan"] in (list(plan), int(plan.kernel))  # the tile that was timed
        chosen = times["kestrel"]
    assert chosen <= 1.02 * times["torch"]
    assert chosen <= 1.2 * min(times.values())  # GELU of up to 100 tokens keeps tiles: both layers are faster so


@pytest.mark.parametrize(("tokens", "kernel"), [(5, Kernel.STREAM), (32, Kernel.STREAM), (128, Kernel.COOPERATIVE)])
def test_few_tokens_stream_the_weight(tokens: int, kernel: Kernel) -> None:
    assert _dense_plan.choose_on_hopper(tokens, 1152, 1152).kernel == kernel


@pytest.mark.parametrize(
    ("tokens", "outputs", "width", "full"),
    [
        (4096, 8192, 8192, True),  # 32 x 32 tiles in 8 waves of 132: 97 %
        (4096, 4096, 4096, True),  # 32 x 16 tiles in 4 waves: 97 %
        (4224, 3840, 4096, True),  # 33 x 15 tiles in 4 waves: 94 %
        (4096, 2048, 4104, False),  # more than twice as wide as the result
        (4096, 2304, 4096, False),  # 32 x 9 tiles in 3 waves: 73 %
    ],
)
def test_large_layers_take_the_largest_tile_where_waves_are_full(
    tokens: int, outputs: int, width: int, full: bool
) -> None:
    plan = _dense_plan.choose_on_hopper(tokens, outputs, width)
    assert plan == (Plan(Kernel.COOPERATIVE, 256) if full else Plan(Kernel.VENDOR_EPILOGUE))


@pytest.mark.parametrize(
    ("tokens", "outputs", "width", "plan"),
    [
        (64, 1152, 4304, Plan(Kernel.STREAM, splits=0)),
        (65, 1152, 4304, Plan(Kernel.COOPERATIVE, 64, splits=2)),
        (127, 1152, 4608, Plan(Kernel.COOPERATIVE, 64, splits=2)),
        (128, 1152, 4304, Plan(Kernel.VENDOR_EPILOGUE)),
        (351, 1152, 4304, Plan(Kernel.COOPERATIVE, 64, splits=2)),
        (352, 1152, 4304, Plan(Kernel.VENDOR_EPILOGUE)),
        (100, 1153, 4608, Plan(Kernel.VENDOR_EPILOGUE)),
        (100, 1152, 4609, Plan(Kernel.VENDOR_EPILOGUE)),
        (63, 1152, 4609, Plan(Kernel.VENDOR)),
        (64, 4096, 4096, Plan(Kernel.VENDOR_EPILOGUE)),
        (64, 4104, 4096, Plan(Kernel.VENDOR)),
        (1024, 2048, 8192, Plan(Kernel.VENDOR_EPILOGUE)),
        (1025, 2048, 8192, Plan(Kernel.VENDOR)),
        (33, 4096, 14336, Plan(Kernel.VENDOR_EPILOGUE)),
        (448, 4096, 14336, Plan(Kernel.VENDOR_EPILOGUE)),
        (449, 4096, 14336, Plan(Kernel.VENDOR)),
        (2047, 4096, 14336, Plan(Kernel.VENDOR)),
        (2048, 4096, 14336, Plan(Kernel.VENDOR_EPILOGUE)),
        (2499, 5120, 5120, Plan(Kernel.VENDOR)),
        (2500, 5120, 5120, Plan(Kernel.VENDOR_EPILOGUE)),
        (2048, 1152, 4304, Plan(Kernel.VENDOR)),
        (3600, 1152, 4304, Plan(Kernel.VENDOR_EPILOGUE)),
        (4608, 1152, 4304, Plan(Kernel.VENDOR)),
        (64, 1024, 4096, Plan(Kernel.STREAM, splits=0)),
        (2047, 1152, 4609, Plan(Kernel.VENDOR)),
        (9729, 1152, 1152, Plan(Kernel.PING_PONG, 144)),
        (9477, 1152, 1152, Plan(Kernel.VENDOR_EPILOGUE)),
        (152, 1152, 4304, Plan(Kernel.COOPERATIVE, 64, splits=2)),
        (153, 1152, 4304, Plan(Kernel.VENDOR_EPILOGUE)),
        (1457, 1152, 4304, Plan(Kernel.VENDOR_EPILOGUE)),
        (1458, 1152, 4304, Plan(Kernel.COOPERATIVE, 128, 2)),
        (1500, 1152, 4304, Plan(Kernel.VENDOR_EPILOGUE)),
        (1536, 1152, 4304, Plan(Kernel.COOPERATIVE, 128, 2)),
        (1537, 1152, 4304, Plan(Kernel.VENDOR)),
        (1409, 4304, 1152, Plan(Kernel.COOPERATIVE, 208, 2)),
        (1536, 4304, 1152, Plan(Kernel.COOPERATIVE, 208, 2)),
    ],
)
def test_measured_layers_take_their_plan_within_its_range(tokens: int, outputs: int, width: int, plan: Plan) -> None:
    assert _dense_plan.choose_on_hopper(tokens, outputs, width) == plan


@pytest.mark.parametrize(
    ("tokens", "outputs", "kernel", "with_erf"),
    [
        (32, 4304, Kernel.STREAM, Kernel.STREAM),
        (33, 4304, Kernel.VENDOR_EPILOGUE, Kernel.COOPERATIVE),
        (65, 4304, Kernel.COOPERATIVE, Kernel.COOPERATIVE),
        (449, 4304, Kernel.VENDOR_EPILOGUE, Kernel.COOPERATIVE),
        (33, 4608, Kernel.VENDOR_EPILOGUE, Kernel.VENDOR),
        (256, 4304, Kernel.COOPERATIVE, Kernel.COOPERATIVE),
        (1281, 4304, Kernel.VENDOR_EPILOGUE, Kernel.COOPERATIVE),
        (1537, 4304, Kernel.VENDOR_EPILOGUE, Kernel.VENDOR),
        (4096, 4304, Kernel.PING_PONG, Kernel.PING_PONG),
        (4096, 4608, Kernel.VENDOR_EPILOGUE, Kernel.PING_PONG),
        (128, 400, Kernel.VENDOR_EPILOGUE, Kernel.VENDOR),
    ],
)
def test_the_vendor_s_epilogue_has_the_gelu_with_tanh_alone(
    tokens: int, outputs: int, kernel: Kernel, with_erf: Kernel
) -> None:
    assert _dense_plan.choose_on_hopper(tokens, outputs, 1152, "gelu_tanh").kernel == kernel
    assert _dense_plan.choose_on_hopper(tokens, outputs, 1152, "gelu").kernel == with_erf


@pytest.mark.parametrize(
    ("tokens", "outputs", "width", "kernel", "with_erf"),
    [
        (16, 4096, 6144, Kernel.STREAM, Kernel.STREAM),
        (16, 5120, 5120, Kernel.VENDOR_EPILOGUE, Kernel.VENDOR),
        (17, 3072, 3072, Kernel.STREAM, Kernel.STREAM),
        (17, 3584, 3584, Kernel.VENDOR_EPILOGUE, Kernel.STREAM),
        (17, 2048, 8192, Kernel.STREAM, Kernel.STREAM),
        (32, 4096, 14336, Kernel.VENDOR_EPILOGUE, Kernel.VENDOR),
    ],
)
def test_few_tokens_of_a_large_layer_take_the_vendor_s_product(
    tokens: int, outputs: int, width: int, kernel: Kernel, with_erf: Kernel
) -> None:
    for activation, of in (("none", kernel), ("gelu_tanh", kernel), ("gelu", with_erf)):
        assert _dense_plan.choose_on_hopper(tokens, outputs, width, activation).kernel == of


@pytest.mark.parametrize("tokens", [600, 1281])
def test_a_slower_epilogue_takes_a_tile_only_where_it_is_clearly_faster(tokens: int) -> None:
    kernels = (Kernel.COOPERATIVE, Kernel.COOPERATIVE) if tokens == 600 else (Kernel.PING_PONG, Kernel.VENDOR)
    for activation, kernel in zip(("none", "gelu"), kernels, strict=True):
        assert _dense_plan.choose_on_hopper(tokens, 4096, 1024, activation).kernel == kernel


@pytest.mark.parametrize(
    ("tokens", "narrow"), [(33, True), (64, True), (65, False), (129, True), (168, True), (169, False)]
)
def test_the_second_layer_of_an_mlp_is_a_tile_behind_a_tile(tokens: int, narrow: bool) -> None:
    tile, vendor = Plan(Kernel.COOPERATIVE, 96), Plan(Kernel.VENDOR_EPILOGUE)
    expected = Plan(Kernel.COOPERATIVE, 64, splits=2) if narrow else vendor
    assert _dense_plan.choose_second(tokens, 1152, 4304, tile, vendor) == expected
    assert _dense_plan.choose_second(tokens, 1152, 4304, vendor, vendor) == vendor
    assert _dense_plan.choose_second(tokens, 1024, 4304, tile, vendor) == vendor
    assert _dense_plan.choose_second(tokens, 1100, 4304, tile, vendor) == vendor  # no multiple of 8


def test_the_second_layer_of_many_tokens_is_no_tile_behind_a_tile() -> None:
    tile, vendor = Plan(Kernel.COOPERATIVE, 208), Plan(Kernel.VENDOR_EPILOGUE)
    second = _dense_plan.choose_on_hopper(1458, 1152, 4304)
    assert second.kernel == Kernel.COOPERATIVE
    assert _dense_plan.choose_second(1458, 1152, 4304, tile, second) == vendor
    assert _dense_plan.choose_second(1458, 1152, 4304, vendor, second) == second
    assert _dense_plan.choose_second(768, 1152, 4304, tile, second) == second


def test_a_streaming_plan_leaves_the_splits_to_the_launch() -> None:
    assert _dense_plan.choose_on_hopper(16, 8192, 2048) == Plan(Kernel.STREAM, splits=0)
