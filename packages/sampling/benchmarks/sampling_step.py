"""Shared by the benchmarks of the ops around the draw: logits, histories, masks, and the same steps by PyTorch.

Logits are normal with deviation 2. A history holds 1024 random tokens, half of them the prompt. The second half of the
rows has a grammar that bans the second half of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

HISTORY = 1024


def sizes(shape: str) -> tuple[int, int]:
    rows, vocabulary = shape.split(",")[0].split("x")
    return int(rows), int(vocabulary)


def logits_of(shape: str) -> torch.Tensor:
    return 2 * torch.randn(*sizes(shape), device="cuda")


def known(shape: str) -> dict[str, torch.Tensor]:
    """The arguments of process_logits for a shape."""
    rows, vocabulary = sizes(shape)
    mask = torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32, device="cuda")
    mask[rows // 2 :, mask.shape[1] // 2 :] = 0
    penalty = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    return {
        "token_ids": torch.randint(vocabulary, (rows, HISTORY), dtype=torch.int32, device="cuda"),
        "lengths": torch.full((rows,), HISTORY, dtype=torch.int32, device="cuda"),
        "prompt_lengths": torch.full((rows,), HISTORY // 2, dtype=torch.int32, device="cuda"),
        **{name: torch.full((rows,), value, device="cuda") for name, value in penalty.items()},
        "bitmask": mask,
    }


def torch_process_logits(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    ids, place = given["token_ids"].long(), torch.arange(HISTORY, device="cuda")
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    is_output = (place >= given["prompt_lengths"][:, None]).float()
    counts = torch.zeros_like(logits).scatter_add_(1, ids, is_output)
    repetition = given["repetition_penalty"][:, None]
    values = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    values = values - given["frequency_penalty"][:, None] * counts - given["presence_penalty"][:, None] * (counts > 0)
    bits = given["bitmask"][:, :, None] >> torch.arange(32, dtype=torch.int32, device="cuda") & 1
    return values.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def torch_token_logprobs(logits: torch.Tensor, ids: torch.Tensor, top_n: int) -> tuple[Any, ...]:
    every = torch.log_softmax(logits, -1)
    own, logit = every.gather(1, ids[:, None]), logits.gather(1, ids[:, None])
    top = torch.topk(every, top_n) if top_n else (every[:, :0].int(), every[:, :0])
    return own[:, 0], 1 + (logits > logit).sum(1), top[1], top[0]
