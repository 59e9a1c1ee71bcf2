"""The plan of a decode call: split-KV, limits, variants and scalars, held against arithmetic written here."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_attention.kernels.splits import SplitRule
from kestrel_attention.kernels.variants import AppendVariant
from kestrel_attention.plan import DecodeProblem, page_divisor, plan_decode, split_rule
from kestrel_runtime import UnsupportedError

PAGE = 64  # of an INT4 cache
KINDS = ("same", "e4m3", "e5m2", "int8", "int4")


def problem(**how: Any) -> DecodeProblem:
    """One sequence of one query and one head of 64, unless told otherwise."""
    usual = {"batch": 1, "queries": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "page_size": 64, "pages": 16}
    return DecodeProblem(**(usual | {"dtype": "bf16", "cache": "same"} | how))


# -- the split rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("thread_blocks", "max_splits"), [(1, 128), (2, 64), (3, 42), (8, 16), (128, 1), (10**5, 1)])
@pytest.mark.parametrize("cache", KINDS)
def test_one_sequence_has_up_to_128_thread_blocks(cache, thread_blocks, max_splits):
    """Twice as many where four-warp blocks of 128 dims fill the GPU in two waves."""
    for head_dim in (64, 128, 256, 512):
        waves = 2 if cache == "same" and head_dim == 128 else 1
        assert split_rule(0, head_dim, cache, thread_blocks).max_splits == waves * max_splits, head_dim
    assert split_rule(0, 128, cache, thread_blocks, wide=True).max_splits == 2 * max_splits


@pytest.mark.parametrize(
    ("head_dims", "caches", "rule"),
    [
        ((8, 64), ("same", "e4m3", "e5m2", "int8"), (512, 192, 768, 256)),
        ((8, 64), ("int4",), (1024, 1024, 0, 1024)),
        ((72, 128), ("same",), (1024, 1024, 8192, 512)),
        ((72, 128), ("e4m3", "e5m2", "int8", "int4"), (1024, 1024, 0, 1024)),
        ((136, 256), ("same",), (272, 272, 2176, 1024)),
        ((136, 256), ("e4m3", "e5m2", "int8", "int4"), (272, 272, 2176, 272)),
        ((264, 512), KINDS, (512, 512, 8192, 256)),
    ],
)
def test_how_many_keys_a_split_has(head_dims, caches, rule):
    for head_dim, cache in itertools.product(head_dims, caches):
        assert split_rule(0, head_dim, cache, 1)[:4] == rule, (head_dim, cache)


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize(("num_splits", "max_splits"), [(1, 1), (7, 7), (2**25, 2**25), (2**40, 2**25)])
def test_a_caller_chooses_the_number_of_splits(cache, num_splits, max_splits):
    rule = split_rule(num_splits, 64, cache, 1)
    least = PAGE if cache == "int4" else 16
    assert rule.max_splits == max_splits
    assert [rule.keys(n, least) for n in (1, least)] == [least, least]
    if num_splits == 7:  # even splits of whole tiles or pages
        assert rule.keys(7 * least + 1, least) == 2 * least
        assert rule.keys(1000 * 7, least) == -(-1000 // least) * least


RULES = [
    SplitRule(16, 16, 0, 16, 7),
    SplitRule(512, 192, 768, 256, 16),
    SplitRule(512, 512, 8192, 256, 128),
    SplitRule(272, 272, 2176, 1024, 128),  # a sequence of 2176 keys has more splits than longer ones
    SplitRule(1024, 1024, 8192, 512, 3),
    SplitRule(64, 64, 0, 64, 1),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("granularity", [16, PAGE])
def test_splits_cover_a_sequence_and_are_as_short_as_the_rule_allows(rule, granularity):
    for visited in (*range(1, 1200), 8191, 8192, 8193, 20000, 10**6, 2**29):
        keys = rule.keys(visited, granularity)
        least = rule.long_split_keys
        if visited <= rule.unsplit_keys:
            least = rule.unsplit_keys
        elif visited <= rule.medium_keys:
            least = rule.medium_split_keys
        wanted = least
        if math.ceil(visited / least) > rule.max_splits:
            wanted = math.ceil(math.ceil(visited / rule.max_splits) / granularity) * granularity
        assert keys == wanted, visited
        assert math.ceil(visited / keys) <= rule.max_splits, visited


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_launch_has_blocks_for_the_splits_of_every_length(rule):
    """A sequence just below a threshold may have more splits than a longer one."""
    most = 0
    for longest in range(1, 2600):
        keys = rule.keys(longest)
        most = max(most, math.ceil(longest / keys))
        assert rule.num_splits(longest) >= most, longest
        if longest <= rule.max_splits * min(rule[:4:3]):  # where max_splits changes nothing
            assert rule.num_splits(longest) == most, longest


# -- what the device does with the scalars ----------------------------------------------------------------------------


def visited_by(p: DecodeProblem, length: int) -> tuple[int, int]:
    """The first key that any query of a sequence sees, rounded down to a page for INT4, and how many from there on.

    length: the keys of the sequence, new ones included. The rows of a sequence are taken to be one thread block, and
    prefixes on the device to be as long as the sequence.
    """
    held = min(length, p.capacity)
    prefix = held if p.has_prefix_lens else min(p.prefix_len, held)
    first, last = length - p.queries, length - 1  # where the first and the last query stand
    right = 0 if p.causal else p.window_right
    start = max(0, first - p.window_left) if p.window_left >= 0 else 0
    end = min(held, last + right + 1) if right >= 0 else held
    start, end = min(start, held), max(end, 0)
    if prefix > 0:
        start, end = 0, max(end, prefix)
    if p.cache == "int4":
        start = start // PAGE * PAGE
    return start, max(end - start, 0)


WINDOWS = [
    {},
    {"causal": True},
    {"window_left": 100},
    {"window_left": 100, "causal": True},
    {"window_left": 1000, "window_right": 20},
    {"window_left": 1000, "causal": True, "window_right": 400},
    {"window_left": 1000, "causal": True, "prefix_len": 7},
    {"window_left": 510, "causal": True},  # with 3 queries just past what is one split
    {"window_left": 1022, "causal": True},
    {"window_left": 300, "causal": True, "has_prefix_lens": True},
    {"window_right": 3},
]
CASES = [*(("same", size) for size in (64, 128, 256, 512)), ("e4m3", 128), ("int8", 256), ("int4", 64), ("int4", 128)]


LENGTHS = (*range(0, 1400, 35), *range(1001, 1100, 9), 2047, 2048, 5000, 8192, 10239, 10240, 10**6, 2**31 - 1)


@pytest.mark.parametrize(("cache", "head_dim"), CASES)
@pytest.mark.parametrize("how", WINDOWS, ids=str)
def test_a_launch_has_blocks_for_every_length_of_its_sequences(cache, head_dim, how):
    granularity = PAGE if cache == "int4" else 16
    for num_splits in (0, 1, 5, 100):
        p = problem(cache=cache, head_dim=head_dim, queries=3, heads=2, pages=160, num_splits=num_splits, **how)
        scalars = plan_decode(p).scalars
        rule = SplitRule(*(getattr(scalars, name) for name in SplitRule._fields))
        assert rule == split_rule(num_splits, head_dim, cache, 1)
        for length in LENGTHS:
            start, visited = visited_by(p, length)
            splits = math.ceil(visited / rule.keys(max(visited, 1), granularity))
            assert splits <= scalars.num_splits, (num_splits, length, start, visited)


@pytest.mark.parametrize(("cache", "head_dim"), CASES)
@pytest.mark.parametrize("how", [x for x in WINDOWS if x != {"window_left": 100}], ids=str)
def test_the_first_page_of_a_split_is_looked_up_where_the_device_needs_it(cache, head_dim, how):
    """Before the device knows the length: that of a sequence that fills its block table is expected."""
    for num_splits, pages in itertools.product((0, 1, 5, 100), (1, 8, 16, 17, 128, 625, 2048)):
        p = problem(cache=cache, head_dim=head_dim, heads=3, kv_heads=3, pages=pages, num_splits=num_splits, **how)
        scalars, case = plan_decode(p).scalars, (num_splits, pages)
        rule = split_rule(num_splits, head_dim, cache, 3)
        start, visited = visited_by(p, p.capacity)
        assert scalars.expected_start == start, case
        if scalars.num_splits > 1:
            assert scalars.expected_split_keys == rule.keys(visited, PAGE if cache == "int4" else 16), case


@settings(max_examples=100, deadline=None)
@given(page_size=st.integers(1, 2**20), page=st.integers(0, 2**31), key=st.integers(0, 2**31 - 1))
def test_a_page_is_found_by_a_product_and_a_shift(page_size, page, key):
    multiplier, shift = page_divisor(page_size)
    assert 0 < multiplier < 2**32
    assert shift < 64
    edge = min(page * page_size, 2**31)
    for k in (key, 2**31 - 1, max(edge - 1, 0), min(edge, 2**31 - 1), (2**31 - 1) // page_size * page_size):
        assert k * multiplier >> shift == k // page_size, (page_size, k)


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 7, 11, 24, 63, 64, 65, 96, 100, 272, 1000, 4097, 65535, 2**20 + 1])
def test_the_last_keys_of_pages_near_two_to_the_31_are_found(page_size):
    multiplier, shift = page_divisor(page_size)
    last = (2**31 - 1) // page_size
    for page in (*range(max(0, last - 500), last + 1), *range(max(0, last // 2 - 500), last // 2)):
        for key in (page * page_size - 1, page * page_size):
            if key >= 0:
                assert key * multiplier >> shift == key // page_size, key


@settings(max_examples=100, deadline=None)
@given(
    batch=st.sampled_from([1, 3, 64, 100, 4096, 65535, 65536]),
    queries=st.integers(1, 16),
    kv_heads=st.integers(1, 40),
    group=st.integers(1, 40),
    cache=st.sampled_from(KINDS),
    page_size=st.sampled_from([1, 16, 24, 64, 256]),
    pages=st.sampled_from([None, 0, 1, 17, 1000, 2**21, 2**25]),
    left=st.one_of(st.just(-1), st.integers(0, 2**63 - 1)),
    right=st.one_of(st.just(-1), st.integers(0, 2**63 - 1)),
    causal=st.booleans(),
    prefix_len=st.one_of(st.just(0), st.integers(0, 2**63 - 1)),
    num_splits=st.sampled_from([0, 1, 7, 65535, 2**40]),
    softcap=st.sampled_from([0.0, 1e-45, 1e-30, 2.0, 3e38]),
)
def test_scalars_fit_the_types_of_the_kernel(batch, queries, kv_heads, group, cache, page_size, left, right, **rest):
    p = problem(batch=batch, queries=queries, heads=kv_heads * group, kv_heads=kv_heads, cache=cache)
    page_size = PAGE if cache == "int4" else page_size
    try:
        plan = plan_decode(replace(p, page_size=page_size, window_left=left, window_right=right, **rest))
    except UnsupportedError:
        return
    for name, value in plan.scalars._asdict().items():
        if name in ("inverse_group_size", "softmax_scale", "softcap"):
            assert math.isfinite(torch.tensor(value, dtype=torch.float32).item()), name
        else:
            low, high = (0, 2**32) if name == "page_multiplier" else (-(2**31), 2**31)
            assert low <= value < high, name
    thread_blocks = -(-queries * group // plan.variant.rows)  # of a KV head of a sequence with one split
    assert max(plan.scalars.num_splits * thread_blocks, batch) <= 65535
    assert plan.partial_rows < 2**31
    if rest["causal"]:
        assert plan.scalars.window_right == 0


@pytest.mark.parametrize(("given", "kept"), [(0, 0), (2**30, 2**30), (2**30 + 1, None), (2**63 - 1, None)])
def test_windows_and_prefixes_that_no_sequence_reaches_are_unbounded(given, kept):
    ends = plan_decode(problem(window_left=given, window_right=given)).scalars
    assert (ends.window_left, ends.window_right) == ((-1, -1) if kept is None else (kept, kept))
    assert plan_decode(problem(window_right=given, causal=True)).scalars.window_right == 0
    assert plan_decode(problem(prefix_len=given)).scalars.prefix_len == (2**30 if kept is None else kept)


def test_the_soft_cap_goes_into_the_scale():
    """The kernel computes softcap * tanh(score / softcap) from exp(2 score / softcap)."""
    plain, capped, tiny = (plan_decode(problem(softcap=cap)).scalars for cap in (0.0, 4.0, 1e-30))
    assert (plain.softmax_scale, plain.softcap) == (0.125, 0.0)
    assert (capped.softmax_scale, capped.softcap) == (0.125 * 2 / 4, 4.0)
    assert (tiny.softmax_scale, tiny.softcap) == (0.125 * 2 * 2.0**40, 2.0**-40)
    assert plan_decode(problem(softmax_scale=-0.5)).scalars.softmax_scale == -0.5


@pytest.mark.parametrize(
    ("softcap", "scale", "expected"),
    [
        (0.0, 2.0**126, (2.0**126, 0.0)),
        (0.5, 2.0**126, (2.0**126, 0.5)),
        (2.0**-50, -(2.0**100), (-(2.0**126), 2.0**-40)),
        (2.0**60, 0.5, (2.0**-60, 2.0**60)),
        (2.0**61, 0.5, (0.5, 0.0)),
    ],
)
def test_scales_stay_in_float32_whatever_the_soft_cap(softcap, scale, expected):
    scalars = plan_decode(problem(softcap=softcap, softmax_scale=scale)).scalars
    assert (scalars.softmax_scale, scalars.softcap) == expected


def test_a_table_without_columns_holds_no_key():
    assert problem(pages=0).capacity == 0
    assert plan_decode(problem(pages=0)).scalars.capacity == 0


def test_scalars_say_what_the_call_has():
    p = problem(heads=6, kv_heads=2, queries=5, pages=None, page_size=200, cache="e4m3")
    p = replace(p, k_scale_heads=1, v_scale_heads=2)
    s = plan_decode(p).scalars
    assert (s.has_block_table, s.capacity, s.appended, s.group_size, s.inverse_group_size) == (0, 200, 0, 3, 1 / 3)
    assert (s.k_scale_heads, s.v_scale_heads, s.has_prefix_lens) == (1, 2, 0)
    s = plan_decode(replace(p, pages=7, appends=True, has_prefix_lens=True)).scalars
    assert (s.has_block_table, s.capacity, s.appended, s.has_prefix_lens) == (1, 1400, 5, 1)


# -- limits -----------------------------------------------------------------------------------------------------------

MANY_SPLITS = {"heads": 64, "kv_heads": 64, "pages": 64, "num_splits": 256}  # 2^14 * 64 * 256 blocks of 8 rows
LIMITS = [
    ("16 queries", {"queries": 16}, {"queries": 17}),
    ("2^29 keys", {"pages": 2**23}, {"pages": 2**23 + 1}),
    ("65535 sequences", {"batch": 65535}, {"batch": 65536}),
    ("65535 splits", {"pages": 2**17, "num_splits": 65535}, {"pages": 2**17, "num_splits": 65536}),
    (
        "65535 splits of two row blocks each",
        {"pages": 2**17, "num_splits": 32767, "heads": 16},
        {"pages": 2**17, "num_splits": 32768, "heads": 16},
    ),
    (
        "65535 splits whatever the KV heads",
        {"pages": 2**17, "num_splits": 65535, "heads": 3, "kv_heads": 3},
        {"pages": 2**17, "num_splits": 65536, "heads": 3, "kv_heads": 3},
    ),
    (
        "2^31 rows of partial results",
        {"pages": 2**17, "num_splits": 65535, "batch": 4096},
        {"pages": 2**17, "num_splits": 65535, "batch": 4097},
    ),
    ("INT4 pages of 64", {"cache": "int4", "page_size": 64}, {"cache": "int4", "page_size": 32}),
    ("heads of up to 256", {"head_dim": 256}, {"head_dim": 264}),
    ("heads of 512", {"head_dim": 512}, {"head_dim": 520}),
    ("rows of 16 bytes", {"head_dim": 72}, {"head_dim": 68}),
    ("rows of 16 codes", {"head_dim": 80, "cache": "e4m3"}, {"head_dim": 72, "cache": "e4m3"}),
    ("exactly 2^31 of them", {"batch": 2**14 - 1, **MANY_SPLITS}, {"batch": 2**14, **MANY_SPLITS}),
    ("INT4 heads of 64 and 128", {"head_dim": 128, "cache": "int4"}, {"head_dim": 96, "cache": "int4"}),
]


@pytest.mark.parametrize(("inside", "outside"), [x[1:] for x in LIMITS], ids=[x[0] for x in LIMITS])
def test_what_kernels_do_not_cover_is_refused(inside, outside):
    plan_decode(problem(**inside))
    with pytest.raises(UnsupportedError):
        plan_decode(problem(**outside))


# -- variants ---------------------------------------------------------------------------------------------------------


def test_more_warps_are_for_kernels_of_8_rows():
    wide = problem(queries=4, heads=4, head_dim=128)
    assert plan_decode(replace(wide, num_splits=-1)).variant == plan_decode(replace(wide, num_splits=1)).variant
    narrow = problem(head_dim=128)
    assert plan_decode(replace(narrow, num_splits=-1)).variant != plan_decode(replace(narrow, num_splits=1)).variant


@pytest.mark.parametrize(("batch", "joins"), [(1, False), (66, False), (67, True), (132, True), (133, False)])
@pytest.mark.parametrize("cache", ["same", "e4m3"])
def test_blocks_that_fill_half_the_gpu_combine_their_own_splits(cache, batch, joins):
    plan = plan_decode(problem(batch=batch, cache=cache, page_size=1, pages=740))
    assert plan.scalars.num_splits == 4
    assert plan.row_blocks == batch
    assert (plan.variant.splits_per_block == 4) is joins
    assert (plan.combine is None) is joins
    assert plan.partial_rows == (0 if joins else batch * 4 * 8)


@pytest.mark.parametrize("pages", [512, 2000])
def test_blocks_combine_neither_one_split_nor_more_than_four(pages):
    plan = plan_decode(problem(batch=100, page_size=1, pages=pages))
    assert plan.variant.splits_per_block == 1
    assert (plan.combine is None) == (pages == 512)


@pytest.mark.parametrize(("batch", "fewer"), [(1, False), (132, False), (133, True)])
def test_more_blocks_than_multiprocessors_over_int4_take_a_kernel_of_fewer_stages(batch, fewer):
    case = problem(batch=batch, cache="int4", page_size=64, pages=8)
    assert plan_decode(case).variant.num_stages == (2 if fewer else 4)
    assert plan_decode(replace(case, has_wide_kernels=False)).variant.num_stages == 4


@pytest.mark.parametrize(
    ("cache", "head_dim", "folds"),
    [
        *[("same", 64, False), ("same", 128, False), ("same", 256, True), ("same", 512, False)],
        *[("e4m3", 64, False), ("e4m3", 128, True), ("e4m3", 256, False), ("e5m2", 128, False)],
        *[("int8", 64, True), ("int8", 128, True), ("int8", 256, False), ("int4", 64, False), ("int4", 128, True)],
    ],
)
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (2, 3)])
def test_up_to_four_rows_have_kernels_whose_further_columns_hold_second_terms(queries, group, cache, head_dim, folds):
    case = problem(queries=queries, heads=2 * group, kv_heads=2, head_dim=head_dim, cache=cache)
    assert plan_decode(case).variant.folded is (folds and queries * group <= 4)
    assert not plan_decode(replace(case, has_wide_kernels=False)).variant.folded


@pytest.mark.parametrize(("batch", "stages"), [(1, 3), (33, 3), (34, 4)])
def test_more_blocks_than_fit_at_once_over_e4m3_take_a_kernel_of_more_stages(batch, stages):
    case = problem(batch=batch, heads=32, kv_heads=8, head_dim=128, cache="e4m3")
    assert plan_decode(case).variant.num_stages == stages
    assert plan_decode(replace(case, heads=64)).variant.num_stages == 4


@pytest.mark.parametrize(
    ("how", "warps"),
    [
        ({"num_splits": -1}, 8),
        ({"num_splits": -1, "batch": 9}, 8),
        ({"num_splits": -1, "pages": 2000}, 8),
        ({"num_splits": -1, "dtype": "fp16"}, 8),
        ({"num_splits": -1, "has_wide_kernels": False}, 4),
        ({"num_splits": -1, "head_dim": 64}, 4),
        ({"num_splits": -1, "head_dim": 96}, 4),
        ({"num_splits": 1}, 4),
        ({"num_splits": 0}, 4),
        ({"num_splits": 2}, 4),
    ],
)
def test_one_split_for_more_warps(how, warps):
    plan = plan_decode(problem(**({"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "pages": 60} | how)))
    assert plan.variant.warps == warps
    assert plan.variant.splits_per_block == 1
    assert plan.combine is None or how["num_splits"] == 2


@pytest.mark.parametrize(("num_splits", "warps"), [(2, 1), (8, 1), (9, 8), (64, 8)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_warp_combines_up_to_eight_splits(dtype, num_splits, warps):
    plan = plan_decode(problem(num_splits=num_splits, pages=64, heads=24, kv_heads=2, dtype=dtype))
    assert plan.combine is not None
    assert (plan.combine.dtype, plan.combine.warps) == (dtype, warps)
    assert plan.combine_scalars == (12, num_splits, 0)
    assert plan.row_blocks == 4  # two blocks of rows for each KV head
    assert plan.partial_rows == 4 * num_splits * 8


@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "queries", "rows", "blocks"),
    [(8, 1, 8, 1), (20, 1, 8, 3), (4, 2, 8, 1), (1, 16, 8, 2), (4, 4, 16, 1), (6, 3, 32, 1), (8, 5, 32, 2)],
)
def test_a_block_takes_up_to_32_rows_of_several_queries(heads, queries, rows, blocks, head_dim, cache):
    """So that keys and values are read once; of one query or one head 8."""
    plan = plan_decode(problem(heads=heads, queries=queries, head_dim=head_dim, cache=cache, pages=2000, batch=3))
    assert plan.variant.rows == rows
    assert plan.row_blocks == 3 * -(-heads * queries // 8)  # partial results are stored in blocks of 8 rows
    assert plan.partial_rows == plan.row_blocks * 8 * plan.scalars.num_splits
    rule = SplitRule(*(getattr(plan.scalars, name) for name in SplitRule._fields))
    assert rule == split_rule(0, head_dim, cache, blocks, wide=rows > 8)


@pytest.mark.parametrize("cache", ["e5m2", "int8", "int4"])
def test_blocks_over_other_caches_take_8_rows(cache):
    assert plan_decode(problem(heads=8, queries=4, head_dim=128, cache=cache)).variant.rows == 8


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_append_kernel_writes_what_the_cache_holds(cache, dtype):
    p = problem(cache=cache, dtype=dtype, appends=True, k_scale_heads=2, v_scale_heads=1)
    plan = plan_decode(p)
    both = cache in ("e5m2", "int8", "int4")
    assert plan.append == AppendVariant("half" if both else dtype, cache)
    assert plan.variant.cache == cache
    scales = () if cache in ("int8", "int4") else (2, 1)
    assert plan.append_scalars == (1, *scales, int(dtype == "bf16"))
    assert plan_decode(replace(p, appends=False)).append is None
