"""vLLM on these kernels: the attention backend KESTREL, and layers that the variable KESTREL_VLLM names.

vLLM finds :func:`register` through the entry point ``vllm.general_plugins``. Only names are registered: attention stays
vLLM's own unless ``attention_backend="KESTREL"`` is given, and layers stay unless ``KESTREL_VLLM`` names them.
"""

from __future__ import annotations

import logging
import os

TESTED = ((0, 33), (0, 33))
"""The first and the last release series of vLLM that are tested."""
VARIABLE = "KESTREL_VLLM"
BACKEND = "KESTREL"
PARTS = ("norms", "activations", "rotary", "experts", "w4")

_log = logging.getLogger(__name__)


def parts_of(text: str) -> tuple[str, ...]:
    """The parts that the variable names, separated by commas; "all" is every one.

    >>> parts_of("norms, rotary")
    ('norms', 'rotary')
    """
    named = {word.strip() for word in text.split(",")} - {""}
    if unknown := sorted(named - {*PARTS, "all"}):
        raise ValueError(f"{VARIABLE}: expected all, or some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return PARTS if "all" in named else tuple(part for part in PARTS if part in named)


def register() -> None:
    """Register the backend, and the layers that KESTREL_VLLM names, with vLLM. Idempotent; vLLM's defaults stay.

    Raises ValueError if KESTREL_VLLM names an unknown part.
    """
    parts = parts_of(os.environ.get(VARIABLE, ""))
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    found = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if not TESTED[0] <= found <= TESTED[1]:
        first, last = (".".join(map(str, version)) for version in TESTED)
        _log.warning("kestrel-kernels is tested with vLLM %s to %s, found %s", first, last, vllm.__version__)
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, "kestrel_kernels.integrations.vllm.attention.KestrelBackend")
    if parts:
        from . import layers

        replaced = layers.register(parts)
        _log.info("kestrel-kernels replaces %s; left: %s", ", ".join(replaced), _left(parts))


def _left(parts: tuple[str, ...]) -> str:
    return ", ".join(part for part in PARTS if part not in parts) or "nothing"
