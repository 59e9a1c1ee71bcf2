"""The decode kernels against attention in float64, and what every kernel promises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kestrel_attention import flash_attn_with_kvcache, merge_attention_states, tau_tail
from kestrel_runtime import backend
from kestrel_runtime.testing import canary, graph_replay

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
LENGTHS = (0, 1, 54, 300, -1, 1000, 17)
NOBODY = (2**31 - 1, -7, 10**6)  # what entries of the block table hold that nobody may follow


@pytest.fixture(autouse=True)
def kernels_only() -> Iterator[None]:
    with backend("kernel"):
        yield


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@dataclass
class Call:
    """Sequences scattered over a cache in which everything that no sequence holds is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def run(self, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"cache_seqlens": self.lengths, "block_table": self.table, "return_lse": True}
        return flash_attn_with_kvcache(self.q, self.k_cache, self.v_cache, **given, **how)

    def alone(self, b: int, extra_columns: int = 5) -> Call:
        """Sequence b as a batch of its own, with a wider table."""
        table = torch.full((1, self.table.shape[1] + extra_columns), NOBODY[0], dtype=torch.int32, device="cuda")
        table[:, : self.table.shape[1]] = self.table[b]
        caches = self.k_cache, self.v_cache
        return Call(self.q[b : b + 1], *caches, table, self.lengths[b : b + 1], [self.keys[b]], [self.values[b]])


