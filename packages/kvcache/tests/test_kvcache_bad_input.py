"""What the cache ops must refuse, and how the message names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_kvcache
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import (
    BadInput,
    assert_refused,
    assert_registered,
    assert_rejects,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    refusal_params,
)

SHAPE = (3, 2, 16, 4, 8)


def write_cases(tokens: int, heads: int, size: int, blocks: int, page: int) -> tuple[dict[str, Any], list[BadInput]]:
    rows = torch.zeros(tokens, heads, size)
    cache = torch.zeros(blocks, page, heads, size)
    codes = cache.to(torch.uint8)
    good = {
        "key": rows,
        "value": rows,
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
    }
    fp8 = {"kv_cache_dtype": "fp8", "key_cache": codes, "value_cache": codes.clone()}
    bad = cases_of(good)
    return good, [
        bad("no key", "key", None, TypeError, "a tensor"),
        bad("no value", "value", None, TypeError, "a tensor"),
        bad("no cache", "key_cache", None, TypeError, "a tensor"),
        bad("no slots", "slot_mapping", None, TypeError, "a tensor"),
        bad("float64 key", "key", rows.double(), TypeError, "float64"),
        bad("integer value", "value", rows.int(), TypeError, "int32"),
        bad("value of another dtype", "value", rows.half(), TypeError, "float16"),
        bad("key of rank 2", "key", rows.flatten(1), fragment="2-D"),
        bad("value of another shape", "value", torch.zeros(tokens, heads + 1, size), fragment=f"{heads + 1}"),
        bad("a strided last dimension", "key", torch.zeros(tokens, heads, 2 * size)[..., ::2], fragment="stride 2"),
        bad("value elsewhere", "value", rows.to("meta"), fragment="meta"),
        bad("slots of floats", "slot_mapping", torch.zeros(tokens), TypeError, "float32"),
        bad("slots of rank 2", "slot_mapping", torch.zeros(1, tokens, dtype=torch.int64), fragment="2-D"),
        bad("every other slot", "slot_mapping", int64(2 * tokens)[::2], fragment="stride 2"),
        bad("slots elsewhere", "slot_mapping", torch.zeros(tokens, dtype=torch.int64, device="meta"), fragment="meta"),
        bad(
            "more slots than rows", "slot_mapping", torch.zeros(tokens + 1, dtype=torch.int64), fragment=f"{tokens + 1}"
        ),
        bad("a bf16 cache for float32", "key_cache", cache.bfloat16(), TypeError, "bfloat16"),
        bad("a float cache for FP8", "key_cache", cache, TypeError, "float32", **fp8),
        bad("two cache dtypes", "value_cache", codes.view(torch.float8_e4m3fn), TypeError, "float8_e4m3fn", **fp8),
        bad("bytes without FP8", "key_cache", codes, TypeError, "uint8"),
        bad("the other FP8", "key_cache", codes.view(torch.float8_e5m2), TypeError, "float8_e5m2", **fp8),
        bad("cache of rank 3", "key_cache", cache.flatten(0, 1), fragment="3-D"),
        bad("cache of other heads", "key_cache", torch.zeros(blocks, page, heads + 1, size), fragment=f"{heads + 1}"),
        bad("pages of no slots", "key_cache", cache[:, :0], fragment="page size", value_cache=cache[:, :0]),
        bad("caches of two sizes", "value_cache", torch.zeros(blocks + 1, page, heads, size), fragment=f"{blocks + 1}"),
        bad("a strided cache", "key_cache", torch.zeros(blocks, page, heads, 2 * size)[..., ::2], fragment="stride 2"),
        bad("cache elsewhere", "key_cache", cache.to("meta"), fragment="meta"),
        bad("one block for all", "key_cache", cache[:1].expand_as(cache), fragment="share memory"),
        bad("one slot for all", "value_cache", cache[:, :1].expand_as(cache), fragment="share memory")
        if page > 1
        else bad("one block of values for all", "value_cache", cache[:1].expand_as(cache), fragment="share memory"),
        bad("an unknown format", "kv_cache_dtype", "fp4", fragment="'fp4'"),
        bad("a format that is no text", "kv_cache_dtype", torch.uint8, fragment="torch.uint8"),
        bad("a scale as a number", "k_scale", 1.0, TypeError, "float", **fp8),
        bad("a bf16 scale", "k_scale", torch.ones(1).bfloat16(), TypeError, "bfloat16", **fp8),
        bad("a scalar scale", "v_scale", torch.ones(()), fragment="0-D", **fp8),
        bad("too many scales", "v_scale", torch.ones(heads + 2), fragment=f"({heads + 2},)", **fp8),
        bad("one scale for all heads", "k_scale", torch.ones(1).expand(heads), fragment="stride 0", **fp8)
        if heads > 1
        else bad("scales of more heads", "k_scale", torch.ones(1).expand(heads + 1), fragment="stride 0", **fp8),
        bad("a scale elsewhere", "v_scale", torch.ones(1, device="meta"), fragment="meta", **fp8),
    ]


def int64(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def rotary_cases(tokens: int, heads: int, size: int, blocks: int, page: int) -> tuple[dict[str, Any], list[BadInput]]:
    size = 2 * size
    rows, query = torch.zeros(tokens, heads, size), torch.zeros(tokens, 3 * size)
    cache, slots = torch.zeros(blocks, page, heads, size), torch.zeros(tokens, dtype=torch.int64)
    good = {"positions": slots, "query": query, "key": rows, "value": rows.clone(), "head_size": size}
    good |= {"cos_sin_cache": torch.zeros(8, size), "key_cache": cache, "slot_mapping": slots}
    good |= {"value_cache": cache.clone()}
    bad = cases_of(good)
    fp8 = {"kv_cache_dtype": "fp8", "key_cache": cache.to(torch.uint8), "value_cache": cache.to(torch.uint8)}
    ones = torch.ones(size)
    return good, [
        bad("no query", "query", None, TypeError, "a tensor"),
        bad("no key", "key", None, TypeError, "a tensor"),
        bad("no value", "value", None, TypeError, "a tensor"),
        bad("positions of rank 2", "positions", slots[None], fragment="2-D"),
        bad("positions of floats", "positions", slots.float(), TypeError, "float32"),
        bad("every other position", "positions", int64(2 * tokens)[::2], fragment="stride 2"),
        bad("one row too few", "key", rows[1:], fragment=f"({tokens - 1}, "),
        bad("value of other heads", "value", torch.zeros(tokens, heads + 1, size), fragment=f"{heads} heads"),
        bad("value of another dtype", "value", rows.half(), TypeError, "float16"),
        bad("key of another dtype", "key", rows.half(), TypeError, "float16"),
        bad("float64 query", "query", query.double(), TypeError, "float64"),
        bad("a broken last head", "query", query[:, :-1], fragment="multiple of head_size"),
        bad("a strided value", "value", torch.zeros(tokens, heads, 2 * size)[..., ::2], fragment="stride 2"),
        bad("value elsewhere", "value", rows.to("meta"), fragment="meta"),
        bad("an odd table", "cos_sin_cache", torch.zeros(8, size - 1), fragment=f"{size - 1}"),
        bad("a table too wide", "cos_sin_cache", torch.zeros(8, size + 2), fragment=f"at most {size}"),
        bad("a negative offset", "rope_dim_offset", -1, fragment=">= 0"),
        bad("no head size", "head_size", 0, fragment=">= 1"),
        bad("an order of pairs as text", "is_neox", "gptj", TypeError, "True or False"),
        bad("an order of pairs as a number", "is_neox", 0, TypeError, "int"),
        bad("more slots than rows", "slot_mapping", int64(tokens + 1), fragment=str(tokens + 1)),
        bad("slots of floats", "slot_mapping", slots.float(), TypeError, "float32"),
        bad("a cache of another dtype", "key_cache", cache.half(), TypeError, "float16"),
        bad("a cache of other heads", "key_cache", torch.zeros(blocks, page, heads + 1, size), fragment=f"{heads + 1}"),
        bad("pages of no slots", "key_cache", cache[:, :0], fragment="page size", value_cache=cache[:, :0]),
        bad("caches of two shapes", "value_cache", cache[1:], fragment=f"({blocks - 1}, "),
        bad("one query for all", "query", query[:1].expand_as(query), fragment="share memory"),
        bad("one key for all", "key", rows[:1].expand_as(rows), fragment="share memory"),
        bad("one block for all", "value_cache", cache[:1].expand_as(cache), fragment="share memory"),
        bad("an unknown format", "kv_cache_dtype", "int8", fragment="'int8'"),
        bad("too many scales", "k_scale", torch.ones(heads + 2), fragment=f"({heads + 2},)", **fp8),
        bad("a cache elsewhere", "key_cache", cache.to("meta"), fragment="meta"),
        bad("a norm of queries alone", "query_norm", ones, TypeError, "key_norm"),
        bad("a norm of keys alone", "key_norm", ones, TypeError, "query_norm"),
        bad("a norm of another size", "query_norm", ones[1:], fragment=f"({size - 1},)", key_norm=ones),
        bad("a norm of another dtype", "key_norm", ones.half(), TypeError, "float16", query_norm=ones),
        bad("a norm elsewhere", "key_norm", ones.to("meta"), fragment="meta", query_norm=ones),
        bad("a negative eps", "norm_eps", -1.0, fragment=">= 0"),
        bad("a bias that is no number", "norm_weight_bias", float("nan"), fragment="nan"),
    ]


def int8_cases(tokens: int, heads: int, size: int, blocks: int, page: int) -> tuple[dict[str, Any], list[BadInput]]:
    rows, codes = torch.zeros(tokens, heads, size), torch.zeros(blocks, page, heads, size, dtype=torch.int8)
    scale, slots = torch.zeros(blocks, page, heads), torch.zeros(tokens, dtype=torch.int64)
    good = {"key": rows, "value": rows, "key_cache": codes, "value_cache": codes.clone(), "k_scale": scale}
    good |= {"v_scale": scale.clone(), "slot_mapping": slots}
    bad = cases_of(good)
    return good, [
        bad("no key", "key", None, TypeError, "a tensor"),
        bad("integer key", "key", rows.int(), TypeError, "int32"),
        bad("value of another shape", "value", rows[1:], fragment=f"({tokens - 1}, "),
        bad("a float cache", "key_cache", codes.float(), TypeError, "float32"),
        bad("an unsigned cache", "value_cache", codes.view(torch.uint8), TypeError, "uint8"),
        bad("pages of no slots", "key_cache", codes[:, :0], fragment="page size", value_cache=codes[:, :0]),
        bad("a cache of other heads", "key_cache", torch.cat((codes, codes), dim=2), fragment=f"{2 * heads}"),
        bad("one block for all", "key_cache", codes[:1].expand_as(codes), fragment="share memory"),
        bad("one scale for all blocks", "v_scale", scale[:1].expand_as(scale), fragment="share memory"),
        bad("no scale", "k_scale", None, TypeError, "a tensor"),
        bad("one scale", "k_scale", torch.ones(1), fragment="1-D"),
        bad("a half scale", "v_scale", scale.half(), TypeError, "float16"),
        bad("scales of fewer blocks", "v_scale", scale[1:], fragment=f"({blocks - 1}, "),
        bad("strided scales", "k_scale", torch.zeros(blocks, page, 2 * heads)[..., ::2], fragment="stride 2")
        if heads > 1
        else bad("scales of more heads", "k_scale", torch.zeros(blocks, page, 3), fragment=", 3)"),
        bad("scales elsewhere", "k_scale", scale.to("meta"), fragment="meta"),
        bad("more slots than rows", "slot_mapping", int64(tokens + 1), fragment=str(tokens + 1)),
    ]


def int4_tensors(heads: int, size: int, blocks: int) -> dict[str, torch.Tensor]:
    codes = torch.zeros(blocks, 64, heads, size // 2, dtype=torch.uint8)
    channels, tokens = torch.zeros(blocks, heads, size).half(), torch.zeros(blocks, 64, heads).half()
    caches = {"key_cache": codes, "value_cache": codes.clone(), "k_scale": channels, "k_zero": channels.clone()}
    return caches | {"v_scale": tokens, "v_zero": tokens.clone(), "k_tail": torch.zeros(2, 64, heads, size)}


def int4_shape_cases(bad: Callable[..., BadInput], heads: int, size: int, blocks: int) -> list[BadInput]:
    """What a cache of INT4 must be wherever it is taken."""
    good = int4_tensors(heads, size, blocks)
    return [
        bad("a signed cache", "key_cache", good["key_cache"].view(torch.int8), TypeError, "int8"),
        bad("no cache", "value_cache", None, TypeError, "a tensor"),
        bad(
            "pages of no slots",
            "key_cache",
            good["key_cache"][:, :0],
            fragment="page size",
            value_cache=good["value_cache"][:, :0],
        ),
        bad("no scale", "k_scale", None, TypeError, "a tensor"),
        bad("no zero", "v_zero", None, TypeError, "a tensor"),
        bad("no tail", "k_tail", None, TypeError, "a tensor"),
        bad("a float32 scale", "k_scale", good["k_scale"].float(), TypeError, "float32"),
        bad("a bf16 zero", "k_zero", good["k_zero"].bfloat16(), TypeError, "bfloat16"),
        bad("key scales per token", "k_scale", good["v_scale"], fragment=f"({blocks}, 64, {heads})"),
        bad("value zeros per channel", "v_zero", good["k_zero"], fragment=f"({blocks}, {heads}, {size})"),
        bad("scales of fewer blocks", "v_scale", good["v_scale"][1:], fragment=f"({blocks - 1}, "),
        bad("a tail of fewer rows", "k_tail", good["k_tail"][:, 1:], fragment="63"),
        bad("an integer tail", "k_tail", good["k_tail"].int(), TypeError, "int32"),
        bad("a tail elsewhere", "k_tail", good["k_tail"].to("meta"), fragment="meta"),
        bad("no sequences", "seq_ids", None, TypeError, "a tensor"),
        bad("sequences of floats", "seq_ids", torch.zeros(1), TypeError, "float32"),
    ]


def int4_cases(tokens: int, heads: int, size: int, blocks: int, _: int) -> tuple[dict[str, Any], list[BadInput]]:
    size = 2 * size
    rows, slots = torch.zeros(tokens, heads, size), torch.zeros(tokens, dtype=torch.int64)
    given = int4_tensors(heads, size, blocks)
    good = {"key": rows, "value": rows, **given, "slot_mapping": slots, "seq_ids": slots.int()}
    bad = cases_of(good)
    odd = torch.zeros(tokens, heads, size + 1)
    return good, [
        *int4_shape_cases(bad, heads, size, blocks),
        *(
            bad("one for all blocks", name, given[name][:1].expand_as(given[name]), fragment="share memory")
            for name in ("key_cache", "value_cache", "k_scale", "k_zero", "v_scale", "v_zero", "k_tail")
        ),
        bad("float64 key", "key", rows.double(), TypeError, "float64"),
        BadInput("an odd head size", "key", lambda: ((), {**good, "key": odd, "value": odd}), fragment=f"{size + 1}"),
        bad("a cache not packed", "key_cache", torch.cat((given["key_cache"],) * 2, dim=-1), fragment=f"{size})"),
        bad("a tail of another dtype", "k_tail", given["k_tail"].half(), TypeError, "float16"),
        bad("every other sequence", "seq_ids", int64(2 * tokens)[::2], fragment="stride 2"),
        bad("sequences of another length", "seq_ids", torch.zeros(tokens + 1).int(), fragment=f"({tokens + 1},)"),
        bad("more slots than rows", "slot_mapping", int64(tokens + 1), fragment=str(tokens + 1)),
    ]


def gather_cases(pages: int, heads: int, size: int, blocks: int, page: int) -> tuple[dict[str, Any], list[BadInput]]:
    cache, table = torch.zeros(blocks, page, heads, size), torch.zeros(pages, dtype=torch.int32)
    codes, scale = cache.to(torch.int8), torch.zeros(blocks, page, heads)
    good = {"key_cache": cache, "value_cache": cache, "block_table": table, "length": 3}
    bad = cases_of(good)
    int8 = {"key_cache": codes, "value_cache": codes, "k_scale": scale, "v_scale": scale}
    fp8 = {"key_cache": cache.to(torch.uint8), "value_cache": cache.to(torch.uint8)}
    int4 = int4_tensors(heads, 2 * size, blocks) | {"seq_ids": torch.zeros(1, dtype=torch.int32)}
    of_int4 = cases_of({**int4, "block_table": table, "length": 3})
    return good, [
        *int4_shape_cases(of_int4, heads, 2 * size, blocks),
        of_int4("int64 sequences", "seq_ids", torch.zeros(1, dtype=torch.int64), TypeError, "int64"),
        of_int4("two sequences", "seq_ids", torch.zeros(2, dtype=torch.int32), fragment="(2,)"),
        bad("no table", "block_table", None, TypeError, "a tensor"),
        bad("an int64 table", "block_table", table.long(), TypeError, "int64"),
        bad("a table of rank 2", "block_table", table[None], fragment="2-D"),
        bad("a column of a table", "block_table", torch.zeros(pages, 2).int()[:, 0], fragment="stride 2"),
        bad("a table elsewhere", "block_table", table.to("meta"), fragment="meta"),
        bad("a negative length", "length", -1, fragment=">= 0"),
        bad("a length on the device", "length", table[0], TypeError, "Tensor"),
        bad("a length as a float", "length", 3.0, TypeError, "float"),
        bad("a result of float64", "dtype", torch.float64, fragment="torch.float64"),
        bad("a result of codes", "dtype", torch.uint8, fragment="torch.uint8"),
        bad("a float64 cache", "key_cache", cache.double(), TypeError, "float64"),
        bad("pages of no slots", "key_cache", cache[:, :0], fragment="page size", value_cache=cache[:, :0]),
        bad("caches of two shapes", "value_cache", cache[1:], fragment=f"({blocks - 1}, "),
        bad("caches of two dtypes", "value_cache", cache.half(), TypeError, "float16"),
        bad("a scale without codes", "k_scale", torch.ones(1), fragment="None"),
        bad("too many scales", "v_scale", torch.ones(heads + 2), fragment=f"({heads + 2},)", **fp8),
        bad("a scale elsewhere", "v_scale", torch.ones(1, device="meta"), fragment="meta", **fp8),
        bad("INT8 without a scale", "k_scale", None, TypeError, "a tensor", **int8),
        bad("INT8 with one scale", "v_scale", torch.ones(1), fragment="1-D", **int8),
    ]


TABLES = {
    "reshape_and_cache": write_cases,
    "rotary_and_cache": rotary_cases,
    "int8_cache_write": int8_cases,
    "int4_cache_write": int4_cases,
    "gather_cache": gather_cases,
}
ALL = [(op, index, case.name) for op, table in TABLES.items() for index, case in enumerate(table(*SHAPE)[1])]


REFUSALS = {getattr(kestrel_kvcache, op): table(*SHAPE)[1] for op, table in TABLES.items()}
DERIVED = {
    getattr(kestrel_kvcache, op): derived_bad_inputs(getattr(kestrel_kvcache, op), (), table(*SHAPE)[0])
    for op, table in TABLES.items()
}


REFUSED = [
    param
    for param in (*refusal_params(REFUSALS), *refusal_params(DERIVED))
    if not (param.values[2] == "launch" and param.values[1].fragment == "torch.uint8")  # C++ sees only "an object"
]


@pytest.mark.parametrize(("function", "case", "path"), REFUSED)
def test_bad_input_is_refused_and_named(function, case, path):
    assert_refused(function, case, path)


@pytest.mark.parametrize("op", TABLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_either_works_or_is_named(op, data):
    function = getattr(kestrel_kvcache, op)
    args, kwargs = data.draw(odd_calls((), TABLES[op](*SHAPE)[0]))
    assert_works_or_is_named(function, args, kwargs)


@settings(max_examples=150, deadline=None)
@given(
    which=st.sampled_from([pair[:2] for pair in ALL]),
    shape=st.tuples(
        st.integers(2, 9), st.integers(1, 4), st.integers(2, 40), st.integers(2, 5), st.sampled_from([1, 8, 16, 64])
    ),
)
def test_bad_input_is_refused_whatever_the_shape(which, shape):
    op, index = which
    assert_rejects(getattr(kestrel_kvcache, op), TABLES[op](*shape)[1][index], op)


# What never reaches C++, or not as what it is: tensors without memory, other objects where a tensor or a text belongs,
# and the dtype of gather_cache, which Python makes the result of.
NOT_FOR_CPP = ("torch.uint8", "torch.float64", "Tensor")


def results(arguments: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """What Python would make for the keys and values of a call of gather_cache; anything where the call is bad."""
    cache, length = arguments["key_cache"], arguments["length"]
    if not isinstance(length, int) or length < 0 or cache.ndim != 4:
        return [torch.zeros(1), torch.zeros(1)]
    width = cache.shape[3] * (1 if arguments["k_zero"] is None else 2)
    return [torch.zeros(length, cache.shape[2], width, dtype=dtype) for _ in range(2)]


def entry_point(op: str) -> Callable[..., None]:
    """The C++ entry point, called with the arguments of the public op."""
    try:
        function = Binary("kestrel_kvcache").function(op)
    except UnsupportedError as error:
        pytest.skip(str(error))
    signature = inspect.signature(getattr(kestrel_kvcache, op))

    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        out = results(bound.arguments) if op == "gather_cache" else []
        function(*out, *(value for name, value in bound.arguments.items() if (op, name) != ("gather_cache", "dtype")))

    return call


@pytest.mark.parametrize(("op", "index"), [pair[:2] for pair in ALL], ids=[f"{op}: {name}" for op, _, name in ALL])
def test_the_entry_point_refuses_in_the_same_words(op, index):
    case, function = TABLES[op](*SHAPE)[1][index], entry_point(op)
    args, kwargs = case.make()
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in kwargs.values()) or case.fragment in NOT_FOR_CPP:
        return
    with pytest.raises(case.error) as ours:
        getattr(kestrel_kvcache, op).kernel_op.check(*args, **kwargs)
    with pytest.raises(case.error) as theirs:
        function(*args, **kwargs)
    if "expected a tensor, got" not in str(ours.value):  # tvm-ffi says that in words of its own
        assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("op", TABLES)
def test_the_entry_point_checks_the_device_last(op):
    first = {"rotary_and_cache": "positions", "gather_cache": "key_cache"}.get(op, "key")
    with pytest.raises(ValueError, match=f"{op}: argument '{first}': expected a CUDA tensor, got cpu"):
        entry_point(op)(**TABLES[op](*SHAPE)[0])


@pytest.mark.parametrize(
    ("name", "which", "make", "error", "message"),
    [
        ("codes", 0, lambda x: x.to(torch.uint8), TypeError, "dtype bfloat16 or float16 or float32, got uint8"),
        ("one row too few", 0, lambda x: x[1:], ValueError, r"shape \(3, 2, 16\), got \(2, 2, 16\)"),
        ("two dimensions", 1, lambda x: x.flatten(1), ValueError, r"shape \(3, 2, 16\), got \(3, 32\)"),
        ("a wider buffer", 1, lambda x: torch.cat((x, x), 2)[..., :16], ValueError, "a contiguous tensor, got strides"),
        ("another dtype", 1, lambda x: x.half(), TypeError, "dtype bfloat16 as key_out has, got float16"),
    ],
)
def test_the_entry_point_of_gather_cache_refuses_results_it_cannot_fill(name, which, make, error, message):
    del name
    entry_point("gather_cache")  # or there is no binary here
    given = gather_cases(*SHAPE)[0]
    bound = inspect.signature(kestrel_kvcache.gather_cache).bind(**given)
    bound.apply_defaults()
    out = results(bound.arguments)
    out[which] = make(out[which])
    del bound.arguments["dtype"]
    with pytest.raises(error, match=f"gather_cache: argument '{('key_out', 'value_out')[which]}': expected {message}"):
        Binary("kestrel_kvcache").gather_cache(*out, *bound.arguments.values())


def test_every_op_is_registered_checked_and_documented():
    assert_registered(kestrel_kvcache)


# -- arguments that share memory --------------------------------------------------------------------------------------

INT4_WRITES = ("key_cache", "value_cache", "k_scale", "k_zero", "v_scale", "v_zero", "k_tail")
WRITES = {
    "reshape_and_cache": ("key_cache", "value_cache"),
    "rotary_and_cache": ("query", "key", "key_cache", "value_cache"),
    "int8_cache_write": ("key_cache", "value_cache", "k_scale", "v_scale"),
    "int4_cache_write": INT4_WRITES,
}
SHARED = [  # two arguments that can be one tensor, at least one of them written
    *((op, "key_cache", "value_cache") for op in WRITES),
    ("reshape_and_cache", "key_cache", "key"),
    ("rotary_and_cache", "key", "value"),
    ("rotary_and_cache", "value_cache", "value"),
    ("int8_cache_write", "k_scale", "v_scale"),
    ("int4_cache_write", "k_scale", "k_zero"),
    ("int4_cache_write", "v_scale", "v_zero"),
]


def shared_call(op: str, written: str, other: str) -> dict[str, Any]:
    """A good call in which two arguments are the same memory."""
    given = dict(TABLES[op](3, 1, 4, 3, 1)[0])  # pages of one slot: rows and caches have the same shape
    given[other] = given[written].view(given[other].shape)
    return given


@pytest.mark.parametrize(("op", "written", "other"), SHARED)
def test_two_arguments_that_share_memory_are_refused(op, written, other):
    given = shared_call(op, written, other)
    for name in WRITES[op]:
        given[name].fill_(3)
    with pytest.raises(ValueError, match=rf"{op}: argument '{written}': .* shares no memory with '{other}'"):
        getattr(kestrel_kvcache, op)(**given)
    for name in WRITES[op]:
        assert bool((given[name] == 3).all()), f"{name} was written before the call was refused"


@pytest.mark.parametrize(("op", "written", "other"), SHARED)
def test_the_entry_point_refuses_arguments_that_share_memory_in_the_same_words(op, written, other):
    function, given = entry_point(op), shared_call(op, written, other)
    with pytest.raises(ValueError, match="shares no memory") as python:
        getattr(kestrel_kvcache, op)(**given)
    with pytest.raises(ValueError, match="shares no memory") as cpp:
        function(**given)
    assert str(cpp.value) == str(python.value)


OVERLAPPING_ROWS = [  # shape and strides of a cache [blocks, P, Hk, D] of 3 blocks of 2 slots, 2 heads of 4
    ("rows closer than their length", (15, 7, 3, 1)),
    ("slots closer than their length", (14, 7, 4, 1)),
    ("blocks that start within each other", (12, 8, 4, 1)),
    ("blocks on the last slot of the one before", (8, 8, 4, 1)),
]


@pytest.mark.parametrize("strides", [pytest.param(strides, id=name) for name, strides in OVERLAPPING_ROWS])
@pytest.mark.parametrize("path", ["python", "entry point"])
def test_a_cache_whose_rows_overlap_is_refused(strides, path):
    cache = torch.zeros(100).as_strided((3, 2, 2, 4), strides)
    rows, other = torch.ones(2, 2, 4), torch.zeros(3, 2, 2, 4)
    given = {"key": rows, "value": rows, "key_cache": cache, "value_cache": other, "slot_mapping": torch.arange(2)}
    function = kestrel_kvcache.reshape_and_cache if path == "python" else entry_point("reshape_and_cache")
    with pytest.raises(ValueError, match="'key_cache': expected a tensor to write whose elements do not share memory"):
        function(**given)


DISJOINT_STRIDES = [
    ("dimensions in any order", (4, 8, 24, 1)),
    ("blocks between each other's slots", (12, 8, 40, 1)),  # neither stride is a multiple of the other
    ("K and V side by side", (48, 16, 8, 1)),
]


@pytest.mark.parametrize("strides", [pytest.param(strides, id=name) for name, strides in DISJOINT_STRIDES])
def test_the_entry_point_accepts_any_strides_whose_elements_are_apart(strides):
    function = entry_point("reshape_and_cache")
    cache = torch.zeros(400).as_strided((2, 3, 2, 4), strides)
    offsets = torch.arange(400).as_strided((2, 3, 2, 4), strides).flatten().tolist()
    assert len(set(offsets)) == len(offsets), "the case itself overlaps"
    rows, other = torch.ones(2, 2, 4), torch.zeros(2, 3, 2, 4)
    given = {"key": rows, "value": rows, "key_cache": cache, "value_cache": other, "slot_mapping": torch.arange(2)}
    with pytest.raises(ValueError, match="expected a CUDA tensor"):  # the last of all checks
        function(**given)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    strides=st.tuples(*[st.integers(0, 12)] * 3),
    start=st.integers(0, 12),
)
def test_the_entry_point_knows_exactly_what_overlaps(shape, strides, start):
    """Against the set of addresses: within a cache, and between the caches of keys and values."""
    function = entry_point("reshape_and_cache")
    memory, addresses = torch.zeros(200), torch.arange(200)
    key_cache = memory.as_strided((*shape, 2), (*strides, 1))
    value_cache = memory[start:].as_strided((*shape, 2), (30, 10, 2, 1))
    at = addresses.as_strided((*shape, 2), (*strides, 1)).flatten().tolist()
    value_at = addresses[start:].as_strided((*shape, 2), (30, 10, 2, 1)).flatten().tolist()
    rows = torch.ones(1, shape[2], 2)
    if len(set(at)) < len(at):
        expected = "'key_cache': expected a tensor to write whose elements do not share memory"
    elif set(at) & set(value_at):
        expected = "'key_cache': expected a tensor to write that shares no memory with 'value_cache'"
    else:
        expected = "expected a CUDA tensor"
    with pytest.raises(ValueError, match=expected):
        function(rows, rows, key_cache, value_cache, torch.arange(1))
