"""On a GPU every sampling op draws the ids of its reference, bit for bit, however a row is split."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sampling_gpu_cases import (
    FLOATS,
    OPS,
    assert_draws_as_the_reference,
    assert_same_probabilities,
    distributions,
    keys,
    normal,
    on_cpu,
)

from kestrel_runtime.testing import by_reference, canary, large_allocation
from kestrel_sampling import (
    _launch,
    sample_from_logits,
    softmax,
    top_k_renorm_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from kestrel_sampling._parameters import Keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


# ---- the same draw ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [1.0, 3.0, 12.0])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((rows, width) for rows in (1, 3, 32) for width in (1, 7, 111, 1024, 4097)),
        *((rows, width) for rows in (1, 3) for width in (51200, 151936)),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_draws_the_ids_of_the_reference(op: str, rows: int, width: int, sharpness: float) -> None:
    assert_draws_as_the_reference(OPS[op], distributions(rows, width, rows, sharpness))


@pytest.mark.parametrize(("rows", "width"), [(1, 51200), (4, 51200), (200, 128256), (32, 4097)])
def test_all_warps_decide_alike_about_masses_that_float_sums_cannot_tell_from_top_p(rows: int, width: int) -> None:
    probs = torch.full((rows, width), 0.2 / (width - 2), device="cuda")
    probs[:, 0], probs[:, 1] = 0.5, 0.3  # entry 1 is kept where top_p is above 0.5
    for step in range(48):
        near = 0.5 + 2e-6 * (step - 8) + 1e-8 * torch.arange(rows, device="cuda")
        assert_draws_as_the_reference(partial(top_p_sampling_from_probs, top_p=near), probs, keys(rows, step))


def draws_of_blocks(probs: torch.Tensor, top_p: torch.Tensor, key: dict[str, torch.Tensor], blocks: int) -> Any:
    return _launch.draw("op", probs, Keys(key["seed"], 0, key["offset"], 0), top_p=(top_p, 1.0), blocks=blocks)


@pytest.mark.parametrize(("rows", "blocks"), [(8, 2), (8, 4), (80, 2), (80, 4)])
def test_all_blocks_decide_alike_about_such_masses_with_a_window_and_without(rows: int, blocks: int) -> None:
    width = 20000  # 80 rows of two blocks do not fit into shared memory
    probs = torch.full((rows, width), 0.2 / (width - 2), device="cuda")
    probs[:, 0], probs[:, 1] = 0.5, 0.3
    for step in range(16):
        near, key = 0.5 + 2e-6 * (step - 8) + 1e-8 * torch.arange(rows, device="cuda"), keys(rows, step)
        ids, valid = draws_of_blocks(probs, near, key, blocks)
        assert torch.equal(ids, by_reference(partial(top_p_sampling_from_probs, top_p=near), probs, **key))
        assert bool(valid.all())


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.9, 0.1])
@pytest.mark.parametrize("rows", [32, 60])
def test_a_window_across_blocks_draws_the_ids_of_the_reference(rows: int, top_p: float, sharpness: float) -> None:
    """32 rows of this length take four blocks each, 60 take two; neither fit into shared memory."""
    probs = distributions(rows, 128256, rows, sharpness)
    assert_draws_as_the_reference(partial(top_p_sampling_from_probs, top_p=top_p), probs)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("width", [5003, 20000])
@pytest.mark.parametrize("blocks", [2, 4])
def test_the_window_of_a_cluster_draws_the_ids_of_the_reference(blocks: int, width: int, sharpness: float) -> None:
    rows = 80
    mixed = torch.tensor([0.0, 0.02, 0.1, 0.5, 0.9, 0.99, 1.0], device="cuda").repeat(12)[:rows]
    probs, key = distributions(rows, width, blocks, sharpness), keys(rows)
    ids, valid = draws_of_blocks(probs, mixed, key, blocks)
    assert torch.equal(ids, by_reference(partial(top_p_sampling_from_probs, top_p=mixed), probs, **key))
    assert bool(valid.all())


@pytest.mark.parametrize(("rows", "width"), [(20, 51200), (40, 20001), (100, 51200), (132, 5003), (150, 20001)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["none", "top_p", "top_p_0.1", "both"])
def test_as_many_rows_as_multiprocessors_draw_the_ids_of_the_reference(
    op: str, dtype: torch.dtype, rows: int, width: int
) -> None:
    probs = distributions(rows, width, rows, 1.0) * 20
    assert_draws_as_the_reference(OPS[op], probs.to(dtype))


SHORT_ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "flat": lambda width: distributions(9, width, sharpness=1.0),
    "sharp": lambda width: distributions(9, width, sharpness=12.0),
    "equal": lambda width: torch.full((9, width), 0.25, device="cuda"),
    "two values": lambda width: torch.where(normal(9, width, 1) > 1, 0.5, 0.25),
    "few": lambda width: torch.where(torch.arange(width, device="cuda") % 50 == 3, distributions(9, width), 0.0),
    "tiny": lambda width: distributions(9, width) * 1e-39,
}


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("kind", SHORT_ROWS)
@pytest.mark.parametrize("k", [0, 1, 2, 31, 100, 127, 128, 129])
@pytest.mark.parametrize("width", [32, 129, 2048, 4093, 4095, 4096])
def test_short_rows_draw_the_ids_of_the_reference(width: int, k: int, kind: str, top_p: float, order: str) -> None:
    probs, key = SHORT_ROWS[kind](width), keys(9, k)
    options = {"filter_apply_order": order, "return_valid": True}
    ids, valid = top_k_top_p_sampling_from_probs(probs, k, top_p, **options, **key)
    want, want_valid = by_reference(top_k_top_p_sampling_from_probs, probs, k, top_p, **options, **key)
    assert torch.equal(ids, want), (ids - want).nonzero()[:5]
    assert torch.equal(valid, want_valid)


@pytest.mark.parametrize("op", ["top_k", "both", "both_1000", "joint"])
@pytest.mark.parametrize("width", [16384, 17408, 18432, 19456, 33792, 51200])  # by chunks of 1024, 16 warps
def test_the_last_chunks_of_a_row_that_one_block_reads_count(width: int, op: str) -> None:
    probs = distributions(80, width, 3, 1.0)
    probs[::2, -2048:] *= 30
    probs[3, :-1024] = 0
    probs[4, -1] = math.nan
    probs[5, -1500:] = 1 / width
    probs[6] = 1 / width
    probs[7, -1] = 1
    assert_draws_as_the_reference(OPS[op], probs)
    assert_draws_as_the_reference(OPS[op], probs[:, 1:])
    assert_draws_as_the_reference(OPS[op], probs.half())


@pytest.mark.parametrize("op", OPS)
def test_draws_the_ids_of_the_cpu(op: str) -> None:
    probs, key = distributions(4, 1000).cuda(), keys(4)
    assert torch.equal(OPS[op](probs, **key).cpu(), on_cpu(OPS[op], probs, **key))


@pytest.mark.parametrize("width", [111, 1000, 8190, 51200])
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_half_precision_draws_the_ids_of_the_reference(op: str, dtype: torch.dtype, width: int) -> None:
    assert_draws_as_the_reference(OPS[op], (distributions(3, width) * 50).to(dtype))


ODD_ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "equal": lambda width: torch.full((2, width), 0.25, device="cuda"),
    "two values": lambda width: torch.where(normal(2, width, 1) > 2, 0.5, 0.25),
    "ascending": lambda width: torch.arange(width).float().expand(2, -1).contiguous(),
    "descending": lambda width: torch.arange(width).flip(0).float().expand(2, -1).contiguous(),
    "denormal": lambda width: distributions(2, width) * 1e-39,
    "small": lambda width: distributions(2, width) * 1e-6,
    "above 1": lambda width: distributions(2, width) * 300,
    "huge": lambda width: distributions(2, width) * 3e38,
    "negative entries": lambda width: normal(2, width, 1),
    "one entry": lambda width: torch.nn.functional.one_hot(torch.tensor([0, width - 1]), width).float(),
    "outside": lambda width: torch.cat((distributions(1, width), torch.zeros(1, width, device="cuda"))),
    "one above equal ones": lambda width: torch.nn.functional.one_hot(torch.tensor([0, width - 1]), width) + 1e-9,
    "few values": lambda width: normal(2, width, 1).round().abs(),
    "few with mass": lambda width: distributions(2, width) * (torch.arange(width, device="cuda") % 300 == 0),
    "wide range": lambda width: torch.exp2(-torch.arange(width).float() * 100 / width).flip(0).repeat(2, 1),
}


@pytest.mark.parametrize("width", [111, 4000, 5000, 60000])
@pytest.mark.parametrize("kind", ODD_ROWS)
@pytest.mark.parametrize("op", OPS)
def test_odd_rows_draw_the_ids_of_the_reference(op: str, kind: str, width: int) -> None:
    assert_draws_as_the_reference(OPS[op], ODD_ROWS[kind](width).cuda())


@pytest.mark.parametrize("kind", ODD_ROWS)
@pytest.mark.parametrize("op", ["none", "top_p", "top_p_0.1"])
def test_many_odd_rows_draw_the_ids_of_the_reference(op: str, kind: str) -> None:
    assert_draws_as_the_reference(OPS[op], ODD_ROWS[kind](60000).repeat(80, 1).cuda())


@pytest.mark.parametrize("kind", ["equal", "one above equal ones", "few values", "wide range"])
@pytest.mark.parametrize("op", ["both", "both_1000", "joint"])
def test_rows_longer_than_a_vocabulary_draw_the_ids_of_the_reference(op: str, kind: str) -> None:
    for width in (262_144, 262_145, 1_100_000):
        assert_draws_as_the_reference(OPS[op], ODD_ROWS[kind](width).cuda())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [111, 51200])
def test_rows_without_a_distribution_give_0_and_false_and_leave_the_others_alone(width: int, op: str) -> None:
    nan, inf = math.nan, math.inf
    probs = distributions(12, width)
    for row, place, value in ((1, 0, nan), (3, width - 1, nan), (5, width // 2, inf), (9, 5, -inf)):
        probs[row, place] = value
    probs[7] = 0
    probs[11] = -1
    assert_draws_as_the_reference(OPS[op], probs)


@pytest.mark.parametrize("width", [5000, 51200, 128256])
@pytest.mark.parametrize("op", ["none", "top_p", "both"])
def test_no_split_of_a_row_changes_its_id(op: str, width: int) -> None:
    filters = {"none": {}, "top_p": {"top_p": (None, 0.9)}, "both": {"top_k": (None, 50), "top_p": (None, 0.9)}}[op]
    probs = distributions(5, width, sharpness=1.0).cuda()
    seed, offset = keys(5).values()
    key = Keys(seed, 0, offset, 0)
    want = OPS[op](probs, seed=seed, offset=offset)
    for blocks in (1, 2, 4, 8):
        for threads in (96, 384, 512, 640):
            ids, valid = _launch.draw("op", probs, key, blocks=blocks, threads=threads, **filters)  # type: ignore[arg-type]
            assert torch.equal(ids, want), (blocks, threads)
            assert bool(valid.all())


@pytest.mark.parametrize("width", [1000, 51200])
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_its_batch_and_runs_repeat(op: str, width: int) -> None:
    probs = distributions(300, width, sharpness=2.0)
    key = keys(300)
    ids = OPS[op](probs, **key)
    for _ in range(20):
        assert torch.equal(OPS[op](probs, **key), ids)
    for row in (0, 150, 299):
        alone = OPS[op](probs[row : row + 1], seed=key["seed"][row].item(), offset=key["offset"][row].item())
        assert torch.equal(alone, ids[row : row + 1]), f"row {row}"
    order = torch.randperm(300, device="cuda")
    assert torch.equal(OPS[op](probs[order], **{name: value[order] for name, value in key.items()}), ids[order])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 0.9, 1.0])
@pytest.mark.parametrize(("width", "k"), [(w, k) for w in (1000, 51200) for k in (0, 1, 50, w - 1, w)])
def test_numbers_and_tensors_select_the_same(width: int, k: int, p: float) -> None:
    probs, key = distributions(4, width, sharpness=1.0), keys(4)
    want = top_k_top_p_sampling_from_probs(probs, k, p, **key)
    one = torch.tensor([k]).cuda(), torch.tensor([p]).cuda()
    per_row = torch.tensor([k] * 4, dtype=torch.int32).cuda(), torch.tensor([p] * 4).cuda()
    assert torch.equal(top_k_top_p_sampling_from_probs(probs, *one, **key), want)
    assert torch.equal(top_k_top_p_sampling_from_probs(probs, *per_row, **key), want)


@pytest.mark.parametrize("width", [1000, 51200])
def test_top_p_per_row_is_that_of_each_row_alone(width: int) -> None:
    probs, key = distributions(4, width, sharpness=1.0), keys(4)
    mixed = [0.0, 0.5, 0.9, 1.0]
    alone = [
        top_p_sampling_from_probs(probs[b : b + 1], mixed[b], **{n: v[b : b + 1] for n, v in key.items()})
        for b in range(4)
    ]
    assert torch.equal(top_p_sampling_from_probs(probs, torch.tensor(mixed).cuda(), **key), torch.cat(alone))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: torch.cat((x[:, :3], x, x[:, :2]), 1)[:, 3:-2],
    "rows": lambda x: x.repeat_interleave(2, 0)[::2],
    "one row for all": lambda x: x[:1].expand(x.shape[0], -1),
}


@pytest.mark.parametrize("op", ["none", "both"])
@pytest.mark.parametrize("width", [111, 1024, 51200])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_are_read_in_place(view: str, dtype: torch.dtype, width: int, op: str) -> None:
    assert_draws_as_the_reference(OPS[op], VIEWS[view](distributions(4, width).to(dtype)))


@large_allocation(gib=5)
def test_rows_far_apart() -> None:
    """A row stride past 2^31 elements."""
    width, apart = 5000, 2**31 + 8
    buffer = torch.empty(apart + width, dtype=torch.bfloat16, device="cuda")
    probs = buffer.as_strided((2, width), (apart, 1))
    probs.copy_(distributions(2, width))
    assert_draws_as_the_reference(OPS["top_p"], probs)


@pytest.mark.parametrize("width", [7, 1000, 51200])
@pytest.mark.parametrize("rows", [1, 5])
def test_nothing_is_written_around_the_results(rows: int, width: int) -> None:
    probs = distributions(rows, width)
    ids, ids_intact = canary((rows,), torch.int32, "cuda")
    valid, valid_intact = canary((rows,), torch.bool, "cuda")
    seed, offset = keys(rows).values()
    arguments = (None, 1.0, None, 20, None, 0.9, None, 0.0, False, seed, 0, offset, 0, 0, 0, 0)
    _launch.binary.sample("op", ids, valid, probs, False, *arguments)
    assert torch.equal(ids, top_k_top_p_sampling_from_probs(probs, 20, 0.9, seed=seed, offset=offset))
    ids_intact(), valid_intact()


def test_no_rows() -> None:
    ids, valid = top_p_sampling_from_probs(torch.empty(0, 10, device="cuda"), 0.9, seed=1, return_valid=True)
    assert ids.shape == valid.shape == (0,)


# ---- from logits -----------------------------------------------------------------------------------------------------

LOGITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 50},
    {"temperature": 0.0, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "filter_apply_order": "joint"},
    {"temperature": 0.0, "top_k": 300, "min_p": 0.01},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.7, "top_p": 0.8},
    {"min_p": 0.1},
    {"min_p": 0.01, "top_k": 300, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.7, "filter_apply_order": "joint"},
    {"min_p": 0.01, "top_k": 300, "top_p": 0.6, "filter_apply_order": "joint"},
    {"temperature": 1e30},
    {"temperature": 1e-30, "top_p": 0.5},
]


@pytest.mark.parametrize("width", [1, 111, 1000, 51200])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", LOGITS, ids=str)
def test_logits_draw_the_ids_of_the_reference(options: dict[str, Any], dtype: torch.dtype, width: int) -> None:
    logits = normal(4, width, 3).to(dtype)
    logits[1, : width // 2] = -math.inf
    assert_draws_as_the_reference(partial(sample_from_logits, **options), logits)


@pytest.mark.parametrize("width", [1000, 51200])
def test_every_row_of_logits_has_filters_of_its_own(width: int) -> None:
    rows = 96
    row = torch.arange(rows, device="cuda")
    options = {
        "temperature": torch.tensor([0.0, 0.7, -1.0, 0.7], device="cuda")[row % 4],
        "top_k": torch.tensor([50, 0, 1, 2, 300, width], device="cuda")[row // 4 % 6],
        "top_p": torch.tensor([1.0, 0.9, 0.1, 0.0], device="cuda")[row // 24],
        "min_p": torch.tensor([0.0, 0.01, 0.3], device="cuda")[row % 3],
    }
    options["temperature"][7::24] = math.nan
    logits, key = normal(rows, width, 6), keys(rows)
    for order in ("top_k_first", "joint"):
        for names in (tuple(options), ("temperature", "top_k"), ("temperature", "top_p"), ("temperature", "min_p")):
            given = {name: options[name] for name in names}
            got = sample_from_logits(logits, **given, filter_apply_order=order, **key)
            want = by_reference(sample_from_logits, logits, **given, filter_apply_order=order, **key)
            assert torch.equal(got, want), (names, (got - want).nonzero()[:5])
            cold = options["temperature"] <= 0
            assert torch.equal(got[cold].long(), logits[cold].argmax(1))


def test_logits_draw_what_their_softmax_draws_but_for_rounding(record_property: Callable[..., None]) -> None:
    logits = normal(4096, 1000, 5).cuda()
    key = keys(4096)
    for options in ({}, {"top_p": 0.9}, {"top_k": 50}):
        got = sample_from_logits(logits, **options, **key)
        want = on_cpu(sample_from_logits, logits, **options, **key)
        differ = (got.cpu() != want).float().mean().item()
        record_property(f"differ {options}", differ)
        print(f"draws from logits that differ between GPU and CPU, {options}: {differ:.5f}")
        assert differ < 1e-3  # exponentials differ in their last bit


def test_logits_without_a_largest_give_0_and_false() -> None:
    logits = normal(5, 2000, 2)
    logits[0] = -math.inf
    logits[2, 5] = math.nan
    logits[3, 1999] = math.inf
    ids, valid = sample_from_logits(logits.cuda(), top_p=0.9, return_valid=True, **keys(5))
    assert valid.tolist() == [False, True, False, False, True]
    assert [ids[i].item() for i in (0, 2, 3)] == [0, 0, 0]


# ---- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("width", [1, 111, 1024, 51200, 151936])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_is_as_accurate_as_torch(dtype: torch.dtype, width: int, temperature: float) -> None:
    logits = normal(3, width, 4).to(dtype)
    exact = torch.softmax(logits.double() / temperature, -1)
    ours = (softmax(logits, temperature).double() - exact).norm()
    theirs = (torch.softmax(logits.float() / temperature, -1).double() - exact).norm()
    assert ours <= 1.1 * theirs + 1e-9


@pytest.mark.parametrize(
    ("op", "value"),
    [
        *((softmax, value) for value in (0.7, 0.0)),
        *((top_p_renorm_probs, value) for value in (0.8, 0.0, 1.0)),
        *((top_k_renorm_probs, value) for value in (40, 0)),
    ],
)
@pytest.mark.parametrize("width", [111, 1024, 51200])
def test_probabilities_equal_the_reference(width: int, op: Callable[..., torch.Tensor], value: float) -> None:
    x = normal(5, width, 4) if op is softmax else distributions(5, width)
    x[1] = 0
    x[2, 3] = math.nan
    x[4, 0] = -math.inf
    got = op(x, value)
    assert_same_probabilities(got, by_reference(op, x, value))
    in_place = x.clone()
    assert op(in_place, value, out=in_place) is in_place
    assert torch.equal(in_place.nan_to_num(7), got.nan_to_num(7))


def test_top_p_off_keeps_entries_too_small_to_have_mass() -> None:
    probs = torch.softmax(normal(2, 4097, 3, 8.0), -1)
    assert torch.equal(top_p_renorm_probs(probs, 1.0) > 0, probs > 0)
