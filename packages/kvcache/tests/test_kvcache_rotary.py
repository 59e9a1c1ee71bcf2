"""rotary_and_cache: complex multiplication in float64, then what reshape_and_cache stores."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_kvcache import reference, reshape_and_cache, rotary_and_cache
from kestrel_runtime.testing import opcheck

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 16, 32


def table_of(rotary_dim: int) -> torch.Tensor:
    angle = torch.arange(ROWS)[:, None] * 10.0 ** -torch.arange(rotary_dim // 2)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def turned_in_float64(x, positions, table, is_neox, offset):
    """x [T, heads, D]: pairs as complex numbers, multiplied by the row's unit numbers."""
    exact = x.double().clone()
    rotary_dim = table.shape[1]
    pairs = torch.arange(rotary_dim).view(2, -1).T if is_neox else torch.arange(rotary_dim).view(-1, 2)
    for t, position in enumerate(positions.tolist()):
        if 0 <= position < len(table):
            real, imaginary = table[position].double().chunk(2)
            old = x[t][:, pairs + offset].double()
            new = torch.complex(old[..., 0], old[..., 1]) * torch.complex(real, imaginary)
            exact[t][:, pairs + offset] = torch.stack((new.real, new.imag), dim=-1)
    return exact


def assert_turned(got, old, exact):
    """One rounding of the result, and 4 of float32 of the pair."""
    info = torch.finfo(got.dtype)
    largest = old.double().abs().amax(-1, keepdim=True)
    bound = 0.5 * info.eps * (exact.abs() + info.smallest_normal) + 4 * 2**-24 * largest
    assert bool(((got.reshape(exact.shape).double() - exact).abs() <= bound).all())


