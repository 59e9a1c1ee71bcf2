"""topk_fwd: the reference against a float64 sort written out in Python, the kernels against the reference."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kestrel_sampling
from kestrel_runtime import Binary, KestrelFallbackWarning, UnsupportedError, backend
from kestrel_runtime.testing import (
    BadInput,
    RandomCase,
    assert_close_to_f64,
    assert_rejects,
    assert_same_bits,
    canary,
    compare_at_random,
    graph_replay,
    opcheck,
    poison,
)
from kestrel_sampling import reference, topk_fwd
from kestrel_sampling.kernels import variants

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Every kernel is compiled for rows up to some N: here is the first length of each, the last one, and one short of it.
SIZES = [1, 2, 8, 9, 60, 64, 65, 111, 256, 257, 512, 1000, 1024, 1025, 2047, 2049, 4095, 4096]
BITS = {2: torch.int16, 4: torch.int32}


def fill(kind: str, rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Scores of one kind: each a way for an order to go wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator)
    if kind == "ties":
        x = (2 * x).round() / 2
    elif kind == "all-equal":
        x = torch.full((rows, n), 0.25)
    elif kind == "zeros":  # of both signs
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "denormal":
        x = x * torch.finfo(dtype).tiny / 4
    elif kind == "large":
        x = x * 1e4
    elif kind == "nan-and-inf":
        x = torch.where(x > 1, float("nan"), x)
        x = torch.where(x < -1, float("-inf"), x)
        x[:, n // 2] = float("inf")
        x[0] = float("nan")
    elif kind == "minus-inf":
        x = torch.full((rows, n), float("-inf"))
        x[:, n // 3] = float("nan")
    elif kind == "ascending":
        x = torch.arange(n).float().expand(rows, n) / n
    elif kind == "few-distinct":  # most of a row ties at the k-th place
        x = torch.where(x > 1.5, 2.0, torch.where(x > -1.5, 1.0, 0.0))
    else:
        assert kind == "random", kind
    x = x.to(dtype)
    if kind == "nan-and-inf":  # NaN of both signs and several payloads
        bits = x.view(BITS[x.element_size()])
        marks = torch.arange(n, dtype=bits.dtype) % 5
        marks = torch.where(marks % 2 == 1, marks | torch.iinfo(bits.dtype).min, marks)
        bits |= torch.where(x.isnan(), marks, 0)
    return x


KINDS = (
    "random",
    "ties",
    "all-equal",
    "zeros",
    "denormal",
    "large",
    "nan-and-inf",
    "minus-inf",
    "ascending",
    "few-distinct",
)


def ks(n: int) -> list[int]:
    return sorted({k for k in (1, 3, 8, 9, 50, 128) if k <= n} | {min(n, 128)})


def by_hand(row: list[float], k: int) -> list[int]:
    """Indices in topk_fwd's order, by Python's sort: numbers descending, NaN behind them, ties by index."""
    return sorted(range(len(row)), key=lambda i: (row[i] != row[i], -row[i] if row[i] == row[i] else 0.0, i))[:k]


def take(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The scores at the indices of each row, bit for bit (torch's gather of 16-bit NaN changes them)."""
    return scores.view(BITS[scores.itemsize]).gather(-1, indices.long()).view(scores.dtype)


