"""Choosing tokens and experts: top-k and sampling. See README.md for the ops."""

from .chain_speculative_sampling import chain_speculative_sampling
from .min_p_sampling import min_p_sampling_from_probs
from .probabilities import softmax, top_k_renorm_probs, top_p_renorm_probs
from .process_and_sample import process_and_sample
from .process_logits import process_logits
from .sample_from_logits import sample_from_logits
from .sample_with_logprobs import SampledLogprobs, sample_with_logprobs
from .sampling_from_probs import sampling_from_probs
from .token_logprobs import TokenLogprobs, token_logprobs
from .top_k_sampling import top_k_sampling_from_probs, top_k_top_p_sampling_from_probs
from .top_p_sampling import top_p_sampling_from_probs
from .topk import topk_fwd

__version__ = "0.1.0"

__all__ = [
    "SampledLogprobs",
    "TokenLogprobs",
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "process_and_sample",
    "process_logits",
    "sample_from_logits",
    "sample_with_logprobs",
    "sampling_from_probs",
    "softmax",
    "token_logprobs",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "topk_fwd",
]
