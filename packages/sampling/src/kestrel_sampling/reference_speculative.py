"""The PyTorch reference of speculative sampling along a chain of draft tokens.

Position i of a row uses Philox4x32-10 with key = seed and counter = (offset, i). Its second word decides whether the
draft token is accepted; its first word draws the token, if the chain ends there. Without draft tokens a call is
therefore ``sampling_from_probs``.

- acceptance: ``word * draft_prob < 2^32 * target_prob`` in float64. The left side is rounded once, the right side is
  exact, so that every device decides alike.
- the last token after a rejection: from ``target - draft`` in float32, negative entries as 0; its integer masses and
  the draw are those of ``reference_sampling.py``. If nothing remains, which rounding alone can cause, from ``target``.
- the last token otherwise: from ``target``.
"""

from __future__ import annotations

import torch

from ._parameters import Keys
from .reference_sampling import draw, integer_mass, random_words


def chain_speculative_sampling(
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor,
    maybe_output_emitted_draft_token_num: torch.Tensor,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, S + 1] and valid [B]; adds the numbers of accepted and of emitted draft tokens in place."""
    rows, steps = draft_token_ids.shape
    width, device = target_probs.shape[2], target_probs.device
    keys = Keys(seed, seed_value, offset, offset_value, offset_stride)
    words = random_words(keys, target_probs, torch.arange(steps + 1, device=device)).expand(rows, -1, -1)

    exists = (draft_token_ids >= 0) & (draft_token_ids < width)
    columns = torch.where(exists, draft_token_ids, 0).long().unsqueeze(2)
    target = target_probs[:, :steps].gather(2, columns).squeeze(2).double()
    if draft_probs is None:
        draft = torch.ones_like(target)
    else:
        draft = draft_probs.gather(2, columns).squeeze(2).double().clamp(min=0)
    accepted = exists & (words[:, :steps, 1].double() * draft < target * 2.0**32)
    emitted = accepted.long().cumprod(1).sum(1, keepdim=True)

    left = at_position(target_probs, emitted).float()
    if steps:
        last = emitted.clamp(max=steps - 1)
        rejected = (emitted < steps) & exists.gather(1, last)
        if draft_probs is None:
            removed = (torch.arange(width, device=device) == at_position(columns, last)).float()
        else:
            removed = at_position(draft_probs, last).float().clamp(min=0)
        residual = left - removed
        left = torch.where(rejected & ~(residual.amax(dim=1, keepdim=True) <= 0), residual, left)
    mass, valid = integer_mass(left)
    drawn, valid = draw(mass, valid, words[..., 0].gather(1, emitted))

    position = torch.arange(steps + 1, device=device)
    chain = torch.cat((draft_token_ids.to(torch.int32), drawn.unsqueeze(1)), 1)
    ids = torch.where(position < emitted, chain, torch.where(position == emitted, drawn.unsqueeze(1), -1))
    maybe_output_accepted_token_num += accepted.sum(1)
    maybe_output_emitted_draft_token_num += emitted.squeeze(1)
    return ids, valid


def at_position(rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[B, N] of rows [B, S, N] at position [B, 1]."""
    return rows.gather(1, position.unsqueeze(2).expand(-1, -1, rows.shape[2])).squeeze(1)
