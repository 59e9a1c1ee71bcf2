"""Layers of vLLM that are replaced out of tree: norms, gated activations, rotary embeddings and routed experts."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from kestrel_moe import fused_experts, gelu_and_mul, silu_and_mul
from kestrel_norm import fused_add_rms_norm, rms_norm
from kestrel_rope import rotary_embedding

_ROTARY = "vllm.model_executor.layers.rotary_embedding."
_TABLES = {
    "base": "RotaryEmbedding",
    "llama3_rope": "Llama3RotaryEmbedding",
    "linear_scaling_rope": "LinearScalingRotaryEmbedding",
    "dynamic_ntk_scaling_rope": "DynamicNTKScalingRotaryEmbedding",
    "yarn_scaling_rope": "YaRNScalingRotaryEmbedding",
}
"""Rotary embeddings, by module, that differ only in their cos/sin table."""
_ACTIVATIONS = {MoEActivation.SILU: "silu_and_mul", MoEActivation.GELU: "gelu_and_mul"}


class KestrelRMSNorm(RMSNorm):
    """With a residual both are changed in place: residual += x, x = norm(residual)."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        weight = self.weight.data
        is_plain = self.variance_size_override is None and self.has_weight and weight.dtype == x.dtype
        if not is_plain or (residual is not None and residual.dtype != x.dtype):
            return super().forward_native(x, residual)
        return _norm(x, residual, weight, self.variance_epsilon, 0.0)

    forward_cuda = forward_cpu = forward_native


class KestrelGemmaRMSNorm(GemmaRMSNorm):
    """As KestrelRMSNorm, with weight + 1."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        weight = self.weight.data
        if weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
            return super().forward_native(x, residual)
        return _norm(x, residual, weight, self.variance_epsilon, 1.0)

    forward_cuda = forward_cpu = forward_native


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_bias: float) -> Any:
    if residual is None:
        return rms_norm(x, weight, eps, weight_bias=weight_bias)
    fused_add_rms_norm(x, residual, weight, eps, weight_bias=weight_bias)
    return x, residual


class KestrelSiluAndMul(SiluAndMul):
    """silu(h) * g of the two halves."""

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        return silu_and_mul(x)

    def forward_cuda(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)

    forward_cpu = forward_cuda


class KestrelGeluAndMul(GeluAndMul):
    """gelu(h) * g of the two halves."""

    def forward_native(self, x: Tensor) -> Tensor:
        return gelu_and_mul(x, approximate=self.approximate)

    forward_cuda = forward_cpu = forward_native


def _rotary(kind: type[RotaryEmbedding]) -> type[RotaryEmbedding]:
    """A subclass of a rotary embedding that rotates in place; the table stays vLLM's.

    Compiled models keep vLLM's, which Inductor fuses: an op that changes two views of one tensor costs them two copies.
    """

    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if torch.compiler.is_compiling():
            return kind.forward_native(self, positions, query, key)
        rotary_embedding(
            positions, query, key, self.head_size, self._match_cos_sin_cache_dtype(query), self.is_neox_style
        )
        return query, key

    methods = {"forward_native": forward, "forward_cuda": forward, "forward_cpu": forward}
    return type(f"Kestrel{kind.__name__}", (kind,), {"__module__": __name__, **methods})


class KestrelFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Routed experts by `fused_experts`; unsupported layers keep vLLM's implementation."""

    is_ours = False

    @property
    def is_monolithic(self) -> bool:
        return False if self.is_ours else bool(super().is_monolithic)

    def process_weights_after_loading(self, layer: Any) -> None:
        moe = self.moe
        self.is_ours = (
            moe.activation in _ACTIVATIONS
            and not moe.has_bias
            and not moe.is_lora_enabled
            and not moe.moe_parallel_config.use_all2all_kernels
            and not layer.apply_router_weight_on_input
            and all(getattr(layer, name, None) is None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
            and all(size % 16 == 0 for size in layer.w2_weight.shape[1:])  # Hd and I, of this rank
        )
        if self.is_ours:
            self.unquantized_backend = UnquantizedMoeBackend.OOT  # weights stay as they were loaded
        super().process_weights_after_loading(layer)

    def forward_native(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any, **others: Any
    ) -> Tensor:
        """Shared experts are computed by vLLM's runner, as this method has no kernel that overlaps them."""
        if not self.is_ours:
            found = super().forward_native(layer, x, topk_weights, topk_ids, *shared, **others)
            assert isinstance(found, Tensor)
            return found
        weights = topk_weights.to(torch.float32)
        options = {"activation": _ACTIVATIONS[self.moe.activation], "expert_map": layer.expert_map}
        return fused_experts(x, layer.w13_weight.data, layer.w2_weight.data, weights, topk_ids, **options)

    forward_cuda = forward_cpu = forward_native


@functools.cache
def _register_linear() -> str:
    from . import linear

    return linear.register()


def register(parts: Iterable[str]) -> list[str]:
    """Replace the layers of these parts, for models made from now on. Returns their names."""
    classes: dict[str, list[tuple[type, type]]] = {
        "norms": [(RMSNorm, KestrelRMSNorm), (GemmaRMSNorm, KestrelGemmaRMSNorm)],
        "activations": [(SiluAndMul, KestrelSiluAndMul), (GeluAndMul, KestrelGeluAndMul)],
        "rotary": [(kind, _rotary(kind)) for kind in _tables()],
        "experts": [(UnquantizedFusedMoEMethod, KestrelFusedMoEMethod)],
    }
    replaced = []
    for part in parts:
        if part == "w4":
            replaced.append(_register_linear())
        for theirs, ours in classes.get(part, []):
            name = theirs.__name__
            if name not in op_registry_oot:
                CustomOp.register_oot(ours, name=name)
            replaced.append(name)
    return replaced


def _tables() -> list[type[RotaryEmbedding]]:
    found = [getattr(importlib.import_module(_ROTARY + module), name) for module, name in _TABLES.items()]
    return [kind for kind in found if kind.forward_native is RotaryEmbedding.forward_native]
