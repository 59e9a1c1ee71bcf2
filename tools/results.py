"""Writes tables and plots of measured figures into each family's README, from packages/<family>/results/<gpu>.json.

    python tools/results.py            writes the tables between the markers of each README, and the plots
    python tools/results.py --check    reports whether tables and plots are up to date; needs no matplotlib
    python tools/results.py --take figures.json... --revision 0123abc
                                       first merges files written by `bench --out` into the results of the families

The tables are never edited by hand: `nox -s bench` measures, `nox -s results` runs this tool. A plot contains a digest
of the rows it was drawn from.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kestrel_runtime.bench.definition import kind_of
from kestrel_runtime.bench.limits import TARGET_GPU
from kestrel_runtime.bench.report import Environment, Report, Row, file_name
from kestrel_runtime.bench.show import number, rate

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: written by tools/results.py -->\n", "<!-- end of results -->\n"
BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
NEAR = "within 2 % of the peer's figure"  # counts as met if the peer's figure is the target
COLOURS = {
    "kestrel": "#0072B2",
    "torch": "#8C8C8C",
    "torch.compile": "#4D4D4D",
    "flashinfer": "#E69F00",
    "vllm": "#D55E00",
    "quack": "#009E73",
    "liger": "#CC79A7",
}
SHOWN = ("op", "shape", "candidate", "us", "p20", "p80", "fraction", "target_us")
OTHER_COLOURS = ("#56B4E9", "#F0E442", "#A6761D", "#66A61E", "#7570B3", "#E7298A")


def reports(package: Path) -> list[tuple[Path, Report]]:
    """The results of a package, one file per GPU, the GPU of the targets first.

    Other JSON files in the folder are records of experiments.
    """
    found = []
    for path in sorted(package.glob("results/*.json")):
        try:
            report = Report.read(path)
        except ValueError:
            continue
        if path.name == file_name(report.gpu):
            found.append((path, report))
    return sorted(found, key=lambda each: each[1].gpu != TARGET_GPU)


def ops(report: Report) -> dict[str, list[Row]]:
    by_op: dict[str, list[Row]] = {}
    for row in report.rows:
        by_op.setdefault(row.op, []).append(row)
    return by_op


def plot_path(results: Path, op: str) -> Path:
    return results.with_name(f"{results.stem}_{op}.svg")


def digest(rows: Sequence[Row]) -> str:
    """A digest of the data that a plot shows and of the code that draws it."""
    candidates = list(dict.fromkeys(row.candidate for row in rows))
    colours = [_colour(candidate, candidates) for candidate in candidates]
    shown = [{name: getattr(row, name) for name in SHOWN} for row in rows]
    code = [_code(each) for each in (draw, _draw_times, _draw_fractions, _columns, _add_boxes, _add_lines, _compact)]
    return hashlib.sha256(json.dumps([shown, colours, code]).encode()).hexdigest()[:16]


@functools.cache
def _code(function: Callable[..., object]) -> str:
    """The source lines of a function without its docstring and its comments: the same for all versions of Python."""
    source = inspect.getsource(function)
    [tree] = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    docstring = tree.body[0] if ast.get_docstring(tree) is not None else None
    prose = range(docstring.lineno, (docstring.end_lineno or 0) + 1) if docstring else ()
    lines = enumerate(source.splitlines(), start=1)
    return "\n".join(line for i, line in lines if i not in prose and not line.strip().startswith("#"))


# -- tables ------------------------------------------------------------------------------------------------------------


def section(package: Path) -> str:
    """What stands between the markers of a package's README; empty without results."""
    parts = []
    for path, report in reports(package):
        parts.append(f"### Measured on one {report.gpu.removeprefix('NVIDIA ')}\n")
        parts.append(
            "Microseconds per call inside a CUDA graph, the median of the replays with the 20th and the 80th "
            "percentile; inputs cold in L2 unless a row says warm. *limit* is one plain launch and the bytes (or "
            "operations) at the rates that this GPU reaches at best; *host* is an eager call without a graph, and the "
            "bare entry point.\n"
        )
        for op, rows in ops(report).items():
            parts.append(f"**{op}**{summary(rows)}\n")
            parts.append(table(rows))
            parts.append(f"{provenance(rows, report.environments)}\n")
            plot = plot_path(path, op).relative_to(package)
            parts.append(f"![{op}: microseconds and fraction of the limit]({plot})\n")
    return "\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """How many targets are met."""
    with_target = [row for row in rows if row.target_us is not None]
    met, near = ([row for row in with_target if getattr(row, how)] for how in ("met", "near"))
    within = f", {len(near)} of them {NEAR}" if near else ""
    return f": {len(met)} of {len(with_target)} targets met{within}" if with_target else ""


def table(rows: Sequence[Row]) -> str:
    candidates = list(dict.fromkeys(row.candidate for row in rows))
    ours, others = candidates[0], candidates[1:]
    columns = ["shape", f"{ours} us", "p20 .. p80", "target", "limit", "of limit", "rate", "host / bare us"]
    lines = [f"| {' | '.join([*columns, *(f'{name} us' for name in others)])} |"]
    lines.append(f"|{'---|' * (len(columns) + len(others))}")
    by_key = {(row.shape, row.candidate): row for row in rows}
    for shape in dict.fromkeys(row.shape for row in rows):
        first = by_key.get((shape, ours), Row("", "", shape, ours, failed="not measured"))
        cells = [shape, *_ours(first), *(_other(by_key.get((shape, name))) for name in others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ours(row: Row) -> list[str]:
    if row.us is None:
        return ["failed", "", number(row.target_us), number(row.limit_us), "", "", ""]
    time = number(row.us)
    if row.runs == "reference":
        time += " by reference"
    if not row.cold:
        time += " warm"
    return [
        (f"**{time}**" if row.met else time) + (f" {NEAR}" if row.near else ""),
        f"{number(row.p20)} .. {number(row.p80)}",
        number(row.target_us),
        number(row.limit_us),
        f"{row.fraction:.0%}" if row.fraction else "",
        rate(row),
        " / ".join(f"{us:.1f}" for us in (row.host_us, row.bare_host_us) if us is not None),
    ]


def _other(row: Row | None) -> str:
    if row is None:
        return ""
    return number(row.us) if row.us is not None else "failed"


def provenance(rows: Sequence[Row], environments: Sequence[Environment]) -> str:
    """With what, at which revision and when."""
    found = []
    for index in sorted({row.environment for row in rows}):
        machine = environments[index]
        versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if "kestrel" not in name)
        clock = machine["clocks"]["sm"] or "unknown"
        found.append(
            f"{versions}; driver {machine['driver']}, SM clock {clock}, empty launch {machine['empty_us']:.2f} us; "
            f"revision {(machine['git'] or 'unknown')[:12]}, {machine['date'][:10]}"
        )
    return f"({'. And: '.join(found)}.)"


def written(readme: str, fresh: str) -> str:
    """The README with the section between its markers, which are put at its end where there are none."""
    if not fresh:
        return readme
    block = f"{BEGIN}{fresh}{END}"
    if BLOCK.search(readme):
        return BLOCK.sub(lambda _: block, readme)
    return f"{readme.rstrip()}\n\n{block}"


# -- plots -------------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], path: Path) -> None:
    """Two rows of bars, a group for each shape and a bar for each candidate: microseconds, fraction of the limit."""
    import matplotlib

    matplotlib.use("svg")
    settings = {"svg.hashsalt": "kestrel", "svg.fonttype": "none", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    matplotlib.rcParams.update(settings)
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    candidates = list(dict.fromkeys(row.candidate for row in rows))
    with_limit = any(row.fraction for row in rows)
    width = max(5.5, min(11.0, 1.0 + 0.16 * len(shapes) * (len(candidates) + 1.5)))
    figure, panels = pyplot.subplots(1 + with_limit, 1, figsize=(width, 2.6 * (1 + with_limit)), squeeze=False)
    _draw_times(panels[0][0], rows, shapes, candidates)
    if with_limit:
        _draw_fractions(panels[1][0], rows, shapes, candidates)
    slope = {"rotation": 25} if len(shapes) <= 16 else {"rotation": 90, "va": "center"}
    for [panel] in panels:
        panel.set_xlim(-0.6, len(shapes) - 0.4)
        panel.set_xticks(range(len(shapes)), shapes, ha="right", rotation_mode="anchor", **slope)
        panel.tick_params("x", bottom=False, labelbottom=panel is panels[-1][0])
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
        panel.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": f"rows {digest(rows)}"})
    pyplot.close(figure)
    path.write_text(_compact(path.read_text(encoding="utf-8")), encoding="utf-8")


def _draw_times(panel: Any, rows: Sequence[Row], shapes: Sequence[str], candidates: Sequence[str]) -> None:
    """Medians, the range of each from the 20th to the 80th percentile, and the target of each shape."""
    shown = [us for row in rows for us in (row.us, row.p20, row.p80, row.target_us) if us]
    least, most = (min(shown) / 1.5, max(shown) * 1.5) if shown else (1.0, 10.0)
    for candidate in candidates:
        left, width = _columns(candidate, candidates)
        timed = [(shapes.index(row.shape) + left, row) for row in rows if row.candidate == candidate and row.us]
        _add_boxes(panel, width, least, [(at, row.us) for at, row in timed], _colour(candidate, candidates), candidate)
        middles = [(at + width / 2, row) for at, row in timed if row.p20 and row.p80]
        _add_lines(panel, [((at, row.p20), (at, row.p80)) for at, row in middles], linewidth=0.6)
    targets = {shapes.index(row.shape): row.target_us for row in rows if row.target_us}
    _add_lines(panel, [((at - 0.45, us), (at + 0.45, us)) for at, us in targets.items()], linewidth=1.0, label="target")
    panel.set_yscale("log")
    panel.set_ylim(least, most)
    if most > 30 * least:  # ticks at the powers of ten suffice
        panel.minorticks_off()
    panel.set_ylabel("us per call (log)")
    panel.legend(loc="upper left", fontsize=7, framealpha=0.8)
    panel.set_title(rows[0].op, loc="left")


def _draw_fractions(panel: Any, rows: Sequence[Row], shapes: Sequence[str], candidates: Sequence[str]) -> None:
    for candidate in candidates:
        left, width = _columns(candidate, candidates)
        tops = [(shapes.index(row.shape) + left, row.fraction) for row in rows if row.candidate == candidate]
        tops = [(at, fraction) for at, fraction in tops if fraction]
        _add_boxes(panel, width, 0.0, tops, _colour(candidate, candidates), candidate)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_ylabel("fraction of the limit")
    panel.set_ylim(0.0, 1.05 * max(1.0, *(row.fraction or 0.0 for row in rows)))


def _columns(candidate: str, candidates: Sequence[str]) -> tuple[float, float]:
    """Where the bar of a candidate begins, from the middle of its group, and its width."""
    width = 0.8 / len(candidates)
    return (candidates.index(candidate) - len(candidates) / 2) * width, width


def _add_boxes(
    panel: Any, width: float, bottom: float, tops: Sequence[tuple[float, Any]], colour: str, label: str
) -> None:
    """Bars as one object: matplotlib writes hundreds of bytes for each. tops: left edge and top of each."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if tops:
        corners = [[(at, bottom), (at, top), (at + width, top), (at + width, bottom)] for at, top in tops]
        outline = Outline.make_compound_path(*map(Outline, corners))
        panel.add_patch(PathPatch(outline, facecolor=colour, linewidth=0, label=label))


