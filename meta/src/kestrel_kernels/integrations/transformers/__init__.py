"""transformers on these kernels: `apply` changes a model, `KestrelCache` holds its keys and values, `generate` decodes.

Needs transformers (the extra ``[transformers]``). Importing this module changes nothing in it.
"""

from __future__ import annotations

from .batching import paged_attention
from .batching_fp8 import fp8_pages
from .cache import KestrelCache
from .generation import generate
from .patch import TESTED, Report, VersionWarning, apply, restore
from .w4 import W4Config, load_w4, quantize

__all__ = [
    "TESTED",
    "KestrelCache",
    "Report",
    "VersionWarning",
    "W4Config",
    "apply",
    "fp8_pages",
    "generate",
    "load_w4",
    "paged_attention",
    "quantize",
    "restore",
]
