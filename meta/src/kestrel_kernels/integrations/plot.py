"""A plot of what `kestrel-kernels bench model` measured: tokens per second, a panel for each configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

WAYS = {
    "kestrel": "this library",
    "dynamic": "transformers, dynamic cache",
    "static": "transformers, static, compiled",
    "vllm_attention": "vLLM with this attention",
    "vllm_kestrel": "vLLM with this library",
    "vllm": "vLLM",
}
WEIGHTS = {"bf16": "", "w4": ", 4-bit weights", "w4-head": ", 4-bit weights and head"}
CACHES = {"auto": "bf16", "fp8": "FP8", "int8": "INT8", "int4": "INT4"}
_COLOURS = {"dynamic": "#8C8C8C", "static": "#4D4D4D", "vllm": "#8C8C8C"}
_WITH_CACHES = ("kestrel", "vllm_attention", "vllm_kestrel", "vllm")
_OURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#7570B3")


def digest(figures: dict[str, Any]) -> str:
    """A digest of all rows. A plot contains it, so that a stale plot is detected."""
    rows = {name: found["rows"] for name, found in sorted(figures.items())}
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def label(row: dict[str, Any]) -> str:
    """The name of a row's bar, without its number of sequences.

    >>> label({"way": "kestrel", "weights": "w4", "kv_cache": "int8"})
    'this library, 4-bit weights, INT8 cache'
    >>> label({"way": "vllm", "kv_cache": "fp8"})
    'vLLM, FP8 cache'
    """
    weights, cache = WEIGHTS[row.get("weights", "bf16")], row["kv_cache"]
    return WAYS[row["way"]] + weights + (f", {CACHES[cache]} cache" if row["way"] in _WITH_CACHES else "")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write an SVG. figures: entries of the command's JSON by name; rows that failed have no bar. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kestrel", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    description = f"rows {digest(figures)}"
    figures = {name: [row for row in found["rows"] if "error" not in row] for name, found in figures.items()}
    labels = list(dict.fromkeys(label(row) for rows in figures.values() for row in rows))
    ways = {label(row): row["way"] for rows in figures.values() for row in rows}
    ours = [name for name in labels if ways[name] not in _COLOURS]
    sizes = (7.5, 2.4 * len(figures))
    figure, panels = pyplot.subplots(len(figures), 1, figsize=sizes, squeeze=False, layout="constrained")
    for [panel], (name, rows) in zip(panels, sorted(figures.items()), strict=True):
        batches = sorted({row["batch"] for row in rows})
        shown = [each for each in labels if any(label(row) == each for row in rows)]
        bar = 0.85 / max(len(shown), 1)
        for index, each in enumerate(shown):
            rates = {row["batch"]: row["tokens_per_second"] for row in rows if label(row) == each}
            places = [place + (index - (len(shown) - 1) / 2) * bar for place in range(len(batches))]
            colour = _COLOURS.get(ways[each]) or _OURS[ours.index(each) % len(_OURS)]
            bars = panel.bar(places, [rates.get(batch, 0.0) for batch in batches], bar, color=colour, label=each)
            panel.bar_label(bars, [f"{rates[batch]:.0f}" if batch in rates else "" for batch in batches], fontsize=6)
        panel.set_xticks(range(len(batches)), [f"{batch} sequence{'s' if batch > 1 else ''}" for batch in batches])
        panel.set_yscale("log")
        panel.set_ylim(bottom=1)
        panel.set_ylabel("tokens/s (log)")
        panel.set_title(name, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=6, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Description": description})
    pyplot.close(figure)
    tidy = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(f"{tidy}\n", encoding="utf-8")
