"""What each step of the demo's generation feeds to the model."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch

generate = importlib.import_module("kestrel_kernels.demo.generate")


class Step:
    """The places of a decode step."""

    def __init__(self, at):
        self.at = at

    def advance(self):
        self.at = self.at + 1


def test_a_step_feeds_the_last_tokens_at_the_next_positions(monkeypatch):
    steps = SimpleNamespace(
        prefill=lambda table, counts: SimpleNamespace(at=torch.tensor(counts)), decode=lambda table, at: Step(at)
    )
    monkeypatch.setattr(generate, "Step", steps)
    fed = []

    def decoder(ids, step, last=None):
        fed.append((ids.tolist(), step.at.tolist(), None if last is None else last.tolist()))

    decoder.weights = SimpleNamespace(device="cpu")
    chosen = iter([[0, 6, 1], [5, -1, 0], [2, 3, 4]])  # -1: the logits of the row have no maximum

    def choose(logits, out=None):
        ids = torch.tensor(next(chosen))
        found = torch.stack((ids.clamp(min=0), ids))
        return found if out is None else out.copy_(found)

    prompts = [[7, 8, 9], [4], [5, 6]]
    decoding = generate.Decoding(decoder, SimpleNamespace(capacity=16), prompts, choose)
    decoding.advance(graph=True)
    assert decoding.ids.tolist() == [5, -1, 0]
    decoding.advance(graph=True)
    assert decoding.ids.tolist() == [2, 3, 4]
    assert fed == [
        ([7, 8, 9, 4, 5, 6], [3, 1, 2], [2, 3, 5]),
        ([0, 6, 1], [3, 1, 2], None),
        ([5, 0, 0], [4, 2, 3], None),
    ]
