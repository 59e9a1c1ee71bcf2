"""What the rope ops must refuse, and how the message names it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_rope
from kestrel_rope.multimodal_rotary_embedding import check_multimodal_rotary_embedding
from kestrel_rope.rotary_embedding import check_rotary_embedding
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import BadInput, assert_rejects


def call(tokens: int = 3, heads: int = 4, kv_heads: int = 2, size: int = 64, rotary_dim: int = 32, **changes):
    """A valid call with some arguments replaced."""
    values = {
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "query": torch.zeros(tokens, heads, size),
        "key": torch.zeros(tokens, kv_heads, size),
        "head_size": size,
        "cos_sin_cache": torch.zeros(8, rotary_dim),
    }
    return lambda: ((), values | changes)


def cases(tokens: int, heads: int, kv_heads: int, size: int, rotary_dim: int) -> list[BadInput]:
    shape = (tokens, heads, kv_heads, size, rotary_dim)
    query = torch.zeros(tokens, heads, size)
    flat = torch.zeros(tokens, heads * size)
    strided = torch.zeros(tokens, heads, 2 * size)[..., ::2]
    short = torch.zeros(tokens - 1, heads, size)

    def bad(name, argument, value, error=ValueError, fragment="", **more):
        return BadInput(name, argument, call(*shape, **{argument: value}, **more), error, fragment)

    return [
        bad("no query", "query", None, TypeError, "a tensor"),
        bad("positions of floats", "positions", torch.zeros(tokens), TypeError, "int32 or int64"),
        bad("positions as a list", "positions", [0] * tokens, TypeError, "list"),
        bad("three-dimensional positions", "positions", torch.zeros(1, 1, tokens, dtype=torch.int64), fragment="3-D"),
        bad("float64 query", "query", query.double(), TypeError, "float64"),
        bad("integer key", "key", query.int(), TypeError, "int32"),
        bad("key of another dtype", "key", query.bfloat16(), TypeError, "bfloat16"),
        bad("one row too few in query", "query", short, fragment=f"({tokens - 1}, {heads}, {size})"),
        bad("one row too few in key", "key", short, fragment=f"({tokens}, any, any)"),
        bad("query of rank 1", "query", torch.zeros(tokens), fragment="1-D"),
        bad("heads of another size", "query", torch.zeros(tokens, heads, size + 2), fragment=f"{size + 2}"),
        bad("a broken last head", "query", flat[:, :-1], fragment=f"multiple of head_size {size}"),
        bad("a strided last dimension", "query", strided, fragment="stride 2"),
        bad("one query for all rows", "query", query[:1].expand(tokens, -1, -1), fragment="(0, "),
        bad("one key for all rows", "key", query[:1].expand(tokens, -1, -1), fragment="share memory"),
        bad("one head for all", "key", query[:, :1].expand(-1, 3, -1), fragment="share memory"),
        bad("query elsewhere", "query", query.to("meta"), fragment="meta"),
        bad("table elsewhere", "cos_sin_cache", torch.zeros(8, rotary_dim, device="meta"), fragment="meta"),
        bad("positions elsewhere", "query", query, fragment="cpu", positions=torch.zeros(tokens, device="meta").long()),
        bad("no table", "cos_sin_cache", None, TypeError, "a tensor"),
        bad("table of rank 1", "cos_sin_cache", torch.zeros(rotary_dim), fragment="1-D"),
        bad("an odd table", "cos_sin_cache", torch.zeros(8, rotary_dim - 1), fragment=str(rotary_dim - 1)),
        bad("an empty table row", "cos_sin_cache", torch.zeros(8, 0), fragment=">= 2"),
        bad("a float64 table", "cos_sin_cache", torch.zeros(8, rotary_dim).double(), TypeError, "float64"),
        bad("a bf16 table for float32", "cos_sin_cache", torch.zeros(8, rotary_dim).bfloat16(), TypeError, "bfloat16"),
        bad("more rotated than there are", "cos_sin_cache", torch.zeros(8, size + 2), fragment=f"at most {size}"),
        bad("a negative offset", "rope_dim_offset", -1, fragment=">= 0"),
        bad("an offset as a float", "rope_dim_offset", 1.0, TypeError, "float"),
        bad("no head size", "head_size", 0, fragment=">= 1"),
        bad("head size as a bool", "head_size", True, TypeError, "bool"),
        bad("head size by name", "head_size", str(size), TypeError, f"'{size}'"),
        bad("a rotation by name", "is_neox", "gptj", TypeError, "True or False"),
        bad("a flag as text", "inverse", "no", TypeError, "True or False"),
        BadInput(
            "an offset that pushes the rotation out",
            "cos_sin_cache",
            call(*shape, rope_dim_offset=size - rotary_dim + 1),
            fragment=f"rope_dim_offset {size - rotary_dim + 1}",
        ),
    ]


def multimodal_cases(tokens: int, heads: int, kv_heads: int, size: int, rotary_dim: int) -> list[BadInput]:
    """Those of rotary_embedding that hold here too, and what is its own."""
    half = rotary_dim // 2
    own = {"positions": torch.zeros(3, tokens, dtype=torch.int64), "mrope_section": [half, 0, 0]}
    arguments = ("query", "key", "head_size", "cos_sin_cache")
    shared = [case for case in cases(tokens, heads, kv_heads, size, rotary_dim) if case.argument in arguments]

    def with_own(case: BadInput) -> BadInput:
        return BadInput(case.name, case.argument, lambda: ((), case.make()[1] | own), case.error, case.fragment)

    def bad(name, argument, value, error=ValueError, fragment="", **more):
        _, good = call(tokens, heads, kv_heads, size, rotary_dim)()
        return BadInput(name, argument, lambda: ((), good | own | more | {argument: value}), error, fragment)

    skipped = ("positions elsewhere", "an offset that pushes the rotation out")
    return [
        *(with_own(case) for case in shared if case.name not in skipped),
        bad("one axis", "positions", torch.zeros(tokens, dtype=torch.int64), fragment="1-D"),
        bad("two axes", "positions", torch.zeros(2, tokens, dtype=torch.int64), fragment=f"(2, {tokens})"),
        bad("positions of floats", "positions", torch.zeros(3, tokens), TypeError, "float32"),
        bad("one row too few", "query", torch.zeros(tokens - 1, heads, size), fragment=f"({tokens - 1}, "),
        bad("a rotation by name", "is_neox", "gptj", TypeError, "True or False"),
        bad("a flag as a number", "interleaved", 1, TypeError, "True or False"),
        bad("no sections", "mrope_section", None, TypeError, "NoneType"),
        bad("two sections", "mrope_section", [half, 0], fragment="3 section sizes"),
        bad("sections that sum to less", "mrope_section", [half - 1, 0, 0], fragment=f"sum to {half}"),
        bad("a negative section", "mrope_section", [half + 1, -1, 0], fragment="-1"),
        bad("a section of floats", "mrope_section", [float(half), 0, 0], TypeError, "float"),
        bad("all height, interleaved", "mrope_section", [0, half, 0], fragment="every third", interleaved=True),
        bad("all width, interleaved", "mrope_section", [0, 0, half], fragment="every third", interleaved=True),
    ]


TABLES = {"rotary_embedding": cases, "multimodal_rotary_embedding": multimodal_cases}
ALL = [(op, index, case.name) for op, table in TABLES.items() for index, case in enumerate(table(3, 4, 2, 64, 32))]


@pytest.mark.parametrize(("op", "index"), [pair[:2] for pair in ALL], ids=[f"{op}: {name}" for op, _, name in ALL])
def test_bad_input_is_refused_and_named(op, index):
    assert_rejects(getattr(kestrel_rope, op), TABLES[op](3, 4, 2, 64, 32)[index])


CHECKS = {
    "rotary_embedding": check_rotary_embedding,
    "multimodal_rotary_embedding": check_multimodal_rotary_embedding,
}
# What does not cross into C++: meta tensors, things that are no tensor or no list of three where one must be.
NOT_FOR_CPP = (
    "query elsewhere",
    "table elsewhere",
    "positions elsewhere",
    "no query",
    "no table",
    "positions as a list",
    "no sections",
    "two sections",
)
FOR_CPP = [pytest.param(*pair[:2], id=f"{pair[0]}: {pair[2]}") for pair in ALL if pair[2] not in NOT_FOR_CPP]


def entry_point(op):
    """The C++ entry point, called with the arguments of the public op."""
    try:
        function = Binary("kestrel_rope").function(op)
    except UnsupportedError as error:
        pytest.skip(str(error))

    def rotary_embedding(
        positions, query, key, head_size, cos_sin_cache, is_neox=True, rope_dim_offset=0, inverse=False
    ):
        function(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse)

    def multimodal_rotary_embedding(
        positions, query, key, head_size, cos_sin_cache, mrope_section, is_neox=True, interleaved=False
    ):
        function(positions, query, key, head_size, cos_sin_cache, *mrope_section, is_neox, interleaved)

    return {f.__name__: f for f in (rotary_embedding, multimodal_rotary_embedding)}[op]


@pytest.mark.parametrize(("op", "index"), FOR_CPP)
def test_entry_point_refuses_in_the_same_words(op, index):
    function, (_, kwargs) = entry_point(op), TABLES[op](3, 4, 2, 64, 32)[index].make()
    with pytest.raises((TypeError, ValueError)) as ours:
        CHECKS[op](**kwargs)
    with pytest.raises(ours.type) as theirs:
        function(**kwargs)
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("op", CHECKS)
def test_entry_point_checks_the_device_last(op):
    values = call()()[1]
    if op == "multimodal_rotary_embedding":
        values |= {"positions": torch.zeros(3, 3, dtype=torch.int32), "mrope_section": [6, 5, 5]}
    with pytest.raises(ValueError, match=f"{op}: argument 'positions': expected a CUDA tensor, got cpu"):
        entry_point(op)(**values)


@settings(max_examples=100, deadline=None)
@given(
    which=st.sampled_from([pair[:2] for pair in ALL]),
    shape=st.tuples(
        st.integers(2, 9), st.integers(1, 5), st.integers(1, 5), st.integers(4, 40).map(lambda n: 2 * n), st.just(8)
    ),
)
def test_bad_input_is_refused_whatever_the_shape(which, shape):
    op, index = which
    assert_rejects(getattr(kestrel_rope, op), TABLES[op](*shape)[index])


@pytest.mark.parametrize(("op", "index"), [pair[:2] for pair in ALL], ids=[f"{op}: {name}" for op, _, name in ALL])
def test_refused_calls_write_nothing(op, index):
    _, kwargs = TABLES[op](3, 4, 2, 64, 32)[index].make()
    watched = [x for x in (kwargs["query"], kwargs["key"]) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    before = [x.clone() for x in watched]
    with pytest.raises((TypeError, ValueError)):
        getattr(kestrel_rope, op)(**kwargs)
    for x, old in zip(watched, before, strict=True):
        assert torch.equal(x, old)


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
    table_case("not a dict", "scaling", TypeError, scaling="linear"),
    table_case("longrope", "scaling", scaling={"rope_type": "longrope"}, fragment="'longrope'"),
    table_case("no factor", "scaling", scaling={"type": "linear"}, fragment="'factor'"),
    table_case("no context", "scaling", scaling={"type": "dynamic", "factor": 2.0}, fragment="original_max_position"),
    table_case("unknown key", "scaling", scaling=YARN | {"beta_quick": 3}, fragment="'beta_quick'"),
    table_case("another theta", "scaling", scaling=YARN | {"rope_theta": 5e5}, fragment="500000.0"),
    table_case("factor 0", "scaling['factor']", scaling=YARN | {"factor": 0.0}),
    table_case("factor inf", "scaling['factor']", scaling=YARN | {"factor": float("inf")}),
    table_case("factor past every float", "scaling['factor']", scaling=YARN | {"factor": 10**400}, fragment="finite"),
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


@settings(max_examples=300, deadline=None)
@given(case=odd_tables())
def test_odd_values_for_a_table_are_refused_and_named(case):
    argument, changes, error, good = case
    bad = BadInput(f"{changes}", argument, lambda: ((), good | changes), error)
    assert_rejects(kestrel_rope.build_cos_sin_cache, bad)
