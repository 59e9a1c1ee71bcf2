"""Import paths of kestrel-kernels 0.2: `kestrel_kernels.flash_attn.cute`."""
