"""The sampling backend "kestrel" of SGLang: temperature, min-p, top-k and top-p of a batch in one op."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from kestrel_sampling import sample_from_logits


class KestrelSampler(Sampler):
    """Draws from logits, without writing probabilities unless log-probabilities are requested.

    min-p is applied first, then top-k and top-p to the remaining entries. Where the batch has seeds, which SGLang's
    deterministic mode gives it, a row draws with its seed and position, so its token does not depend on the batch.
    Otherwise rows draw from torch's generator.
    """

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, *arguments: Any, **options: Any
    ) -> Tensor:
        is_plain = not (
            return_logprob
            or sampling_info.is_all_greedy
            or sampling_info.sampling_mask_batch_indices is not None
            or self.rl_on_policy_target is not None
        )
        if not is_plain:
            found = super().forward(logits_output, sampling_info, return_logprob, *arguments, **options)
            assert isinstance(found, Tensor)
            return found
        # SGLang calls forward(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids, positions).
        positions = arguments[2] if len(arguments) > 2 else options["positions"]
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        ids = self._draw(logits, sampling_info.temperatures.view(-1), sampling_info, positions)
        self._sync_token_ids_across_tp(ids, sampling_info)
        return ids

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, None]:
        if sampling_info.sampling_mask_batch_indices is not None:
            raise NotImplementedError("kestrel sampling: return_sampling_mask: expected False, got a request with it")
        return self._draw(probs.log(), 1.0, sampling_info, positions), None

    def _draw(self, logits: Tensor, temperature: float | Tensor, info: Any, positions: Tensor) -> Tensor:
        keys = {} if info.sampling_seed is None else {"seed": info.sampling_seed, "offset": positions.long()}
        ids = sample_from_logits(
            logits,
            temperature,
            info.top_ks.to(torch.int32),
            info.top_ps,
            info.min_ps if info.need_min_p_sampling else 0.0,
            filter_apply_order="joint",
            **keys,
        )
        assert isinstance(ids, Tensor)
        return ids
