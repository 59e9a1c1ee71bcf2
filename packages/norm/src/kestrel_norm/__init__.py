"""LayerNorm and RMSNorm for LLM and VLM inference. See README.md for the ops."""

from .fused_add_rms_norm import fused_add_rms_norm
from .layer_norm import layer_norm
from .rms_norm import rms_norm

__version__ = "0.1.0"

__all__ = ["fused_add_rms_norm", "layer_norm", "rms_norm"]
