"""Decode kernels against float64 and the reference on random calls, within a time budget."""

from __future__ import annotations

import pytest
from decode_random import random_case

from kestrel_runtime.testing import compare_at_random

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("first_seed", [0, 10**6])
def test_random_decode_calls_are_exact_and_write_what_the_reference_writes(first_seed):
    """A failure names its seed: compare_at_random(draw, first_seed=SEED, cases=1) runs that case alone."""
    compare_at_random(lambda rng: random_case(rng, "cuda"), seconds=20, first_seed=first_seed, least=20)
