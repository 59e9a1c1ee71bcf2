"""flash_attn_with_kvcache against a float64 loop over the keys each query sees."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_attention import flash_attn_with_kvcache, reference
from kestrel_runtime.reference import to_fp8
from kestrel_runtime.testing import opcheck

NAN = float("nan")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Paged:
    """Sequences of the given lengths scattered over the pages of a cache; everything else in it is NaN.

    keys, values: what each sequence holds, as stored, [length, Hk, D] each.
    """

    def __init__(self, lengths, page, kv_heads, size, dtype=torch.float32, extra_keys=0, spare=2, storage=None):
        """extra_keys: further keys each sequence has pages for. spare: unused pages and table entries."""
        pages = [-(-(max(length, 0) + extra_keys) // page) for length in lengths]
        blocks = sum(pages) + spare
        order = iter(torch.randperm(blocks, dtype=torch.int32).tolist())
        self.page, self.lengths = page, ints(*lengths)
        self.k_cache, self.v_cache = (torch.full((blocks, page, kv_heads, size), NAN).to(dtype) for _ in range(2))
        self.table = torch.full((len(lengths), max([*pages, 0]) + spare), 2**31 - 1, dtype=torch.int32)
        self.table[:, 1::2] = -7
        self.keys, self.values = [], []
        for b, length in enumerate(lengths):
            for p in range(pages[b]):
                self.table[b, p] = next(order)
            self.keys.append(torch.randn(max(length, 0), kv_heads, size).to(dtype))
            self.values.append(torch.randn(max(length, 0), kv_heads, size).to(dtype))
            for j in range(length):
                self.key_row(b, j)[:] = self.keys[b][j]
                self.value_row(b, j)[:] = self.values[b][j]
        if storage is not None:
            self.k_cache, self.v_cache = storage(self.k_cache), storage(self.v_cache)

    def key_row(self, sequence, position):
        return self.k_cache[self.table[sequence, position // self.page], position % self.page]

    def value_row(self, sequence, position):
        return self.v_cache[self.table[sequence, position // self.page], position % self.page]


def check_read(cache, q, in_float64, assert_attends, scale_k=1.0, scale_v=1.0, **how):
    """Run the op and hold each sequence against the loop; how: what the op takes."""
    before = cache.k_cache.clone(), cache.v_cache.clone()
    out, lse = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, cache_seqlens=cache.lengths, block_table=cache.table, return_lse=True, **how
    )
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    for old, new in zip(before, (cache.k_cache, cache.v_cache), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    prefix = how.get("prefix_len", 0)
    for b in range(len(cache.lengths)):
        exact_out, exact_lse = in_float64(
            q[b],
            cache.keys[b].float() * scale_k,
            cache.values[b].float() * scale_v,
            how.get("softmax_scale"),
            how.get("causal", False),
            how.get("window_size", (-1, -1)),
            how.get("softcap", 0.0),
            int(prefix[b]) if isinstance(prefix, torch.Tensor) else prefix,
        )
        assert_attends(out[b], lse[b], exact_out, exact_lse, cache.values[b].float() * scale_v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [1, 8, 16, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128), (8, 1, 80), (32, 1, 64)])
def test_decoding_over_pages(dtype, page, heads, kv_heads, size, in_float64, assert_attends):
    torch.manual_seed(page)
    cache = Paged([0, 1, 54, 300], page, kv_heads, size, dtype)
    q = torch.randn(4, 1, heads, size).to(dtype)
    check_read(cache, q, in_float64, assert_attends, causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [96, 192, 512])
@pytest.mark.parametrize("queries", [1, 3])
def test_head_sizes(dtype, size, queries, in_float64, assert_attends):
    torch.manual_seed(size)
    cache = Paged([0, 1, 30], 8, 2, size, dtype)
    check_read(cache, torch.randn(3, queries, 4, size).to(dtype), in_float64, assert_attends, causal=True)


@pytest.mark.parametrize("length", [512, 2048])
def test_long_sequences(length, in_float64, assert_attends):
    torch.manual_seed(length)
    cache = Paged([length], 16, 2, 64, torch.bfloat16)
    check_read(cache, torch.randn(1, 2, 8, 64).bfloat16(), in_float64, assert_attends)


@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"causal": False},
        {"window_size": (0, 0)},
        {"window_size": (1, -1)},
        {"window_size": (7, 2)},
        {"window_size": (-1, 0)},
        {"window_size": (-1, 3)},
        {"window_size": (1000, 1000)},
        {"causal": True, "window_size": (5, 4)},
        {"causal": True, "softcap": 2.0},
        {"softmax_scale": 0.5},
        {"softmax_scale": 0.0},
        {"causal": True, "prefix_len": 20},
        {"causal": True, "prefix_len": ints(0, 3, 9, 1000)},
        {"causal": True, "window_size": (2, 0), "prefix_len": 4, "softcap": 5.0},
        {"causal": True, "num_splits": 3},
    ],
    ids=str,
)
def test_what_each_query_sees(queries, how, in_float64, assert_attends):
    """Sequences shorter than the queries leave the first queries without a key under causal."""
    torch.manual_seed(queries)
    cache = Paged([0, 2, 17, 54], 8, 2, 64)
    check_read(cache, torch.randn(4, queries, 4, 64), in_float64, assert_attends, **how)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [1, 2])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
def test_fp8_values_are_code_times_scale(dtype, scales, q_dtype, in_float64, assert_attends):
    torch.manual_seed(0)
    cache = Paged([0, 5, 40], 8, 2, 64, dtype)
    k_scale, v_scale = torch.rand(scales) + 0.5, torch.rand(scales) * 4
    q = torch.randn(3, 2, 4, 64).to(q_dtype)
    columns = {"scale_k": k_scale[:, None], "scale_v": v_scale[:, None]}
    check_read(cache, q, in_float64, assert_attends, **columns, k_scale=k_scale, v_scale=v_scale, causal=True)


def test_fp8_without_a_scale_and_bytes_are_e4m3():
    torch.manual_seed(0)
    cache = Paged([5, 40], 8, 2, 64, torch.float8_e4m3fn)
    q = torch.randn(2, 1, 4, 64)
    given = {"cache_seqlens": cache.lengths, "block_table": cache.table}
    plain = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, **given)
    one = torch.ones(1)
    scaled = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, **given, k_scale=one, v_scale=one)
    as_bytes = flash_attn_with_kvcache(
        q, cache.k_cache.view(torch.uint8), cache.v_cache.view(torch.uint8), **given, k_scale=one, v_scale=one
    )
    assert torch.equal(plain, scaled)
    assert torch.equal(plain, as_bytes)


LAYOUTS = {
    "HND": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "halves": lambda x: torch.cat((torch.full_like(x, 77), x), dim=-1)[..., x.shape[-1] :],
    "layers": lambda x: torch.stack((torch.full_like(x, 77), x), dim=1)[:, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_the_layout_of_the_cache_does_not_matter(layout, dtype):
    torch.manual_seed(0)
    cache = Paged([3, 40], 8, 2, 64, torch.float8_e4m3fn if dtype == torch.uint8 else dtype)
    plain = [cache.k_cache.view(dtype), cache.v_cache.view(dtype)]
    strided = [
        LAYOUTS[layout](x.view(torch.uint8) if dtype == torch.uint8 else x) for x in (cache.k_cache, cache.v_cache)
    ]
    q = torch.randn(2, 3, 4, 64).bfloat16()
    given = {"cache_seqlens": cache.lengths, "block_table": cache.table}
    assert not strided[0].is_contiguous()
    assert torch.equal(flash_attn_with_kvcache(q, *plain, **given), flash_attn_with_kvcache(q, *strided, **given))


def test_a_contiguous_cache_is_one_page_per_sequence(in_float64, assert_attends):
    torch.manual_seed(0)
    lengths = [0, 7, 33]
    k, v = torch.randn(3, 33, 2, 64), torch.randn(3, 33, 2, 64)
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = NAN, NAN
    q = torch.randn(3, 2, 4, 64)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(*lengths), causal=True, return_lse=True)
    for b, length in enumerate(lengths):
        exact = in_float64(q[b], k[b, :length], v[b, :length], causal=True)
        assert_attends(out[b], lse[b], *exact, v[b, :length])


@pytest.mark.parametrize("entry", [-1, 5, 2**31 - 1])
def test_keys_of_a_page_that_does_not_exist_are_not_seen(entry, in_float64, assert_attends):
    torch.manual_seed(0)
    cache = Paged([40], 8, 2, 64, spare=0)
    cache.table[0, 2] = entry
    q = torch.randn(1, 2, 4, 64)
    given = {"cache_seqlens": cache.lengths, "block_table": cache.table, "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, **given)
    exact = in_float64(q[0], cache.keys[0], cache.values[0], causal=True, missing=range(16, 24))
    assert_attends(out[0], lse[0], *exact, cache.values[0])


def test_a_length_past_the_table_sees_what_the_table_holds():
    torch.manual_seed(0)
    cache = Paged([16], 8, 2, 64, spare=0)
    q = torch.randn(1, 1, 4, 64)
    within = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, cache_seqlens=ints(16), block_table=cache.table)
    past = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, cache_seqlens=ints(99), block_table=cache.table)
    assert torch.equal(within, past)


LENGTHS = [0, 1, 5, 54, 130, 256, 257, 300, 700]


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 64), (4, 1, 72)])
def test_a_row_does_not_depend_on_its_batch(queries, dtype, heads, kv_heads, size):
    """Nor on the width of the table, which comes from the longest sequence: alone, each has its own pages only."""
    torch.manual_seed(queries)
    cache = Paged(LENGTHS, 8, kv_heads, size, dtype)
    q = torch.randn(len(LENGTHS), queries, heads, size).to(dtype)
    q[1] = NAN
    given = {"causal": True, "return_lse": True}
    whole, whole_lse = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, cache_seqlens=cache.lengths, block_table=cache.table, **given
    )
    for b, length in enumerate(LENGTHS):
        own = slice(b, b + 1)
        alone, lse = flash_attn_with_kvcache(
            q[own],
            cache.k_cache,
            cache.v_cache,
            cache_seqlens=cache.lengths[own],
            block_table=cache.table[own, : -(-length // 8)],
            **given,
        )
        if b == 1:
            assert alone[0, -1].isnan().all()
            assert whole[1, -1].isnan().all()
        else:
            assert torch.equal(alone[0], whole[b])
            assert torch.equal(lse[0], whole_lse[b])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (4, 1, 72)])
def test_a_row_does_not_depend_on_the_length_of_a_contiguous_cache(heads, kv_heads, size):
    torch.manual_seed(0)
    lengths = LENGTHS[1:]
    q, k, v = (torch.randn(len(lengths), n, h, size) for n, h in ((2, heads), (1000, kv_heads), (1000, kv_heads)))
    whole = flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(*lengths), causal=True)
    for b, length in enumerate(lengths):
        own = slice(b, b + 1)
        alone = flash_attn_with_kvcache(
            q[own], k[own, :length], v[own, :length], cache_seqlens=ints(length), causal=True
        )
        assert torch.equal(alone[0], whole[b])


# -- appending --------------------------------------------------------------------------------------------------------


def append(cache, new_k, new_v, q, **how):
    return flash_attn_with_kvcache(
        q,
        cache.k_cache,
        cache.v_cache,
        new_k,
        new_v,
        cache_seqlens=cache.lengths,
        block_table=cache.table,
        return_lse=True,
        **how,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [1, 8, 64])
@pytest.mark.parametrize("queries", [1, 5])
def test_appended_keys_are_stored_and_seen(dtype, page, queries, in_float64, assert_attends):
    torch.manual_seed(page)
    cache = Paged([0, 7, 54], page, 2, 64, dtype, extra_keys=queries)
    before = cache.k_cache.clone()
    q, new_k, new_v = (torch.randn(3, queries, heads, 64).to(dtype) for heads in (4, 2, 2))
    out, lse = append(cache, new_k, new_v, q, causal=True)
    for b, length in enumerate(cache.lengths.tolist()):
        for i in range(queries):
            assert torch.equal(cache.key_row(b, length + i), new_k[b, i])
            assert torch.equal(cache.value_row(b, length + i), new_v[b, i])
        values = torch.cat((cache.values[b], new_v[b]))
        exact = in_float64(q[b], torch.cat((cache.keys[b], new_k[b])), values, causal=True)
        assert_attends(out[b], lse[b], *exact, values)
    changed = (cache.k_cache.view(torch.uint8) != before.view(torch.uint8)).flatten(2).any(-1)
    assert int(changed.sum()) == 3 * queries


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("scales", [None, 1, 2])
def test_appended_keys_are_seen_as_quantised(storage, scales, in_float64, assert_attends):
    torch.manual_seed(0)
    codes = torch.float8_e4m3fn if storage == torch.uint8 else storage
    cache = Paged([0, 9], 8, 2, 64, codes, extra_keys=2, storage=lambda x: x.view(storage))
    k_scale, v_scale = (None, None) if scales is None else (torch.rand(scales) + 0.2, torch.rand(scales) + 0.2)
    q, new_k, new_v = (torch.randn(2, 2, heads, 64).bfloat16() for heads in (4, 2, 2))
    out, lse = append(cache, new_k, new_v, q, causal=True, k_scale=k_scale, v_scale=v_scale)
    sk, sv = (torch.ones(1, 1) if s is None else s[:, None] for s in (k_scale, v_scale))
    for b, length in enumerate(cache.lengths.tolist()):
        stored_k, stored_v = to_fp8(new_k[b].float() / sk, codes), to_fp8(new_v[b].float() / sv, codes)
        for i in range(2):
            assert torch.equal(cache.key_row(b, length + i).view(torch.uint8), stored_k[i].view(torch.uint8))
            assert torch.equal(cache.value_row(b, length + i).view(torch.uint8), stored_v[i].view(torch.uint8))
        keys = torch.cat((cache.keys[b].float(), stored_k.float())) * sk
        values = torch.cat((cache.values[b].float(), stored_v.float())) * sv
        assert_attends(out[b], lse[b], *in_float64(q[b], keys, values, causal=True), values)


def test_appending_to_a_contiguous_cache():
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 9, 2, 64), torch.randn(2, 9, 2, 64)
    paged = k_cache.clone(), v_cache.clone()
    q, new_k, new_v = (torch.randn(2, 3, heads, 64) for heads in (4, 2, 2))
    lengths = ints(2, 6)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, causal=True)
    same = flash_attn_with_kvcache(
        q, *paged, new_k, new_v, cache_seqlens=lengths, block_table=ints(0, 1)[:, None], causal=True
    )
    assert torch.equal(out, same)
    assert torch.equal(k_cache, paged[0])
    assert torch.equal(k_cache[0, 2:5], new_k[0])
    assert torch.equal(v_cache[1, 6:9], new_v[1])


def test_a_negative_length_is_padding():
    torch.manual_seed(0)
    cache = Paged([3, -1, 3], 8, 2, 64, extra_keys=2)
    cache.table[1, 0] = cache.table[0, 0]  # its row 0 would be written over, were it not padding
    before = cache.k_cache.clone()
    q, row = torch.randn(3, 2, 4, 64), torch.randn(3, 2, 2, 64)
    out, lse = append(cache, row, row, q)
    assert torch.equal(out[1], torch.zeros(2, 4, 64))
    assert bool((lse[1] == -float("inf")).all())
    assert bool(out[0].any())
    changed = (cache.k_cache.view(torch.int32) != before.view(torch.int32)).flatten(2).any(-1)
    assert int(changed.sum()) == 4
    assert torch.equal(cache.key_row(0, 0), cache.keys[0][0])


def test_a_position_without_a_page_is_not_written():
    torch.manual_seed(0)
    cache = Paged([8, 3], 8, 2, 64, extra_keys=0, spare=0)
    cache.table = torch.cat((cache.table, ints(-1, -1)[:, None]), dim=1)
    before = cache.k_cache.clone()
    q, row = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64)
    out, _ = append(cache, row, row, q)
    changed = (cache.k_cache.view(torch.int32) != before.view(torch.int32)).flatten(2).any(-1)
    assert int(changed.sum()) == 1
    full = flash_attn_with_kvcache(q, before, cache.v_cache, cache_seqlens=cache.lengths, block_table=cache.table)
    assert torch.equal(out[0], full[0])


# -- the op -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 1, 4, 64), (2, 0, 4, 64)])
@pytest.mark.parametrize("appending", [False, True])
def test_nothing_to_attend_with_gives_nothing(shape, appending):
    q = torch.randn(shape)
    cache = torch.randn(2, 5, 8, 2, 64)
    before = cache.clone()
    row = torch.randn(*shape[:2], 2, 64)
    more = (row, row) if appending else ()
    lengths = torch.zeros(shape[0], dtype=torch.int32)
    table = torch.zeros(shape[0], 3, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(q, *cache, *more, cache_seqlens=lengths, block_table=table, return_lse=True)
    assert out.shape == shape
    assert lse.shape == (shape[0], 4, shape[1])
    assert torch.equal(cache, before)


@pytest.mark.parametrize("blocks", [0, 3])
def test_a_cache_or_a_table_without_pages(blocks):
    q = torch.randn(2, 1, 4, 64)
    table = torch.zeros(2, 2 if blocks == 0 else 0, dtype=torch.int32)
    row = torch.randn(2, 1, 2, 64)
    out, lse = flash_attn_with_kvcache(
        q, *torch.randn(2, blocks, 8, 2, 64), row, row, cache_seqlens=ints(0, 3), block_table=table, return_lse=True
    )
    assert torch.equal(out, torch.zeros_like(q))
    assert bool((lse == -float("inf")).all())


def arguments(kind: str):
    torch.manual_seed(0)
    cache = Paged([0, 5], 8, 2, 64, torch.float8_e4m3fn if kind == "fp8" else torch.float32, extra_keys=3)
    k_cache, v_cache = cache.k_cache, cache.v_cache
    q, new_k, new_v = (torch.randn(2, 3, heads, 64) for heads in (4, 2, 2))
    if kind == "fp8":
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if kind == "transposed":
        k_cache, v_cache = (x.nan_to_num().transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "sliced":
        k_cache, v_cache, q = (torch.cat((x, x), dim=-1)[..., :64] for x in (k_cache, v_cache, q))
        new_k, new_v = (torch.cat((x, x), dim=2)[:, :, :2] for x in (new_k, new_v))
    scale = torch.full((1,), 0.5) if kind == "fp8" else None
    scores = (None, True, 4, -1, 0.0, 0, ints(0, 2), 0)
    return (q, k_cache, v_cache), (new_k, new_v), (cache.lengths, cache.table, scale, scale, *scores)


KINDS = ("plain", "transposed", "sliced", "fp8")


@pytest.mark.parametrize(
    ("kind", "appending"), [("transposed", False), ("fp8", False), ("sliced", True), ("fp8", True)]
)
def test_the_registered_ops_are_sound(kind, appending):
    first, new, rest = arguments(kind)
    op = torch.ops.kestrel_attention
    if appending:
        opcheck(op.flash_attn_with_kvcache_append.default, (*first, *new, *rest))
    else:
        opcheck(op.flash_attn_with_kvcache.default, (*first, *rest[:4], None, None, None, None, *rest[4:]))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("transposed", "aot_eager"), ("sliced", "aot_eager"), ("plain", "inductor"), ("fp8", "inductor")],
)
@pytest.mark.parametrize("appending", [False, True])
def test_compiles_without_graph_breaks(kind, backend, appending):
    def run(function):
        first, new, (lengths, table, k_scale, v_scale, *_) = arguments(kind)
        more = {"cache_seqlens": lengths, "block_table": table, "k_scale": k_scale, "v_scale": v_scale}
        result = function(
            *first, *(new if appending else ()), **more, causal=True, window_size=(4, -1), prefix_len=2, return_lse=True
        )
        out = torch.empty_like(first[0])
        function(first[0], *first[1:], **more, out=out)
        return out, *result, *(x.view(torch.uint8) for x in first[1:])

    torch._dynamo.reset()  # the number of variants of one function is limited
    for a, b in zip(
        run(flash_attn_with_kvcache),
        run(torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=backend)),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("appending", [False, True])
def test_the_references_read_nothing_on_the_host(kind, appending):
    """Fake tensors have no values to read: a reference that asked for one would fail here."""
    first, new, rest = arguments(kind)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        first, new, rest = (
            [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in group] for group in (first, new, rest)
        )
        if appending:
            out, lse = reference.flash_attn_with_kvcache_append(*first, *new, *rest)
        else:
            out, lse = reference.flash_attn_with_kvcache(*first, *rest[:4], None, None, None, None, *rest[4:])
    assert out.shape == (2, 3, 4, 64)
    assert lse.shape == (2, 4, 3)
