"""Import path of kestrel-kernels 0.2 for `kestrel_moe.gelu_residual`."""

from kestrel_moe import gelu_residual

__all__ = ["gelu_residual"]
