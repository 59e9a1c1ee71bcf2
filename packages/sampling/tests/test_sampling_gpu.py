"""On a GPU every sampling op draws the ids of its reference, bit for bit, however a row is split."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kestrel_runtime import backend
from kestrel_runtime.testing import RandomCase, by_reference, canary, compare_at_random, graph_replay
from kestrel_sampling import (
    _launch,
    min_p_sampling_from_probs,
    sample_from_logits,
    sampling_from_probs,
    softmax,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from kestrel_sampling._parameters import _GENERATOR_KEY, Keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS: dict[str, Callable[..., Any]] = {
    "none": sampling_from_probs,
    "top_p": lambda probs, **key: top_p_sampling_from_probs(probs, 0.9, **key),
    "top_p_0.1": lambda probs, **key: top_p_sampling_from_probs(probs, 0.1, **key),
    "top_p_0": lambda probs, **key: top_p_sampling_from_probs(probs, 0.0, **key),
    "top_k": lambda probs, **key: top_k_sampling_from_probs(probs, 50, **key),
    "top_k_1": lambda probs, **key: top_k_sampling_from_probs(probs, 1, **key),
    "both": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 50, 0.9, **key),
    "both_1000": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 1000, 0.9, **key),
    "many": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 9000, 0.8, **key),
    "joint": lambda probs, **key: top_k_top_p_sampling_from_probs(probs, 50, 0.3, filter_apply_order="joint", **key),
    "min_p": lambda probs, **key: min_p_sampling_from_probs(probs, 0.05, **key),
}


def on_cpu(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    moved = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
    keys = {name: a.cpu() if isinstance(a, torch.Tensor) else a for name, a in kwargs.items()}
    with backend("auto"):
        return op(*moved, **keys)


def normal(rows: int, width: int, seed: int, sharpness: float = 3.0) -> torch.Tensor:
    return sharpness * torch.randn(rows, width, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def distributions(rows: int, width: int, seed: int = 7, sharpness: float = 3.0) -> torch.Tensor:
    return torch.softmax(normal(rows, width, seed, sharpness), -1)


def keys(rows: int, first: int = 7) -> dict[str, torch.Tensor]:
    return {"seed": (torch.arange(rows) * 7919 - first).cuda(), "offset": (torch.arange(rows) * 5 + first).cuda()}


def assert_draws_as_the_reference(
    op: Callable[..., Any], probs: torch.Tensor, key: dict[str, torch.Tensor] | None = None
) -> None:
    key = key or keys(probs.shape[0])
    ids, valid = op(probs, return_valid=True, **key)
    want, want_valid = by_reference(op, probs, return_valid=True, **key)
    assert torch.equal(valid, want_valid)
    assert torch.equal(ids, want), (ids - want).nonzero()[:5]


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
@pytest.mark.parametrize("top_p", [0.02, 0.6, 1.0])
@pytest.mark.parametrize("kind", SHORT_ROWS)
@pytest.mark.parametrize("width", [32, 129, 2048, 4093, 4095, 4096])
def test_short_rows_draw_the_ids_of_the_reference(width: int, kind: str, top_p: float, order: str) -> None:
    probs = SHORT_ROWS[kind](width)
    for k in (0, 1, 2, 31, 100, 127, 128, 129):
        key, options = keys(9, k), {"filter_apply_order": order, "return_valid": True}
        ids, valid = top_k_top_p_sampling_from_probs(probs, k, top_p, **options, **key)
        want, want_valid = by_reference(top_k_top_p_sampling_from_probs, probs, k, top_p, **options, **key)
        assert torch.equal(ids, want), f"k = {k}: {(ids - want).nonzero()[:5]}"
        assert torch.equal(valid, want_valid), f"k = {k}"


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
    _launch._binary.sample("op", ids, valid, probs, False, *arguments)
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


def assert_same_probabilities(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """The same entries are kept. Kernels compute weights and their sum with 48 bits or more: results are rounded once,
    and 2e-6 covers the exponentials of softmax."""
    assert torch.equal(got > 0, want > 0), f"{what}: {int(((got > 0) != (want > 0)).sum())} entries"
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}")


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


# ---- graphs, streams, the launch before ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1024, 51200])
@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_sees_new_probabilities_and_keys(op: str, width: int) -> None:
    first, second = ([distributions(4, width, n), *(v + n for v in keys(4).values())] for n in (7, 70))
    run = lambda probs, seed, offset: OPS[op](probs, seed=seed, offset=offset)  # noqa: E731
    got = graph_replay(run, first, [x.clone() for x in second])
    assert torch.equal(got, run(*second))


def test_a_replayed_graph_draws_new_numbers_when_the_offset_is_advanced() -> None:
    probs = torch.ones(64, 1000, device="cuda")
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    seed = torch.arange(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset)
    with torch.cuda.graph(graph):
        ids = top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset)
        offset += 1
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(ids.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=2))


@pytest.mark.parametrize("written", ["probs", "top_p", "top_k", "seed", "offset"])
def test_what_the_previous_launch_writes_is_read_after_the_wait(written: str) -> None:
    """In a graph of 1000 calls, the kernel before each call writes one of its inputs."""
    sources = [distributions(2, 8192, n, 1.0).cuda() for n in range(4)]
    probs, p, k = sources[0].clone(), torch.ones(2).cuda(), torch.zeros(2, dtype=torch.int64).cuda()
    seed, offset = keys(2).values()
    new = {
        "probs": (probs, sources),
        "top_p": (p, [torch.full((2,), n).cuda() for n in (0.2, 0.5, 0.8, 1.0)]),
        "top_k": (k, [torch.full((2,), n).cuda() for n in (1, 20, 500, 0)]),
        "seed": (seed, [torch.full((2,), n).cuda() for n in (1, 2, 3, 4)]),
        "offset": (offset, [torch.full((2,), n).cuda() for n in (1, 2, 3, 4)]),
    }

    def call() -> torch.Tensor:
        return top_k_top_p_sampling_from_probs(probs, k, p, seed=seed, offset=offset)

    target, values = new[written]
    want = []
    for value in values:
        target.copy_(value)
        want.append(call().clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = []
        for value in values:
            target.copy_(value)
            got.append(call())
    for replay in range(250):
        graph.replay()
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(one, other), f"replay {replay}, call {index}"


def test_a_second_stream() -> None:
    probs = distributions(8, 51200).cuda()
    key = keys(8)
    want = OPS["both"](probs, **key)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = OPS["both"](probs, **key)
    side.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("op", ["top_p", "both", "min_p"])
def test_compiles_into_one_graph(op: str) -> None:
    probs = distributions(4, 1000).cuda()
    key = keys(4)
    compiled = torch.compile(lambda probs, seed, offset: OPS[op](probs, seed=seed, offset=offset), fullgraph=True)
    assert torch.equal(compiled(probs, **key), OPS[op](probs, **key))


def test_a_capture_needs_tensors_for_its_key() -> None:
    probs: Any = distributions(2, 100).cuda()
    with pytest.raises(ValueError, match="seed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        top_p_sampling_from_probs(probs, 0.9, seed=1, offset=0)
    torch.cuda.synchronize()


def test_a_generator_gives_its_counter_as_offsets_and_moves_on_without_synchronising() -> None:
    probs, generator = torch.ones(63, 1000, device="cuda"), torch.Generator("cuda").manual_seed(2**63 + 5)
    counter = generator.get_offset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = sampling_from_probs(probs, generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert generator.get_offset() == counter + 64
    key = {"seed": generator.initial_seed() ^ _GENERATOR_KEY, "offset": counter + torch.arange(63, device="cuda")}
    assert torch.equal(ids, sampling_from_probs(probs, **key))
    assert not torch.equal(ids, sampling_from_probs(probs, generator=generator))


def test_successive_offsets_are_those_of_a_tensor() -> None:
    for width in (1000, 51200):
        probs, rows = distributions(5, width), torch.arange(5, device="cuda")
        for op in ("none", "top_p", "both", "many"):
            filters = {"none": {}, "top_p": {"top_p": (None, 0.9)}, "both": {"top_k": (None, 50), "top_p": (None, 0.9)}}
            filters["many"] = {"top_k": (None, 900), "top_p": (None, 0.8)}
            one, other = (
                _launch.draw("op", probs, key, **filters[op])[0]  # type: ignore[arg-type]
                for key in (Keys(None, 3, None, 2**40, 1), Keys(None, 3, 2**40 + rows, 0))
            )
            assert torch.equal(one, other), (width, op)


def test_the_default_generator_is_that_of_the_device() -> None:
    probs = torch.ones(64, 1000).cuda()
    torch.cuda.manual_seed(5)
    first, second = (top_p_sampling_from_probs(probs, 1.0) for _ in range(2))
    torch.cuda.manual_seed(5)
    assert torch.equal(top_p_sampling_from_probs(probs, 1.0), first)
    assert not torch.equal(first, second)


# ---- statistics ------------------------------------------------------------------------------------------------------

DRAWS = 200_000


def critical_chi_square(degrees: int) -> float:
    """The value that a chi-square variable exceeds once in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.753 * part**0.5) ** 3


