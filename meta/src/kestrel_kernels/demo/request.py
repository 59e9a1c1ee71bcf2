"""A request to the demo: the options of the command line, checked without torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from .config import PRESETS, DecoderConfig, DemoError

DTYPES = ("bfloat16", "float32", "float16")
KV_CACHES = ("auto", "fp8", "int8", "int4")
EXPERTS = ("bf16", "fp8")

DOCUMENT = 0
"""The byte that begins and ends a document."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `generate`. Constructing one raises DemoError for a value that no model accepts."""

    preset: str
    prompt: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    dtype: str
    kv_cache: str
    experts: str
    model: Path | None
    context: int | None
    device: str | None

    def __post_init__(self) -> None:
        _choice("--preset", self.preset, PRESETS)
        if not self.prompt:
            raise DemoError("--prompt: expected at least one character, got an empty prompt")
        if self.max_new_tokens < 1:
            raise DemoError(f"--max-new-tokens: expected at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise DemoError(f"--temperature: expected a finite number of at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise DemoError(f"--top-p: expected a number above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise DemoError(f"--seed: expected 0 to 2**63 - 1, got {self.seed}")
        _choice("--dtype", self.dtype, DTYPES)
        _choice("--kv-cache", self.kv_cache, KV_CACHES)
        _choice("--experts", self.experts, EXPERTS)
        if self.context is not None and self.context < 1:
            raise DemoError(f"--context: expected at least 1, got {self.context}")
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise DemoError(f"--device: expected cpu, cuda or cuda:N, got {self.device!r}")
        if self.model is None:
            self.cache_tokens(PRESETS[self.preset])
        elif self.preset != "tiny":
            raise DemoError(f"--model: expected no file with --preset {self.preset} (random weights), got {self.model}")
        elif not self.model.is_file():
            raise DemoError(f"--model: expected a file that tools/train_tiny.py wrote, got {self.model}, not a file")

    def cache_tokens(self, config: DecoderConfig) -> int:
        """The number of tokens the KV cache holds. Raises DemoError when prompt and new tokens do not fit into it."""
        prompt = encode(self.prompt)
        check_fits(config, [prompt], self.max_new_tokens)
        tokens = config.context if self.context is None else self.context
        if tokens > config.context:
            raise DemoError(f"--context: expected at most {config.context} (the model's), got {tokens}")
        needed = len(prompt) + self.max_new_tokens - 1
        if tokens < needed:
            raise DemoError(
                f"--context: expected a cache of at least {needed} tokens ({len(prompt)} of the prompt and "
                f"--max-new-tokens {self.max_new_tokens}), got {tokens}"
            )
        return tokens


def check_fits(config: DecoderConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Raises DemoError unless every prompt, with its new tokens, fits into the model's vocabulary and context."""
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
                f"--prompt: expected at most {config.context} tokens of prompt and output (the model's context), "
                f"got {len(prompt)} and {new_tokens} new ones"
            )


def encode(prompt: str) -> list[int]:
    """A document that begins with this text. Bytes of the command line that are not UTF-8 are kept."""
    return [DOCUMENT, *prompt.encode("utf-8", "surrogateescape")]


def _choice(option: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise DemoError(f"{option}: expected one of {', '.join(allowed)}, got {value!r}")
