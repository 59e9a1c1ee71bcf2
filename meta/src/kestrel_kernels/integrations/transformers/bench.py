"""`kestrel-kernels bench model`: generation speed of a model of transformers, beside transformers' own caches.

Weights are random: the speed of a decode step does not depend on their values.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
}
"""Published shapes, by name: model type and settings."""

WAYS = ("kestrel", "dynamic", "static")
WEIGHTS = ("bf16", "w4", "w4-head")
"""Of this library's rows; w4-head: the language head has 4 bits too."""
SETTLED = 8
"""New tokens before the rate is measured: set-up on first use, and the capture of the CUDA graph."""


class Clock:
    """A streamer that notes when each token is on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def build(name: str, device: torch.device, layers: int | None) -> Any:
    """A model in bf16 with random weights; `name` is one of CONFIGS or a path to a config.json or its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in CONFIGS:
        kind, settings = CONFIGS[name]
        config = AutoConfig.for_model(kind, **settings)
    elif Path(name).exists():
        config = AutoConfig.from_pretrained(name)
    else:
        raise ValueError(f"--config: expected one of {', '.join(CONFIGS)} or a path that exists, got {name}")
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def timed(run: Callable[[Clock], Any], batch: int, device: torch.device) -> dict[str, float | None]:
    """Tokens per second from the new token SETTLED on, milliseconds to the first one, peak memory."""
    if device.type == "cuda":
        gc.collect()  # of what still holds memory; slow in a process of many objects
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    clock, start = Clock(), time.perf_counter()
    run(clock)
    times = clock.times[1:]  # the prompt comes first
    steps = len(times) - 1 - SETTLED
    return {
        "tokens_per_second": batch * steps / (times[-1] - times[SETTLED]),
        "first_ms": 1e3 * (times[0] - start),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def failed(error: Exception) -> dict[str, Any]:
    """The figures of a candidate that failed: none, and the first line of the reason."""
    lines = str(error).strip().splitlines() or [""]
    return dict.fromkeys(("tokens_per_second", "first_ms", "peak_gib")) | {
        "error": f"{type(error).__name__}: {lines[0]}"
    }


def measure_rows(model: Any, options: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """Append a row for each candidate as soon as it is measured."""
    from . import apply, generate, quantize, restore

    vocabulary = model.config.get_text_config().vocab_size

    def measure(way: str, weights: str, kv_cache: str, batch: int, run: Callable[[Tensor, Clock], Any]) -> None:
        ids = torch.randint(1, vocabulary, (batch, options.prompt), device=device)
        found: dict[str, Any]
        try:
            if not options.once:
                timed(lambda clock: run(ids, clock), batch, device)  # compiles, and sets up on first use
            found = timed(lambda clock: run(ids, clock), batch, device)
        except Exception as error:
            found = failed(error)
        if way == "static":
            found["compiled"] = hasattr(model, "_compiled_call")
        rows.append({"way": way, "weights": weights, "batch": batch, "kv_cache": kv_cache, **found})
        print(line(rows[-1]), flush=True)

    new = options.new_tokens
    print(line(None))
    for way in options.ways:
        if way == "kestrel":
            continue
        more = {"cache_implementation": "static"} if way == "static" else {}
        for batch in options.batch:
            measure(
                way,
                "bf16",
                "auto",
                batch,
                lambda ids, clock: model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    do_sample=False,
                    streamer=clock,
                    **more,  # noqa: B023
                ),
            )
    for weights in options.weights if "kestrel" in options.ways else ():
        failure: Exception | None = None
        try:
            if weights != "bf16":
                quantize(model, head=weights == "w4-head")
            print(apply(model), file=sys.stderr)
        except Exception as error:
            failure = error

        def run(ids: Tensor, clock: Clock, failure: Exception | None = failure, **settings: Any) -> None:
            if failure is not None:
                raise failure
            generate(model, ids, streamer=clock, max_new_tokens=new, do_sample=False, eos_token_id=[], **settings)

        for batch in options.batch:
            for kv_cache in options.kv_cache:
                measure("kestrel", weights, kv_cache, batch, functools.partial(run, kv_cache=kv_cache))
        restore(model)


def line(row: dict[str, Any] | None) -> str:
    """A line of the table; None: its head."""
    if row is None:
        names = f"{'way':<10}{'weights':<9}{'KV cache':<10}{'batch':>5}"
        return f"{names}{'tokens/s':>12}{'first token':>14}{'peak memory':>14}"
    name = f"{row['way']:<10}{row['weights']:<9}{row['kv_cache']:<10}{row['batch']:>5}"
    if "error" in row:
        return f"{name}   failed: {row['error']}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
    first = f"{row['first_ms']:.0f} ms"
    note = "" if row.get("compiled", True) else "   (not compiled: transformers compiles on GPUs alone)"
    return f"{name}{row['tokens_per_second']:>12.1f}{first:>14}{memory:>14}{note}"


def machine(device: torch.device, revision: str | None) -> dict[str, Any]:
    import transformers

    from kestrel_runtime.bench.machine import environment, revision_of

    revision = revision or revision_of(Path(__file__).resolve().parent)
    if device.type == "cuda":
        found = environment(revision)
    else:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        found = {"gpu": None, "versions": {"torch": torch.__version__}, "git": revision, "date": date}
    found["versions"]["transformers"] = transformers.__version__
    return found


def _kept(path: Path | None) -> dict[str, Any]:
    """The entries of the file that will be written. Raises ValueError, before anything is timed, if it is another."""
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"--out: expected a JSON file of this command or a new one, got {path}")
    return found


