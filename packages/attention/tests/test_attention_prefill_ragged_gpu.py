"""Packed sequences of which few are long, on a GPU: lists of works, held against float64 and against each alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decode_oracle import same_bits
from prefill_gpu import NAMES, each_kernel, ints, random, scores, starts_of  # noqa: F401
from prefill_oracle import assert_exact, exact_attention, fp8_attention

from kestrel_attention import flash_attn_varlen_func, prefill
from kestrel_attention.kernels.constants import FIRST_COUNT, FIRST_SHIFT, FIRST_WORK, SPLIT_BLOCK_COUNT, WORK_COUNT
from kestrel_attention.kernels.parameters import PrefillWorksScalars
from kestrel_attention.kernels.variants import NAMED
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

E4M3 = torch.float8_e4m3fn
CAUSAL: dict[str, Any] = {"causal": True, "return_lse": True}


def part(starts: torch.Tensor, b: int) -> slice:
    return slice(int(starts[b]), int(starts[b + 1]))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    if q.dtype == E4M3:
        if prefill.USE_HOPPER and q.shape[2] <= 128:
            return fp8_attention(q.float(), k.float(), v.float(), causal=True, rounded=q.shape[2] > 64)
        return exact_attention(*(x.bfloat16() for x in (q, k, v)), causal=True)
    return exact_attention(q, k, v, causal=True)


def assert_each_is_right(
    tensors: list[torch.Tensor], starts: list[torch.Tensor], got: tuple[torch.Tensor, torch.Tensor], checked: Any
) -> None:
    """Sequences ``checked`` are those of float64, and those of calls of their own, bit for bit."""
    (q, k, v), (out, lse) = tensors, got
    for b in checked:
        rows, keys = part(starts[0], b), part(starts[1], b)
        queries, held = rows.stop - rows.start, keys.stop - keys.start
        if not queries or not held:
            continue
        if queries <= 1000:
            assert_exact(out[rows], lse[:, rows], exact(q[rows], k[keys], v[keys]))
        given = q[rows].clone(), k[keys].clone(), v[keys].clone(), ints([0, queries]), ints([0, held]), queries, held
        alone = flash_attn_varlen_func(*given, **CAUSAL)
        assert same_bits(alone, (out[rows], lse[:, rows].contiguous())), f"sequence {b} of {queries} queries"


@pytest.mark.parametrize(
    ("dtype", "heads", "size"),
    [
        (torch.bfloat16, (4, 2), 64),
        (torch.bfloat16, (32, 8), 64),
        (torch.float16, (2, 2), 80),
        (torch.bfloat16, (8, 2), 128),
        (torch.bfloat16, (4, 2), 256),
        (torch.bfloat16, (2, 1), 512),
        (E4M3, (8, 2), 64),
        (E4M3, (4, 1), 128),
    ],
    ids=str,
)
def test_three_hundred_sequences_of_up_to_4000_tokens(dtype, heads, size):
    torch.manual_seed(0)
    lengths = (torch.rand(300) * math.log(4000)).exp().int().clamp(1, 4000).tolist()
    lengths[17], lengths[200] = 4000, 1
    q, k, v = (random(sum(lengths), n, size, dtype=dtype) for n in (heads[0], heads[1], heads[1]))
    starts = [starts_of(lengths)] * 2
    got = flash_attn_varlen_func(q, k, v, *starts, 4000, 4000, **CAUSAL)
    assert same_bits(flash_attn_varlen_func(q, k, v, *starts, 4000, 4000, **CAUSAL), got)
    assert_each_is_right([q, k, v], starts, got, (0, *range(5, 300, 29), 17, 200, 299))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((16, 4), 128)])
def test_one_long_sequence_among_short_ones_over_many_keys(heads, size, dtype):
    """Short ones have splits on Hopper, and blocks of rows of the long one have none."""
    torch.manual_seed(0)
    queries = [int(n) for n in torch.randint(0, 40, (120,))]
    keys = [n + int(more) for n, more in zip(queries, torch.randint(0, 3000, (120,)), strict=True)]
    queries[50], keys[50] = 3000, 3100
    queries[0] = queries[119] = 0
    q = random(sum(queries), heads[0], size, dtype=dtype)
    k, v = (random(sum(keys), heads[1], size, dtype=dtype) for _ in range(2))
    starts = [starts_of(queries), starts_of(keys)]
    got = flash_attn_varlen_func(q, k, v, *starts, 3000, 3100, **CAUSAL)
    assert_each_is_right([q, k, v], starts, got, (1, 50, *range(3, 119, 11)))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "prefixes and a window"])
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 64), ((12, 2), 128), ((8, 1), 80), ((8, 2), 256), ((4, 1), 512)])
def test_heads_share_works_of_few_queries(heads, size, name):
    torch.manual_seed(0)
    queries = [0, 1, 16, 17, 32, 33, 64, 65, 128, 5, *([3] * 80)]
    keys = [n + 100 * (b % 7) for b, n in enumerate(queries)]
    q = random(sum(queries), heads[0], size, dtype=torch.bfloat16)
    k, v = (random(sum(keys), heads[1], size, dtype=torch.bfloat16) for _ in range(2))
    starts, how = [starts_of(queries), starts_of(keys)], scores(1, heads[0])[name]
    out, lse = flash_attn_varlen_func(q, k, v, *starts, 128, 900, **how, return_lse=True)
    for b in (*range(10), 40, 89):
        rows, of_keys = part(starts[0], b), part(starts[1], b)
        assert_exact(out[rows], lse[:, rows], exact_attention(q[rows], k[of_keys], v[of_keys], **how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("page", [1, 16])
def test_a_chunk_beside_decoding_sequences_over_pages(page, dtype):
    torch.manual_seed(0)
    queries, keys = [1 + b % 3 for b in range(40)], [300 + 100 * b for b in range(40)]
    queries[7], keys[7] = 400, 2000
    q = random(sum(queries), 16, 128, dtype=dtype)
    k, v = (random(sum(keys), 4, 128, dtype=dtype) for _ in range(2))
    starts = [starts_of(queries), starts_of(keys)]
    columns = -(-max(keys) // page)
    table = torch.randperm(40 * columns).view(40, columns)
    integers = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    caches = [torch.full((40 * columns, page, 4, 128), 0x7F7F if dtype.itemsize == 2 else 0x7F) for _ in range(2)]
    caches = [x.to(integers).cuda() for x in caches]  # large numbers, or NaN
    for b, length in enumerate(keys):
        at = torch.arange(length)
        for cache, x in zip(caches, (k, v), strict=True):
            cache[table[b, at // page], at % page] = x[part(starts[1], b)].view(integers)
    paged = {"block_table": table.int().cuda(), "seqused_k": ints(keys), **CAUSAL}
    got = flash_attn_varlen_func(q, *(x.view(dtype) for x in caches), starts[0], None, 400, max(keys), **paged)
    assert_each_is_right([q, k, v], starts, got, (0, 1, 2, 7, 20, 39))


@pytest.mark.parametrize("first", [0, 7])
def test_rows_of_no_sequence_are_zero(first):
    """Before the first, behind the last, and past the most queries of a sequence, whose neighbours are empty."""
    torch.manual_seed(0)
    counts = [0, 0, 5, 0, 900, 0, 3, *([2] * 200), 0, 0]
    total = first + sum(counts) + 20
    q, k, v = (random(total, n, 64, dtype=torch.bfloat16) for n in (16, 8, 8))
    starts = starts_of(counts) + first
    torch.full((2**24,), math.nan, device="cuda")  # the allocator's memory is not zero
    out, lse = flash_attn_varlen_func(q, k, v, starts, starts, 700, 900, **CAUSAL)
    has_rows = torch.zeros(total, dtype=torch.bool, device="cuda")
    for b, count in enumerate(counts):
        has_rows[int(starts[b]) : int(starts[b]) + min(count, 700)] = True
    assert bool((out[has_rows] != 0).any(-1).all())
    assert not out[~has_rows].any()
    assert bool((lse[:, ~has_rows] == -math.inf).all())
    assert bool(lse[:, has_rows].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_replayed_graph_lists_other_lengths(dtype):
    def call(q, k, v, starts_q, starts_k):
        return flash_attn_varlen_func(q, k, v, starts_q, starts_k, 2000, 3000, **CAUSAL)

    def inputs(seed, long):
        torch.manual_seed(seed)
        queries = torch.randint(0, 20, (100,))
        queries[long] = 1500
        queries[99 - long] += 2700 - queries.sum()
        keys = torch.randint(0, 90, (100,)) + queries
        keys[3 * long % 100] += 9000 - keys.sum()
        tensors = (random(n, heads, 128, dtype=dtype) for n, heads in ((2700, 16), (9000, 4), (9000, 4)))
        return [*tensors, starts_of(queries), starts_of(keys)]

    fresh = inputs(2, 80)
    got = graph_replay(call, inputs(1, 3), fresh)
    assert same_bits(tuple(got), tuple(call(*fresh)))


@pytest.mark.parametrize("size", [64, 128])
def test_sections_of_heads_have_works_of_their_own(size):
    """A table so wide that the keys of all heads do not fit into L2 together."""
    torch.manual_seed(0)
    lengths = [1500 if b == 31 else 1 + b % 17 for b in range(64)]
    q, k, v = (random(sum(lengths), heads, size, dtype=torch.bfloat16) for heads in (16, 8, 8))
    starts = starts_of(lengths)
    want = flash_attn_varlen_func(q, k, v, starts, starts, 1500, 1500, **CAUSAL)
    table = torch.full((64, 20000), -1, dtype=torch.int32)
    order = torch.randperm(64 * 94).int()
    caches = [torch.full((64 * 94, 16, 8, size), math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for b, length in enumerate(lengths):
        table[b, :94] = order[94 * b : 94 * b + 94]
        at = torch.arange(length)
        slots = table[b][at // 16].long(), at % 16
        for cache, x in zip(caches, (k, v), strict=True):
            cache[slots] = x[part(starts, b)]
    given = {"block_table": table.cuda(), "seqused_k": ints(lengths), **CAUSAL}
    assert same_bits(flash_attn_varlen_func(q, *caches, starts, None, 1500, 320000, **given), want)


@pytest.mark.parametrize("pack_shift", [0, 2])
@pytest.mark.parametrize("split_limit", [0, 1])
@pytest.mark.parametrize("sections", [1, 3])
@pytest.mark.parametrize("batch", [1, 33, 3000])
def test_a_list_holds_every_work_once(batch, sections, split_limit, pack_shift):
    torch.manual_seed(0)
    queries, keys = torch.randint(0, 700, (batch,)), torch.randint(0, 5000, (batch,))
    queries[torch.rand(batch) < 0.3] = 0
    keys[batch // 2] = 100_000
    heads, tile, most = 6, 128, 600
    scalars = PrefillWorksScalars(
        total_queries=int(queries.sum()) - 1,
        max_queries=most,
        max_keys=10**6,
        key_starts=1,
        has_lengths=0,
        heads=heads,
        sections=sections,
        split_limit=split_limit,
        block_rows=192,
        key_tile=tile,
        listed_works=40 * batch * sections + 10,
        pack_shift=pack_shift,
        listed_blocks=6 * batch,
    )
    starts_q, starts_k, unread = starts_of(queries), starts_of(keys), ints([0])
    works = torch.full((FIRST_WORK + 2 * (scalars.listed_works + scalars.listed_blocks),), 12345, device="cuda").int()
    prefill._binary.kernel(NAMED["prefill_works"], works.device)(starts_q, starts_k, unread, works, *scalars, batch)
    wanted, blocks, tiles_of, packed = set(), set(), [], set()
    for b in range(batch):
        count = min(int(queries[b]), most, scalars.total_queries - int(starts_q[b]))
        limit = split_limit or min(max(132 // (heads * -(-max(count, 1) // 128)), 1), 16)
        tiles = -(-max(int(keys[b]), 1) // tile)
        splits = min(-(-tiles // 4), limit) if count > 0 else 1
        rows = 192 if limit == 1 else 128
        if pack_shift and count <= 128 >> pack_shift:
            packed.add(b)
        around = b in (0, batch - 1) or int(queries[b]) > 0
        row_blocks = -(-count // rows) if count > 0 else int(around)
        tiles_of.append(-(-tiles // splits))
        wanted |= {(b, s, r, p) for s in range(sections) for r in range(row_blocks) for p in range(splits)}
        blocks |= {(b, r) for r in range(row_blocks) if splits > 1}
    found = works.tolist()
    assert found[0] == 0
    assert found[WORK_COUNT] == len(wanted)
    assert found[SPLIT_BLOCK_COUNT] == len(blocks)
    pairs = [found[FIRST_WORK + 2 * i : FIRST_WORK + 2 * i + 2] for i in range(len(wanted))]
    listed = [(a & 0xFFFF, a >> 16, c & 0xFFFFFF, c >> 24) for a, c in pairs]
    assert set(listed) == wanted
    first = FIRST_WORK + 2 * scalars.listed_works
    assert {tuple(found[first + 2 * i : first + 2 * i + 2]) for i in range(len(blocks))} == blocks
    kinds = [[b for b, *_ in listed[: found[FIRST_COUNT]]], [b for b, *_ in listed[found[FIRST_COUNT] :]]]
    assert found[FIRST_SHIFT] in (0, pack_shift)
    for of_kind, is_packed in zip(kinds, (found[FIRST_SHIFT] > 0, found[FIRST_SHIFT] < pack_shift), strict=True):
        assert all((b in packed) == is_packed for b in of_kind)
        bounds = [tiles_of[b] for b in of_kind]
        assert all(later < 2 * earlier for earlier, later in itertools.pairwise(bounds)), "longest first"


LARGEST = 2**31 - 1
INVALID = {
    "overlapping": [0, 3000] * 25,
    "descending": list(range(3000, 0, -60)),
    "negative": [-7, 100] * 25,
    "beyond the rows": [10**6 * i for i in range(50)],
    "the ends of int32": [0, LARGEST, -LARGEST - 1, 5, LARGEST] * 10,
}


@pytest.mark.parametrize("which", ["queries", "keys", "both"])
@pytest.mark.parametrize("heads", [(4, 2), (72, 9)], ids=str)
@pytest.mark.parametrize("name", INVALID)
def test_invalid_starts_write_nothing_outside_the_results(name, heads, which):
    """Nobody reads them on the host: results are arbitrary, but memory around them stays as it is."""
    torch.manual_seed(0)
    valid, invalid, total = ints([0, *range(60, 3000, 60)]), ints(INVALID[name]), 3000
    q = random(total, heads[0], 64, dtype=torch.bfloat16)
    k, v = (random(total, heads[1], 64, dtype=torch.bfloat16) for _ in range(2))
    around = torch.full((total + 64, heads[0], 64), 7.0, dtype=torch.bfloat16, device="cuda")
    starts = [invalid if which in (kind, "both") else valid[: len(invalid)] for kind in ("queries", "keys")]
    out = flash_attn_varlen_func(q, k, v, *starts, 2500, 3000, causal=True, out=around[32:-32])
    torch.cuda.synchronize()
    assert out.data_ptr() == around[32:].data_ptr()
    assert bool((around[:32] == 7).all())
    assert bool((around[-32:] == 7).all())


@pytest.mark.parametrize("batch", [50, 3000])
@pytest.mark.parametrize("name", INVALID)
def test_invalid_starts_write_nothing_outside_the_list(name, batch):
    starts = ints((INVALID[name] * (batch // 50 + 1))[: batch + 1])
    scalars = PrefillWorksScalars(
        total_queries=2**30,
        max_queries=2**30,
        max_keys=10**6,
        key_starts=1,
        has_lengths=0,
        heads=2,
        sections=1,
        split_limit=0,
        block_rows=128,
        key_tile=128,
        listed_works=100,
        pack_shift=1,
        listed_blocks=10,
    )
    words = FIRST_WORK + 2 * (scalars.listed_works + scalars.listed_blocks)
    around = torch.full((words + 2048,), 12345, device="cuda").int()
    works = around[1024:-1024]
    prefill._binary.kernel(NAMED["prefill_works"], works.device)(starts, starts, ints([0]), works, *scalars, batch)
    assert bool((around[:1024] == 12345).all())
    assert bool((around[-1024:] == 12345).all())
    assert 0 <= int(works[SPLIT_BLOCK_COUNT]) <= scalars.listed_blocks
    assert 0 <= int(works[FIRST_COUNT]) <= scalars.listed_works
    assert 0 <= int(works[WORK_COUNT]) <= scalars.listed_works
