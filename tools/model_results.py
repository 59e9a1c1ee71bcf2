"""Measures the demo's model, and writes what was measured into meta/README.md and meta/ENGINES.md.

    python tools/model_results.py perplexity     bits per held-out byte of `tiny` with every kind of KV cache
    python tools/model_results.py speed          tokens per second and where a decode step's time goes; needs a GPU
    python tools/model_results.py prompt         milliseconds from a prompt to the first new token
    python tools/model_results.py tables         writes the tables; with --check says whether they are current

Figures go to meta/results/<device>.json (or --out). A run replaces all figures of its kind. The tables are never edited
by hand. The held-out text is the part of Python's standard library that tools/train_tiny.py does not train on.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from model_tables import CONTEXT, KV_CACHES, NAMES, RESULTS, ROOT, WAYS, Json, microseconds, tables

PASSES = (16, 32, 48, 63, 64)
"""The ends of the decoder's passes over a page of 64 tokens. The last token completes the page, which quantises its
INT4 keys, so it has a pass of its own. Every token then sees the cache that it sees when decoding token by token."""

IN_A_GRAPH = 8
"""Repetitions of the work in a timed graph, because a replay itself costs some microseconds."""


# -- perplexity --------------------------------------------------------------------------------------------------------


def windows_of(data: bytes, count: int, length: int) -> Any:
    """`count` windows of length + 1 bytes, spread evenly over the text: int64 [count, length + 1]."""
    import torch

    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    starts = torch.linspace(0, len(text) - length - 1, count).long()
    return text[starts[:, None] + torch.arange(length + 1)]


def teacher_forced(weights: Any, kind: str, windows: Any, ends: list[int]) -> Any:
    """Logits [W, L, V] for the first L bytes of every window [W, L + 1], computed in passes that end at `ends`."""
    import torch

    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.model import Decoder, Step

    count, length = windows.shape[0], windows.shape[1] - 1
    windows = windows.to(weights.device)
    decoder = Decoder(weights, PagedCache(weights, count * (length + 63), kind=kind, sequences=count))
    table = decoder.cache.reserve([length] * count)
    parts = []
    for start, end in pairwise([0, *ends]):
        positions = torch.arange(start, end, device=weights.device).repeat(count, 1)
        logits = decoder(windows[:, start:end].flatten(), Step.decode(table, positions))
        parts.append(logits.view(count, end - start, -1))
    return torch.cat(parts, dim=1)


def ends_of_passes(length: int) -> list[int]:
    ends = [page + end for page in range(0, length, 64) for end in PASSES]
    return [end for end in ends if end < length] + [length]


def in_4_bits(weights: Any, layers: str) -> Any:
    """The same decoder with 4-bit weights in `layers`, of model_tables.WEIGHTS.

    Router and experts have no kernel for 4-bit weights: theirs are rounded to 4 bits and stay in bf16.
    """
    import dataclasses

    from kestrel_kernels.demo.weights import Experts, with_4_bit_layers
    from kestrel_quant import pack_w4

    def rounded(weight: Any) -> Any:
        columns = weight.shape[-1]
        packed = pack_w4(weight.reshape(-1, columns), math.gcd(columns, 128), symmetric=False)
        return packed.dequantize().view(weight.shape)

    def layer(whole: Any) -> Any:
        routed = whole.feed_forward
        if not isinstance(routed, Experts):
            return whole
        router = dataclasses.replace(routed.router, weight=rounded(routed.router.weight))
        routed = dataclasses.replace(routed, router=router, w1=rounded(routed.w1), w2=rounded(routed.w2))
        return dataclasses.replace(whole, feed_forward=routed)

    packed = with_4_bit_layers(weights, head=layers != "w4")
    return packed if layers != "w4-all" else dataclasses.replace(packed, layers=tuple(map(layer, packed.layers)))


def compared(weights: Any, windows: Any) -> Iterator[Json]:
    """Compare the kinds of KV cache, over windows that start without context.

    The last rows have a bf16 cache and 4-bit weights in more and more layers, as model_tables.WEIGHTS says. Each row
    has the bits per byte, the relative increase of perplexity over bf16, and the Kullback-Leibler divergence from the
    predictions with bf16, in nats per byte. The divergence depends less on the text than the perplexity does.
    """
    from torch.nn import functional as F

    expected, exact = windows[:, 1:].to(weights.device), None
    for layers, kind in WAYS:
        decoding = weights if layers == "bf16" else in_4_bits(weights, layers)
        logits = teacher_forced(decoding, kind, windows, ends_of_passes(expected.shape[1]))
        found = logits.double().log_softmax(-1)
        loss = float(F.nll_loss(found.flatten(0, 1), expected.flatten()))
        if exact is None:
            exact, of_exact = found, loss
        divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
        cost = math.expm1(loss - of_exact)
        yield {
            "weights": layers,
            "kv_cache": kind,
            "bits_per_byte": loss / math.log(2),
            "cost": cost,
            "divergence": divergence,
        }


def perplexity(options: argparse.Namespace) -> Json:
    import torch
    from train_tiny import corpus, modules

    from kestrel_kernels.demo.weights import TINY_FILE, load
    from kestrel_runtime import trace

    device, data = torch.device(options.device), corpus(held=True)
    weights = load(TINY_FILE, torch.bfloat16, device)
    windows = windows_of(data, options.windows, weights.config.context)
    rows = compared(weights, windows)
    found: list[Json] = []
    for _ in WAYS:
        with trace() as counts:
            row = next(rows)
        served = counts["kestrel_attention.flash_attn_with_kvcache"]
        found.append({**row, "attention": "reference" if served["reference"] else "kernel"})
        print(
            f"{row['weights']:7} {row['kv_cache']:5} {row['bits_per_byte']:.5f} bits per byte, "
            f"perplexity {row['cost']:+.4%}, diverges by {row['divergence']:.6f} nats, "
            f"attention by {found[-1]['attention']}",
            flush=True,
        )
    return {
        "windows": options.windows,
        "bytes": windows[:, 1:].numel(),
        "text": {"sha256": hashlib.sha256(data).hexdigest(), "modules": len(list(modules(held=True)))},
        "rows": found,
    }


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> Json:
    """Tokens per second of one sequence, with kernels and references, graphs and eager; and the time of each op."""
    import torch

    from kestrel_runtime import backend, trace

    device = torch.device(options.device)
    ways = [("fp8", "auto", "kernel", True), *(("bf16", kind, "kernel", True) for kind in options.kv_cache)]
    ways += [
        ("bf16", "auto", how, graph) for how, graph in (("reference", True), ("kernel", False), ("reference", False))
    ]
    rows, weights, of = [], None, None
    for experts, kind, how, graph in ways:
        if experts != of:
            weights = None  # frees the memory first
            weights, of = weights_with(options.preset, experts, device), experts
        tokens = options.tokens if graph else max(16, options.tokens // 4)
        with backend("reference") if how == "reference" else nullcontext(), trace() as counts:
            rate, slow, fast = tokens_per_second(weights, kind, tokens, graph=graph)
        row = {"experts": experts, "kv_cache": kind, "ops": how, "by_reference": by_reference(counts), "graph": graph}
        rows.append({**row, "tokens": tokens, "tokens_per_second": rate, "p20": slow, "p80": fast})
        way = f"{options.preset} experts {experts:4} cache {NAMES[kind]:4} {how:9} {'graph' if graph else 'eager'}"
        print(f"{way} {rate:8.1f} tokens/s", flush=True)
    steps = [{"kv_cache": kind, **parts_of_a_step(weights, kind)} for kind in options.parts]
    for step in steps:
        print(f"{options.preset} {NAMES[step['kv_cache']]} step {microseconds(step)}")
        for part in step["parts"]:
            print(f"  {part['calls']:4} {part['op']:24} {part['runs']:9} {microseconds(part)}")
    return {"rows": rows, "steps": steps}


def weights_with(preset: str, experts: str, device: Any) -> Any:
    """Weights in bf16, with experts in "bf16" or "fp8"."""
    import torch

    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.weights import TINY_FILE, load, random

    if preset == "tiny":
        return load(TINY_FILE, torch.bfloat16, device, fp8_experts=experts == "fp8")
    return random(PRESETS[preset], torch.bfloat16, device, fp8_experts=experts == "fp8")


def by_reference(counts: Any) -> list[str]:
    """The ops of a trace that ran by reference."""
    return sorted(op.split(".")[1] for op, served in counts.items() if served["reference"])


def tokens_per_second(weights: Any, kind: str, tokens: int, *, graph: bool) -> tuple[float, float, float]:
    """Tokens per second from the median time between two tokens, with the 20th and the 80th percentile.

    The first half of the tokens is warm-up. Top-p is off, because its reference cannot be captured.
    """
    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.generate import Sampling, generate
    from kestrel_kernels.demo.model import Decoder

    prompt = [0, *b"import os\n"]
    decoder = Decoder(weights, PagedCache(weights, len(prompt) + tokens, kind=kind))
    arrived = []
    for _ in generate(decoder, [prompt], tokens, Sampling(top_p=1.0), graph=graph):
        arrived.append(time.perf_counter())
    half = arrived[tokens // 2 : -1]  # the last token arrives early, because no further step has been started
    times = sorted(after - before for before, after in pairwise(half))
    slow, fast = times[len(times) * 4 // 5], times[len(times) // 5]
    return round(1 / statistics.median(times), 1), round(1 / slow, 1), round(1 / fast, 1)


def parts_of_a_step(weights: Any, kind: str) -> Json:
    """Microseconds of a decode step as one CUDA graph, and of the calls of each op as a separate graph."""
    import torch

    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.generate import Chooser, Sampling
    from kestrel_kernels.demo.model import Decoder, Step
    from kestrel_runtime import trace

    decoder = Decoder(weights, PagedCache(weights, CONTEXT + 1, kind=kind))
    table = decoder.cache.reserve([CONTEXT + 1])
    choose = Chooser(Sampling(), 1, decoder)
    tokens = torch.zeros(CONTEXT, dtype=torch.int64, device=weights.device)
    decoder(tokens, Step.prefill(table, [CONTEXT]))
    positions = torch.tensor([CONTEXT], device=weights.device)

    def step() -> None:
        choose(decoder(tokens[:1], Step.decode(table, positions)))

    step()
    with recorded_calls() as calls, trace() as counts:
        step()
    parts = []
    for name, made in calls.items():
        served = [how for op, how in counts.items() if op.split(".")[1].startswith(name)]
        runs = "torch" if not served else "reference" if any(how["reference"] for how in served) else "kernel"
        part = {"op": name, "calls": len(made), "runs": runs}
        parts.append(
            {**part, **_time_of(lambda made=made: [function(*args, **kwargs) for function, args, kwargs in made])}
        )
    return {**_time_of(step), "parts": parts}


def _time_of(work: Callable[[], object]) -> Json:
    """Microseconds of the work in a replayed graph, or the reason why it cannot be captured."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(IN_A_GRAPH):
                work()
    except RuntimeError as error:
        return {"us": None, "not_captured": str(error).strip().splitlines()[0]}
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / IN_A_GRAPH)
    return {"us": round(statistics.median(times), 2)}


