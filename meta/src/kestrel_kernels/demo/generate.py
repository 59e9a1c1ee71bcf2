"""The generation loop: prompts in, sampled tokens out, one step at a time."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kestrel_runtime import UnsupportedError
from kestrel_sampling import sample_from_logits

from ..graphs import Beside, captured, replay
from ..host_copy import HostCopy
from .cache import PageTable
from .config import DecoderConfig, DemoError
from .model import Decoder, Step
from .request import check_fits


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Sequence b draws with the seed `seed + b`, independently of the batch."""

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    *,
    stop: int | None = None,
    graph: bool = False,
) -> Iterator[list[int]]:
    """Yields the next token of each sequence, `new_tokens` times, or until every sequence has drawn `stop`.

    On a GPU the host reads a token while the device computes the next one, and reads nothing else.
    graph: on a GPU, decode steps replay a CUDA graph if every op of a step can be captured.
    """
    check_fits(decoder.config, prompts, new_tokens)
    table = decoder.cache.reserve([len(prompt) + new_tokens - 1 for prompt in prompts])
    try:
        decoding = Decoding(decoder, table, prompts, Chooser(sampling, len(prompts), decoder))
        stopped = [False] * len(prompts)
        for count in range(1, new_tokens + 1):
            ids = HostCopy(decoding.ids)
            if count < new_tokens and decoding.ids.is_cuda:  # the device computes while the host reads
                decoding.advance(graph=graph)
            found: list[int] = ids.wait().tolist()
            if min(found) < 0:
                raise DemoError("the model: expected finite logits, got NaN or infinity (weights or dtype unfit)")
            yield found
            stopped = [before or token == stop for before, token in zip(stopped, found, strict=True)]
            if all(stopped):
                return
            if count < new_tokens and not decoding.ids.is_cuda:
                decoding.advance(graph=graph)
    finally:
        table.release()


class Decoding:
    """A batch of sequences that grow by one token per step. A step changes all state in place.

    tokens: int32 [B], the input of the next step. ids: the same, -1 where a row of logits had no finite maximum.
    """

    EAGER_STEPS = 2
    """Steps before the capture: libraries and kernels set up state on first use."""

    def __init__(self, decoder: Decoder, table: PageTable, prompts: Sequence[Sequence[int]], choose: Chooser) -> None:
        device = decoder.weights.device
        counts = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([token for prompt in prompts for token in prompt]).to(device)
        last = (torch.tensor(counts).cumsum(0) - 1).to(device)
        self.decoder = decoder
        self.choose = choose
        self._chosen = choose(decoder(tokens, Step.prefill(table, counts), last))
        self.tokens, self.ids = self._chosen
        ends = torch.tensor(counts).clamp(max=table.capacity - 1)  # a table of prompts alone has no place for a step
        self.step = Step.decode(table, ends.to(device))
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def advance(self, *, graph: bool) -> None:
        """Puts the next token of each sequence into `ids`."""
        if graph and self.ids.is_cuda and self.steps == self.EAGER_STEPS:
            self._capture()
        if self.graph is not None:
            replay(self.graph, self.ids.device)
        else:
            self._step()
        self.steps += 1

    def _capture(self) -> None:
        """Capture one step, unless an op refuses: a reference that reads a value on the host."""
        with contextlib.suppress(UnsupportedError):
            self.graph = captured(self._step, self.ids.device)

    def _step(self) -> None:
        logits = self.decoder(self.tokens, self.step)
        with Beside(self.tokens.device) as counted:
            self.step.advance()
        self.choose(logits, out=self._chosen)
        counted.join()


class Chooser:
    """Logits [B, V] to int32 [2, B]: tokens, and ids, which are -1 where a row has no finite maximum."""

    def __init__(self, sampling: Sampling, batch: int, decoder: Decoder) -> None:
        device = decoder.weights.device
        self.sampling = sampling
        self.seeds = sampling.seed + torch.arange(batch, device=device)
        self.draw = torch.zeros(1, dtype=torch.int64, device=device)
        self.invalid = torch.tensor([[0], [-1]], dtype=torch.int32, device=device)  # tokens and ids of an invalid row

    def __call__(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        ids, valid = sample_from_logits(
            logits,
            self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=self.seeds,
            offset=self.draw,
            return_valid=True,
        )
        self.draw.add_(1)
        return torch.where(valid, ids, self.invalid, out=out)


class Text:
    """Tokens to text: bytes are decoded as UTF-8 incrementally; other tokens are printed as numbers."""

    def __init__(self, config: DecoderConfig) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if config.bytes_in_bytes_out else None

    def add(self, token: int) -> str:
        return f"{token} " if self._utf8 is None else self._utf8.decode(bytes([token]))

    def end(self) -> str:
        """The replacement character for an incomplete one, or nothing."""
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)
