"""Import path of kestrel-kernels 0.2 for `kestrel_attention.flash_attn_varlen_func`."""

from kestrel_attention import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