# ---- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8, 60, 111, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_sorts_as_python_does(dtype: torch.dtype, kind: str, n: int) -> None:
    scores = fill(kind, 3, n, dtype, seed=n)
    longest = torch.tensor([by_hand(row, n) for row in scores.double().tolist()], dtype=torch.int32)
    for k in ks(n):
        values, indices = topk_fwd(scores, k)
        assert_same_bits(indices, longest[:, :k].contiguous(), f"indices at k = {k}")
        assert_same_bits(values, take(scores, longest[:, :k]), f"values at k = {k}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_nan_are_kept(dtype: torch.dtype) -> None:
    bits = BITS[dtype.itemsize]
    exponent = torch.tensor([[math.inf]]).to(dtype).view(bits)
    payloads = torch.tensor([[1, 2, 3, 1 | torch.iinfo(bits).min, 65]], dtype=bits)  # signalling NaN, of both signs
    scores = torch.cat(((exponent | payloads).view(dtype), torch.tensor([[1.0, 2.0]]).to(dtype)), 1).repeat(3, 1)
    assert scores[:, :5].isnan().all()
    values, indices = topk_fwd(scores, 7)
    assert indices.tolist() == [[6, 5, 0, 1, 2, 3, 4]] * 3
    assert_same_bits(values, take(scores, indices))
    assert_same_bits(values[:, 2:], scores[:, :5])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_largest_scores_in_order(dtype: torch.dtype, n: int) -> None:
    scores = fill("random", 16, n, dtype)
    largest = torch.tensor([sorted(row, reverse=True) for row in scores.double().tolist()]).to(dtype)
    for k in ks(n):
        values, indices = topk_fwd(scores, k)
        assert_same_bits(values, largest[:, :k], f"values at k = {k}")
        assert_same_bits(values, take(scores, indices), f"scores at the indices, k = {k}")
        assert indices.dtype == torch.int32


def assert_is_softmax(values: torch.Tensor, kept: torch.Tensor) -> None:
    """Within 12 float32 ulp of the float64 softmax, and one rounding.

    Of the arguments up to 8, the difference from the largest is off by half an ulp of 8, that is 4 of the result; exp
    by 2; the sum of 8 terms by 4; the quotient by 1.
    """
    exact = torch.softmax(kept.double(), dim=-1)
    bound = 12 * torch.finfo(torch.float32).eps * exact + torch.finfo(values.dtype).eps / 2 * exact * 1.001
    error = (values.double() - exact).abs()
    assert (error <= bound).all(), f"{float((error / exact).max()):.3e} relative"


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_normalises_over_the_kept(dtype: torch.dtype) -> None:
    scores = fill("random", 257, 64, dtype)
    values, indices = topk_fwd(scores, 8, softmax=True)
    assert_is_softmax(values, take(scores, indices))
    assert torch.equal(indices, topk_fwd(scores, 8)[1])


def test_softmax_of_rows_with_nan_or_inf_is_that_of_the_kept() -> None:
    inf, nan = math.inf, math.nan
    scores = torch.tensor([[5.0, nan, 5.0], [inf, 1.0, 0.0], [-inf, -inf, -inf], [-inf, 3.0, -inf]])
    values, _ = topk_fwd(scores, 2, softmax=True)
    expected = torch.tensor([[0.5, 0.5], [nan, 0.0], [nan, nan], [1.0, 0.0]])
    assert_same_bits(values[[0, 3]], expected[[0, 3]])
    assert values[1, 0].isnan()
    assert values[2].isnan().all()
    assert topk_fwd(scores, 3, softmax=True)[0][0].isnan().all()


def test_leading_dimensions_and_views_are_kept() -> None:
    scores = fill("random", 24, 64, torch.float32)
    values, indices = topk_fwd(scores, 8)
    three_d = topk_fwd(scores.view(2, 12, 64), 8)
    assert three_d[0].shape == (2, 12, 8)
    assert torch.equal(three_d[0].view(24, 8), values)
    assert torch.equal(three_d[1].view(24, 8), indices)
    wide = torch.randn(24, 200)
    wide[:, 100:164] = scores
    assert torch.equal(topk_fwd(wide[:, 100:164], 8)[1], indices)
    assert torch.equal(topk_fwd(scores.view(2, 12, 64).transpose(0, 1), 8)[1].transpose(0, 1).reshape(24, 8), indices)
    assert topk_fwd(scores[0], 8)[0].shape == (8,)


def test_no_rows_give_an_empty_result() -> None:
    for shape in [(0, 64), (0, 3, 64), (3, 0, 64)]:
        values, indices = topk_fwd(torch.empty(shape), 8)
        assert values.shape == indices.shape == (*shape[:-1], 8)


@pytest.mark.parametrize(
    ("n", "k", "kind", "dtype", "softmax"),
    [
        (51200, 1, "few-distinct", torch.float32, True),
        (51200, 50, "nan-and-inf", torch.bfloat16, False),
        (51200, 50, "random", torch.float16, True),
        (51200, 1024, "ties", torch.float16, False),
        (128256, 1, "nan-and-inf", torch.float16, False),
        (128256, 50, "ties", torch.float32, True),
        (128256, 1024, "few-distinct", torch.bfloat16, True),
        (151936, 1, "ties", torch.bfloat16, False),
        (151936, 50, "few-distinct", torch.float16, False),
        (151936, 1024, "nan-and-inf", torch.float32, False),
        (151936, 1024, "random", torch.float32, True),
    ],
)
def test_rows_of_a_whole_vocabulary_are_exact(n: int, k: int, kind: str, dtype: torch.dtype, softmax: bool) -> None:
    scores = fill(kind, 2, n, dtype, seed=n)
    values, indices = topk_fwd(scores, k, softmax)
    expected = torch.tensor([by_hand(row, k) for row in scores.double().tolist()], dtype=torch.int32)
    assert torch.equal(indices, expected)
    kept = take(scores, expected)
    if softmax:
        exact = torch.softmax(kept.double(), dim=-1)
        # The sum of up to 1024 float32 terms in any order: 1024 half ulps; see also assert_is_softmax.
        bound = (520 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2) * exact
        assert ((values.double() - exact).abs() <= bound).all()
    else:
        assert_same_bits(values, kept)


BAD = [
    BadInput("k above the row length", "k", lambda: ((torch.zeros(2, 4), 5), {}), fragment="4"),
    BadInput("k of zero", "k", lambda: ((torch.zeros(2, 4), 0), {})),
    BadInput("negative k", "k", lambda: ((torch.zeros(2, 4), -1), {})),
    BadInput("k not an integer", "k", lambda: ((torch.zeros(2, 4), 2.5), {}), TypeError),
    BadInput("float64 scores", "scores", lambda: ((torch.zeros(2, 4, dtype=torch.float64), 2), {}), TypeError),
    BadInput("integer scores", "scores", lambda: ((torch.zeros(2, 4, dtype=torch.int32), 2), {}), TypeError),
    BadInput("a scalar", "scores", lambda: ((torch.zeros(()), 1), {})),
    BadInput("a transposed matrix", "scores", lambda: ((torch.zeros(4, 2).t(), 2), {}), fragment="stride"),
    BadInput("a strided 3-D tensor", "scores", lambda: ((torch.zeros(2, 3, 8)[..., ::2], 2), {}), fragment="stride"),
    BadInput("not a tensor", "scores", lambda: (([[1.0]], 1), {}), TypeError),
    BadInput("softmax as text", "softmax", lambda: ((torch.zeros(2, 4), 2), {"softmax": "no"}), TypeError, "True"),
    BadInput("rows without columns", "k", lambda: ((torch.zeros(3, 0), 1), {})),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad_input_is_refused_with_its_name(case: BadInput) -> None:
    assert_rejects(topk_fwd, case)


ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 5, 6, 2**70, 2.0, math.nan, "x", [1], torch.tensor(2), torch.zeros(3, 5),
    torch.zeros(5), torch.zeros(()), torch.zeros(0, 5), torch.zeros(3, 0), torch.zeros(5, 3).t(), torch.zeros(2, 3, 5),
    torch.zeros(3, 5).half(), torch.zeros(3, 5).double(), torch.zeros(3, 5).bool(), torch.zeros(3, 5).to("meta"),
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_either_works_or_is_named(data: st.DataObject) -> None:
    values: dict[str, Any] = {"scores": fill("ties", 3, 5, torch.float32), "k": 2, "softmax": False}
    for name in data.draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=2)):
        values[name] = data.draw(st.sampled_from(ODD_VALUES))
    scores, k = values["scores"], values["k"]
    before = scores.clone() if torch.is_tensor(scores) else None
    try:
        got, indices = topk_fwd(**values)
    except (ValueError, TypeError) as error:
        if not re.match(r"topk_fwd: argument '\w+': expected .+, got .+", str(error), re.DOTALL):
            raise AssertionError("the message names neither op nor argument") from error
    else:
        assert got.shape == indices.shape == (*scores.shape[:-1], k)
        assert (got.dtype, indices.dtype, got.device) == (scores.dtype, torch.int32, scores.device)
    if before is not None and before.device.type == "cpu":
        assert torch.equal(scores, before)


