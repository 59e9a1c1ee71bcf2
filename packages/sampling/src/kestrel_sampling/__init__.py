"""Choosing tokens and experts: top-k and sampling. See README.md for the ops."""

from .min_p_sampling import min_p_sampling_from_probs
from .probabilities import softmax, top_k_renorm_probs, top_p_renorm_probs
from .sample_from_logits import sample_from_logits
from .sampling_from_probs import sampling_from_probs
from .top_k_sampling import top_k_sampling_from_probs, top_k_top_p_sampling_from_probs
from .top_p_sampling import top_p_sampling_from_probs
from .topk import topk_fwd

__version__ = "0.1.0"

__all__ = [
    "min_p_sampling_from_probs",
    "sample_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "topk_fwd",
]
