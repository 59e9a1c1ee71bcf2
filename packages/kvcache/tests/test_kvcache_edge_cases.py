"""Sizes of zero, autocast, and the rules of the paged cache that kestrel_runtime.paged_cache holds for all families."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kestrel_kvcache
from kestrel_kvcache import gather_cache, int4_cache_write, int8_cache_write, reshape_and_cache
from kestrel_runtime import paged_cache

# -- sizes of zero ----------------------------------------------------------------------------------------------------

SIZES = {"tokens": 2, "heads": 2, "size": 4, "blocks": 3}
ZEROS = [{name: 0} for name in SIZES] + [{"tokens": 0, "heads": 0}, {"heads": 0, "size": 0}, dict.fromkeys(SIZES, 0)]


def write_call(op: str, tokens: int, heads: int, size: int, blocks: int) -> dict[str, Any]:
    rows = torch.ones(tokens, heads, size)
    call = {"key": rows, "value": rows, "slot_mapping": torch.arange(tokens)}
    if op == "int8_cache_write":
        codes, scales = torch.zeros(2, blocks, 1, heads, size, dtype=torch.int8), torch.zeros(2, blocks, 1, heads)
        return call | dict(zip(("key_cache", "value_cache", "k_scale", "v_scale"), (*codes, *scales), strict=True))
    if op == "int4_cache_write":
        codes = torch.zeros(2, blocks, 64, heads, size // 2, dtype=torch.uint8)
        channels, per_token = torch.zeros(2, blocks, heads, size).half(), torch.zeros(2, blocks, 64, heads).half()
        names = ("key_cache", "value_cache", "k_scale", "k_zero", "v_scale", "v_zero")
        call |= dict(zip(names, (*codes, *channels, *per_token), strict=True))
        return call | {"k_tail": torch.zeros(1, 64, heads, size), "seq_ids": torch.zeros(tokens, dtype=torch.int64)}
    cache = torch.zeros(2, blocks, 1, heads, size)
    call |= {"key_cache": cache[0], "value_cache": cache[1]}
    if op == "reshape_and_cache":
        return call
    position = {"positions": torch.arange(tokens), "query": torch.ones(tokens, 3, 4), "head_size": 4}
    return call | position | {"key": rows.clone(), "cos_sin_cache": torch.zeros(4, 4)}


WRITES = ("reshape_and_cache", "rotary_and_cache", "int8_cache_write", "int4_cache_write")
EMPTY_WRITES = [
    pytest.param(op, zeros, id=f"{op}: no {' and '.join(zeros)}")
    for op in WRITES
    for zeros in ZEROS
    if not (op == "rotary_and_cache" and "size" in zeros)  # head_size is at least 1
]


@pytest.mark.parametrize(("op", "zeros"), EMPTY_WRITES)
def test_a_write_of_nothing_returns(op: str, zeros: dict[str, int]) -> None:
    assert getattr(kestrel_kvcache, op)(**write_call(op, **(SIZES | zeros))) is None


@pytest.mark.parametrize(
    ("length", "pages", "blocks", "heads", "size"),
    [(0, 2, 3, 2, 4), (3, 0, 3, 2, 4), (3, 2, 0, 2, 4), (3, 2, 3, 0, 4), (3, 2, 3, 2, 0), (0, 0, 0, 0, 0)],
)
@pytest.mark.parametrize("format", ["values", "int8", "int4"])
def test_a_read_of_nothing_has_its_shape(
    format: str, length: int, pages: int, blocks: int, heads: int, size: int
) -> None:
    table, kwargs = torch.zeros(pages, dtype=torch.int32), {}
    if format == "int4":
        call = write_call("int4_cache_write", 0, heads, size, blocks)
        cache = call["key_cache"], call["value_cache"]
        kwargs = {name: call[name] for name in ("k_scale", "v_scale", "k_zero", "v_zero", "k_tail")}
        kwargs["seq_ids"] = torch.zeros(1, dtype=torch.int32)
    elif format == "int8":
        cache = torch.ones(2, blocks, 2, heads, size, dtype=torch.int8).unbind()
        kwargs = dict(zip(("k_scale", "v_scale"), torch.ones(2, blocks, 2, heads), strict=True))
    else:
        cache = torch.ones(2, blocks, 2, heads, size).unbind()
    for result in gather_cache(*cache, table, length, dtype=torch.float32, **kwargs):
        assert result.shape == (length, heads, size)
        if pages == 0 or blocks == 0:
            assert not result.any(), "tokens without a page are 0"


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float8_e5m2", "uint8", "int8", "float32"])
def test_a_read_means_the_same_inside_autocast(storage: str, autocast: torch.dtype) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, storage)
    codes = torch.randint(0, 120, (2, 3, 4, 2, 8), dtype=torch.uint8)
    codes = codes.to(dtype) if storage in ("int8", "float32") else codes.view(dtype)
    kwargs = {}
    if storage == "int8":
        kwargs = {"k_scale": torch.rand(3, 4, 2), "v_scale": torch.rand(3, 4, 2)}
    elif storage != "float32":
        kwargs = {"k_scale": torch.rand(1), "v_scale": torch.rand(2)}
    table = torch.tensor([2, 0, -1], dtype=torch.int32)
    expected = gather_cache(*codes, table, 11, dtype=torch.float32, **kwargs)
    with torch.autocast("cpu", autocast):
        got = gather_cache(*codes, table, 11, dtype=torch.float32, **kwargs)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", WRITES)
def test_a_write_means_the_same_inside_autocast(op: str, autocast: torch.dtype) -> None:
    def call() -> dict[str, Any]:
        torch.manual_seed(0)
        given = write_call(op, 64, 2, 4, 64)
        for name in ("key", "value", "query", "cos_sin_cache"):
            if name in given:
                given[name] = torch.randn(given[name].shape)
        if op == "rotary_and_cache":
            given["cos_sin_cache"] = torch.randn(64, 4)
        return given

    plain, inside = call(), call()
    getattr(kestrel_kvcache, op)(**plain)
    with torch.autocast("cpu", autocast):
        getattr(kestrel_kvcache, op)(**inside)
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(inside[name], value), name


# -- the rules of paged caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "slot"), [(-1, -1), (0, 8), (3, 11), (4, -1), (5, -1)], ids=["before", "first", "last", "end", "past"]
)
def test_a_position_past_an_unpaged_cache_has_no_slot(position: int, slot: int) -> None:
    """Sequence 2 of a cache of 4 rows each: position 4 is the first row of sequence 3 and must not be its slot."""
    positions = torch.tensor([[0], [0], [position], [0]])
    assert paged_cache.slots_of(positions, None, 4)[2].item() == slot


@pytest.mark.parametrize(
    ("position", "slot"), [(-1, -1), (0, 20), (3, 23), (4, -1), (7, -1), (8, 0), (11, 3), (12, -1)]
)
def test_a_position_without_a_page_has_no_slot(position: int, slot: int) -> None:
    """Pages 5, none and 0 of 4 slots each."""
    table = torch.tensor([[5, -1, 0]], dtype=torch.int32)
    assert paged_cache.slots_of(torch.tensor([[position]]), table, 4).item() == slot


@pytest.mark.parametrize("slot", [-1, 6, 7, 2**40])
def test_a_slot_outside_the_cache_changes_no_row(slot: int) -> None:
    cache = torch.arange(2 * 6 * 8.0).reshape(2, 3, 2, 2, 4)
    before = cache.clone()
    rows = torch.full((1, 2, 4), -5.0)
    reshape_and_cache(rows, rows, *cache, torch.tensor([slot]))
    assert torch.equal(cache, before)


def int4_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (bytes), scale and zero of the values of one token of one head, as the op stores them."""
    call = write_call("int4_cache_write", 1, 1, rows.numel(), 1)
    call["key"] = torch.zeros(1, 1, rows.numel())
    call["value"] = rows.reshape(1, 1, -1)
    int4_cache_write(**call)
    return call["value_cache"][0, 0, 0], call["v_scale"][0, 0, 0], call["v_zero"][0, 0, 0]


