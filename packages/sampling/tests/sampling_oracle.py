"""What sampling must give, in exact integers and by the chi-square distribution."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kestrel_sampling import (
    min_p_sampling_from_probs,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def words_of(seed: int, offset: int, round_: int = 0) -> list[int]:
    """The random words of a draw: Philox4x32-10 in Python integers."""
    k0, k1 = seed % 2**32, seed % 2**64 >> 32
    c = [offset % 2**32, offset % 2**64 >> 32, round_, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k0, b % 2**32, a >> 32 ^ c[3] ^ k1, a % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def rounded(number: float) -> float:
    """The number as float32, as the ops take it."""
    return torch.tensor(number, dtype=torch.float32).item()


@dataclass(eq=False)
class Row:
    """A row of float32 numbers, with what is computed once for all filters."""

    values: list[float]

    @functools.cached_property
    def masses(self) -> list[int]:
        """What the numbers weigh, exactly: as multiples of the smallest float32, 2^-149."""
        return [int(max(p, 0.0) * 2.0**149) for p in self.values]

    @functools.cached_property
    def order(self) -> list[int]:
        """Ids in descending order, ties to the lower id."""
        return sorted(range(len(self.values)), key=self.values.__getitem__, reverse=True)

    @functools.cached_property
    def up_to(self) -> list[int]:
        """Prefix sums of the masses."""
        return list(itertools.accumulate(self.masses))


def kept_by_hand(
    row: Row | list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, joint: bool = False
) -> list[int]:
    """The ids that the filters keep, in exact integers."""
    row = row if isinstance(row, Row) else Row(row)
    values, masses = row.values, row.masses
    threshold = (torch.tensor(min_p).clamp(0, 1) * torch.tensor(values[row.order[0]])).item()  # one float32 product
    order = [i for i in row.order if values[i] >= threshold]
    first = order[:top_k] if 0 < top_k < len(values) else order
    share = math.floor(min(max(rounded(top_p), 0.0), 1.0) * 2**32)
    goal = share * sum(masses[i] for i in (order if joint else first))
    kept, mass = [], 0
    for i in first:
        if kept and mass * 2**32 >= goal:
            break
        kept.append(i)
        mass += masses[i]
    return sorted(kept)


def distributions(rows: int, width: int, sharpness: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(width)
    return torch.softmax(sharpness * torch.randn(rows, width, generator=g), dim=-1)


def frequencies(
    sample: Callable[[torch.Tensor, torch.Tensor], Any], row: torch.Tensor, draws: int = 30_000
) -> torch.Tensor:
    ids = sample(row.expand(draws, -1), torch.arange(draws))
    return torch.bincount(ids, minlength=row.shape[1]).double()


def assert_follows(counts: torch.Tensor, row: torch.Tensor, kept: list[int]) -> None:
    """Chi-square below what it passes once in ten thousand (Wilson and Hilferty), and nothing outside the set."""
    draws = counts.sum()
    assert counts[kept].sum() == draws
    expected = row[kept].double() / row[kept].double().sum() * draws
    degrees = len(kept) - 1
    if degrees:
        statistic = ((counts[kept] - expected) ** 2 / expected).sum().item()
        part = 2 / (9 * degrees)
        assert statistic < degrees * (1 - part + 3.719 * part**0.5) ** 3


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 24},
    {"top_k": -1},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 6, "top_p": 0.5, "joint": True},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.1, "joint": True},
]


def sample_probs(options: dict[str, Any], probs: torch.Tensor, offsets: torch.Tensor, seed: int = 17) -> torch.Tensor:
    """The op from probabilities that has these filters."""
    key = {"seed": seed, "offset": offsets}
    names = {name for name in options if name != "joint"}
    if names == {"top_k", "top_p"}:
        order = "joint" if options.get("joint") else "top_k_first"
        return top_k_top_p_sampling_from_probs(
            probs, options["top_k"], options["top_p"], filter_apply_order=order, **key
        )
    if names == {"top_k"}:
        return top_k_sampling_from_probs(probs, options["top_k"], **key)
    if names == {"min_p"}:
        return min_p_sampling_from_probs(probs, options["min_p"], **key)
    if names == {"top_p"}:
        return top_p_sampling_from_probs(probs, options["top_p"], **key)
    return sampling_from_probs(probs, **key)
