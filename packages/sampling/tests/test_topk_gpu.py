"""On a GPU topk_fwd gives the reference bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings

import pytest
import torch
from topk_cases import BAD, DTYPES, KINDS, SIZES, fill, ks

import kestrel_sampling
from kestrel_runtime import KestrelFallbackWarning, backend
from kestrel_runtime.testing import (
    BadInput,
    RandomCase,
    assert_close_to_f64,
    assert_rejects,
    assert_same_bits,
    canary,
    compare_at_random,
    graph_replay,
    large_allocation,
    poison,
)
from kestrel_sampling import reference, topk_fwd

pytestmark = pytest.mark.gpu


def on_gpu(scores: torch.Tensor, k: int, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    with backend("kernel"):
        return topk_fwd(scores, k, softmax)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_gives_the_reference_bit_for_bit(dtype: torch.dtype, n: int, kind: str) -> None:
    every_k = ks(n)
    for rows, some_k in ((1, every_k[::2]), (3, every_k[1::2]), (257, every_k)):
        scores = fill(kind, rows, n, dtype, seed=rows).cuda()
        expected_values, expected_indices = reference.topk_fwd(scores, max(every_k))
        for k in some_k:
            values, indices = on_gpu(scores, k)
            assert_same_bits(indices, expected_indices[:, :k], f"indices of {rows} rows, k = {k}")
            assert_same_bits(values, expected_values[:, :k], f"values of {rows} rows, k = {k}")


@pytest.mark.parametrize("k", [8, 50])
@pytest.mark.parametrize("rows", [0, 740, 4096])
@pytest.mark.parametrize("n", [64, 256])
def test_kernel_covers_many_rows(n: int, rows: int, k: int) -> None:
    scores = fill("ties", rows, n, torch.bfloat16).cuda()
    values, indices = on_gpu(scores, k)
    expected_values, expected_indices = reference.topk_fwd(scores, k)
    assert torch.equal(indices, expected_indices)
    assert_same_bits(values, expected_values)


@pytest.mark.parametrize("kind", ["random", "ties", "large", "nan-and-inf", "minus-inf", "denormal"])
@pytest.mark.parametrize("n", [8, 60, 64, 256, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_softmax_is_as_accurate_as_its_arithmetic(dtype: torch.dtype, n: int, kind: str) -> None:
    """16 bits: as close to float64 as torch.softmax of the kept. float32: 4 eps for exp, the sum and the quotient, and
    half an ulp of the argument of exp."""
    scores = fill(kind, 37, n, dtype).cuda()
    for k in ks(n):
        values, indices = on_gpu(scores, k, softmax=True)
        kept, expected_indices = reference.topk_fwd(scores, k)
        assert_same_bits(indices, expected_indices, f"indices at k = {k}")
        exact = torch.softmax(kept.double(), dim=-1)
        if dtype != torch.float32:
            assert_close_to_f64(values, exact, torch.softmax(kept, dim=-1))
            continue
        assert torch.equal(values.isnan(), exact.isnan())
        below_top = (kept.double() - kept[:, :1].double()).abs()
        limit = (4 + below_top / 2) * torch.finfo(dtype).eps * exact + torch.finfo(dtype).tiny
        error = (values.double() - exact).abs()
        assert not (error > limit).any(), f"k = {k}: {float((error - limit).nan_to_num().max()):.3e} beyond"


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("n", [60, 64, 256, 1000, 1025, 4095])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_reads_rows_of_any_alignment_and_stride(dtype: torch.dtype, n: int, offset: int) -> None:
    for width in (n + offset, n + offset + 1, 2 * n + 8 * offset):
        buffer = torch.full((33, width + 8), float("inf"), dtype=dtype, device="cuda")
        scores = buffer[:, offset : offset + n]
        scores.copy_(fill("random", 33, n, dtype))
        for k in (8, 50):
            assert_same_bits(on_gpu(scores, k)[1], reference.topk_fwd(scores, k)[1], f"width {width}, k = {k}")


@pytest.mark.parametrize(
    ("n", "k"), [(64, 8), (60, 5), (256, 8), (1000, 8), (4096, 8), (64, 60), (1024, 100), (4096, 128)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_writes_every_result_and_nothing_else(dtype: torch.dtype, n: int, k: int) -> None:
    scores = fill("random", 19, n, dtype).cuda()
    entry_point = kestrel_sampling.topk._entry_point(scores, n, k)
    values, values_intact = canary((19, k), dtype, "cuda")
    indices, indices_intact = canary((19, k), torch.int32, "cuda")
    entry_point(scores, values, indices, False)
    values_intact()
    indices_intact()
    assert not values.isnan().any()
    assert torch.equal(indices, reference.topk_fwd(scores, k)[1])


@pytest.mark.parametrize(("n", "k"), [(64, 8), (256, 8), (4096, 8), (256, 50), (4096, 128)])
def test_kernel_runs_repeat_bit_for_bit_and_rows_are_independent(n: int, k: int) -> None:
    scores = fill("ties", 257, n, torch.bfloat16).cuda()
    values, indices = on_gpu(scores, k, softmax=True)
    for _ in range(5):
        again = on_gpu(scores, k, softmax=True)
        assert torch.equal(again[0], values)
        assert torch.equal(again[1], indices)
    alone = on_gpu(scores[100:101], k, softmax=True)
    assert torch.equal(alone[0], values[100:101])
    assert torch.equal(alone[1], indices[100:101])


@pytest.mark.parametrize(("n", "k"), [(64, 8), (256, 8), (4096, 8), (1024, 50)])
def test_kernel_replays_in_a_graph_with_new_contents(n: int, k: int) -> None:
    old, new = fill("random", 16, n, torch.bfloat16).cuda(), fill("random", 16, n, torch.bfloat16, seed=1).cuda()
    expected = reference.topk_fwd(new, k)
    with backend("kernel"):
        values, indices = graph_replay(lambda scores: topk_fwd(scores, k), [old], [new])
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


FIRST_CALLS = """
import torch
from kestrel_runtime import backend
from kestrel_sampling import topk_fwd

