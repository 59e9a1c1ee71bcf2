"""flash_attn_with_kvcache over INT8 and INT4 caches: codes decoded one by one, then a float64 loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_attention import flash_attn_with_kvcache, reference
from kestrel_runtime import UnsupportedError
from kestrel_runtime.paged_cache import write_int4, write_int8
from kestrel_runtime.testing import BadInput, assert_rejects, opcheck

KV_HEADS, SIZE = 2, 64


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Int8:
    """Random codes and scales; sequences of the given lengths over shuffled pages."""

    def __init__(self, lengths, page=8, extra_keys=0, dtype=torch.float32, kv_heads=KV_HEADS, size=SIZE):
        pages = -(-(max(lengths) + extra_keys) // page) + 1
        blocks = pages * len(lengths)
        self.page, self.lengths, self.kv_heads, self.size = page, ints(*lengths), kv_heads, size
        self.caches = dict(zip(("k_cache", "v_cache"), self.codes(blocks, page), strict=True))
        self.table = torch.randperm(blocks, dtype=torch.int32).view(len(lengths), pages)
        self.more = {
            "k_scale": torch.rand(blocks, page, kv_heads) / 64,
            "v_scale": torch.rand(blocks, page, kv_heads) / 32,
        }

    def codes(self, blocks, page):
        return torch.randint(-127, 128, (2, blocks, page, self.kv_heads, self.size), dtype=torch.int8).unbind()

    def attend(self, q, *new, **how):
        return flash_attn_with_kvcache(
            q,
            *self.caches.values(),
            *new,
            cache_seqlens=self.lengths,
            block_table=self.table,
            return_lse=True,
            **self.more,
            **how,
        )

    def decoded(self, sequence, length):
        """Keys and values in float64, a token at a time."""
        keys, values = torch.zeros(2, length, KV_HEADS, SIZE, dtype=torch.float64)
        for j in range(length):
            block, row = int(self.table[sequence, j // self.page]), j % self.page
            keys[j], values[j] = self.key_at(sequence, j, block, row, length), self.value_at(block, row)
        return keys, values

    def key_at(self, sequence, position, block, row, length):
        return self.caches["k_cache"][block, row].double() * self.more["k_scale"][block, row, :, None].double()

    def value_at(self, block, row):
        return self.caches["v_cache"][block, row].double() * self.more["v_scale"][block, row, :, None].double()

    def written(self, k, v):
        """Copies of everything after the write of [B, added, Hk, D], by the runtime's own writer."""
        caches, more = ({name: x.clone() for name, x in group.items()} for group in (self.caches, self.more))
        slots = self.slots(k.shape[1])
        write_int8(caches["k_cache"], more["k_scale"], slots, k.flatten(0, 1))
        write_int8(caches["v_cache"], more["v_scale"], slots, v.flatten(0, 1))
        return caches | more

    def slots(self, added):
        pairs = [(b, int(n) + i) for b, n in enumerate(self.lengths) for i in range(added)]
        return torch.tensor([int(self.table[b, p // self.page]) * self.page + p % self.page for b, p in pairs])


class Int4(Int8):
    """Random codes, scales and zeros per KIVI; each sequence has its row of the tail, in another order."""

    def __init__(self, lengths, page=64, extra_keys=0, dtype=torch.float32, kv_heads=KV_HEADS, size=SIZE):
        super().__init__(lengths, page, extra_keys, dtype, kv_heads, size)
        blocks, count = len(self.caches["k_cache"]), len(lengths)
        per_channel, per_token = (2, blocks, kv_heads, size), (2, blocks, page, kv_heads)
        self.more = {
            **dict(zip(("k_scale", "k_zero"), (torch.rand(per_channel) * 0.3).half(), strict=True)),
            **dict(zip(("v_scale", "v_zero"), (torch.rand(per_token) * 0.3).half(), strict=True)),
            "k_tail": torch.full((count + 2, page, kv_heads, size), float("nan")).to(dtype),
            "seq_ids": torch.randperm(count + 2, dtype=torch.int32)[:count],
        }
        self.more["k_zero"] += torch.randint(0, 15, self.more["k_zero"].shape)
        self.more["v_zero"] += torch.randint(0, 15, self.more["v_zero"].shape)
        for b, length in enumerate(lengths):
            self.more["k_tail"][self.more["seq_ids"][b], : length % 64] = torch.randn(length % 64, kv_heads, size).to(
                dtype
            )

    def codes(self, blocks, page):
        return torch.randint(0, 256, (2, blocks, page, self.kv_heads, self.size // 2), dtype=torch.uint8).unbind()

    def key_at(self, sequence, position, block, row, length):
        if position >= length // 64 * 64:
            return self.more["k_tail"][self.more["seq_ids"][sequence], row].double()
        codes = unpacked(self.caches["k_cache"][block, row])
        return (codes - self.more["k_zero"][block].double()) * self.more["k_scale"][block].double()

    def value_at(self, block, row):
        zero, scale = (self.more[name][block, row, :, None].double() for name in ("v_zero", "v_scale"))
        return (unpacked(self.caches["v_cache"][block, row]) - zero) * scale

    def written(self, k, v):
        copies = {name: x.clone() for name, x in (self.caches | self.more).items()}
        names = ("k_cache", "v_cache", "k_scale", "k_zero", "v_scale", "v_zero", "k_tail")
        owners = self.more["seq_ids"].repeat_interleave(k.shape[1])
        write_int4(k.flatten(0, 1), v.flatten(0, 1), *(copies[n] for n in names), self.slots(k.shape[1]), owners)
        return copies


def unpacked(row: torch.Tensor) -> torch.Tensor:
    """The codes of [Hk, D/2] bytes, low nibble first, one at a time."""
    codes = torch.zeros(*row.shape[:-1], 2 * row.shape[-1], dtype=torch.float64)
    for i in range(row.shape[-1]):
        codes[..., 2 * i], codes[..., 2 * i + 1] = row[..., i] % 16, row[..., i] // 16
    return codes


FORMATS = [(Int8, 1), (Int8, 16), (Int4, 64)]
LENGTHS = [0, 1, 54, 64, 65, 130]


def hold(cache, out, lse, q, lengths, in_float64, assert_attends, **how):
    for b, length in enumerate(lengths):
        keys, values = cache.decoded(b, length)
        exact = in_float64(q[b], keys, values, **how)
        assert_attends(out[b], lse[b], *exact, values)


@pytest.mark.parametrize(("kind", "page"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("queries", [1, 3])
def test_codes_are_decoded_and_attended_to(kind, page, dtype, queries, in_float64, assert_attends):
    torch.manual_seed(queries)
    cache = kind(LENGTHS, page, dtype=dtype)
    q = (torch.randn(len(LENGTHS), queries, 4, SIZE) / 4).to(dtype)
    before = {name: x.clone() for name, x in (cache.caches | cache.more).items()}
    out, lse = cache.attend(q, causal=True, window_size=(70, -1))
    hold(cache, out, lse, q, LENGTHS, in_float64, assert_attends, causal=True, window=(70, -1))
    for name, x in (cache.caches | cache.more).items():
        assert torch.equal(x.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize(("kind", "page"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_appended_keys_are_quantised_stored_and_seen(kind, page, dtype, queries, in_float64, assert_attends):
    torch.manual_seed(queries)
    lengths = [0, 54, 63, 64] if queries < 70 else [0, 60]
    cache = kind(lengths, page, extra_keys=queries, dtype=dtype)
    q, k, v = (torch.randn(len(lengths), queries, heads, SIZE).to(dtype) / 4 for heads in (4, KV_HEADS, KV_HEADS))
    wanted = cache.written(k, v)
    out, lse = cache.attend(q, k, v, causal=True)
    for name, x in (cache.caches | cache.more).items():
        assert torch.equal(x.view(torch.uint8), wanted[name].view(torch.uint8)), name
    hold(cache, out, lse, q, [n + queries for n in lengths], in_float64, assert_attends, causal=True)


@pytest.mark.parametrize("page", [8, 64, 256])
def test_int8_pages_of_every_size(page, in_float64, assert_attends):
    torch.manual_seed(page)
    lengths = [0, 1, 63, 254, 300]
    cache = Int8(lengths, page, extra_keys=3)
    q, k, v = (torch.randn(len(lengths), 3, heads, SIZE).bfloat16() / 4 for heads in (4, KV_HEADS, KV_HEADS))
    wanted = cache.written(k, v)
    out, lse = cache.attend(q, k, v, causal=True)
    for name, x in (cache.caches | cache.more).items():
        assert torch.equal(x, wanted[name]), name
    hold(cache, out, lse, q, [n + 3 for n in lengths], in_float64, assert_attends, causal=True)


def test_a_sequence_without_a_tail_is_padding():
    torch.manual_seed(0)
    cache = Int4([70, 70, 70], extra_keys=1)
    cache.more["seq_ids"][:2] = ints(-1, 5)
    q, row = torch.randn(3, 1, 4, SIZE), torch.randn(3, 1, KV_HEADS, SIZE)
    before = cache.caches["v_cache"].clone()
    out, lse = cache.attend(q, row, row)
    assert torch.equal(out[:2], torch.zeros(2, 1, 4, SIZE))
    assert bool((lse[:2] == -float("inf")).all())
    assert bool(out[2].any())
    assert int((cache.caches["v_cache"] != before).any(-1).any(-1).sum()) == 1


def test_int4_pages_of_another_size_are_unsupported():
    cache = Int4([5], page=32)
    with pytest.raises(UnsupportedError, match="64 slots"):
        cache.attend(torch.randn(1, 1, 4, SIZE))


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_a_contiguous_cache_is_one_page_per_sequence(kind):
    torch.manual_seed(0)
    cache = kind([5, 60], 64)
    q = torch.randn(2, 2, 4, SIZE)
    whole = cache.attend(q, causal=True)
    first = cache.table[:, 0].long()
    paged = ("seq_ids", "k_tail")
    alone = {name: x if name in paged else x[first] for name, x in (cache.caches | cache.more).items()}
    out = flash_attn_with_kvcache(q, **alone, cache_seqlens=cache.lengths, causal=True, return_lse=True)
    for a, b in zip(whole, out, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)  # fewer keys in the product, so it rounds differently


# -- the ops ----------------------------------------------------------------------------------------------------------


def arguments(kind):
    torch.manual_seed(0)
    cache = kind([0, 70], 64 if kind is Int4 else 8, extra_keys=3)
    cache.more = {name: x.nan_to_num() if x.is_floating_point() else x for name, x in cache.more.items()}
    q, k, v = (torch.randn(2, 3, heads, SIZE) for heads in (4, KV_HEADS, KV_HEADS))
    names = ("k_scale", "v_scale", "k_zero", "v_zero", "k_tail", "seq_ids")
    scores = (None, True, 90, -1, 0.0, 1, None, 0)
    rest = (cache.lengths, cache.table, *(cache.more.get(name) for name in names), *scores)
    return (q, *(x.clone() for x in cache.caches.values())), (k, v), rest


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_the_registered_ops_are_sound(kind):
    first, new, rest = arguments(kind)
    opcheck(torch.ops.kestrel_attention.flash_attn_with_kvcache.default, (*first, *rest))
    opcheck(torch.ops.kestrel_attention.flash_attn_with_kvcache_append_int.default, (*first, *new, *rest))


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("appending", [False, True])
def test_compiles_without_graph_breaks(kind, backend, appending):
    def run(function):
        torch.manual_seed(0)
        cache = kind([0, 70], 64 if kind is Int4 else 8, extra_keys=3)
        q, k, v = (torch.randn(2, 3, heads, SIZE) for heads in (4, KV_HEADS, KV_HEADS))
        given = {"cache_seqlens": cache.lengths, "block_table": cache.table, **cache.more}
        new = (k, v) if appending else ()
        result = function(q, *cache.caches.values(), *new, **given, causal=True, return_lse=True)
        return *result, *cache.caches.values(), *cache.more.values()

    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=backend)
    for a, b in zip(run(flash_attn_with_kvcache), run(compiled), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_the_references_read_nothing_on_the_host(kind):
    """Fake tensors have no values to read: a reference that asked for one would fail here."""
    groups = arguments(kind)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        first, new, rest = ([mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in g] for g in groups)
        reference.flash_attn_with_kvcache(*first, *rest)
        out, _ = reference.flash_attn_with_kvcache_append_int(*first, *new, *rest)
    assert out.shape == (2, 3, 4, SIZE)


def bad_cases(batch: int, queries: int, kv_heads: int, size: int, page: int) -> list[BadInput]:
    q, new = torch.zeros(batch, queries, 2 * kv_heads, size), torch.zeros(batch, queries, kv_heads, size)

    def good(kind):
        cache = kind([0, *[70] * (batch - 1)], 64 if kind is Int4 else page, queries, kv_heads=kv_heads, size=size)
        return {"q": q, **cache.caches, "cache_seqlens": cache.lengths, "block_table": cache.table, **cache.more}

    calls = {kind: good(kind) for kind in (Int8, Int4)}

    def bad(kind, name, argument, value, error=ValueError, fragment="", **more):
        values = calls[kind] | more
        values[argument] = value(values[argument]) if callable(value) else value
        return BadInput(f"{kind.__name__}: {name}", argument, lambda: ((), values), error, fragment)

    return [
        bad(Int8, "no scale", "k_scale", None, TypeError, "a tensor"),
        bad(Int8, "one scale", "v_scale", torch.ones(1), fragment="1-D"),
        bad(Int8, "half scales", "v_scale", lambda x: x.half(), TypeError, "float16"),
        bad(Int8, "scales of fewer blocks", "k_scale", lambda x: x[1:], fragment=f"{kv_heads})"),
        bad(Int8, "scales elsewhere", "k_scale", lambda x: x.to("meta"), fragment="meta"),
        bad(Int8, "a cache of another kind", "v_cache", lambda x: x.float(), TypeError, "float32"),
        bad(Int8, "no scale to write", "v_scale", None, TypeError, "a tensor", k=new, v=new),
        bad(Int8, "heads that do not group", "q", q[:, :, 1:], fragment="KV heads"),
        bad(Int4, "no zero", "k_zero", None, TypeError, "a tensor"),
        bad(Int4, "no tail", "k_tail", None, TypeError, "a tensor"),
        bad(Int4, "no sequences", "seq_ids", None, TypeError, "a tensor"),
        bad(Int4, "int64 sequences", "seq_ids", lambda x: x.long(), TypeError, "int64"),
        bad(Int4, "every other sequence", "seq_ids", lambda x: x.repeat_interleave(2)[::2], fragment="stride 2"),
        bad(Int4, "too few sequences", "seq_ids", lambda x: x[:1], fragment="(1,)"),
        bad(Int4, "float32 scales", "k_scale", lambda x: x.float(), TypeError, "float32"),
        bad(Int4, "zeros of fewer blocks", "v_zero", lambda x: x[1:], fragment=f"64, {kv_heads})"),
        bad(Int4, "a tail of another dtype", "k_tail", lambda x: x.half(), TypeError, "float16"),
        bad(Int4, "a tail of fewer rows", "k_tail", lambda x: x[:, :63], fragment="63"),
        bad(Int4, "a signed cache", "k_cache", lambda x: x.view(torch.int8), TypeError, "int8"),
        bad(Int4, "a cache not packed", "k_cache", lambda x: torch.cat((x, x), dim=-1), fragment=f"{size})"),
        bad(Int4, "an odd head size", "q", q[..., 1:], fragment="even"),
        bad(Int4, "a tail elsewhere", "k_tail", lambda x: x.to("meta"), fragment="meta"),
        bad(Int4, "zeros without a tail", "k_tail", None, TypeError, "a tensor", seq_ids=None, k=new, v=new),
    ]


SHAPE = (2, 3, 2, 64, 8)
NAMES = [case.name for case in bad_cases(*SHAPE)]


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_bad_input_is_refused_and_named(index):
    assert_rejects(flash_attn_with_kvcache, bad_cases(*SHAPE)[index], "flash_attn_with_kvcache")


@settings(max_examples=100, deadline=None)
@given(
    index=st.sampled_from(range(len(NAMES))),
    shape=st.tuples(
        st.integers(2, 5),
        st.integers(1, 5),
        st.integers(2, 4),
        st.integers(1, 35).map(lambda n: 2 * n),
        st.sampled_from([1, 8, 16, 64]),
    ),
)
def test_bad_input_is_refused_whatever_the_shape(index, shape):
    assert_rejects(flash_attn_with_kvcache, bad_cases(*shape)[index], "flash_attn_with_kvcache")
