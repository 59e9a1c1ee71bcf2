"""Sinks in the reference, and the plan of a prefill call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, prefill
from kestrel_attention.arguments import Dense, Packed
from kestrel_attention.kernels.constants import SPLIT_ROWS
from kestrel_attention.kernels.prefill_variants import (
    PREFILL,
    PREFILL_FP8,
    PREFILL_HOPPER,
    Fp8PrefillVariant,
    HopperPrefillVariant,
    PrefillVariant,
    prefilling,
    prefilling_in_full,
)
from kestrel_attention.prefill_plan import PrefillProblem, plan_prefill, section_heads
from kestrel_runtime import UnsupportedError


def problem(**how: Any) -> PrefillProblem:
    """One sequence of 100 queries and keys and four heads of 64, unless told otherwise."""
    usual = {"batch": 1, "max_queries": 100, "max_keys": 100, "heads": 4, "kv_heads": 2, "head_dim": 64}
    given = usual | {"page_size": 100, "dtype": "bf16"} | how
    if given.get("packed_queries"):  # not all as long as the longest, unless told otherwise
        given = {"total_queries": given["batch"] * given["max_queries"] - 1} | given
    return PrefillProblem(**given)


# -- sinks ------------------------------------------------------------------------------------------------------------


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From attention without sinks, out [Sq, H, D] and lse [H, Sq] in float64."""
    both = torch.logaddexp(lse, sinks.double()[:, None].expand_as(lse))
    return out * torch.exp(lse - both).T[..., None], both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (1, 0), "softcap": 2.0}], ids=str)
def test_a_sink_counts_in_the_sum_of_exponentials(in_float64, assert_attends, how, dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    sinks = (3 * torch.randn(4)).to(dtype)
    starts_q, starts_k, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 14], [0, 5, 10], [5, 5]))
    given = {**how, "sinks": sinks, "return_lse": True}
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts_q, starts_k, 7, 5, **given)
    cached = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **given)
    for b in range(2):
        rename = {"window": how.get("window_size", (-1, -1))} | {x: how[x] for x in ("causal", "softcap") if x in how}
        exact = with_sinks(*in_float64(q[b], k[b], v[b], **rename), sinks)
        rows = slice(7 * b, 7 * b + 7)
        for out, lse in (
            [x[b] for x in flash_attn_func(q, k, v, **given)],
            (packed[0][rows], packed[1][:, rows]),
            [x[b] for x in cached],
        ):
            assert_attends(out, lse, *exact, v[b])


def test_a_query_without_keys_has_the_sink_alone():
    q, cache = torch.ones(1, 2, 2, 8), torch.ones(1, 4, 1, 8)
    given = {"sinks": torch.tensor([0.5, -math.inf]), "return_lse": True}
    no_lengths = torch.zeros(1, dtype=torch.int32)
    for out, lse in (
        flash_attn_func(q, cache[:, :0], cache[:, :0], **given),
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=no_lengths, **given),
    ):
        assert not out.any()
        assert lse[0].tolist() == [[0.5, 0.5], [-math.inf, -math.inf]]


def test_rows_of_no_sequence_have_no_sink():
    q, starts = torch.ones(4, 2, 8), torch.tensor([1, 3], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, q, q, starts, starts, 2, 2, sinks=torch.zeros(2), return_lse=True)
    assert not out[[0, 3]].any()
    assert bool((lse[:, [0, 3]] == -math.inf).all())


def test_appending_with_sinks_attends_to_what_was_appended(in_float64, assert_attends):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)
    caches, sinks = torch.zeros(2, 1, 6, 1, 8), torch.tensor([1.0, -2.0])
    given = {"cache_seqlens": torch.zeros(1, dtype=torch.int32), "causal": True, "return_lse": True}
    out, lse = flash_attn_with_kvcache(q, *caches, k, v, sinks=sinks, **given)
    assert_attends(out[0], lse[0], *with_sinks(*in_float64(q[0], k[0], v[0], causal=True), sinks), v)


