"""The output of a run: a growing table with a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .report import Environment, Row

if TYPE_CHECKING:
    from rich.table import Table

COMPUTE_BOUND_OPERATIONS_PER_BYTE = 200  # about where tensor cores (bf16) and memory of a Hopper GPU balance
COLUMNS = ("shape", "candidate", "us", "p20 .. p80", "rate", "of limit", "target", "host us", "")


class Watcher(Protocol):
    """Shows the progress of a run."""

    def begin(self, op: str) -> None: ...

    def shape(self, rows: Sequence[Row]) -> None: ...

    def end(self) -> None: ...


@contextlib.contextmanager
def watching(environment: Environment, shapes: int) -> Iterator[Watcher]:
    """A live table on a terminal with rich installed, plain lines elsewhere. `shapes`: the number to measure."""
    print(headline(environment), flush=True)
    try:
        import rich  # noqa: F401

        live = sys.stdout.isatty()
    except ImportError:
        live = False
    if not live:
        yield _Lines()
        return
    with _Live(shapes) as watcher:
        yield watcher


def headline(environment: Environment) -> str:
    clocks = environment["clocks"]
    return (
        f"{environment['gpu']}, {clocks['sm'] or 'unknown SM clock'}, memory {clocks['memory'] or 'unknown'}, "
        f"driver {environment['driver'] or 'unknown'}, torch {environment['versions'].get('torch', 'unknown')}; "
        f"empty launch {environment['empty_us']:.2f} us, {environment['empty_host_us']:.2f} us on the host"
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, column for column."""
    if row.us is None:
        return (row.shape, row.candidate, "failed", "", "", "", "", "", row.failed or "")
    remarks = []
    if row.runs == "reference":
        remarks.append("by reference")
    if not row.cold:
        remarks.append("warm")
    return (
        row.shape,
        row.candidate,
        number(row.us),
        f"{number(row.p20)} .. {number(row.p80)}",
        rate(row),
        f"{row.fraction:.0%}" if row.fraction else "",
        verdict(row),
        " / ".join(f"{us:.1f}" for us in (row.host_us, row.bare_host_us) if us is not None),
        ", ".join(remarks),
    )


def number(us: float | None) -> str:
    """Microseconds with three digits.

    >>> number(1.2345), number(12.345), number(1234.5)
    ('1.23', '12.3', '1234')
    """
    if us is None:
        return ""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def rate(row: Row) -> str:
    """TFLOP/s where arithmetic is the limit, GB/s elsewhere."""
    intensity = row.operations / row.bytes if row.operations and row.bytes else 0.0
    computes = row.tflop_per_s is not None and intensity > COMPUTE_BOUND_OPERATIONS_PER_BYTE
    if computes or (row.gb_per_s is None and row.tflop_per_s is not None):
        return f"{row.tflop_per_s:.0f} TFLOP/s"
    return f"{row.gb_per_s:.0f} GB/s" if row.gb_per_s is not None else ""


def verdict(row: Row) -> str:
    """The target, and whether the row meets it."""
    if row.met is None:
        return ""
    if row.near:
        return f"{number(row.target_us)} met within 2 %"
    return f"{number(row.target_us)} {'met' if row.met else 'missed'}"


class _Lines:
    def __init__(self) -> None:
        self.op = ""

    def begin(self, op: str) -> None:
        self.op = op

    def shape(self, rows: Sequence[Row]) -> None:
        for row in rows:
            shape, candidate, us, spread, rate, fraction, target, host, remark = cells(row)
            line = f"{self.op:26} {shape:22} {candidate:16} {us:>8} {spread:>18} {rate:>12} {fraction:>5}"
            print(f"{line} {target:18} {host:11} {remark}".rstrip(), flush=True)

    def end(self) -> None:
        return


class _Live:
    """One table for each op; when the next op begins, the finished one stays above."""

    def __init__(self, shapes: int) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.group = Group
        self.console = Console()
        bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*bar, console=self.console)
        self.task = self.progress.add_task("", total=shapes)
        self.live = Live(self.progress, console=self.console)
        self.table: Table | None = None

    def __enter__(self) -> _Live:
        self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()
        self.live.update(self.progress)
        self.live.stop()

    def begin(self, op: str) -> None:
        from rich.table import Table

        self.table = Table(title=op, title_justify="left", title_style="bold")
        for name in COLUMNS:
            self.table.add_column(name, justify="left" if name in ("shape", "candidate", "") else "right")
        self.progress.update(self.task, description=op)
        self.live.update(self.group(self.table, self.progress))

    def shape(self, rows: Sequence[Row]) -> None:
        assert self.table is not None
        for row in rows:
            style = {True: "green", False: "yellow", None: "red" if row.failed else None}[row.met]
            self.table.add_row(*cells(row), style=style)
        self.progress.advance(self.task)
        self.live.update(self.group(self.table, self.progress))

    def end(self) -> None:
        if self.table is not None:
            self.live.update(self.progress, refresh=True)
            self.console.print(self.table)
            self.table = None
