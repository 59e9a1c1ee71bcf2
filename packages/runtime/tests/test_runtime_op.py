"""The three ways into an op, on an op made for these tests."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import kestrel_runtime
from kestrel_runtime import KestrelFallbackWarning, UnsupportedError, backend, check, kernel_op, ops, testing, trace

FAMILY = "kestrel_optest"
launches: list[str] = []


def _make_ops() -> types.SimpleNamespace:
    """Ops of a pretended family, so that nothing here collides with a real one."""

    def scale_reference(x, factor=2.0, bias=None):
        y = x.float() * factor
        return (y if bias is None else y + bias.float()).to(x.dtype).transpose(0, 1).contiguous().transpose(0, 1)

    def scale_check(x, factor=2.0, bias=None, *, out=None):
        check.tensor("scale", "x", x, dtype=check.FLOATS, ndim=2)
        check.number("scale", "factor", factor)
        if bias is not None:
            check.shape("scale", "bias", bias, (x.shape[-1],))
        if out is not None:
            check.shape("scale", "out", out, x.shape)
        check.same("scale", "device", x=x, bias=bias, out=out)

    def scale(
        x: torch.Tensor, factor: float = 2.0, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scale."""
        launches.append("scale")
        raise UnsupportedError("float13 is not covered")

    def increment_reference(x, y=None):
        x.add_(1)
        if y is not None:
            y.add_(1)

    def increment_check(x, y=None):
        check.tensor("increment", "x", x, dtype=check.FLOATS)

    def increment(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        """Increment in place."""

    def quotient_check(x, y, by=1):
        check.tensor("quotient", "x", x, dtype=check.FLOATS)
        check.tensor("quotient", "y", y, dtype=check.FLOATS)
        check.number("quotient", "by", by, integer=True, minimum=1)

    def quotient(x: torch.Tensor, y: torch.Tensor, by: int = 1) -> torch.Tensor:
        """Launches without looking at its arguments, as kernels do."""
        return x.new_empty(y.numel() // by + [0][by // 100])

    for function in (scale, increment, quotient):
        function.__module__ = FAMILY
        function.__globals__.update(torch=torch)
    sys.modules.setdefault(FAMILY, types.ModuleType(FAMILY))
    made_scale = kernel_op(reference=scale_reference, check=scale_check, kernel="cuda")(scale)
    made_increment = kernel_op(reference=increment_reference, check=increment_check, mutates=("x", "y"))(increment)
    made_quotient = kernel_op(reference=lambda x, y, by=1: x + y, check=quotient_check, kernel="cuda")(quotient)
    return types.SimpleNamespace(scale=made_scale, increment=made_increment, quotient=made_quotient)


OPS = _make_ops()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    launches.clear()


def test_cpu_tensors_run_the_reference_and_never_the_launch() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(OPS.scale(x, 3.0), x * 3)
    assert launches == []


def test_results_are_contiguous_even_where_the_reference_returns_a_permuted_view() -> None:
    assert OPS.scale(torch.randn(3, 4)).is_contiguous()


def test_out_is_written_and_returned_and_may_alias_the_input() -> None:
    x = torch.randn(3, 4)
    expected = x * 2
    assert OPS.scale(x, out=x) is x
    assert torch.equal(x, expected)


def test_in_place_op_returns_nothing_and_writes_its_arguments() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    assert OPS.increment(x, y) is None
    assert x.tolist() == [1, 1]
    assert y.tolist() == [2, 2]


def test_bad_arguments_name_op_argument_expected_and_got() -> None:
    case = testing.BadInput(
        "short bias", "bias", lambda: ((torch.zeros(2, 3), 1.0, torch.zeros(2)), {}), fragment="(3,)"
    )
    testing.assert_rejects(OPS.scale, case)
    case = testing.BadInput("integers", "x", lambda: ((torch.zeros(2, 3, dtype=torch.int32),), {}), TypeError, "int32")
    testing.assert_rejects(OPS.scale, case)


def test_inputs_that_require_grad_raise_in_grad_mode_only() -> None:
    x = torch.nn.Parameter(torch.ones(2, 2))
    for call in (OPS.scale, torch.ops.kestrel_optest.scale):
        with pytest.raises(ValueError, match="requires_grad"):
            call(x)
        with torch.no_grad():
            assert call(x).tolist() == [[2, 2], [2, 2]]


def test_torch_op_has_two_overloads_and_the_same_functions_behind_them() -> None:
    x = torch.randn(3, 4)
    out = testing.poison((3, 4), torch.float32)
    torch.ops.kestrel_optest.scale.out(x, 2.0, out=out)
    assert torch.equal(out, x * 2)
    assert torch.equal(torch.ops.kestrel_optest.scale(x, 2.0), out)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_opcheck_accepts_both_ops_on_views(layout: str) -> None:
    base = torch.randn(6, 6)
    x = {"contiguous": base, "transposed": base.t(), "sliced": base[1:, :5]}[layout]
    testing.opcheck(OPS.scale, (x,), {"factor": 3.0})
    testing.opcheck(OPS.increment, (x, None))
    torch.library.opcheck(torch.ops.kestrel_optest.scale.out, (x,), {"out": torch.empty_like(x)})


def test_compiles_as_one_graph_with_out_and_in_place() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = OPS.scale(x + 1)
        OPS.increment(y)
        return OPS.scale(y, out=y) - 1

    x = torch.randn(3, 4)
    assert torch.allclose(torch.compile(step, fullgraph=True)(x.clone()), step(x.clone()))


def test_fake_and_meta_tensors_give_shapes_without_running_anything() -> None:
    with FakeTensorMode():
        result = OPS.scale(torch.empty(3, 4))
    assert (tuple(result.shape), result.device.type, result.is_contiguous()) == ((3, 4), "cpu", True)
    assert OPS.scale(torch.empty(3, 4, device="meta")).is_meta
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        OPS.scale(torch.empty(3, 4, device="meta"), 1.0, torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="scale: argument 'factor': expected a number, got str"):
        OPS.scale(torch.empty(3, 4, device="meta"), "much")
    assert launches == []


def test_tensor_subclass_goes_through_the_dispatcher() -> None:
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    OPS.scale(torch.randn(3, 4).as_subclass(Logged))
    assert any("kestrel_optest.scale" in name for name in seen)


def test_backend_kernel_refuses_cpu_tensors_and_unknown_names_are_refused() -> None:
    with backend("kernel"), pytest.raises(UnsupportedError, match=r"kestrel_optest\.scale"):
        OPS.scale(torch.randn(3, 4))
    assert torch.equal(OPS.scale(torch.ones(1, 1)), torch.full((1, 1), 2.0))
    with pytest.raises(ValueError, match="expected one of auto, kernel, reference"), backend("fast"):
        pass


def _entry_of(public: object) -> object:
    """The object behind a public function, to reach the CUDA implementation with CPU tensors."""
    cells = dict(zip(public.__code__.co_freevars, public.__closure__, strict=True))  # type: ignore[attr-defined]
    return cells["on_cuda"].cell_contents.__self__


def test_unsupported_launch_falls_back_once_with_a_warning_and_counts_as_reference() -> None:
    on_cuda = _entry_of(OPS.scale).on_cuda  # type: ignore[attr-defined]
    x = torch.randn(3, 4)
    with trace() as served, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(on_cuda(x), x * 2)
    assert launches == ["scale"] * 3
    messages = [str(warning.message) for warning in caught if warning.category is KestrelFallbackWarning]
    assert messages == ["kestrel_optest.scale runs its PyTorch reference: float13 is not covered"]
    assert served == {"kestrel_optest.scale": {"kernel": 0, "reference": 3}}


def test_backend_kernel_turns_the_fallback_into_an_error_and_reference_never_launches() -> None:
    on_cuda = _entry_of(OPS.scale).on_cuda  # type: ignore[attr-defined]
    with backend("kernel"), pytest.raises(UnsupportedError, match="float13"):
        on_cuda(torch.ones(1, 1))
    launches.clear()
    with backend("reference"):
        on_cuda(torch.ones(1, 1))
    assert launches == []


def test_invalid_input_is_an_error_even_where_the_launch_says_unsupported() -> None:
    on_cuda = _entry_of(OPS.scale).on_cuda  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'bias'"):
        on_cuda(torch.ones(2, 3), 1.0, torch.ones(2))


BAD_QUOTIENTS = [
    testing.BadInput("no x", "x", lambda: ((None, torch.ones(4)), {}), TypeError, "NoneType"),
    testing.BadInput("number for y", "y", lambda: ((torch.ones(4), 4.0), {}), TypeError, "float"),
    testing.BadInput("by zero", "by", lambda: ((torch.ones(4), torch.ones(4), 0), {}), ValueError, "0"),
    testing.BadInput("by text", "by", lambda: ((torch.ones(4), torch.ones(4)), {"by": "two"}), TypeError, "str"),
]


@pytest.mark.parametrize("case", BAD_QUOTIENTS, ids=lambda case: case.name)
def test_whatever_a_launch_stumbles_over_becomes_the_named_error(case: testing.BadInput) -> None:
    testing.assert_rejects(_entry_of(OPS.quotient).on_cuda, case, "quotient")  # type: ignore[attr-defined]


def test_an_error_that_no_check_explains_is_raised_as_it_is() -> None:
    with pytest.raises(IndexError):
        _entry_of(OPS.quotient).on_cuda(torch.ones(4), torch.ones(4), 100)  # type: ignore[attr-defined]


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


def test_registry_names_the_op_and_its_kind() -> None:
    record = {op.name: op for op in ops(FAMILY)}
    assert record["scale"].kernel == "cuda"
    assert record["increment"].kernel is None
    assert record["increment"].mutates == ("x", "y")


def test_version_is_a_literal() -> None:
    assert kestrel_runtime.__version__.count(".") == 2
