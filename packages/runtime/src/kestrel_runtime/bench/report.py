"""The results of a run as data: rows, the machine and time of each row, JSON files, comparisons."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .definition import kind_of

NEAR = 1.02
"""Where a target is a peer's own figure, this factor above it still counts as met."""

Environment = dict[str, Any]
"""GPU, driver, clocks, versions, git revision, date: see :func:`kestrel_runtime.bench.machine.environment`."""


@dataclass(frozen=True)
class Row:
    """One candidate on one shape. Times are microseconds per call."""

    family: str
    op: str
    shape: str
    candidate: str
    us: float | None = None
    """Median inside a CUDA graph; None where the candidate failed."""
    p20: float | None = None
    p80: float | None = None
    failed: str | None = None
    runs: str | None = None
    """Whether our op ran as "kernel" or by "reference"; None for a candidate that calls none of ours."""
    cold: bool = True
    """The arguments are not in L2: twice its bytes are read between two calls on the same arguments."""
    sets: int = 0
    calls: int = 0
    """In one replay."""
    bytes: int | None = None
    operations: int | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    limit_us: float | None = None
    fraction: float | None = None
    """Of the limit: 1 is as fast as the limit, 0.5 takes twice as long."""
    target_us: float | None = None
    """Of the first candidate, which is ours."""
    target_of: str | None = None
    """The peer whose own figure the target is, where it is one."""
    empty_us: float | None = None
    """An empty launch, timed in turn with the candidates."""
    host_us: float | None = None
    """An eager call without a graph, on the host."""
    bare_host_us: float | None = None
    """The entry point of the binary alone, on the host."""
    environment: int = 0
    """Index into the report's environments."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.family, self.op, self.shape, self.candidate

    @property
    def met(self) -> bool | None:
        """Whether the target is reached, which `near` counts as; None without a time or a target."""
        if self.us is None or self.target_us is None:
            return None
        return self.us <= self.target_us or self.near

    @property
    def near(self) -> bool:
        """Slower than the target, which is a peer's own figure, by no more than 2 %."""
        if self.us is None or self.target_us is None or self.target_of is None:
            return False
        return self.target_us < self.us <= NEAR * self.target_us

    @property
    def spread(self) -> float:
        """How far apart the 20th and the 80th percentile are."""
        return 0.0 if self.p20 is None or self.p80 is None else self.p80 - self.p20


_ROW_FIELDS = {each.name for each in fields(Row)}


