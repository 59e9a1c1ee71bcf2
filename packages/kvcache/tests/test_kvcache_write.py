"""reshape_and_cache against a loop over tokens and a search for the nearest FP8 code."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kestrel_kvcache
from kestrel_kvcache import reference
from kestrel_runtime.testing import opcheck, poison

HEADS, SIZE = 3, 16
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def layouts(blocks: int, page: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Caches [blocks, page, HEADS, SIZE] of poison (NaN; no test writes it), in every layout."""

    def memory(*shape):
        return poison(shape, dtype)

    halves = memory(blocks, page, HEADS, 2 * SIZE)
    layers = memory(blocks, 5, 2, page, HEADS, SIZE)  # 5 layers, K and V of each beside one another
    return {
        "NHD": (memory(blocks, page, HEADS, SIZE), memory(blocks, page, HEADS, SIZE)),
        "HND": tuple(memory(blocks, HEADS, page, SIZE).transpose(1, 2) for _ in range(2)),
        "halves of the last dimension": halves.split(SIZE, dim=-1),
        "layers interleaved": (layers[:, 3, 0], layers[:, 3, 1]),
        "K and V by different strides": (
            memory(blocks, page, HEADS, SIZE),
            memory(blocks, HEADS, page, SIZE).transpose(1, 2),
        ),
    }


LAYOUTS = list(layouts(1, 1, torch.float32))


