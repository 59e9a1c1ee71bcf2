"""The feed-forward family: routed experts, and the dense MLP and activations they share. See README.md for the map."""

from .fused_experts import fused_experts
from .fused_mlp import fused_mlp
from .gelu_residual import gelu_residual
from .topk_softmax import topk_softmax

__version__ = "0.1.0"

__all__ = ["fused_experts", "fused_mlp", "gelu_residual", "topk_softmax"]
