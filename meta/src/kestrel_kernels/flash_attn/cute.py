"""Import path of kestrel-kernels 0.2 for the attention functions of `kestrel_attention`."""

from kestrel_attention import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
