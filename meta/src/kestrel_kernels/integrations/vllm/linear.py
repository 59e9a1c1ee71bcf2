"""Linear layers of vLLM with 4-bit weights and 16-bit activations, of GPTQ, AWQ and compressed-tensors checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from kestrel_quant import W4Weight, w4_from_gptq, w4a16_linear


class KestrelW4A16LinearKernel(MPLinearKernel):
    """`w4a16_linear` under vLLM's contract: chosen where the kernels before it in vLLM's list are disabled."""

    weight: W4Weight

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether this kernel supports the layer; if not, why."""
        columns, rows = c.partition_weight_shape
        group = columns if c.group_size == -1 else c.group_size
        if c.weight_type not in (scalar_types.uint4b8, scalar_types.uint4):
            return False, f"expected 4-bit weights, got {c.weight_type}"
        if c.zero_points != (c.weight_type == scalar_types.uint4):
            return False, f"expected zero points with {scalar_types.uint4} alone"
        if c.act_type not in (torch.bfloat16, torch.float16, torch.float32):
            return False, f"expected bf16, fp16 or float32 activations, got {c.act_type}"
        if columns % 8 or rows % 8 or group % 2 or columns % group:
            return False, f"expected multiples of 8 and whole groups, got {columns} x {rows} in groups of {group}"
        if getattr(c, "has_g_idx", False):  # vLLM 0.33 refuses such checkpoints itself
            return False, "expected columns in the order of their groups, got an activation order (g_idx)"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack what was loaded; the layer's parameters become the packed tensors."""
        codes = self._loaded(layer, self.w_q_name, packed_dim=0)
        scales = self._loaded(layer, self.w_s_name).to(self.config.act_type)
        zeros = None
        if self.config.zero_points and self.w_zp_name is not None:
            zeros = self._loaded(layer, self.w_zp_name, packed_dim=1)
        self.weight = w4_from_gptq(codes, scales, zeros, checkpoint_format="gptq_v2")
        packed = {
            self.w_q_name: self.weight.codes,
            self.w_s_name: self.weight.scales,
            self.w_zp_name: self.weight.zeros,
        }
        for name, tensor in packed.items():
            if name is not None and hasattr(layer, name):
                delattr(layer, name)
                if tensor is not None:
                    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @staticmethod
    def _loaded(layer: nn.Module, name: str, **packing: int) -> Tensor:
        """A parameter with the columns of the weight first and its rows second."""
        found = permute_param_layout_(getattr(layer, name), input_dim=0, output_dim=1, **packing)
        return found.data.contiguous()  # type: ignore[no-any-return]

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return w4a16_linear(x, self.weight, bias)


def register() -> str:
    """Append the kernel to vLLM's lists. Returns its name."""
    for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
        register_linear_kernel(KestrelW4A16LinearKernel, platform, "mp")
    return str(KestrelW4A16LinearKernel.__name__)
