"""int8_cache_write, int4_cache_write and gather_cache: against loops over tokens, and by round trip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_kvcache import gather_cache, int4_cache_write, int8_cache_write, reference
from kestrel_runtime import UnsupportedError
from kestrel_runtime.testing import opcheck

HEADS, SIZE, PAGE = 2, 8, 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- INT8 -------------------------------------------------------------------------------------------------------------


def int8_of(row: list[float]) -> tuple[list[int], float]:
    """Codes and scale of one head of one token, in numpy's float32, whose division is correctly rounded."""
    finite = [abs(x) for x in row if abs(x) != float("inf")]
    largest = np.float32(max(finite, default=0.0))
    scale = largest / np.float32(127) if largest else np.float32(1)
    codes = np.rint(np.array(row, dtype=np.float32) / scale)
    return np.clip(codes, -127, 127).astype(int).tolist(), float(scale)


def int8_cache(blocks, page, layout="NHD"):
    cache = torch.full((2, blocks, page, HEADS, SIZE), 99, dtype=torch.int8)
    scales = torch.full((2, blocks, page, HEADS), -1.0)
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
        scales = torch.full((2, blocks, page, 3 * HEADS), -1.0)[..., HEADS : 2 * HEADS]
    return *cache, *scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("tokens", "page"), [(1, 1), (3, 8), (16, 16), (0, 64), (65, 256)])