def _add_lines(panel: Any, lines: Sequence[tuple[tuple[float, Any], tuple[float, Any]]], **style: Any) -> None:
    """Lines as one object; NaN separates them."""
    if lines:
        points = [point for line in lines for point in (*line, (math.nan, math.nan))]
        panel.plot(*zip(*points, strict=True), color="black", **style)


def _compact(svg: str) -> str:
    """The same picture in fewer bytes: no indentation, no groups of one element, lengths to a hundredth of a point."""
    svg = re.sub(r" *\n(?=[MLz])", " ", svg)
    svg = re.sub(r"(?<=[\dz]) *\n(?=\")", "", svg)
    svg = re.sub(r"\n +", "\n", svg)
    svg = re.sub(r"-?\d+\.\d{3,}(?![^<>]*<)", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), svg)
    grouped = 1
    while grouped:
        svg, grouped = re.subn(r'<g(?: id="[^"]*")?>\n([^\n]*(?:/|</text)>)\n</g>', r"\1", svg)
    return svg


def _colour(candidate: str, candidates: Sequence[str]) -> str:
    for name in (candidate, candidate.partition("_")[0]):
        if name in COLOURS and (name == candidate or name not in candidates):
            return COLOURS[name]
    unknown = [name for name in candidates if name not in COLOURS]
    shift = {"ours": 0, "torch": 2, "peer": 3}[kind_of(candidate)]
    return OTHER_COLOURS[(unknown.index(candidate) + shift) % len(OTHER_COLOURS)]


