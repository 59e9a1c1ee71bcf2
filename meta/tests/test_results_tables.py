"""tools/results.py: tables and plots say what the results files say, and nothing stale passes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kestrel_runtime.bench import Report, Row

TOOLS = Path(__file__).resolve().parents[2] / "tools"
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "clocks": {"sm": "1980 MHz", "memory": "3201 MHz", "sm_max": "1980 MHz"},
    "versions": {"torch": "2.11.0", "kestrel-norm": "0.1.0"},
    "git": "0123456789abcdef",
    "date": "2026-11-21T20:00:00+00:00",
    "empty_us": 0.55,
    "empty_host_us": 3.0,
}


@pytest.fixture(scope="module")
def results():
    sys.path.insert(0, str(TOOLS))
    try:
        return __import__("results")
    finally:
        sys.path.remove(str(TOOLS))


def row(shape: str, candidate: str, us: float | None, **others) -> Row:
    times = {} if us is None else {"us": us, "p20": us - 0.01, "p80": us + 0.02}
    return Row("norm", "rms_norm", shape, candidate, **times, **others)


@pytest.fixture
def package(tmp_path) -> Path:
    """A family with one results file and a README."""
    folder = tmp_path / "packages" / "norm"
    report = Report("NVIDIA H200")
    rows = [
        row("1x2048", "kestrel", 1.2, target_us=1.25, limit_us=1.05, fraction=0.875, gb_per_s=7.0, host_us=5.0),
        row("1x2048", "torch", 2.85),
        row("16x4096", "kestrel", 1.5, target_us=1.25, cold=False, runs="reference", bare_host_us=4.0, host_us=5.5),
        row("16x4096", "torch", None, failed="RuntimeError: no"),
    ]
    report.add(rows, ENVIRONMENT)
    report.write(folder / "results" / "h200.json")
    (folder / "results" / "h200_experiment.json").write_text('{"rows": []}')
    (folder / "README.md").write_text("# norm\n")
    return folder


def lines_of(readme: Path) -> list[str]:
    return readme.read_text().splitlines()


def test_a_table_holds_every_shape_with_target_limit_and_candidates(results, package):
    pytest.importorskip("matplotlib")
    results.main([], package.parents[1])
    found = [line for line in lines_of(package / "README.md") if line.startswith("| ")]
    assert found == [
        "| shape | kestrel us | p20 .. p80 | target | limit | of limit | rate | host / bare us | torch us |",
        "| 1x2048 | **1.20** | 1.19 .. 1.22 | 1.25 | 1.05 | 88% | 7 GB/s | 5.0 | 2.85 |",
        "| 16x4096 | 1.50 by reference warm | 1.49 .. 1.52 | 1.25 |  |  |  | 5.5 / 4.0 | failed |",
    ]


def test_a_table_says_what_was_measured_with_which_revision(results, package):
    text = results.section(package)
    assert "Measured on one H200" in text
    assert "1 of 2 targets met" in text
    assert (
        "torch 2.11.0; driver 580.1, SM clock 1980 MHz, empty launch 0.55 us; revision 0123456789ab, 2026-11-21" in text
    )


def test_within_two_percent_of_a_peers_figure_counts_and_is_said(results):
    of_peer = {"target_us": 100.0, "target_of": "quack"}
    rows = [
        row("1x1", "kestrel", 99.0, **of_peer),
        row("2x2", "kestrel", 102.0, **of_peer),
        row("3x3", "kestrel", 102.1, **of_peer),
        row("4x4", "kestrel", 101.0, target_us=100.0),
    ]
    near = "within 2 % of the peer's figure"
    assert results.summary(rows) == f": 2 of 4 targets met, 1 of them {near}"
    times = [line.split(" | ")[1] for line in results.table(rows).splitlines()[2:]]
    assert times == ["**99.0**", f"**102** {near}", "102", "101"]


def test_the_text_around_the_markers_stays(results, package):
    readme = package / "README.md"
    readme.write_text(f"# norm\n\n{results.BEGIN}stale text\n{results.END}\nafter\n")
    fresh = results.written(readme.read_text(), results.section(package))
    assert fresh.startswith("# norm\n\n")
    assert fresh.endswith("\nafter\n")
    assert "stale text" not in fresh


def test_a_package_without_results_is_left_alone(results, tmp_path):
    folder = tmp_path / "packages" / "rope"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# rope\n")
    assert results.main([], tmp_path) == 0
    assert results.main(["--check"], tmp_path) == 0
    assert (folder / "README.md").read_text() == "# rope\n"


def test_check_notices_every_way_of_being_out_of_date(results, package, capsys):
    pytest.importorskip("matplotlib")
    root = package.parents[1]
    assert results.main(["--check"], root) == 1
    assert "packages/norm/README.md: its table" in capsys.readouterr().err
    assert results.main([], root) == 0
    assert results.main(["--check"], root) == 0

    readme, plot = package / "README.md", package / "results" / "h200_rms_norm.svg"
    text, picture = readme.read_text(), plot.read_text()
    readme.write_text(text.replace("1.20", "1.10"))
    assert results.main(["--check"], root) == 1
    readme.write_text(text)

    plot.write_text(picture.replace("rows ", "rows 0"))
    capsys.readouterr()
    assert results.main(["--check"], root) == 1
    assert "h200_rms_norm.svg" in capsys.readouterr().err
    plot.write_text(picture)

    orphan = package / "results" / "h200_other.svg"
    orphan.write_text(picture)
    assert results.main(["--check"], root) == 1
    assert results.main([], root) == 0
    assert not orphan.exists()
    assert results.main(["--check"], root) == 0


def test_a_new_figure_makes_table_and_plot_stale(results, package):
    pytest.importorskip("matplotlib")
    root, path = package.parents[1], package / "results" / "h200.json"
    results.main([], root)
    newer = Report("NVIDIA H200")
    newer.add([row("1x2048", "kestrel", 1.1, target_us=1.25)], ENVIRONMENT)
    report = Report.read(path)
    report.merge(newer, whole_ops=False)
    report.write(path)
    assert len(results.stale(package)) == 2


def test_the_same_rows_draw_the_same_bytes(results, package, tmp_path):
    pytest.importorskip("matplotlib")
    [(_, report)] = results.reports(package)
    for name in ("one", "other"):
        results.draw(report.rows, tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_a_plot_holds_a_bar_for_each_figure_that_was_measured(results, package, tmp_path):
    """Of the two rows of ours and the one of torch that did not fail; one row of ours has a fraction of the limit."""
    pytest.importorskip("matplotlib")
    [(_, report)] = results.reports(package)
    results.draw(report.rows, tmp_path / "plot.svg")
    picture = ElementTree.parse(tmp_path / "plot.svg").getroot()
    texts = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"rms_norm", "1x2048", "16x4096", "kestrel", "torch", "target"} <= texts
    bars = {}
    for path in picture.iter("{http://www.w3.org/2000/svg}path"):
        clipped, style = "clip-path" in path.attrib, path.get("style", "")
        for candidate in ("kestrel", "torch"):
            if clipped and f"fill: {results.COLOURS[candidate].lower()}" in style:
                bars[candidate] = bars.get(candidate, 0) + path.get("d").count("M")
    assert bars == {"kestrel": 2 + 1, "torch": 1}


def test_what_a_reader_sees_of_a_plot_is_not_shortened(results):
    """Lengths are rounded, numbers in text are not; a group of several elements stays."""
    bar = '<path d="M 1.2345 2\nL 3 -0.0004\nz\n" style="fill: none"/>'
    text = '<text x="7.0001">0.12345</text>'
    picture = f'<g id="figure_1">\n  <g id="bar">\n   {bar}\n  </g>\n  <g id="label">\n   {text}\n  </g>\n</g>\n'
    compact = '<path d="M 1.23 2 L 3 -0 z" style="fill: none"/>\n<text x="7">0.12345</text>'
    assert results._compact(picture) == f'<g id="figure_1">\n{compact}\n</g>\n'


def test_rows_of_a_run_elsewhere_are_taken_with_the_revision_they_lack(results, package, tmp_path):
    pytest.importorskip("matplotlib")
    root, elsewhere = package.parents[1], Report("NVIDIA H200")
    elsewhere.add([row("740x2048", "kestrel", 2.4)], {**ENVIRONMENT, "git": None})
    elsewhere.write(tmp_path / "out.json")
    assert results.main(["--take", str(tmp_path / "out.json"), "--revision", "fedcba"], root) == 0
    taken = Report.read(package / "results" / "h200.json")
    assert [each.shape for each in taken.rows] == ["740x2048"]
    assert [each["git"] for each in taken.environments] == ["fedcba"]
    assert "740x2048" in (package / "README.md").read_text()


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        ("nothing", True),
        ("the prose of the module", True),
        ("the docstring of draw", True),
        ("a colour that no plot shows", True),
        ("a colour", False),
        ("draw", False),
    ],
)
def test_a_plot_is_stale_when_its_drawing_changes_and_not_when_prose_does(results, tmp_path, edit, same):
    source = (TOOLS / "results.py").read_text()
    old, new = {
        "nothing": ("", ""),
        "the prose of the module": ("# -- the command", "# another comment\n# -- the command"),
        "the docstring of draw": ('"""Two rows of bars, a group', '"""Bars\n\n    in rows, a group'),
        "a colour that no plot shows": ('"flashinfer": "#E69F00"', '"flashinfer": "#000000"'),
        "a colour": ('"torch": "#8C8C8C"', '"torch": "#000000"'),
        "draw": ('set_yscale("log")', 'set_yscale("linear")'),
    }[edit]
    assert source.count(old) == 1 or edit == "nothing"
    file = tmp_path / "edited_results.py"
    file.write_text(source.replace(old, new) if old else source)
    spec = importlib.util.spec_from_file_location("edited_results", file)
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    rows = [row("1x2048", "kestrel", 1.2), row("1x2048", "torch", 2.85)]
    assert (edited.digest(rows) == results.digest(rows)) is same
