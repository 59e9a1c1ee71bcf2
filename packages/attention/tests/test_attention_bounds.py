"""The error bounds of the decode GPU tests: an emulated INT4 kernel meets them, one wrong row or key exceeds them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_oracle import KINDS, Decoded, effective_queries, exact, excess, made

PAGE, TILE, SPLIT, WARPS = 64, 16, 1024, 4


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Float64 cut to 24 bits, as tensor cores cut their sums."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2.0**24), exponent - 24)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().double()


def emulated_int4(q: torch.Tensor, held: Decoded) -> tuple[torch.Tensor, torch.Tensor]:
    """The arithmetic of the INT4 decode kernel for q [Sq, H, D] over whole pages: (out, lse).

    Sums of scores and outputs are truncated after every tile, weights are two f16 numbers with an error of the
    exponential of up to 2^-22, warps take pages in turn, splits are combined by their LSE.
    """
    group, length = q.shape[1] // held.keys.shape[1], len(held.keys)
    k, v = (x.repeat_interleave(group, dim=1) for x in (held.keys, held.values))
    pages = k.unflatten(0, (-1, PAGE))
    scaled = effective_queries(q, held.channel_scales)
    sums = torch.zeros(q.shape[1], q.shape[0], *pages.shape[:2], dtype=torch.float64)
    for d in range(0, q.shape[2], TILE):
        sums = truncated(sums + torch.einsum("pqhd,pkhd->hqpk", scaled[..., d : d + TILE], pages[..., d : d + TILE]))
    scores = rounded(rounded(sums.flatten(2)) * rounded(torch.tensor(q.shape[2] ** -0.5 / math.log(2))))
    splits = []
    for start in range(0, length, SPLIT):
        end = min(start + SPLIT, length)
        shares = [
            torch.cat([torch.arange(p, min(p + PAGE, end)) for p in range(start + w * PAGE, end, WARPS * PAGE)])
            for w in range(min(WARPS, -(-(end - start) // PAGE)))
        ]
        splits.append(combined([emulated_share(scores[..., keys], v[keys]) for keys in shares]))
    base, total, out = combined(splits)
    lse = rounded(base + torch.log2(total)) * math.log(2)
    return rounded(out / total[..., None]).permute(1, 0, 2).to(q.dtype), lse.float()


def emulated_share(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One warp: the largest score, the sum of weights, and the weighed sum of values."""
    base = scores.amax(-1)
    weights = rounded(torch.exp2(scores - base[..., None]) * (1 + (torch.rand_like(scores) - 0.5) * 2.0**-21))
    high = weights.half().double()
    low = (weights - high).half().double()
    total, out = torch.zeros_like(base), torch.zeros(*base.shape, v.shape[-1], dtype=torch.float64)
    for t in range(0, len(v), TILE):
        tile = slice(t, t + TILE)
        total = rounded(total + weights[..., tile].sum(-1))
        for part in (high, low):
            out = truncated(out + torch.einsum("hqk,khd->hqd", part[..., tile], v[tile]))
    return base, total, out


def combined(parts):
    """Sums of several warps or splits over the largest score of all."""
    base = torch.stack([part[0] for part in parts]).amax(0)
    factors = [rounded(torch.exp2(part[0] - base)) for part in parts]
    total = rounded(sum(f * part[1] for f, part in zip(factors, parts, strict=True)))
    return base, total, rounded(sum(f[..., None] * part[2] for f, part in zip(factors, parts, strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "size"), [(1024, 64), (5056, 64), (5056, 128)])
def test_the_int4_kernel_as_emulated_meets_its_bounds(length, size, dtype):
    call = made("int4", 4, 2, size, PAGE, (length,), 1, dtype, seed=length, device="cpu")
    held = call.decoded(0, rounded=True)
    errors = excess(emulated_int4(call.q[0], held), exact(call.q[0], held, {}, 0), {})
    assert max(errors) <= 1, errors


def test_the_int4_kernel_as_emulated_differs_from_one_with_exact_queries():
    """The bounds hold for the kernel's own rounding of queries, and for no other."""
    call = made("int4", 4, 2, 64, PAGE, (1024,), 1, seed=1, device="cpu")
    got = emulated_int4(call.q[0], call.decoded(0, rounded=True))
    assert max(excess(got, exact(call.q[0], call.decoded(0, rounded=False), {}, 0), {})) > 1


@pytest.mark.parametrize("power", [0, 4, 8, 12, 16])
def test_int4_scores_are_as_precise_with_small_key_scales(power):
    """The rounding of scaled queries to f16 takes 2^-11 of the deviation of scores, also from scales of 2^-20 on."""
    call = made("int4", 8, 2, 64, PAGE, (1024,), 1, seed=1, device="cpu")
    call.caches["k_scale"] *= 2.0**-power
    held = call.decoded(0, rounded=True)
    pages = held.keys.repeat_interleave(4, dim=1).unflatten(0, (-1, PAGE))
    want = torch.einsum("qhd,pkhd->hqpk", call.q[0].double(), pages)
    got = torch.einsum("pqhd,pkhd->hqpk", effective_queries(call.q[0], held.channel_scales), pages)
    assert float((got - want).std()) <= 2.0**-11 * float(want.std())


def faults(held: Decoded, j: int) -> dict[str, Decoded]:
    """One wrong row, or one key too few."""
    keys, values, exists = held.keys.clone(), held.values.clone(), held.exists.clone()
    keys[j], values[j], exists[j] = keys[j + 1], values[j + 1], False
    wrong = {"keys": keys, "values": values, "exists": exists}
    return {name: replace(held, **{name: x}) for name, x in wrong.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "length"),
    [*((kind, torch.bfloat16, 5000) for kind in KINDS), ("int4", torch.float16, 5000), ("int4", torch.bfloat16, 1000)],
)
def test_one_wrong_row_or_key_exceeds_the_bounds(kind, dtype, length):
    """Weights are near 1 / length, so that every key counts alike."""
    call = made(kind, 4, 1, 64, PAGE, (length,), 1, dtype, seed=length, device="cpu")
    call.q *= 0.25
    held = call.decoded(0, rounded=True)
    want = exact(call.q[0], held, {}, 0)
    missed = []
    for j in range(0, length - 1, length // 7):
        for name, faulty in faults(held, j).items():
            out, lse, _, _ = exact(call.q[0], faulty, {}, 0)
            if max(excess((out.to(dtype), lse.float()), want, {})) <= 1:
                missed.append((name, j))
    assert not missed