def _check_places(options: argparse.Namespace) -> None:
    """Raises ValueError, before anything is timed, if a file that will be written cannot be."""
    for name, path in (("--out", options.out), ("--plot", options.plot)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ValueError(f"{name}: expected a file that can be written, got {path} ({error.strerror})") from None
    if options.plot is not None:
        if options.plot.suffix != ".svg":
            raise ValueError(f"--plot: expected an SVG file, got {options.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot: expected matplotlib, which is not installed")


def main(arguments: Sequence[str], *, prog: str) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--config", default="llama-3.1-8b", help=f"{', '.join(CONFIGS)}, or a path to a config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="sequences at a time (1 16)")
    parser.add_argument("--kv-cache", nargs="+", default=["auto"], choices=["auto", "fp8", "int8", "int4"])
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=WEIGHTS, help="of this library's rows (bf16)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="what is timed; static: compiled")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--new-tokens", type=int, default=64, help=f"more than {SETTLED + 1} (64)")
    parser.add_argument("--layers", type=int, help="fewer layers than the configuration says")
    parser.add_argument("--once", action="store_true", help="no run to warm up: the first token includes set-up")
    parser.add_argument("--revision", help="the revision that the JSON names, where there is no git checkout")
    parser.add_argument("--out", type=Path, help="a JSON file whose entry of this configuration and prompt is replaced")
    parser.add_argument("--plot", type=Path, help="an SVG file of this run's tokens/s; needs matplotlib")
    options = parser.parse_args(list(arguments))
    given = {"batch": min(options.batch), "prompt": options.prompt, "new-tokens": options.new_tokens}
    if options.layers is not None:
        given["layers"] = options.layers
    for name, value in given.items():
        least = SETTLED + 2 if name == "new-tokens" else 1
        if value < least:
            parser.error(f"--{name}: expected at least {least}, got {value}")
    try:
        kept = _kept(options.out)
        _check_places(options)
    except ValueError as error:
        parser.error(str(error))
    from transformers.utils import logging

    logging.set_verbosity_error()
    options.weights.sort(key=WEIGHTS.index)  # quantising cannot be undone
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here: the model runs on the CPU; --layers makes it smaller", file=sys.stderr, flush=True)
    try:
        model = build(options.config, device, options.layers)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        parser.error(str(error).partition("\n")[0])
    rows: list[dict[str, Any]] = []
    figures = {name: getattr(options, name) for name in ("prompt", "new_tokens", "layers")}
    figures = {"environment": machine(device, options.revision), **figures, "rows": rows}
    entry, status = f"{options.config}, prompt {options.prompt}", 0
    try:
        measure_rows(model, options, device, rows)
    except KeyboardInterrupt:
        status = 130
        print("interrupted: the rows measured until then are written", file=sys.stderr)
    if options.plot is not None and rows:
        from ..plot import draw

        draw({entry: figures}, options.plot)
    if options.out is not None and rows:
        options.out.write_text(json.dumps({**kept, entry: figures}, indent=1) + "\n", encoding="utf-8")
    return status