@pytest.mark.parametrize("width", [111, 1024, 51200, 128256])
@pytest.mark.parametrize("op", ["none", "top_p", "top_p_0.1", "top_k", "both", "min_p"])
def test_frequencies_follow_the_filtered_distribution(op: str, width: int) -> None:
    row = distributions(1, width, sharpness=1.5 if op == "min_p" else 1.0).cpu()
    offsets = torch.arange(DRAWS, device="cuda")
    ids = OPS[op](row.cuda().expand(DRAWS, -1), seed=torch.tensor([42]).cuda(), offset=offsets)
    counts = torch.bincount(ids, minlength=width).cpu().double()
    p = row[0].double()
    order = p.argsort(descending=True, stable=True)
    kept = torch.zeros(width, dtype=torch.bool)
    if op == "min_p":
        kept = row[0] >= torch.tensor(0.05) * row.max()
    else:
        k = 50 if op in ("top_k", "both") else width
        share = {"top_p": 0.9, "top_p_0.1": 0.1, "both": 0.9}.get(op, 2.0)
        first = p[order[:k]]
        kept[order[:k][first.cumsum(0) - first < share * first.sum()]] = True
    assert counts[~kept].sum() == 0
    expected = torch.where(kept, p, 0.0) / p[kept].sum() * DRAWS
    cell = (expected.cumsum(0) / max(20.0, expected.max().item())).long()  # neighbours, until 20 draws are expected
    cells = torch.zeros(int(cell.max()) + 1, dtype=torch.float64)
    want, have = cells.index_add(0, cell, expected), cells.index_add(0, cell, counts)
    want, have = want[want > 5], have[want > 5]
    if len(want) > 1:
        assert ((have - want) ** 2 / want).sum() < critical_chi_square(len(want) - 1)