def test_a_paged_sequence_is_cut_at_max_seqlen_k():
    torch.manual_seed(0)
    q, cache = torch.randn(3, 1, 8), torch.randn(3, 4, 1, 8)
    starts, table = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    given = (cache, cache, starts, None, 3)
    how = {"block_table": table, "seqused_k": torch.tensor([6], dtype=torch.int32)}
    want = flash_attn_varlen_func(q, *given, 5, **how | {"seqused_k": torch.tensor([5], dtype=torch.int32)})
    assert torch.equal(flash_attn_varlen_func(q, *given, 5, **how), want)


# -- the plan of a prefill call ---------------------------------------------------------------------------------------


def test_the_portable_kernel_takes_no_list_of_a_sequence_with_blocks_past_all():
    """A listed work of no block of rows is PAST_ALL_BLOCKS: 2^28 rows where blocks have 64."""
    given = {"batch": 9, "packed_queries": True, "total_queries": 2**28 + 9, "heads": 1, "kv_heads": 1, "head_dim": 512}
    assert plan_prefill(problem(**given, max_queries=2**28)).scalars.listed_works > 0
    with pytest.raises(UnsupportedError, match="268435456 queries"):
        plan_prefill(problem(**given, max_queries=2**28 + 1))
    plan_prefill(problem(**given | {"head_dim": 64}, max_queries=2**28 + 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("cache", ["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_a_head_dimension_takes_the_smallest_kernel_that_holds_it(head_dim, cache, dtype):
    plan = plan_prefill(problem(head_dim=head_dim, dtype=dtype, cache=cache))
    variant = plan.variant
    assert (variant.dtype, variant.cache) == (dtype, "same" if cache == "same" else "fp8")
    assert variant.head_dim == min(v.head_dim for v in PREFILL if v.cache == variant.cache and v.head_dim >= head_dim)
    assert plan.scalars.codes_are_e5m2 == (cache == "e5m2")


@pytest.mark.parametrize(
    ("head_dim", "cache"), [(4, "same"), (100, "same"), (520, "same"), (72, "e4m3"), (512, "e5m2")]
)
def test_other_head_dimensions_have_no_kernel(head_dim, cache):
    for given in ({}, {"hopper": True}):
        with pytest.raises(UnsupportedError, match=f"heads of {head_dim}"):
            plan_prefill(problem(head_dim=head_dim, cache=cache, **given))


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    ("batch", "how", "rows"),
    [
        (1, {"max_queries": 729, "max_keys": 729, "heads": 16}, 128),  # one wave of both
        (2, {"max_queries": 729, "max_keys": 729, "heads": 16}, 192),  # of 192 queries alone
        (13, {"max_queries": 729, "max_keys": 729, "heads": 16}, 192),
        (1, {"max_queries": 740, "max_keys": 740, "heads": 32, "causal": True}, 128),
        (1, {"max_queries": 740, "max_keys": 740, "heads": 32, "causal": True, "prefix_len": 730}, 192),
    ],
)
def test_a_call_takes_the_thread_blocks_that_end_first(head_dim, batch, how, rows):
    given = {"has_boxes": True, "hopper": True, "kv_heads": how["heads"], "head_dim": head_dim}
    variant = plan_prefill(problem(batch=batch, **given | how)).variant
    assert variant.block_rows == (64 if (rows, head_dim) == (128, 64) else rows)  # two of those on an SM
    assert variant.ctas_per_sm == (2 if variant.block_rows == 64 else 1)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"head_dim": 72}, "full_d72_x2_f64"),
        ({"head_dim": 72, "batch": 2}, "full_d72_x3_f64"),
        ({"head_dim": 72, "batch": 2, "max_keys": 740}, "full_d72_x3_f96"),
        ({"head_dim": 72, "batch": 13, "max_keys": 1}, "full_d72_x3_f64"),
        ({"head_dim": 64}, ""),
        ({"head_dim": 80, "max_keys": 1024}, "full_d80_x2_f64"),
        ({"head_dim": 88}, ""),
        ({"head_dim": 72, "causal": True}, ""),
        ({"head_dim": 72, "window_left": 5}, ""),
        ({"head_dim": 72, "softcap": 2.0}, ""),
        ({"head_dim": 72, "has_sinks": True}, ""),
        ({"head_dim": 72, "softmax_scale": -1.0}, ""),
        ({"head_dim": 72, "has_lengths": True}, ""),
        ({"head_dim": 72, "packed_queries": True}, ""),
        ({"head_dim": 72, "has_boxes": False}, ""),
    ],
    ids=str,
)
def test_dense_queries_that_see_every_key_have_a_kernel_for_the_heads_of_vision_encoders(how, name):
    given = {"max_queries": 729, "max_keys": 729, "heads": 16, "kv_heads": 16, "has_boxes": True, "hopper": True}
    plan = plan_prefill(problem(**given | how))
    assert plan.variant.name.endswith(name) if name else "full" not in plan.variant.name
    if name:
        assert (plan.scalars.max_blocks, plan.scalars.has_counter, plan.scalars.num_splits) == (132, 0, 1)