def made(
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    lengths: tuple[int, ...] = LENGTHS,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    storage: torch.dtype | None = None,
    seed: int = 0,
) -> Call:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    storage = storage or dtype
    batch, columns = len(lengths), max(1, *(-(-length // page) + 1 for length in lengths))
    blocks = batch * columns + 3
    k_cache, v_cache = (random(blocks, page, kv_heads, size).to(storage) for _ in range(2))
    table = torch.randperm(blocks, generator=generator, device="cuda")[: batch * columns].view(batch, columns).int()
    used = torch.zeros(blocks, page, dtype=torch.bool, device="cuda")
    keys, values = [], []
    for b, length in enumerate(lengths):
        position = torch.arange(max(length, 0), device="cuda")
        block, offset = table[b, position // page].long(), position % page
        used[block, offset] = True
        keys.append(bits(k_cache)[block, offset].view(storage))
        values.append(bits(v_cache)[block, offset].view(storage))
        unused = torch.arange(columns, device="cuda") >= -(-max(length, 0) // page)
        table[b, unused] = torch.tensor(NOBODY, dtype=torch.int32, device="cuda")[torch.nonzero(unused)[:, 0] % 3]
    nan = bits(torch.full((1,), float("nan"), device="cuda").to(storage))
    for cache in (k_cache, v_cache):
        bits(cache)[~used] = nan
    return Call(
        random(batch, queries, heads, size),
        k_cache,
        v_cache,
        table,
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        keys,
        values,
    )


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: dict[str, Any], prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Sq, H, D], k and v [L, Hk, D] in float64 -> out [Sq, H, D], lse [H, Sq]."""
    queries, heads, size = q.shape
    length, kv_heads = k.shape[:2]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * how.get("softmax_scale", size**-0.5)
    softcap = how.get("softcap", 0.0)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    position = length - queries + torch.arange(queries, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    left, right = (min(end, 2**40) for end in how.get("window_size", (-1, -1)))  # sums below fit in 64 bits
    right = 0 if how.get("causal", False) else right
    visible = torch.ones(queries, length, dtype=torch.bool, device=q.device)
    visible &= (key <= position + right) | (right < 0)
    visible &= (key >= position - left) | (left < 0)
    scores = scores.masked_fill(~(visible | (key < prefix)), -math.inf)
    lse = scores.logsumexp(-1) if length else q.new_full((heads, queries), -math.inf, dtype=torch.float64)
    weights = (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def check(call: Call, k_scale: Any = 1.0, v_scale: Any = 1.0, **how: Any) -> None:
    """Half a unit of the one rounding, and float32 arithmetic with 16-bit weights split in two.

    The soft cap is softcap * (1 - 2 / (1 + exp(2 x))): an approximate exponential, a division and a difference of
    numbers near 1, in all some 2**-21 of softcap however small the score is. It goes into the LSE as it stands.
    """
    before = call.k_cache.clone(), call.v_cache.clone()
    out, lse = call.run(**how)
    assert same(before, (call.k_cache, call.v_cache))
    assert same((out, lse), call.run(**how)), "two runs differ"
    prefix = how.get("prefix_len", 0)
    for b in range(len(call.keys)):
        k, v = call.keys[b].double() * k_scale, call.values[b].double() * v_scale
        mine = int(prefix[b]) if isinstance(prefix, torch.Tensor) else prefix
        exact_out, exact_lse = exact(call.q[b], k, v, how, mine)
        largest = float(v.abs().max()) if v.numel() else 0.0
        error = (out[b].double() - exact_out).abs()
        bound = 0.5 * torch.finfo(out.dtype).eps * exact_out.abs() + 2**-15 * largest
        assert bool((error <= bound).all()), f"sequence {b}: off by up to {error.max():.3e}"
        empty = exact_lse.isinf()
        assert torch.equal(lse[b].isinf(), empty)
        error = (lse[b].double() - exact_lse)[~empty].abs()
        bound = 2e-6 * (1 + exact_lse[~empty].abs()) + how.get("softcap", 0.0) * 2**-21
        assert bool((error <= bound).all()), f"sequence {b}: LSE off by up to {error.max():.3e}"


@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [1, 8, 16, 24, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (32, 32, 64), (8, 2, 128), (20, 1, 128)])
def test_decoding_over_pages(heads, kv_heads, size, page, dtype, storage):
    check(made(heads, kv_heads, size, page, dtype=dtype, storage=storage))


@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("size", [16, 48, 72, 80, 96, 112, 136, 160, 192, 240, 256, 512])
def test_head_sizes(size, queries, storage):
    if storage is FP8 and size % 16:
        pytest.skip("rows that are no multiple of 16 bytes run by reference")
    check(made(16, 2, size, 16, (0, 1, 54, 300, 2000), queries, storage=storage), causal=True)


@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"window_size": (0, 0)},
        {"window_size": (7, 2)},
        {"window_size": (100, -1), "causal": True},
        {"window_size": (-1, 3)},
        {"window_size": (2**63 - 1, 2**63 - 1)},
        {"causal": True, "softcap": 2.0},
        {"softmax_scale": -0.5, "softcap": 30.0},
        {"causal": True, "prefix_len": 20},
        {"window_size": (5, 0), "prefix_len": 33},
    ],
)
def test_what_shapes_the_scores(how, queries, storage):
    check(made(8, 2, 64, 8, queries=queries, storage=storage), **how)


def test_a_prefix_for_each_sequence():
    prefix = torch.tensor([0, 3, 10, 500, 1, 7, 0], dtype=torch.int32, device="cuda")
    check(made(8, 2, 64, 8, queries=4), causal=True, window_size=(2, 0), prefix_len=prefix)


@pytest.mark.parametrize(("k_heads", "v_heads"), [(1, 1), (2, 2), (1, 2)])
def test_fp8_scales(k_heads, v_heads):
    k_scale, v_scale = (torch.rand(heads, device="cuda") + 0.5 for heads in (k_heads, v_heads))
    call = made(8, 2, 128, 16, storage=FP8)
    check_scaled = {"k_scale": k_scale, "v_scale": v_scale}
    out, lse = call.run(**check_scaled)
    for b, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        want, want_lse = exact(call.q[b], k.double() * k_scale[:, None], v.double() * v_scale[:, None], {}, 0)
        torch.testing.assert_close(out[b].double(), want, rtol=2**-8, atol=2e-4)
        torch.testing.assert_close(lse[b].double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64, 2**40])
@pytest.mark.parametrize("storage", [None, FP8])
def test_any_number_of_splits(splits, storage):
    check(made(8, 2, 64, 16, (0, 1, 54, 300, -1, 5000, 17), storage=storage), num_splits=splits)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "storage"), [(32, 4, 128, FP8), (16, 2, 512, None)])
def test_long_sequences(heads, kv_heads, size, storage):
    check(made(heads, kv_heads, size, 16, (20000, 3, 9000), storage=storage))


@pytest.mark.parametrize(("size", "storage"), [(80, FP8), (80, None), (192, None)])
def test_what_lies_behind_a_row_of_the_cache_has_no_effect(size, storage):
    """Rows of 256 bytes, or 512, of which a head takes a part; NaN behind it."""
    call = made(8, 2, size, 16, storage=storage)
    for name in ("k_cache", "v_cache"):
        cache = getattr(call, name)
        wide = torch.full((*cache.shape[:3], 256), float("nan"), device="cuda").to(cache.dtype)
        bits(wide)[..., :size] = bits(cache)
        setattr(call, name, wide[..., :size])
    check(call, causal=True)


def test_infinite_keys_that_a_query_does_not_like_get_no_weight():
    call = made(8, 2, 80, 16, (40,))
    call.q[..., 3] = 1.0
    call.k_cache[call.table[0, 1], 4, :, 3] = -math.inf
    call.keys[0][20, :, 3] = -math.inf
    check(call)


def test_a_length_past_the_table_under_a_window():
    call = made(8, 2, 64, 16, (300, 32))
    want = call.run(window_size=(3, 0))
    call.lengths[1] = 2**31 - 1
    got = call.run(window_size=(3, 0))
    assert same((got[0][:1], got[1][:1]), (want[0][:1], want[1][:1]))
    assert bool((got[0][1] == 0).all())
    assert bool((got[1][1] == -math.inf).all())


@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128), (8, 2, 512)])
def test_a_sequence_does_not_depend_on_the_room_of_its_table(heads, kv_heads, size, storage):
    call = made(heads, kv_heads, size, 16, (40000, 1, 700, 2100, 4096), storage=storage)
    out, lse = call.run()
    for b in range(1, len(call.keys)):
        alone = call.alone(b)
        alone.table = alone.table[:, : len(call.keys[b]) // 16 + 1]
        assert same(alone.run(), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rise", [7, 9])
@pytest.mark.parametrize(
    ("dtype", "storage", "step"), [(torch.bfloat16, None, 64), (torch.float16, None, 64), (torch.bfloat16, FP8, 128)]
)
def test_scores_that_rise_along_the_sequence(dtype, storage, step, rise, masked):
    """By less and by more, from step to step, than weights may grow before sums are brought to another base (SLACK).

    masked: the first steps of all warps but one show them no key.
    """
    call = made(8, 2, 64, 16, (6 * step, 3 * step), dtype=dtype, storage=storage)
    call.q[..., :32] = 0.25  # a score is about the mean of so many dims
    call.q[..., 32:] /= 64
    for b, k in enumerate(call.keys):
        position = torch.arange(len(k), device="cuda")
        ramp = (position - len(k) / 2) * (rise * math.log(2) / step)
        k = k.float()
        k[..., :32] += ramp[:, None, None]
        call.keys[b] = k.to(call.k_cache.dtype)
        bits(call.k_cache)[call.table[b, position // 16].long(), position % 16] = bits(call.keys[b])
    check(call, num_splits=1, **({"window_size": (300, 0), "prefix_len": 1} if masked else {}))


def test_bf16_queries_of_any_magnitude_over_fp8():
    call = made(8, 8, 64, 1, storage=FP8)
    call.q *= 10.0 ** torch.arange(-8, 8, 2, device="cuda")[:, None]  # the last past what f16 holds
    check(call, softmax_scale=1e-7)


def test_nan_in_a_query_or_key_stays_with_its_rows():
    call = made(8, 2, 64, 16)
    want = call.run()
    call.q[2, 0, 1] = float("nan")
    call.k_cache[call.table[3, 0], 0, 1] = float("nan")
    got = call.run()
    touched = torch.zeros(len(LENGTHS), 1, 8, dtype=torch.bool, device="cuda")
    touched[2, 0, 1] = touched[3, 0, 4:] = True
    assert bool(got[0][touched].isnan().all())
    assert torch.equal(got[0][~touched], want[0][~touched])


def test_a_cache_without_a_table():
    generator = torch.Generator("cuda").manual_seed(0)
    k_cache, v_cache, q = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16()
        for shape in ((3, 200, 2, 64), (3, 200, 2, 64), (3, 1, 8, 64))
    )
    lengths = torch.tensor([200, 77, 0], dtype=torch.int32, device="cuda")
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_lse=True)
    table = torch.arange(3, dtype=torch.int32, device="cuda")[:, None]
    given = {"cache_seqlens": lengths, "block_table": table, "return_lse": True}
    assert same((out, lse), flash_attn_with_kvcache(q, k_cache, v_cache, **given))


@pytest.mark.parametrize("layout", ["HND", "halves", "layers"])
def test_layouts(layout):
    call = made(8, 2, 64, 16)
    want = call.run()
    blocks, page, kv_heads, size = call.k_cache.shape
    if layout == "HND":
        call.k_cache = call.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "halves":
        both = torch.cat((call.k_cache, call.v_cache), dim=-1)
        call.k_cache, call.v_cache = both[..., :size], both[..., size:]
    else:
        both = torch.zeros(blocks, 3, page, kv_heads, size, dtype=torch.bfloat16, device="cuda")
        both[:, 1] = call.k_cache
        call.k_cache = both[:, 1]
    assert same(call.run(), want)


@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128)])
def test_a_sequence_does_not_depend_on_its_batch(heads, kv_heads, size, storage):
    call = made(heads, kv_heads, size, 16, (5000, 1, 700, 2100, 0), storage=storage)
    out, lse = call.run()
    for b in range(len(call.keys)):
        assert same(call.alone(b).run(), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("storage", [None, FP8])
def test_a_block_of_all_chunks_of_a_sequence_gives_the_bits_of_a_block_each(storage):
    """Three sequences of 32 heads take 96 blocks, which join their chunks; one alone takes a block for each chunk."""
    call = made(32, 32, 64, 16, (740, 1000, 130), storage=storage)
    check(call)
    out, lse = call.run()
    for b in range(len(call.keys)):
        assert same(call.alone(b).run(), (out[b : b + 1], lse[b : b + 1]))


def test_decoding_one_by_one_is_the_chunk_row_by_row():
    """Three queries at once see what each sees when the keys behind it are not there yet."""
    chunk = made(8, 2, 64, 16, (54, 300, 1000), queries=3)
    out, lse = chunk.run(causal=True)
    for i in range(3):
        one = Call(chunk.q[:, i : i + 1], chunk.k_cache, chunk.v_cache, chunk.table, chunk.lengths - 2 + i, [], [])
        got, got_lse = one.run(causal=True)
        torch.testing.assert_close(got[:, 0], out[:, i], rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(got_lse[..., 0], lse[..., i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", [torch.bfloat16, FP8])
@pytest.mark.parametrize("page", [1, 16, 24])
def test_appending_writes_what_the_reference_writes_and_nothing_else(page, storage):
    generator = torch.Generator("cuda").manual_seed(page)
    columns = -(-60 // page)
    shape = (4 * columns + 2, page, 2, 64)
    table = torch.randperm(shape[0], generator=generator, device="cuda")[: 4 * columns].view(4, columns).int()
    table[3, -1] = -1
    lengths = torch.tensor([0, columns * page - 2, -1, columns * page - 3], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn((4, 3, heads, 64), generator=generator, device="cuda").bfloat16() * 3 for heads in (8, 2, 2))
    k[0, 0, 0, :4] = torch.tensor([float("inf"), -float("inf"), 1e5, -1e-9])
    scales = {"k_scale": torch.full((1,), 0.7, device="cuda"), "v_scale": torch.tensor([0.3, 1.9], device="cuda")}
    scales = scales if storage is FP8 else {}
    source = [torch.randn(shape, generator=generator, device="cuda").bfloat16().to(storage) for _ in range(2)]
    guarded = [canary(shape, torch.uint8 if storage is FP8 else storage, "cuda") for _ in range(2)]
    caches = [cache.view(storage) for cache, _ in guarded]
    wanted = [cache.clone() for cache in source]
    for cache, original in zip(caches, source, strict=True):
        bits(cache).copy_(bits(original))
    given = {"cache_seqlens": lengths, "block_table": table, "causal": True, "return_lse": True, **scales}
    got = flash_attn_with_kvcache(q, *caches, k, v, **given)
    with backend("reference"):
        want = flash_attn_with_kvcache(q, *wanted, k, v, **given)
    assert same(tuple(caches), tuple(wanted))
    for _, assert_intact in guarded:
        assert_intact()
    finite = [1, 2, 3]
    torch.testing.assert_close(got[0][finite], want[0][finite], rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(got[1][finite], want[1][finite], rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize("splits", [0, 4])
def test_a_replayed_graph_sees_new_contents(splits, storage):
    def given(seed: int) -> list[torch.Tensor]:
        lengths = LENGTHS if seed == 1 else tuple(reversed(LENGTHS))
        call = made(8, 2, 64, 16, lengths, storage=storage, seed=seed)
        return [call.q, call.k_cache, call.v_cache, call.lengths, call.table]

    def decode(q, k_cache, v_cache, lengths, table):
        how = {"cache_seqlens": lengths, "block_table": table, "num_splits": splits, "return_lse": True}
        return flash_attn_with_kvcache(q, k_cache, v_cache, **how)

    fresh = given(2)
    assert same(graph_replay(decode, given(1), fresh), decode(*fresh))


def test_compiled_without_a_graph_break():
    call = made(8, 2, 64, 16)

    def decode(q, k_cache, v_cache, lengths, table):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, return_lse=True
        )

    inputs = call.q, call.k_cache, call.v_cache, call.lengths, call.table
    with backend("auto"):
        got = torch.compile(decode, fullgraph=True)(*inputs)
    assert same(got, decode(*inputs))


def test_runs_on_the_current_stream():
    call, stream = made(8, 2, 128, 16, (3000, 20)), torch.cuda.Stream()
    want = call.run(num_splits=4)
    scratch, q = torch.zeros(1 << 28, device="cuda"), call.q
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        call.q = torch.zeros_like(q).copy_(q)
        got = call.run(num_splits=4)
    stream.synchronize()
    assert same(got, want)


@pytest.mark.parametrize("storage", [torch.bfloat16, FP8])
def test_a_block_far_past_two_to_the_31_elements(storage):
    shape, strides = (2, 16, 2, 64), (5 * 2**30, 2 * 64, 64, 1)
    base = torch.zeros(5 * 2**30 + 16 * 2 * 64, dtype=torch.uint8 if storage is FP8 else storage, device="cuda")
    far = base.as_strided(shape, strides).view(storage)
    near = torch.randn(shape, device="cuda").to(storage)
    bits(far).copy_(bits(near))
    q = torch.randn(1, 1, 8, 64, device="cuda").bfloat16()
    table = torch.tensor([[1, 0]], dtype=torch.int32, device="cuda")
    given = {"cache_seqlens": torch.full((1,), 20, dtype=torch.int32, device="cuda"), "block_table": table}
    given["return_lse"] = True
    assert same(flash_attn_with_kvcache(q, far, far, **given), flash_attn_with_kvcache(q, near, near, **given))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "lengths", "table", "k_scale", "v_scale"])
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(name):
    """1000 times in one graph: merging with an empty part copies the input's bits, and decoding follows at once."""
    contents = 5
    storage = FP8 if name.endswith("scale") else torch.bfloat16
    calls = [made(8, 2, 64, 16, (40, 333, 17 + seed, 90), storage=storage, seed=seed) for seed in range(contents)]
    scales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(contents)]
    for call in calls:  # the tables of others lead to pages that its own sequences leave NaN
        found = (cache.float() for cache in (call.k_cache, call.v_cache))
        caches = [torch.where(x.isnan(), torch.randn_like(x), x).to(storage) for x in found]
        call.k_cache, call.v_cache = caches

    def inputs(i: int) -> dict[str, torch.Tensor]:
        call = calls[i]
        found = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "lengths": call.lengths}
        return found | {"table": call.table, "k_scale": scales[i][0], "v_scale": scales[i][1]}

    fixed = inputs(0)

    def copied(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            rows = x.reshape(-1, 1, 64)
            seen = torch.zeros(1, rows.shape[0], device="cuda")
            return merge_attention_states(rows, seen, rows, torch.full_like(seen, -math.inf))[0].view(x.shape)
        numbers = x.reshape(1, -1).view(torch.float32)
        rows = torch.zeros(numbers.shape[1], 1, 8, dtype=torch.bfloat16, device="cuda")
        merged = merge_attention_states(rows, numbers, rows, torch.full_like(numbers, -math.inf))[1]
        return merged.view(x.dtype).view(x.shape)

    def once(i: int) -> tuple[torch.Tensor, ...]:
        given = fixed | {name: copied(inputs(i)[name])}
        how = {"cache_seqlens": given["lengths"], "block_table": given["table"], "return_lse": True}
        if storage is FP8:
            how |= {"k_scale": given["k_scale"], "v_scale": given["v_scale"]}
        return flash_attn_with_kvcache(given["q"], given["k_cache"], given["v_cache"], **how)

    want = []
    for i in range(contents):
        source = inputs(i)[name]
        read = (source >= 0) & (source < len(calls[i].k_cache)) if name == "table" else torch.ones_like(source).bool()
        assert torch.equal(bits(copied(source))[read], bits(source)[read])
        want.append(once(i))
        torch.cuda.synchronize()
        assert all(bool(x.isfinite().all()) for x in want[i])
    assert not any(same(want[i], want[i - 1]) for i in range(contents))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [once(i % contents) for i in range(1000)]
    graph.replay()
    torch.cuda.synchronize()
    for i in range(contents):
        for mine in got[i::contents]:
            assert same(mine, want[i])


# -- around attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "columns"), [(32, 32, 64), (32, 32, 32), (8, 2, 10)])
def test_tau_tail_is_the_reference(heads, kv_heads, columns, dtype, integers, tokens):
    torch.manual_seed(tokens)
    width = (heads + 2 * kv_heads) * 64
    rows, assert_intact = canary((tokens, width + 64), dtype, "cuda")
    rows.copy_(torch.randn(tokens, width + 64))
    qkv = rows[:, :width]
    linear = torch.randn(tokens, heads + kv_heads, device="cuda").to(dtype)
    positions = torch.randint(-2, 70, (tokens,), device="cuda").to(integers)
    if integers is torch.int64:
        positions[:1] = 2**32 + 1
    for table in (torch.rand(64, columns, device="cuda"), torch.rand(64, columns, device="cuda").to(dtype)):
        want = qkv.clone()
        with backend("reference"):
            tau_tail(want, linear, table, positions, heads, 64)
        tau_tail(qkv, linear, table, positions, heads, 64)
        assert_intact()
        eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        torch.testing.assert_close(qkv, want, rtol=eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 4, 64), (1, 1, 8), (5, 3, 72), (300, 32, 128)])
def test_merging_is_the_reference(tokens, heads, size, dtype):
    torch.manual_seed(size)
    out_a, out_b = (torch.randn(tokens, heads, size, device="cuda").to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(heads, tokens, device="cuda") * 5 for _ in range(2))
    if tokens > 3:
        lse_a[0, 0] = lse_b[1, 1] = lse_a[2, 2] = lse_b[2, 2] = -math.inf
        out_a[0, 0] = float("nan")  # saw no key: not read
    got = merge_attention_states(out_a, lse_a, out_b, lse_b)
    with backend("reference"):
        want = merge_attention_states(out_a, lse_a, out_b, lse_b)
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    torch.testing.assert_close(got[0], want[0], rtol=eps, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=2e-6)
