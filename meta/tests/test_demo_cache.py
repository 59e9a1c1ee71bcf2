"""Pages and numbers of the demo's cache: what is reserved, refused and given back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kestrel_kernels.demo.cache import PagedCache
from kestrel_kernels.demo.config import PRESETS, DemoError
from kestrel_kernels.demo.weights import random


@pytest.fixture
def cache():
    """Eight pages of one slot for three sequences."""
    config = dataclasses.replace(PRESETS["tiny"], layers=1)
    return PagedCache(random(config, torch.bfloat16, torch.device("cpu")), 8, kind="auto", sequences=3)


def test_sequences_have_pages_and_numbers_of_their_own(cache):
    first, second = cache.reserve([3, 1]), cache.reserve([2])
    assert cache.free == 8 - 6
    assert (first.block_table >= 0).sum(1).tolist() == [3, 1]
    assert first.block_table[1, 1:].tolist() == [-1, -1]
    pages = torch.cat([first.block_table[first.block_table >= 0], second.block_table[0]])
    assert len(set(pages.tolist())) == 6
    assert set(pages.tolist()) <= set(range(8))
    assert sorted([*first.numbers.tolist(), *second.numbers.tolist()]) == [0, 1, 2]


def test_too_many_tokens_or_sequences_are_refused_and_take_nothing(cache):
    cache.reserve([2])
    with pytest.raises(DemoError, match=r"pages for 7 tokens \(2 sequences\), got 6 free pages of 8"):
        cache.reserve([3, 4])
    with pytest.raises(DemoError, match="at most 2 more sequences, got 3"):
        cache.reserve([1, 1, 1])
    assert cache.free == 6
    assert sorted(cache.reserve([3, 3]).numbers.tolist()) == [1, 2]


def test_released_pages_serve_again_once(cache):
    table = cache.reserve([4, 2])
    held = table.block_table[table.block_table >= 0].tolist()
    for _ in range(2):
        table.release()  # the second time there is nothing left to give back
        assert cache.free == 8
    again = cache.reserve([4, 2])
    assert sorted(again.block_table[again.block_table >= 0].tolist()) == sorted(held)
    assert sorted(again.numbers.tolist()) == sorted(table.numbers.tolist())
