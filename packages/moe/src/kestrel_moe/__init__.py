"""The feed-forward family: routing, routed experts, gated activations, and the dense layers around them."""

from .and_mul import gelu_and_mul, silu_and_mul
from .fused_experts import fused_experts
from .fused_mlp import fused_mlp
from .gated_fp8 import gelu_and_mul_fp8, gelu_residual_fp8, silu_and_mul_fp8
from .gelu_residual import gelu_residual
from .invoke_moe import invoke_cute_moe_down, invoke_cute_moe_up
from .invoke_moe_fp8 import invoke_cute_moe_down_fp8, invoke_cute_moe_up_fp8
from .linear import fused_linear_residual, gemv, router_gemm
from .moe_align import moe_align_block_size, moe_lora_align_block_size, route_and_align
from .moe_sum import moe_sum
from .topk_softmax import topk_softmax

__version__ = "0.1.0"

__all__ = [
    "fused_experts",
    "fused_linear_residual",
    "fused_mlp",
    "gelu_and_mul",
    "gelu_and_mul_fp8",
    "gelu_residual",
    "gelu_residual_fp8",
    "gemv",
    "invoke_cute_moe_down",
    "invoke_cute_moe_down_fp8",
    "invoke_cute_moe_up",
    "invoke_cute_moe_up_fp8",
    "moe_align_block_size",
    "moe_lora_align_block_size",
    "moe_sum",
    "route_and_align",
    "router_gemm",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "topk_softmax",
]
