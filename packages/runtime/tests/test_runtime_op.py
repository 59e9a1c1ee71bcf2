"""What an op does with its arguments, on ops made for these tests; test_runtime_launch.py has what it launches."""

from __future__ import annotations

import pytest
import torch
from op_samples import FAMILY, entry_of, launches, make_ops
from torch._subclasses import FakeTensorMode

from kestrel_runtime import (
    check,
    kernel_op,
    testing,
    trace,
)

OPS = make_ops()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    launches.clear()


def test_cpu_tensors_run_the_reference_and_never_the_launch() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(OPS.scale(x, 3.0), x * 3)
    assert launches == []


def test_results_are_contiguous_even_where_the_reference_returns_a_permuted_view() -> None:
    assert OPS.scale(torch.randn(3, 4)).is_contiguous()
    assert [part.is_contiguous() for part in OPS.halves(torch.randn(3, 4))] == [True, True]


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


@pytest.mark.parametrize("argument", ["x", "bias", "out"])
@pytest.mark.parametrize("path", ["public", "torch.ops"])
def test_every_tensor_that_requires_grad_is_named_and_nothing_is_written(path: str, argument: str) -> None:
    values = {"x": torch.ones(2, 2), "bias": torch.ones(2), "out": torch.zeros(2, 2)}
    values[argument].requires_grad_()
    call = OPS.scale if path == "public" else torch.ops.kestrel_optest.scale.out
    with pytest.raises(ValueError, match=f"scale: argument '{argument}': expected a tensor without requires_grad"):
        call(**values)
    assert values["out"].eq(0).all()


