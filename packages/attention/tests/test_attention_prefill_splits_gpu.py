"""Split-KV of packed calls on Hopper: few queries over many keys, against float64 and against other batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_oracle import same_bits
from prefill_oracle import assert_exact, exact_attention, fp8_attention, of_sequence

from kestrel_attention import flash_attn_func, flash_attn_varlen_func
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

E4M3 = torch.float8_e4m3fn
QUERIES = [40, 1, 0, 128, 200, 129, 700, 5]
KEYS = [5000, 300, 40, 2100, 3000, 9000, 2000, 0]
MOST = max(QUERIES), max(KEYS)
SCORES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "negative scale": {"causal": True, "softmax_scale": -0.2},
    "window": {"causal": True, "window_size": (1500, -1)},
    "window behind": {"window_size": (-1, 20)},
    "prefixes and a window": {"window_size": (900, 3), "prefix_len": [0, 200, 7, 1800, 10**6, 1, 64, 65]},
    "soft cap": {"causal": True, "softcap": 5.0, "softmax_scale": 1.0},
    "sinks": {"causal": True, "sinks": [3.0, -1.0, 0.5, 6.0]},
}


@pytest.fixture(autouse=True)
def only_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no other kernel splits keys")


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def starts_of(lengths: list[int]) -> torch.Tensor:
    return ints([0, *torch.tensor(lengths).cumsum(0).tolist()])


def shaped(name: str) -> dict[str, Any]:
    how = dict(SCORES[name])
    if "prefix_len" in how:
        how["prefix_len"] = ints(how["prefix_len"])
    if "sinks" in how:
        how["sinks"] = torch.tensor(how["sinks"], device="cuda")
    return how


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def packed(dtype: torch.dtype, size: int, heads: int = 4, queries: list[int] = QUERIES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q = random(sum(queries), heads, size, dtype=dtype)
    k, v = (random(sum(KEYS), 2, size, dtype=dtype) for _ in range(2))
    return [q, k, v, starts_of(queries), starts_of(KEYS)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: dict[str, Any]) -> Any:
    if q.dtype == E4M3:
        return fp8_attention(q.float(), k.float(), v.float(), rounded=q.shape[2] > 64, **how)
    return exact_attention(q, k, v, **how)


def part(starts: torch.Tensor, b: int) -> slice:
    return slice(int(starts[b]), int(starts[b + 1]))


def paged(x: torch.Tensor, starts: torch.Tensor, page: int, table: torch.Tensor) -> torch.Tensor:
    """A cache of the rows of x, whose other slots are NaN."""
    codes = {1: torch.uint8, 2: torch.int16}[x.element_size()]
    nan = torch.full((), math.nan, device="cuda").to(x.dtype).view(codes)
    cache = nan.repeat(int(table.max()) + 1, page, *x.shape[1:])
    for b in range(len(starts) - 1):
        rows = part(starts, b)
        at = torch.arange(rows.stop - rows.start, device="cuda")
        cache[table[b].long()[at // page], at % page] = x[rows].view(codes)
    return cache.view(x.dtype)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 512), (E4M3, 64), (E4M3, 128)],
    ids=str,
)
def test_few_queries_over_many_keys_are_those_of_float64_whatever_the_batch(dtype, size, name):
    q, k, v, starts_q, starts_k = packed(dtype, size)
    how = shaped(name)
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, *MOST, **how, return_lse=True)
    for b in range(len(QUERIES)):
        rows, keys = part(starts_q, b), part(starts_k, b)
        assert_exact(out[rows], lse[:, rows], exact(q[rows], k[keys], v[keys], of_sequence(how, b)))
        if not QUERIES[b] or not KEYS[b]:  # refused alone
            continue
        alone = how | {"prefix_len": how["prefix_len"][b : b + 1]} if "prefix_len" in how else how
        given = q[rows].clone(), k[keys].clone(), v[keys].clone(), ints([0, QUERIES[b]]), ints([0, KEYS[b]])
        got = flash_attn_varlen_func(*given, QUERIES[b], 10**6, **alone, return_lse=True)
        assert same_bits(got, (out[rows], lse[:, rows].contiguous())), QUERIES[b]


@pytest.mark.parametrize("page", [1, 7, 16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_pages_give_the_bits_of_packed_keys(dtype, size, page):
    q, k, v, starts_q, starts_k = packed(dtype, size)
    how = {"causal": True, "return_lse": True}
    want = flash_attn_varlen_func(q, k, v, starts_q, starts_k, *MOST, **how)
    columns = -(-max(KEYS) // page) + 1
    table = torch.randperm(len(KEYS) * columns, device="cuda").view(len(KEYS), columns)
    caches = [paged(x, starts_k, page, table) for x in (k, v)]
    given = {"block_table": table.int(), "seqused_k": ints(KEYS), **how}
    assert same_bits(flash_attn_varlen_func(q, *caches, starts_q, None, *MOST, **given), want)


@pytest.mark.parametrize("queries", [17, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_packed_sequences_have_the_bits_of_a_dense_batch(dtype, queries):
    torch.manual_seed(0)
    q, k, v = (random(3, count, heads, 128, dtype=dtype) for count, heads in ((queries, 4), (5000, 2), (5000, 2)))
    how = {"causal": True, "return_lse": True}
    want, want_lse = flash_attn_func(q, k, v, **how)
    starts = starts_of([queries] * 3), starts_of([5000] * 3)
    out, lse = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *starts, queries, 5000, **how)
    assert same_bits(out, want.flatten(0, 1))
    assert same_bits(lse, want_lse.transpose(0, 1).flatten(1).contiguous())


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_no_sequence_and_past_the_bounds_are_zero(batch):
    torch.manual_seed(0)
    q, k, v = (random(count, heads, 128, dtype=E4M3) for count, heads in ((400, 2), (6000, 1), (6000, 1)))
    starts_q, starts_k = ints([10, 100, 100, 380][-batch - 1 :]), ints([0, 5000, 5000, 6000][-batch - 1 :])
    torch.full((2**24,), math.nan, device="cuda")  # the allocator's memory is not zero
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 200, 5000, return_lse=True, causal=True)
    for rows in (slice(0, int(starts_q[0])), slice(300, 400)):
        assert not out[rows].any()
        assert bool((lse[:, rows] == -math.inf).all())
    assert bool(out[100:300].any(-1).all())
    assert bool(torch.isfinite(out.float()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_long_calls_split_their_short_sequences(dtype):
    """Blocks of 192 rows (d64) have 128 rows of sequences with splits; a counter hands out works."""
    torch.manual_seed(0)
    queries, keys = [4000, 60, 3000, 250, 1, 2500], [4000, 6000, 3000, 4000, 5000, 2600]
    q, k, v = (random(sum(counts), heads, 64, dtype=dtype) for counts, heads in ((queries, 32), (keys, 8), (keys, 8)))
    starts_q, starts_k = starts_of(queries), starts_of(keys)
    how = {"causal": True, "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, starts_q, starts_k, max(queries), max(keys), **how)
    again = flash_attn_varlen_func(q, k, v, starts_q, starts_k, max(queries), max(keys), **how)
    assert same_bits(again, (out, lse))
    for b, count in enumerate(queries):
        rows, of_keys = part(starts_q, b), part(starts_k, b)
        given = q[rows].clone(), k[of_keys].clone(), v[of_keys].clone(), ints([0, count]), ints([0, keys[b]])
        got = flash_attn_varlen_func(*given, count, keys[b], **how)
        assert same_bits(got, (out[rows], lse[:, rows].contiguous())), count
        if count < 1000:
            exact_b = exact(q[rows], k[of_keys], v[of_keys], {"causal": True})
            assert_exact(out[rows], lse[:, rows], exact_b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_replayed_graph_splits_other_lengths(dtype):
    def call(q, k, v, starts_q, starts_k):
        return flash_attn_varlen_func(q, k, v, starts_q, starts_k, 260, 6000, causal=True, return_lse=True)

    def inputs(seed, queries, keys):
        torch.manual_seed(seed)
        sizes = ((260, 4), (9000, 2), (9000, 2))
        return [
            *(random(count, heads, 128, dtype=dtype) for count, heads in sizes),
            starts_of(queries),
            starts_of(keys),
        ]

    args, fresh = inputs(1, [128, 2, 130], [100, 3000, 5900]), inputs(2, [3, 250, 7], [6000, 2900, 64])
    got = graph_replay(call, args, fresh)
    assert same_bits(tuple(got), tuple(call(*fresh)))
