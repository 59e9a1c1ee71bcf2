"""Prefill over caches of FP8 and of 16 bits that are dequantised or copied first, on a GPU: float64 over their keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_oracle import Call, made, same_bits
from prefill_gpu import NAMES, Launches, each_kernel, launches_of, scores  # noqa: F401
from prefill_oracle import assert_exact_over_cache

from kestrel_attention import prefill, prefill_scratch
from kestrel_runtime import backend
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

KINDS = ["e4m3", "e5m2", "same"]
PAGES = {"e4m3": 16, "e5m2": 16, "same": 8}  # a cache of the queries' dtype is read in place where TMA can
LENGTHS = (300, 0, 54, -1, 1000, 17, 128, 64)


@pytest.fixture(autouse=True)
def few_queries_are_enough(monkeypatch):
    monkeypatch.setattr(prefill_scratch, "FP8_ROWS", 1)
    monkeypatch.setattr(prefill_scratch, "COPIED_ROWS", 1)


@pytest.fixture
def launches(monkeypatch):
    return launches_of(monkeypatch, prefill_scratch)


def assert_copied(launches: Launches, kind: str, size: int, page: int, how: dict[str, Any]) -> None:
    """Whether a cache of the queries' dtype was copied: where the kernel of Hopper runs, and could not load it."""
    if kind == "same":
        shows = how.get("window_size", (-1, -1))[0] < 0 or "prefix_len" in how
        copied = prefill.uses_wgmma(torch.device("cuda")) and page % 16 and size <= 128 and shows
        assert launches.taken() == (["dequantise_same"] if copied else [])


def scales_of(kv_heads: int, kind: str) -> dict[str, torch.Tensor]:
    """Scales of heads, of all heads at once, or none."""
    if kind == "none":
        return {}
    torch.manual_seed(2)
    return {
        name: torch.rand(kv_heads if kind == "heads" else 1, device="cuda") + 0.1 for name in ("k_scale", "v_scale")
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_shapes_the_scores(launches, kind, name):
    call, how = made(kind, 4, 2, 64, PAGES[kind], LENGTHS, queries=70), scores(len(LENGTHS), 4)[name]
    assert_exact_over_cache(call, call.run(**how), how)
    assert_copied(launches, kind, 64, PAGES[kind], how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128), (4, 2, 80), (4, 1, 256), (2, 2, 320), (4, 2, 512)]
)
@pytest.mark.parametrize("scales", ["none", "one", "heads"])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_scales(launches, kind, scales, heads, kv_heads, size, dtype):
    given = scales_of(kv_heads, "none" if kind == "same" else scales)
    call = made(kind, heads, kv_heads, size, PAGES[kind], LENGTHS, queries=130, dtype=dtype)
    assert_exact_over_cache(call, call.run(causal=True, **given), {"causal": True}, given)
    assert_copied(launches, kind, size, PAGES[kind], {})


@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("size", [64, 128, 320])
@pytest.mark.parametrize("kind", ["e4m3", "same"])
def test_pages(launches, kind, page, size):
    call = made(kind, 4, 2, size, page, LENGTHS, queries=40)
    assert_exact_over_cache(call, call.run(causal=True), {"causal": True})
    assert_copied(launches, kind, size, page, {})


@pytest.mark.parametrize("size", [64, 512])
def test_caches_without_a_table(size):
    call = made("e4m3", 4, 2, size, 64, (64, 7, 0), queries=40)
    call.table, call.caches = None, {name: x[:3].float().nan_to_num(0.5).to(x.dtype) for name, x in call.caches.items()}
    assert_exact_over_cache(call, call.run(causal=True), {"causal": True})


def test_bytes_are_e4m3_codes():
    call = made("e4m3", 4, 2, 128, 16, LENGTHS, queries=40)
    want = call.run(causal=True)
    call.caches = {name: x.view(torch.uint8) for name, x in call.caches.items()}
    assert same_bits(call.run(causal=True), want)


