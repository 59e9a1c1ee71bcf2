"""The PyTorch reference of sampling: exact filters and a draw that every kernel repeats bit for bit.

Probabilities become integer masses: a row is scaled by a power of two and rounded to nearest, so that no sum over the
row reaches 2^60. Sums of integers do not depend on their order, so the split of a row changes neither filters nor
draws. The power is 2^42 if the largest entry lies in [2^-17, 1], as in nearly every row: a kernel can then sum masses
before it knows the largest entry. Otherwise the power puts the largest entry just below 2^43. For V >= 2^17 all three
exponents are less, by the bits of V beyond 17. Entries below about 2^-43 have no mass.

- mass of a row: the sum of these integers; negative entries count as zero.
- top-p: entries in descending order of probability, ties to the lower id, while the mass before an entry is below
  ``floor(p * mass)``, with p as a multiple of 2^-32, rounded down. The first entry is always kept. p >= 1 keeps all.
- draw: the first id in vocabulary order at which the prefix sum of masses exceeds ``floor(w * mass / 2^32)``, where w
  is the first word of Philox4x32-10 with key = seed and counter = offset.
- With top-k, or without top-p, an id is drawn from what the filters keep. Without top-k, top-p is rejection sampling:
  four proposals are drawn from the whole row with the four words in order, and the first that top-p keeps is the
  result. If it keeps none, four more are drawn with the third word of the counter raised by one, and so on: in the
  first sixteen rounds from the whole row (in the first alone where p < 1/8), then from the entries that precede all
  rejected ones in descending order. Kept entries precede every rejected one, so they always remain, and each is drawn
  in proportion to its mass. A kernel thus needs no threshold, only the mass before each proposal.
"""

from __future__ import annotations

import itertools
import math

import torch

from kestrel_runtime import refuse_capture
from kestrel_runtime.reference import philox4x32, row_sums

from ._parameters import Keys

_WORD = 0xFFFFFFFF
_ROW_ROUNDS = 16  # of proposals from the whole row


Draw = tuple[torch.Tensor, torch.Tensor]


def sampling_from_probs(
    probs: torch.Tensor,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> Draw:
    """One id per row, and whether the row had a distribution."""
    mass, valid = integer_mass(probs.float())
    return draw(mass, valid, random_words(Keys(seed, seed_value, offset, offset_value, offset_stride), probs)[..., 0])


def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | None,
    top_p_value: float,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> Draw:
    """The same from the smallest set whose mass reaches p."""
    weights = probs.float()
    mass, valid = integer_mass(weights)
    p = per_row(top_p, top_p_value, probs.device)
    keys = Keys(seed, seed_value, offset, offset_value, offset_stride)
    return filtered_draw(weights, mass, valid, keys, top_p=p)


def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | None,
    top_k_value: int,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> Draw:
    """The same from the k most probable."""
    weights = probs.float()
    mass, valid = integer_mass(weights)
    k = per_row(top_k, top_k_value, probs.device)
    keys = Keys(seed, seed_value, offset, offset_value, offset_stride)
    return filtered_draw(weights, mass, valid, keys, top_k=k)


def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    joint: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> Draw:
    """The same with both filters, one after the other or both on the whole row."""
    weights = probs.float()
    mass, valid = integer_mass(weights)
    k, p = per_row(top_k, top_k_value, probs.device), per_row(top_p, top_p_value, probs.device)
    keys = Keys(seed, seed_value, offset, offset_value, offset_stride)
    return filtered_draw(weights, mass, valid, keys, top_k=k, top_p=p, joint=joint)


def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | None,
    min_p_value: float,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> Draw:
    """The same from the entries that reach min_p of the largest."""
    weights = probs.float()
    mass, valid = integer_mass(weights)
    mass = torch.where(keep_min_p(weights, per_row(min_p, min_p_value, probs.device)), mass, 0)
    return draw(mass, valid, random_words(Keys(seed, seed_value, offset, offset_value, offset_stride), probs)[..., 0])


def sample_from_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> Draw:
    """Temperature, min-p, then top-k and top-p. A temperature of 0 keeps the first of the largest logits."""
    temperature = per_row(temperature, temperature_value, logits.device)
    weights = exponentials(logits, temperature)
    mass, valid = integer_mass(weights)
    mass = torch.where(keep_min_p(weights, per_row(min_p, min_p_value, logits.device)), mass, 0)
    k = torch.where(temperature <= 0, 1, per_row(top_k, top_k_value, logits.device).long())
    p = None if top_p is None and top_p_value >= 1 else per_row(top_p, top_p_value, logits.device)
    keys = Keys(seed, seed_value, offset, offset_value, offset_stride)
    return filtered_draw(logits.float(), mass, valid, keys, top_k=k, top_p=p, joint=joint)


def softmax(
    logits: torch.Tensor, temperature: torch.Tensor | None = None, temperature_value: float = 1.0
) -> torch.Tensor:
    """float32 probabilities; a temperature of 0 puts everything on the first of the largest logits."""
    temperature = per_row(temperature, temperature_value, logits.device)
    weights = torch.exp2(exponents(logits, temperature))
    soft = (weights / row_sums(weights)).float()
    first = torch.arange(logits.shape[1], device=logits.device) == logits.float().argmax(dim=1, keepdim=True)
    return torch.where((temperature <= 0) & ~soft.isnan(), first.float(), soft)


def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor | None, top_p_value: float) -> torch.Tensor:
    """What top-p keeps, divided by its sum; the rest is 0."""
    weights = probs.float()
    mass, _ = integer_mass(weights)
    order, sorted_mass = descending(weights, mass)
    kept = keep_top_p(sorted_mass, per_row(top_p, top_p_value, probs.device))
    return renormalised(weights, unsorted(kept, order))


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | None, top_k_value: int) -> torch.Tensor:
    """What top-k keeps, divided by its sum; the rest is 0."""
    weights = probs.float()
    order = weights.sort(dim=1, descending=True, stable=True).indices
    kept = keep_top_k(order, per_row(top_k, top_k_value, probs.device))
    return renormalised(weights, unsorted(kept, order))


