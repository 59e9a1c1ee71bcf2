"""Every kestrel family under one namespace: `kestrel_kernels.norm`, `.rope`, `.attention`, ...

A family is imported when its name is first used, so `import kestrel_kernels` costs nothing and loads no binary.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["attention", "kvcache", "moe", "norm", "quant", "rope", "sampling"]

if TYPE_CHECKING:
    from types import ModuleType

    from . import attention, kvcache, moe, norm, quant, rope, sampling

# Modules that users of kestrel-kernels 0.2 import: each names one op that lives in a family.
_PATHS_OF_0_2 = (
    "activation",
    "flash_attn",
    "fp8_quant",
    "fp8_quant_cute",
    "fused_mlp",
    "gelu_residual",
    "kv_cache_write",
    "layernorm_cuda",
    "rotary_embedding",
    "tau_tail",
    "topk",
)


def __getattr__(name: str) -> ModuleType:
    if name in __all__ or name in _PATHS_OF_0_2:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PATHS_OF_0_2, "__version__"])
