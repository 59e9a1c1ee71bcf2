"""When an op launches, falls back to its reference, or refuses to, on ops made for these tests."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from op_samples import FAMILY, entry_of, launches, make_ops
from torch._subclasses import FakeTensorMode

from kestrel_runtime import (
    KestrelFallbackWarning,
    UnsupportedError,
    backend,
    kernel_op,
    op,
    ops,
    testing,
    trace,
)

OPS = make_ops()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    launches.clear()


def test_backend_kernel_refuses_cpu_tensors_and_unknown_names_are_refused() -> None:
    with backend("kernel"), pytest.raises(UnsupportedError, match=r"kestrel_optest\.scale"):
        OPS.scale(torch.randn(3, 4))
    assert torch.equal(OPS.scale(torch.ones(1, 1)), torch.full((1, 1), 2.0))
    with pytest.raises(ValueError, match="expected one of auto, kernel, reference"), backend("fast"):
        pass


def test_unsupported_launch_falls_back_once_with_a_warning_and_counts_as_reference() -> None:
    on_cuda = entry_of(OPS.scale).on_cuda  # type: ignore[attr-defined]
    x = torch.randn(3, 4)
    with trace() as served, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(on_cuda(x), x * 2)
    assert launches == ["scale"] * 3
    messages = [str(warning.message) for warning in caught if warning.category is KestrelFallbackWarning]
    assert messages == ["kestrel_optest.scale runs its PyTorch reference: float13 is not covered"]
    assert served == {"kestrel_optest.scale": {"kernel": 0, "reference": 3}}


def test_every_reason_for_a_fallback_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("one", "two", "one"):
            op._warn_once("kestrel_optest.reasons", reason)
    assert [str(warning.message).rpartition(" ")[2] for warning in caught] == ["one", "two"]


def test_a_fallback_warns_at_the_line_that_called_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_warned", set())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # so that the public function launches
    with pytest.warns(KestrelFallbackWarning) as direct:
        OPS.scale(torch.ones(1, 1))
    op._warned.clear()
    with pytest.warns(KestrelFallbackWarning) as deeper, trace():
        OPS.scale(torch.ones(1, 1))
    assert [caught[0].filename for caught in (direct, deeper)] == [__file__] * 2


def test_a_trace_inside_another_leaves_it_counting() -> None:
    with trace() as outer:
        with trace() as inner:
            OPS.scale(torch.ones(1, 1))
        OPS.scale(torch.ones(1, 1))
    OPS.scale(torch.ones(1, 1))
    assert inner == {"kestrel_optest.scale": {"kernel": 0, "reference": 1}}
    assert outer == {"kestrel_optest.scale": {"kernel": 0, "reference": 2}}


def test_backend_kernel_turns_the_fallback_into_an_error_and_reference_never_launches() -> None:
    on_cuda = entry_of(OPS.scale).on_cuda  # type: ignore[attr-defined]
    with backend("kernel"), pytest.raises(UnsupportedError, match="float13"):
        on_cuda(torch.ones(1, 1))
    launches.clear()
    with backend("reference"):
        on_cuda(torch.ones(1, 1))
    assert launches == []


def test_invalid_input_is_an_error_even_where_the_launch_says_unsupported() -> None:
    on_cuda = entry_of(OPS.scale).on_cuda  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'bias'"):
        on_cuda(torch.ones(2, 3), 1.0, torch.ones(2))


BAD_QUOTIENTS = [
    testing.BadInput("no x", "x", lambda: ((None, torch.ones(4)), {}), TypeError, "NoneType"),
    testing.BadInput("number for y", "y", lambda: ((torch.ones(4), 4.0), {}), TypeError, "float"),
    testing.BadInput("by zero", "by", lambda: ((torch.ones(4), torch.ones(4), 0), {}), ValueError, "0"),
    testing.BadInput("by text", "by", lambda: ((torch.ones(4), torch.ones(4)), {"by": "two"}), TypeError, "str"),
]


@pytest.mark.parametrize("case", BAD_QUOTIENTS, ids=lambda case: case.name)
def test_any_error_of_a_launch_on_bad_input_becomes_the_named_error(case: testing.BadInput) -> None:
    testing.assert_rejects(entry_of(OPS.quotient).on_cuda, case, "quotient")  # type: ignore[attr-defined]


def test_an_error_that_no_check_explains_is_raised_as_it_is() -> None:
    with pytest.raises(IndexError):
        entry_of(OPS.quotient).on_cuda(torch.ones(4), torch.ones(4), 100)  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_none_beside_a_cuda_tensor_is_the_named_error() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(TypeError, match="quotient: argument 'x': expected a tensor, got NoneType"):
        OPS.quotient(None, x)
    with pytest.raises(TypeError, match="quotient: argument 'y': expected a tensor, got NoneType"):
        OPS.quotient(x, None)
    with pytest.raises(ValueError, match="quotient: argument 'by'"):
        OPS.quotient(x, x, by=0)
    assert OPS.quotient(x, x, by=2).shape == (2,)


@pytest.mark.gpu
def test_tangents_and_transforms_do_not_reach_a_launch() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="quotient: argument 'x': expected a tensor without a tangent"):
        torch.func.jvp(lambda x: OPS.quotient(x, x), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="'y': .* without a tangent"):
        OPS.quotient(x, torch.autograd.forward_ad.make_dual(x, x))
    assert OPS.quotient(x, x).shape == (4,)


@pytest.mark.parametrize(
    "redirect",
    [
        FakeTensorMode,
        trace,
        lambda: backend("reference"),
        torch.autograd.forward_ad.dual_level,
    ],
    ids=["dispatch mode", "trace", "reference", "forward mode"],
)
def test_what_redirects_a_call_keeps_it_from_launching_directly(redirect) -> None:
    assert op.launches_directly()
    with redirect():
        assert not op.launches_directly()
    assert op.launches_directly()


def test_a_transform_keeps_a_call_from_launching_directly() -> None:
    found = []
    torch.func.vmap(lambda x: found.append(op.launches_directly()) or x)(torch.empty(2))
    assert found == [False]


@pytest.mark.parametrize("is_capturing", [True, False])
def test_a_reference_that_reads_the_host_is_refused_in_a_capture(
    is_capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    with (
        pytest.raises(UnsupportedError, match="scale: the reference cannot be captured in a CUDA graph: it reads sizes")
        if is_capturing
        else contextlib.nullcontext()
    ):
        op.refuse_capture("scale", "it reads sizes")


def test_messages_name_the_public_function_of_an_op() -> None:
    def inner(x: torch.Tensor) -> None:
        raise UnsupportedError("no")

    inner.__module__ = FAMILY
    made = kernel_op(
        reference=lambda x: x.add_(1), check=lambda x: None, kernel="cuda", mutates=("x",), public="outer"
    )(inner)
    with pytest.raises(ValueError, match="^outer: argument 'x': .* requires_grad"):
        made(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="^outer: argument 'x': .* share memory"):
        made(torch.ones(1).expand(2))
    with backend("kernel"), pytest.raises(UnsupportedError, match="^kestrel_optest.outer: "):
        entry_of(made).on_cuda(torch.ones(2))  # type: ignore[attr-defined]
    with pytest.warns(KestrelFallbackWarning, match="^kestrel_optest.outer runs its PyTorch reference: no"):
        entry_of(made).on_cuda(torch.ones(2))  # type: ignore[attr-defined]


def test_registry_names_the_op_and_its_kind() -> None:
    record = {op.name: op for op in ops(FAMILY)}
    assert record["scale"].kernel == "cuda"
    assert record["increment"].kernel is None
    assert record["increment"].mutates == ("x", "y")
