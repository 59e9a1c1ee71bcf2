"""Import path of kestrel-kernels 0.2 for `kestrel_attention.tau_tail`."""

from kestrel_attention import tau_tail

__all__ = ["tau_tail"]
