"""Attention for LLM and VLM inference: dense, packed and over paged caches. See README.md for the ops."""

from .flash_attn import flash_attn_func, flash_attn_varlen_func
from .flash_attn_with_kvcache import flash_attn_with_kvcache
from .merge_attention_states import merge_attention_states
from .plan import MORE_WARPS
from .tau_tail import tau_tail

__version__ = "0.1.0"

__all__ = [
    "MORE_WARPS",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attention_states",
    "tau_tail",
]