# ---- parts -----------------------------------------------------------------------------------------------------------


def exponentials(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32, the exponent rounded to float32."""
    return torch.exp2(exponents(logits, temperature).float())


def exponents(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logit - largest) * slope in float64, slope = log2(e) / temperature; the largest has 0 at any temperature.

    NaN for a row without a largest. The slope is float32, rounded down, and a float32 rest; it is kept between 1e-36
    and 3e38. No exponent is below -200, whose weight is 0 in float32: nothing overflows, -inf included.
    """
    logits = logits.float()
    temperature = torch.where(temperature <= 0, 1.0, temperature).double()
    exact = torch.full_like(temperature, math.log2(math.e)) / temperature
    nearest = exact.float()
    down = torch.where(nearest.double() > exact, nearest.nextafter(torch.zeros_like(nearest)), nearest)
    slope = down.clamp(1e-36, 3e38)
    rest = torch.where(slope == down, exact - slope.double(), 0.0).float()
    below = torch.maximum(logits - logits.amax(dim=1, keepdim=True), -200.0 / slope)
    return below.double() * slope.double() + (below * rest).double()


def renormalised(weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The kept weights, negative ones as 0, over their sum. A row with NaN or inf becomes NaN, one without mass 0."""
    largest = weights.amax(dim=1, keepdim=True)
    positive = torch.where(kept & (weights > 0), weights, 0.0).double()
    total = row_sums(positive)
    shares = (positive / torch.where(total > 0, total, 1.0)).float()
    return torch.where(largest < torch.inf, shares, torch.nan)


def filtered_draw(
    order_by: torch.Tensor,
    mass: torch.Tensor,
    valid: torch.Tensor,
    keys: Keys,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    joint: bool = False,
) -> Draw:
    """One id per row from what the filters keep. Unless joint, top-p counts the mass that top-k left."""
    order, kept, counted = keep_filtered(order_by, mass, top_k, top_p, joint)
    remaining = torch.where(counted & ~kept, 0, mass)
    words = random_words(keys, mass)
    if top_p is None:
        return draw(remaining, valid, words[..., 0])
    refuse_capture("top-p sampling", "the host reads whether a row needs another round")
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    ids, pending = torch.zeros_like(valid, dtype=torch.int32), valid.unsqueeze(1)
    first = torch.full_like(pending, order.shape[1], dtype=torch.int64)  # of the rejected
    row_rounds = torch.where(top_p < 0.125, 1, _ROW_ROUNDS)
    for round_ in itertools.count(1):
        for n in range(4):
            drawn = draw(remaining, valid, words[..., n])[0].unsqueeze(1)
            accepted = pending & kept.gather(1, drawn.long())
            ids = torch.where(accepted, drawn, ids.unsqueeze(1)).squeeze(1)
            pending = pending & ~accepted
            first = torch.minimum(first, rank.gather(1, drawn.long()))
        if not pending.any():
            return ids, valid
        remaining = torch.where(pending & (rank >= first) & (round_ >= row_rounds), 0, remaining)
        words = random_words(keys, mass, round_)
    raise AssertionError("the first entry is kept")


def keep_filtered(
    order_by: torch.Tensor,
    mass: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The descending order, the ids that top-k and top-p keep, and the rows [B, 1] in which top-k dropped any."""
    order, sorted_mass = descending(order_by, mass)
    kept = torch.ones_like(sorted_mass, dtype=torch.bool) if top_k is None else keep_top_k(order, top_k)
    counted = ~kept.all(1, keepdim=True)
    if top_p is not None:
        kept = kept & keep_top_p(sorted_mass if joint else torch.where(kept, sorted_mass, 0), top_p)
    return order, unsorted(kept, order), counted


def keep_top_k(order: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The first k places; all of them for k <= 0."""
    rank = torch.arange(order.shape[1], device=order.device)
    return ((rank < top_k) | (top_k <= 0)).expand(order.shape)


def keep_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Entries that reach min_p (float32, at most 1) times the largest, rounded to float32. NaN counts as 0."""
    part = min_p.float().nan_to_num(nan=0.0).clamp(0, 1)
    return weights >= part * weights.amax(dim=1, keepdim=True)


def integer_mass(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [B, V] as int64 [B, V] with sums below 2^60, and which rows have a distribution: finite mass, no NaN."""
    largest = weights.amax(dim=1, keepdim=True)  # NaN if the row holds one
    valid = (largest > 0) & (largest < torch.inf)
    length_bits = max(17, weights.shape[1].bit_length())
    common = (largest >= 2.0**-length_bits) & (largest <= 1)
    exponent = torch.frexp(torch.where(valid & ~common, largest, 1.0)).exponent
    power_of_two = ((60 - length_bits - exponent + 1023).long() << 52).view(torch.float64)
    scaled = torch.where(valid & (weights > 0), weights, 0.0).double() * power_of_two
    return scaled.round().long(), valid.squeeze(1)


def descending(weights: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the entries, largest first and ties to the lower id, and their masses in it."""
    order = weights.sort(dim=1, descending=True, stable=True).indices
    return order, mass.gather(1, order)


def unsorted(kept: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A mask in descending order as a mask over ids."""
    return torch.zeros_like(kept).scatter(1, order, kept)


def keep_top_p(sorted_mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest prefix whose mass reaches p of the whole, at least one entry; p >= 1 and NaN keep all entries.

    With p >= 1 entries too small to have mass stay as well: renormalisation keeps them, and no draw can hit them.
    """
    before = sorted_mass.cumsum(1) - sorted_mass
    p = top_p.double().nan_to_num(nan=1.0)
    parts = (p.clamp(0, 1) * 2**32).floor().long()
    kept = before < fraction(sorted_mass.sum(1, keepdim=True), parts)
    return kept | (torch.arange(kept.shape[1], device=kept.device) == 0) | (p >= 1)


def fraction(mass: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """floor(mass * parts / 2^32) for mass < 2^60 and 0 <= parts <= 2^32, without overflow."""
    high, low = mass >> 30, mass & (2**30 - 1)
    return (parts * high + (parts * low >> 30)) >> 2


def draw(mass: torch.Tensor, valid: torch.Tensor, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of the cumulative mass in vocabulary order at word / 2^32 of it; id 0 for rows that are not valid."""
    point = fraction(mass.sum(1, keepdim=True), word)
    ids = (mass.cumsum(1) <= point).sum(1)
    return torch.where(valid, ids, 0).to(torch.int32), valid


def random_words(keys: Keys, rows: torch.Tensor, round_: int | torch.Tensor = 0) -> torch.Tensor:
    """The four 32-bit words of Philox4x32-10 with key = seed and counter = (offset, round), int64 [B, 1, 4].

    [1, 1, 4] where all rows have one seed and one offset. With a tensor of n rounds [B, n, 4].
    """
    seeds = per_row(keys.seed, keys.seed_value, rows.device)
    offsets = per_row(keys.offset, keys.offset_value, rows.device)
    if keys.offset_stride:
        offsets = offsets + keys.offset_stride * torch.arange(rows.shape[0], device=rows.device)[:, None]
    key, counter = torch.broadcast_tensors(seeds, offsets)
    zero = torch.zeros_like(counter)
    words = torch.broadcast_tensors(counter & _WORD, (counter >> 32) & _WORD, zero + round_, zero)
    return philox4x32(torch.stack((key & _WORD, (key >> 32) & _WORD), dim=-1), torch.stack(words, dim=-1))


def per_row(values: torch.Tensor | None, value: float, device: torch.device) -> torch.Tensor:
    """A parameter as [B, 1] or [1, 1]: int64 for an integer, float32 for a float, the tensor's dtype for a tensor."""
    if values is not None:
        return values.view(-1, 1)
    if isinstance(value, int):
        return torch.full((1, 1), value, dtype=torch.int64, device=device)
    # Through float64: what passes the range of float32 becomes inf. A tensor of the number would be float32 too.
    return torch.full((1, 1), value, dtype=torch.float64, device=device).float()
