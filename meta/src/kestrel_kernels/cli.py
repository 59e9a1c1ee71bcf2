"""The command `kestrel-kernels`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .demo.cli import generate

app = typer.Typer(
    name="kestrel-kernels",
    help="Fused GPU kernels for LLM and VLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Versions, driver and GPU, what each binary holds, and how every op runs here."""
    from .info import collect, lines

    found = collect()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for line in lines(found):
        print(line)


Names = Annotated[
    list[str] | None, typer.Argument(metavar="[FAMILY[:OP]]...", help="norm, or norm:rms_norm; default: everything.")
]
Peers = Annotated[bool, typer.Option("--peers", help="Time FlashInfer, vLLM, quack and Liger too, where installed.")]
OursOnly = Annotated[bool, typer.Option("--ours-only", help="Leave PyTorch out.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Time this candidate alone (kestrel, torch, ...); may be given several times."),
]
Shapes = Annotated[list[str] | None, typer.Option("--shape", help="Only this shape; may be given several times.")]
Replays = Annotated[int, typer.Option(min=2, help="Samples of every figure; what takes long gets fewer, at least 5.")]
Out = Annotated[Path | None, typer.Option(help="Write the rows here, as JSON; rows of other ops in it stay.")]
Against = Annotated[
    Path | None, typer.Option(help="A file of --out: print what became slower than there; then exit 1.")
]


@app.command()
def bench(
    names: Names = None,
    peers: Peers = False,
    ours_only: OursOnly = False,
    only: Only = None,
    shape: Shapes = None,
    replays: Replays = 15,
    out: Out = None,
    against: Against = None,
) -> None:
    """Time ops on the GPU present, beside PyTorch and other libraries.

    Microseconds per call inside a CUDA graph, with the inputs out of L2 unless a row says "warm": the median of the
    replays and where the middle 60 % of them lie. "of limit" compares with what the GPU could do at all, where its
    rates are known. The host column is an eager call without a graph / the bare entry point of the binary.
    """
    from kestrel_runtime.bench.command import BenchError, Options, run

    candidates = "ours" if ours_only else "peers" if peers else "torch"
    options = Options(
        names=names or (),
        shapes=shape,
        candidates=candidates,
        only=only,
        replays=replays,
        out=out,
        against=against,
    )
    try:
        status = run(options)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if status:
        raise typer.Exit(status)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
