"""The attention backend "kestrel" of SGLang: decode and prefill kernels over SGLang's own pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from kestrel_attention import flash_attn_varlen_func, flash_attn_with_kvcache
from kestrel_kvcache import reshape_and_cache

_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
_QUERIES = 256
"""The bound of new tokens is rounded up to a multiple of this, so that calls of many lengths share few plans."""


@dataclasses.dataclass
class Metadata:
    """One batch. lengths: int32 [B], new tokens included. block_table: int32 [B, pages].

    starts: int32 [B + 1], where the new tokens of each sequence begin; None where each has one.
    """

    lengths: Tensor
    block_table: Tensor
    starts: Tensor | None = None
    max_queries: int = 1


class KestrelAttention(AttentionBackend):
    """Decoder attention in bf16, fp16 and FP8: grouped heads, windows, softcap and sinks.

    Raises ValueError for latent attention (MLA) and for a separate pool of sliding-window layers.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if getattr(runner, "use_mla_backend", False):
            raise ValueError("kestrel attention: model: expected keys and values for each head, got latent ones (MLA)")
        pool = runner.token_to_kv_pool
        if not isinstance(pool, MHATokenToKVPool) or pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
            raise ValueError(
                "kestrel attention: token_to_kv_pool: expected MHATokenToKVPool in nhd (for layers with a window: "
                f"--disable-hybrid-swa-memory), got {type(pool).__name__}"
            )
        self.pool = pool
        self.requests = runner.req_to_token_pool
        self.page_size = runner.page_size
        self.max_pages = -(-runner.model_config.context_len // self.page_size)
        self.graph_metadata: Metadata | None = None
        self.forward_metadata: Metadata | None = None

    def _table(self, batch: Any) -> Tensor:
        """The pages of each request, int32 [B, pages]; entries past its length are undefined."""
        slots: Tensor = self.requests.req_to_token[batch.req_pool_indices, :: self.page_size]
        return slots.div(self.page_size, rounding_mode="floor").to(torch.int32)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens.to(torch.int32)
        if mode.is_decode_or_idle():
            self.forward_metadata = Metadata(lengths, self._table(forward_batch))
            return
        if mode.is_target_verify() or not mode.is_extend():
            raise NotImplementedError(f"kestrel attention: forward_mode: expected decoding or a prefill, got {mode}")
        counts = forward_batch.extend_seq_lens
        starts = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        on_host = forward_batch.extend_seq_lens_cpu
        longest = int(max(on_host)) if on_host is not None else int(counts.max())
        bound = -(-longest // _QUERIES) * _QUERIES
        self.forward_metadata = Metadata(lengths, self._table(forward_batch), starts, bound)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self.requests.req_to_token.device
        table = torch.zeros(max_bs, self.max_pages, dtype=torch.int32, device=device)
        self.graph_metadata = Metadata(torch.zeros(max_bs, dtype=torch.int32, device=device), table)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors that a CUDA graph has captured; sequences of length 0 give zeros."""
        if not forward_batch.forward_mode.is_decode_or_idle() or self.graph_metadata is None:
            raise NotImplementedError("kestrel attention: CUDA graphs: expected decoding, got another mode")
        count, held = forward_batch.batch_size, self.graph_metadata
        table = self._table(forward_batch)[:count, : self.max_pages]
        held.lengths[:count].copy_(forward_batch.seq_lens[:count])
        held.block_table[:count, : table.shape[1]].copy_(table)
        self.forward_metadata = Metadata(held.lengths[:count], held.block_table[:count])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """q: [B, H * D] or [B, H, D]; returns [B, H * D]."""
        batch, (keys, values, options) = self._begin(layer, more)
        if save_kv_cache and k is not None:
            self._store(k, v, layer, forward_batch.out_cache_loc, keys, values, options)
        query = q.reshape(-1, 1, layer.tp_q_head_num, layer.head_dim)
        lengths, table = batch.lengths, batch.block_table
        out = flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, block_table=table, **options)
        assert isinstance(out, Tensor)
        return out.view(len(query), -1)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """q: [T, H * D] or [T, H, D]; returns [T, H * D]."""
        batch, (keys, values, options) = self._begin(layer, more)
        if save_kv_cache and k is not None:
            self._store(k, v, layer, forward_batch.out_cache_loc, keys, values, options)
        assert batch.starts is not None
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        bounds = batch.max_queries, self.max_pages * self.page_size
        options |= {"block_table": batch.block_table, "seqused_k": batch.lengths}
        out = flash_attn_varlen_func(query, keys, values, batch.starts, None, *bounds, **options)
        assert isinstance(out, Tensor)
        return out.view(len(query), -1)

    def _begin(self, layer: Any, more: dict[str, Any]) -> tuple[Metadata, tuple[Tensor, Tensor, dict[str, Any]]]:
        """The batch, keys and values as pages [blocks, P, Hk, D], and the options of both attention ops."""
        unknown = {name for name, value in more.items() if value is not None} - {"sinks"}
        if unknown or layer.is_cross_attention or layer.attn_type != AttentionType.DECODER or layer.use_irope:
            raise NotImplementedError(f"kestrel attention: expected decoder attention, got {sorted(unknown)}, {layer}")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            raise NotImplementedError(
                f"kestrel attention: logit_capping_method: expected tanh, got {layer.logit_capping_method}"
            )
        if (layer.xai_temperature_len or -1) > 0:
            raise NotImplementedError(
                f"kestrel attention: xai_temperature_len: expected none, got {layer.xai_temperature_len}"
            )
        assert self.forward_metadata is not None
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        options = {
            "softmax_scale": layer.scaling,
            "causal": True,
            "window_size": (layer.sliding_window_size, -1),  # keys before the query, as here; -1: no window
            "softcap": layer.logit_cap or 0.0,
            "sinks": more.get("sinks"),
        }
        if keys.dtype in _FP8:
            for name in ("k_scale", "v_scale"):
                scale = getattr(layer, name)
                options[name] = None if scale is None else scale.view(-1)
        pages = (x.view(-1, self.page_size, *x.shape[1:]) for x in (keys, values))
        return self.forward_metadata, (*pages, options)

    def _store(
        self, k: Tensor, v: Tensor, layer: Any, slots: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]
    ) -> None:
        if type(self.pool) is not MHATokenToKVPool:  # a pool that writes in its own way
            self.pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v, layer.k_scale, layer.v_scale)
            return
        k, v = (x.view(-1, layer.tp_k_head_num, layer.head_dim) for x in (k, v))
        scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
        reshape_and_cache(k, v, keys, values, slots, _FP8.get(keys.dtype, "auto"), **scales)
