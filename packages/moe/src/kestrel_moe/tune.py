"""The search of ``kestrel-kernels tune moe``: times the valid variants of a layer on the GPU present."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kestrel_runtime.bench.show import number
from kestrel_runtime.bench.timer import Set, time_candidates

from . import __version__, tuned, variants
from .fused_experts import by_variant
from .variants import Layer, Variant

DTYPES = ("bf16", "fp16", "fp8")
TOKENS = tuple(2**i for i in range(15))  # 1 to 16384
REPLAYS = 7
_SETS = 8  # of tokens and routing, in turn
_CLEARLY = 0.005  # a variant replaces the built-in choice if it is faster by more than this fraction

Progress = Callable[[str], None]


class TuneError(Exception):
    """The search cannot start; the message says why."""


@dataclass(frozen=True)
class Request:
    """A layer and the numbers of tokens to time it for."""

    experts: int
    hidden: int
    inner: int
    topk: int
    dtype: str = "bf16"
    tokens: Sequence[int] = TOKENS
    out: Path | None = None
    """The file to write; None: the user's file of this GPU."""

    def check(self) -> None:
        """Raises TuneError for sizes that no layer has or no kernel takes.

        >>> Request(64, 2048, 1024, 8, dtype="int3").check()
        Traceback (most recent call last):
        kestrel_moe.tune.TuneError: dtype: expected one of bf16, fp16, fp8, got 'int3'
        """
        if self.dtype not in DTYPES:
            raise TuneError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("experts", "hidden", "inner", "topk"):
            if getattr(self, name) < 1:
                raise TuneError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("hidden", "inner"):
            if getattr(self, name) % 16:
                raise TuneError(f"{name}: expected a multiple of 16, got {getattr(self, name)}")
        if self.topk > self.experts:
            raise TuneError(f"topk: expected at most the {self.experts} experts, got {self.topk}")
        if not self.tokens or min(self.tokens) < 1:
            raise TuneError(f"tokens: expected numbers of at least 1, got {list(self.tokens)}")

    def layer(self, tokens: int, hopper: bool) -> Layer:
        return Layer(tokens, self.experts, self.topk, self.hidden, self.inner, self.dtype, hopper)


@dataclass(frozen=True)
class Found:
    """The figures of one number of tokens, in microseconds."""

    tokens: int
    us: Mapping[str, float]
    """For each variant that ran."""
    rule: str
    """The variant that is chosen without a tuned file."""

    @property
    def best(self) -> str:
        """The fastest variant; the built-in choice unless another one is clearly faster."""
        fastest = min(self.us, key=lambda name: self.us[name])
        kept = self.rule in self.us and self.us[self.rule] <= self.us[fastest] * (1 + _CLEARLY)
        return self.rule if kept else fastest

    @property
    def gain(self) -> float | None:
        """The speedup over the built-in choice, as a fraction; None if that variant failed.

        >>> Found(8, {"aligned 8": 110.0, "in_kernel 8": 100.0}, "aligned 8").gain
        0.1
        """
        return round(self.us[self.rule] / self.us[self.best] - 1, 4) if self.rule in self.us else None


