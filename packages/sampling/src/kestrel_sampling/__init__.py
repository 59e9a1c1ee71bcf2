"""Choosing tokens and experts: top-k and sampling. See README.md for the map."""

from .top_p_sampling import top_p_sampling_from_probs
from .topk import topk_fwd

__version__ = "0.1.0"

__all__ = ["top_p_sampling_from_probs", "topk_fwd"]