# ---- random calls ----------------------------------------------------------------------------------------------------

WIDTHS = (1, 2, 31, 128, 129, 1000, 4095, 4096, 4097, 5000, 20001, 51200, 128256)
VALUES: dict[str, Callable[[random.Random], float]] = {
    "top_k": lambda rng: rng.choice([-1, 0, 1, 2, 50, 127, 128, 129, 1000, 10**6]),
    "top_p": lambda rng: rng.choice([0.0, 1e-9, 0.02, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0, rng.random()]),
    "min_p": lambda rng: rng.choice([-1.0, 0.0, 1e-4, 0.05, 0.5, 1.0, rng.random()]),
    "temperature": lambda rng: rng.choice([0.0, 1e-30, 0.1, 0.7, 1.0, 3.0, 1e30]),
}
RANDOM_OPS: dict[Callable[..., Any], tuple[str, ...]] = {
    sampling_from_probs: (),
    top_p_sampling_from_probs: ("top_p",),
    top_k_sampling_from_probs: ("top_k",),
    top_k_top_p_sampling_from_probs: ("top_k", "top_p"),
    min_p_sampling_from_probs: ("min_p",),
    sample_from_logits: ("temperature", "top_k", "top_p", "min_p"),
    softmax: ("temperature",),
    top_p_renorm_probs: ("top_p",),
    top_k_renorm_probs: ("top_k",),
}


