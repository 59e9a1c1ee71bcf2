"""What the rope ops must refuse, through every entry path, and how the message names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_rope
from kestrel_runtime.testing import (
    BadInput,
    assert_launch_agrees,
    assert_refused,
    assert_rejects,
    assert_same_bits,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    refusal_params,
    skip_without_binary,
)

Shape = tuple[int, int, int, int, int]
TYPICAL: Shape = (3, 4, 2, 64, 32)  # tokens, heads, KV heads, head size, rotary dim


def good_call(op: str, shape: Shape = TYPICAL) -> dict[str, Any]:
    """Every argument of an op, all valid."""
    tokens, heads, kv_heads, size, rotary_dim = shape
    values: dict[str, Any] = {
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "query": torch.zeros(tokens, heads, size),
        "key": torch.zeros(tokens, kv_heads, size),
        "head_size": size,
        "cos_sin_cache": torch.zeros(8, rotary_dim),
        "is_neox": True,
    }
    if op == "rotary_embedding":
        return values | {"rope_dim_offset": 0, "inverse": False}
    axes = {"positions": torch.zeros(3, tokens, dtype=torch.int64), "mrope_section": [rotary_dim // 2, 0, 0]}
    return values | axes | {"interleaved": False}


def shared_cases(op: str, shape: Shape) -> list[BadInput]:
    """The mistakes that both ops can be called with."""
    tokens, heads, _, size, rotary_dim = shape
    bad = cases_of(good_call(op, shape))
    query = torch.zeros(tokens, heads, size)
    flat = torch.zeros(tokens, heads * size)
    strided = torch.zeros(tokens, heads, 2 * size)[..., ::2]
    short = torch.zeros(tokens - 1, heads, size)
    return [
        bad("float64", "query", query.double(), TypeError, "float64"),
        bad("integers", "key", query.int(), TypeError, "int32"),
        bad("of another dtype", "key", query.bfloat16(), TypeError, "bfloat16"),
        bad("one row too few", "query", short, fragment=f"({tokens - 1}, {heads}, {size})"),
        bad("one row too few", "key", short, fragment=f"({tokens}, any, any)"),
        bad("of rank 1", "query", torch.zeros(tokens), fragment="1-D"),
        bad("heads of another size", "query", torch.zeros(tokens, heads, size + 2), fragment=f"{size + 2}"),
        bad("heads of twice the size", "query", torch.zeros(tokens, heads, 2 * size), fragment=f"any, {size})"),
        bad("a broken last head", "query", flat[:, :-1], fragment=f"multiple of head_size {size}"),
        bad("a strided last dimension", "query", strided, fragment="stride 2"),
        bad("one row for all", "query", query[:1].expand(tokens, -1, -1), fragment="(0, "),
        bad("one row for all", "key", query[:1].expand(tokens, -1, -1), fragment="share memory"),
        bad("one head for all", "key", query[:, :1].expand(-1, 3, -1), fragment="share memory"),
        bad("of floats", "positions", good_call(op, shape)["positions"].float(), TypeError, "int32 or int64"),
        bad("a list", "positions", [0] * tokens, TypeError, "list"),
        bad("of rank 1", "cos_sin_cache", torch.zeros(rotary_dim), fragment="1-D"),
        bad("odd", "cos_sin_cache", torch.zeros(8, rotary_dim - 1), fragment=str(rotary_dim - 1)),
        bad("without columns", "cos_sin_cache", torch.zeros(8, 0), fragment=">= 2"),
        bad("float64", "cos_sin_cache", torch.zeros(8, rotary_dim).double(), TypeError, "float64"),
        bad("bf16 for float32", "cos_sin_cache", torch.zeros(8, rotary_dim).bfloat16(), TypeError, "bfloat16"),
        bad("wider than a head", "cos_sin_cache", torch.zeros(8, size + 2), fragment=f"at most {size}"),
        bad("zero", "head_size", 0, fragment=">= 1"),
        bad("a bool", "head_size", True, TypeError, "bool"),
        bad("text", "head_size", str(size), TypeError, f"'{size}'"),
        bad("text", "is_neox", "gptj", TypeError, "True or False"),
    ]


def cases(op: str, shape: Shape = TYPICAL) -> list[BadInput]:
    tokens, _, _, size, rotary_dim = shape
    bad, half = cases_of(good_call(op, shape)), rotary_dim // 2
    if op == "rotary_embedding":
        offset, three = size - rotary_dim + 1, torch.zeros(1, 1, tokens, dtype=torch.int64)
        return [
            *shared_cases(op, shape),
            bad("of rank 3", "positions", three, fragment="3-D"),
            bad("negative", "rope_dim_offset", -1, fragment=">= 0"),
            bad("a float", "rope_dim_offset", 1.0, TypeError, "float"),
            bad("past the head", "cos_sin_cache", offset, key="rope_dim_offset", fragment=f"rope_dim_offset {offset}"),
            bad("text", "inverse", "no", TypeError, "True or False"),
        ]
    most = f"a height <= {(half + 1) // 3} and a width <= {half // 3}"
    return [
        *shared_cases(op, shape),
        bad("one axis", "positions", torch.zeros(tokens, dtype=torch.int64), fragment="1-D"),
        bad("two axes", "positions", torch.zeros(2, tokens, dtype=torch.int64), fragment=f"(2, {tokens})"),
        bad("a number", "interleaved", 1, TypeError, "True or False"),
        bad("missing", "mrope_section", None, TypeError, "NoneType"),
        bad("two sizes", "mrope_section", [half, 0], fragment="3 section sizes"),
        bad("a sum too small", "mrope_section", [half - 1, 0, 0], fragment=f"sum to {half}"),
        bad("a negative size", "mrope_section", [half + 1, -1, 0], fragment="-1"),
        bad("a size beyond 64 bits", "mrope_section", [2**70, 0, 0], fragment="64 bits"),
        bad("floats", "mrope_section", [float(half), 0, 0], TypeError, "float"),
        bad("all height, interleaved", "mrope_section", [0, half, 0], fragment=most, interleaved=True),
        bad("all width, interleaved", "mrope_section", [0, 0, half], fragment=most, interleaved=True),
    ]


OPS = {name: getattr(kestrel_rope, name) for name in ("rotary_embedding", "multimodal_rotary_embedding")}
TABLE = {function: cases(op) + derived_bad_inputs(function, (), good_call(op)) for op, function in OPS.items()}


@pytest.mark.parametrize(("function", "case", "path"), refusal_params(TABLE))
def test_bad_input_is_refused_and_named(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.tuples(
        st.integers(2, 9), st.integers(1, 5), st.integers(1, 5), st.integers(4, 40).map(lambda n: 2 * n), st.just(8)
    ),
)
def test_bad_input_is_refused_whatever_the_shape(op: str, data: st.DataObject, shape: Shape) -> None:
    assert_refused(OPS[op], data.draw(st.sampled_from(cases(op, shape))))


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_call_either_works_or_names_the_argument(op: str, data: st.DataObject) -> None:
    args, kwargs = data.draw(odd_calls((), good_call(op)))
    assert_works_or_is_named(OPS[op], args, kwargs)


def overlaps(op: str) -> list[BadInput]:
    """Query or key that share memory within themselves or with another argument."""
    bad, buffer = cases_of(good_call(op)), torch.zeros(3 * 4 * 64 + 1)
    query, shifted = buffer[:-1].view(3, 4, 64), buffer[1:].view(3, 4, 64)
    table = buffer[:256].view(8, 32)
    return [
        bad("rows that overlap", "query", buffer.as_strided((3, 4, 64), (1, 64, 1)), fragment="share memory"),
        bad("heads that overlap", "key", buffer.as_strided((3, 2, 64), (200, 32, 1)), fragment="share memory"),
        bad("the key itself", "query", query, key="key", fragment="'key'", query=query),
        bad("the key, one element on", "query", shifted, key="key", fragment="'key'", query=query),
        bad("with the table in it", "query", query, fragment="'cos_sin_cache'", cos_sin_cache=table),
        bad("with the table in it", "key", query, fragment="'cos_sin_cache'", cos_sin_cache=table),
    ]


OVERLAPS = {function: overlaps(op) for op, function in OPS.items()}


@pytest.mark.parametrize(
    ("function", "case", "path"), refusal_params(OVERLAPS, paths=("public", "torch.ops", "kernel"))
)
def test_a_written_argument_shares_no_memory(function: Callable[..., Any], case: BadInput, path: str) -> None:
    assert_refused(function, case, path)


@pytest.mark.parametrize(("function", "case", "_path"), refusal_params(OVERLAPS, paths=("launch",)))
def test_entry_point_refuses_overlaps_in_the_same_words(function: Any, case: BadInput, _path: str) -> None:
    assert_launch_agrees(function, case)


@pytest.mark.parametrize("op", OPS)
def test_entry_point_checks_the_device_last(op: str) -> None:
    skip_without_binary("kestrel_rope")
    with pytest.raises(ValueError, match=f"{op}: argument 'positions': expected a CUDA tensor, got cpu"):
        OPS[op].kernel_op.launch(**good_call(op))


@pytest.mark.parametrize("op", OPS)
def test_a_tangent_is_refused(op: str) -> None:
    values = good_call(op)
    query = values.pop("query")
    with pytest.raises(ValueError, match=f"{op}: argument 'query': expected a tensor without"):
        torch.func.jvp(lambda query: OPS[op](query=query, **values), (query,), (torch.ones_like(query),))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str, autocast: torch.dtype) -> None:
    torch.manual_seed(0)
    changes = {"positions": torch.randint(0, 8, good_call(op)["positions"].shape), "cos_sin_cache": torch.randn(8, 32)}
    query, key = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    outside, inside = (good_call(op) | changes | {"query": query.clone(), "key": key.clone()} for _ in range(2))
    OPS[op](**outside)
    with torch.autocast("cpu", autocast):
        OPS[op](**inside)
    assert_same_bits([inside["query"], inside["key"]], [outside["query"], outside["key"]])


def table_case(name, argument, error=ValueError, fragment="", **changes):
    return BadInput(name, argument, lambda: ((), {"rotary_dim": 8, "max_position": 4} | changes), error, fragment)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TABLE_CASES = [
    table_case("odd", "rotary_dim", rotary_dim=7, fragment="even"),
    table_case("none", "rotary_dim", rotary_dim=0, fragment=">= 2"),
    table_case("a float", "rotary_dim", TypeError, rotary_dim=8.0),
    table_case("negative", "max_position", max_position=-1),
    table_case("base 1", "base", base=1.0, fragment="> 1"),
    table_case("base nan", "base", base=float("nan")),
    table_case("base inf", "base", base=float("inf"), fragment="finite"),
    table_case("base past every float", "base", base=10**400, fragment="finite"),
    table_case("float64", "dtype", dtype=torch.float64),
    table_case("integers", "dtype", dtype=torch.int32),
    table_case("beyond 64 bits", "rotary_dim", rotary_dim=2**70, fragment="64 bits"),
    table_case("beyond 64 bits", "max_position", max_position=2**70, fragment="64 bits"),
    table_case("unknown device", "device", device="nowhere", fragment="'nowhere'"),
    table_case("missing device", "device", device="cuda:99", fragment="'cuda:99'"),
    table_case("no device", "device", TypeError, device=[], fragment="[]"),
    table_case("not a dict", "scaling", TypeError, scaling="linear"),
    table_case("longrope", "scaling", scaling={"rope_type": "longrope"}, fragment="'longrope'"),
    table_case("no factor", "scaling", scaling={"type": "linear"}, fragment="'factor'"),
    table_case("no context", "scaling", scaling={"type": "dynamic", "factor": 2.0}, fragment="original_max_position"),
    table_case("unknown key", "scaling", scaling=YARN | {"beta_quick": 3}, fragment="'beta_quick'"),
    table_case("a factor near 0", "scaling['factor']", scaling=YARN | {"factor": 1e-300}, fragment=">= 1e-30"),
    table_case("a beta beyond all", "scaling['beta_fast']", scaling=YARN | {"beta_fast": 1.7e308}, fragment="<= 1e+30"),
    table_case("thetas", "scaling['rope_theta']", TypeError, scaling=YARN | {"rope_theta": torch.ones(2)}),
    table_case("another theta", "scaling", scaling=YARN | {"rope_theta": 5e5}, fragment="500000.0"),
    table_case("factor 0", "scaling['factor']", scaling=YARN | {"factor": 0.0}),
    table_case("factor inf", "scaling['factor']", scaling=YARN | {"factor": float("inf")}),
    table_case("factor past every float", "scaling['factor']", scaling=YARN | {"factor": 10**400}, fragment="<= 1e+30"),
    table_case("mscale inf", "scaling['mscale']", scaling=YARN | {"mscale": float("inf")}),
    table_case("a list of types", "scaling", TypeError, scaling={"rope_type": ["yarn"]}, fragment="['yarn']"),
    table_case("keys of two kinds", "scaling", scaling={"rope_type": "linear", 3: 4}, fragment="'factor'"),
    table_case("truncate text", "scaling['truncate']", TypeError, scaling=YARN | {"truncate": "no"}),
    table_case("factor text", "scaling['factor']", TypeError, scaling=YARN | {"factor": "4"}),
    table_case("negative mscale", "scaling['mscale']", scaling=YARN | {"mscale": -1.0}),
    table_case(
        "llama3 bounds",
        "scaling",
        scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        fragment="high_freq_factor",
    ),
]


@pytest.mark.parametrize("case", TABLE_CASES, ids=lambda case: f"{case.argument} {case.name}")
def test_bad_tables_are_refused_and_named(case):
    assert_rejects(kestrel_rope.build_cos_sin_cache, case)


NOT_AN_INTEGER = st.sampled_from([1.5, "8", None, [8], True, float("nan"), torch.ones(1)])
NOT_A_NUMBER = st.sampled_from(["8", None, [8], True, 1j, torch.ones(1)])
OUT_OF_RANGE = st.sampled_from([float("nan"), float("inf"), -float("inf"), 10**400]) | st.floats(max_value=0)
REQUIRED = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 16},
    "yarn": YARN,
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@st.composite
def odd_tables(draw) -> tuple[str, object, type[Exception], dict]:
    """An argument of build_cos_sin_cache that is wrong, its value, the error, and valid other arguments."""
    half, rows = draw(st.integers(1, 40)), draw(st.integers(0, 20))
    good = {"rotary_dim": 2 * half, "max_position": rows}
    rope_type = draw(st.sampled_from(sorted(REQUIRED)))
    scaling = {draw(st.sampled_from(["rope_type", "type"])): rope_type, **REQUIRED[rope_type]}
    key = draw(st.sampled_from(sorted(REQUIRED[rope_type].keys() - {"rope_type"})))
    argument, value, error = draw(
        st.one_of(
            st.tuples(st.sampled_from(["rotary_dim", "max_position"]), NOT_AN_INTEGER, st.just(TypeError)),
            st.tuples(st.just("rotary_dim"), st.integers(max_value=1), st.just(ValueError)),
            st.tuples(st.just("rotary_dim"), st.integers(1, 99).map(lambda n: 2 * n + 1), st.just(ValueError)),
            st.tuples(st.just("max_position"), st.integers(max_value=-1), st.just(ValueError)),
            st.tuples(st.just("base"), NOT_A_NUMBER, st.just(TypeError)),
            st.tuples(st.just("base"), OUT_OF_RANGE | st.floats(0, 1), st.just(ValueError)),
            st.tuples(st.just("dtype"), st.sampled_from([torch.float64, torch.int8, torch.bool]), st.just(ValueError)),
            st.tuples(st.just("scaling"), st.sampled_from(["yarn", 2.0, [("factor", 2.0)]]), st.just(TypeError)),
            st.tuples(st.just("scaling"), st.text().map(lambda t: {"rope_type": "?" + t}), st.just(ValueError)),
            st.tuples(st.just("scaling"), st.text().map(lambda t: {**scaling, "?" + t: 1}), st.just(ValueError)),
            st.tuples(st.just("scaling"), st.just({**scaling, key: None}), st.just(ValueError)),
            st.tuples(st.just(key), NOT_A_NUMBER.filter(lambda x: x is not None), st.just(TypeError)),
            st.tuples(st.just(key), OUT_OF_RANGE, st.just(ValueError)),
        )
    )
    if argument == key:
        return f"scaling[{key!r}]", {"scaling": {**scaling, key: value}}, error, good
    return argument, {argument: value}, error, good


@settings(max_examples=150, deadline=None)
@given(case=odd_tables())
def test_odd_values_for_a_table_are_refused_and_named(case):
    argument, changes, error, good = case
    bad = BadInput(f"{changes}", argument, lambda: ((), good | changes), error)
    assert_rejects(kestrel_rope.build_cos_sin_cache, bad)
