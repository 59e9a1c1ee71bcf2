"""The command: choose, measure, show, write, compare. `kestrel-kernels bench` and this module's `main` share it."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .definition import Benchmark, Source, discover, importing_peers, kind_of, load, select
from .machine import environment, revision_of
from .report import Report, file_name, slower
from .rows import everything, measure, ours_only, without_peers
from .show import watching
from .timer import REPLAYS

FEWER = "one that takes long gets fewer, at least 5"
WANTED = {"ours": ours_only, "torch": without_peers, "peers": everything}


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    names: Sequence[str] = ()
    """Families (``norm``) or ops (``norm:rms_norm``); all without any."""
    shapes: Sequence[str] | None = None
    candidates: str = "torch"
    """"ours"; "torch": and PyTorch's; "peers": and every peer that can be imported."""
    only: Sequence[str] | None = None
    """Just the candidates of these names; torch.compile, for one, takes most of the time of a run."""
    replays: int = REPLAYS
    """Samples of each candidate, beside one to warm up; one that takes long gets fewer, at least 5."""
    out: Path | None = None
    against: Path | None = None
    checkout: Path | None = None
    """Take the definitions from here instead of from the installed packages."""
    record: bool = False
    """Put the rows into the checkout's packages/<family>/results/<gpu>.json."""
    revision: str | None = None


class BenchError(Exception):
    """The run cannot be done as asked; the message says why."""


