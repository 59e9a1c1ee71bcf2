"""Calls of flash_attn_with_kvcache over scattered caches, and what they must give: attention in float64.

Shared by the GPU tests of the decode kernels, the random comparison and the CPU tests of the error bounds.

Five kinds of caches: ``same`` (the dtype of q), ``e4m3``, ``e5m2``, ``int8``, ``int4``. Everything that no sequence
holds is NaN, or garbage in block tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kestrel_attention import flash_attn_with_kvcache

KINDS = ("same", "e4m3", "e5m2", "int8", "int4")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LENGTHS = (0, 1, 54, 300, -1, 1000, 64, 17)
UNUSED_ENTRIES = (2**31 - 1, -7, 10**6)  # of a block table: no kernel may follow them
INT4_PAGE = 64

Result = tuple[torch.Tensor, torch.Tensor]


def bits(x: torch.Tensor) -> torch.Tensor:
    """x as integers of its width."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Whether all tensors agree bit for bit."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The INT4 codes of bytes, low nibble first."""
    return torch.stack((codes % 16, codes // 16), dim=-1).flatten(-2).double()


@dataclass
class Call:
    """The tensors of one call. caches: by the names of arguments, what belongs to integer codes too."""

    kind: str
    q: torch.Tensor
    caches: dict[str, torch.Tensor]
    table: torch.Tensor | None
    lengths: torch.Tensor

    def run(self, *new: torch.Tensor, **how: Any) -> Result:
        """(out, lse) of flash_attn_with_kvcache; new: k and v to append."""
        given = {"cache_seqlens": self.lengths, "block_table": self.table, "return_lse": True}
        caches = dict(self.caches)
        return flash_attn_with_kvcache(
            self.q, caches.pop("k_cache"), caches.pop("v_cache"), *new, **caches, **given, **how
        )

    def clone(self) -> Call:
        """The same call over copies of the caches, of the same strides."""
        return replace(self, caches={name: strided_clone(x) for name, x in self.caches.items()})

    def alone(self, b: int, extra_columns: int = 5) -> Call:
        """Sequence b as a batch of its own, with a wider block table."""
        assert self.table is not None
        table = self.table.new_full((1, self.table.shape[1] + extra_columns), UNUSED_ENTRIES[0])
        table[:, : self.table.shape[1]] = self.table[b]
        caches = dict(self.caches)
        if self.kind == "int4":
            caches["seq_ids"] = caches["seq_ids"][b : b + 1]
        return Call(self.kind, self.q[b : b + 1], caches, table, self.lengths[b : b + 1])

    def places(self, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the keys of sequence b: which exist, their block and their slot in the block."""
        page, length = self.caches["k_cache"].shape[1], int(self.lengths[b])
        columns = 1 if self.table is None else self.table.shape[1]
        seq_ids = self.caches.get("seq_ids")
        if seq_ids is not None and not 0 <= int(seq_ids[b]) < self.caches["k_tail"].shape[0]:
            length = -1
        position = torch.arange(max(length, 0), device=self.q.device)
        inside = position < columns * page
        column = (position // page).clamp(max=max(columns - 1, 0))
        if columns == 0:
            block = torch.full_like(position, -1)
        else:
            block = torch.full_like(position, b) if self.table is None else self.table[b, column].long()
        exists = inside & (block >= 0) & (block < self.caches["k_cache"].shape[0])
        return exists, torch.where(exists, block, 0), position % page

    def decoded(self, b: int, rounded: bool) -> Decoded:
        """The keys and values of sequence b in float64. rounded: scores as the INT4 kernel rounds its queries."""
        exists, block, slot = self.places(b)
        k, v = (bits(self.caches[name])[block, slot].view(self.caches[name].dtype) for name in ("k_cache", "v_cache"))
        of = {name: x for name, x in self.caches.items() if name not in ("k_cache", "v_cache")}
        if self.kind == "int8":  # the kernel rounds queries by their largest element, whatever the code beside it
            k_scale, v_scale = (of[name][block, slot, :, None].double() for name in ("k_scale", "v_scale"))
            keys, values, terms = k.double() * k_scale, v.double() * v_scale, (256 * k_scale.abs()).expand(k.shape)
        elif self.kind == "int4":
            zero, scale = (of[name][block, slot, :, None].double() for name in ("v_zero", "v_scale"))
            values = (nibbles(v) - zero) * scale
            key_zero = of["k_zero"][block]
            if rounded:  # the zeros of even dims are used as a sixteenth, in f16
                key_zero = key_zero.clone()
                key_zero[..., ::2] = (key_zero[..., ::2].float() / 16).half() * 16
            keys = (nibbles(k) - key_zero.double()) * of["k_scale"][block].double()
            whole = len(keys) // INT4_PAGE * INT4_PAGE
            keys[whole:] = of["k_tail"][of["seq_ids"][b].long(), slot[whole:]].double()
            terms = 16 * of["k_scale"][block].double().abs()  # codes and zeros are added up apart
            terms[whole:] = keys[whole:].abs()
            channel_scales = of["k_scale"][block[:whole:INT4_PAGE]] if rounded else None
            return Decoded(keys, values, exists, terms, 16 * scale.abs().amax(-1), channel_scales)
        else:
            keys, values = k.double(), v.double()
            terms = keys.abs()
        return Decoded(keys, values, exists, terms, values.abs().amax(-1))


@dataclass
class Decoded:
    """What one sequence holds: keys and values [L, Hk, D] in float64."""

    keys: torch.Tensor
    values: torch.Tensor
    exists: torch.Tensor
    key_terms: torch.Tensor
    """[L, Hk, D]: no factor of a query in the sum of a score is larger."""
    value_terms: torch.Tensor
    """[L, Hk]: no factor of a weight in the sum of an output is larger."""
    channel_scales: torch.Tensor | None = None
    """f16 [pages, Hk, D], of an INT4 cache whose scaled queries are rounded."""


def strided_clone(x: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides; the memory between rows is zero."""
    if x.numel() == 0 or x.is_contiguous():
        return x.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    copy = torch.zeros(extent, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride())
    bits(copy).copy_(bits(x))
    return copy


# -- making calls -----------------------------------------------------------------------------------------------------


def made(
    kind: str,
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    lengths: tuple[int, ...] = LENGTHS,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    extra_keys: int = 0,
    value_size: float = 1.0,
    device: str = "cuda",
) -> Call:
    """A call with random contents. INT4 caches always have pages of 64.

    extra_keys: further keys each sequence has pages for. value_size: factor on the scales of integer values, some
    hundredths.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device) + 0.25

    page = INT4_PAGE if kind == "int4" else page
    batch, columns = len(lengths), max(-(-(length + extra_keys) // page) + 1 for length in (*lengths, 1))
    blocks = batch * columns + 3
    of_tokens, of_channels = (blocks, page, kv_heads), (blocks, kv_heads, size)
    table = torch.randperm(blocks, generator=generator, device=device)[: batch * columns].view(batch, columns).int()
    caches: dict[str, torch.Tensor]
    if kind in ("int8", "int4"):
        width = size if kind == "int8" else size // 2
        codes = torch.randint(-127, 128, (2, *of_tokens, width), generator=generator, device=device).to(torch.int8)
        caches = dict(zip(("k_cache", "v_cache"), codes, strict=True))
        if kind == "int8":
            caches |= {"k_scale": uniform(*of_tokens) / 64, "v_scale": uniform(*of_tokens) / 32 * value_size}
        else:
            caches = {name: x.view(torch.uint8) for name, x in caches.items()}
            caches["k_scale"], caches["v_scale"] = uniform(*of_channels) / 4, uniform(*of_tokens) / 4 * value_size
            for name, shape in (("k_zero", of_channels), ("v_zero", of_tokens)):
                caches[name] = uniform(*shape) + torch.randint(0, 15, shape, generator=generator, device=device)
            caches |= {name: caches[name].half() for name in ("k_scale", "v_scale", "k_zero", "v_zero")}
            caches["k_tail"] = normal(batch + 2, page, kv_heads, size).to(dtype)
            caches["seq_ids"] = torch.randperm(batch + 2, generator=generator, device=device)[:batch].int()
    else:
        storage = FP8.get(kind, dtype)
        caches = {name: normal(*of_tokens, size).to(dtype).to(storage) for name in ("k_cache", "v_cache")}
    q = normal(batch, queries, heads, size).to(dtype)
    call = Call(kind, q, caches, table, torch.tensor(lengths, dtype=torch.int32, device=device))
    poison_unused(call, extra_keys)
    return call


def poison_unused(call: Call, extra_keys: int = 0) -> None:
    """NaN (in the scales, for integer codes) in everything that no sequence holds; garbage in unused table entries."""
    caches, table = call.caches, call.table
    assert table is not None
    (blocks, page), device = caches["k_cache"].shape[:2], call.q.device
    used = torch.zeros(blocks, page, dtype=torch.bool, device=device)
    complete = torch.zeros(blocks, dtype=torch.bool, device=device)
    in_tail = torch.zeros(len(call.lengths) + 2, page, dtype=torch.bool, device=device)
    for b, length in enumerate(call.lengths.tolist()):
        _, block, slot = call.places(b)
        used[block, slot] = True
        if call.kind == "int4":
            whole = max(length, 0) // page * page
            complete[block[:whole]] = True
            in_tail[caches["seq_ids"][b].long(), slot[whole:]] = True
        unused = torch.arange(table.shape[1], device=device) >= -(-(max(length, 0) + extra_keys) // page)
        garbage = torch.tensor(UNUSED_ENTRIES, dtype=torch.int32, device=device)
        table[b, unused] = garbage[torch.nonzero(unused)[:, 0] % len(UNUSED_ENTRIES)]
    if call.kind in ("int8", "int4"):
        for name in set(caches) & {"k_scale", "v_scale", "k_zero", "v_zero"}:
            caches[name][~(complete if call.kind == "int4" and name.startswith("k") else used)] = math.nan
        if call.kind == "int4":
            caches["k_tail"][~in_tail] = math.nan
    else:
        for name in ("k_cache", "v_cache"):
            bits(caches[name])[~used] = bits(torch.full((1,), math.nan, device=device).to(caches[name].dtype))


# -- attention in float64 ---------------------------------------------------------------------------------------------


def effective_queries(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the INT4 kernel multiplies the keys of each page with, over the channel's scale: float64 [pages, Sq, H, D].

    It brings a row of queries below 1 by a power of two, divides odd dims by 16, and multiplies with the scales, each
    step rounded to f16. Scales of a page and head that are all below 2^-7 are multiplied by 2^15 before. Products with
    codes and zeros are exact; sums are float32.

    q: [Sq, H, D]. scales: f16 [pages, Hk, D].
    """
    exponent = (bits(q).int() & 0x7FFF).amax(-1, keepdim=True)
    exponent = exponent >> 7 if q.dtype == torch.bfloat16 else (exponent >> 10) + 112
    factor = 2.0 ** (126 - exponent.clamp(max=252).double())
    narrow = (q.double() * factor).half()
    narrow[..., 1::2] = (narrow[..., 1::2].float() / 16).half()
    wide = scales.repeat_interleave(q.shape[1] // scales.shape[1], dim=1)[:, None]  # [pages, 1, H, D]
    wide = wide.float() * torch.where(wide.float().abs().amax(-1, keepdim=True) < 2.0**-7, 2.0**15, 1.0)
    product = (narrow.float() * wide).half().double()
    product[..., 1::2] *= 16
    return torch.where(wide == 0, 0.0, product / wide.double()) / factor


class Exact(NamedTuple):
    """Attention of one sequence in float64, and the sizes that its errors scale with."""

    out: torch.Tensor  # [Sq, H, D]
    lse: torch.Tensor  # [H, Sq]
    value_terms: torch.Tensor  # [Sq, H]: the weighed sum of the terms of values
    score_terms: torch.Tensor  # [Sq, H]: the largest sum of the terms of a score


def exact(q: torch.Tensor, held: Decoded, how: Mapping[str, Any], prefix: int) -> Exact:
    """Attention of q [Sq, H, D]."""
    queries, heads, size = q.shape
    length, kv_heads = held.keys.shape[:2]
    group = heads // kv_heads
    k, v, key_terms = (x.repeat_interleave(group, dim=1) for x in (held.keys, held.values, held.key_terms))
    value_terms = held.value_terms.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    if held.channel_scales is not None and len(held.channel_scales):
        pages = len(held.channel_scales)
        whole = k[: pages * INT4_PAGE].unflatten(0, (pages, INT4_PAGE))
        rounded = torch.einsum("pqhd,pkhd->hqpk", effective_queries(q, held.channel_scales), whole)
        scores[..., : pages * INT4_PAGE] = rounded.flatten(2)
    scale = how.get("softmax_scale")
    scale = size**-0.5 if scale is None else scale
    scores = scores * scale
    softcap = how.get("softcap", 0.0)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    visible = seen(queries, length, how, prefix, q.device) & held.exists
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1) if length else q.new_full((heads, queries), -math.inf, dtype=torch.float64)
    weights = (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
    unseen = ~held.exists[:, None]
    v, value_terms = v.masked_fill(unseen[..., None], 0.0), value_terms.masked_fill(unseen, 0.0)
    sums = torch.einsum("qhd,khd->qhk", q.double().abs(), key_terms) * abs(scale)
    sums = sums.masked_fill(~visible[:, None], 0.0)
    largest = sums.amax(-1) if length else sums.new_zeros(queries, heads)
    return Exact(
        torch.einsum("hqk,khd->qhd", weights, v), lse, torch.einsum("hqk,kh->qh", weights, value_terms), largest
    )


def seen(queries: int, length: int, how: Mapping[str, Any], prefix: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees, bool [Sq, L]."""
    position = length - queries + torch.arange(queries, device=device)[:, None]
    key = torch.arange(length, device=device)
    left, right = (min(end, 2**40) for end in how.get("window_size", (-1, -1)))  # sums below fit in 64 bits
    right = 0 if how.get("causal", False) else right
    inside = torch.ones(queries, length, dtype=torch.bool, device=device)
    inside &= (key <= position + right) | (right < 0)
    inside &= (key >= position - left) | (left < 0)
    return inside | (key < prefix)


# -- bounds -----------------------------------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """Errors relative to what they scale with (see excess)."""

    weight: float
    score: float
    soft_cap: float


KERNEL = Accuracy(weight=2.0**-16, score=2.0**-21, soft_cap=2.0**-21)
"""Weights: an approximate exponential, two 16-bit numbers, some 10^2 sums that tensor cores truncate to 24 bits.
Scores: sums of up to 32 products of 16 dims, truncated too.
Soft cap: softcap * (1 - 2 / (1 + exp(2 x))), however small the score."""
REFERENCE = Accuracy(weight=2.0**-19, score=2.0**-22, soft_cap=2.0**-22)
"""Float32 sums, in blocks, of up to some 10^3 terms; tanh, exp and log within 2 units in the last place."""


def excess(
    got: Result, want: Exact, how: Mapping[str, Any], accuracy: Accuracy = KERNEL, shift: float = 0.0
) -> tuple[float, float]:
    """The errors of out and lse as fractions of their bounds; above 1 the result is wrong.

    A score has an error of accuracy.score times the sum of its terms, and accuracy.soft_cap times the soft cap.
    out: half a unit in the last place for the one rounding; accuracy.weight and twice the error of a score, times the
    weighed sum of the terms of values.
    lse: the error of a score, an eighth of accuracy.weight, and two units in the last place of the LSE.
    shift: the binary logarithm of the scales of values, which is added to scores and subtracted from the LSE.
    """
    out, lse = got
    empty = want.lse.isinf()
    if not torch.equal(lse == -math.inf, empty) or not bool(out.isfinite().all()):
        return math.inf, math.inf
    if out.numel() == 0:
        return 0.0, 0.0
    info = torch.finfo(out.dtype)
    of_score = accuracy.score * want.score_terms + accuracy.soft_cap * how.get("softcap", 0.0)
    bound = 0.5 * info.eps * (want.out.abs() + info.tiny)
    bound += ((accuracy.weight + 2 * of_score) * want.value_terms)[..., None]
    of_out = float(((out.double() - want.out).abs() / bound).max())
    bound = of_score.T + accuracy.weight / 8 + 2.0**-22 * (want.lse.abs() + abs(shift))
    of_lse = ((lse.double() - want.lse).abs() / bound)[~empty]
    return of_out, float(of_lse.max()) if of_lse.numel() else 0.0


def wanted(call: Call, b: int, how: Mapping[str, Any], rounded: bool = True) -> Exact:
    """What sequence b must give; how may hold k_scale and v_scale of an FP8 cache.

    rounded: with the queries over an INT4 cache rounded as the kernel rounds them.
    """
    held = call.decoded(b, rounded and call.kind == "int4")
    k_scale, v_scale = (1.0 if how.get(name) is None else how[name].double() for name in ("k_scale", "v_scale"))
    if isinstance(k_scale, torch.Tensor):
        held.keys, held.key_terms = held.keys * k_scale[:, None], held.key_terms * k_scale[:, None].abs()
    if isinstance(v_scale, torch.Tensor):
        held.values, held.value_terms = held.values * v_scale[:, None], held.value_terms * v_scale.abs()
    prefix = how.get("prefix_len")
    mine = int(prefix[b]) if isinstance(prefix, torch.Tensor) else prefix or 0
    return exact(call.q[b], held, how, mine)


def check(call: Call, accuracy: Accuracy = KERNEL, shift: float = 0.0, **how: Any) -> None:
    """Run a call twice: both runs agree bit for bit, the caches are untouched, and the result is within its bounds."""
    before = call.clone().caches
    got = call.run(**how)
    assert same_bits(tuple(before.values()), tuple(call.caches.values())), "the caches have changed"
    assert same_bits(got, call.run(**how)), "two runs differ"
    assert_exact(call, got, accuracy, shift, **how)


def assert_exact(call: Call, got: Result, accuracy: Accuracy = KERNEL, shift: float = 0.0, **how: Any) -> None:
    """Each sequence of a result is within the bounds."""
    for b in range(len(call.lengths)):
        want = wanted(call, b, how, rounded=accuracy is KERNEL)
        errors = excess((got[0][b], got[1][b]), want, how, accuracy, shift)
        for name, error in zip(("out", "LSE"), errors, strict=True):
            assert error <= 1, f"sequence {b} of length {int(call.lengths[b])}: {name} off by {error:.2f} of its bound"
