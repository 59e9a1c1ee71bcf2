"""The generation loop: a prompt goes in, tokens come out as they are drawn."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kestrel_sampling import top_p_sampling_from_probs, topk_fwd

from .cache import PageTable
from .config import DecoderConfig, DemoError
from .model import Decoder, Step

DOCUMENT = 0
"""The byte that begins and ends a document."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Sequence b draws with the seed `seed + b`, whatever else is in the batch."""

    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    *,
    stop: int | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of each sequence, `new_tokens` times, or until every sequence has given `stop`.

    The host reads a token while the device computes the next one; nothing else is read.
    """
    check_request(decoder.config, prompts, new_tokens)
    table = decoder.cache.reserve([len(prompt) + new_tokens - 1 for prompt in prompts])
    try:
        yield from _tokens(decoder, table, prompts, new_tokens, Chooser(sampling, len(prompts), decoder), stop)
    finally:
        table.release()


def check_request(config: DecoderConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    if new_tokens < 1:
        raise DemoError(f"--max-new-tokens: expected at least 1, got {new_tokens}")
    if not prompts:
        raise DemoError("prompts: expected at least one, got none")
    for prompt in prompts:
        if not prompt:
            raise DemoError("--prompt: expected at least one character, got none")
        wrong = [token for token in prompt if not 0 <= token < config.vocabulary]
        if wrong:
            raise DemoError(f"--prompt: expected tokens below {config.vocabulary}, got {wrong[0]}")
        if len(prompt) + new_tokens - 1 > config.context:
            raise DemoError(
                f"--prompt: expected at most {config.context} tokens with those to come (the model's context), "
                f"got {len(prompt)} and {new_tokens} to come"
            )


def _tokens(
    decoder: Decoder,
    table: PageTable,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    choose: Chooser,
    stop: int | None,
) -> Iterator[list[int]]:
    device = decoder.weights.device
    counts = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt]).to(device)
    last = (torch.tensor(counts).cumsum(0) - 1).to(device)
    positions = torch.tensor(counts).to(device)
    ids = choose(decoder(tokens, Step.prefill(table, counts), last))
    stopped = [False] * len(prompts)
    for count in range(1, new_tokens + 1):
        reading = Reading(ids)
        if count < new_tokens:
            ids = choose(decoder(ids.clamp(min=0), Step.decode(table, positions)))
            positions = positions + 1
        found = reading.tokens()
        if min(found) < 0:
            raise DemoError("the model: expected finite logits, got NaN or infinity (weights or dtype unfit)")
        yield found
        stopped = [before or token == stop for before, token in zip(stopped, found, strict=True)]
        if all(stopped):
            return


class Chooser:
    """Logits [B, V] to token ids int32 [B]; -1 where a row has no finite maximum."""

    def __init__(self, sampling: Sampling, batch: int, decoder: Decoder) -> None:
        device = decoder.weights.device
        self.sampling = sampling
        self.seeds = sampling.seed + torch.arange(batch, device=device)
        self.draw = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.sampling.temperature == 0:
            values, indices = topk_fwd(logits, 1)
            return torch.where(values[:, 0].isfinite(), indices[:, 0], -1)
        probabilities = torch.softmax(logits.float() / self.sampling.temperature, dim=-1)
        ids, valid = top_p_sampling_from_probs(
            probabilities, self.sampling.top_p, seed=self.seeds, offset=self.draw, return_valid=True
        )
        self.draw = self.draw + 1
        return torch.where(valid, ids, -1)


class Reading:
    """Ids on their way to the host. On a GPU the copy waits for them alone, not for what is queued behind."""

    def __init__(self, ids: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if ids.is_cuda:
            self.ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self.ids.copy_(ids, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.ids = ids

    def tokens(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        return [int(token) for token in self.ids.tolist()]


class Text:
    """Tokens as text: bytes decoded as UTF-8 as they come, or numbers where tokens are not bytes."""

    def __init__(self, config: DecoderConfig) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if config.bytes_in_bytes_out else None

    def add(self, token: int) -> str:
        return f"{token} " if self._utf8 is None else self._utf8.decode(bytes([token]))

    def end(self) -> str:
        """What an unfinished character leaves."""
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)


def encode(prompt: str) -> list[int]:
    """A document that begins with this text."""
    return [DOCUMENT, *prompt.encode("utf-8")]
