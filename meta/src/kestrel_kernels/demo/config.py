"""Sizes of the demo's decoder, and the presets."""

from __future__ import annotations

import dataclasses

LONGEST_CONTEXT = 2**20
"""Tables by position have one row for each token of the context."""


class DemoError(ValueError):
    """A request the demo cannot serve; the message is one line that names what was expected and what was given."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. The head size times the heads need not be the width."""

    width: int
    layers: int
    dense_layers: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    rotary_base: float
    dense_inner: int
    experts: int
    experts_per_token: int
    expert_inner: int
    vocabulary: int
    context: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind = int if field.type == "int" else float
            if type(value) is not kind or not value >= (0 if field.name == "dense_layers" else 1e-12):
                raise DemoError(f"config: expected {field.name} to be a positive {kind.__name__}, got {value!r}")
        if self.context > LONGEST_CONTEXT:
            raise DemoError(f"config: expected context to be at most {LONGEST_CONTEXT}, got {self.context}")
        if self.heads % self.kv_heads:
            raise DemoError(
                f"config: expected heads to be a multiple of the {self.kv_heads} kv_heads, got {self.heads}"
            )
        if self.rotary_size % 2 or self.rotary_size > self.head_size:
            raise DemoError(
                f"config: expected rotary_size to be even and at most the head_size {self.head_size}, "
                f"got {self.rotary_size}"
            )
        if self.experts_per_token > self.experts:
            raise DemoError(
                f"config: expected experts_per_token to be at most the {self.experts} experts, "
                f"got {self.experts_per_token}"
            )

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def shared_tau_table(self) -> bool:
        """Queries and values of one head share their scaling by position."""
        return self.heads == self.kv_heads

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    @property
    def bytes_in_bytes_out(self) -> bool:
        """Tokens are bytes; byte 0 begins and ends a document."""
        return self.vocabulary == 256


PRESETS = {
    # Trained on the Python standard library by tools/train_tiny.py; the weights ship with this package.
    "tiny": DecoderConfig(
        width=128,
        layers=7,
        dense_layers=1,
        heads=2,
        kv_heads=2,
        head_size=64,
        rotary_size=32,
        rotary_base=10000.0,
        dense_inner=512,
        experts=8,
        experts_per_token=2,
        expert_inner=64,
        vocabulary=256,
        context=1024,
    ),
    # The published sizes of Moondream 3's text model, with random weights: for speed, not for text.
    "moondream3": DecoderConfig(
        width=2048,
        layers=24,
        dense_layers=4,
        heads=32,
        kv_heads=32,
        head_size=64,
        rotary_size=32,
        rotary_base=1500000.0,
        dense_inner=8192,
        experts=64,
        experts_per_token=8,
        expert_inner=1024,
        vocabulary=51200,
        context=4096,
    ),
}