@pytest.mark.parametrize("size", [64, 320])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_are_appended_and_attended_to(kind, dtype, size):
    queries = 70
    call = made(kind, 8, 2, size, PAGES[kind], (0, 54, 62, -1, 300, 64), queries, dtype, extra_keys=queries)
    k, v = (torch.randn(6, queries, 2, size, device="cuda").to(dtype) for _ in range(2))
    given, other = scales_of(2, "none" if kind == "same" else "heads"), call.clone()
    with backend("reference"):
        other.run(k, v, causal=True, **given)
    got = call.run(k, v, causal=True, **given)
    assert same_bits(tuple(call.caches.values()), tuple(other.caches.values()))
    call.lengths = torch.where(call.lengths >= 0, call.lengths + queries, call.lengths)
    assert same_bits(call.run(causal=True, **given), got)
    assert_exact_over_cache(call, got, {"causal": True}, given)


@pytest.mark.parametrize(("kind", "page"), [("e4m3", 64), ("e4m3", 8)])
def test_groups_of_sequences_give_the_bits_of_one(monkeypatch, kind, page):
    """Scratch memory for two sequences at a time, of five."""
    call, how = made(kind, 4, 2, 64, page, (300, 200, 7, 64, 1), queries=40), scores(5, 4)["prefixes and a window"]
    want = call.run(**how)
    assert call.table is not None
    monkeypatch.setattr(prefill_scratch, "SCRATCH_BYTES", 2 * 4 * page * 2 * 64 * call.table.shape[1])
    assert same_bits(call.run(**how, num_splits=1), want)  # another form of call, so another launch


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("kind", "page"), [("e4m3", 16), ("e4m3", 1), ("same", 1), ("same", 7)])
def test_pages_that_do_not_exist_are_not_seen(launches, kind, page, size):
    """Among them the first key of a box of 16, and one in its middle."""
    call = made(kind, 4, 2, size, page, (300, 100, 64), queries=30)
    assert call.table is not None
    call.table[0, 1], call.table[1, 0], call.table[2, 0] = -1, 10**6, -7
    call.table[0, [16 // page, 128 // page, 130 // page, 143 // page, 250 // page]] = -1
    assert_exact_over_cache(call, call.run(), {})
    assert_copied(launches, kind, size, page, {})


def copied_and_in_place(monkeypatch: pytest.MonkeyPatch, launches: Launches, call: Call, **how: Any) -> Any:
    """Results with keys and values copied first, and in place."""
    if not prefill.uses_wgmma(torch.device("cuda")):
        pytest.skip("the other kernel reads keys in place")
    copied = call.run(**how)
    assert launches.taken() == ["dequantise_same"]
    monkeypatch.setattr(prefill_scratch, "COPIED_ROWS", 10**9)
    in_place = call.run(**how, num_splits=1)  # another form of call, so another launch
    assert launches.taken() == []
    return copied, in_place


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copied_keys_give_the_bits_of_keys_in_place(monkeypatch, launches, page, dtype):
    call = made("same", 8, 2, 128, page, (700, 0, 54, -1, 1000), queries=200, dtype=dtype)
    assert same_bits(*copied_and_in_place(monkeypatch, launches, call, causal=True))


@pytest.mark.parametrize("name", ["causal", "prefixes and a window", "soft cap", "sinks"])
@pytest.mark.parametrize("size", [64, 72, 80, 96, 128])
def test_copied_keys_of_any_size_give_the_bits_of_keys_in_place(monkeypatch, launches, size, name):
    call, how = made("same", 4, 2, size, 8, (300, 0, 54, -1), queries=100), scores(4, 4)[name]
    assert same_bits(*copied_and_in_place(monkeypatch, launches, call, **how))


@pytest.mark.parametrize(("kind", "page"), [("e4m3", 16), ("same", 1)])
def test_a_replayed_graph_sees_other_lengths_and_contents(launches, kind, page):
    calls = [made(kind, 4, 2, 128, page, lengths, 40, seed=seed) for seed, lengths in ((1, (600, 3)), (2, (9, 600)))]
    names = list(calls[0].caches)

    def run(q, lengths, table, *caches):
        return Call(kind, q, dict(zip(names, caches, strict=True)), table, lengths).run(causal=True)

    args, fresh = ([c.q, c.lengths, c.table, *c.caches.values()] for c in calls)
    got = graph_replay(run, args, fresh)
    if prefill.uses_wgmma(torch.device("cuda")):
        assert set(launches.taken()) == {"dequantise_same" if kind == "same" else "dequantise_fp8"}
    assert same_bits(tuple(got), tuple(run(*fresh)))
