"""Every kestrel family under one namespace: `kestrel_kernels.norm`, `.rope`, `.attention`, ...

A family is imported when its name is first used, so `import kestrel_kernels` costs nothing and loads no binary.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["attention", "kvcache", "moe", "norm", "quant", "rope", "sampling"]

if TYPE_CHECKING:
    from kestrel_moe import invoke_cute_moe_down as invoke_cute_moe_down
    from kestrel_moe import invoke_cute_moe_down_fp8 as invoke_cute_moe_down_fp8
    from kestrel_moe import invoke_cute_moe_up as invoke_cute_moe_up
    from kestrel_moe import invoke_cute_moe_up_fp8 as invoke_cute_moe_up_fp8

    from . import attention, kvcache, moe, norm, quant, rope, sampling

# What users of kestrel-kernels 0.2 import: modules that each name one op of a family, and ops at the top level.
_MODULES_OF_0_2 = (
    "activation",
    "flash_attn",
    "fp8_quant",
    "fp8_quant_cute",
    "fused_linear_residual",
    "fused_mlp",
    "gelu_residual",
    "kv_cache_write",
    "layernorm_cuda",
    "moe_align",
    "moe_sum",
    "rotary_embedding",
    "tau_tail",
    "topk",
)
_OPS_OF_0_2 = ("invoke_cute_moe_down", "invoke_cute_moe_down_fp8", "invoke_cute_moe_up", "invoke_cute_moe_up_fp8")


def __getattr__(name: str) -> Any:
    if name in __all__ or name in _MODULES_OF_0_2:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OPS_OF_0_2:
        return getattr(importlib.import_module("kestrel_moe"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES_OF_0_2, *_OPS_OF_0_2, "__version__"])
