"""The command `kestrel-kernels`. What a subcommand needs is imported when it runs, torch too."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .demo.cli import generate

BACKENDS = ("auto", "kernel", "reference")
"""Values of KESTREL_BACKEND, checked here because kestrel_runtime imports torch before it checks."""

app = typer.Typer(
    name="kestrel-kernels",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"kestrel-kernels {__version__}")
        raise typer.Exit


@app.callback()
def check_environment(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fused GPU kernels for LLM and VLM inference."""
    backend = os.environ.get("KESTREL_BACKEND", "auto")
    if backend not in BACKENDS:
        message = f"environment variable KESTREL_BACKEND: expected one of {', '.join(BACKENDS)}, got {backend!r}"
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Versions, driver and GPU, the contents of each binary, and how every op runs here."""
    from .info import collect, lines

    found = collect()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for line in lines(found):
        print(line)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Time ops on the GPU present, or with `bench model` a whole model; `bench --help`, `bench model --help`."""
    if context.args[:1] == ["model"]:
        try:
            from .integrations.transformers.bench import main as of_model
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            print("error: bench model: expected transformers, as the extra [transformers] installs it", file=sys.stderr)
            raise typer.Exit(2) from None
        raise typer.Exit(of_model(context.args[1:], prog="kestrel-kernels bench model"))
    from kestrel_runtime.bench.command import main as run

    raise typer.Exit(run(context.args, prog="kestrel-kernels bench"))


tuners = typer.Typer(no_args_is_help=True, help="Search for the fastest variants of an op on the GPU present.")
app.add_typer(tuners, name="tune")


class TunedDtype(str, enum.Enum):
    """Dtypes of expert weights."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


def token_counts(words: str) -> list[int]:
    """Numbers of 1 to 2**31 - 1, separated by commas."""
    given = [word.strip() for word in words.split(",")]
    counts = [int(word) if word.isdecimal() and len(word) <= 10 else 0 for word in given]
    if not all(0 < count < 2**31 for count in counts):
        shown = repr(words if len(words) <= 80 else words[:77] + "...")
        raise typer.BadParameter(f"expected numbers of at least 1, below 2**31, separated by commas, got {shown}")
    return counts


@tuners.command("moe")
def tune_moe(
    experts: Annotated[int, typer.Option(min=1, help="Experts on this GPU.")],
    hidden: Annotated[int, typer.Option(min=16, help="Width of the tokens.")],
    inner: Annotated[int, typer.Option(min=16, help="Width between the two projections.")],
    topk: Annotated[int, typer.Option(min=1, help="Experts of each token.")],
    dtype: Annotated[TunedDtype, typer.Option(help="Of the weights.")] = TunedDtype.bf16,
    tokens: Annotated[
        str, typer.Option(callback=lambda words: words and token_counts(words) and words, help="For example 1,8,64.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The file to write; by default the user's file of this GPU.")] = None,
) -> None:
    """Time the valid variants of fused_experts for a layer, and remember the fastest for each number of tokens."""
    from kestrel_moe import tune

    counts = token_counts(tokens) if tokens else tune.TOKENS
    try:
        tune.run(tune.Request(experts, hidden, inner, topk, dtype.value, counts, out))
    except tune.TuneError as error:
        print(f"error: tune moe: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the console script."""
    status: int | str | None = 0
    if sys.stderr is None:  # closed: print() would write to stdout instead
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        print("error: stdout is closed", file=sys.stderr)
        sys.exit(1)
    try:
        try:
            app()
        except SystemExit as error:
            status = error.code
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a pipe without a reader
        discard_output()
        if error.errno != errno.EPIPE:
            with contextlib.suppress(OSError):
                print(f"error: {error.strerror or error}", file=sys.stderr, flush=True)
        status = 1
    sys.exit(status)


def discard_output() -> None:
    """Discard the buffered rest of stdout and stderr, which the interpreter would fail to flush at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(devnull, stream.fileno())


if __name__ == "__main__":
    main()