@pytest.mark.parametrize("where", [0, 3])
def test_int4_codes_beside_a_nan_are_zero(where: int) -> None:
    """A NaN makes scale and zero NaN; the codes, which no NaN can be, are then 0 and not whatever a cast gives."""
    rows = torch.tensor([1.0, -2.0, 3.0, 0.5])
    rows[where] = math.nan
    codes, scale, zero = int4_of(rows)
    assert scale.isnan()
    assert zero.isnan()
    assert codes.tolist() == [0, 0]
    raw, _, _ = paged_cache.encode_int4(rows, -1)
    assert raw.tolist() == [0, 0, 0, 0]


def test_int8_codes_beside_a_nan_are_zero() -> None:
    rows = torch.tensor([[[1.0, math.nan, -3.0, 2.0]]])
    codes, scale = torch.full((2, 1, 1, 1, 4), 9, dtype=torch.int8), torch.zeros(2, 1, 1, 1)
    int8_cache_write(rows, rows, *codes, *scale, torch.tensor([0]))
    assert bool(scale.isnan().all())
    assert not codes.any()


@pytest.mark.parametrize("entry", [-1, 3, 2**31 - 1])
def test_a_page_that_does_not_exist_reads_as_zero(entry: int) -> None:
    cache = torch.ones(2, 3, 2, 1, 4)
    k, v = gather_cache(*cache, torch.tensor([0, entry, 2], dtype=torch.int32), 6, dtype=torch.float32)
    for result in (k, v):
        assert result[:, 0, 0].tolist() == [1, 1, 0, 0, 1, 1]


def test_an_int4_read_of_a_cache_without_tails_is_zero() -> None:
    call = write_call("int4_cache_write", 64, 1, 4, 1)
    int4_cache_write(**call)
    scales = {name: call[name] for name in ("k_scale", "k_zero", "v_scale", "v_zero")}
    caches, none = (call["key_cache"], call["value_cache"]), call["k_tail"][:0]
    table = torch.zeros(1, dtype=torch.int32)
    for result in gather_cache(*caches, table, 64, **scales, k_tail=none, seq_ids=table):
        assert result.shape == (64, 1, 4)
        assert not result.any()


@pytest.mark.parametrize("sequence", [-1, 1, 2**31 - 1])
def test_an_int4_read_of_a_padding_sequence_is_zero(sequence: int) -> None:
    call = write_call("int4_cache_write", 5, 1, 4, 1)
    int4_cache_write(**call)
    names = ("k_scale", "v_scale", "k_zero", "v_zero", "k_tail")
    scales = {name: call[name] for name in names}
    table = torch.zeros(1, dtype=torch.int32)
    for sequence_id, expected in ((0, True), (sequence, False)):
        k, v = gather_cache(
            call["key_cache"],
            call["value_cache"],
            table,
            5,
            dtype=torch.float32,
            seq_ids=torch.tensor([sequence_id], dtype=torch.int32),
            **scales,
        )
        assert bool(k.any()) == bool(v.any()) == expected
