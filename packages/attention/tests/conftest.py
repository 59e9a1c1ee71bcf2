"""An attention written differently: one query at a time, over the list of keys it sees, in float64."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from kestrel_runtime.testing import kernels_only, pytest_collection_modifyitems, pytest_configure  # noqa: F401

sys.path.append(str(Path(__file__).parent))  # decode_oracle, which tests import by name


def sees(key: int, position: int, causal: bool, window: tuple[int, int], prefix: int) -> bool:
    if key < prefix:
        return True
    if causal and key > position:
        return False
    left, right = window
    return not (left >= 0 and key < position - left) and not (right >= 0 and key > position + right)


def attention_in_float64(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, prefix=0, missing=()):
    """One sequence: q [Sq, H, D], k and v [L, Hk, D] of any dtype -> out [Sq, H, D], lse [H, Sq] in float64.

    missing: keys that do not exist, though they count for positions.
    """
    q, k, v = q.double(), k.double(), v.double()
    queries, heads, size = q.shape
    keys, kv_heads = k.shape[:2]
    out = torch.zeros_like(q)
    lse = torch.full((heads, queries), -math.inf, dtype=torch.float64)
    for i in range(queries):
        position = keys - queries + i
        seen = [j for j in range(keys) if j not in missing and sees(j, position, causal, window, prefix)]
        if not seen:
            continue
        for h in range(heads):
            group = h * kv_heads // heads
            scores = k[seen, group] @ q[i, h] * (size**-0.5 if scale is None else scale)
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            lse[h, i] = scores.logsumexp(0)
            out[i, h] = (scores - lse[h, i]).exp() @ v[seen, group]
    return out, lse


def assert_attention(out, lse, exact_out, exact_lse, values):
    """Hold out and lse against float64.

    out: half a unit in the last place for the one rounding, and 32 roundings of float32 of the largest value (scores of
    up to about 10 with a relative error of some 2^-24, exponentials, two sums). lse: 16 such roundings of 1 + |lse|.
    """
    largest = float(values.double().abs().max()) if values.numel() else 0.0
    bound = 0.5 * torch.finfo(out.dtype).eps * exact_out.abs() + 32 * 2**-24 * largest
    error = (out.double() - exact_out).abs()
    assert bool((error <= bound).all()), f"out is off by up to {error.max():.3e} where {bound.min():.3e} is allowed"
    if lse is not None:
        assert lse.dtype == torch.float32
        empty = exact_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty)
        error = (lse.double() - exact_lse)[~empty].abs()
        assert bool((error <= 16 * 2**-24 * (1 + exact_lse[~empty].abs())).all()), f"lse is off by {error.max():.3e}"


@pytest.fixture(scope="session")
def in_float64():
    return attention_in_float64


@pytest.fixture(scope="session")
def assert_attends():
    return assert_attention