def assert_same_softmax(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """As assert_same_probabilities, but weights of denormal size lose precision."""
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-37, equal_nan=True, msg=lambda text: f"{what}: {text}")


def random_rows(rng: random.Random, logits: bool) -> torch.Tensor:
    """Rows of a random shape, distribution, dtype and layout."""
    width = rng.choice(WIDTHS)
    rows = rng.choice([0, 1, 2, 3, 7, 32] if width > 5000 else [0, 1, 3, 17, 80, 200])
    x = rng.choice([0.1, 1.0, 3.0, 12.0]) * torch.randn(rows, width, device="cuda")
    if not logits:
        x = rng.choice([lambda: torch.softmax(x, -1), lambda: x.abs(), lambda: x, lambda: x.round().abs()])()
        x = x * rng.choice([1.0, 1.0, 1.0, 1e-6, 1e-39, 300.0, 1e30])
    if rng.random() < 0.3:
        x = x.round(decimals=1)  # ties
    if rng.random() < 0.2 and rows:
        x[rng.randrange(rows), rng.randrange(width)] = rng.choice([math.nan, math.inf, -math.inf])
    if rng.random() < 0.2 and rows:
        x[rng.randrange(rows)] = rng.choice([0.0, -1.0, -math.inf])
    x = x.to(rng.choice(FLOATS))
    start, pad = rng.choice([(0, 0), (1, 0), (3, 5), (8, 8)])
    buffer = torch.zeros(rows, start + width + pad, dtype=x.dtype, device="cuda")
    view = buffer[:, start : start + width]
    view.copy_(x)
    return view


def random_call(rng: random.Random) -> RandomCase:
    op = rng.choice(list(RANDOM_OPS))
    rows = random_rows(rng, op in (sample_from_logits, softmax))
    count = rows.shape[0]
    kwargs: dict[str, Any] = {}
    for name in RANDOM_OPS[op]:
        draw = partial(VALUES[name], rng)
        dtype = rng.choice([torch.int32, torch.int64]) if name == "top_k" else torch.float32
        values = [draw() for _ in range(rng.choice([1, count]) if count else 1)]
        kwargs[name] = draw() if rng.random() < 0.5 else torch.tensor(values, dtype=dtype, device="cuda")
    if op is softmax:
        return RandomCase(op, (rows,), kwargs, compare=assert_same_softmax)
    if op in (top_p_renorm_probs, top_k_renorm_probs):
        return RandomCase(op, (rows,), kwargs, compare=assert_same_probabilities)
    if {"top_k", "top_p"} <= kwargs.keys():
        kwargs["filter_apply_order"] = rng.choice(["top_k_first", "joint"])
    kwargs |= {"seed": rng.getrandbits(64), "offset": rng.getrandbits(62), "return_valid": True}
    if rng.random() < 0.5:
        kwargs |= {"seed": torch.randint(2**62, (count,), device="cuda")}
    if rng.random() < 0.5:
        kwargs |= {"offset": torch.randint(2**62, (count,), device="cuda")}
    return RandomCase(op, (rows,), kwargs)


def test_random_calls_equal_the_reference() -> None:
    compare_at_random(random_call, seconds=20.0, least=200)