@pytest.mark.parametrize("path", ["public", "torch.ops"])
@pytest.mark.parametrize("argument", ["x", "bias"])
def test_tangents_are_refused(argument: str, path: str) -> None:
    call = OPS.scale if path == "public" else torch.ops.kestrel_optest.scale
    values = {"x": torch.ones(2, 2), "bias": torch.ones(2)}

    def of(value: torch.Tensor) -> torch.Tensor:
        return call(**(values | {argument: value}))

    named = f"scale: argument '{argument}': expected a tensor without a tangent"
    with pytest.raises(ValueError, match=named):
        torch.func.jvp(of, (values[argument],), (torch.ones_like(values[argument]),))
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(ValueError, match=named):
            of(torch.autograd.forward_ad.make_dual(values[argument], torch.ones_like(values[argument])))
        assert of(values[argument]).eq(3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", ["public", "torch.ops", "compiled"])
def test_an_op_means_the_same_inside_autocast(path: str, dtype: torch.dtype) -> None:
    x, w = torch.tensor([[1.0, 2**-20]]), torch.ones(2, 1)
    call = {
        "public": OPS.product,
        "torch.ops": torch.ops.kestrel_optest.product,
        "compiled": torch.compile(OPS.product, fullgraph=True, backend="aot_eager"),
    }[path]
    with torch.autocast("cpu", dtype):
        got = call(x, w)
        assert torch.is_autocast_enabled("cpu")
        assert (x @ w).dtype == dtype, "autocast is on again"
    assert (got.dtype, got.item()) == (torch.float32, 1 + 2**-20)


@pytest.mark.parametrize(
    ("argument", "values"),
    [("times", [2, 3, 5, 0]), ("power", [1.5, 2.5, 3.5]), ("negate", [True, False]), ("mode", ["double", "plain"])],
)
def test_scalars_may_change_between_calls_of_a_compiled_function(argument: str, values: list[object]) -> None:
    x, w = torch.rand(2, 3), torch.rand(3, 2)

    def step(value: object) -> torch.Tensor:
        if argument in ("times", "power"):  # as the wrappers of some ops do
            check.number("step", argument, value, integer=argument == "times", minimum=0, maximum=100)
        return OPS.product(x, w, **{argument: value})

    torch._dynamo.reset()  # its limit of recompilations counts all cases of this test
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for value in values:
        torch.testing.assert_close(compiled(value), step(value))


def test_fake_results_have_the_same_dtype_inside_autocast() -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        assert OPS.product(torch.empty(2, 3), torch.empty(3, 2)).dtype == torch.float32


OVERLAPS = {
    "rows that overlap": (("x",), lambda: {"x": torch.ones(9).as_strided((2, 8), (1, 1))}),
    "expanded rows": (("x",), lambda: {"x": torch.ones(1, 8).expand(2, 8)}),
    "two written tensors": (("x", "y"), lambda: dict.fromkeys(("x", "y"), torch.ones(4))),
    "two views of one buffer": (("x", "y"), lambda: dict(zip("xy", torch.ones(9).unfold(0, 8, 1), strict=True))),
    "another dtype": (("x", "y"), lambda: {"x": (b := torch.ones(4)), "y": b.view(torch.float16)[1:3]}),
}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("path", ["public", "torch.ops", "after a launch"])
def test_written_arguments_that_share_memory_are_refused_before_a_write(path: str, name: str) -> None:
    arguments, make = OVERLAPS[name]
    values = make()
    call = {
        "public": OPS.increment,
        "torch.ops": torch.ops.kestrel_optest.increment,
        "after a launch": entry_of(OPS.increment).on_cuda,  # type: ignore[attr-defined]
    }[path]
    shares = "shares no memory with 'y'" if len(arguments) == 2 else "whose elements do not share memory"
    with pytest.raises(ValueError, match=f"increment: argument 'x': expected a tensor to write .*{shares}, got "):
        call(**values)
    assert all(bool((value == make()[key]).all()) for key, value in values.items())


def test_interleaved_views_of_one_buffer_may_be_written() -> None:
    buffer = torch.zeros(3, 2, 8)
    OPS.increment(buffer[..., :4], buffer[..., 4:])
    OPS.increment(buffer[:, 0].t(), buffer[:, 1])
    assert buffer.eq(2).all()


def test_out_is_the_same_view_as_an_input_only_where_the_op_allows_it() -> None:
    x = torch.ones(2, 2)
    OPS.scale(x, out=x.view(2, 2))
    assert x.eq(2).all()
    with pytest.raises(ValueError, match="product: argument 'out': .* shares no memory with 'x', got tensors that"):
        OPS.product(x, torch.eye(2), out=x)
    wide = torch.ones(2, 3)
    with pytest.raises(ValueError, match="scale: argument 'out': .* shares no memory with 'x'"):
        OPS.scale(wide[:, :2], out=wide[:, 1:])
    assert wide.eq(1).all()


def _gate() -> object:
    def gate(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product of the halves of each row."""

    gate.__module__ = FAMILY
    reference = lambda x: x[:, : x.shape[1] // 2] * x[:, x.shape[1] // 2 :]  # noqa: E731
    return kernel_op(reference=reference, check=lambda x, *, out=None: None, out_may_be_columns_of=("x",))(gate)


GATE = _gate()


@pytest.mark.parametrize("start", [0, 1, 2])
def test_out_may_be_columns_of_an_input_where_the_op_allows_it(start: int) -> None:
    x = torch.arange(1.0, 13.0).view(3, 4)
    want = x[:, :2] * x[:, 2:]
    assert torch.equal(GATE(x, out=x[:, start : start + 2]), want)


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x.as_strided((3, 2), (2, 1), 2),  # rows of another stride
        lambda x: x.as_strided((3, 2), (4, 1), 3),  # past the end of a row
        lambda x: x.as_strided((3, 2), (4, 1), 4),  # other rows
        lambda x: x.as_strided((3, 2), (4, 2), 0),  # every other column
        lambda x: x[:2, :2],
    ],
)
def test_out_that_overlaps_an_input_in_another_way_is_refused(part) -> None:
    x = torch.arange(1.0, 17.0).view(4, 4)[:3]
    with pytest.raises(ValueError, match="gate: argument 'out': expected a tensor to write"):
        GATE(x, out=part(x))


@pytest.mark.parametrize("call", [lambda t: OPS.scale(torch.ones(2, 2), out=t), lambda t: OPS.increment(t)])
def test_inference_tensors_are_written_in_inference_mode_alone(call) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2, 2)
        call(tensor)
    with pytest.raises(ValueError, match="expected a tensor that may be written outside torch.inference_mode"):
        call(tensor)
    assert not tensor.eq(0).any()


class _Tagged(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):  # type: ignore[no-untyped-def]
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        return function(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class _Unrelated(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):  # type: ignore[no-untyped-def]
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return NotImplemented


def test_two_subclasses_that_do_not_know_each_other_are_named() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert OPS.quotient(_Tagged(x), y).eq(2).all()
    with pytest.raises(TypeError, match="quotient: argument 'y': expected a plain tensor or a _Tagged, .* _Unrelated"):
        OPS.quotient(_Tagged(x), _Unrelated(y))


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
    out = torch.empty(3, 4)
    assert OPS.scale(torch.randn(3, 4).as_subclass(Logged), out=out) is out


def test_a_transform_goes_through_the_dispatcher() -> None:
    with trace() as served:
        result = torch.func.vmap(OPS.scale)(torch.ones(3, 2, 2))
    assert result.eq(2).all()
    assert served == {"kestrel_optest.scale": {"kernel": 0, "reference": 3}}, "one call of the op for each of the batch"


BAD_TENSORS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "negated": lambda: torch.view_as_complex(torch.ones(3, 3, 2)).conj().imag,
    "conjugated": lambda: torch.ones(3, 3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_of_other_layouts_are_refused(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match="scale: argument 'x': expected "):
        OPS.scale(BAD_TENSORS[name]())


def test_meta_beside_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="scale: argument 'bias': expected device cpu as x has, got meta"):
        OPS.scale(torch.ones(2, 2), 1.0, torch.ones(2, device="meta"))
