"""Prefill of e4m3 queries whose values are transposed first, on a GPU: float64, and the bits of values in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_oracle import same_bits
from prefill_gpu import each_kernel, ints, launches_of, scores, starts_of  # noqa: F401
from prefill_oracle import assert_exact, fp8_attention, of_sequence

from kestrel_attention import flash_attn_varlen_func, prefill, prefill_transposed
from kestrel_runtime.testing import graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

E4M3 = torch.float8_e4m3fn
LENGTHS = [300, 0, 1000, 54, 17, 129, 128]
SCORES = ["full", "causal", "negative scale", "prefix", "prefixes and a window", "soft cap", "sinks"]
RAGGED = [70, 0, 300, 54, 17, 1, 128]  # queries of sequences of LENGTHS
TRANSPOSE = ["prefill_transpose_d128"]


@pytest.fixture(autouse=True)
def only_where_values_are_transposed(each_kernel):  # noqa: F811
    if not prefill.uses_wgmma(torch.device("cuda")):
        pytest.skip("the other kernel reads values in place")


def made(
    page: int, queries: int | list[int], lengths: list[int], holes: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A call over pages whose unused slots are NaN; with holes, some pages do not exist. queries: of each sequence."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = -(-1000 // page) + 1
    batch, blocks = len(lengths), len(lengths) * columns + 2
    table = torch.randperm(blocks, generator=generator, device="cuda")[: batch * columns].view(batch, columns).int()
    starts = starts_of(queries if isinstance(queries, list) else [queries] * batch)
    q = torch.randn(int(starts[-1]), 8, 128, generator=generator, device="cuda").to(E4M3)
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
    return {"q": q, "k": caches[0], "v": caches[1], "starts": starts, "table": table, "lengths": ints(lengths)}


def run(given: dict[str, torch.Tensor], queries: int, most: int, **how: Any) -> Any:
    """most: of keys; another number is another form of call, so another launch."""
    where = {"block_table": given["table"], "seqused_k": given["lengths"]}
    return flash_attn_varlen_func(
        given["q"], given["k"], given["v"], given["starts"], None, queries, most, return_lse=True, **where, **how
    )


def transpose_from(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Have calls transpose values first from so many rows on."""
    for name in ("TRANSPOSED_ROWS", "COPIED_ROWS"):
        monkeypatch.setattr(prefill_transposed, name, rows)


def transposed(monkeypatch: pytest.MonkeyPatch, given: dict[str, torch.Tensor], queries: int, **how: Any) -> Any:
    """Results with values transposed first."""
    launches = launches_of(monkeypatch, prefill_transposed)
    transpose_from(monkeypatch, 0)
    got = run(given, queries, 1000, **how)
    assert launches.taken() == TRANSPOSE
    return got


def keys_of(given: dict[str, torch.Tensor], b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence, and which exist, read through its row of the table."""
    blocks, page = given["k"].shape[:2]
    at = torch.arange(int(given["lengths"][b]), device="cuda")
    block = given["table"][b, at // page].long()
    exists = (block >= 0) & (block < blocks)
    block = torch.where(exists, block, 0)
    k, v = (given[name][block, at % page].float() for name in "kv")
    return k, v, exists


def assert_float64(
    given: dict[str, torch.Tensor], got: Any, how: dict[str, Any], scales: dict[str, torch.Tensor]
) -> None:
    """Hold results against float64 over the values of codes, of each sequence."""
    out, lse = got
    one = torch.ones(1, device="cuda")
    for b in range(len(given["lengths"])):
        rows = slice(int(given["starts"][b]), int(given["starts"][b + 1]))
        k, v, exists = keys_of(given, b)
        values = given["q"][rows].float(), k, v
        q, k, v = (
            x.double() * scales.get(f"{name}_scale", one).double()[:, None]
            for name, x in zip("qkv", values, strict=True)
        )
        exact = fp8_attention(q, k, v, exists=exists, **of_sequence(how, b))
        assert_exact(out[rows], lse[:, rows], exact)


def both(monkeypatch: pytest.MonkeyPatch, given: dict[str, torch.Tensor], queries: int, **how: Any) -> tuple[Any, Any]:
    """Results with values in place, and transposed first."""
    launches = launches_of(monkeypatch, prefill_transposed)
    transpose_from(monkeypatch, 10**9)
    want = run(given, queries, 1000, **how)
    assert launches.taken() == []
    transpose_from(monkeypatch, 0)
    got = run(given, queries, 1001, **how)
    assert launches.taken() == TRANSPOSE
    return want, got


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("page", [1, 7, 16, 64])
def test_pages_are_those_of_float64(monkeypatch, page, holes):
    given = made(page, 130, LENGTHS, holes)
    assert_float64(given, transposed(monkeypatch, given, 130, causal=True), {"causal": True}, {})


@pytest.mark.parametrize("heads", [None, 1, 8])
@pytest.mark.parametrize("name", SCORES)
def test_what_shapes_the_scores_is_that_of_float64(monkeypatch, name, heads):
    """Sequences of different numbers of queries, with no scales, scales of all heads, and of each."""
    given, how = made(16, RAGGED, LENGTHS), scores(len(LENGTHS), 8)[name]
    scales = {} if heads is None else {"q_scale": heads, "k_scale": -(-heads // 4), "v_scale": -(-heads // 4)}
    scales = {of: (1 + torch.rand(count, device="cuda")) / 2 for of, count in scales.items()}
    assert_float64(given, transposed(monkeypatch, given, max(RAGGED), **how, **scales), how, scales)


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
    transpose_from(monkeypatch, 0)
    launches = launches_of(monkeypatch, prefill_transposed)
    calls = [made(16, 40, lengths, seed=seed) for seed, lengths in ((1, [600, 3]), (2, [9, 700]))]

    def attend(*given):
        return run(dict(zip(calls[0], given, strict=True)), 40, 1000, causal=True)

    got = graph_replay(attend, list(calls[0].values()), list(calls[1].values()))
    assert set(launches.taken()) == set(TRANSPOSE)
    transpose_from(monkeypatch, 10**9)
    want = run(calls[1], 40, 1001, causal=True)  # another form of call, so another launch
    assert launches.taken() == []
    assert same_bits(tuple(got), want)
