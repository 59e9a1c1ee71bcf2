"""Import path of kestrel-kernels 0.2 for `kestrel_sampling.topk_fwd`."""

from kestrel_sampling import topk_fwd

__all__ = ["topk_fwd"]
