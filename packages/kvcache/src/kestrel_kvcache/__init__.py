"""Writing and reading paged KV caches for LLM and VLM inference. See README.md for the ops and the layouts."""

from .reshape_and_cache import reshape_and_cache

__version__ = "0.1.0"

__all__ = ["reshape_and_cache"]
