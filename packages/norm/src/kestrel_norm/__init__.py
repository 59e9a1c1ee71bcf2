"""LayerNorm and RMSNorm for LLM and VLM inference. See README.md for the ops."""

from .fused_add_layer_norm import fused_add_layer_norm
from .fused_add_rms_norm import fused_add_rms_norm
from .layer_norm import layer_norm
from .rms_norm import rms_norm
from .rms_norm_fp8 import fused_add_rms_norm_fp8, rms_norm_fp8
from .rms_norm_linear import rms_norm_linear

__version__ = "0.1.0"

__all__ = [
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_fp8",
    "layer_norm",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_linear",
]
