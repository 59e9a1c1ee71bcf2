"""Remembered decode calls on a GPU: launched one by one and as a graph, they give the bits of the first call."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kestrel_attention import decode, flash_attn_with_kvcache
from kestrel_attention.hot_calls import HotCalls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

op = importlib.import_module("kestrel_attention.flash_attn_with_kvcache")
CALLS = 8  # the first ones of a form do not launch a graph
SHAPES = {
    "split keys": (1, 740, 32, 32, 64, 1),
    "one split": (8, 512, 32, 8, 128, 16),
    "wide splits": (4, 3000, 8, 1, 256, 8),
}
CACHES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def arguments(shape: tuple[int, ...], cache: str = "bf16", appends: bool = True, seed: int = 0) -> dict[str, Any]:
    batch, keys, heads, kv_heads, head_dim, page = shape
    torch.manual_seed(seed)
    pages = -(-keys // page)
    caches = [
        torch.randn(batch * pages, page, kv_heads, head_dim, device="cuda").mul(8).to(CACHES[cache]) for _ in "kv"
    ]
    given: dict[str, Any] = {"k_cache": caches[0], "v_cache": caches[1], "causal": True}
    given["q"] = torch.randn(batch, 1, heads, head_dim, device="cuda").bfloat16()
    if appends:
        given |= {name: torch.randn(batch, 1, kv_heads, head_dim, device="cuda").bfloat16() for name in "kv"}
    given["cache_seqlens"] = torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda")
    given["block_table"] = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    if cache == "int8":
        given |= {
            name: torch.rand(batch * pages, page, kv_heads, device="cuda") / 64 for name in ("k_scale", "v_scale")
        }
    return given


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch of a remembered call was a graph."""
    seen: list[bool] = []
    bind_launches = decode._bind_launches()
    assert bind_launches is not None

    def bind(*description: Any) -> Callable[..., bool | None]:
        launch = bind_launches(*description)

        def noted(only_as_a_graph: bool, *rest: int) -> bool | None:
            launched: bool | None = launch(only_as_a_graph, *rest)
            if launched:
                seen.append(only_as_a_graph)
            return launched

        return noted

    monkeypatch.setattr(decode, "_bind_launches", lambda: bind)
    monkeypatch.setattr(decode, "launches", type(decode.launches)())
    monkeypatch.setattr(decode, "_workspaces", {})  # other tests have used streams, and few have a workspace
    monkeypatch.setattr(op, "_hot_calls", HotCalls())
    return seen


@pytest.mark.parametrize("appends", [False, True], ids=["reads", "appends"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_further_calls_give_the_bits_of_the_first(shape: str, cache: str, appends: bool, graphs: list[bool]) -> None:
    kept = [arguments(SHAPES[shape], cache, appends, seed) for seed in range(2)]
    wanted = []
    for given in kept:
        op._hot_calls = HotCalls()
        wanted.append(flash_attn_with_kvcache(**given, return_lse=True))
    graphs.clear()
    for _ in range(CALLS):
        results = [flash_attn_with_kvcache(**given, return_lse=True) for given in kept]  # both in flight
        for result, expected in zip(results, wanted, strict=True):
            assert all(map(torch.equal, result, expected))
    assert graphs[-1] == (appends or shape != "one split"), "calls of several kernels launch a graph"
    assert not graphs[0]


def test_a_long_call_launches_no_graph(graphs: list[bool]) -> None:
    given = arguments((1, 2**18, 8, 1, 128, 16))
    for _ in range(CALLS):
        flash_attn_with_kvcache(**given)
    assert graphs
    assert not any(graphs)


def test_a_captured_call_launches_no_graph_and_can_be_replayed_beside_others(graphs: list[bool]) -> None:
    given, other = (arguments(SHAPES["split keys"], appends=False, seed=seed) for seed in range(2))
    for _ in range(CALLS):
        expected, beside = flash_attn_with_kvcache(**given), flash_attn_with_kvcache(**other)
    assert graphs[-1]
    graphs.clear()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = flash_attn_with_kvcache(**given)
    assert graphs == [False]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        result.zero_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            captured.replay()
        eager = flash_attn_with_kvcache(**other)
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
        assert torch.equal(eager, beside)


@pytest.mark.parametrize("shared", [False, True], ids=["a stream each", "one stream"])
def test_threads_launch_at_the_same_time(shared: bool, graphs: list[bool]) -> None:
    calls = [arguments(SHAPES["split keys"], appends=False, seed=seed) for seed in range(4)]
    wanted = [flash_attn_with_kvcache(**given) for given in calls]
    torch.cuda.synchronize()
    wrong = []
    common = torch.cuda.Stream()

    def run(index: int) -> None:
        with torch.cuda.stream(common if shared else torch.cuda.Stream()):
            for _ in range(100):
                if not torch.equal(flash_attn_with_kvcache(**calls[index]), wanted[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert any(graphs)


def test_tensors_may_be_freed_right_after_a_call(graphs: list[bool]) -> None:
    given = arguments(SHAPES["split keys"])
    expected = flash_attn_with_kvcache(**given)
    for _ in range(50):
        copies = {name: x.clone() if name in ("q", "k", "v") else x for name, x in given.items()}
        assert torch.equal(flash_attn_with_kvcache(**copies), expected)
        del copies
    assert graphs[-1]