def nearest_code(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The FP8 code nearest to each float, ties to the even code, found by search among all finite codes."""
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    finite = codes[codes.isfinite()]  # ascending, the code is the index
    magnitude = x.double().abs().clamp(max=float(finite[-1]))
    above = torch.searchsorted(finite, magnitude).clamp(max=len(finite) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = finite[above] - magnitude, magnitude - finite[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(to_above < to_below, above, torch.where(to_below < to_above, below, even))
    return (code + 128 * x.signbit()).to(torch.uint8)


def written_by_loop(cache, slots, rows):
    """The cache after the writes, as a contiguous copy."""
    result = cache.clone(memory_format=torch.contiguous_format)
    page = cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.shape[0] * page:
            result[slot // page, slot % page] = rows[token]
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def distinct_slots(tokens: int, count: int, dtype=torch.int64) -> torch.Tensor:
    """Distinct slots with some padding and some past the end between them."""
    slots = torch.randperm(count)[:tokens]
    slots[1::5] = -1
    slots[3::7] = count + torch.arange(len(slots[3::7]))
    return slots.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "page"), [(1, 1), (3, 8), (16, 16), (0, 16), (257, 64), (740, 256)])
def test_rows_land_in_their_slots_and_nowhere_else(layout, dtype, tokens, page):
    torch.manual_seed(tokens)
    blocks = -(-2 * max(tokens, 1) // page)
    caches = layouts(blocks, page, dtype)[layout]
    slots = distinct_slots(tokens, blocks * page, torch.int32 if tokens % 2 else torch.int64)
    rows = [torch.randn(tokens, HEADS, SIZE).to(dtype) for _ in range(2)]
    wanted = [written_by_loop(cache, slots, new) for cache, new in zip(caches, rows, strict=True)]
    assert kestrel_kvcache.reshape_and_cache(*rows, *caches, slots) is None
    for cache, want in zip(caches, wanted, strict=True):
        assert same_bits(cache, want)


@pytest.mark.parametrize("layout", ["halves of the last dimension", "layers interleaved"])
def test_the_memory_between_the_strides_stays_as_it_was(layout):
    key_cache, value_cache = layouts(4, 8, torch.float32)[layout]
    whole = key_cache._base
    before = whole.view(torch.int32).clone()
    rows = torch.randn(5, HEADS, SIZE)
    kestrel_kvcache.reshape_and_cache(rows, rows, key_cache, value_cache, torch.arange(5))
    changed = int((whole.view(torch.int32) != before).sum())
    assert changed == 2 * rows.numel()


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", [None, 1, HEADS])
def test_fp8_stores_the_nearest_code_of_value_over_scale(name, as_bytes, dtype, scales):
    torch.manual_seed(0)
    rows = [(torch.randn(16, HEADS, SIZE) * 50).to(dtype) for _ in range(2)]
    scale = [None, None] if scales is None else [torch.rand(scales) + 0.1, torch.rand(scales) + 0.1]
    caches = [torch.full((3, 8, HEADS, SIZE), 0x7F, dtype=torch.uint8) for _ in range(2)]
    slots = distinct_slots(16, 24)
    codes = []
    for new, s in zip(rows, scale, strict=True):
        divisor = torch.ones(1) if s is None else s
        codes.append(nearest_code(torch.from_numpy(new.float().numpy() / divisor.numpy()[:, None]), FP8[name]))
    wanted = [written_by_loop(cache, slots, code) for cache, code in zip(caches, codes, strict=True)]
    given = caches if as_bytes else [cache.view(FP8[name]) for cache in caches]
    kestrel_kvcache.reshape_and_cache(*rows, *given, slots, name, *scale)
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(cache, want)


def test_fp8_divides_by_the_scale():
    """Ties of value / scale go to the even code; value * (1 / scale) would miss the tie for many scales."""
    ties = torch.tensor([1.0625, 1.1875, 1.3125, 1.4375, 2.125, 3.875, 14.5, 0.0087890625])
    even = torch.tensor([1.0, 1.25, 1.25, 1.5, 2.0, 4.0, 14.0, 0.0078125])
    for scale in range(1, 200, 2):
        rows, cache = (ties * scale).reshape(1, 1, 8), torch.zeros(2, 1, 1, 1, 8, dtype=torch.float8_e4m3fn)
        factor = torch.tensor([float(scale)])
        kestrel_kvcache.reshape_and_cache(rows, rows, *cache, torch.tensor([0]), "fp8", factor, factor)
        assert torch.equal(cache[0].float().flatten(), even), scale


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_saturates_and_keeps_nan_where_it_came_in(name):
    largest = torch.finfo(FP8[name]).max
    row = torch.tensor([1e9, -1e9, float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-30]).reshape(1, 1, 8)
    rows = torch.cat((row, torch.ones(1, 1, 8)))
    cache = torch.zeros(2, 2, 1, 8, dtype=FP8[name])
    kestrel_kvcache.reshape_and_cache(rows, rows, cache[:1], cache[1:], torch.tensor([0, 1]), name)
    stored = cache.float()
    assert stored[0, 0, 0, :4].tolist() == [largest, -largest, largest, -largest]
    assert stored[0, 0, 0, 4].isnan()
    assert stored[0, 0, 0, 5:].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(stored[0, 1], torch.ones(1, 8))
    assert same_bits(cache[0], cache[1])


def test_auto_keeps_every_bit():
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 3.4e38, 0.0, 1.0, -1e4]).reshape(1, 1, 8)
    cache = torch.zeros(2, 1, 1, 1, 8)
    kestrel_kvcache.reshape_and_cache(odd, -odd, *cache, torch.tensor([0]))
    assert same_bits(cache[0, 0], odd)
    assert same_bits(cache[1, 0], -odd)


def test_rows_past_the_slots_are_not_read():
    rows = torch.full((9, HEADS, SIZE), float("nan"))
    rows[:4] = 1.0
    cache = torch.zeros(2, 4, 2, HEADS, SIZE)
    kestrel_kvcache.reshape_and_cache(rows, rows, *cache, torch.arange(4))
    assert int(cache.isnan().sum()) == 0
    assert int(cache.sum()) == 2 * 4 * HEADS * SIZE


@pytest.mark.parametrize("slots", [[-1, -5], [48, 2**40], [-1, 2**62]])
def test_nothing_but_padding_writes_nothing(slots):
    cache = torch.randn(2, 6, 8, HEADS, SIZE)
    before = cache.clone()
    rows = torch.randn(2, HEADS, SIZE)
    kestrel_kvcache.reshape_and_cache(rows, rows, *cache, torch.tensor(slots))
    assert torch.equal(cache, before)


def test_rows_may_be_slices_of_a_packed_projection():
    packed = torch.randn(5, 4 * HEADS, SIZE)
    key, value = packed[:, HEADS : 2 * HEADS], packed[:, 2 * HEADS : 3 * HEADS]
    sliced, whole = torch.zeros(2, 5, 1, HEADS, SIZE), torch.zeros(2, 5, 1, HEADS, SIZE)
    kestrel_kvcache.reshape_and_cache(key, value, *sliced, torch.arange(5))
    kestrel_kvcache.reshape_and_cache(key.contiguous(), value.contiguous(), *whole, torch.arange(5))
    assert torch.equal(sliced, whole)
    assert torch.equal(sliced[0, :, 0], key)


def test_an_empty_cache_takes_nothing():
    rows = torch.randn(2, HEADS, SIZE)
    kestrel_kvcache.reshape_and_cache(rows, rows, *torch.zeros(2, 0, 4, HEADS, SIZE), torch.arange(2))


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_the_reference_reads_nothing_on_the_host(name):
    """Fake tensors have no values to read: a reference that asked for one would fail here."""
    with FakeTensorMode():
        rows = torch.empty(4, HEADS, SIZE)
        cache = torch.empty(3, 2, HEADS, SIZE, dtype=torch.float32 if name == "auto" else torch.uint8)
        reference.reshape_and_cache(rows, rows, cache, cache, torch.empty(4, dtype=torch.int64), name)


def arguments(kind: str):
    torch.manual_seed(0)
    rows = torch.randn(4, HEADS, SIZE), torch.randn(4, HEADS, SIZE)
    slots = torch.tensor([3, -1, 7, 0])
    if kind == "fp8":
        caches = [torch.zeros(2, 4, HEADS, SIZE, dtype=torch.float8_e4m3fn) for _ in range(2)]
        return (*rows, *caches, slots, "fp8", torch.full((1,), 0.5), torch.full((HEADS,), 2.0))
    if kind == "bytes":
        caches = [torch.zeros(2, 4, HEADS, SIZE, dtype=torch.uint8) for _ in range(2)]
        return (*rows, *caches, slots, "fp8_e5m2", torch.full((1,), 0.5))
    if kind == "transposed":
        caches = [torch.zeros(2, HEADS, 4, SIZE).transpose(1, 2) for _ in range(2)]
        return (*(row.transpose(0, 1).contiguous().transpose(0, 1) for row in rows), *caches, slots)
    if kind == "halves":
        return (*rows, *torch.zeros(2, 4, HEADS, 2 * SIZE).split(SIZE, dim=-1), slots)
    return (*rows, *torch.zeros(2, 2, 4, HEADS, SIZE).unbind(), slots.int())


# Views of one base and float8 tensors (which opcheck cannot compare) are left to the compile test.
@pytest.mark.parametrize("kind", ["plain", "transposed", "bytes"])
def test_the_registered_op_is_sound(kind):
    args = arguments(kind)
    opcheck(kestrel_kvcache.reshape_and_cache, [x.clone() if i in (2, 3) else x for i, x in enumerate(args)])


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "aot_eager") for kind in ("plain", "transposed", "halves", "fp8", "bytes")), ("halves", "inductor")],
)
def test_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()  # the number of variants of one function is limited
    eager, compiled = arguments(kind), arguments(kind)
    kestrel_kvcache.reshape_and_cache(*eager)
    torch.compile(kestrel_kvcache.reshape_and_cache, fullgraph=True, backend=backend)(*compiled)
    for a, b in zip(eager, compiled, strict=True):
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b
