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
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
    return hashlib.sha256((json.dumps([shown, colours]) + _code(draw)).encode()).hexdigest()[:16]


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
    matplotlib.rcParams.update({"svg.hashsalt": "kestrel", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    candidates = list(dict.fromkeys(row.candidate for row in rows))
    by_key = {(row.shape, row.candidate): row for row in rows}
    with_limit = any(row.fraction for row in rows)
    width = max(5.5, min(11.0, 1.0 + 0.16 * len(shapes) * (len(candidates) + 1.5)))
    figure, panels = pyplot.subplots(1 + with_limit, 1, figsize=(width, 2.6 * (1 + with_limit)), squeeze=False)
    bar = 0.8 / len(candidates)
    for number_of, candidate in enumerate(candidates):
        places = [place + (number_of - (len(candidates) - 1) / 2) * bar for place in range(len(shapes))]
        found = [by_key.get((shape, candidate)) for shape in shapes]
        colour = _colour(candidate, candidates)
        times = [row.us if row and row.us else float("nan") for row in found]
        low = [row.us - row.p20 if row and row.us and row.p20 else 0.0 for row in found]
        high = [row.p80 - row.us if row and row.us and row.p80 else 0.0 for row in found]
        panels[0][0].bar(places, times, bar, color=colour, label=candidate, yerr=[low, high], error_kw={"lw": 0.6})
        if with_limit:
            fractions = [row.fraction if row and row.fraction else float("nan") for row in found]
            panels[1][0].bar(places, fractions, bar, color=colour)
    for place, shape in enumerate(shapes):
        target = next((row.target_us for row in rows if row.shape == shape and row.target_us), None)
        if target:
            line = {"color": "black", "linewidth": 1.0, "label": "target" if place == 0 else None}
            panels[0][0].hlines(target, place - 0.45, place + 0.45, **line)
    panels[0][0].set_yscale("log")
    panels[0][0].set_ylabel("us per call (log)")
    panels[0][0].legend(loc="upper left", fontsize=7, framealpha=0.8)
    panels[0][0].set_title(rows[0].op, loc="left")
    if with_limit:
        panels[1][0].axhline(1.0, color="black", linewidth=0.8)
        panels[1][0].set_ylabel("fraction of the limit")
        panels[1][0].set_ylim(bottom=0)
    for [panel] in panels:
        panel.set_xticks(range(len(shapes)), shapes, rotation=25, ha="right", rotation_mode="anchor")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
        panel.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": f"rows {digest(rows)}"})
    pyplot.close(figure)
    tidy = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(f"{tidy}\n", encoding="utf-8")


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
