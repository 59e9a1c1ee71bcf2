"""Times ops on one GPU: python tools/time_ops.py norm:rms_norm sampling:topk_fwd --out results.json

An op's shapes are in packages/<family>/benchmarks/<op>.py:
    TARGETS     {shape name: the time to reach, us, or None where none is set}
    make        (shape name, how many sets) -> list of sets of arguments, random, results to write included
    set_bytes   (shape name) -> bytes of one set that L2 must not hold when it comes round again
    candidates  () -> {name: function of one set}; the first is ours, the others are peers

One replay of a CUDA graph calls a candidate once per set, over so many sets that twice the L2 passes: every call finds
its inputs cold. The candidates' graphs are replayed in turn; a figure is the median over replays of the time per call,
with the 20th and 80th percentile. Launches inside a graph overlap as programmatic dependent launch lets them, as in an
engine that captures its decode step. "empty" is a launch that does nothing, timed in the same way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
FEWEST_CALLS = 200  # in one replay, so that starting the graph does not count
LONGEST_REPLAY_US = 20_000.0


def load(family: str, op: str) -> ModuleType:
    path = ROOT / "packages" / family / "benchmarks" / f"{op}.py"
    spec = importlib.util.spec_from_file_location(f"{family}_{op}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def capture(call: Callable[..., object], sets: list[tuple[Any, ...]], rounds: int) -> torch.cuda.CUDAGraph:
    for arguments in sets[:3]:
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for arguments in sets:
                call(*arguments)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def time_shape(
    candidates: dict[str, Callable[..., object]], sets: list[tuple[Any, ...]], replays: int
) -> dict[str, dict[str, float]]:
    """Microseconds per call of each candidate: median, p20, p80."""
    rounds = -(-FEWEST_CALLS // len(sets))
    graphs = {name: capture(call, sets, 1) for name, call in candidates.items()}
    if rounds > 1:
        one = max(replay_us(graph) for graph in graphs.values())
        rounds = max(1, min(rounds, int(LONGEST_REPLAY_US / one)))
        graphs = {name: capture(call, sets, rounds) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(replays + 2):
        for name, graph in graphs.items():
            us = replay_us(graph) / (rounds * len(sets))
            if turn >= 2:  # two turns to warm up
                times[name].append(us)
    return {
        name: {
            "us": statistics.median(t),
            "p20": statistics.quantiles(t, n=5)[0],
            "p80": statistics.quantiles(t, n=5)[3],
        }
        for name, t in times.items()
    }


def environment() -> dict[str, Any]:
    smi = "nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.mem --format=csv,noheader"
    driver, sm_clock, memory_clock = subprocess.check_output(smi.split(), text=True).splitlines()[0].split(", ")
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40"]  # "-dirty" where the tree was modified
    revision = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "l2_bytes": torch.cuda.get_device_properties().L2_cache_size,
        "driver": driver,
        "clocks": {"sm": sm_clock, "memory": memory_clock},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "git": revision.stdout.strip() if revision.returncode == 0 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time ops inside CUDA graphs, with their inputs cold in L2.")
    parser.add_argument("ops", nargs="+", metavar="family:op")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--shapes", nargs="*", help="only these shapes")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--revision", help="the git revision, where the tree is not a checkout")
    parser.add_argument("--ours-only", action="store_true", help="leave the peers out")
    arguments = parser.parse_args()

    report = environment()
    report["git"] = arguments.revision or report["git"]
    empty = {"empty": lambda _: torch.cuda._sleep(0)}
    report["empty_us"] = time_shape(empty, [(None,)] * FEWEST_CALLS, arguments.replays)["empty"]["us"]
    report["rows"] = []
    for name in arguments.ops:
        family, op = name.split(":")
        benchmark = load(family, op)
        candidates = dict(list(benchmark.candidates().items())[: 1 if arguments.ours_only else None])
        for shape, target in benchmark.TARGETS.items():
            if arguments.shapes and shape not in arguments.shapes:
                continue
            count = max(2, -(-2 * report["l2_bytes"] // benchmark.set_bytes(shape)))
            sets = benchmark.make(shape, count)
            for candidate, figures in time_shape(candidates, sets, arguments.replays).items():
                row = {"family": family, "op": op, "shape": shape, "candidate": candidate, "sets": len(sets)}
                ours = candidate == next(iter(candidates))
                report["rows"].append({**row, **figures, "target_us": target if ours else None})
            del sets
            torch.cuda.empty_cache()
    report["clocks_after"] = environment()["clocks"]
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    print(
        f"{report['gpu']}, torch {report['torch']}, driver {report['driver']}; empty launch {report['empty_us']:.2f} us"
    )
    for row in report["rows"]:
        verdict = f"target {row['target_us']:8.2f}" if row["target_us"] else ""
        spread = f"({row['p20']:.2f} .. {row['p80']:.2f})"
        print(f"{row['op']:20} {row['shape']:18} {row['candidate']:12} {row['us']:8.2f} us {spread:22} {verdict}")


if __name__ == "__main__":
    main()
