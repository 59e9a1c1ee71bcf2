"""What each step of the demo's generation feeds to the model."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch

generate = importlib.import_module("kestrel_kernels.demo.generate")


def test_a_step_feeds_the_last_tokens_at_the_next_positions(monkeypatch):
    steps = SimpleNamespace(
        prefill=lambda table, counts: ("prefill", counts), decode=lambda table, at: ("decode", at.tolist())
    )
    monkeypatch.setattr(generate, "Step", steps)
    fed = []

    def decoder(ids, step, last=None):
        fed.append((ids.tolist(), step, None if last is None else last.tolist()))

    decoder.weights = SimpleNamespace(device="cpu")
    chosen = iter([[0, 6, 1], [5, -1, 0], [2, 3, 4]])  # -1: the logits of the row have no maximum
    prompts = [[7, 8, 9], [4], [5, 6]]
    decoding = generate.Decoding(decoder, None, prompts, lambda logits: torch.tensor(next(chosen)))
    decoding.advance(graph=True)
    assert decoding.ids.tolist() == [5, -1, 0]
    decoding.advance(graph=True)
    assert decoding.ids.tolist() == [2, 3, 4]
    assert fed == [
        ([7, 8, 9, 4, 5, 6], ("prefill", [3, 1, 2]), [2, 3, 5]),
        ([0, 6, 1], ("decode", [3, 1, 2]), None),
        ([5, 0, 0], ("decode", [4, 2, 3]), None),
    ]
