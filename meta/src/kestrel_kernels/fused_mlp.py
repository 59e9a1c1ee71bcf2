"""Import path of kestrel-kernels 0.2 for `kestrel_moe.fused_mlp`."""

from kestrel_moe import fused_mlp

__all__ = ["fused_mlp"]
