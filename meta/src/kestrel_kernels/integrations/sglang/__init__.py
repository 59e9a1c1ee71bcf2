"""SGLang on these kernels: ``--attention-backend kestrel`` and ``--sampling-backend kestrel``.

SGLang finds :func:`register` through the entry point ``sglang.srt.plugins``. Only names are registered.
"""

from __future__ import annotations

import logging
from typing import Any

TESTED = ((0, 5, 23), (0, 5, 23))
"""The first and the last version of SGLang that are tested."""
BACKEND = "kestrel"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register both backends with SGLang. Idempotent; SGLang's defaults stay."""
    import sglang
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.sampler import register_sampler_backend

    found = tuple(int(part) for part in sglang.__version__.split(".")[:3] if part.isdigit())
    if not TESTED[0] <= found <= TESTED[1]:
        first, last = (".".join(map(str, version)) for version in TESTED)
        _log.warning("kestrel-kernels is tested with SGLang %s to %s, found %s", first, last, sglang.__version__)
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
        register_attention_backend(BACKEND)(_attention)
        register_sampler_backend(BACKEND, _sampler)


def _attention(runner: Any) -> Any:
    from .attention import KestrelAttention

    return KestrelAttention(runner)


def _sampler() -> Any:
    from .sampler import KestrelSampler

    return KestrelSampler()
