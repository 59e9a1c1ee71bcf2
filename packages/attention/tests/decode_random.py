"""Random calls of flash_attn_with_kvcache: shapes, strides, page sizes, dtypes, caches, masks and distributions."""

from __future__ import annotations

import random
from typing import Any

import torch
from decode_oracle import INT4_PAGE, KERNEL, KINDS, REFERENCE, Call, assert_exact, bits, made

from kestrel_attention import flash_attn_with_kvcache
from kestrel_runtime.testing import RandomCase, assert_same_bits, by_reference

HEAD_DIMS = {
    "same": (8, 24, 64, 64, 72, 80, 96, 128, 128, 192, 256, 512),
    "e4m3": (16, 48, 64, 64, 80, 96, 128, 128, 192, 256, 512),
    "e5m2": (64, 128),
    "int8": (64, 128, 256),
    "int4": (64, 128),
}
LAYOUTS = ("NHD", "NHD", "HND", "halves", "layers")
WINDOWS = ((-1, -1), (-1, -1), (0, 0), (7, 2), (100, -1), (-1, 3), (900, 70), (2**62, 2**63 - 1))
FLOATS16 = (torch.bfloat16, torch.float16)


def random_case(
    rng: random.Random, device: str, dtypes: tuple[torch.dtype, ...] = FLOATS16, longest: int = 6000
) -> RandomCase:
    """A call whose result is held against float64, and whose appends against the reference."""
    kind, dtype = rng.choice(KINDS), rng.choice(dtypes)
    size, kv_heads = rng.choice(HEAD_DIMS[kind]), rng.choice((1, 2, 2, 3, 8))
    heads = kv_heads * rng.choice((1, 1, 2, 4, 5, 16 if kv_heads < 3 else 3))
    queries = rng.choice((1, 1, 1, 2, 3, 7, 16))
    page = INT4_PAGE if kind == "int4" else rng.choice((1, 2, 7, 8, 16, 16, 24, 64, 256))
    short = (0, 1, -1, page - 1, page, page + 1, rng.randrange(100), rng.randrange(1000))
    lengths = tuple(rng.choice((*short, rng.randrange(longest))) for _ in range(rng.choice((1, 2, 3, 5))))
    new_keys = rng.random() < 0.4
    extra_keys = queries if new_keys and rng.random() < 0.8 else 0  # else some new keys have no page
    if rng.random() < 0.15:
        page = INT4_PAGE if kind == "int4" else max(*lengths, 1) + rng.randrange(50)
        lengths = tuple(min(length, page) for length in lengths)
        call = made(kind, heads, kv_heads, size, page, lengths, queries, dtype, rng.randrange(2**31), device=device)
        without_table(call)
    else:
        seed = rng.randrange(2**31)
        call = made(kind, heads, kv_heads, size, page, lengths, queries, dtype, seed, extra_keys, device=device)
    call.q = strided_rows(rng, call.q * rng.choice((0.25, 1.0, 1.0, 3.0)))
    arrange(call, rng.choice(LAYOUTS))
    how = random_options(rng, call)
    new = []
    if new_keys:
        shape = (len(lengths), queries, kv_heads, size)
        new = [strided_rows(rng, torch.randn(shape).to(dtype).to(device)) for _ in range(2)]
    return case_of(call, how, new)


def without_table(call: Call) -> None:
    """The cache becomes one block per sequence."""
    assert call.table is not None
    blocks = call.caches["k_cache"].shape[0]
    first = call.table[:, 0].clamp(0, blocks - 1).long()
    for name, x in call.caches.items():
        if name not in ("k_tail", "seq_ids"):
            call.caches[name] = bits(x)[first].view(x.dtype)
    call.table = None


def strided_rows(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """x, or the same values in rows of a wider buffer: aligned, or of an odd stride, which kernels copy."""
    extra = rng.choice((0, 0, 16, 3))
    if extra == 0 or x.numel() == 0:
        return x
    wide = torch.zeros(*x.shape[:-2], x.shape[-2] * x.shape[-1] + extra, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-2] * x.shape[-1]].unflatten(-1, x.shape[-2:]).copy_(x)


def arrange(call: Call, layout: str) -> None:
    """Other strides for the caches, and for the scales, zeros and tail that belong to them."""
    caches = call.caches
    if layout == "HND":
        for name in ("k_cache", "v_cache"):
            caches[name] = bits(caches[name]).transpose(1, 2).contiguous().transpose(1, 2).view(caches[name].dtype)
    elif layout == "halves":
        size = caches["k_cache"].shape[-1]
        both = torch.cat((bits(caches["k_cache"]), bits(caches["v_cache"])), dim=-1)
        for name, part in (("k_cache", both[..., :size]), ("v_cache", both[..., size:])):
            caches[name] = part.view(caches[name].dtype)
    elif layout == "layers":
        for name in set(caches) - {"seq_ids"}:
            layers = torch.stack((torch.zeros_like(bits(caches[name])), bits(caches[name])), dim=1)
            caches[name] = layers.view(caches[name].dtype)[:, 1]


def random_options(rng: random.Random, call: Call) -> dict[str, Any]:
    """What shapes the scores, FP8 scales, and the number of splits."""
    device, kv_heads = call.q.device, call.caches["k_cache"].shape[2]
    how: dict[str, Any] = {"causal": rng.random() < 0.5, "window_size": rng.choice(WINDOWS)}
    how["num_splits"] = rng.choice((0, 0, 0, -1, 1, 2, 5, 64, 2**40))
    if rng.random() < 0.3:
        how["softcap"] = rng.choice((0.5, 2.0, 30.0))
    if rng.random() < 0.3:
        how["softmax_scale"] = rng.choice((0.0, -0.1, 0.05, 0.2))
    prefix = rng.choice((None, None, None, 0, 20, 700, "each", 2**40))
    if prefix is not None:
        each = torch.randint(0, 300, (len(call.lengths),), dtype=torch.int32)
        how["prefix_len"] = each.to(device) if prefix == "each" else prefix
    if call.kind in ("e4m3", "e5m2"):
        for name in ("k_scale", "v_scale"):
            count = rng.choice((0, 1, kv_heads))
            if count:
                how[name] = (torch.rand(count) + 0.25).to(device)
    return how


def case_of(call: Call, how: dict[str, Any], new: list[torch.Tensor]) -> RandomCase:
    """The call as a case for compare_at_random."""
    given = {"q": call.q, **call.caches, **dict(zip(("k", "v"), new, strict=False)), **how}
    given |= {"cache_seqlens": call.lengths, "block_table": call.table, "return_lse": True}
    after = call.clone()
    if new:
        by_reference(after.run, *new, **how)
        after.lengths = torch.where(call.lengths < 0, call.lengths, call.lengths + call.q.shape[1])

    def compare(got: Any, want: Any, what: str) -> None:
        if what != "result":
            assert_same_bits(got, want, what, any_nan=True)
            return
        assert_exact(after, want, REFERENCE, **how)
        assert_exact(after, got, KERNEL if call.q.is_cuda else REFERENCE, **how)

    written = tuple(name for name in call.caches if name != "seq_ids") if new else ()
    return RandomCase(flash_attn_with_kvcache, (), given, compare, written)
