"""The kernels on a GPU: every byte of every buffer is what the reference leaves there."""

from __future__ import annotations

import random as random_numbers
from typing import Any

import pytest
import torch
from gpu_buffers import (
    FLOATS,
    LAYOUTS,
    Int4,
    assert_as_reference,
    caches,
    expect,
    memory,
    random,
    some_slots,
    text_of,
    whole,
)

from kestrel_kvcache import (
    gather_cache,
    int4_cache_write,
    int8_cache_write,
    reference,
    reshape_and_cache,
    rotary_and_cache,
)
from kestrel_runtime import UnsupportedError
from kestrel_runtime.testing import RandomCase, compare_at_random, large_allocation, twins

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


# -- reshape_and_cache ------------------------------------------------------------------------------------------------

HEADS_AND_SIZES = ((32, 64), (8, 128), (1, 256), (4, 80), (3, 72), (2, 65), (1, 7), (5, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
def test_rows_land_in_every_layout(layout: str, name: str) -> None:
    seed = 0
    for dtype in FLOATS:
        for heads, size in HEADS_AND_SIZES:
            for tokens, page in (((1, 1), (33, 3), (16, 256)), ((3, 16), (257, 1), (257, 64)))[seed // 3 % 2]:
                seed += 1
                blocks = -(-2 * tokens // page)
                cache = caches(layout, blocks, page, heads, size, dtype if name == "auto" else torch.uint8)
                rows = [random(tokens, heads, size, dtype=dtype, seed=seed + i) for i in range(2)]
                slots = some_slots(tokens, blocks * page, (torch.int64, torch.int32)[seed % 2], seed)
                scales = (
                    ()
                    if name == "auto"
                    else (torch.rand(1, device="cuda") + 0.01, torch.rand(heads, device="cuda") + 0.01)
                )
                assert_as_reference(reshape_and_cache, *rows, *cache, slots, name, *scales)


@pytest.mark.parametrize("name", ["auto", "fp8"])
@pytest.mark.parametrize("tokens", [0, 740, 4096])
def test_many_tokens_and_none(name: str, tokens: int) -> None:
    for page in (1, 16):
        blocks = -(-(tokens + 9) // page)
        cache = caches("NHD", blocks, page, 32, 64, torch.bfloat16 if name == "auto" else torch.uint8)
        rows = [random(tokens, 32, 64, seed=i) for i in range(2)]
        assert_as_reference(reshape_and_cache, *rows, *cache, some_slots(tokens, blocks * page), name)


def test_rows_of_wider_buffers_and_rows_without_slots() -> None:
    for dtype in FLOATS:
        packed = random(40, 3 * 4 * 64 + 5, dtype=dtype)
        for start in (0, 5):  # 5: no row is aligned
            query_key_value = packed[:, start : start + 768].view(40, 12, 64)
            key, value = query_key_value[:, 4:8], query_key_value[:, 8:]
            for rows in ((key, value), (key.transpose(0, 1).contiguous().transpose(0, 1), value)):
                for name in ("auto", "fp8_e4m3"):
                    cache = caches("NHD", 5, 8, 4, 64, dtype if name == "auto" else torch.uint8)
                    assert_as_reference(reshape_and_cache, *rows, *cache, some_slots(33, 40), name)


@pytest.mark.parametrize("name", FP8)
def test_a_float8_cache_is_written_as_its_bytes(name: str) -> None:
    rows, slots = [random(16, 4, 64, seed=i) for i in range(2)], some_slots(16, 64)
    cache, as_bytes = (caches("NHD", 4, 16, 4, 64, dtype) for dtype in (FP8[name], torch.uint8))
    reshape_and_cache(*rows, *cache, slots, name)
    reshape_and_cache(*rows, *as_bytes, slots, name)
    for a, b in zip(cache, as_bytes, strict=True):
        assert torch.equal(whole(a), whole(b))


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit dtype, or a sample of float32's, [1024, 1, 64]; NaN left out."""
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31 - 1, (65536,), dtype=torch.int32, device="cuda")
    else:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    values = bits.view(dtype)
    return torch.where(values.isnan(), 0.0, values).view(1024, 1, 64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_every_value_divided_by_many_scales_has_the_code_of_the_reference(dtype: torch.dtype, name: str) -> None:
    """A scale per head, and every head holds every value."""
    rows, slots = every_value(dtype).expand(1024, 64, 64), torch.arange(1024, device="cuda")
    extreme = [1e-38, 1e-42, 2.0**-60, 2.0**-61, 2.0**60, 2.0**61, 3e38, -0.5, float("inf"), 1.0, 3.0, 1 / 3]
    almost = [(2 - 2**-23) * 2.0**i for i in range(-8, 12)]  # the significand of all ones is the hardest
    for seed in range(16):
        torch.manual_seed(seed)
        scales = torch.exp2(torch.rand(64) * (24 if seed % 2 else 140) - (12 if seed % 2 else 70))
        if seed == 0:
            scales[: len(extreme + almost)] = torch.tensor(extreme + almost)
        cache = caches("NHD", 1024, 1, 64, 64, torch.uint8)
        assert_as_reference(reshape_and_cache, rows, rows, *cache, slots, name, scales.cuda(), scales.flip(0).cuda())


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_nan_and_inf_stay_where_they_came_in(name: str) -> None:
    rows = random(8, 2, 64)
    rows[1, 0, 3], rows[2, 1, 5], rows[3, 0, 7] = float("nan"), float("inf"), -float("inf")
    for scale in (1.0, 0.0, float("nan"), 1e-40, float("inf")):
        cache, want = (torch.zeros(2, 8, 1, 2, 64, dtype=FP8[name], device="cuda") for _ in range(2))
        scales = torch.tensor([scale], device="cuda")
        for op, target in ((reshape_and_cache, cache), (reference.reshape_and_cache, want)):
            op(rows, rows, *target, torch.arange(8, device="cuda"), name, scales, scales)
        torch.testing.assert_close(cache.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_auto_keeps_every_bit() -> None:
    for dtype in (torch.int16, torch.int32):
        rows = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (64, 2, 64), dtype=dtype, device="cuda")
        rows = rows.view(torch.bfloat16 if dtype == torch.int16 else torch.float32)
        cache = torch.zeros(2, 64, 1, 2, 64, dtype=rows.dtype, device="cuda")
        reshape_and_cache(rows, rows, *cache, torch.arange(64, device="cuda"))
        for one in cache:
            assert torch.equal(one[:, 0].contiguous().view(dtype), rows.view(dtype))


def test_a_row_does_not_depend_on_its_batch_and_runs_repeat() -> None:
    rows, slots = [random(257, 8, 128, seed=i) for i in range(2)], torch.randperm(300, device="cuda")[:257]
    scales = torch.rand(8, device="cuda") + 0.1, torch.rand(1, device="cuda") + 0.1
    all_at_once, again, one_by_one = (torch.zeros(2, 300, 1, 8, 128, dtype=torch.uint8, device="cuda") for _ in "123")
    for cache in (all_at_once, again):
        reshape_and_cache(*rows, *cache, slots, "fp8", *scales)
    for t in range(257):
        reshape_and_cache(*(x[t : t + 1] for x in rows), *one_by_one, slots[t : t + 1], "fp8", *scales)
    assert torch.equal(all_at_once, again)
    assert torch.equal(all_at_once, one_by_one)


# -- rotary_and_cache -------------------------------------------------------------------------------------------------


def rotary_call(
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    rotary_dim: int,
    *,
    table_dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    name: str = "auto",
    packed: bool = False,
    shift: int = 0,
    slotted: int | None = None,
) -> dict[str, Any]:
    """A call by argument names; ``packed``: q, k and v are slices of one buffer, each row ``shift`` elements longer."""
    rows = {"query": heads, "key": kv_heads, "value": kv_heads}
    if packed:
        buffer = memory(tokens, (heads + 2 * kv_heads) * size + shift, dtype=dtype)
        parts = buffer[:, shift:].split([n * size for n in rows.values()], dim=1)
    else:
        parts = [memory(tokens, n, size, dtype=dtype) for n in rows.values()]
    for i, part in enumerate(parts):
        part.copy_(random(*part.shape, dtype=dtype, seed=i))
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(tokens))
    positions[1::7], positions[3::9], positions[5::11] = -1, 50, 2**31 - 1
    angles = torch.rand(50, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to("cuda", table_dtype)
    page = 16
    blocks = -(-2 * tokens // page) + 1
    cache = caches(layout, blocks, page, kv_heads, size, dtype if name == "auto" else torch.uint8)
    slots = some_slots(tokens if slotted is None else slotted, blocks * page)
    call = {"positions": positions.to("cuda", torch.int32 if tokens % 2 else torch.int64)}
    call |= dict(zip(rows, parts, strict=True)) | {"head_size": size, "cos_sin_cache": table}
    call |= {"key_cache": cache[0], "value_cache": cache[1], "slot_mapping": slots, "kv_cache_dtype": name}
    if name != "auto":
        call |= {"k_scale": torch.rand(1, device="cuda") + 0.1, "v_scale": torch.rand(kv_heads, device="cuda") + 0.1}
    return call


def by_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.ndim == 3 else x.unflatten(1, (-1, size))


def assert_rotated_and_cached(call: dict[str, Any], is_neox: bool, offset: int) -> None:
    what = f"rotary_and_cache({text_of(call.values())}, is_neox={is_neox}, rope_dim_offset={offset})"
    ours, wanted, marks, expected = (dict(zip(call, twins(call.values()), strict=True)) for _ in range(4))
    rotary_and_cache(**ours, is_neox=is_neox, rope_dim_offset=offset)
    reference.rotary_and_cache(**wanted, is_neox=is_neox, rope_dim_offset=offset)
    size, rotary_dim, count = call["head_size"], call["cos_sin_cache"].shape[1], call["cos_sin_cache"].shape[0]
    rotated = (call["positions"] >= 0) & (call["positions"] < count)
    for name in ("query", "key"):
        got, want, before = (by_heads(x[name], size) for x in (ours, wanted, call))
        largest = before.float().abs().amax(-1, keepdim=True)
        bound = torch.finfo(got.dtype).eps * want.float().abs() + 4 * 2**-24 * largest
        expect(f"rotated {name} of {what}", ((got.float() - want.float()).abs() > bound).any())
        whole(marks[name]).zero_()
    for name in ("query", "key"):
        part = by_heads(marks[name], size)[..., offset : offset + rotary_dim]
        ones = torch.full((1,), 0xFF, dtype=torch.uint8, device="cuda").repeat(part.element_size()).view(part.dtype)
        part.copy_(torch.where(rotated[:, None, None], ones, part))
    for name in ("query", "key"):  # nothing but what is marked may have changed
        changed = (whole(ours[name]) != whole(call[name])) & (whole(marks[name]) == 0)
        expect(f"bytes beside the rotated {name} of {what}", changed.any())
    expect(f"value of {what}", (ours["value"] != call["value"]).any())
    cached = {name: expected[name] for name in ("key_cache", "value_cache", "slot_mapping", "kv_cache_dtype")}
    scales = {name: expected[name] for name in ("k_scale", "v_scale") if name in expected}
    rows = by_heads(ours["key"], size), by_heads(ours["value"], size)
    reference.reshape_and_cache(*rows, **cached, **scales)
    for name in ("key_cache", "value_cache"):
        expect(f"{name} of {what}", (whole(ours[name]) != whole(expected[name])).any())


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
def test_heads_are_rotated_and_cached(is_neox: bool, name: str) -> None:
    for dtype in FLOATS:
        for heads, kv_heads, size, rotary_dim, offset in (
            *((32, 32, 64, 32, 0), (32, 8, 128, 128, 0), (4, 1, 96, 64, 32), (2, 2, 64, 64, 0)),
            *((3, 1, 72, 20, 3), (2, 2, 80, 6, 74), (1, 1, 2, 2, 0)),
        ):
            for tokens, layout, packed, shift in (
                *((1, "NHD", False, 0), (17, "HND", True, 0), (40, "unequal", True, 8)),
                *((33, "odd base", True, 1), (16, "halves", False, 0)),
            ):
                table = dtype if tokens % 2 else torch.float32
                call = rotary_call(
                    *(dtype, tokens, heads, kv_heads, size, rotary_dim),
                    **{"table_dtype": table, "layout": layout, "name": name, "packed": packed, "shift": shift},
                )
                assert_rotated_and_cached(call, is_neox, offset)


def test_rotation_of_many_tokens_of_none_and_of_rows_without_a_slot() -> None:
    for tokens, slotted in ((740, None), (4096, 4000), (5, 0), (0, 0)):
        call = rotary_call(torch.bfloat16, tokens, 8, 2, 128, 128, slotted=slotted)
        assert_rotated_and_cached(call, True, 0)
    call = rotary_call(torch.bfloat16, 5, 8, 2, 128, 128)
    call["key_cache"], call["value_cache"] = call["key_cache"][:0], call["value_cache"][:0]
    want = rotary_call(torch.bfloat16, 5, 8, 2, 128, 128)
    rotary_and_cache(**call)
    rotary_and_cache(**want)
    assert torch.equal(call["query"], want["query"])


@pytest.mark.parametrize("name", ["auto", "fp8"])
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_heads_are_normalised_then_rotated_and_cached(size: int, name: str) -> None:
    for dtype in FLOATS:
        for tokens, heads, kv_heads, packed in (
            (1, 32, 4, True),
            (3, 5, 1, False),
            (17, 8, 8, True),
            (700, 6, 2, True),
        ):
            call = rotary_call(dtype, tokens, heads, kv_heads, size, size, name=name, packed=packed)
            norms = [1 + random(size, dtype=dtype, seed=i) / 4 for i in (7, 8)]
            norm = {"query_norm": norms[0], "key_norm": norms[1], "norm_weight_bias": 0.5}
            ours, wanted = (dict(zip(call, twins(call.values()), strict=True)) for _ in range(2))
            what = f"rotary_and_cache({text_of(call.values())}) with norms"
            rotary_and_cache(**ours, **norm)
            reference.rotary_and_cache(**wanted, **norm)
            for part in ("query", "key"):
                got, want = (by_heads(x[part], size).float() for x in (ours, wanted))
                # both parts of a pair may have been rounded to a neighbour
                bound = 3 * torch.finfo(dtype).eps * want.abs().amax(-1, keepdim=True)
                expect(f"{part} of {what}", ((got - want).abs() > bound).any())
            expected = dict(zip(call, twins(call.values()), strict=True))
            cached = {each: expected[each] for each in ("key_cache", "value_cache", "slot_mapping", "kv_cache_dtype")}
            scales = {each: expected[each] for each in ("k_scale", "v_scale") if each in expected}
            rows = by_heads(ours["key"], size), by_heads(ours["value"], size)
            reference.reshape_and_cache(*rows, **cached, **scales)
            for part in ("key_cache", "value_cache"):
                expect(f"{part} of {what}", (whole(ours[part]) != whole(expected[part])).any())


def test_norms_of_heads_that_do_not_rotate_whole_run_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    call = rotary_call(torch.bfloat16, 3, 4, 2, 96, 96)
    norm = torch.ones(96, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UnsupportedError, match="do not rotate whole"):
        rotary_and_cache(**call, query_norm=norm, key_norm=norm)


# -- int8_cache_write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_codes_and_scales_are_those_of_the_reference(layout: str) -> None:
    for dtype in FLOATS:
        for heads, size in (*HEADS_AND_SIZES, (2, 320), (1, 1000)):
            for tokens, page in ((1, 1), (33, 3), (257, 64), (16, 256)):
                blocks = -(-2 * tokens // page)
                cache = caches(layout, blocks, page, heads, size, torch.int8)
                wide = memory(2, blocks, page, heads + 3, dtype=torch.float32)[..., :heads]
                narrow = [memory(blocks, page, heads, dtype=torch.float32) for _ in range(2)]
                scales = [*wide] if layout == "unequal" else narrow
                rows = [random(tokens, heads, size, dtype=dtype, seed=size + i) for i in range(2)]
                rows[0][-1], rows[1][0] = 0.0, 1e4
                slots = some_slots(tokens, blocks * page, (torch.int64, torch.int32)[tokens % 2])
                assert_as_reference(int8_cache_write, *rows, *cache, *scales, slots)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_of_every_value(dtype: torch.dtype) -> None:
    """Neighbouring bit patterns share a head, then far ones; inf saturates, denormals are there, NaN left out."""
    for rows in (every_value(dtype), every_value(dtype).view(64, 1024).T.contiguous().view(1024, 1, 64)):
        cache = caches("NHD", 1024, 1, 1, 64, torch.int8)
        scales = [memory(1024, 1, 1, dtype=torch.float32) for _ in range(2)]
        slots = torch.arange(1024, device="cuda")
        assert_as_reference(int8_cache_write, rows, -rows, *cache, *scales, slots)


def test_int8_keeps_nan_in_its_head() -> None:
    rows = random(4, 2, 320)
    rows[1, 0, 300] = float("nan")
    ours, want = (
        [torch.zeros(2, 4, 1, 2, 320, dtype=torch.int8, device="cuda"), torch.zeros(2, 4, 1, 2).cuda()] for _ in "ab"
    )
    slots = torch.arange(4, device="cuda")
    int8_cache_write(rows, rows, *ours[0], *ours[1], slots)
    reference.int8_cache_write(rows, rows, *want[0], *want[1], slots)
    assert torch.equal(ours[0], want[0])
    torch.testing.assert_close(ours[1], want[1], rtol=0, atol=0, equal_nan=True)
    assert int(ours[1].isnan().sum()) == 2


# -- int4_cache_write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_int4_pages_and_tails_grow_as_those_of_the_reference(dtype: torch.dtype, layout: str) -> None:
    steps = ({0: 60, 1: 1, 2: 130}, {0: 4, 1: 1, 2: 1}, {0: 1, 2: 61}, {0: 127, 1: 62}, {1: 1}, {0: 64, 2: 70})
    for heads, size in ((8, 64), (1, 128), (3, 72), (2, 66), (2, 2), (1, 320)):
        cache = Int4(5, 3, heads, size, dtype, layout)
        for i, counts in enumerate(steps):
            args = cache.call(counts, shuffle=i % 2 == 1, wide=i % 3 == 0)
            assert_as_reference(int4_cache_write, *args)
            int4_cache_write(*args)


def test_int4_of_long_prompts_and_many_sequences() -> None:
    for sequences, count in ((1, 4096), (100, 33), (40, 100)):
        for shuffle in (False, True):
            cache = Int4(-(-count // 64), sequences, 8, 64, torch.bfloat16, "NHD")
            args = cache.call(dict.fromkeys(range(sequences), count), shuffle=shuffle, wide=True)
            assert_as_reference(int4_cache_write, *args)


def test_int4_of_extreme_values() -> None:
    rows = random(64, 2, 64, dtype=torch.float32)
    rows[0, 0, 0], rows[1, 0, 1], rows[2, 0, 2], rows[:, 1, 3] = 1e30, float("inf"), -1e-40, 7.0
    rows[3], rows[:, 1, 4], rows[:, 1, 5] = 0.0, 1e-30, 1000.001
    slots = torch.arange(64, device="cuda")
    cache = Int4(1, 1, 2, 64, torch.float32, "NHD")
    assert_as_reference(int4_cache_write, rows, rows, *cache.tensors, slots, 0 * slots)
    rows[5, 0, 7] = float("nan")
    int4_cache_write(rows, rows, *cache.tensors, slots, 0 * slots)
    of_page, of_token = cache.tensors[2], cache.tensors[4]
    assert of_page.isnan().nonzero().tolist() == [[0, 0, 7]]
    assert of_token.isnan().nonzero().tolist() == [[0, 5, 0]]


def test_int4_pages_of_another_size_are_unsupported() -> None:
    cache = Int4(1, 1, 2, 8, torch.bfloat16, "NHD")
    args = list(cache.call({0: 3}, shuffle=False, wide=True))
    args[2:4] = [x[:, :32] for x in args[2:4]]
    args[6:9] = [x[:, :32] for x in args[6:9]]
    with pytest.raises(UnsupportedError, match="64 slots"):
        int4_cache_write(*args)


def test_int4_of_rows_that_a_grid_does_not_hold_is_unsupported() -> None:
    cache = Int4(1, 1, 2**19, 8, torch.float32, "NHD")
    with pytest.raises(UnsupportedError, match="65535 x 16"):
        int4_cache_write(*cache.call({0: 1}, shuffle=False, wide=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (4, 72)])
def test_int4_of_so_many_tokens_that_a_lane_writes_several_packs(heads: int, size: int, dtype: torch.dtype) -> None:
    cache = Int4(130, 2, heads, size, dtype, "NHD")
    call = cache.call({0: 2050, 1: 6100}, shuffle=False, wide=True)
    assert_as_reference(int4_cache_write, *call)


# -- addresses past 2^31 ----------------------------------------------------------------------------------------------


@large_allocation(gib=5)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks_on_both_sides_of_two_to_the_31_elements(page: int, layout: str) -> None:
    heads, size = 4, 64
    blocks = 2**31 // (page * heads * size) + 4
    shape = (blocks, page, heads, size) if layout == "NHD" else (blocks, heads, page, size)
    cache = [torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
    cache = cache if layout == "NHD" else [x.transpose(1, 2) for x in cache]
    ends = [x[-8:].fill_(0x7F) for x in cache]
    start = (blocks - 8) * page
    slots = torch.arange(start, start + 8 * page, device="cuda")
    rows = random(8 * page, heads, size)
    want = torch.zeros(2, 8, page, heads, size, dtype=torch.uint8, device="cuda")
    reshape_and_cache(rows, -rows, *cache, slots, "fp8")
    reference.reshape_and_cache(rows, -rows, *want, slots - start, "fp8")
    for end, stored in zip(ends, want, strict=True):
        assert torch.equal(end, stored)
    table = torch.arange(blocks - 8, blocks, dtype=torch.int32, device="cuda")
    for read, stored in zip(gather_cache(*cache, table, 8 * page), want, strict=True):
        assert torch.equal(read, stored.view(torch.float8_e4m3fn).view(-1, heads, size).bfloat16())
    for end in ends:
        end.fill_(0x7F)
    padding, angles = torch.full_like(slots, -1), torch.ones(1, size, device="cuda")  # no row is rotated
    query, key = rows.clone(), rows.clone()
    rotary_and_cache(padding, query, key, -rows, size, angles, *cache, slots, kv_cache_dtype="fp8")
    for end, stored in zip(ends, want, strict=True):
        assert torch.equal(end, stored)


@large_allocation(gib=9)
def test_more_than_two_to_the_31_slots() -> None:
    heads, size, blocks = 1, 1, 2**27 + 4
    memory = [torch.zeros(blocks, heads, 17, size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    cache = [x.transpose(1, 2)[:, :16] for x in memory]
    slots = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 37, blocks * 16 - 1, blocks * 16], device="cuda")
    rows = random(6, heads, size)
    reshape_and_cache(rows, -rows, *cache, slots, "fp8")
    want = torch.zeros(2, 6, 1, heads, size, dtype=torch.uint8, device="cuda")
    reference.reshape_and_cache(rows, -rows, *want, torch.arange(6, device="cuda"), "fp8")
    inside = slots[:5]
    for written, stored in zip(cache, want, strict=True):
        assert torch.equal(written[inside // 16, inside % 16], stored[:5, 0])
        parts = written.split(2**22)  # counting takes memory of its own
        assert sum(int(part.count_nonzero()) for part in parts) == int(stored[:5].count_nonzero())


@large_allocation(gib=5)
def test_a_row_stride_past_two_to_the_31() -> None:
    stride = 2**31 + 64
    buffer = torch.zeros(stride + 256, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((2, 4, 64), (stride, 64, 1)).copy_(random(2, 4, 64))
    near = far.contiguous()
    caches_far, caches_near = (torch.zeros(2, 2, 1, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.tensor([1, 0], device="cuda")
    reshape_and_cache(far, far, *caches_far, slots)
    reshape_and_cache(near, near, *caches_near, slots)
    assert torch.equal(caches_far, caches_near)
    assert torch.equal(caches_near[0, :, 0], near.flip(0))


# -- random calls -----------------------------------------------------------------------------------------------------


def random_cache_call(rng: random_numbers.Random) -> RandomCase:
    """Any write or read of values, FP8 or INT8, with any shape, layout, dtype and slots."""
    dtype, tokens = rng.choice(FLOATS), rng.choice((1, 2, 5, 33, 130, 400))
    heads, size = rng.choice((1, 2, 3, 8)), rng.choice((8, 64, 128, 2 * rng.randint(1, 80), rng.randint(1, 80)))
    page, layout = rng.choice((1, 3, 16, 64, 100)), rng.choice(LAYOUTS)
    blocks = -(-(tokens + rng.randint(1, 50)) // page)
    kind = rng.choice(("auto", "fp8", "fp8_e5m2", "int8", "gather"))
    if kind == "gather":
        stored = rng.choice((*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
        cache = caches(layout, blocks, page, heads, size, stored)
        for one in cache:
            one.copy_((random(*one.shape, dtype=torch.float32, seed=rng.randrange(1000)) * 9).to(stored))
        kwargs: dict[str, Any] = {"dtype": rng.choice(FLOATS)}
        if stored == torch.int8:
            kwargs |= {name: torch.rand(blocks, page, heads, device="cuda") for name in ("k_scale", "v_scale")}
        elif stored.itemsize == 1:
            kwargs |= {name: torch.rand(rng.choice((1, heads)), device="cuda") for name in ("k_scale", "v_scale")}
        pages = rng.randint(1, blocks + 2)
        table = torch.randint(-1, blocks + 1, (pages,), dtype=torch.int32).cuda()
        return RandomCase(gather_cache, (*cache, table, rng.randint(0, pages * page + 3)), kwargs)
    packed = random(tokens + 2, 3 * heads * size + rng.choice((0, 8, 1)), dtype=dtype, seed=rng.randrange(1000))
    rows = packed[:, : 3 * heads * size].unflatten(1, (3 * heads, size))
    key, value = rows[:, heads : 2 * heads] * 10.0 ** rng.randint(-4, 2), rows[:, 2 * heads :]
    slots = some_slots(tokens, blocks * page, rng.choice((torch.int32, torch.int64)), rng.randrange(1000))
    if kind == "int8":
        scales = [memory(blocks, page, heads, dtype=torch.float32) for _ in range(2)]
        cache = caches(layout, blocks, page, heads, size, torch.int8)
        return RandomCase(int8_cache_write, (key, value, *cache, *scales, slots), writes=(2, 3, 4, 5))
    cache = caches(layout, blocks, page, heads, size, dtype if kind == "auto" else torch.uint8)
    scales = [torch.rand(rng.choice((1, heads)), device="cuda") + 1e-3 for _ in range(2)] if kind != "auto" else []
    return RandomCase(reshape_and_cache, (key, value, *cache, slots, kind, *scales), writes=(2, 3))


def test_random_calls_equal_the_reference() -> None:
    compare_at_random(random_cache_call, seconds=10, least=150)
