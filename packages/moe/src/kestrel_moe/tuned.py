"""The files of tuned variants: one per GPU, in the user's folder or in this package.

``<gpu>.json`` holds, for each layer, the fastest variant of each number of tokens and the figures it was chosen from:

    {"format": 1, "gpu": "NVIDIA H200", "layers": {"E64 k8 h2048 i1024 bf16": {
        "date": "2026-01-31T12:00:00+00:00", "revision": "kestrel-moe 0.1.0", "tokens": {
            "8": {"variant": "in_kernel 8", "us": {"in_kernel 8": 131.0, "aligned 8": 134.2}}}}}}

A layer in the user's file replaces the same layer in the package's.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
PACKAGED = Path(__file__).with_name("configs")

Entries = Mapping[str, Mapping[int, str]]
"""For each layer, the name of the variant of each number of tokens."""


class TunedFileError(ValueError):
    """A file is not what the tuner writes; the message names the file and the fault."""


def user_folder() -> Path:
    """$KESTREL_TUNED, or kestrel-kernels/moe in the user's folder of configurations. Raises OSError without a home."""
    if os.environ.get("KESTREL_TUNED"):
        return Path(os.environ["KESTREL_TUNED"])
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError as error:  # no HOME, and a user without an entry, as in containers
        raise FileNotFoundError(f"{error} Name a folder in KESTREL_TUNED.") from None
    return Path(base) / "kestrel-kernels" / "moe"


def file_name(gpu: str) -> str:
    """
    >>> file_name("NVIDIA H200"), file_name("NVIDIA GeForce RTX 4090")
    ('h200.json', 'geforce_rtx_4090.json')
    """
    words = [word for word in re.findall("[a-z0-9]+", gpu.lower()) if word != "nvidia"]
    return ("_".join(words) or "gpu") + ".json"


def read(path: Path) -> dict[str, Any]:
    """A tuned file, checked. Raises TunedFileError, or OSError."""

    def expect(right: bool, what: str) -> None:
        if not right:
            raise TunedFileError(f"{path}: expected {what}")

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TunedFileError(f"{path}: expected JSON: {error}") from None
    expect(isinstance(found, dict) and found.get("format") == FORMAT, f'an object with "format": {FORMAT}')
    expect(isinstance(found.get("gpu"), str), 'the name of the GPU in "gpu"')
    expect(isinstance(found.get("layers"), dict), 'an object in "layers"')
    for name, layer in found["layers"].items():
        expect(isinstance(layer, dict) and isinstance(layer.get("tokens"), dict), f'an object in "tokens" of {name!r}')
        for tokens, entry in layer["tokens"].items():
            counted = tokens.isdecimal() and len(tokens) <= 10 and 0 < int(tokens) < 2**31
            expect(counted, f"numbers of tokens, 1 to 2**31 - 1, in {name!r}, got {tokens[:20]!r}")
            known = isinstance(entry, dict) and isinstance(entry.get("variant"), str)
            expect(known, f'a name in "variant" of {name!r}, {tokens} tokens')
    return found


def write(path: Path, gpu: str, name: str, layer: Mapping[str, Any]) -> None:
    """Put one layer into a file, which keeps its other layers and this one's other numbers of tokens.

    Raises TunedFileError or OSError.
    """
    found = read(path) if path.exists() else {"format": FORMAT, "gpu": gpu, "layers": {}}
    if found["gpu"] != gpu:
        raise TunedFileError(f"{path}: expected a file of {gpu}, got one of {found['gpu']}")
    tokens = {**found["layers"].get(name, {}).get("tokens", {}), **layer["tokens"]}
    layer = {**layer, "tokens": dict(sorted(tokens.items(), key=lambda item: int(item[0])))}
    found["layers"] = dict(sorted({**found["layers"], name: layer}.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def entries(found: Mapping[str, Any]) -> Entries:
    return {
        name: {int(tokens): entry["variant"] for tokens, entry in layer["tokens"].items()}
        for name, layer in found["layers"].items()
    }


@functools.cache
def of_gpu(gpu: str) -> Entries:
    """What is tuned for this GPU, read once per process. A broken file is ignored with a warning."""
    merged: dict[str, Mapping[int, str]] = {}
    for in_package in (True, False):
        try:
            found = read((PACKAGED if in_package else user_folder()) / file_name(gpu))
        except TunedFileError as error:
            warnings.warn(str(error), stacklevel=2)
            continue
        except OSError:
            continue
        if found["gpu"] == gpu:
            merged.update(entries(found))
    return merged


def nearest(variants: Mapping[int, str], tokens: int) -> str | None:
    """The variant of the number of tokens that is nearest by ratio; None if that is more than a factor of 1.5 away.

    >>> nearest({8: "a", 16: "b"}, 11), nearest({8: "a", 16: "b"}, 12), nearest({8: "a"}, 13), nearest({}, 1)
    ('a', 'b', None, None)
    """

    def distance(at: int) -> float:
        return max(at, tokens) / min(at, tokens)

    if tokens < 1 or not variants:
        return None
    best = min(sorted(variants), key=distance)
    return variants[best] if distance(best) <= 1.5 else None
