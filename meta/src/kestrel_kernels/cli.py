"""The command `kestrel-kernels`."""

from __future__ import annotations

import json
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


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
