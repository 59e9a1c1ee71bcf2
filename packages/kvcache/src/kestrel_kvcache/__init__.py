"""Writing and reading paged KV caches for LLM and VLM inference. See README.md for the ops and the layouts."""

from .gather_cache import gather_cache
from .int_cache_write import int4_cache_write, int8_cache_write
from .reshape_and_cache import reshape_and_cache
from .rotary_and_cache import rotary_and_cache

__version__ = "0.1.0"

__all__ = ["gather_cache", "int4_cache_write", "int8_cache_write", "reshape_and_cache", "rotary_and_cache"]