def run(options: Options) -> int:
    """Measure and print. 0; 1 when rows became slower than in `against`, 2 when a definition failed, 130 when stopped.

    Raises BenchError when there is no GPU, no benchmark or shape of a name, no report to compare with, or no place for
    a report. What a run has measured when it is interrupted is written.
    """
    try:
        with _terminated_as_interrupted():
            return _run(options)
    except KeyboardInterrupt:
        print("interrupted: what was measured until then stands where rows were to be written", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, does what Ctrl-C does; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: Options) -> int:
    if options.replays < 2:
        raise BenchError("a spread needs at least 2 replays")
    if not torch.cuda.is_available():
        raise BenchError("bench needs a CUDA GPU, and PyTorch finds none here")
    before = _report_to_compare_with(options.against)
    benchmarks, failed = _load(_chosen(options))
    _check_shapes(options.shapes, benchmarks)
    _check_places(options, benchmarks)
    revision = options.revision or (revision_of(options.checkout) if options.checkout else None)
    machine = environment(revision)
    report = Report(machine["gpu"])
    count = sum(shape in (options.shapes or each.targets) for each in benchmarks for shape in each.targets)
    wanted = WANTED[options.candidates] if options.only is None else options.only.__contains__
    peers = (
        options.candidates == "peers" if options.only is None else any(kind_of(name) == "peer" for name in options.only)
    )
    with watching(machine, count) as watcher, importing_peers(peers):
        for benchmark in benchmarks:
            watcher.begin(benchmark.name)
            fresh = Report(report.gpu)
            whole = False
            try:
                for rows in measure(benchmark, options.shapes, wanted, options.replays):
                    fresh.add(rows, machine)
                    watcher.shape(rows)
                whole = options.shapes is None
            except Exception as error:
                failed.append(f"{benchmark.name}: {type(error).__name__}: {error}")
            finally:  # after every op, and when interrupted: what was measured stays
                report.merge(fresh)
                _write(options, fresh, whole)
            watcher.end()
    failed += _not_met_with(options.only, report)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    worse = _print_slower(report, before, options.against) if before else 0
    return 2 if failed else 1 if worse else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m kestrel_runtime.bench`, for a checkout and for GPU machines without the meta-package."""
    parser = argparse.ArgumentParser(
        prog="kestrel_runtime.bench", description="Time ops inside CUDA graphs, beside other implementations."
    )
    parser.add_argument("names", nargs="*", metavar="family[:op]", help="default: everything there is")
    parser.add_argument("--shapes", nargs="+", help="only these shapes")
    parser.add_argument("--ours-only", action="store_true", help="time neither PyTorch nor peers")
    parser.add_argument("--without-peers", action="store_true", help="time ours and PyTorch")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="time these candidates alone: kestrel torch")
    parser.add_argument("--replays", type=int, default=REPLAYS, help=f"samples of each candidate ({REPLAYS}); {FEWER}")
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON; rows of other ops in it stay")
    parser.add_argument("--against", type=Path, help="a file of --out: print what became slower than there")
    parser.add_argument("--checkout", type=Path, help="time this checkout's definitions")
    parser.add_argument("--record", action="store_true", help="put the rows into the checkout's results folders")
    parser.add_argument("--revision", help="the git revision, where the checkout has no history")
    given = parser.parse_args(arguments)
    if given.record and given.checkout is None:
        parser.error("--record needs --checkout")
    options = Options(
        names=given.names,
        shapes=given.shapes,
        candidates="ours" if given.ours_only else "torch" if given.without_peers else "peers",
        only=given.only,
        replays=given.replays,
        out=given.out,
        against=given.against,
        checkout=given.checkout,
        record=given.record,
        revision=given.revision,
    )
    try:
        return run(options)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _chosen(options: Options) -> list[Source]:
    sources = discover(options.checkout)
    if not sources:
        raise BenchError(f"there are no benchmarks in {options.checkout or 'the kestrel packages installed here'}")
    try:
        return select(sources, options.names)
    except ValueError as error:
        raise BenchError(str(error)) from None


def _load(sources: Sequence[Source]) -> tuple[list[Benchmark], list[str]]:
    """What can be loaded, and what is wrong with the others."""
    loaded, failed = [], []
    for source in sources:
        try:
            loaded.append(load(source))
        except Exception as error:
            failed.append(f"{source.name}: {type(error).__name__}: {error}")
    return loaded, failed


def _report_to_compare_with(path: Path | None) -> Report | None:
    if path is None:
        return None
    try:
        before = Report.read(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"--against: {error}") from None
    if before.gpu != torch.cuda.get_device_name():
        raise BenchError(f"--against: {path} was measured on {before.gpu}, not on {torch.cuda.get_device_name()}")
    return before


def _check_shapes(shapes: Sequence[str] | None, benchmarks: Sequence[Benchmark]) -> None:
    known = dict.fromkeys(shape for each in benchmarks for shape in each.targets)
    if unknown := [shape for shape in shapes or () if shape not in known]:
        raise BenchError(f"no shape is called {unknown[0]!r}; there are: {', '.join(known)}")


def _not_met_with(only: Sequence[str] | None, report: Report) -> list[str]:
    """Names of --only that no op timed has a candidate of: misspelt, or not installed."""
    met = {row.candidate for row in report.rows}
    return [f"--only: no candidate called {name!r} could be timed" for name in only or () if name not in met]


def _places(options: Options, families: Iterable[str], gpu: str) -> dict[Path, str | None]:
    """Where rows are written, and which family's; None: of all."""
    places: dict[Path, str | None] = {options.out: None} if options.out else {}
    if options.record and options.checkout:
        for family in sorted(set(families)):
            places[options.checkout / "packages" / family / "results" / file_name(gpu)] = family
    return places


def _check_places(options: Options, benchmarks: Sequence[Benchmark]) -> None:
    """Before anything is timed: what is there is a report of this GPU, which stays but for what is measured again."""
    gpu = torch.cuda.get_device_name()
    for path in _places(options, (each.family for each in benchmarks), gpu):
        try:
            Report.read_or_new(path, gpu)
        except (OSError, ValueError) as error:
            raise BenchError(f"{error}; rows are not written there") from None


def _write(options: Options, report: Report, whole_ops: bool) -> None:
    """Put rows into the files asked for; whole_ops: and forget the shapes of their ops that were not measured."""
    for path, family in _places(options, (row.family for row in report.rows), report.gpu).items():
        merged = Report.read_or_new(path, report.gpu)
        merged.merge(report.of_family(family) if family else report, whole_ops)
        merged.write(path)


def _print_slower(report: Report, before: Report, path: Path | None) -> int:
    found = slower(report.rows, before.rows)
    same = {row.key for row in before.rows} & {row.key for row in report.rows}
    print(f"\nagainst {path}: {len(same)} rows compared, {len(found)} slower by more than the noise of both")
    for each in found:
        print(f"  {each}")
    return len(found)
