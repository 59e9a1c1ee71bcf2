"""One run of the demo, from the request on the command line to the report after the text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TextIO

import torch

from kestrel_runtime import KestrelFallbackWarning, trace

from . import memory
from .cache import PagedCache
from .config import PRESETS, DecoderConfig, DemoError
from .generate import Sampling, Text, generate
from .model import Decoder
from .request import DOCUMENT, Request, encode
from .weights import TINY_FILE, load, parameters, random

REPORT_SECONDS = 5.0
"""Time between two remarks while random weights are drawn."""


def torch_device(name: str | None) -> torch.device:
    """The device of --device; without a name, a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")  # torch.device wraps an index beyond 127
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise DemoError(f"--device: expected one of {torch.cuda.device_count()} GPUs here, got {name!r}")
    return torch.device(name)


def run(request: Request, out: TextIO, remarks: TextIO) -> None:
    """Writes prompt and text to `out` as the text comes. Which ops ran how, and how fast, goes to `remarks`."""
    device = torch_device(request.device)
    prompt = encode(request.prompt)
    dtype, fp8_experts = getattr(torch, request.dtype), request.experts == "fp8"
    if request.preset == "tiny":
        weights = load(request.model or TINY_FILE, dtype, device, fp8_experts=fp8_experts)
        config = weights.config
        tokens = request.cache_tokens(config)
        print(_heading(request, config, device), file=remarks, flush=True)
    else:
        config = PRESETS[request.preset]
        tokens = request.cache_tokens(config)
        memory.require(config, tokens, dtype, device, kv_cache=request.kv_cache, fp8_experts=fp8_experts)
        print(_heading(request, config, device), file=remarks, flush=True)
        progress = Progress(remarks)
        weights = random(config, dtype, device, seed=request.seed, fp8_experts=fp8_experts, progress=progress)
        progress(f"prefill of {len(prompt)} tokens")
    decoder = Decoder(weights, PagedCache(weights, tokens, kind=request.kv_cache))

    text = Text(config)
    sampling = Sampling(request.temperature, request.top_p, request.seed)
    stop = DOCUMENT if config.bytes_in_bytes_out else None
    arrived = []
    with trace() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore", KestrelFallbackWarning)  # the report lists them
        out.write("".join(map(text.add, prompt[1:])) if config.bytes_in_bytes_out else "")
        out.flush()
        started = time.perf_counter()
        for [token] in generate(decoder, [prompt], request.max_new_tokens, sampling, stop=stop, graph=True):
            arrived.append(time.perf_counter())
            if token != stop:
                out.write(text.add(token))
                out.flush()
        out.write(text.end() + "\n")
        out.flush()
    print("\n" + _report(len(prompt), started, arrived, counts), file=remarks, flush=True)


class Progress:
    """Prints what is being done, at most every REPORT_SECONDS."""

    def __init__(self, remarks: TextIO) -> None:
        self._remarks = remarks
        self._printed = time.monotonic()

    def __call__(self, doing: str) -> None:
        if time.monotonic() - self._printed >= REPORT_SECONDS:
            print(f"{doing} ...", file=self._remarks, flush=True)
            self._printed = time.monotonic()


def _heading(request: Request, config: DecoderConfig, device: torch.device) -> str:
    count = parameters(config)
    size = f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
    cache = request.dtype if request.kv_cache == "auto" else request.kv_cache.upper()
    experts = "FP8" if request.experts == "fp8" else request.dtype
    lines = [f"{request.preset}: {size} parameters in {request.dtype}, KV cache in {cache}, experts in {experts}"]
    if device.type == "cuda":
        lines[0] += f", on {torch.cuda.get_device_name(device)}"
    else:
        why = "--device cpu" if torch.cuda.is_available() else "no GPU here"
        lines[0] += f", on the CPU ({why}: every op runs by its PyTorch reference)"
    if not config.bytes_in_bytes_out:
        lines.append("random weights and no tokenizer: the output is token numbers, for timing only")
    return "\n".join(lines) + "\n"


def _report(prompt: int, started: float, arrived: list[float], counts: Mapping[str, Mapping[str, int]]) -> str:
    lines = [f"{prompt} tokens of prompt and the first new one in {arrived[0] - started:.2f} s"]
    if len(arrived) > 1:
        half = len(arrived) // 2  # on a GPU the first steps set up libraries and the CUDA graph
        lines.append(
            f"{len(arrived) - 1} more tokens in {arrived[-1] - arrived[0]:.2f} s: "
            f"{_rate(arrived):.1f} tokens per second, {_rate(arrived[half - 1 :]):.1f} in the second half"
        )
    for how, title in (("kernel", "ran as kernels"), ("reference", "ran by reference")):
        ops = [name.removeprefix("kestrel_") for name, count in sorted(counts.items()) if count[how]]
        lines.append(f"{title}: {', '.join(ops) or 'none'}")
    return "\n".join(lines)


def _rate(arrived: Sequence[float]) -> float:
    """Tokens per second between the first and the last of these times."""
    return (len(arrived) - 1) / max(arrived[-1] - arrived[0], 1e-9)