def test_int8_codes_and_scales_land_in_their_slots(dtype, layout, tokens, page):
    torch.manual_seed(tokens)
    key, value = torch.randn(2, tokens + 1, HEADS, SIZE).to(dtype).unbind()
    key[:1], value[1:2] = 0.0, 1e4
    blocks = -(-2 * (tokens + 1) // page)
    slots = torch.randperm(blocks * page)[:tokens]
    slots[1::3], slots[2::7] = -1, blocks * page
    key_cache, value_cache, k_scale, v_scale = int8_cache(blocks, page, layout)
    assert int8_cache_write(key, value, key_cache, value_cache, k_scale, v_scale, slots) is None
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        wanted, wanted_scale = torch.full_like(cache, 99), torch.full_like(scale, -1.0)
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < blocks * page:
                for head in range(HEADS):
                    codes, s = int8_of(rows[token, head].tolist())
                    wanted[slot // page, slot % page, head] = torch.tensor(codes, dtype=torch.int8)
                    wanted_scale[slot // page, slot % page, head] = s
        assert torch.equal(scale, wanted_scale)
        assert torch.equal(cache, wanted)


def test_int8_keeps_nan_and_saturates_inf():
    rows = torch.tensor([[1.0, float("inf"), -float("inf"), 0.5], [float("nan"), 1.0, 2.0, 3.0], [4.0, 2.0, 1.0, 0.0]])
    cache, scale = torch.zeros(2, 3, 1, 1, 4, dtype=torch.int8), torch.zeros(2, 3, 1, 1)
    int8_cache_write(rows[:, None], rows[:, None], *cache, *scale, torch.arange(3))
    assert cache[0, 0, 0, 0].tolist() == [127, 127, -127, 64]  # 0.5 / (1 / 127) = 63.5, to even
    assert scale[0, 1].isnan().all()
    assert cache[0, 2, 0, 0].tolist() == [127, 64, 32, 0]
    assert scale[1, 2].item() == pytest.approx(4 / 127)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16, 256])
def test_int8_round_trip_is_within_half_a_step(dtype, page):
    torch.manual_seed(0)
    key, value = torch.randn(2, 54, HEADS, SIZE).to(dtype).unbind()
    blocks = -(-54 // page)
    table = torch.randperm(blocks, dtype=torch.int32)
    slots = table.long()[torch.arange(54) // page] * page + torch.arange(54) % page
    caches = int8_cache(blocks, page)
    int8_cache_write(key, value, *caches, slots)
    k, v = gather_cache(*caches[:2], table, 54, dtype=torch.float32, k_scale=caches[2], v_scale=caches[3])
    for got, want in ((k, key), (v, value)):
        step = want.float().abs().amax(-1, keepdim=True) / 127
        assert bool(((got - want.float()).abs() <= 0.5001 * step).all())


# -- INT4 -------------------------------------------------------------------------------------------------------------


class Kivi:
    """An INT4 cache of some sequences, and the keys and values that were ever written to each."""

    def __init__(self, blocks, sequences, dtype=torch.float32, size=SIZE):
        self.key_cache, self.value_cache = torch.full((2, blocks, PAGE, HEADS, size // 2), 0xAA, dtype=torch.uint8)
        self.k_scale, self.k_zero = torch.full((2, blocks, HEADS, size), float("nan")).half()
        self.v_scale, self.v_zero = torch.full((2, blocks, PAGE, HEADS), float("nan")).half()
        self.k_tail = torch.full((sequences, PAGE, HEADS, size), float("nan")).to(dtype)
        self.table = torch.randperm(blocks, dtype=torch.int32).view(sequences, -1)
        self.keys = [torch.zeros(0, HEADS, size).to(dtype) for _ in range(sequences)]
        self.values = [torch.zeros(0, HEADS, size).to(dtype) for _ in range(sequences)]

    def write(self, counts: dict[int, int], shuffle=True):
        """Append so many random tokens to each of these sequences, in one call, with padding between them."""
        sequences = [sequence for sequence, count in counts.items() for _ in range(count)]
        positions = [len(self.keys[s]) + i for s, count in counts.items() for i in range(count)]
        slots = [int(self.table[s, p // PAGE]) * PAGE + p % PAGE for s, p in zip(sequences, positions, strict=True)]
        size = self.k_tail.shape[-1]
        key, value = torch.randn(2, len(slots), HEADS, size).to(self.k_tail.dtype).unbind()
        for s in counts:
            mine = torch.tensor(sequences) == s
            self.keys[s] = torch.cat((self.keys[s], key[mine]))
            self.values[s] = torch.cat((self.values[s], value[mine]))
        order = torch.randperm(len(slots) + 2) if shuffle else torch.arange(len(slots) + 2)
        pad = torch.full((2, HEADS, size), float("nan")).to(key.dtype)
        key, value = (torch.cat((x, pad))[order] for x in (key, value))
        slots, sequences = torch.tensor([*slots, -1, 0])[order], torch.tensor([*sequences, 0, -1])[order]
        int4_cache_write(key, value, *self.tensors(), slots, sequences)

    def tensors(self):
        return (
            *(self.key_cache, self.value_cache, self.k_scale, self.k_zero),
            *(self.v_scale, self.v_zero, self.k_tail),
        )

    def read(self, sequence, dtype=torch.float32):
        return gather_cache(
            self.key_cache,
            self.value_cache,
            self.table[sequence],
            len(self.keys[sequence]),
            dtype=dtype,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            k_zero=self.k_zero,
            v_zero=self.v_zero,
            k_tail=self.k_tail,
            seq_ids=ints(sequence),
        )


def through_int4(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x after INT4, in numpy's float32 with scale and zero in float16, as the docstring of the op has it."""
    rows = x.float().numpy()
    low, high = rows.min(dim, keepdims=True), rows.max(dim, keepdims=True)
    largest = np.maximum(np.abs(low), np.abs(high))
    scale = np.maximum((high - low) / np.float32(15), largest / np.float32(32768)).astype(np.float16).astype(np.float32)
    zero = (-low / scale).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(rows / scale + zero), 0, 15)
    return torch.from_numpy((codes - zero) * scale)


def assert_int4(got: torch.Tensor, want: torch.Tensor, dim: int):
    """Exactly what INT4 makes of it."""
    assert torch.equal(got, through_int4(want, dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [54], [63], [64], [65], [128], [200, 0, 3], [64, 64, 127]])
def test_int4_prefill_reads_back(dtype, lengths):
    torch.manual_seed(sum(lengths))
    cache = Kivi(4 * len(lengths), len(lengths), dtype)
    cache.write(dict(enumerate(lengths)))
    check_sequences(cache)


def check_sequences(cache):
    """Keys of full pages through INT4 per channel of a page, those of the last unfinished page as they came in."""
    for sequence, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        k, v = cache.read(sequence)
        assert k.shape == keys.shape
        full = len(keys) // PAGE * PAGE
        for start in range(0, full, PAGE):
            assert_int4(k[start : start + PAGE], keys[start : start + PAGE], 0)
        assert torch.equal(k[full:], keys[full:].float())
        if len(values):
            assert_int4(v, values, -1)


def test_int4_decoding_token_by_token_is_the_same_as_prefill():
    """Bit for bit: a page is quantised from the same 64 rows, whichever call they came in."""
    torch.manual_seed(0)
    whole, stepwise = Kivi(3, 1), Kivi(3, 1)
    stepwise.table = whole.table
    torch.manual_seed(1)
    key, value = torch.randn(2, 150, HEADS, SIZE).unbind()
    slots = whole.table[0].long()[torch.arange(150) // PAGE] * PAGE + torch.arange(150) % PAGE
    int4_cache_write(key, value, *whole.tensors(), slots, torch.zeros(150, dtype=torch.int64))
    for start in [0, 5, 63, 64, 65, *range(66, 128), 128, 140]:
        stop = min(s for s in (5, 63, 64, 65, *range(66, 129), 140, 150) if s > start)
        part = slice(start, stop)
        count = stop - start
        int4_cache_write(
            key[part], value[part], *stepwise.tensors(), slots[part], torch.zeros(count, dtype=torch.int64)
        )
    for a, b in zip(whole.tensors()[:6], stepwise.tensors()[:6], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(whole.k_tail[0, :22], stepwise.k_tail[0, :22])


def test_int4_batches_of_sequences_grow_apart():
    torch.manual_seed(0)
    cache = Kivi(12, 3)
    cache.write({0: 60, 1: 1, 2: 130})
    for _ in range(6):
        cache.write({0: 1, 1: 1, 2: 1})
        check_sequences(cache)
    cache.write({1: 150, 0: 70})
    check_sequences(cache)


def test_int4_pages_of_many_sequences_may_fill_at_once():
    torch.manual_seed(0)
    cache = Kivi(8, 4)
    cache.write(dict.fromkeys(range(4), 63))
    cache.write(dict.fromkeys(range(4), 1))
    check_sequences(cache)
    cache.write(dict.fromkeys(range(4), 10))
    check_sequences(cache)


def test_int4_padding_writes_nothing():
    cache = Kivi(2, 1)
    before = [x.clone() for x in cache.tensors()]
    rows = torch.randn(4, HEADS, SIZE)
    slots, sequences = torch.tensor([-1, 3, 128, 2**40]), torch.tensor([0, -1, 0, 0])
    int4_cache_write(rows, rows, *cache.tensors(), slots, sequences)
    int4_cache_write(rows, rows, *cache.tensors(), torch.arange(4), torch.full((4,), 1))
    for old, new in zip(before, cache.tensors(), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize("fill", [0.0, 1.0, -3.0, 1e4, -1e4, 1e-6])
def test_int4_of_equal_values_is_close(fill):
    """A range of 0: the zero carries the value, to the precision of fp16 (and steps of 16 near 32768)."""
    cache = Kivi(1, 1)
    rows = torch.full((PAGE, HEADS, SIZE), fill)
    int4_cache_write(rows, rows, *cache.tensors(), torch.arange(PAGE), torch.zeros(PAGE, dtype=torch.int64))
    cache.keys[0] = rows
    for got in cache.read(0):
        assert bool(((got - fill).abs() <= abs(fill) * 2**-11 + 2e-6).all())
    if fill == 0.0:
        assert bool((cache.k_scale == 1).all())
        assert bool((cache.v_scale == 1).all())


@pytest.mark.parametrize("offset", [1000.0, -3e4, 0.01])
def test_int4_of_a_small_range_far_from_zero_is_close(offset):
    """(max - min) / 15 alone would put the zero beyond the largest fp16."""
    torch.manual_seed(0)
    cache = Kivi(1, 1)
    rows = offset * (1 + 1e-5 * torch.rand(PAGE, HEADS, SIZE))
    int4_cache_write(rows, rows, *cache.tensors(), torch.arange(PAGE), torch.zeros(PAGE, dtype=torch.int64))
    cache.keys[0] = rows
    for got in cache.read(0):
        assert bool(((got - rows).abs() <= abs(offset) * 2**-11).all())


def test_int4_of_huge_values_saturates_and_nan_is_not_lost():
    cache = Kivi(1, 1)
    rows = torch.randn(PAGE, HEADS, SIZE)
    rows[0, 0, 0], rows[1, 0, 1], rows[2, 1, 3] = float("nan"), float("inf"), -1e30
    int4_cache_write(rows, rows, *cache.tensors(), torch.arange(PAGE), torch.zeros(PAGE, dtype=torch.int64))
    cache.keys[0] = rows
    k, v = cache.read(0)
    assert k[:, 0, 0].isnan().all()
    assert v[0, 0].isnan().all()
    assert int(k.isnan().sum()) == PAGE
    assert int(v.isnan().sum()) == SIZE
    assert float(k[1, 0, 1]) == pytest.approx(491280, rel=0.01)
    assert float(k[2, 1, 3]) == pytest.approx(-491280, rel=0.01)


def test_int4_pages_of_another_size_are_unsupported():
    rows = torch.zeros(1, HEADS, SIZE)
    codes = torch.zeros(2, 3, 32, HEADS, SIZE // 2, dtype=torch.uint8)
    scales, per_token = torch.zeros(2, 3, HEADS, SIZE).half(), torch.zeros(2, 3, 32, HEADS).half()
    tail, one = torch.zeros(1, 32, HEADS, SIZE), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="64 slots"):
        int4_cache_write(rows, rows, *codes, *scales, *per_token, tail, one, one)


# -- gather_cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 8, 64, 256])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [0, 0.01, 1, 2.5], ids=["no token", "one token", "a page", "two pages and a half"])
def test_gather_reads_pages_in_order(pages, page, storage, dtype):
    torch.manual_seed(0)
    length = math.ceil(pages * page)
    cache = torch.randn(2, 9, page, HEADS, SIZE).to(storage)
    table = torch.randperm(9, dtype=torch.int32)
    positions = torch.arange(length)
    for got, rows in zip(gather_cache(*cache, table, length, dtype=dtype), cache, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, rows[table.long()[positions // page], positions % page].to(dtype))


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("scales", [None, 1, HEADS])
def test_gather_multiplies_fp8_by_its_scale(storage, scales):
    torch.manual_seed(0)
    codes = torch.randn(2, 4, 8, HEADS, SIZE).to(
        torch.float8_e5m2 if storage == torch.float8_e5m2 else torch.float8_e4m3fn
    )
    cache = codes.view(storage)
    k_scale, v_scale = (None, None) if scales is None else (torch.rand(scales), torch.rand(scales))
    k, v = gather_cache(*cache, ints(3, 0), 13, dtype=torch.float32, k_scale=k_scale, v_scale=v_scale)
    for got, rows, scale in ((k, codes[0], k_scale), (v, codes[1], v_scale)):
        exact = torch.cat((rows[3], rows[0]))[:13].double() * (1.0 if scale is None else scale.double()[:, None])
        assert torch.equal(got, exact.float())


def test_gather_gives_zero_where_there_is_no_page():
    cache = torch.full((2, 3, 4, HEADS, SIZE), float("nan"))
    cache[:, 1] = 5.0
    k, v = gather_cache(*cache, ints(-1, 1, 3), 20, dtype=torch.float32)
    for got in (k, v):
        assert torch.equal(got[4:8], torch.full((4, HEADS, SIZE), 5.0))
        assert torch.equal(got[:4], torch.zeros(4, HEADS, SIZE))
        assert torch.equal(got[8:], torch.zeros(12, HEADS, SIZE))


@pytest.mark.parametrize("pages", [0, 2])
def test_gather_from_nothing(pages):
    cache = torch.zeros(2, 0 if pages else 3, 4, HEADS, SIZE)
    k, _ = gather_cache(*cache, torch.zeros(pages, dtype=torch.int32), 5)
    assert torch.equal(k, torch.zeros(5, HEADS, SIZE, dtype=torch.bfloat16))


def test_gather_of_a_sequence_without_a_tail_is_zero():
    cache = Kivi(2, 1)
    cache.write({0: 100})
    for sequence in (-1, 1):
        args = cache.key_cache, cache.value_cache, cache.table[0], 100
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale, "k_zero": cache.k_zero, "v_zero": cache.v_zero}
        k, v = gather_cache(*args, **scales, k_tail=cache.k_tail, seq_ids=ints(sequence))
        assert not k.any()
        assert not v.any()


# -- the ops ----------------------------------------------------------------------------------------------------------


def int8_arguments(kind: str):
    torch.manual_seed(0)
    rows = torch.randn(2, 4, HEADS, SIZE)
    if kind == "transposed":
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    return (
        *rows.clone(),
        *(x.clone() for x in int8_cache(2, 4, "HND" if kind == "transposed" else "NHD")),
        ints(3, -1, 7, 0),
    )


def int4_arguments(kind: str):
    torch.manual_seed(0)
    cache = Kivi(2, 1)
    rows = torch.randn(2, 70, HEADS, SIZE)
    if kind == "transposed":
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = [x.nan_to_num().clone() for x in cache.tensors()]
    if kind == "transposed":
        tensors[0], tensors[1] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:2])
    return *rows.clone(), *tensors, torch.arange(70), torch.zeros(70, dtype=torch.int32)


def gather_arguments(kind: str):
    torch.manual_seed(0)
    if kind == "int4":
        cache = Kivi(2, 1)
        cache.write({0: 70})
        names = ("k_scale", "v_scale", "k_zero", "v_zero", "k_tail")
        scales = {name: getattr(cache, name).clone().nan_to_num() for name in names} | {"seq_ids": ints(0)}
        return (cache.key_cache.clone(), cache.value_cache.clone(), cache.table[0], 70), scales
    if kind == "int8":
        key_cache, value_cache, k_scale, v_scale = (x.clone() for x in int8_cache(3, 4, "HND"))
        return (key_cache, value_cache, ints(2, 0), 7), {"k_scale": k_scale, "v_scale": v_scale}
    key_cache, value_cache = (torch.randn(3, HEADS, 4, SIZE).transpose(1, 2) for _ in range(2))
    return (key_cache, value_cache, ints(2, 0), 7), {"dtype": torch.float32}


@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_the_registered_writes_are_sound(kind):
    opcheck(int8_cache_write, int8_arguments(kind))
    opcheck(int4_cache_write, int4_arguments(kind))


@pytest.mark.parametrize("kind", ["values", "int8", "int4"])
def test_the_registered_gather_is_sound(kind):
    opcheck(gather_cache, *gather_arguments(kind))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("function", "make"), [(int8_cache_write, int8_arguments), (int4_cache_write, int4_arguments)])
@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_writes_compile_without_graph_breaks(function, make, kind, backend):
    torch._dynamo.reset()
    eager, compiled = make(kind), make(kind)
    function(*eager)
    torch.compile(function, fullgraph=True, backend=backend)(*compiled)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["values", "int8", "int4"])
def test_gather_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()
    args, kwargs = gather_arguments(kind)
    compiled = torch.compile(gather_cache, fullgraph=True, backend=backend)(*args, **kwargs)
    for a, b in zip(gather_cache(*args, **kwargs), compiled, strict=True):
        assert torch.equal(a, b)


def test_the_references_read_nothing_on_the_host():
    """Fake tensors have no values to read: a reference that asked for one would fail here."""
    gathers = [gather_arguments(kind) for kind in ("values", "int8", "int4")]
    int8, int4 = int8_arguments("plain"), int4_arguments("plain")
    with FakeTensorMode() as mode:

        def fake(x):
            return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

        reference.int8_cache_write(*map(fake, int8))
        reference.int4_cache_write(*map(fake, int4))
        for args, kwargs in gathers:
            k, _ = reference.gather_cache(*map(fake, args), **{name: fake(x) for name, x in kwargs.items()})
            assert k.shape == (args[3], HEADS, SIZE)
