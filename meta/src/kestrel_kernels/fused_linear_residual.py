"""Import path of kestrel-kernels 0.2 for `kestrel_moe.fused_linear_residual`."""

from kestrel_moe import fused_linear_residual

__all__ = ["fused_linear_residual"]
