"""The attention backend KESTREL of vLLM: decode and prefill kernels over vLLM's pages, 16 bits to INT4."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from kestrel_attention import flash_attn_varlen_func, flash_attn_with_kvcache
from kestrel_kvcache import gather_cache, int4_cache_write, int8_cache_write, reshape_and_cache
from kestrel_runtime.paged_cache import FP8_OF_NAME

from . import BACKEND, int4
from .int4 import INT4
from .pages import int8_sections

INT8 = "int8_per_token_head"
_INT8_HEADS = (64, 128, 256)
_QUERIES, _KEYS = 256, 4096
"""Bounds of lengths are rounded up to multiples of these, so that calls of many lengths share few plans."""


@dataclasses.dataclass
class Metadata:
    """One batch, the sequences with one new token first.

    tokens: number of tokens, without padding. decodes: number of sequences with one new token. starts: int32
    [B - decodes + 1], offsets of the other sequences' tokens, from the first of them on; None if there are none.
    decode_lengths, prompt_lengths: int32, of both kinds of sequences, new tokens included. decode_table, prompt_table:
    int32 [sequences, pages]. max_queries, max_keys: bounds of the lengths.
    prompts: lengths of the other sequences on the host, with an INT8 or INT4 cache. key_starts: int32, their offsets.
    rows, token_rows: int32, with an INT4 cache the row in the tail of each sequence, and of each token.
    """

    tokens: int
    decodes: int
    starts: Tensor | None
    decode_lengths: Tensor
    prompt_lengths: Tensor
    decode_table: Tensor
    prompt_table: Tensor
    max_queries: int
    max_keys: int
    prompts: list[int] | None = None
    key_starts: Tensor | None = None
    rows: Tensor | None = None
    token_rows: Tensor | None = None


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes the metadata of a batch; for decoding it keeps vLLM's own tensors, so that CUDA graphs can hold them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self._rows: int4.Rows | None = None
        if kv_cache_spec.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
            for name in ("speculative_config", "kv_transfer_config"):
                if getattr(vllm_config, name) is not None:
                    raise ValueError(f"{BACKEND}: {name}: expected None with an INT4 cache, got a configuration")
            scheduler = vllm_config.scheduler_config
            self._rows = int4.Rows(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ValueError(f"{BACKEND}: causal: expected True, got {batch.causal}")
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(batch, decode_threshold=1)
        prompts, key_starts, rows, token_rows = None, None, None, None
        if self._rows is not None:
            if batch.req_idx is None:
                raise ValueError(f"{BACKEND}: an INT4 cache needs vLLM's second model runner, got the first")
            requests = len(batch.req_idx)
            rows, token_rows = self._rows.set(batch.req_idx, batch.query_start_loc_cpu[: requests + 1].numpy())
        if prefills and self.kv_cache_spec.kv_quant_mode.is_per_token_head:
            known = batch.seq_lens_cpu_upper_bound  # exact for these sequences, but for drafts
            is_known = known is not None and self.vllm_config.speculative_config is None
            prompts = (known if is_known else batch.seq_lens)[decodes : decodes + prefills].tolist()
            ends = list(itertools.accumulate(prompts, initial=0))
            key_starts = torch.tensor(ends, dtype=torch.int32, device=batch.seq_lens.device)
        return Metadata(
            tokens=batch.num_actual_tokens,
            decodes=decodes,
            starts=batch.query_start_loc[decodes:] - decode_tokens if prefills else None,
            decode_lengths=batch.seq_lens[:decodes],
            prompt_lengths=batch.seq_lens[decodes:],
            decode_table=batch.block_table_tensor[:decodes],
            prompt_table=batch.block_table_tensor[decodes:],
            max_queries=_rounded(batch.max_query_len, _QUERIES),
            max_keys=_rounded(batch.max_seq_len, _KEYS),
            prompts=prompts,
            key_starts=key_starts,
            rows=rows,
            token_rows=token_rows,
        )


class KestrelBackend(AttentionBackend):
    """``LLM(attention_backend="KESTREL")``. Decoder attention with grouped heads, windows, softcap and sinks."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_OF_NAME, INT8, INT4]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        quantised = kv_cache_spec is not None and kv_cache_spec.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD
        return [int4.PAGE] if quantised else [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """An INT8 page has two codes of each channel and two float32 scales for each token and head."""
        sizes = {
            KVQuantMode.INT8_PER_TOKEN_HEAD: 2 * spec.head_size + 8,
            KVQuantMode.INT4_PER_TOKEN_HEAD: int4.bytes_of_a_cell(spec.head_size),
        }
        if spec.kv_quant_mode not in sizes or spec.state_content_bytes is not None:
            return spec
        return dataclasses.replace(spec, state_content_bytes=sizes[spec.kv_quant_mode])

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Any, but with an INT8 or INT4 cache those whose pages are one run of bytes."""
        config = get_current_vllm_config_or_none()
        if config is not None and config.cache_config.cache_dtype not in (INT8, INT4):
            return None
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: Any,
        block_size: int | None = None,
        *others: Any,
        **more: Any,
    ) -> Any:
        """Why this combination is unsupported, or None."""
        if kv_cache_dtype in FP8_OF_NAME and head_size % 16:
            return f"an FP8 cache needs heads of a multiple of 16, got {head_size}"
        for kind, name, heads in ((INT8, "INT8", _INT8_HEADS), (INT4, "INT4", int4.HEADS)):
            if kv_cache_dtype == kind and head_size not in heads:
                return f"an {name} cache needs heads of 64, 128 or 256, got {head_size}"
        if kv_cache_dtype == INT4 and block_size not in (None, int4.PAGE):
            return f"an INT4 cache needs --block-size 64, got {block_size}"
        return None


class Impl(AttentionImpl[Metadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(f"{BACKEND}: alibi_slopes: expected None, got slopes")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{BACKEND}: attn_type: expected decoder, got {attn_type}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.scores: dict[str, Any] = {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1 if sliding_window is None else sliding_window - 1, -1),
            "softcap": logits_soft_cap or 0.0,
            "sinks": sinks,
        }
        self._last_cache: tuple[Tensor, Any] | None = None
        self._tail: Tensor | None = None
        self._tail_shape: tuple[int, ...] | None = None
        if kv_cache_dtype == INT4:
            if kv_sharing_target_layer_name is not None:
                raise NotImplementedError(f"{BACKEND}: kv_sharing_target_layer_name: expected None with an INT4 cache")
            config = get_current_vllm_config()
            self._device = config.device_config.device
            self._tail_shape = (config.scheduler_config.max_num_seqs, int4.PAGE, self.num_kv_heads, head_size)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._last_cache = None  # scales may be other tensors
        # Now, so that vLLM counts this memory as the model's; once, as captured graphs point to it.
        if self._tail_shape is not None and self._tail is None:
            self._tail = torch.zeros(self._tail_shape, dtype=act_dtype, device=self._device)

    def _cache(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Keys and values [blocks, P, Hk, D] of vLLM's [blocks, Hk, P, 2 D], and their scales.

        Views of the last cache are kept: they cost the host as much as a launch.
        """
        if self._last_cache is None or self._last_cache[0] is not kv_cache:
            self._last_cache = kv_cache, self._views(layer, kv_cache)
        found: tuple[Tensor, Tensor, dict[str, Any]] = self._last_cache[1]
        return found

    def _views(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        if self.kv_cache_dtype == INT8:
            return int8_sections(kv_cache, self.head_size)
        if self.kv_cache_dtype == INT4:
            keys, values, scales = int4.sections(kv_cache, self.head_size)
            return keys, values, {**scales, "k_tail": self._tail}
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        codes = FP8_OF_NAME.get(self.kv_cache_dtype)
        if codes is None:
            return keys, values, {}
        scales = {"k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1)}
        return keys.view(codes), values.view(codes), scales

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store key and value [T, Hk, D] in the slots; rows past them are padding."""
        keys, values, scales = self._cache(layer, kv_cache)
        if self.kv_cache_dtype == INT8:
            int8_cache_write(key, value, keys, values, scales["k_scale"], scales["v_scale"], slot_mapping)
            return
        if self.kv_cache_dtype == INT4:
            batch = get_forward_context().attn_metadata[layer.layer_name]
            rows = batch.token_rows[: len(slot_mapping)]
            int4_cache_write(key, value, keys, values, **scales, slot_mapping=slot_mapping, seq_ids=rows)
            return
        kind = self.kv_cache_dtype if self.kv_cache_dtype in FP8_OF_NAME else "auto"
        reshape_and_cache(key, value, keys, values, slot_mapping, kind, **scales)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output: [T, H, D]; keys and values are in the cache. attn_metadata None: vLLM profiles memory."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{BACKEND}: output_scale: expected None, got a scale")
        if attn_metadata is None:
            return output.zero_()
        batch, (keys, values, scales) = attn_metadata, self._cache(layer, kv_cache)
        if decodes := batch.decodes:
            of_rows: dict[str, Any] = {} if batch.rows is None else {"seq_ids": batch.rows[:decodes]}
            flash_attn_with_kvcache(
                query[:decodes, None],
                keys,
                values,
                cache_seqlens=batch.decode_lengths,
                block_table=batch.decode_table,
                out=output[:decodes, None],
                **of_rows,
                **scales,
                **self.scores,
            )
        if batch.starts is None:
            return output
        new = slice(decodes, batch.tokens)
        if batch.prompts is not None:
            self._prefill_over_codes(query[new], batch, keys, values, scales, output[new])
            return output
        flash_attn_varlen_func(
            query[new],
            keys,
            values,
            batch.starts,
            None,
            batch.max_queries,
            batch.max_keys,
            block_table=batch.prompt_table,
            seqused_k=batch.prompt_lengths,
            out=output[new],
            **scales,
            **self.scores,
        )
        return output

    def _prefill_over_codes(
        self,
        query: Tensor,
        batch: Metadata,
        keys: Tensor,
        values: Tensor,
        scales: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        """Prefill kernels do not read INT8 or INT4 pages: the keys of each sequence are gathered first, as values."""
        assert batch.prompts is not None
        gathered = []
        for b, length in enumerate(batch.prompts):
            of_row: dict[str, Any] = {} if batch.rows is None else {"seq_ids": batch.rows[batch.decodes + b :][:1]}
            gathered.append(
                gather_cache(keys, values, batch.prompt_table[b], length, dtype=query.dtype, **of_row, **scales)
            )
        k, v = (torch.cat(parts) for parts in zip(*gathered, strict=True))
        assert batch.starts is not None
        bounds = batch.max_queries, batch.max_keys
        flash_attn_varlen_func(query, k, v, batch.starts, batch.key_starts, *bounds, out=output, **self.scores)


def _rounded(length: int, unit: int) -> int:
    return -(-length // unit) * unit