@contextmanager
def recorded_calls() -> Iterator[dict[str, list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]]]:
    """Record every call of an op of this library or of torch.nn.functional in the demo, by name."""
    from kestrel_kernels.demo import generate, model, stores

    calls: dict[str, list[Any]] = {}

    def recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, []).append((function, args, kwargs))
            return function(*args, **kwargs)

        return record

    class Functional:
        def __getattr__(self, name: str) -> Any:
            return recorder(name, getattr(functional, name))

    functional = model.F
    replaced = [(module, name, found) for module in (generate, model, stores) for name, found in vars(module).items()]
    replaced = [each for each in replaced if str(getattr(each[2], "__module__", "")).split(".")[0] in FAMILIES]
    replaced = [each for each in replaced if not isinstance(each[2], type)]
    try:
        for module, name, found in replaced:
            setattr(module, name, recorder(name, found))
        model.F = Functional()
        yield calls
    finally:
        for module, name, found in replaced:
            setattr(module, name, found)
        model.F = functional


FAMILIES = {f"kestrel_{name}" for name in ("norm", "rope", "quant", "kvcache", "moe", "attention", "sampling")}


# -- prompts -----------------------------------------------------------------------------------------------------------


def prompt(options: argparse.Namespace) -> Json:
    """Milliseconds from a prompt on the host to its first new token there, one sequence."""
    import torch

    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.generate import Sampling, generate
    from kestrel_kernels.demo.model import Decoder
    from kestrel_runtime import trace

    device, rows = torch.device(options.device), []
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(PRESETS[options.preset].vocabulary, (options.tokens,), generator=generator).tolist()
    for experts in options.experts:
        weights = decoder = None  # frees the memory first
        weights = weights_with(options.preset, experts, device)
        for kind in options.kv_cache:
            decoder, times = Decoder(weights, PagedCache(weights, len(text), kind=kind)), []
            with trace() as counts:
                for _ in range(options.runs + 1):
                    started = time.perf_counter()
                    list(generate(decoder, [text], 1, Sampling(top_p=1.0)))
                    times.append(1000 * (time.perf_counter() - started))
            row = {"experts": experts, "kv_cache": kind, "by_reference": by_reference(counts), "tokens": len(text)}
            ordered = sorted(times[1:])
            slow, fast = ordered[len(ordered) * 4 // 5], ordered[len(ordered) // 5]
            figures = {"ms": statistics.median(ordered), "p20": fast, "p80": slow, "first_run_ms": times[0]}
            rows.append({**row, **{name: round(figure, 3) for name, figure in figures.items()}})
            way = f"{options.preset} experts {experts:4} cache {NAMES[kind]:4}"
            print(f"{way} {len(text)} tokens of prompt {rows[-1]['ms']:8.2f} ms", flush=True)
    return {"rows": rows}


# -- results -----------------------------------------------------------------------------------------------------------


def environment(device: str, revision: str | None) -> Json:
    import platform

    import torch

    from kestrel_runtime.bench.machine import environment as of_gpu
    from kestrel_runtime.bench.machine import revision_of

    revision = revision or revision_of(ROOT)
    if torch.device(device).type == "cuda":
        return of_gpu(revision)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"gpu": None, "versions": versions, "git": revision, "date": date}