@pytest.mark.parametrize("softmax", [False, True])
def test_registration_passes_opcheck(softmax: bool) -> None:
    scores = fill("random", 6, 64, torch.float32)
    for each in (scores, scores.view(2, 3, 64), torch.randn(6, 100)[:, 10:74]):
        opcheck(topk_fwd, (each, 8, softmax))


def test_compiles_without_a_graph_break() -> None:
    def route(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = topk_fwd(scores * 2, 8, softmax=True)
        return values + 1, indices

    scores = fill("random", 16, 64, torch.float32)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(scores), route(scores), strict=True):
        torch.testing.assert_close(got, expected)


# ---- the launch ------------------------------------------------------------------------------------------------------

launch = topk_fwd.kernel_op.launch


def refuse(*_arguments: object, **_options: object) -> None:
    pytest.fail("called")


@pytest.mark.parametrize("k", [True, 1.0])
def test_a_number_that_equals_a_known_k_does_not_pass_for_it(monkeypatch: pytest.MonkeyPatch, k: object) -> None:
    monkeypatch.setitem(kestrel_sampling.topk._entry_points, (torch.float32, 64, 1, -1), refuse)
    with pytest.raises(TypeError, match="'k': expected an integer"):
        launch(torch.zeros(2, 64), k)


def test_a_gpu_without_machine_code_is_unsupported_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.zeros(2, 64)
    monkeypatch.setattr("kestrel_runtime.binary._device_arch", lambda _index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (7, 5))
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UnsupportedError, match=r"capability \(7, 5\)"):
        launch(scores, 8)