@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("keys", range(1, 200))
def test_the_first_tile_holds_the_keys_that_others_do_not(keys, head_dim):
    variants = prefilling_in_full("bf16", head_dim, keys)
    assert sorted(v.consumers for v in variants) == [2, 3]
    for v in variants:
        tiles = -(-keys // v.key_tile)
        assert 0 < keys - (tiles - 1) * v.key_tile <= v.first_tile


def test_packed_sequences_are_of_unknown_lengths():
    given = {"max_queries": 729, "max_keys": 729, "heads": 16, "kv_heads": 16, "has_boxes": True, "hopper": True}
    assert plan_prefill(problem(batch=2, packed_queries=True, **given)).variant.block_rows == 128


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("cache", ["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_hopper_has_a_kernel_for_every_head_dimension_of_the_portable_one(head_dim, cache, dtype):
    portable, variant = (
        plan_prefill(problem(head_dim=head_dim, dtype=dtype, cache=cache, hopper=hopper)).variant
        for hopper in (False, True)
    )
    assert isinstance(portable, PrefillVariant)
    assert isinstance(variant, HopperPrefillVariant)
    assert (variant.dtype, variant.cache, variant.head_dim) == (portable.dtype, portable.cache, portable.head_dim)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_fp8_queries_and_keys_take_fp8_products_on_hopper(head_dim):
    given = {"head_dim": head_dim, "cache": "e4m3", "fp8_queries": True}
    variant = plan_prefill(problem(**given, hopper=True)).variant
    covered = [v.head_dim for v in PREFILL_FP8 if v.head_dim >= head_dim]
    assert isinstance(variant, Fp8PrefillVariant) == bool(covered)
    assert variant.head_dim == min(covered, default=256)
    others = ({"hopper": False}, {"cache": "e5m2"}, {"fp8_queries": False})
    for other in others:
        assert not isinstance(plan_prefill(problem(**given | {"hopper": True} | other)).variant, Fp8PrefillVariant)


@pytest.mark.parametrize(
    ("batch", "head_dim", "persistent"), [(1, 128, False), (66, 128, False), (67, 128, True), (1000, 256, False)]
)
def test_long_calls_are_persistent_where_queries_have_two_buffers(batch, head_dim, persistent):
    scalars = plan_prefill(problem(batch=batch, head_dim=head_dim, hopper=True)).scalars
    assert scalars.max_blocks == (132 if persistent else 2**31 - 1)


@pytest.mark.parametrize(("batch", "long"), [(197, False), (198, True)])
def test_six_waves_of_blocks_are_a_long_call(batch, long):
    """Where one block after another fills the GPU; calls of few heads are split instead."""
    assert plan_prefill(problem(batch=batch, max_queries=128 * 33, heads=4, hopper=True)).variant.length == "long"
    packed = {"max_queries": 512, "heads": 1, "kv_heads": 1, "packed_queries": True}
    assert plan_prefill(problem(batch=batch, **packed, hopper=True)).variant.length == ("long" if long else "")


@pytest.mark.parametrize(
    ("how", "boxes"),
    [
        ({}, True),
        ({"page_size": 7}, True),
        ({"has_boxes": False}, False),
        ({"page_size": 16, "has_block_table": True}, True),
        ({"page_size": 48, "has_block_table": True}, True),
        ({"page_size": 1, "has_block_table": True}, False),
        ({"page_size": 24, "has_block_table": True}, False),
        ({"cache": "e4m3"}, True),
        ({"cache": "e5m2", "page_size": 1, "has_block_table": True}, False),
        ({"packed_queries": True, "key_starts": 1}, True),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 256])
def test_tma_loads_keys_of_which_each_16_follow_one_another(head_dim, how, boxes):
    given = {"head_dim": 80 if head_dim == 72 and "cache" in how else head_dim, "has_boxes": True, "hopper": True}
    variant = plan_prefill(problem(**given | how)).variant
    assert isinstance(variant, HopperPrefillVariant)
    assert variant.boxes is boxes
    assert not getattr(plan_prefill(problem(**given | how | {"hopper": False})).variant, "boxes", False)


@pytest.mark.parametrize(("head_dim", "page_size", "boxes"), [(64, 16, False), (128, 16, True), (128, 24, False)])
def test_tma_loads_keys_for_e4m3_products_of_large_heads(head_dim, page_size, boxes):
    given = {"head_dim": head_dim, "page_size": page_size, "has_block_table": True, "has_boxes": True, "hopper": True}
    assert plan_prefill(problem(**given, cache="e4m3", fp8_queries=True)).variant.boxes is boxes


@pytest.mark.parametrize(
    ("how", "counted"),
    [
        ({"causal": True}, True),
        ({"window_left": 50}, True),
        ({"packed_queries": True}, True),
        ({}, False),
        ({"causal": True, "batch": 131}, False),  # fewer than four waves
        ({"causal": True, "head_dim": 256}, False),  # not persistent
        ({"causal": True, "hopper": False}, False),
    ],
)
def test_long_calls_of_unequal_works_count_them(how, counted):
    given = {"batch": 132, "heads": 200, "max_queries": 128, "max_keys": 4096, "hopper": True}
    given |= {"heads": 4} if how.get("batch") == 131 else {}
    plan = plan_prefill(problem(**given | how))
    assert plan.scalars.has_counter == counted
    assert not (plan.scalars.has_counter and plan.scalars.num_splits > 1)


@pytest.mark.parametrize("heads", [4, 200])
def test_a_batch_of_any_size_is_split_alike(heads):
    given = {"max_keys": 8192, "heads": heads, "hopper": True}
    plans = [plan_prefill(problem(batch=batch, **given)) for batch in (1, 2, 64, 5000)]
    assert len({(plan.scalars.split_limit, plan.scalars.num_splits) for plan in plans}) == 1
    assert [plan.variant.length == "long" for plan in plans] == [False, False, heads == 200, heads == 200]
    assert len({plan.variant.key_tile for plan in plans}) == 1


@pytest.mark.parametrize(
    ("how", "limit", "splits"),
    [
        ({"heads": 32, "max_queries": 128, "max_keys": 8192}, 4, 4),
        ({"heads": 32, "max_queries": 512, "max_keys": 8192}, 1, 1),
        ({"heads": 16, "max_queries": 512, "max_keys": 8192}, 2, 2),
        ({"heads": 2, "max_queries": 17, "max_keys": 8192}, 16, 16),
        ({"heads": 2, "max_queries": 17, "max_keys": 1000}, 16, 2),
        ({"heads": 2, "max_queries": 17, "max_keys": 1000, "head_dim": 256}, 16, 4),
        ({"heads": 2, "max_queries": 17, "max_keys": 8192, "packed_queries": True, "batch": 3}, 0, 16),
        ({"heads": 32, "max_queries": 512, "max_keys": 8192, "packed_queries": True, "batch": 3}, 0, 4),
        ({"heads": 67, "kv_heads": 67, "max_queries": 17, "max_keys": 8192, "packed_queries": True, "batch": 3}, 1, 1),
        ({"heads": 2, "max_queries": 17, "max_keys": 512, "packed_queries": True, "batch": 3}, 1, 1),
        ({"heads": 32, "max_queries": 128, "max_keys": 8192, "packed_queries": True, "batch": 1}, 4, 4),
        ({"heads": 2, "max_queries": 17, "max_keys": 8192, "hopper": False}, 1, 1),
    ],
)
def test_few_queries_are_split_along_their_keys(how, limit, splits):
    scalars = plan_prefill(problem(**{"hopper": True} | how)).scalars
    assert (scalars.split_limit, scalars.num_splits) == (limit, splits)


@pytest.mark.parametrize("variant", PREFILL_HOPPER, ids=lambda v: v.name)
def test_hopper_kernels_fit_registers_and_shared_memory(variant):
    stored = 2 if variant.cache == "same" else 1
    row = -(-variant.head_dim * 2 // 128) * 128  # in column blocks of 128 bytes
    queries = variant.query_buffers * variant.block_rows // variant.thread_blocks * row
    stages = (1 if variant.is_wide else variant.num_stages) * 2 * variant.key_tile * row
    weights = 2 * 64 * 2 * variant.key_tile if variant.is_wide else 0
    codes = 2 * variant.key_tile * variant.head_dim * (2 - stored)
    assert queries + stages + weights + codes + 3072 <= 227 * 1024
    registers = variant.producer_registers + variant.consumers * variant.consumer_registers
    at_launch = 65536 // (128 * (1 + variant.consumers)) // 8 * 8  # of a thread, and all that a block ever has
    assert registers <= (1 + variant.consumers) * at_launch, "setmaxnreg would wait forever"


@pytest.mark.parametrize("variant", PREFILL_FP8, ids=lambda v: v.name)
def test_fp8_kernels_fit_registers_and_shared_memory(variant):
    queries = variant.query_buffers * variant.consumers * 64 * variant.head_dim
    tiles = (2 * variant.num_stages + variant.staging) * variant.key_tile * variant.head_dim
    assert queries + tiles + 2048 <= 227 * 1024
    assert variant.key_tile == 4 * 32  # a producer warp transposes 32 keys
    assert 1 <= variant.staging - 1 <= variant.num_stages  # values lag behind keys by so many tiles
    assert 128 * (variant.producer_registers + variant.consumers * variant.consumer_registers) <= 65536


@pytest.mark.parametrize("how", [{"batch": 65536}, {"max_keys": 2**29 + 1}, {"heads": 131072, "kv_heads": 131072}])
def test_more_than_a_grid_holds_is_refused(how):
    with pytest.raises(UnsupportedError, match="kernels cover"):
        plan_prefill(problem(**{"max_keys": 2**20} | how))


@pytest.mark.parametrize(
    ("how", "fits"),
    [
        ({"batch": 65535}, True),
        ({"max_keys": 2**29}, True),
        ({"max_queries": 2**29 + 1, "heads": 2}, False),
        ({"max_queries": 2**29 - 1}, True),  # four heads of both KV heads run together
        ({"max_queries": 2**29}, False),
        ({"heads": 65535, "kv_heads": 65535, "max_keys": 2**16}, True),
        ({"heads": 65536, "kv_heads": 65536, "max_keys": 2**16}, False),
        ({"heads": 65536, "kv_heads": 65536, "max_keys": 2**15}, True),  # two run together
        ({"max_queries": 2**22, "batch": 2**7 - 1, "hopper": True}, True),
        ({"max_queries": 2**22, "batch": 2**7, "hopper": True}, False),
        ({"max_queries": 2**22, "batch": 2**7}, True),
    ],
    ids=str,
)
def test_calls_at_the_limits_of_32_bit_numbers_and_grids(how, fits):
    if fits:
        assert plan_prefill(problem(**how)).scalars.num_splits >= 1
    else:
        with pytest.raises(UnsupportedError):
            plan_prefill(problem(**how))


def test_kernels_that_split_dense_keys_have_blocks_of_128_rows():
    for head_dim in range(16, 257, 16):
        for batch, queries, heads in ((1, 40, 2), (300, 128, 2), (5000, 100, 20), (1, 1000, 8)):
            sizes = {"batch": batch, "max_queries": queries, "max_keys": 8192, "heads": heads, "head_dim": head_dim}
            plan = plan_prefill(problem(**sizes, hopper=True))
            assert plan.scalars.num_splits > 1
            assert plan.variant.block_rows == SPLIT_ROWS


@pytest.mark.parametrize(
    ("softcap", "scale", "expected"),
    [
        (0.0, 2.0**-130, 2.0**-126),
        (0.0, 2.0**130, 2.0**126),
        (0.0, 2.0**-126, 2.0**-126),
        (8.0, 0.5, 0.125),
        (2.0**-50, 2.0**-41, 1.0),  # a smaller soft cap has no finite reciprocal
        (2.0**-50, 2.0**100, 2.0**126),
        (2.0**61, 0.5, 0.5),  # a larger soft cap is none
    ],
)
def test_scores_are_scaled_by_a_normal_number(softcap, scale, expected):
    assert plan_prefill(problem(softcap=softcap, softmax_scale=scale)).scalars.softmax_scale == expected


@pytest.mark.parametrize("name", ["window_left", "window_right", "prefix_len"])
def test_windows_and_prefixes_that_do_not_end_stay_in_32_bits(name):
    unbounded = 2**30 if name == "prefix_len" else -1
    for value, expected in ((2**30 - 1, 2**30 - 1), (2**30, 2**30), (2**30 + 1, unbounded), (2**40, unbounded)):
        assert getattr(plan_prefill(problem(**{name: value})).scalars, name) == expected


@pytest.mark.parametrize(("keys", "heads"), [(100, 32), (10**4, 8 * 4), (50_000, 4), (10**6, 4)])
def test_heads_run_together_as_far_as_l2_holds_their_keys(keys, heads):
    found = section_heads(problem(max_keys=keys, heads=32, kv_heads=8, head_dim=64))
    assert 32 % found == 0
    assert found == heads


def test_heads_that_run_together_divide_all_heads():
    """L2 holds the keys of four of six KV heads, which have two query heads each."""
    assert section_heads(problem(max_keys=20_000, heads=12, kv_heads=6, head_dim=64)) == 2 * 3


@pytest.mark.parametrize(("scale", "signs"), [(None, 0), (0.5, 0), (-0.5, 0x80008000), (0.0, 0)])
def test_a_negative_scale_flips_the_queries(scale, signs):
    scalars = plan_prefill(problem(softmax_scale=scale)).scalars
    assert scalars.query_signs == signs
    assert scalars.softmax_scale > 0
    assert scalars.softmax_scale == pytest.approx(0.125 if scale is None else abs(scale), abs=1e-30)


def test_a_causal_mask_is_a_window_that_ends_at_the_query():
    scalars = plan_prefill(problem(causal=True, window_left=2**40, window_right=7)).scalars
    assert (scalars.window_left, scalars.window_right) == (-1, 0)


@pytest.mark.parametrize(
    ("batch", "queries", "short"), [(1, 740, True), (66, 128, True), (66, 129, False), (67, 100, False)]
)
def test_calls_of_few_blocks_take_small_ones(batch, queries, short):
    assert plan_prefill(problem(batch=batch, max_queries=queries)).variant.short == short


def test_no_kernel_is_larger_than_its_head_dimension_needs():
    assert prefilling("bf16", "same", 257).head_dim == 512
    assert prefilling("bf16", "same", 513) is None
    assert prefilling("bf16", "fp8", 257) is None
    assert prefilling("bf16", "fp8", 1).head_dim == 64


@pytest.mark.parametrize("far_one", ["k", "v"])
def test_keys_and_values_beyond_32_bit_offsets_are_refused(far_one):
    near = torch.empty(2, 256, 1, 64, dtype=torch.bfloat16, device="meta")
    far = torch.empty_strided((2, 256, 1, 64), (2**35, 64, 64, 1), dtype=torch.bfloat16, device="meta")
    numbers = (None, False, -1, -1, 0.0, 0, None)
    keys = {"k": near, "v": near} | {far_one: far}
    with pytest.raises(UnsupportedError, match="64 GB"):
        prefill.make_dense(None, near, **keys, given=Dense.of(*numbers, None, None, None))

    starts = torch.empty(2, dtype=torch.int32, device="meta")
    given = Packed.of(starts, starts, 2, 2, *numbers, None, None, None, None, None)
    with pytest.raises(UnsupportedError, match="64 GB"):
        prefill.make_packed(None, near[0], **{name: x[:, 0] for name, x in keys.items()}, given=given)
