"""Times every valid variant of fused_experts, beside PyTorch's and transformers' layers, in turn on the same inputs.

    python packages/moe/benchmarks/expert_variants.py FILE WORK [TEXT ...] [WORK [TEXT ...] ...]

WORK is "rows": variants on the shapes of record; "mapped": variants of a device that has 32 of 256 experts;
"routings": the built-in choice on other routings; "distinct": the built-in choice by the number of distinct experts; or
"kernels": where the time of the built-in choice goes.
"table RECORD" prints FILE's rows that are above their targets in the record, results/h200.json.
TEXT selects shapes, "bf16 T4 E8 k2 h4096 i14336", that contain one of them, in the order of the texts. FILE is JSON,
written after every shape. bf16 layers are timed at all powers of two up to 16384 tokens. A sample is some milliseconds
of calls, directly after as many; figures are medians of the samples with the least and the most. Needs a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import expert_layers as layers
import moe_layer_bf16
import moe_layer_fp8
import torch

from kestrel_moe import variants
from kestrel_moe.fused_experts import by_variant
from kestrel_runtime.bench.limits import limit_of, limit_us
from kestrel_runtime.bench.machine import environment, revision_of
from kestrel_runtime.bench.report import Report
from kestrel_runtime.bench.show import number
from kestrel_runtime.bench.timer import capture, replay_us

Set = tuple[Any, ...]
Calls = Mapping[str, Callable[..., Any]]

SAMPLES, LONG_SAMPLES = 5, 9
SAMPLE_US = 3000.0  # of calls in a sample
LONG_US = 1500.0  # calls as long as this are timed without a graph, which would keep the memory of every call
FAR, FAR_US = 2.5, 2500.0  # candidates this much slower than the fastest, and as long, are timed once
MAPPED = [("h2048 i1024", False), ("h2048 i1024", True), ("h7168 i2048", True)]  # Hd and I, and whether FP8
RANDOM, ZIPF, HALF, ONE = "random", "zipf", "half to 4", "one expert"


def inputs(shape: str, fp8: bool, ids: Sequence[torch.Tensor]) -> list[Set]:
    """hidden, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids and out for each routing."""
    tokens, _, choices, width, _ = layers.sizes(shape)
    sets: list[Set] = []
    for i, each in enumerate(ids):
        hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(tokens, choices, device="cuda").softmax(-1)
        out = torch.empty_like(hidden)
        sets.append((hidden, *layer_weights(shape, fp8, i % 2), weights, each.to("cuda", torch.int32), out))
    return sets


def layer_weights(shape: str, fp8: bool, layer: int) -> tuple[Any, ...]:
    _, experts, _, width, inner = layers.sizes(shape)
    return _weights(experts, width, inner, fp8, layer)


@functools.lru_cache(maxsize=2)
def _weights(experts: int, width: int, inner: int, fp8: bool, layer: int) -> tuple[Any, ...]:
    """Normal values that repeat after 2^27, and FP8 scales for each output."""
    repeated = torch.randn(2**27 + layer, dtype=torch.bfloat16, device="cuda")

    def weight(rows: int, columns: int) -> torch.Tensor:
        values = (repeated * (110 if fp8 else columns**-0.5)).clamp_(-448, 448)
        values = values.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else values
        flat = torch.empty(experts * rows * columns, dtype=values.dtype, device="cuda")
        for at in range(0, flat.numel(), values.numel()):
            flat[at : at + values.numel()] = values[: flat.numel() - at]
        whole = flat.view(experts, rows, columns)
        return whole.view(torch.float8_e4m3fn) if fp8 else whole

    w1, w2 = weight(2 * inner, width), weight(width, inner)
    if not fp8:
        return w1, w2, None, None
    scales = [torch.full(w.shape[:2], 1 / (110 * w.shape[2] ** 0.5), device="cuda") for w in (w1, w2)]
    return w1, w2, *scales


def shapes(texts: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The shapes of record, by layer; of bf16 layers also the other powers of two."""
    found: list[tuple[str, bool]] = []
    for definition, fp8 in ((moe_layer_bf16, False), (moe_layer_fp8, True)):
        for layer in dict.fromkeys(re.sub("^T[0-9]+ ", "", shape) for shape in definition.TARGETS):
            tokens = {layers.sizes(shape)[0] for shape in definition.TARGETS if shape.endswith(" " + layer)}
            if not fp8:
                tokens |= {2**i for i in range(15)}
            found += [(f"T{count} {layer}", fp8) for count in sorted(tokens)]
    chosen = [shape for text in texts or [""] for shape in found if text in name(*shape) + " "]
    return iter(dict.fromkeys(chosen))