# -- the command -------------------------------------------------------------------------------------------------------


def stale(package: Path) -> list[str]:
    """What of a package is not as its results say."""
    found = []
    readme = package / "README.md"
    text = readme.read_text(encoding="utf-8")
    if written(text, section(package)) != text:
        found.append(f"{readme.relative_to(package.parents[1])}: its table of results")
    drawn = {plot_path(path, op): rows for path, report in reports(package) for op, rows in ops(report).items()}
    for plot, rows in drawn.items():
        if not plot.is_file() or f"rows {digest(rows)}" not in plot.read_text(encoding="utf-8"):
            found.append(f"{plot.relative_to(package.parents[1])}")
    left = {plot for path, _ in reports(package) for plot in package.glob(f"results/{path.stem}_*.svg")} - set(drawn)
    found += [f"{plot.relative_to(package.parents[1])}: no results belong to it" for plot in sorted(left)]
    return found


def write(package: Path) -> list[str]:
    """Bring tables and plots up to date; the files that changed."""
    changed = []
    readme = package / "README.md"
    text = readme.read_text(encoding="utf-8")
    fresh = written(text, section(package))
    if fresh != text:
        readme.write_text(fresh, encoding="utf-8")
        changed.append(readme)
    for path, report in reports(package):
        for op, rows in ops(report).items():
            plot = plot_path(path, op)
            if not plot.is_file() or f"rows {digest(rows)}" not in plot.read_text(encoding="utf-8"):
                draw(rows, plot)
                changed.append(plot)
        for plot in set(package.glob(f"results/{path.stem}_*.svg")) - {plot_path(path, op) for op in ops(report)}:
            plot.unlink()
            changed.append(plot)
    return [str(path.relative_to(package.parents[1])) for path in changed]


def take(files: Sequence[Path], revision: str | None, root: Path) -> None:
    """Put the rows of reports into packages/<family>/results, ops as a whole; the last file that holds an op wins.

    revision: of rows measured where no history was at hand.
    """
    for file in files:
        report = Report.read(file)
        for environment in report.environments:
            environment["git"] = environment["git"] or revision
        for family in sorted({row.family for row in report.rows}):
            path = root / "packages" / family / "results" / file_name(report.gpu)
            kept = Report.read_or_new(path, report.gpu)
            kept.merge(report.of_family(family))
            kept.write(path)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    parser.add_argument("--take", type=Path, nargs="+", default=[], metavar="FILE", help="reports to take rows from")
    parser.add_argument("--revision", help="where the rows taken do not know theirs")
    options = parser.parse_args(arguments)
    take(options.take, options.revision, root)
    packages = sorted(path.parent for path in root.glob("packages/*/README.md"))
    if options.check:
        found = [line for package in packages for line in stale(package)]
        for line in found:
            print(f"out of date: {line}", file=sys.stderr)
        print("`nox -s results` writes them" if found else "tables and plots of results are current")
        return 1 if found else 0
    for package in packages:
        for line in write(package):
            print(f"wrote {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
