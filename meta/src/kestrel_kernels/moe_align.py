"""Import path of kestrel-kernels 0.2 for `kestrel_moe.moe_align_block_size`."""

from kestrel_moe import moe_align_block_size

__all__ = ["moe_align_block_size"]
