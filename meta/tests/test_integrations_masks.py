"""Mask: when a forward pass of transformers is a first prompt that packed kernels serve."""

from __future__ import annotations

import pytest
import torch

from kestrel_kernels.integrations.transformers import masks
from kestrel_kernels.integrations.transformers.masks import Mask

FULL, LEFT, GAP = ([1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 0, 0, 1, 1])


def mask_of(*rows, **arguments):
    return Mask(torch.tensor(rows, dtype=torch.bool) if rows else None, arguments)


@pytest.mark.parametrize(
    ("mask", "count", "window", "expected"),
    [
        (mask_of(), 5, None, True),
        (mask_of(), 1, None, False),
        (mask_of(), 2, None, True),
        (mask_of(allow_is_causal_skip=False), 5, None, False),
        (mask_of(q_offset=0, kv_offset=0), 5, None, True),
        (mask_of(q_offset=1), 5, None, False),
        (mask_of(kv_offset=1), 5, None, False),
        (mask_of(q_offset=torch.tensor(0)), 5, None, False),  # reading it would synchronise
        (mask_of(FULL, FULL), 5, 2, True),
        (mask_of(FULL, LEFT), 5, 2, True),
        (mask_of(FULL, GAP), 5, None, True),
        (mask_of(FULL, GAP), 5, 5, True),
        (mask_of(FULL, GAP), 5, 4, False),  # transformers counts padding in a window
    ],
)
def test_a_first_prompt_is_causal_from_its_first_key_on(mask, count, window, expected):
    assert mask.is_first_prompt(count, window) is expected


def test_only_the_first_tokens_are_packed_and_no_padding_needs_no_packing():
    mask = mask_of([1, 1, 1, 0], [1, 1, 0, 1])
    assert mask.packing(2) is None
    packing = mask.packing(3)
    assert (packing.rows.tolist(), packing.starts.tolist(), packing.longest) == ([0, 1, 2, 3, 4], [0, 3, 5], 3)
    assert not packing.has_gaps
    assert mask.packing(4).has_gaps
    assert mask.packing(4) is mask.packing(4)
    assert mask_of().packing(3) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux: expected None, got attention sinks"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias: expected None, got a bias"),
        ({"dropout": 0.1}, "dropout: expected 0"),
    ],
)
def test_what_attention_would_leave_out_is_refused(given, message):
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=message):
        masks.attention(torch.nn.Module(), q, k, k, None, **given)