def test_more_rows_than_a_kernel_can_number_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kestrel_sampling.topk._entry_points, (torch.float32, 1, 1, -1), refuse)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UnsupportedError, match="rows"):
        launch(torch.zeros(1, 1).expand(2**31 - 1023, 1), 1)


def test_the_reason_for_the_reference_is_the_same_for_every_length_and_k() -> None:
    reasons = set()
    for n, k in [(5000, 1025), (6000, 1025), (6000, 3000)]:
        with pytest.raises(UnsupportedError) as raised:
            launch(torch.zeros(2, n), k)
        reasons.add(str(raised.value))
    assert reasons == {"kernels cover k up to 1024"}


# ---- the binary ------------------------------------------------------------------------------------------------------


def test_a_variant_covers_every_row_up_to_4096_and_k_up_to_128() -> None:
    for dtype in variants.DTYPES:
        for n in range(1, 4097):
            for k in (1, 8, 9, 128):
                variant = variants.covering(dtype, n, k)
                assert variant is not None
                assert n <= variant.longest
                assert k <= variant.largest_k
        assert variants.covering(dtype, 4097, 8) is None
        assert variants.covering(dtype, 4096, 129) is None


def test_the_binary_has_an_entry_point_for_every_variant_and_architecture() -> None:
    binary = Binary("kestrel_sampling")
    if binary.manifest is None:
        pytest.skip("run from the sources, without a build")
    expected = {f"{variant.name}_sm{arch}" for variant in variants.VARIANTS for arch in binary.manifest.archs}
    assert set(binary.manifest.functions) == expected | {"sample", "probabilities", "topk_rows"}
    for name in expected:
        entry_point = binary.function(name)
        with pytest.raises(ValueError, match="device_type=cuda"):  # the generated wrapper's own checks
            entry_point(torch.zeros(1, 64), torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32), False)


# ---- the kernels -----------------------------------------------------------------------------------------------------


def on_gpu(scores: torch.Tensor, k: int, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    with backend("kernel"):
        return topk_fwd(scores, k, softmax)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("k", [8, 50])
@pytest.mark.parametrize("rows", [0, 740, 4096])
@pytest.mark.parametrize("n", [64, 256])
def test_kernel_covers_many_rows(n: int, rows: int, k: int) -> None:
    scores = fill("ties", rows, n, torch.bfloat16).cuda()
    values, indices = on_gpu(scores, k)
    expected_values, expected_indices = reference.topk_fwd(scores, k)
    assert torch.equal(indices, expected_indices)
    assert_same_bits(values, expected_values)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_the_first_call_of_a_process_can_be_captured_in_a_graph() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_kernel_compiles_without_a_graph_break() -> None:
    scores = fill("random", 257, 64, torch.bfloat16).cuda()
    with backend("kernel"):
        values, indices = torch.compile(lambda x: topk_fwd(x * 2, 8), fullgraph=True)(scores)
    expected = reference.topk_fwd(scores * 2, 8)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_kernel_refuses_bad_input_with_its_name(case: BadInput) -> None:
    with torch.device("cuda"):
        assert_rejects(topk_fwd, case)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_random_calls_equal_the_reference() -> None:
    compare_at_random(random_call, seconds=10.0, least=100)