def record(kind: str, figures: Json, machine: Json, out: Path | None) -> Path:
    """kind: "perplexity", "speed <preset>" or "prompt <preset>"."""
    from kestrel_runtime.bench.report import file_name

    path = out or RESULTS / (file_name(machine["gpu"]) if machine["gpu"] else "cpu.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**found, kind: {"environment": machine, **figures}}, indent=1) + "\n", encoding="utf-8")
    return path


# -- command line ------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measures: dict[str, Callable[[argparse.Namespace], Json]]
    measures = {"perplexity": perplexity, "speed": speed, "prompt": prompt}
    for name in measures:
        command = commands.add_parser(name)
        command.add_argument("--device", default="cpu" if name == "perplexity" else "cuda")
        command.add_argument("--out", type=Path, help="instead of meta/results/<device>.json")
        command.add_argument("--revision", help="git revision to record, where there is no git")
        if name == "perplexity":
            command.add_argument(
                "--windows", type=int, default=128, help="number of windows, each as long as the context"
            )
            continue
        command.add_argument("preset", choices=("tiny", "moondream3"))
        command.add_argument("--kv-cache", nargs="+", default=list(KV_CACHES), choices=KV_CACHES)
        if name == "prompt":
            command.add_argument("--experts", nargs="+", default=["bf16", "fp8"], choices=("bf16", "fp8"))
            command.add_argument("--tokens", type=int, default=1024, help="of the prompt")
            command.add_argument("--runs", type=int, default=20, help="behind the first one")
        else:
            command.add_argument("--tokens", type=int, default=128, help="that a run writes; eagerly a quarter")
            command.add_argument(
                "--parts", nargs="*", default=["auto"], metavar="KV", help="caches to take a step apart for"
            )
    commands.add_parser("tables").add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    if options.command == "tables":
        return tables(check=options.check)

    import torch

    from kestrel_runtime import KestrelFallbackWarning

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", KestrelFallbackWarning)  # the results say what ran by reference
        figures = measures[options.command](options)
    kind = options.command if options.command == "perplexity" else f"{options.command} {options.preset}"
    print(f"wrote {record(kind, figures, environment(options.device, options.revision), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
