"""Rotary position embeddings for LLM and VLM inference. See README.md for the ops."""

from .cos_sin_cache import build_cos_sin_cache
from .rotary_embedding import rotary_embedding

__version__ = "0.1.0"

__all__ = ["build_cos_sin_cache", "rotary_embedding"]
