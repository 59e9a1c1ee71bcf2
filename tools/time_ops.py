"""Times ops of this checkout: python tools/time_ops.py norm:rms_norm sampling --out results.json

The front end of kestrel_runtime.bench, whose sources in the checkout it takes, and three of its functions for
experiments: `time_shape`, `capture` and `replay_us`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "packages" / "runtime" / "src"
sys.path.insert(0, str(RUNTIME))

import kestrel_runtime  # noqa: E402

kestrel_runtime.__path__.append(str(RUNTIME / "kestrel_runtime"))  # one imported before may be of an older build

from kestrel_runtime.bench import time_candidates  # noqa: E402
from kestrel_runtime.bench.command import main  # noqa: E402
from kestrel_runtime.bench.definition import Source, load_module  # noqa: E402
from kestrel_runtime.bench.timer import FEWEST_CALLS, REPLAYS, capture, replay_us  # noqa: E402, F401


def load(family: str, op: str) -> Any:
    """The definition of an op, a module."""
    return load_module(Source(family, op, ROOT / "packages" / family / "benchmarks" / f"{op}.py"))


def time_shape(candidates: dict[str, Any], sets: list[tuple[Any, ...]], replays: int = REPLAYS) -> dict[str, Any]:
    """Microseconds per call of each candidate: {name: {"us", "p20", "p80"}}. Raises when one fails."""
    timed = time_candidates(candidates, sets, replays)
    for name, each in timed.items():
        if each.figures is None:
            raise RuntimeError(f"{name}: {each.failed}")
    return {name: vars(each.figures) for name, each in timed.items()}


if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "--checkout", str(ROOT)]))