@dataclass
class Report:
    """Rows of one GPU, perhaps from several runs."""

    gpu: str
    environments: list[Environment] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, rows: Iterable[Row], environment: Environment) -> None:
        """Add rows of one run. They replace the rows of the same op, shape and candidate."""
        fresh = list(rows)
        if environment not in self.environments:
            self.environments.append(environment)
        index = self.environments.index(environment)
        replaced = {row.key for row in fresh}
        kept = [row for row in self.rows if row.key not in replaced]
        self.rows = kept + [replace(row, environment=index) for row in fresh]

    def merge(self, newer: Report, whole_ops: bool = True, timed: Callable[[str], bool] | None = None) -> None:
        """Add another run of the same GPU.

        whole_ops: the run has measured every shape of its ops; rows of their other shapes are dropped. timed: the
        candidates that the run was to time (default: all); rows of other candidates stay.
        """
        if newer.gpu != self.gpu:
            raise ValueError(f"rows of {newer.gpu} do not go into a report of {self.gpu}")
        ops, shapes = {row.key[:2] for row in newer.rows}, dict.fromkeys(row.key[:3] for row in newer.rows)

        def stays(row: Row) -> bool:
            if row.key[:3] in shapes:
                return timed is not None and not timed(row.candidate)
            return not (whole_ops and row.key[:2] in ops)

        before = dict.fromkeys(row.key[:3] for row in self.rows)
        order = [*shapes, *before] if whole_ops else [*before, *shapes]
        self.rows = [row for row in self.rows if stays(row)]
        for index, environment in enumerate(newer.environments):
            self.add([row for row in newer.rows if row.environment == index], environment)
        place = {key: index for index, key in reversed([*enumerate(order)])}
        kinds = ("ours", "torch", "peer")
        self.rows.sort(key=lambda row: (place[row.key[:3]], kinds.index(kind_of(row.candidate))))
        self._forget_unused()

    def _forget_unused(self) -> None:
        used = sorted({row.environment for row in self.rows})
        self.environments = [self.environments[index] for index in used]
        new = {old: index for index, old in enumerate(used)}
        rows = [replace(row, environment=new[row.environment]) for row in self.rows]
        self.rows = sorted(rows, key=lambda row: (row.family, row.op))  # shapes stay in the order of the definition

    def of_family(self, family: str) -> Report:
        """The rows of one family."""
        part = Report(self.gpu, list(self.environments), [row for row in self.rows if row.family == family])
        part._forget_unused()
        return part

    def write(self, path: Path) -> None:
        """Write JSON without empty fields; a write that fails leaves the old file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            fresh = Path(folder) / path.name
            fresh.write_text(self.to_json(), encoding="utf-8")
            os.replace(fresh, path)

    def to_json(self) -> str:
        rows = [{name: _short(value) for name, value in asdict(row).items() if value is not None} for row in self.rows]
        return json.dumps({"gpu": self.gpu, "environments": self.environments, "rows": rows}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Report:
        """From JSON. Raises ValueError for a file that is no report."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**{name: value for name, value in row.items() if name in _ROW_FIELDS}) for row in data["rows"]]
            return cls(data["gpu"], list(data["environments"]), rows)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of this harness: {error!r}") from None

    @classmethod
    def read_or_new(cls, path: Path, gpu: str) -> Report:
        """The report in a file, or an empty one where there is none. ValueError: the file holds something else."""
        found = cls.read(path) if path.exists() else cls(gpu)
        if found.gpu != gpu:
            raise ValueError(f"{path} holds rows of {found.gpu}, not of {gpu}")
        return found


@dataclass(frozen=True)
class Slower:
    """A row that takes longer than in the older report, by more than the noise of both measurements."""

    row: Row
    before: Row

    def __str__(self) -> str:
        new, old = self.row.us or 0.0, self.before.us or 0.0
        where = f"{self.row.family}:{self.row.op} {self.row.shape} {self.row.candidate}"
        noise = noise_us(self.row, self.before)
        return f"{where}: {old:.2f} -> {new:.2f} us ({(new / old - 1) * 100:+.1f} %, noise {noise:.2f} us)"


def noise_us(row: Row, before: Row) -> float:
    """The difference of two measurements that is not significant: both spreads, and the rise of an empty launch.

    The time of any launch, even of an empty one, depends on what the process has launched before.
    """
    launches = 0.0
    if row.empty_us is not None and before.empty_us is not None:
        launches = max(0.0, row.empty_us - before.empty_us)
    return row.spread + before.spread + launches


def slower(rows: Sequence[Row], before: Sequence[Row]) -> list[Slower]:
    """Rows that became slower than the row of the same name in `before` by more than the noise."""
    old = {row.key: row for row in before}
    found = []
    for row in rows:
        was = old.get(row.key)
        if row.us is None or was is None or was.us is None:
            continue
        if row.us - was.us > noise_us(row, was):
            found.append(Slower(row, was))
    return found


def file_name(gpu: str) -> str:
    """The name of a GPU's results file.

    >>> file_name("NVIDIA H100 80GB HBM3"), file_name("NVIDIA GeForce RTX 4090")
    ('h100.json', 'rtx_4090.json')
    """
    short = re.sub(r"\b(NVIDIA|GeForce|Tesla|\d+GB HBM\d\w*)\b", "", gpu)
    return f"{'_'.join(re.findall('[a-z0-9]+', short.lower())) or 'gpu'}.json"


def _short(value: Any) -> Any:
    """Round floats to four decimals, below the resolution of every timer here."""
    return round(value, 4) if isinstance(value, float) else value
