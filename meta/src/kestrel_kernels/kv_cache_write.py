"""Import path of kestrel-kernels 0.2 for `kestrel_kvcache.reshape_and_cache`."""

from kestrel_kvcache import reshape_and_cache

__all__ = ["reshape_and_cache"]
