"""One run of the demo, from the request on the command line to the report after the text."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch

from kestrel_runtime import KestrelFallbackWarning, trace

from . import memory
from .cache import PagedCache
from .config import DecoderConfig, DemoError, preset
from .generate import DOCUMENT, Sampling, Text, check_request, encode, generate
from .model import Decoder
from .stores import STORES
from .weights import TINY_FILE, Weights, load, parameters, random

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for, checked."""

    preset: str
    prompt: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    dtype: str
    kv_cache: str
    experts: str
    model: Path | None
    context: int | None
    device: str | None

    def __post_init__(self) -> None:
        preset(self.preset)
        if not self.prompt:
            raise DemoError("--prompt: expected at least one character, got an empty prompt")
        if self.max_new_tokens < 1:
            raise DemoError(f"--max-new-tokens: expected at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise DemoError(f"--temperature: expected a number from 0 on, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise DemoError(f"--top-p: expected a number above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise DemoError(f"--seed: expected 0 to 2**63 - 1, got {self.seed}")
        _choice("--dtype", self.dtype, DTYPES)
        _choice("--kv-cache", self.kv_cache, STORES)
        _choice("--experts", self.experts, ("bf16", "fp8"))
        if self.context is not None and self.context < 1:
            raise DemoError(f"--context: expected at least 1, got {self.context}")
        if self.model is not None and self.preset != "tiny":
            raise DemoError(f"--model: expected no file with --preset {self.preset} (random weights), got {self.model}")

    def torch_device(self) -> torch.device:
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise DemoError(f"--device: expected cpu, cuda or cuda:N, got {self.device!r}") from None
        if device.type not in ("cpu", "cuda"):
            raise DemoError(f"--device: expected cpu, cuda or cuda:N, got {self.device!r}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise DemoError(f"--device: expected one of {torch.cuda.device_count()} GPUs here, got {self.device!r}")
        return device

    def tokens(self, config: DecoderConfig, prompt: list[int]) -> int:
        """How many tokens the cache holds, if the request fits into it."""
        check_request(config, [prompt], self.max_new_tokens)
        tokens = config.context if self.context is None else self.context
        if tokens > config.context:
            raise DemoError(f"--context: expected at most {config.context} (the model's), got {tokens}")
        needed = len(prompt) + self.max_new_tokens - 1
        if tokens < needed:
            raise DemoError(
                f"--context: expected a cache of at least {needed} tokens ({len(prompt)} of the prompt and "
                f"--max-new-tokens {self.max_new_tokens}), got {tokens}"
            )
        return tokens


def _choice(option: str, value: str, allowed: Mapping[str, object] | tuple[str, ...]) -> None:
    if value not in allowed:
        raise DemoError(f"{option}: expected one of {', '.join(allowed)}, got {value!r}")


def run(request: Request, out: TextIO, remarks: TextIO) -> None:
    """Writes prompt and text to `out` as the text comes, and what runs how to `remarks`."""
    device = request.torch_device()
    prompt = encode(request.prompt)
    weights, tokens = _weights(request, prompt, device)
    config = weights.config
    decoder = Decoder(weights, PagedCache(weights, tokens, kind=request.kv_cache))
    print(_heading(request, config, device), file=remarks, flush=True)

    text = Text(config)
    sampling = Sampling(request.temperature, request.top_p, request.seed)
    stop = DOCUMENT if config.bytes_in_bytes_out else None
    arrived = []
    with trace() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore", KestrelFallbackWarning)  # the report says it
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


def _weights(request: Request, prompt: list[int], device: torch.device) -> tuple[Weights, int]:
    dtype, fp8_experts = DTYPES[request.dtype], request.experts == "fp8"
    if request.preset == "tiny":
        weights = load(request.model or TINY_FILE, dtype, device, fp8_experts=fp8_experts)
        return weights, request.tokens(weights.config, prompt)
    config = preset(request.preset)
    tokens = request.tokens(config, prompt)
    memory.require(config, tokens, dtype, device, kv_cache=request.kv_cache, fp8_experts=fp8_experts)
    return random(config, dtype, device, seed=request.seed, fp8_experts=fp8_experts), tokens


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
        lines.append("random weights and no tokenizer: what follows are token numbers, good for timing only")
    return "\n".join(lines) + "\n"


def _report(prompt: int, started: float, arrived: list[float], counts: Mapping[str, Mapping[str, int]]) -> str:
    lines = [f"{prompt} tokens of prompt and the first new one in {arrived[0] - started:.2f} s"]
    if len(arrived) > 1:
        half = len(arrived) // 2  # on a GPU the first steps set up what the others use, a CUDA graph too
        lines.append(
            f"{len(arrived) - 1} more tokens in {arrived[-1] - arrived[0]:.2f} s: "
            f"{_rate(arrived):.1f} tokens per second, {_rate(arrived[half - 1 :]):.1f} in the second half"
        )
    for how, title in (("kernel", "ran as kernels"), ("reference", "ran by reference")):
        ops = [name.removeprefix("kestrel_") for name, count in sorted(counts.items()) if count[how]]
        lines.append(f"{title}: {', '.join(ops) or 'none'}")
    return "\n".join(lines)


def _rate(arrived: list[float]) -> float:
    return (len(arrived) - 1) / max(arrived[-1] - arrived[0], 1e-9)
