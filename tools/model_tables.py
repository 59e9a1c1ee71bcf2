"""Makes the tables and plots of meta/README.md and meta/ENGINES.md from the records in meta/results/.

tools/model_results.py takes the records and has the command line; what both need is defined here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "meta" / "README.md"
ENGINES = ROOT / "meta" / "ENGINES.md"
RESULTS = ROOT / "meta" / "results"
BEGIN, END = "<!-- results of models: written by tools/model_results.py -->\n", "<!-- end of results of models -->\n"
BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)

KV_CACHES = ("auto", "fp8", "int8", "int4")
NAMES = {"auto": "bf16", "fp8": "FP8", "int8": "INT8", "int4": "INT4"}
WEIGHTS = {"w4": "4 bits", "w4-head": "4 bits, head too", "w4-all": "4 bits, head, router and experts too"}
BOUNDS = {"int8": 0.0005, "int4": 0.035}
"""The largest allowed increase of perplexity, relative to bf16."""
WAYS = (*(("bf16", kind) for kind in KV_CACHES), *((kind, "auto") for kind in WEIGHTS))
"""(weights of the linear layers, KV cache) whose perplexity is compared; the first is what others are compared with."""
ENGINE_WAYS = {
    "kestrel": "this library",
    "dynamic": "transformers, dynamic cache",
    "static": "transformers, static cache, compiled",
    "vllm": "vLLM, FlashAttention 3",
    "vllm_attention": "vLLM, `KESTREL` alone",
    "vllm_kestrel": "vLLM, `KESTREL` and all layers",
}

CONTEXT = 512
"""Tokens in the cache before the step whose ops are timed."""

Json = dict[str, Any]


def section(results: Path) -> str:
    """The text between the markers of the README; empty without results."""
    parts = []
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for kind, figures in sorted(found.items()):
            what, _, preset = kind.partition(" ")
            if what == "perplexity":
                table = perplexity_table(figures)
            else:
                table = {"speed": speed_tables, "prompt": prompt_table}[what](preset, figures)
            parts.append(f"{table}\n({provenance(figures['environment'])})\n")
    return "\n".join(parts)


def where(machine: Json) -> str:
    return f"one {machine['gpu'].removeprefix('NVIDIA ')}" if machine["gpu"] else "a CPU"


def perplexity_table(found: Json) -> str:
    lines = [
        f"**Perplexity of `tiny` on {where(found['environment'])}**: {found['bytes']} bytes of held-out text in "
        f"{found['windows']} windows, every byte seeing the cache that it would see in decoding. The linear layers "
        "have weights in bf16 or in 4 bits (groups of 128 with zero points). Router and experts have weights in bf16, "
        "rounded to 4 bits where a row names them. "
        "*Divergence*: from the predictions with bf16 weights and cache, in nats per byte.\n",
        "| weights | KV cache | attention | bits per byte | perplexity | against bf16 | at most | divergence |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        kind, bits = row["kv_cache"], row["bits_per_byte"]
        layers = row.get("weights", "bf16")
        first = (layers, kind) == WAYS[0]
        against = "" if first else f"{row['cost']:+.3%}"
        most = f"+{BOUNDS[kind]:.2%}" if kind in BOUNDS else ""
        apart = "" if first else f"{row['divergence']:.5f}"
        lines.append(
            f"| {WEIGHTS.get(layers, layers)} | {NAMES[kind]} | {row['attention']} | {bits:.5f} "
            f"| {2**bits:.5f} | {against} | {most} | {apart} |"
        )
    return "\n".join(lines) + "\n"


def speed_tables(preset: str, found: Json) -> str:
    lines = [
        f"**Tokens per second of `{preset}` on {where(found['environment'])}**: one sequence, bf16, from the median "
        "time between two tokens. Every op by reference: `KESTREL_BACKEND=reference`.\n",
        "| experts | KV cache | by reference | decode step | tokens/s | p20 .. p80 |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        names = [f"`{op}`" for op in row["by_reference"] if op != "flash_attn_varlen_func"]  # only in the prefill
        ops = ", ".join(names) if row["ops"] == "kernel" else "every op"
        how = "one CUDA graph" if row["graph"] else "eager"
        name, spread = NAMES[row["kv_cache"]], f"{row['p20']:.0f} .. {row['p80']:.0f}"
        experts = "FP8" if row.get("experts") == "fp8" else "bf16"
        lines.append(f"| {experts} | {name} | {ops} | {how} | {row['tokens_per_second']:.0f} | {spread} |")
    for step in found["steps"]:
        lines.append(
            f"\nWhere the time of a decode step goes: {microseconds(step)} as one CUDA graph, over {CONTEXT} tokens "
            f"in a cache in {NAMES[step['kv_cache']]}, where attention runs beside the feed-forward. The calls of "
            "each op, as a graph of their own:\n"
        )
        lines += ["| op | calls | runs as | all of them |", "|---|---|---|---|"]
        parts = sorted(step["parts"], key=lambda part: -(part["us"] or 0))
        lines += [f"| `{part['op']}` | {part['calls']} | {part['runs']} | {microseconds(part)} |" for part in parts]
    return "\n".join(lines) + "\n"


def prompt_table(preset: str, found: Json) -> str:
    lines = [
        f"**First token of `{preset}` on {where(found['environment'])}**: one sequence, from a prompt on the host to "
        "the first new token there, the median of runs behind a first one, which sets up libraries.\n",
        "| experts | KV cache | by reference | tokens of prompt | ms | p20 .. p80 |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        ops = ", ".join(f"`{op}`" for op in row["by_reference"])
        experts = "FP8" if row["experts"] == "fp8" else "bf16"
        spread = f"{row['p20']:.2f} .. {row['p80']:.2f}"
        lines.append(f"| {experts} | {NAMES[row['kv_cache']]} | {ops} | {row['tokens']} | {row['ms']:.2f} | {spread} |")
    return "\n".join(lines) + "\n"


def engines_section(results: Path) -> str:
    """The same for meta/ENGINES.md: what `kestrel-kernels bench model` wrote to results/engines/."""
    parts = []
    for path in sorted(results.glob("engines/*.json")):
        for name, found in sorted(json.loads(path.read_text(encoding="utf-8")).items()):
            parts.append(f"{engine_table(name, found)}\n({provenance(found['environment'])})\n")
        parts.append(f"![tokens per second](results/engines/{path.stem}.svg)\n")
    return "\n".join(parts)


def engine_table(name: str, found: Json) -> str:
    layers = "" if found["layers"] is None else f", {found['layers']} layers"
    lines = [
        f"**`{name}`{layers} on {where(found['environment'])}**: random weights, "
        f"{found['new_tokens']} new tokens, rates from the ninth on.\n",
        "| | weights | KV cache | sequences | tokens/s | first token | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        way, memory = ENGINE_WAYS[row["way"]], f"{row['peak_gib']:.1f} GiB" if row["peak_gib"] else ""
        if "error" in row:
            figures = f"failed ({row['error'].split(':')[0]}) | | "
        else:
            figures = f"{row['tokens_per_second']:.0f} | {row['first_ms']:.0f} ms | {memory}"
        weights = WEIGHTS.get(row.get("weights", "bf16"), "bf16")
        lines.append(f"| {way} | {weights} | {NAMES[row['kv_cache']]} | {row['batch']} | {figures} |")
    return "\n".join(lines) + "\n"


def microseconds(timed: Json) -> str:
    return f"cannot be captured ({timed['not_captured']})" if timed["us"] is None else f"{timed['us']:.1f} us"


def provenance(machine: Json) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if "kestrel" not in name)
    return f"{versions}; revision {(machine['git'] or 'unknown')[:12]}, {machine['date'][:10]}"


def written(readme: str, fresh: str) -> str:
    """The README with the section between its markers."""
    return BLOCK.sub(lambda _: f"{BEGIN}{fresh}{END}", readme)


def tables(*, check: bool) -> int:
    """Write the tables and plots that are out of date, or only name them with `check`; return the exit status."""
    stale = []
    for page, fresh_section in ((README, section(RESULTS)), (ENGINES, engines_section(RESULTS))):
        text = page.read_text(encoding="utf-8")
        fresh = written(text, fresh_section)
        if fresh != text:
            stale.append(f"meta/{page.name}")
            if not check:
                page.write_text(fresh, encoding="utf-8")
    for path in sorted(RESULTS.glob("engines/*.json")):
        from kestrel_kernels.integrations import plot

        figures, drawn = json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".svg")
        if not drawn.is_file() or f"rows {plot.digest(figures)}" not in drawn.read_text(encoding="utf-8"):
            stale.append(f"meta/results/engines/{drawn.name}")
            if not check:
                plot.draw(figures, drawn)
    if not stale:
        print("tables and plots of the models are current")
    elif check:
        print(f"out of date: {', '.join(stale)}: `python tools/model_results.py tables` writes it", file=sys.stderr)
        return 1
    else:
        print(f"wrote {', '.join(stale)}")
    return 0
