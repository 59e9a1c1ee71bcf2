"""A good call of every op on small tensors, which tests of bad input and of registration start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_moe as M
from kestrel_quant import pack_w4

F8 = torch.float8_e4m3fn
Values = dict[str, Any]


def ints(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, **options)


# T = 3, Hd = 8, E = 4, I = 6, K = 2; 6 pairs in blocks of 16: at most (6 + 4 * 15) // 16 = 4 blocks
X = torch.linspace(-2, 2, 24).view(3, 8)
LOGITS = torch.linspace(-1, 1, 12).view(3, 4).sin()
WEIGHT, BIAS = torch.ones(6, 8), torch.ones(6)
W4 = pack_w4(WEIGHT, 4)
W1, W2 = torch.ones(4, 12, 8), torch.ones(4, 8, 6)
WEIGHTS, IDS, SORTED, EXPERTS, LENGTH = M.route_and_align(LOGITS, 2, 16)
INNER, SCALE = torch.ones(6, 6), torch.ones(4)
ALIGNED = {"topk_ids": IDS, "sorted_token_ids": SORTED, "expert_ids": EXPERTS, "num_tokens_post_pad": LENGTH}
META = {"device": "meta"}

GOOD: dict[Callable[..., Any], Values] = {
    M.gelu_residual: {"x": X, "approximate": "tanh"},
    M.silu_and_mul: {"x": X},
    M.gelu_and_mul: {"x": X, "approximate": "tanh"},
    M.gelu_residual_fp8: {"x": X, "approximate": "none"},
    M.silu_and_mul_fp8: {"x": X},
    M.gelu_and_mul_fp8: {"x": X, "approximate": "tanh"},
    M.fused_linear_residual: {"x": X, "weight": WEIGHT, "bias": BIAS, "residual": torch.ones(3, 6)},
    M.gemv: {"x": X, "weight": WEIGHT, "bias": BIAS},
    M.router_gemm: {"x": X, "weight": WEIGHT},
    M.moe_sum: {"x": torch.ones(4, 12, 8)},
    M.fused_mlp: {"x": X, "w1": WEIGHT, "b1": BIAS, "w2": torch.ones(8, 6), "b2": torch.ones(8), "residual": X + 1},
    M.topk_softmax: {"gating": LOGITS, "k": 2, "bias": torch.ones(4), "num_tokens": ints(1) + 2},
    M.moe_align_block_size: {
        "topk_ids": IDS,
        "num_experts": 4,
        "block_size": 16,
        "sorted_token_ids": ints(64),
        "expert_ids": ints(4),
        "num_tokens_post_pad": ints(1),
        "expert_map": ints(4),
    },
    M.moe_lora_align_block_size: {
        "topk_ids": IDS,
        "token_lora_mapping": ints(3),
        "num_experts": 4,
        "block_size": 16,
        "max_loras": 2,
        "sorted_token_ids": ints(2, 64),
        "expert_ids": ints(2, 4),
        "num_tokens_post_pad": ints(2),
        "adapter_enabled": torch.ones(2, dtype=torch.bool),
    },
    M.route_and_align: {"logits": LOGITS, "k": 2, "block_size": 16, "bias": SCALE, "expert_map": ints(4)},
    M.invoke_cute_moe_up: {
        "hidden_states": X, "w1": W1, "w2": None, "topk_weights": None, **ALIGNED, "block_size": 16
    },
    M.invoke_cute_moe_down: {"moe_out": INNER, "w3": W2, "topk_weights": WEIGHTS, **ALIGNED, "block_size": 16},
    M.fused_experts: {"hidden": X, "w1": W1, "w2": W2, "topk_weights": WEIGHTS, "topk_ids": IDS, "expert_map": ints(4)},
}  # fmt: skip
GOOD_FP8: dict[Callable[..., Any], Values] = {
    M.invoke_cute_moe_up_fp8: {
        "x_q": X.to(F8), "x_scale": torch.ones(3, 1), "w1": W1.to(F8), "w1_scale": SCALE, "w2": None, "w2_scale": None,
        "topk_weights": None, **ALIGNED, "block_size": 16,
    },
    M.invoke_cute_moe_down_fp8: {
        "x_q": INNER.to(F8), "x_scale": torch.ones(6, 1), "w3": W2.to(F8), "w3_scale": SCALE, "topk_weights": WEIGHTS,
        **ALIGNED, "block_size": 16,
    },
}  # fmt: skip
FP8_EXPERTS = GOOD[M.fused_experts] | {
    "w1": W1.to(F8), "w2": W2.to(F8), "w1_scale": torch.ones(4), "w2_scale": torch.ones(4, 8), "expert_map": None
}  # fmt: skip
