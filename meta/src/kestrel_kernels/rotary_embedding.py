"""Import path of kestrel-kernels 0.2 for `kestrel_rope.rotary_embedding`."""

from kestrel_rope import rotary_embedding

__all__ = ["rotary_embedding"]
