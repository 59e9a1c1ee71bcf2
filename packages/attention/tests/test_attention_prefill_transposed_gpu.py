"""Prefill of e4m3 queries whose values are transposed first, on a GPU: the bits of values in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_oracle import same_bits
from prefill_gpu import each_kernel, ints, launches_of, scores, starts_of  # noqa: F401

from kestrel_attention import flash_attn_varlen_func, prefill, prefill_transposed
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

E4M3 = torch.float8_e4m3fn
LENGTHS = [300, 0, 1000, 54, 17, 129, 128]
SCORES = ["full", "causal", "negative scale", "prefix", "prefixes and a window", "soft cap", "sinks"]


TRANSPOSE = ["prefill_transpose_d128"]


@pytest.fixture(autouse=True)
def only_where_values_are_transposed(each_kernel):  # noqa: F811
    if not prefill.uses_wgmma(torch.device("cuda")):
        pytest.skip("the other kernel reads values in place")


def made(page: int, queries: int, lengths: list[int], holes: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """A call over pages whose unused slots are NaN; with holes, some pages do not exist."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = -(-1000 // page) + 1
    batch, blocks = len(lengths), len(lengths) * columns + 2
    table = torch.randperm(blocks, generator=generator, device="cuda")[: batch * columns].view(batch, columns).int()
    q = torch.randn(batch * queries, 8, 128, generator=generator, device="cuda").to(E4M3)
    caches = []
    for _ in range(2):
        x = torch.randn(blocks, page, 2, 128, generator=generator, device="cuda").to(E4M3).view(torch.uint8)
        held = torch.zeros(blocks, page, dtype=torch.bool, device="cuda")
        for b, length in enumerate(lengths):
            at = torch.arange(length, device="cuda")
            held[table[b, at // page].long(), at % page] = True
        x[~held] = 0x7F
        caches.append(x.view(E4M3))
    if holes:
        table[:, 1::3] = -1
        table[0, :: max(1, 64 // page)] = 2**30
    starts = starts_of([queries] * batch)
    return {"q": q, "k": caches[0], "v": caches[1], "starts": starts, "table": table, "lengths": ints(lengths)}


def run(given: dict[str, torch.Tensor], queries: int, most: int, **how: Any) -> Any:
    """most: of keys; another number is another form of call, so another launch."""
    where = {"block_table": given["table"], "seqused_k": given["lengths"]}
    return flash_attn_varlen_func(
        given["q"], given["k"], given["v"], given["starts"], None, queries, most, return_lse=True, **where, **how
    )


def both(monkeypatch: pytest.MonkeyPatch, given: dict[str, torch.Tensor], queries: int, **how: Any) -> tuple[Any, Any]:
    """Results with values in place, and transposed first."""
    launches = launches_of(monkeypatch, prefill_transposed)
    for name in ("TRANSPOSED_ROWS", "COPIED_ROWS"):
        monkeypatch.setattr(prefill_transposed, name, 10**9)
    want = run(given, queries, 1000, **how)
    assert launches.taken() == []
    monkeypatch.setattr(prefill_transposed, "TRANSPOSED_ROWS", 0)
    got = run(given, queries, 1001, **how)
    assert launches.taken() == TRANSPOSE
    return want, got


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("queries", [70, 300])
def test_pages_give_the_bits_of_values_in_place(monkeypatch, queries, page, holes):
    want, got = both(monkeypatch, made(page, queries, LENGTHS, holes), queries, causal=True)
    assert same_bits(got, want)


@pytest.mark.parametrize("name", SCORES)
def test_what_shapes_the_scores_gives_the_bits_of_values_in_place(monkeypatch, name):
    how = scores(len(LENGTHS), 8)[name]
    want, got = both(monkeypatch, made(16, 130, LENGTHS), 130, **how)
    assert same_bits(got, want)


def test_a_wider_block_table_gives_the_bits_of_values_in_place(monkeypatch):
    """Scratch memory has room for the most keys, and no more."""
    given = made(16, 130, LENGTHS)
    given["table"] = torch.nn.functional.pad(given["table"], (0, 500), value=2**30)
    want, got = both(monkeypatch, given, 130, causal=True)
    assert same_bits(got, want)


def test_long_calls_give_the_bits_of_values_in_place(monkeypatch):
    """Persistent thread blocks that count works."""
    want, got = both(monkeypatch, made(1, 1000, LENGTHS * 8), 1000, causal=True)
    assert same_bits(got, want)


def test_a_replayed_graph_sees_other_lengths_and_contents(monkeypatch):
    monkeypatch.setattr(prefill_transposed, "TRANSPOSED_ROWS", 0)
    launches = launches_of(monkeypatch, prefill_transposed)
    calls = [made(16, 40, lengths, seed=seed) for seed, lengths in ((1, [600, 3]), (2, [9, 700]))]

    def attend(*given):
        return run(dict(zip(calls[0], given, strict=True)), 40, 1000, causal=True)

    got = graph_replay(attend, list(calls[0].values()), list(calls[1].values()))
    assert set(launches.taken()) == set(TRANSPOSE)
    monkeypatch.setattr(prefill_transposed, "TRANSPOSED_ROWS", 10**9)
    want = run(calls[1], 40, 1001, causal=True)  # another form of call, so another launch
    assert launches.taken() == []
    assert same_bits(tuple(got), want)
