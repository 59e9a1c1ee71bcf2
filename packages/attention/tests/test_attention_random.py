"""The reference of flash_attn_with_kvcache against float64 on random calls."""

from __future__ import annotations

import random

import pytest
import torch
from decode_random import FLOATS16, random_case

from kestrel_runtime.testing import by_reference


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_by_reference(seed):
    """The result is within its bound of float64; the comparison itself needs no kernel here."""
    torch.manual_seed(seed)
    case = random_case(random.Random(seed), "cpu", (*FLOATS16, torch.float32), longest=400)
    given = {name: x.clone() if name in case.writes else x for name, x in case.kwargs.items()}
    got = by_reference(case.op, **given)
    case.compare(got, got, "result")