for n, k in ((64, 8), (1000, 50)):
    scores, new = torch.randn(2, 16, n, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with backend("kernel"), torch.cuda.graph(graph):
        values, indices = topk_fwd(scores, k)
    scores.copy_(new)
    graph.replay()
    expected = torch.topk(new, k)
    assert torch.equal(values, expected.values), (n, k)
    assert torch.equal(new.gather(1, indices.long()), values), (n, k)
"""


def test_the_first_call_of_a_process_can_be_captured_in_a_graph() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_kernel_compiles_without_a_graph_break() -> None:
    scores = fill("random", 257, 64, torch.bfloat16).cuda()
    with backend("kernel"):
        values, indices = torch.compile(lambda x: topk_fwd(x * 2, 8), fullgraph=True)(scores)
    expected = reference.topk_fwd(scores * 2, 8)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


def test_kernel_runs_on_the_current_stream() -> None:
    scores = poison((64, 64), torch.float32, "cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        scores.copy_(fill("random", 64, 64, torch.float32).cuda())
        values, indices = on_gpu(scores, 8)
    stream.synchronize()
    expected = reference.topk_fwd(scores, 8)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


@large_allocation(gib=5)
@pytest.mark.parametrize(("n", "k"), [(64, 8), (256, 8), (1024, 8), (4096, 8), (256, 50), (1024, 50), (4096, 128)])
def test_kernel_reads_rows_past_two_to_the_31_elements(n: int, k: int) -> None:
    stride = (1 << 30) + 64
    buffer = torch.empty(2 * stride + n, dtype=torch.bfloat16, device="cuda")
    scores = torch.as_strided(buffer, (3, n), (stride, 1))
    scores.copy_(fill("random", 3, n, torch.bfloat16))
    assert scores[2].data_ptr() - buffer.data_ptr() > 2**31
    values, indices = on_gpu(scores, k)
    expected = reference.topk_fwd(scores.contiguous(), k)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_kernel_refuses_bad_input_with_its_name(case: BadInput) -> None:
    with torch.device("cuda"):
        assert_rejects(topk_fwd, case)


def test_rows_that_no_kernel_covers_run_by_reference_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel_runtime.op._warned", set())
    scores = fill("random", 2, 5000, torch.float32).cuda()
    with pytest.warns(KestrelFallbackWarning, match="k up to 1024"):
        values, _ = topk_fwd(scores, 1100)
    assert torch.equal(values, torch.topk(scores, 1100).values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topk_fwd(scores[:, :4500], 1200)


LONG_ROWS = ["random", "ties", "large", "nan-and-inf", "minus-inf", "denormal"]


@pytest.mark.parametrize(("n", "rows"), [(300, 2), (4097, 3), (51200, 1), (51201, 40), (128256, 20), (1_100_001, 2)])
@pytest.mark.parametrize("kind", LONG_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_covers_whole_vocabularies(dtype: torch.dtype, kind: str, n: int, rows: int) -> None:
    scores = fill(kind, rows, n, dtype).cuda()
    for k in (1, 50, 129, 1000, 1024):
        if k <= n:
            expected_values, expected_indices = reference.topk_fwd(scores, k)
            values, indices = on_gpu(scores, k)
            assert_same_bits(indices, expected_indices, f"indices at k = {k}")
            assert_same_bits(values, expected_values, f"values at k = {k}")


def test_long_rows_that_are_hardly_numbers_are_ordered_too() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.full((6, 50_000), nan, device="cuda")
    scores[1, 40_000:40_010] = -inf
    scores[2] = inf
    scores[3] = -torch.rand(50_000, device="cuda")
    scores[4, ::100] = 1.0
    scores[5] = 0.25
    values, indices = on_gpu(scores, 600)
    expected_values, expected_indices = reference.topk_fwd(scores, 600)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)


def test_softmax_over_the_best_of_a_vocabulary() -> None:
    scores = fill("random", 3, 51200, torch.float32).cuda()
    values, _ = topk_fwd(scores, 1000, softmax=True)
    exact = torch.softmax(scores.double().topk(1000).values, -1)
    torch.testing.assert_close(values.double(), exact, rtol=2e-6, atol=0)


def random_call(rng: random.Random) -> RandomCase:
    n = rng.choice([1, 2, 8, 60, 64, 65, 256, 257, 1000, 1024, 1025, 4096, 4097, 51200])
    rows = rng.choice([0, 1, 3, 32] if n > 5000 else [0, 1, 3, 17, 257, 740])
    kind = rng.choice(KINDS) if rows else "random"
    scores = fill(kind, rows, n, rng.choice(DTYPES), seed=rng.getrandbits(30)).cuda()
    if rng.random() < 0.5:
        start, pad = rng.choice([(1, 0), (3, 5), (8, 8)])
        buffer = torch.zeros(rows, start + n + pad, dtype=scores.dtype, device="cuda")
        buffer[:, start : start + n] = scores
        scores = buffer[:, start : start + n]
    some_k = [k for k in (1, 7, 8, 9, 50, 128, 129, 1000, 1024, n) if k <= min(n, 1024)]
    return RandomCase(topk_fwd, (scores, rng.choice(some_k)))


def test_random_calls_equal_the_reference() -> None:
    compare_at_random(random_call, seconds=10.0, least=100)
