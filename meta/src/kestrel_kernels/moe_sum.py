"""Import path of kestrel-kernels 0.2 for `kestrel_moe.moe_sum`."""

from kestrel_moe import moe_sum

__all__ = ["moe_sum"]
