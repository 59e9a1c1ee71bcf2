"""Import path of kestrel-kernels 0.2 for `kestrel_norm.layer_norm`."""

from kestrel_norm import layer_norm

__all__ = ["layer_norm"]
