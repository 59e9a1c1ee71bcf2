"""Rotary position embeddings for LLM and VLM inference. See README.md for the ops."""

from .cos_sin_cache import build_cos_sin_cache
from .multimodal_rotary_embedding import multimodal_rotary_embedding
from .rotary_embedding import rotary_embedding

__version__ = "0.1.0"

__all__ = ["build_cos_sin_cache", "multimodal_rotary_embedding", "rotary_embedding"]