def entry(found: Sequence[Found]) -> dict[str, Any]:
    """The entry of a layer in the tuned file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "revision": f"kestrel-moe {__version__}",
        "tokens": {
            str(row.tokens): {"variant": row.best, "us": {name: round(us, 2) for name, us in row.us.items()}}
            for row in found
        },
    }


def _inputs(request: Request) -> Callable[[int], list[Set]]:
    """A function that makes the arguments of by_variant, without the variant, for a number of tokens."""
    e, h, i, dtype = request.experts, request.hidden, request.inner, request.dtype
    kind = torch.float16 if dtype == "fp16" else torch.bfloat16
    element = 1 if dtype == "fp8" else 2
    l2 = torch.cuda.get_device_properties().L2_cache_size
    copies = -(-3 * l2 // (3 * e * h * i * element))  # of the weights, so that no call finds its own in L2

    def weight(rows: int, columns: int) -> torch.Tensor:
        w = torch.randn(e, rows, columns, dtype=kind, device="cuda") / columns**0.5
        return w.mul_(64).to(torch.float8_e4m3fn) if dtype == "fp8" else w

    layers = [(weight(2 * i, h), weight(h, i)) for _ in range(min(copies, _SETS))]
    scales = [torch.full((e,), 1 / 64, device="cuda")] * 2 if dtype == "fp8" else [None, None]

    def make(tokens: int) -> list[Set]:
        sets: list[Set] = []
        for n in range(_SETS if tokens < 4096 else 2):
            hidden = torch.randn(tokens, h, dtype=kind, device="cuda")
            weights = torch.rand(tokens, request.topk, device="cuda").softmax(-1)
            ids = torch.rand(tokens, e, device="cuda").topk(request.topk).indices.to(torch.int32)
            sets.append((hidden, *layers[n % len(layers)], weights, ids, "silu_and_mul", *scales))
        return sets

    return make


def search(request: Request, progress: Progress) -> Iterator[Found]:
    """Time every valid variant for each number of tokens. Raises TuneError if none of them runs."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    make = _inputs(request)
    for tokens in sorted(set(request.tokens)):
        layer = request.layer(tokens, hopper)
        calls = {str(each): functools.partial(by_variant, each) for each in variants.valid_variants(layer)}
        progress(f"{tokens} tokens, {len(calls)} variants")
        timed = time_candidates(calls, make(tokens), REPLAYS)
        us = {name: each.figures.us for name, each in timed.items() if each.figures is not None}
        if not us:
            raise TuneError(f"{tokens} tokens: no variant runs: {next(iter(timed.values())).failed}")
        yield Found(tokens, us, str(variants.by_rule(layer)))


def table(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Tokens, the rule's variant and its time, the tuned variant and its time, and the gain."""
    return [
        (
            str(row.tokens),
            row.rule,
            number(row.us.get(row.rule)),
            row.best,
            number(row.us[row.best]),
            "" if row.gain is None else f"{row.gain:.1%}",
        )
        for row in found
    ]


HEADINGS = ("tokens", "by rule", "us", "tuned", "us", "gain")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on a terminal with rich installed, plain lines elsewhere."""
    try:
        from rich.progress import Progress as Bar
    except ImportError:
        yield print
        return
    if not sys.stdout.isatty():
        yield functools.partial(print, flush=True)
        return
    with Bar() as bar:
        task = bar.add_task("start", total=total)
        started = -1

        def advance(what: str) -> None:
            nonlocal started
            started += 1
            bar.update(task, description=what, completed=started)

        yield advance
        bar.update(task, completed=total)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [HEADINGS, *rows]) for i in range(len(HEADINGS))]
    for row in [HEADINGS, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def run(request: Request) -> Path:
    """Search, write the file, and print the gains; returns the file. Ctrl-C keeps what was measured until then.

    Raises TuneError for a wrong request, without a GPU, and for a file that cannot be written.
    """
    request.check()
    if not torch.cuda.is_available():
        raise TuneError("tune needs a CUDA GPU, and PyTorch finds none here")
    gpu = torch.cuda.get_device_name()
    try:
        path = request.out or tuned.user_folder() / tuned.file_name(gpu)
        if path.exists() and tuned.read(path)["gpu"] != gpu:
            raise TuneError(f"{path}: expected a file of {gpu}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise TuneError(f"{path.parent}: expected a folder that can be written")
    except (OSError, tuned.TunedFileError) as error:
        raise TuneError(str(error)) from None
    found: list[Found] = []
    try:
        with _progress(len(set(request.tokens))) as progress:
            for row in search(request, progress):
                found.append(row)
    finally:
        if found:
            _print_table(table(found))
            try:
                tuned.write(path, gpu, request.layer(1, hopper=False).sizes, entry(found))
            except (OSError, tuned.TunedFileError) as error:
                raise TuneError(f"{path}: {error}") from None
            print(f"written: {path}")
    return path


__all__ = ["DTYPES", "TOKENS", "Found", "Request", "TuneError", "Variant", "entry", "run", "search", "table"]
