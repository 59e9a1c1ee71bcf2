"""topk_fwd: the reference against a float64 sort written out in Python; its launch and its binary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from topk_cases import BAD, BITS, DTYPES, KINDS, SIZES, by_hand, fill, ks, take

import kestrel_sampling
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.binary import RUN_SM80
from kestrel_runtime.testing import (
    ODD_VALUES,
    BadInput,
    assert_rejects,
    assert_same_bits,
    assert_works_or_is_named,
    odd_calls,
    opcheck,
)
from kestrel_sampling import topk_fwd
from kestrel_sampling.kernels import variants

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


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad_input_is_refused_with_its_name(case: BadInput) -> None:
    assert_rejects(topk_fwd, case)


ODD_SCORES = (
    *(torch.zeros(3, 5), torch.zeros(5), torch.zeros(()), torch.zeros(0, 5), torch.zeros(3, 0), torch.zeros(5, 3).t()),
    *(torch.zeros(2, 3, 5), torch.zeros(3, 5).half(), torch.zeros(3, 5).bool()),
)


@settings(max_examples=150, deadline=None)
@given(call=odd_calls((fill("ties", 3, 5, torch.float32), 2), {"softmax": False}, (*ODD_VALUES, 5, 6, *ODD_SCORES)))
def test_whatever_is_passed_either_works_or_is_named(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    scores, k = call[0]
    before = scores.clone() if torch.is_tensor(scores) else None
    found = assert_works_or_is_named(topk_fwd, *call)
    if found is not None:
        assert found[0].shape == found[1].shape == (*scores.shape[:-1], k)
        assert (found[0].dtype, found[1].dtype, found[0].device) == (scores.dtype, torch.int32, scores.device)
    if before is not None and before.device.type == "cpu" and not before.is_sparse:
        assert_same_bits(scores, before)


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
    archs = set(binary.manifest.archs)
    archs -= set(RUN_SM80) if "80" in archs else set()
    expected = {f"{variant.name}_sm{arch}" for variant in variants.VARIANTS for arch in archs}
    cuda = {"sample", "probabilities", "topk_rows", "process_logits", "token_logprobs", "sample_with_logprobs"}
    cuda |= {"chain_speculative_sampling", "process_and_sample", "logprob_split"}
    assert set(binary.manifest.functions) == expected | cuda
    for name in expected:
        entry_point = binary.function(name)
        with pytest.raises(ValueError, match="device_type=cuda"):  # the generated wrapper's own checks
            entry_point(torch.zeros(1, 64), torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32), False)