def inputs(tokens, dtype=torch.float32, packed=False):
    torch.manual_seed(tokens)
    if packed:
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE).to(dtype)
        query, key, value = qkv.split((HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE), dim=1)
    else:
        query, key, value = (torch.randn(tokens, h, SIZE).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    return torch.randint(0, ROWS, (tokens,)), query, key, value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("rotary_dim", "offset"), [(SIZE, 0), (6, 4)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
def test_rows_are_rotated_and_cached(dtype, is_neox, rotary_dim, offset, packed, tokens):
    table = table_of(rotary_dim)
    positions, query, key, value = inputs(tokens, dtype, packed)
    before = [x.clone().reshape(tokens, h, SIZE) for x, h in ((query, HEADS), (key, KV_HEADS), (value, KV_HEADS))]
    cache = torch.zeros(2, 5, 8, KV_HEADS, SIZE, dtype=dtype)
    slots = torch.randperm(40)[:tokens]
    result = rotary_and_cache(positions, query, key, value, SIZE, table, *cache, slots, is_neox, rope_dim_offset=offset)
    assert result is None
    for got, old in zip((query, key), before, strict=False):
        assert_turned(got, old, turned_in_float64(old, positions, table, is_neox, offset))
    assert torch.equal(value.reshape(before[2].shape), before[2])
    stored = cache.flatten(1, 2)[:, slots]
    assert torch.equal(stored[0], key.reshape(stored[0].shape))
    assert torch.equal(stored[1], before[2])
    assert int((cache != 0).any(-1).any(-1).sum()) == 2 * tokens


def test_a_long_batch():
    table = table_of(SIZE)
    positions, query, key, value = inputs(740, torch.bfloat16)
    before = query.clone(), key.clone()
    cache = torch.zeros(2, 100, 8, KV_HEADS, SIZE, dtype=torch.bfloat16)
    slots = torch.randperm(800)[:740]
    rotary_and_cache(positions, query, key, value, SIZE, table, *cache, slots)
    for got, old in zip((query, key), before, strict=True):
        assert_turned(got, old, turned_in_float64(old, positions, table, True, 0))
    stored = cache.flatten(1, 2)[:, slots]
    assert torch.equal(stored[0], key)
    assert torch.equal(stored[1], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extreme_rows_stay_alone(dtype):
    """NaN, inf, 1e4, denormals and zeros each in a row: the other rows come out as without them, also in the cache."""
    table = table_of(SIZE)
    _, query, key, value = inputs(6, dtype)
    positions, slots = torch.full((6,), 3), torch.tensor([4, 0, 7, 2, 5, 1])
    plain, plain_cache = [x.clone() for x in (query, key, value)], torch.zeros(2, 1, 8, KV_HEADS, SIZE, dtype=dtype)
    mixed, mixed_cache = [x.clone() for x in (query, key, value)], plain_cache.clone()
    for x in mixed:
        x[0], x[1], x[2] = float("nan"), float("inf"), 1e4
        x[3], x[4] = torch.finfo(dtype).smallest_normal / 4, 0.0
    before = [x.clone() for x in mixed]
    rotary_and_cache(positions, *plain, SIZE, table, *plain_cache, slots)
    rotary_and_cache(positions, *mixed, SIZE, table, *mixed_cache, slots)
    for got, old, alone in zip(mixed[:2], before, plain, strict=False):
        assert got[0].isnan().all()
        assert not got[1].isfinite().any()
        assert torch.equal(got[4], torch.zeros_like(got[4]))
        assert torch.equal(got[5], alone[5])
        finite = [2, 3, 4, 5]
        exact = turned_in_float64(old[finite], positions[finite], table, True, 0)
        assert_turned(got[finite], old[finite], exact)
    stored = mixed_cache.flatten(1, 2)[:, slots]
    for got, want in zip(stored, (mixed[1], before[2]), strict=True):
        assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))
    assert torch.equal(stored[:, 5], plain_cache.flatten(1, 2)[:, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_bias", [0.0, 1.0])
@pytest.mark.parametrize("packed", [True, False])
def test_heads_are_normalised_before_they_are_rotated(dtype, weight_bias, packed):
    table = table_of(SIZE)
    positions, query, key, value = inputs(7, dtype, packed)
    positions[2] = ROWS  # normalised alone
    norms = [torch.linspace(0.5, 1.5, SIZE).to(dtype), torch.linspace(2, 1, SIZE).to(dtype)]
    wanted = []
    for x, heads, weight in zip((query, key), (HEADS, KV_HEADS), norms, strict=True):
        wide = x.double().reshape(7, heads, SIZE)
        rms = (wide.square().mean(-1, keepdim=True) + 0.1).sqrt()
        normed = (wide / rms * (weight.double() + weight_bias)).to(dtype)
        wanted.append((normed, turned_in_float64(normed, positions, table, True, 0)))
    cache, slots = torch.zeros(2, 2, 8, KV_HEADS, SIZE, dtype=dtype), torch.arange(7)
    norm = {"query_norm": norms[0], "key_norm": norms[1], "norm_eps": 0.1, "norm_weight_bias": weight_bias}
    rotary_and_cache(positions, query, key, value, SIZE, table, *cache, slots, **norm)
    for got, (normed, exact) in zip((query, key), wanted, strict=True):
        got, info = got.reshape(exact.shape).double(), torch.finfo(dtype)
        # the norm may round to a neighbour, which the rotation adds to another
        bound = 0.5 * info.eps * exact.abs() + 2.1 * info.eps * normed.double().abs().amax(-1, keepdim=True)
        assert bool(((got - exact).abs() <= bound).all())
    assert torch.equal(cache[0].flatten(0, 1)[:7], key.reshape(7, KV_HEADS, SIZE))


def test_a_head_whose_squares_exceed_float32_is_normalised_to_zero():
    """As in the kernels and in kestrel_norm.rms_norm: the sum of squares is float32."""
    _, query, key, value = inputs(2)
    query[0, 0] = 1e19  # 16 squares of 1e38
    cache, padding, ones = torch.zeros(2, 1, 1, KV_HEADS, SIZE), torch.tensor([-1, -1]), torch.ones(SIZE)
    rotary_and_cache(padding, query, key, value, SIZE, table_of(SIZE), *cache, padding, query_norm=ones, key_norm=ones)
    assert not query[0, 0].any()
    assert query[0, 1:].any(-1).all()


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_the_rotated_key_is_what_is_quantised(name):
    table = table_of(SIZE)
    positions, query, key, value = inputs(9, torch.bfloat16)
    cache = torch.zeros(2, 2, 8, KV_HEADS, SIZE, dtype=torch.uint8)
    alone = cache.clone()
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor([0.25, 2.0])
    slots = torch.randperm(16)[:9].int()
    how = {"kv_cache_dtype": name, "k_scale": k_scale, "v_scale": v_scale}
    rotary_and_cache(positions, query, key, value, SIZE, table, *cache, slots, **how)
    reshape_and_cache(key, value, *alone, slots, **how)  # key is rotated by now
    assert torch.equal(cache, alone)
    assert cache.any()


def test_padding_slots_still_rotate_and_padding_positions_are_still_cached():
    table = table_of(SIZE)
    positions, query, key, value = inputs(5)
    positions[:3] = torch.tensor([-1, ROWS, 2**40])
    before = query.clone(), key.clone()
    cache = torch.zeros(2, 1, 8, KV_HEADS, SIZE)
    rotary_and_cache(positions, query, key, value, SIZE, table, *cache, torch.tensor([0, 1, 2, -1]))
    for got, old in zip((query, key), before, strict=True):
        assert torch.equal(got[:3], old[:3])
        assert not torch.equal(got[3], old[3])  # padding slot
        assert not torch.equal(got[4], old[4])  # no slot at all
    assert torch.equal(cache[0, 0, :3], before[1][:3])
    assert not cache[:, :, 3:].any()


def arguments(kind: str):
    positions, query, key, value = inputs(5, packed=kind == "packed")
    if kind == "transposed":
        query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value))
    cache = torch.zeros(2, 2, 4, KV_HEADS, SIZE)
    caches = [x.transpose(1, 2).contiguous().transpose(1, 2) if kind == "transposed" else x.clone() for x in cache]
    return positions, query, key, value, SIZE, table_of(8), *caches, torch.tensor([3, -1, 7, 0])


KINDS = ("plain", "transposed", "packed")


# Views of one base are left to the compile test: opcheck clones each argument alone.
@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_the_registered_op_is_sound(kind):
    opcheck(rotary_and_cache, arguments(kind), {"rope_dim_offset": 8})


@pytest.mark.parametrize(("kind", "backend"), [*((kind, "aot_eager") for kind in KINDS), ("packed", "inductor")])
def test_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()
    eager, compiled = arguments(kind), arguments(kind)
    rotary_and_cache(*eager)
    torch.compile(rotary_and_cache, fullgraph=True, backend=backend)(*compiled)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_the_reference_reads_nothing_on_the_host():
    """Fake tensors have no values to read: a reference that asked for one would fail here."""
    args = arguments("packed")
    with FakeTensorMode() as mode:
        reference.rotary_and_cache(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
