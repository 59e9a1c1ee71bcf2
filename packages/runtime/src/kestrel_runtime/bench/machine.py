"""The environment of a measurement: GPU, versions, revision, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

import torch

from .timer import FEWEST_CALLS, REPLAYS, empty_launch, host_us, time_candidates

DISTRIBUTIONS = ("torch", "triton", "apache-tvm-ffi", "flashinfer-python", "vllm", "quack-kernels", "liger-kernel")
BUSY_CYCLES = 600_000_000  # about a third of a second


def environment(revision: str | None) -> dict[str, Any]:
    """GPU, driver, clocks under load, versions, git revision, date, and the time of an empty launch."""
    properties = torch.cuda.get_device_properties()
    torch.cuda._sleep(BUSY_CYCLES)  # clocks rise before the timing, and are read under load
    clocks = _ask_smi(properties, "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm")
    torch.cuda.synchronize()
    empty = time_candidates({"empty": empty_launch}, [(None,)] * FEWEST_CALLS, REPLAYS)["empty"].figures
    return {
        "gpu": torch.cuda.get_device_name(),
        "l2_bytes": properties.L2_cache_size,
        "driver": clocks[0],
        "clocks": {"sm": clocks[1], "memory": clocks[2], "sm_max": clocks[3]},
        "cuda": torch.version.cuda,
        "versions": _versions(),
        "git": revision,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "empty_us": round(empty.us, 4) if empty else None,
        "empty_host_us": round(host_us({"empty": empty_launch}, (None,))["empty"].us, 4),
    }


def revision_of(checkout: Path) -> str | None:
    """The commit of a checkout, "-dirty" where files differ from it; None where there is no history."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(git, cwd=checkout, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    ours = (each.metadata["Name"] for each in importlib.metadata.distributions())
    names = {name for name in ours if name and name.startswith("kestrel-")}
    for name in [*DISTRIBUTIONS, *sorted(names)]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _ask_smi(properties: Any, *fields: str) -> list[str | None]:
    """Fields of nvidia-smi for the current GPU; None for each where it cannot be run."""
    uuid = getattr(properties, "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    query = ["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        values = answer.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError):
        return [None] * len(fields)
    return [value.strip() for value in values] if len(values) == len(fields) else [None] * len(fields)
