"""Variants of routed experts: which are valid, which is chosen, and the files that the tuner writes."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_moe import tune, tuned, variants
from kestrel_moe.variants import Layer, Variant

SIZES = [(64, 8, 2048, 1024), (8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048), (128, 4, 2880, 2880)]


def layer(tokens: int = 8, dtype: str = "bf16", hopper: bool = True, sizes: tuple[int, ...] = SIZES[0]) -> Layer:
    experts, choices, width, inner = sizes
    return Layer(tokens, experts, choices, width, inner, dtype, hopper)


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "other"])
@pytest.mark.parametrize("dtype", tune.DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_rule_chooses_a_valid_variant(sizes: tuple[int, ...], dtype: str, hopper: bool) -> None:
    cases = [layer(tokens, dtype, hopper, sizes) for tokens in (*range(1, 80), 100, 256, 740, 2048, 16384, 10**6)]
    wrong = [case for case in cases if not variants.is_valid(variants.by_rule(case), case)]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize(
    ("path", "tile", "case"),
    [
        ("fused", 8, layer(9)),
        ("fused", 8, layer(1, hopper=False)),
        ("fused", 16, layer(17)),
        ("fused", 16, layer(sizes=(64, 8, 4112, 1024))),
        ("fused", 8, layer(sizes=(1025, 8, 2048, 1024))),
        ("in_kernel", 8, layer(9)),
        ("in_kernel", 16, layer(1)),
        ("aligned", 0, layer()),
        ("aligned", 64, layer(dtype="fp8", hopper=False)),
        ("aligned", 128, layer(hopper=False)),
        ("aligned", 160, layer(hopper=False)),
        ("aligned", 160, layer(dtype="fp8")),
        ("aligned", 192, layer(dtype="fp8")),
        ("clustered", 128, layer(dtype="fp8", hopper=False)),
        ("clustered", 128, layer(hopper=False)),
        ("clustered", 64, layer()),
        ("grouped_mm", 0, layer(hopper=False)),
        ("grouped_mm", 0, layer(dtype="fp16")),
        ("grouped_mm", 0, layer(sizes=(1024, 8, 2048, 1024))),
        ("other", 8, layer()),
    ],
    ids=str,
)
def test_what_no_kernel_covers_is_not_valid(path: str, tile: int, case: Layer) -> None:
    assert not variants.is_valid(Variant(path, tile), case)


@pytest.mark.parametrize(
    ("tokens", "dtype", "sizes", "name"),
    [
        (512, "fp8", (64, 8, 2048, 1024), "aligned 128"),
        (8192, "fp8", (64, 8, 2048, 1024), "aligned 128"),
        (16384, "fp8", (64, 8, 2048, 1024), "aligned 128"),
        (16385, "fp8", (64, 8, 2048, 1024), "clustered 128"),
        (256, "fp8", (8, 2, 4096, 14336), "aligned 128"),
        (1024, "fp8", (8, 2, 4096, 14336), "aligned 128"),
        (4096, "fp8", (128, 4, 2880, 2880), "aligned 128"),
        (8193, "fp8", (8, 2, 4096, 14336), "clustered 128"),
        (800, "bf16", (64, 8, 2048, 1024), "aligned 128"),
        (801, "bf16", (64, 8, 2048, 1024), "aligned 160"),
        (1344, "bf16", (64, 8, 2048, 1024), "aligned 160"),
        (1345, "bf16", (64, 8, 2048, 1024), "aligned 128"),
        (1984, "bf16", (64, 8, 2048, 1024), "aligned 128"),
        (2496, "bf16", (64, 8, 2048, 1024), "aligned 160"),
        (2497, "bf16", (64, 8, 2048, 1024), "aligned 128"),
        (16384, "fp16", (64, 8, 2048, 1024), "aligned 128"),
        (1024, "bf16", (32, 4, 2880, 2880), "aligned 160"),
        (4096, "bf16", (32, 4, 2880, 2880), "aligned 128"),
        (608, "bf16", (8, 2, 4096, 14336), "aligned 160"),
        (609, "bf16", (8, 2, 4096, 14336), "clustered 128"),
        (1024, "bf16", (8, 2, 4096, 14336), "aligned 160"),
        (8192, "bf16", (8, 2, 4096, 14336), "clustered 128"),
        (8193, "bf16", (8, 2, 4096, 14336), "grouped_mm"),
        (8193, "fp16", (8, 2, 4096, 14336), "clustered 128"),
    ],
)
def test_many_tokens_take_wide_tiles_and_large_layers_clusters(
    tokens: int, dtype: str, sizes: tuple[int, ...], name: str
) -> None:
    assert str(variants.by_rule(layer(tokens, dtype, sizes=sizes))) == name


@pytest.mark.parametrize(
    ("tokens", "dtype", "sizes", "name"),
    [
        (4, "fp8", (64, 8, 2048, 1024), "fused 8"),
        (8, "bf16", (64, 8, 2048, 1024), "fused 8"),
        (8, "fp8", (128, 8, 2048, 768), "fused 8"),
        (9, "fp8", (64, 8, 2048, 1024), "aligned 32"),
        (15, "fp8", (128, 8, 2048, 768), "aligned 32"),
        (16, "fp8", (64, 8, 2048, 1024), "aligned 32"),
        (16, "fp8", (128, 8, 2048, 768), "aligned 32"),
        (16, "fp8", (64, 4, 2048, 1024), "fused 16"),
        (16, "bf16", (64, 8, 2048, 1024), "fused 16"),
        (15, "fp8", (256, 8, 7168, 2048), "aligned 32"),
        (8, "fp8", (256, 8, 7168, 2048), "aligned 32"),
        (4, "fp8", (256, 8, 7168, 2048), "fused 8"),
        (16, "fp8", (256, 8, 7168, 2048), "aligned 32"),
        (8, "fp8", (128, 4, 2880, 2880), "fused 8"),
        (9, "fp8", (128, 4, 2880, 2880), "aligned 32"),
        (16, "bf16", (32, 4, 2880, 2880), "in_kernel 8"),
        (17, "bf16", (32, 4, 2880, 2880), "aligned 8"),
        (17, "fp8", (64, 8, 2048, 1024), "aligned 32"),
        (176, "fp8", (64, 8, 2048, 1024), "aligned 32"),
        (177, "fp8", (64, 8, 2048, 1024), "aligned 64"),
        (32, "fp8", (8, 2, 2048, 1024), "aligned 32"),
        (15, "fp8", (128, 4, 2880, 2880), "aligned 32"),
        (16, "fp8", (128, 4, 2880, 2880), "aligned 32"),
        (4, "fp8", (8, 2, 4096, 14336), "fused 8"),
        (5, "fp8", (8, 2, 4096, 14336), "aligned 32"),
        (16, "bf16", (8, 2, 4096, 14336), "in_kernel 8"),
        (64, "fp8", (256, 8, 7168, 2048), "aligned 32"),
        (705, "fp8", (256, 8, 7168, 2048), "aligned 64"),
    ],
)
def test_few_tokens_take_small_tiles(tokens: int, dtype: str, sizes: tuple[int, ...], name: str) -> None:
    assert str(variants.by_rule(layer(tokens, dtype, sizes=sizes))) == name


def documented_range(case: Layer) -> int:
    """Of the docstring of fused_experts, for an H100 or H200."""
    fp8, pairs, p = case.dtype == "fp8", case.tokens * case.choices, case.mean_rows
    if (
        case.tokens <= (8 if fp8 and pairs > 64 else 16)
        and (p <= 2 if case.inner <= 2048 else p <= 1 and pairs <= 32)
        and case.width <= (8192 if case.tokens <= 8 else 4096)
        and not (fp8 and case.width > 4096 and pairs > 32)
        and case.choices <= 8
        and case.experts <= 1024
    ):
        return 1
    products = case.width * case.inner / (case.width + case.inner)
    if case.dtype == "bf16" and case.mapped is None and p > 2048 and products >= 2048 and case.experts < 1024:
        return 4
    if not fp8:
        return 2 if pairs <= 32 or p <= 9.75 else 3
    if 3 * case.experts * case.width * case.inner <= 2**30:
        return 2 if pairs <= 32 or (pairs <= 64 and p <= 2) else 3
    return 2 if p < 0.25 or (pairs <= 32 and p > 22) else 3


def range_of(variant: Variant) -> int:
    """Variants of a range give the same bits."""
    if variant.path in ("fused", "grouped_mm"):
        return 1 if variant.path == "fused" else 4
    return 2 if variant.path == "in_kernel" or variant.tile <= 16 else 3


@pytest.mark.parametrize("mapped", [None, 256, 1024], ids=str)
@pytest.mark.parametrize("dtype", tune.DTYPES)
@pytest.mark.parametrize(("width", "inner"), [(2048, 1024), (4096, 14336), (7168, 2048), (20480, 20480), (9216, 64)])
def test_the_documented_ranges_are_those_of_the_rule(width: int, inner: int, dtype: str, mapped: int | None) -> None:
    tokens = [*range(1, 70), *(2**i + more for i in range(7, 16) for more in (-1, 0, 1)), 700, 705, 10**6]
    cases = [
        Layer(count, experts, choices, width, inner, dtype, True, mapped)
        for experts in (1, 2, 8, 32, 64, 128, 256, 1023, 1024, 1025)
        for choices in (1, 2, 4, 8, 9)
        for count in tokens
    ]
    wrong = [case for case in cases if documented_range(case) != range_of(variants.by_rule(case))]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("dtype", tune.DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 128, 256, 512, 1024, 4096, 65536])
def test_experts_of_other_devices_share_the_pairs(tokens: int, dtype: str) -> None:
    """32 of 256 experts have an eighth of the pairs: tiles as for an eighth of the tokens without a map."""
    here = Layer(tokens, 32, 8, 2048, 1024, dtype, hopper=True, mapped=256)
    assert here.mean_rows == tokens / 32
    chosen = variants.by_rule(here)
    if tokens >= 128:  # fewer pairs take kernels that are limited by the pairs and tokens of the call
        assert chosen == variants.by_rule(Layer(tokens // 8, 32, 8, 2048, 1024, dtype, hopper=True))
    assert variants.is_valid(chosen, here)


def test_a_layer_with_a_map_takes_no_tuned_variant_and_not_grouped_mm() -> None:
    """Files hold layers without a map."""
    entries = {layer().sizes: {8: "aligned 16"}}
    here = Layer(8, 64, 8, 2048, 1024, "bf16", hopper=True, mapped=512)
    assert variants.choose(here, entries) == variants.by_rule(here) != Variant("aligned", 16)
    assert not variants.is_valid(Variant("grouped_mm"), here)


RESULTS = Path(__file__).parent.parent / "results"


def record() -> dict[str, dict[str, float]]:
    """Of an H200, for each row of which several variants were timed in turn: the median of each, in microseconds."""
    turns: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    *_, third = json.loads((RESULTS / "h200_expert_further.json").read_text())["sittings"]
    for row in third["rows"]:
        for name, found in row["us"].items():
            if str(name).removeprefix("new ") in map(str, variants.VARIANTS) and "us" in found:
                turns[row["row"]][name.removeprefix("new ")].append(found["us"])
    for row in json.loads((RESULTS / "h200_expert_rules.json").read_text())["rows"]:
        for name, found in row["us"].items():
            turns[row["row"]][name].append(found["us"])
    for file in ("h200_group_rows.json", "h200_align_groups.json"):
        for row, found in json.loads((RESULTS / file).read_text())["grouped_mm_us"].items():
            for (
                turn
            ) in found:  # group_rows.cu is the path of the first file's "after", and of the second one's "before"
                grouped = turn["after" if file == "h200_group_rows.json" else "before"]
                turns[row]["grouped_mm"].append(grouped)
                turns[row]["clustered 128"].append(turn["clusters"])
    return {row: {name: statistics.median(us) for name, us in found.items()} for row, found in turns.items()}


RECORD = record()


def chosen_for(row: str) -> str:
    """By the rule, for "fp8 T16 E256 k8 h7168 i2048", or with ", 32 of them here": of these 256 experts."""
    tokens, experts, choices, width, inner = (int(re.search(rf"\b{letter}(\d+)", row)[1]) for letter in "TEkhi")  # type: ignore[index]
    here = re.search(r", (\d+) of them here", row)
    mapped = experts if here else None
    case = Layer(tokens, int(here[1]) if here else experts, choices, width, inner, row[:4].strip(), True, mapped)
    return str(variants.by_rule(case))


@pytest.mark.parametrize("row", RECORD)
def test_the_rule_is_within_3_percent_of_the_fastest_variant_on_record(row: str) -> None:
    assert RECORD[row][chosen_for(row)] <= 1.03 * min(RECORD[row].values())


ALL_VARIANTS = json.loads((RESULTS / "h200_expert_variants.json").read_text())
OF_16_BITS = json.loads((RESULTS / "h200_expert_16_bits.json").read_text())["rows"]


@pytest.mark.parametrize(
    "row", [*ALL_VARIANTS["rows"], *ALL_VARIANTS["mapped"], *OF_16_BITS], ids=lambda row: row["row"]
)
def test_the_rule_is_within_5_percent_of_the_fastest_of_all_variants(row: dict[str, Any]) -> None:
    """By the median of the samples or the least: those of a millisecond differ by up to a fifth, as the clock falls."""
    figures = {name: found for name, found in row["us"].items() if "us" in found}
    median = {name: found["us"] for name, found in figures.items()}
    least = {name: found.get("least", found["us"]) for name, found in figures.items()}
    rule = chosen_for(row["row"])
    assert min(us[rule] / min(us.values()) for us in (median, least)) <= 1.05


def test_a_tuned_variant_is_chosen_where_it_is_valid() -> None:
    entries = {layer().sizes: {1: "in_kernel 8", 8: "aligned 16", 4096: "grouped_mm", 16384: "no such name"}}
    assert variants.choose(layer(8), entries) == Variant("aligned", 16)
    assert variants.choose(layer(10), entries) == Variant("aligned", 16)
    assert variants.choose(layer(4096), entries) == Variant("grouped_mm")
    assert variants.choose(layer(4096), entries, grouped_mm=False).path == "clustered"
    for case in (layer(4096, hopper=False), layer(16384), layer(64), layer(8, "fp8"), layer(8, sizes=SIZES[1])):
        assert variants.choose(case, entries) == variants.by_rule(case)


def test_a_tuned_variant_is_not_stretched_beyond_its_pairs() -> None:
    entries = {layer().sizes: {8: "in_kernel 8"}}
    assert variants.choose(layer(8), entries).path == "in_kernel"
    assert variants.choose(layer(9), entries) == variants.by_rule(layer(9))


FOUND = [
    tune.Found(1, {"in_kernel 8": 30.0, "aligned 8": 40.0}, "in_kernel 8"),
    tune.Found(16, {"aligned 8": 179.8, "aligned 16": 180.0}, "aligned 16"),
    tune.Found(64, {"aligned 16": 220.0, "aligned 32": 200.0}, "aligned 16"),
]


def test_a_file_holds_gpu_date_revision_and_figures_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / tuned.file_name("NVIDIA H200")
    name = layer().sizes
    tuned.write(path, "NVIDIA H200", name, tune.entry(FOUND))
    tuned.write(path, "NVIDIA H200", "E8 k2 h64 i32 fp8", tune.entry(FOUND[:1]))
    found = tuned.read(path)
    assert found["gpu"] == "NVIDIA H200"
    assert {"date", "revision", "tokens"} <= set(found["layers"][name])
    assert found["layers"][name]["tokens"]["64"]["us"] == {"aligned 16": 220.0, "aligned 32": 200.0}
    assert tuned.entries(found)[name] == {1: "in_kernel 8", 16: "aligned 16", 64: "aligned 32"}
    assert tuned.entries(found)["E8 k2 h64 i32 fp8"] == {1: "in_kernel 8"}
    tuned.write(path, "NVIDIA H200", name, tune.entry([tune.Found(2, {"aligned 8": 1.0}, "aligned 8")]))
    assert list(tuned.entries(tuned.read(path))[name]) == [1, 2, 16, 64]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2, "gpu": "x", "layers": {}}',
        '{"format": 1, "layers": {}}',
        '{"format": 1, "gpu": "x", "layers": []}',
        '{"format": 1, "gpu": "x", "layers": {"E1": {}}}',
        '{"format": 1, "gpu": "x", "layers": {"E1": {"tokens": {"one": {"variant": "aligned 8"}}}}}',
        '{"format": 1, "gpu": "x", "layers": {"E1": {"tokens": {"1": {"variant": 8}}}}}',
        '{"format": 1, "gpu": "x", "layers": {"E1": {"tokens": {"0": {"variant": "aligned 8"}}}}}',
        '{"format": 1, "gpu": "x", "layers": {"E1": {"tokens": {"2147483648": {"variant": "aligned 8"}}}}}',
        '{"format": 1, "gpu": "x", "layers": {"E1": {"tokens": {"%s": {"variant": "aligned 8"}}}}}' % ("9" * 5000),
        "[" * 100_000,
    ],
    ids=range(12),
)
def test_a_broken_file_is_named_in_the_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(tuned.TunedFileError, match=r"x\.json: expected"):
        tuned.read(path)


def test_a_file_of_another_gpu_is_not_written_into(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    tuned.write(path, "NVIDIA H200", "E1", tune.entry(FOUND))
    with pytest.raises(tuned.TunedFileError, match="NVIDIA H100"):
        tuned.write(path, "NVIDIA H100", "E1", tune.entry(FOUND))


def test_the_users_layers_replace_the_packaged_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, user = tmp_path / "packaged", tmp_path / "user"
    monkeypatch.setattr(tuned, "PACKAGED", packaged)
    monkeypatch.setenv("KESTREL_TUNED", str(user))
    for name in ("a", "b"):
        tuned.write(packaged / "h200.json", "NVIDIA H200", name, tune.entry(FOUND))
    tuned.write(user / "h200.json", "NVIDIA H200", "b", tune.entry(FOUND[:1]))
    tuned.of_gpu.cache_clear()
    try:
        got = tuned.of_gpu("NVIDIA H200")
        assert {name: list(tokens) for name, tokens in got.items()} == {"a": [1, 16, 64], "b": [1]}
        (user / "h200.json").write_text("{")
        tuned.of_gpu.cache_clear()
        with pytest.warns(UserWarning, match=r"h200\.json: expected JSON"):
            got = tuned.of_gpu("NVIDIA H200")
        assert {name: list(tokens) for name, tokens in got.items()} == {"a": [1, 16, 64], "b": [1, 16, 64]}
        assert tuned.of_gpu("NVIDIA H100") == {}
    finally:
        tuned.of_gpu.cache_clear()


def test_without_a_home_only_the_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("KESTREL_TUNED", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    tuned.of_gpu.cache_clear()
    try:
        assert tuned.of_gpu("no such GPU") == {}
    finally:
        tuned.of_gpu.cache_clear()


@pytest.mark.parametrize("case", ["a folder", "below a file", "no home", "another GPU", "no permission"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tune, "search", lambda *_: pytest.fail("the search began"))
    out: Path | None = tmp_path / "h200.json"
    if case == "a folder":
        out = tmp_path
    elif case == "below a file":
        (tmp_path / "file").touch()
        out = tmp_path / "file" / "h200.json"
    elif case == "no home":
        out = None
        monkeypatch.setattr(tuned, "user_folder", lambda: (_ for _ in ()).throw(FileNotFoundError("no home")))
    elif case == "another GPU":
        tuned.write(tmp_path / "h200.json", "NVIDIA H100", "E1", tune.entry(FOUND))
    else:
        monkeypatch.setattr("os.access", lambda *_: False)  # permissions do not bind root
    with pytest.raises(tune.TuneError):
        tune.run(tune.Request(64, 2048, 1024, 8, out=out))


def unknown_variants(path: Path) -> set[str]:
    """Of a file, which must be named after its GPU."""
    found = tuned.read(path)
    assert tuned.file_name(found["gpu"]) == path.name
    names = {str(variant) for variant in variants.VARIANTS}
    return {variant for tokens in tuned.entries(found).values() for variant in tokens.values()} - names


@pytest.mark.parametrize("path", sorted(tuned.PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_a_file_that_ships_names_variants(path: Path) -> None:
    assert unknown_variants(path) == set()


def test_unknown_variants_and_files_of_other_gpus_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    tuned.write(path, "NVIDIA H200", "E1", tune.entry([tune.Found(1, {"aligned 7": 1.0}, "aligned 7")]))
    assert unknown_variants(path) == {"aligned 7"}
    with pytest.raises(AssertionError):
        unknown_variants(path.rename(tmp_path / "h100.json"))


def test_the_table_shows_the_gains() -> None:
    assert [(row[3], row[5]) for row in tune.table(FOUND)] == [
        ("in_kernel 8", "0.0%"),
        ("aligned 16", "0.0%"),
        ("aligned 32", "10.0%"),
    ]


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (tune.Request(0, 64, 64, 1), "experts"),
        (tune.Request(8, 40, 64, 1), "hidden"),
        (tune.Request(8, 64, 40, 1), "inner"),
        (tune.Request(8, 64, 64, 9), "topk"),
        (tune.Request(8, 64, 64, 2, "int8"), "dtype"),
        (tune.Request(8, 64, 64, 2, tokens=(1, 0)), "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_no_kernel_takes_is_refused(request_: tune.Request, word: str) -> None:
    with pytest.raises(tune.TuneError, match=f"^{word}: expected"):
        tune.run(request_)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_the_search_says_so() -> None:
    with pytest.raises(tune.TuneError, match="GPU"):
        tune.run(tune.Request(8, 64, 64, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", tune.DTYPES)
def test_a_search_writes_the_fastest_variants(tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "tuned.json"
    tune.run(tune.Request(16, 256, 128, 4, dtype, (1, 40), out))
    found = json.loads(out.read_text())
    [tokens] = [each["tokens"] for each in found["layers"].values()]
    assert list(tokens) == ["1", "40"]
    for count, entry in tokens.items():
        hopper = torch.cuda.get_device_capability() == (9, 0)
        case = Layer(int(count), 16, 4, 256, 128, dtype, hopper)
        assert set(entry["us"]) == {str(variant) for variant in variants.valid_variants(case)}
        assert entry["variant"] in entry["us"]
