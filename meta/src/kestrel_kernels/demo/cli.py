"""The command `kestrel-kernels generate`. torch is imported when it runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

PROMPT = 'class Queue:\n    """A queue of jobs."""\n\n    def __init__(self'

Preset = Annotated[str, typer.Option(help="tiny writes Python; moondream3 has random weights, for timing.")]
Prompt = Annotated[str, typer.Option(help="The beginning of the text.", show_default=False)]
NewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of tokens with this probability.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same text.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float32 or float16.")]
KVCache = Annotated[
    str, typer.Option(help="auto (the dtype), fp8 (scale per head), int8 (per token and head), int4 (KIVI).")
]
Experts = Annotated[str, typer.Option(help="bf16 is the dtype; fp8 quantises the experts' weights when they load.")]
Model = Annotated[Path | None, typer.Option(help="A file that tools/train_tiny.py wrote; default: the one shipped.")]
Context = Annotated[int | None, typer.Option(help="Tokens that the cache holds; default: the model's context.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")]


def generate(
    preset: Preset = "tiny",
    prompt: Prompt = PROMPT,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    kv_cache: KVCache = "auto",
    experts: Experts = "bf16",
    model: Model = None,
    context: Context = None,
    device: Device = None,
) -> None:
    """Write text with a small decoder made of this library's ops.

    Prompt and text go to stdout. Which ops ran as kernels, and tokens per second, go to stderr. A request that does
    not fit (an empty prompt, a prompt too long for the context, a cache too small) is refused, never truncated.
    Without a GPU every op runs by its PyTorch reference.
    """
    try:
        status = write_text(locals())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = 130
    raise typer.Exit(status)


def write_text(options: Mapping[str, Any]) -> int:
    """The exit status. A request with a wrong value is refused before torch is imported."""
    from .config import DemoError
    from .request import Request

    try:
        request = Request(**options)
        import torch

        from kestrel_runtime import UnsupportedError

        from .run import run
    except DemoError as error:
        return refuse(error)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that the model writes
    try:
        run(request, sys.stdout, sys.stderr)
    except (DemoError, UnsupportedError, torch.OutOfMemoryError) as error:
        return refuse(error)
    return 0


def refuse(error: Exception) -> int:
    print(f"error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
    return 2
