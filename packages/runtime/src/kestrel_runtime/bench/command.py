"""The command line: choose, measure, show, write, compare.

:func:`main` is the only front end: ``python -m kestrel_runtime.bench`` and ``kestrel-kernels bench`` both call it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .definition import Benchmark, Source, discover, importing_peers, kind_of, load, select
from .machine import environment, revision_of
from .report import Report, file_name, slower
from .rows import Wanted, everything, measure, ours_only, without_peers
from .show import watching
from .timer import REPLAYS

DESCRIPTION = """Time ops on the GPU present, beside PyTorch and other libraries.

Microseconds per call inside a CUDA graph, with the inputs outside L2 unless a row says "warm": the median over the
samples, and the range of the middle 60 %. "of limit" is the fraction of what the GPU could reach, where its rates are
known. The host column is an eager call without a graph / the bare entry point of the binary."""
WANTED: dict[str, Wanted] = {"ours": ours_only, "torch": without_peers, "peers": everything}


@dataclass(frozen=True)
class Options:
    """What a run times and where its rows go."""

    names: Sequence[str] = ()
    """Families (``norm``) or ops (``norm:rms_norm``); empty: all."""
    shapes: Sequence[str] | None = None
    candidates: str = "torch"
    """"ours"; "torch": ours and PyTorch's; "peers": these and every library that can be imported."""
    only: Sequence[str] | None = None
    """The names of the candidates to time, in place of ``candidates``."""
    replays: int = REPLAYS
    """Samples of each candidate, besides one to warm up; a slow candidate gets fewer, at least 5."""
    out: Path | None = None
    against: Path | None = None
    checkout: Path | None = None
    """Take the definitions from here instead of from the installed packages."""
    record: bool = False
    """Put the rows into the checkout's packages/<family>/results/<gpu>.json."""
    revision: str | None = None

    @property
    def wanted(self) -> Wanted:
        """Says by its name whether a candidate is timed."""
        return WANTED[self.candidates] if self.only is None else self.only.__contains__

    @property
    def with_peers(self) -> bool:
        if self.only is None:
            return self.candidates == "peers"
        return any(kind_of(name) == "peer" for name in self.only)


class BenchError(Exception):
    """The run cannot start; the message says why."""


def run(options: Options) -> int:
    """Measure and print. Returns the exit status.

    0: done. 1: rows are slower than in `against`. 2: a definition or one of our ops failed. 130: interrupted; what was
    measured until then is written. Raises BenchError when there is no GPU, no benchmark or shape of a name, no report
    to compare with, or no place to write a report.
    """
    try:
        with _terminated_as_interrupted():
            return _run(options)
    except KeyboardInterrupt:
        print("interrupted: the rows measured until then are written", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, does what Ctrl-C does. Only the main thread can set that."""
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
    with watching(machine, count) as watcher, importing_peers(options.with_peers):
        for benchmark in benchmarks:
            watcher.begin(benchmark.name)
            fresh = Report(report.gpu)
            whole = False
            try:
                for rows in measure(benchmark, options.shapes, options.wanted, options.replays):
                    fresh.add(rows, machine)
                    watcher.shape(rows)
                whole = options.shapes is None
            except Exception as error:
                failed.append(f"{benchmark.name}: {type(error).__name__}: {error}")
            finally:  # also when interrupted
                report.merge(fresh)
                _write(options, fresh, whole)
            watcher.end()
    failed += [
        f"{row.family}:{row.op} {row.shape} {row.candidate}: {row.failed}"
        for row in report.rows
        if row.failed and kind_of(row.candidate) == "ours"
    ]
    failed += _not_timed(options.only, report)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    worse = _print_slower(report, before, options.against) if before else 0
    return 2 if failed else 1 if worse else 0


def main(arguments: Sequence[str] | None = None, prog: str = "python -m kestrel_runtime.bench") -> int:
    """The front end: parse the arguments (sys.argv by default), run, return the exit status."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="FAMILY[:OP]", help="default: every op")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--peers", action="store_true", help="time FlashInfer, vLLM and others too, where they import")
    which.add_argument("--ours-only", action="store_true", help="time neither PyTorch nor peers")
    which.add_argument("--only", nargs="+", metavar="NAME", help="time these candidates alone: kestrel torch")
    parser.add_argument("--shape", nargs="+", action="extend", metavar="NAME", help="time these shapes alone")
    fewer = "a slow candidate gets fewer, at least 5"
    parser.add_argument("--replays", type=int, default=REPLAYS, help=f"samples of each candidate ({REPLAYS}); {fewer}")
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON; other rows in that file stay")
    parser.add_argument("--against", type=Path, help="a file of --out: print what became slower than there")
    parser.add_argument("--checkout", type=Path, help="time this checkout's definitions")
    parser.add_argument("--record", action="store_true", help="put the rows into the checkout's results folders")
    parser.add_argument("--revision", help="the git revision, where the checkout has no history")
    given = parser.parse_args(arguments)
    if given.record and given.checkout is None:
        parser.error("--record needs --checkout")
    options = Options(
        names=given.names,
        shapes=given.shape,
        candidates="ours" if given.ours_only else "peers" if given.peers else "torch",
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


def _not_timed(only: Sequence[str] | None, report: Report) -> list[str]:
    """Names of --only that no op has a candidate of: misspelt, or not installed."""
    timed = {row.candidate for row in report.rows}
    return [f"--only: no candidate called {name!r} could be timed" for name in only or () if name not in timed]


def _places(options: Options, families: Iterable[str], gpu: str) -> dict[Path, str | None]:
    """Where rows are written, and which family's; None: of all."""
    places: dict[Path, str | None] = {options.out: None} if options.out else {}
    if options.record and options.checkout:
        for family in sorted(set(families)):
            places[options.checkout / "packages" / family / "results" / file_name(gpu)] = family
    return places


def _check_places(options: Options, benchmarks: Sequence[Benchmark]) -> None:
    """Before anything is timed: every file to write is new or a report of this GPU, and its folder can be written."""
    gpu = torch.cuda.get_device_name()
    for path in _places(options, (each.family for each in benchmarks), gpu):
        try:
            Report.read_or_new(path, gpu)
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except (OSError, ValueError) as error:
            raise BenchError(f"{error}; rows are not written there") from None


def _write(options: Options, report: Report, whole_ops: bool) -> None:
    """Put rows into the files. Rows of candidates that this run does not time stay; see Report.merge."""
    for path, family in _places(options, (row.family for row in report.rows), report.gpu).items():
        merged = Report.read_or_new(path, report.gpu)
        merged.merge(report.of_family(family) if family else report, whole_ops, options.wanted)
        merged.write(path)


def _print_slower(report: Report, before: Report, path: Path | None) -> int:
    found = slower(report.rows, before.rows)
    same = {row.key for row in before.rows} & {row.key for row in report.rows}
    print(f"\nagainst {path}: {len(same)} rows compared, {len(found)} slower by more than the noise of both")
    for each in found:
        print(f"  {each}")
    return len(found)