def name(shape: str, fp8: bool) -> str:
    return f"{'fp8' if fp8 else 'bf16'} {shape}"


def layer_of(shape: str, fp8: bool) -> variants.Layer:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    return variants.Layer(*layers.sizes(shape), "fp8" if fp8 else "bf16", hopper)


def ours(variant: variants.Variant, expert_map: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    def call(hidden, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out):  # type: ignore[no-untyped-def]
        options = {"w1_scale": w1_scale, "w2_scale": w2_scale, "expert_map": expert_map, "out": out}
        return by_variant(variant, hidden, w1, w2, topk_weights, topk_ids, **options)

    return call


def time_in_turn(calls: Calls, sets: Sequence[Set]) -> dict[str, dict[str, Any]]:
    """The figures of each candidate, or why it failed."""
    found: dict[str, dict[str, Any]] = {}
    rough: dict[str, float] = {}
    for each, call in calls.items():
        try:
            call(*sets[0])
            rough[each] = min(_eager_us(call, [arguments]) for arguments in sets[-2:])
        except Exception as error:
            found[each] = {"failed": _words(error)}
    least = min(rough.values(), default=0.0)
    samplers: dict[str, Callable[[], float]] = {}  # microseconds of a call
    for each, us in rough.items():
        if us > max(FAR * least, FAR_US):
            found[each] = {"us": round(us, 2), "samples": 1}
        elif us > LONG_US:
            samplers[each] = functools.partial(_eager_us, calls[each], sets[:2])
        else:
            try:
                samplers[each] = functools.partial(_graph_us, *_captured(calls[each], sets, us))
            except Exception as error:
                found[each] = {"failed": _words(error)}
    samples: dict[str, list[float]] = {each: [] for each in samplers}
    order = random.Random(0)
    count = LONG_SAMPLES if least > LONG_US else SAMPLES
    for _ in range(count):
        for each in order.sample(list(samplers), len(samplers)):
            samples[each].append(samplers[each]())
    for each, us_of in samples.items():
        figures = {"us": statistics.median(us_of), "least": min(us_of), "most": max(us_of)}
        found[each] = {**{key: round(us, 2) for key, us in figures.items()}, "samples": count}
    return {each: found[each] for each in calls}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _eager_us(call: Callable[..., Any], sets: Sequence[Set]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for arguments in sets:
        call(*arguments)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / len(sets)


def _captured(call: Callable[..., Any], sets: Sequence[Set], rough_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of a sample, and its number of calls."""
    rounds = max(1, round(SAMPLE_US / (rough_us * len(sets))))
    return capture(call, sets, rounds), rounds * len(sets)


def _graph_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    return replay_us(graph, behind=graph) / calls


def rows(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every valid variant, and PyTorch's and transformers' layers."""
    for shape, fp8 in shapes(texts):
        tokens = layers.sizes(shape)[0]
        layer = layer_of(shape, fp8)
        calls = {str(each): ours(each) for each in variants.valid_variants(layer)}
        calls |= {each: call for each, call in layers.candidates(fp8).items() if each != "kestrel"}
        ids = layers.routings(shape, 8 if tokens <= 64 else 4 if tokens <= 1024 else 2)
        sets = inputs(shape, fp8, ids)
        yield {
            "row": name(shape, fp8),
            "target": (moe_layer_fp8 if fp8 else moe_layer_bf16).TARGETS.get(shape),
            "rule": str(variants.by_rule(layer)),
            "distinct": [each.unique().numel() for each in ids],
            "us": time_in_turn(calls, sets),
        }


def mapped(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every valid variant on one of eight devices that share 256 experts. Shapes name the experts of all of them."""
    experts, here = 256, 32
    found = [(f"T{2**i} E{experts} k8 {sizes}", fp8) for sizes, fp8 in MAPPED for i in range(11)]
    for shape, fp8 in found:
        if not any(text in name(shape, fp8) + " " for text in texts or [""]):
            continue
        tokens, _, choices, width, inner = layers.sizes(shape)
        local = f"T{tokens} E{here} k{choices} h{width} i{inner}"
        table = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        table[:: experts // here] = torch.arange(here, dtype=torch.int32, device="cuda")
        layer = dataclasses.replace(layer_of(local, fp8), mapped=experts)
        sets = inputs(local, fp8, layers.routings(shape, 8 if tokens <= 64 else 4))
        calls = {str(each): ours(each, table) for each in variants.valid_variants(layer)}
        yield {"row": name(shape, fp8), "rule": str(variants.by_rule(layer)), "us": time_in_turn(calls, sets)}


def routed(kind: str, shape: str, seed: int) -> torch.Tensor:
    """Ids [T, K] of another routing."""
    tokens, experts, choices, _, _ = layers.sizes(shape)
    random_order = torch.Generator().manual_seed(seed)
    if kind == ONE:  # every token: one choice to one expert, the others nowhere
        ids = torch.full((tokens, choices), -1)
        ids[:, 0] = seed % experts
        return ids
    likelihood = torch.ones(tokens, experts)
    if kind == ZIPF:
        likelihood *= 1 / (1 + torch.randperm(experts, generator=random_order))
    if kind == HALF:  # the first half of the choices to four experts
        likelihood[:, torch.randperm(experts, generator=random_order)[:4]] = 1e6
        half = torch.multinomial(likelihood, choices // 2, generator=random_order)
        rest = torch.rand(tokens, experts, generator=random_order).scatter_(1, half, -1.0)
        return torch.cat([half, rest.topk(choices - choices // 2).indices], 1)
    return torch.multinomial(likelihood, choices, generator=random_order)


def routings(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The built-in choice: figures of four seeds for each kind of routing, in turn."""
    for shape, fp8 in shapes(texts):
        call = ours(variants.by_rule(layer_of(shape, fp8)))
        us, chosen = {}, {}
        for kind in (RANDOM, ZIPF, HALF, ONE):
            calls: dict[str, Callable[..., Any]] = {}
            for seed in range(4):
                ids = routed(kind, shape, seed)
                chosen[f"{kind}, seed {seed}"] = int(ids.unique().ge(0).sum())
                own = inputs(shape, fp8, [ids, ids])  # the two layers' weights in turn
                calls[f"{kind}, seed {seed}"] = functools.partial(_alternate, call, own, [0])
            us |= time_in_turn(calls, [(), ()])
        yield {"row": name(shape, fp8), "distinct": chosen, "us": us}


def distinct(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The built-in choice by the number of distinct experts."""
    for shape, fp8 in shapes(texts):
        tokens, experts, choices, _, _ = layers.sizes(shape)
        call = ours(variants.by_rule(layer_of(shape, fp8)))
        calls: dict[str, Callable[..., Any]] = {}
        for count in range(choices, min(tokens * choices, experts) + 1):
            ids = []
            for _ in range(2):  # a token's choices differ: `choices` in a row of a cycle over the experts
                cycle = torch.randperm(experts)[:count]
                ids.append(cycle[torch.arange(tokens * choices) % count].view(tokens, choices))
            calls[str(count)] = functools.partial(_alternate, call, inputs(shape, fp8, ids), [0])
        yield {"row": name(shape, fp8), "us": time_in_turn(calls, [(), ()])}


def kernels(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The built-in choice: for each kernel, from the end of the one before to its own end, the mean of the sets.

    From the profiler's time stamps of a replayed graph; of the first kernel, from its start.
    """
    for shape, fp8 in shapes(texts):
        variant = variants.by_rule(layer_of(shape, fp8))
        tokens = layers.sizes(shape)[0]
        sets = inputs(shape, fp8, layers.routings(shape, 8 if tokens <= 1024 else 2))
        ours(variant)(*sets[0])
        graph = capture(ours(variant), sets, 1)
        graph.replay()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
            torch.cuda.synchronize()
        events = sorted(
            (event.time_range.end, event.time_range.start, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and "kestrel" in event.name
        )
        count = len(events) // len(sets)
        of_kernel: dict[str, list[float]] = {}
        for i, (end, start, kernel) in enumerate(events):
            since = start if i % count == 0 else events[i - 1][0]
            short = f"{i % count} {re.split('[<(]', kernel)[0].rpartition('::')[2]}"
            of_kernel.setdefault(short, []).append(end - since)
        us = {kernel: {"us": round(statistics.mean(times), 2)} for kernel, times in of_kernel.items()}
        yield {"row": name(shape, fp8), "variant": str(variant), "us": us}


def table(written: Mapping[str, Any], record: Report) -> Iterator[str]:
    """Markdown: the rows above their targets in the record, the built-in choice in bold, else the faster of a kind.

    Variants that take more than twice as long as the fastest are left out.
    """
    kinds = {
        "one kernel": ("fused 8", "fused 16"),
        "pairs grouped inside": ("in_kernel 8",),
        "tiles of 8, 16": ("aligned 8", "aligned 16"),
        "32": ("aligned 32",),
        "64": ("aligned 64",),
        "128": ("aligned 128",),
        "128, clusters": ("clustered 128",),
        "grouped_mm": ("grouped_mm",),
    }
    missed = {f"{row.op.rpartition('_')[2]} {row.shape}": row for row in record.rows if row.met is False}
    yield "| " + " | ".join(["", "of record / target", "bound", *kinds]) + " |"
    yield "|---" * (3 + len(kinds)) + "|"
    for row in written["rows"]:
        if row["row"] not in missed:
            continue
        dtype, _, shape = row["row"].partition(" ")
        definition = moe_layer_fp8 if dtype == "fp8" else moe_layer_bf16
        us = {variant: figures["us"] for variant, figures in row["us"].items() if "us" in figures}
        limit = limit_of(written["machines"][row["machine"]]["gpu"])
        bound = limit_us(limit, definition.traffic(shape), layers.operations(shape), precision=dtype)
        of_record = missed[row["row"]]
        cells = [row["row"], f"{number(of_record.us)} / {number(of_record.target_us)}", number(bound)]
        for names in kinds.values():
            best = min((each for each in names if each in us), key=lambda each: us[each], default=None)
            shown = row["rule"] if row["rule"] in names else best
            if shown is None or us[shown] > 2 * min(us.values()):
                cells.append("")
            else:
                cells.append(f"**{number(us[shown])}**" if shown == row["rule"] else number(us[shown]))
        yield "| " + " | ".join(cells) + " |"


def _alternate(call: Callable[..., Any], sets: Sequence[Set], count: list[int]) -> None:
    call(*sets[count[0] % len(sets)])
    count[0] += 1


WORK = {"rows": rows, "mapped": mapped, "routings": routings, "distinct": distinct, "kernels": kernels}


def main(file: str, *arguments: str) -> None:
    path = Path(file)
    written: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if arguments[:1] == ("table",):
        print(*table(written, Report.read(Path(arguments[1]))), sep="\n")
        return
    machines = written.setdefault("machines", [])
    machines.append(environment(revision_of(Path(__file__).parents[3])))
    works: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument in WORK:
            works.append((argument, []))
        else:
            works[-1][1].append(argument)
    started = time.monotonic()
    for work, texts in works:
        of_work = written.setdefault(work, [])
        for row in WORK[work](texts):
            of_work.append({**row, "machine": len(machines) - 1})
            path.write_text(json.dumps(written) + "\n")
            us = " ".join(f"{each}={figures.get('us', 'failed')}" for each, figures in row["us"].items())
            rule = f"target {row.get('target')}, rule {row['rule']}: " if "rule" in row else ""
            print(f"{time.monotonic() - started:6.1f} s  {row['row']}  {rule}{us}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
