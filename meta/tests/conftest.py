"""What the tests of the demo share: the plain torch model, held-out text, and decoders of every kind."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kestrel_runtime.testing import pytest_collection_modifyitems, pytest_configure  # noqa: F401

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CPU = torch.device("cpu")


def _tool(name: str) -> ModuleType:
    """A module of tools/, which no wheel holds."""
    sys.path.insert(0, str(TOOLS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture(scope="session")
def plain_model() -> ModuleType:
    return _tool("plain_model")


@pytest.fixture(scope="session")
def train_tiny() -> ModuleType:
    return _tool("train_tiny")


@pytest.fixture(scope="session")
def model_results() -> ModuleType:
    return _tool("model_results")


@pytest.fixture(scope="session")
def plain(plain_model):
    """The plain torch module with the trained weights, float32 on the CPU."""
    from kestrel_kernels.demo.weights import TINY_FILE

    return plain_model.from_checkpoint(torch.load(TINY_FILE, weights_only=True))


@pytest.fixture(scope="session")
def held_out(train_tiny) -> Tensor:
    """The standard-library modules that training never saw, as bytes [N] int64."""
    data = torch.frombuffer(bytearray(train_tiny.corpus(held=True)), dtype=torch.uint8).long()
    assert len(data) > 100_000
    return data


@pytest.fixture(scope="session")
def windows(held_out) -> Tensor:
    """Eight windows of held-out text, [8, 385], spread over the modules."""
    starts = torch.linspace(0, len(held_out) - 385, 8).long()
    return held_out[starts[:, None] + torch.arange(385)]


@pytest.fixture(scope="session")
def decoder() -> Callable[..., object]:
    """Makes a decoder with the trained weights; `order_seed` shuffles the pages it is given."""
    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.model import Decoder
    from kestrel_kernels.demo.stores import STORES
    from kestrel_kernels.demo.weights import TINY_FILE, load

    def make(
        dtype: torch.dtype = torch.float32,
        *,
        tokens: int = 1024,
        kv_cache: str = "auto",
        fp8_experts: bool = False,
        order_seed: int | None = None,
        device: torch.device = CPU,
    ) -> Decoder:
        weights = load(TINY_FILE, dtype, device, fp8_experts=fp8_experts)
        order = list(range(-(-tokens // STORES[kv_cache].page)))
        if order_seed is not None:
            random.Random(order_seed).shuffle(order)
        cache = PagedCache(weights, tokens, kind=kv_cache, sequences=8, order=order)
        return Decoder(weights, cache)

    return make


@pytest.fixture(scope="session")
def prefill() -> Callable[..., Tensor]:
    """Logits [T, V] of whole sequences, packed, in one pass, or in chunks of so many tokens."""
    from kestrel_kernels.demo.model import Step

    def run(model, sequences: Sequence[Sequence[int]], chunk: int | None = None) -> Tensor:
        table = model.cache.reserve([len(sequence) for sequence in sequences])
        device = model.weights.device
        try:
            if chunk is None:
                tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
                return model(tokens, Step.prefill(table, [len(sequence) for sequence in sequences]))
            [sequence] = sequences
            parts = []
            for start in range(0, len(sequence), chunk):
                part = torch.tensor(sequence[start : start + chunk], device=device)
                if len(part) == 1:
                    step = Step.decode(table, torch.tensor([start], device=device))
                else:
                    step = Step.prefill(table, [len(part)], [start])
                parts.append(model(part, step))
            return torch.cat(parts)
        finally:
            table.release()

    return run
