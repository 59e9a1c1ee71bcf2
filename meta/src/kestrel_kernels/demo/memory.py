"""The check that a model fits into free memory, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from .cache import PagedCache
from .config import DecoderConfig, DemoError
from .weights import bytes_needed

GIB = 2**30


def require(
    config: DecoderConfig,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache: str,
    fp8_experts: bool,
) -> None:
    """Raises DemoError unless weights and cache fit into the free memory, with a margin of 10 %."""
    needed = bytes_needed(config, dtype, fp8_experts=fp8_experts)
    needed += PagedCache.bytes_needed(config, tokens, dtype, kind=kv_cache)
    free = free_bytes(device)
    if free is not None and needed * 1.1 > free:
        raise DemoError(
            f"--preset: expected {needed * 1.1 / GIB:.1f} GiB of free memory on {device} for this model and its cache, "
            f"got {free / GIB:.1f} GiB"
        )


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on the device; None where they are unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    found = [number for number in (_system(), _group()) if number is not None]
    return min(found, default=None)


def _system() -> int | None:
    """MemAvailable of the kernel."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group() -> int | None:
    """Free bytes within the memory limit of the container. The file cache counts as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(counts.get("inactive_file", 0)))
