"""The command `kestrel-kernels generate`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

PROMPT = 'class Queue:\n    """A queue of jobs."""\n\n    def __init__(self'

Preset = Annotated[str, typer.Option(help="tiny writes Python; moondream3 has its sizes, random weights, for speed.")]
Prompt = Annotated[str, typer.Option(help="What the text begins with.", show_default=False)]
NewTokens = Annotated[int, typer.Option(help="Stop after so many tokens, if the text has not ended.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of tokens with this probability.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same text.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float32 or float16.")]
KVCache = Annotated[
    str, typer.Option(help="auto (the dtype), fp8 (scale per head), int8 (per token and head), int4 (KIVI).")
]
Experts = Annotated[str, typer.Option(help="bf16 is the dtype; fp8 quantises the experts' weights when they load.")]
Model = Annotated[Path | None, typer.Option(help="A file that tools/train_tiny.py wrote, instead of the one here.")]
Context = Annotated[int | None, typer.Option(help="Tokens that the cache holds; default and most: the model's.")]
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

    Prompt and text go to stdout, what ran how and how fast to stderr. A request that does not fit (an empty prompt, a
    prompt longer than the context leaves room for, a cache too small) is refused, never truncated. Without a GPU every
    op runs by its PyTorch reference.
    """
    try:
        import torch

        from kestrel_runtime import UnsupportedError

        from .config import DemoError
        from .run import Request, run

        try:
            request = Request(
                preset=preset,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                dtype=dtype,
                kv_cache=kv_cache,
                experts=experts,
                model=model,
                context=context,
                device=device,
            )
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that the model writes
            run(request, sys.stdout, sys.stderr)
        except (DemoError, UnsupportedError, torch.OutOfMemoryError) as error:
            print(f"error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
            raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of stdout has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
