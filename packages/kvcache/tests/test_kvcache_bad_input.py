"""What the cache ops must refuse, and how the message names it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_kvcache
from kestrel_runtime.testing import BadInput, assert_rejects

SHAPE = (3, 2, 16, 4, 8)


def write_cases(tokens: int, heads: int, size: int, blocks: int, page: int) -> list[BadInput]:
    rows = torch.zeros(tokens, heads, size)
    cache = torch.zeros(blocks, page, heads, size)
    codes = cache.to(torch.uint8)
    good = {
        "key": rows,
        "value": rows,
        "key_cache": cache,
        "value_cache": cache,
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
    }
    fp8 = {"kv_cache_dtype": "fp8", "key_cache": codes, "value_cache": codes}

    def bad(name, argument, value, error=ValueError, fragment="", **more):
        return BadInput(name, argument, lambda: ((), good | more | {argument: value}), error, fragment)

    return [
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
        bad("caches of two sizes", "value_cache", torch.zeros(blocks + 1, page, heads, size), fragment=f"{blocks + 1}"),
        bad("a strided cache", "key_cache", torch.zeros(blocks, page, heads, 2 * size)[..., ::2], fragment="stride 2"),
        bad("cache elsewhere", "key_cache", cache.to("meta"), fragment="meta"),
        bad("an unknown format", "kv_cache_dtype", "fp4", fragment="'fp4'"),
        bad("a format that is no text", "kv_cache_dtype", torch.uint8, fragment="torch.uint8"),
        bad("a scale as a number", "k_scale", 1.0, TypeError, "float", **fp8),
        bad("a bf16 scale", "k_scale", torch.ones(1).bfloat16(), TypeError, "bfloat16", **fp8),
        bad("a scalar scale", "v_scale", torch.ones(()), fragment="0-D", **fp8),
        bad("too many scales", "v_scale", torch.ones(heads + 2), fragment=f"({heads + 2},)", **fp8),
        bad("a scale elsewhere", "v_scale", torch.ones(1, device="meta"), fragment="meta", **fp8),
    ]


NAMES = [case.name for case in write_cases(*SHAPE)]


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_bad_input_is_refused_and_named(index):
    assert_rejects(kestrel_kvcache.reshape_and_cache, write_cases(*SHAPE)[index], "reshape_and_cache")


@settings(max_examples=100, deadline=None)
@given(
    index=st.integers(0, len(NAMES) - 1),
    shape=st.tuples(
        st.integers(1, 9), st.integers(1, 4), st.integers(2, 40), st.integers(1, 5), st.sampled_from([1, 8, 16, 64])
    ),
)
def test_bad_input_is_refused_whatever_the_shape(index, shape):
    assert_rejects(kestrel_kvcache.reshape_and_cache, write_cases(*shape)[index], "reshape_and_cache")
