"""The definition of a timed op: ``benchmarks/<op>.py`` of a family, loaded into a :class:`Benchmark`.

Such a file holds

    TARGETS     {shape name: target in microseconds on an H200, or None}
    make        (shape, count) -> list of `count` tuples of arguments, random, including the tensors to write
    set_bytes   (shape) -> bytes of one tuple that must not be in L2 when the tuple repeats
    traffic     (shape) -> bytes that one call moves: each input once, each output once
    operations  (shape) -> floating-point operations of one call, 0 if it is memory-bound
    candidates  () -> {name: function of one tuple}: "kestrel" first, then "torch", "torch.compile", then peers that
                can be imported

and optionally

    bare        () -> function of one tuple: the entry point of the binary alone, for the host column
    WARM        True if the inputs are normally in L2
    LAUNCHES    the number of launches in the limit (1)
    PRECISION   "bf16" or "fp8": the tensor core rate in the limit ("bf16")
    TARGET_OF   {shape name: the peer whose own figure the target is}; within 2 % of it counts as met
    result      (arguments, returned) -> list of tensors: the result of a call, from what it wrote and returned. With it
                every candidate is compared with ours before it is timed (:mod:`.agreement`)
    TOLERANCE   the largest difference of a result from ours, relative to its norm (0.02)

The file is beside the family's sources or inside its wheel. Code that several definitions share is a module beside them
(a file without TARGETS), which they import by its bare name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Call = Callable[..., object]
"""A candidate: called with the members of one set."""
Set = tuple[Any, ...]

MODULES = "kestrel_benchmarks_"
OURS, TORCH = "kestrel", "torch"


@dataclass(frozen=True)
class Benchmark:
    """One op to time."""

    family: str
    op: str
    targets: dict[str, float | None]
    make: Callable[[str, int], Sequence[Set]]
    set_bytes: Callable[[str], int]
    candidates: Callable[[], dict[str, Call]]
    traffic: Callable[[str], int] | None = None
    operations: Callable[[str], int] | None = None
    bare: Callable[[], Call] | None = None
    warm: bool = False
    launches: float = 1
    precision: str = "bf16"
    target_of: dict[str, str] = field(default_factory=dict)
    result: Callable[[Set, Any], Sequence[torch.Tensor]] | None = None
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        if unknown := set(self.target_of) - set(self.targets):
            raise ValueError(f"TARGET_OF names {sorted(unknown)}, which TARGETS does not")

    @property
    def name(self) -> str:
        return f"{self.family}:{self.op}"


@dataclass(frozen=True)
class Source:
    """The file of one definition."""

    family: str
    op: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.family}:{self.op}"


def kind_of(candidate: str) -> str:
    """ "ours", "torch" or "peer"."""
    if candidate.startswith(OURS):
        return "ours"
    return "torch" if candidate.partition(".")[0].partition("_")[0] == TORCH else "peer"


_peers = ContextVar("peers", default=True)
_compiled: list[bool] = []  # not empty once `compiled` has compiled; a first reset takes seconds


@contextlib.contextmanager
def importing_peers(wanted: bool) -> Iterator[None]:
    """Whether `peer` imports anything inside the block: some libraries take many seconds to import."""
    before = _peers.set(wanted)
    try:
        yield
    finally:
        _peers.reset(before)


def peer(module: str) -> Any:
    """A module of another library for `candidates`, or None where it is not installed or no peer is timed.

    A library that is installed but cannot be imported (built for another torch, say) gives a warning and None.
    """
    if not _peers.get():
        return None
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            return None
        reason: Exception = error
    except Exception as error:
        reason = error
    warnings.warn(f"{module} is not timed: {type(reason).__name__}: {reason}", RuntimeWarning, stacklevel=2)
    return None


def compiled(function: Call, **options: Any) -> Call:
    """`function` under torch.compile, for `candidates`. The compiler is imported at the first call."""

    @functools.cache
    def ready() -> Call:
        _compiled.append(True)
        return torch.compile(function, **options)

    return lambda *arguments: ready()(*arguments)


def forget_compiled() -> None:
    """Reset torch.compile for the next shape: it stops compiling a function after some shapes."""
    if _compiled:
        torch._dynamo.reset()


def load_module(source: Source) -> ModuleType:
    """Run a definition's file. It imports the family and may raise what that raises."""
    spec = importlib.util.spec_from_file_location(f"{MODULES}{source.family}_{source.op}", source.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source.path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses find their module here
    with _neighbours_importable(source.path.parent):
        spec.loader.exec_module(module)
    return module


def load(source: Source) -> Benchmark:
    """The definition as data. Raises AttributeError where a part is missing."""
    module = load_module(source)
    return Benchmark(
        family=source.family,
        op=source.op,
        targets=dict(module.TARGETS),
        make=module.make,
        set_bytes=module.set_bytes,
        candidates=module.candidates,
        traffic=getattr(module, "traffic", None),
        operations=getattr(module, "operations", None),
        bare=getattr(module, "bare", None),
        warm=bool(getattr(module, "WARM", False)),
        launches=getattr(module, "LAUNCHES", 1),
        precision=getattr(module, "PRECISION", "bf16"),
        target_of=dict(getattr(module, "TARGET_OF", {})),
        result=getattr(module, "result", None),
        tolerance=getattr(module, "TOLERANCE", 0.02),
    )


def discover(checkout: Path | None = None) -> list[Source]:
    """Every definition of a checkout's packages, or of the families that can be imported."""
    folders = _folders_of(checkout) if checkout else _folders_of_families()
    return [
        Source(family, path.stem, path)
        for family, folder in sorted(folders.items())
        for path in sorted(folder.glob("*.py"))
        if re.search(r"^TARGETS\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def select(sources: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """The sources named ``family`` or ``family:op``, each once, in the order of the names; without names, all.

    Raises ValueError for an unknown name.
    """
    chosen: dict[Source, None] = {}
    for name in names:
        found = [source for source in sources if name in (source.family, source.name)]
        if not found:
            known = ", ".join(source.name for source in sources) or "none"
            raise ValueError(f"no benchmark is called {name!r}; there are: {known}")
        chosen.update(dict.fromkeys(found))
    return list(chosen) if names else list(sources)


@contextlib.contextmanager
def _neighbours_importable(folder: Path) -> Iterator[None]:
    """Modules in `folder` can be imported inside the block; afterwards their names are free for other families."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == folder and not name.startswith(MODULES):
                del sys.modules[name]


def _folders_of(checkout: Path) -> dict[str, Path]:
    return {folder.parent.name: folder for folder in checkout.glob("packages/*/benchmarks")}


def _folders_of_families() -> dict[str, Path]:
    found = {}
    for module in pkgutil.iter_modules():
        if module.ispkg and module.name.startswith("kestrel_"):
            spec = importlib.util.find_spec(module.name)
            if spec is None or spec.origin is None:
                continue
            package = Path(spec.origin).parent
            places = [package / "benchmarks"]
            if package.parent.name == "src":  # the source tree: packages/norm/src/kestrel_norm
                places.append(package.parents[1] / "benchmarks")
            for place in places:
                if place.is_dir():
                    found[module.name.removeprefix("kestrel_")] = place
                    break
    return found
