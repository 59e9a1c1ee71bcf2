"""Tests of the contract of every op: bad input is refused with the same message on every path, and opcheck passes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ..binary import Binary
from ..errors import UnsupportedError
from ..registry import KernelOp, ops
from ..state import backend
from .buffers import in_layout, twins

Call = tuple[tuple[Any, ...], dict[str, Any]]

OPCHECK_TESTS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
REFUSAL_PATHS = ("public", "check", "torch.ops", "launch", "kernel")
"""The public function, its check, the registered op, the C++ entry point on CPU tensors, and the call on a GPU."""

ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**70, 2.5, float("nan"), float("inf"), "row", [1], torch.float16,
    torch.ones(1), torch.tensor(1.0), torch.zeros(0), torch.ones(3, 8).double(), torch.ones(8, 3).t(),
    torch.ones(2, 8).int(), torch.ones(1, 8).expand(3, 8), torch.ones(2, 3, 8).half(), torch.ones(3, 8).to_sparse(),
    torch.ones(3, 8, device="meta"),
)  # fmt: skip


@dataclass(frozen=True)
class BadInput:
    """One call that an op must refuse, and the parts that its message must contain."""

    name: str
    argument: str
    """The argument that the message names; empty where any may be named."""
    make: Callable[[], Call]
    """Returns (args, kwargs) of the call."""
    error: type[Exception] | tuple[type[Exception], ...] = ValueError
    fragment: str = ""
    """Text the message must hold besides op, argument, ``expected`` and ``got``."""


def cases_of(good: Mapping[str, Any]) -> Callable[..., BadInput]:
    """A maker of cases: the good call with some arguments replaced.

    ``bad(name, argument, value, error=ValueError, fragment="", key=None, **more)``: ``key`` is the argument to replace
    where the message names another one, ``more`` are further arguments to replace.
    """

    def bad(
        name: str,
        argument: str,
        value: Any,
        error: type[Exception] | tuple[type[Exception], ...] = ValueError,
        fragment: str = "",
        key: str | None = None,
        **more: Any,
    ) -> BadInput:
        return BadInput(name, argument, lambda: ((), {**good, **more, key or argument: value}), error, fragment)

    return bad


def assert_rejects(function: Callable[..., Any], case: BadInput, op: str | None = None) -> str:
    """``function`` raises the case's error, and the message names op, argument, expected and got. Returns it."""
    args, kwargs = case.make()
    name = (op or function.__name__).lstrip("_")
    raised: Exception | None = None
    try:
        function(*args, **kwargs)
    except Exception as error:
        raised = error
    assert raised is not None, f"{case.name}: {name} accepted it"
    kind, text = type(raised), str(raised)
    errors = case.error if isinstance(case.error, tuple) else (case.error,)
    wanted = " or ".join(error.__name__ for error in errors)
    assert kind in errors, f"{case.name}: {kind.__name__} instead of {wanted}: {text}"
    for part in (name, f"'{case.argument}'" if case.argument else "argument '", "expected", "got", case.fragment):
        assert part in text, f"{case.name}: {part!r} is missing in: {text}"
    return text


def refusal_params(table: Mapping[Callable[..., Any], Iterable[BadInput]], paths: Sequence[str] = REFUSAL_PATHS) -> Any:
    """pytest parameters (function, case, path) for :func:`assert_refused`: every case on every path that can carry it.

    table: public function -> its bad inputs. A function that wraps its op has the paths "public" and "kernel" alone.
    """
    found = []
    for function, cases in table.items():
        record = getattr(function, "kernel_op", None)
        for case in cases:
            for path in paths:
                if _can_carry(path, record, case):
                    marks = [pytest.mark.gpu] if path == "kernel" else []
                    name = f"{function.__name__}: {case.argument}: {case.name}: {path}"
                    found.append(pytest.param(function, case, path, id=name, marks=marks))
    return found


def _can_carry(path: str, record: KernelOp | None, case: BadInput) -> bool:
    if path == "public":
        return True
    args, kwargs = case.make()
    values = [*args, *kwargs.values()]
    if path == "kernel":
        on_cpu = any(isinstance(x, torch.Tensor) and x.is_cpu and x.layout == torch.strided for x in values)
        return on_cpu and not any(map(dataclasses.is_dataclass, values))  # their tensors would stay on the CPU
    if record is None:
        return False
    if path == "torch.ops":
        return _fits_the_schema(record, args, kwargs)
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in values):
        return False  # refused before the check
    if path == "launch":
        return record.kernel == "cuda" and all(map(_crosses_into_cpp, values))
    return True


def _crosses_into_cpp(value: Any) -> bool:
    """Whether an entry point receives the value as it is; integers beyond 64 bits arrive as opaque objects."""
    if isinstance(value, torch.Tensor):
        return value.is_cpu and value.layout == torch.strided
    if isinstance(value, (list, tuple)):
        return all(map(_crosses_into_cpp, value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _fits_the_schema(record: KernelOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's dispatcher takes these arguments; else it raises before the op sees them."""
    signature = inspect.signature(record.launch, eval_str=True)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        annotation = signature.parameters[name].annotation
        if annotation in (float, int) and not isinstance(value, bool):
            fits = isinstance(value, (int, float) if annotation is float else int) and abs(value) < 2**63
        elif annotation in (bool, str):
            fits = isinstance(value, annotation)
        else:
            tensor, optional = "Tensor" in str(annotation), "None" in str(annotation)
            fits = (value is None and optional) or (tensor and isinstance(value, torch.Tensor))
        if not fits:
            return False
    return not any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in (*args, *kwargs.values()))


def assert_refused(function: Callable[..., Any], case: BadInput, path: str = "public") -> None:
    """The op refuses the case on this path (see REFUSAL_PATHS), and no argument is written.

    "launch": a C++ entry point that reports an argument must use the message of the Python check. If it gets as far as
    its last check, that of the device, it has not refused the case, and the test fails.
    """
    record: KernelOp | None = getattr(function, "kernel_op", None)
    name = function.__name__.lstrip("_")
    args, kwargs = case.make()
    if path == "kernel":
        values = twins((*args, *kwargs.values()), "cuda")
        args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
    before = twins((*args, *kwargs.values()))
    same_call = BadInput(case.name, case.argument, lambda: (args, kwargs), case.error, case.fragment)
    if path in ("public", "kernel"):
        with backend("kernel" if path == "kernel" else "auto"):
            assert_rejects(function, same_call)
    else:
        assert record is not None, f"{name} is not the public function of a registered op"
        name = record.name
        if path == "check":
            assert_rejects(record.check, same_call, name)
        elif path == "torch.ops":
            assert_rejects(_torch_op(record, "out" in kwargs), same_call, name)
        else:
            _assert_launch_refuses(record, same_call)
    for old, value in zip(before, (*args, *kwargs.values()), strict=True):
        if isinstance(value, torch.Tensor) and not value.is_meta and value.layout == torch.strided:
            same = old.is_set_to(value) or torch.equal(_storage_bytes(old), _storage_bytes(value))
            assert same, f"{case.name}: {name} wrote before it refused"


def _storage_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def skip_without_binary(family: str) -> None:
    """Skip a test of entry points where the family has no binary, or was built with KESTREL_ARCHS=none."""
    try:
        manifest = Binary(family).manifest
    except UnsupportedError:
        manifest = None
    if manifest is None or not manifest.archs:
        pytest.skip(f"{family} has no binary here")


def assert_launch_agrees(function: Callable[..., Any], case: BadInput) -> None:
    """The launch refuses a case in the words of the public function: for overlaps, which are no part of the check."""
    record: KernelOp = function.kernel_op  # type: ignore[attr-defined]
    skip_without_binary(record.family)
    args, kwargs = case.make()
    wanted = assert_rejects(function, BadInput(case.name, case.argument, lambda: (args, kwargs), case.error))
    with pytest.raises(case.error) as got:
        record.launch(*args, **kwargs)
    assert str(got.value) == wanted


def _assert_launch_refuses(record: KernelOp, case: BadInput) -> None:
    skip_without_binary(record.family)
    wanted = assert_rejects(record.check, case, record.name)
    args, kwargs = case.make()
    try:
        record.launch(*args, **kwargs)
    except Exception as error:
        said = str(error)
        if isinstance(error, (ValueError, TypeError)) and said.startswith(f"{record.name}: argument"):
            assert said == wanted, f"{case.name}: the entry point says {said!r}, the check {wanted!r}"
        return
    raise AssertionError(f"{case.name}: the launch accepted it")


def derived_bad_inputs(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[BadInput]:
    """Bad inputs that follow from one good call.

    Each tensor on another device, sparse, requiring grad, and each required argument None; each integer and float
    beyond 64 bits, each flag as text.
    """
    signature = inspect.signature(function)
    values = signature.bind(*args, **kwargs).arguments
    tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    found = []

    def bad(what: str, argument: str, key: str, value: Any, error: Any = ValueError, fragment: str = "") -> None:
        found.append(BadInput(what, argument, lambda: ((), {**values, key: value}), error, fragment))

    for name in tensors:
        value = values[name]
        if len(tensors) > 1:  # the first tensor sets the device, so that another one is named
            bad(f"{name} elsewhere", "" if name == tensors[0] else name, name, value.to("meta"))
        is_fp8 = value.dtype.is_floating_point and value.element_size() == 1
        if not is_fp8:  # torch has no sparse FP8
            bad(f"{name} sparse", name, name, value.to_sparse(), fragment="strided")
        if value.dtype.is_floating_point and not is_fp8:
            bad(f"{name} requires grad", name, name, value.detach().clone().requires_grad_(), fragment="requires_grad")
    for name, parameter in signature.parameters.items():
        value = values.get(name, parameter.default)
        if parameter.default is parameter.empty and "None" not in str(parameter.annotation):
            bad(f"no {name}", name, name, None, (TypeError, ValueError))
        if isinstance(value, bool):
            bad(f"{name} as text", name, name, "no", TypeError)
        elif isinstance(value, (int, float)):
            bad(f"{name} beyond 64 bits", name, name, 2**70, (TypeError, ValueError))
    return found


def odd_calls(args: Sequence[Any], kwargs: Mapping[str, Any], odd: Sequence[Any] = ODD_VALUES) -> Any:
    """A hypothesis strategy of (args, kwargs): the good call with one or two arguments replaced by an odd value."""
    from hypothesis import strategies as st  # type: ignore[import-not-found]

    keys = [*range(len(args)), *kwargs]

    @st.composite  # type: ignore[untyped-decorator]
    def calls(draw: Any) -> Call:
        values = dict(enumerate(args)) | dict(kwargs)
        for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
            values[key] = draw(st.sampled_from(odd))
        return tuple(values[i] for i in range(len(args))), {name: values[name] for name in kwargs}

    return calls()


def assert_works_or_is_named(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The call returns, or raises a ValueError or TypeError that names op and argument. Returns the result or None.

    A valid call that nothing covers may raise UnsupportedError.
    """
    name = function.__name__.lstrip("_")
    try:
        return function(*args, **(kwargs or {}))
    except UnsupportedError:
        return None
    except Exception as error:
        named = re.match(rf"{name}: argument '.+': expected .+, got .+", str(error), re.DOTALL)
        if not isinstance(error, (ValueError, TypeError)) or not named:
            raise AssertionError(f"{name}: {type(error).__name__} names neither op nor argument: {error}") from error
    return None


def _torch_op(record: KernelOp, with_out: bool = False) -> Any:
    packet = getattr(getattr(torch.ops, record.family), record.name)
    return packet.out if with_out else packet.default


def opcheck(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    layout: str = "contiguous",
    views: Sequence[int | str] = (),
) -> None:
    """``torch.library.opcheck`` on a public function made by ``@kernel_op`` (or on a torch op).

    With ``out`` in kwargs the overload that writes it is checked. ``views``: the positions and names of the tensors
    that are brought into ``layout`` (see in_layout). FP8 tensors are checked without test_schema: it multiplies its
    inputs, which torch cannot do in FP8.
    """
    kwargs = dict(kwargs or {})
    placed = [in_layout(x, layout) if i in views else x for i, x in enumerate(args)]
    kwargs = {name: in_layout(x, layout) if name in views else x for name, x in kwargs.items()}
    record = getattr(op, "kernel_op", None)
    if record is not None:
        op = _torch_op(record, kwargs.get("out") is not None)
    tensors = [x for x in (*placed, *kwargs.values()) if isinstance(x, torch.Tensor)]
    has_fp8 = any(x.dtype.is_floating_point and x.element_size() == 1 for x in tensors)
    tests = [test for test in OPCHECK_TESTS if not (has_fp8 and test == "test_schema")]
    torch.library.opcheck(op, tuple(placed), kwargs, test_utils=tests)


def assert_registered(module: Any, family: str | None = None, examples: bool = True) -> list[KernelOp]:
    """Every op of a family is complete: registered with torch, checked, documented and exported. Returns the ops.

    module: the family's package. Its public functions have a docstring, with a doctest example where ``examples``. The
    torch ops of each record have a schema that marks what is written, and its ``out`` overload where it takes one.
    """
    family = family or module.__name__
    found = ops(family)
    assert found, f"{family} has registered no op"
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__doc__, f"{family}.{name} has no docstring"
        if inspect.isfunction(value):
            assert ">>>" in value.__doc__ or not examples, f"{family}.{name} has no example in its docstring"
            assert set(inspect.signature(value).parameters) - {"args", "kwargs"}, f"{family}.{name} hides its signature"
    for record in found:
        parameters = list(inspect.signature(record.launch).parameters)
        schema = _torch_op(record)._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written == list(record.mutates), f"{record.qualified_name} writes {record.mutates}, schema: {schema}"
        assert [a.name for a in schema.arguments] == [p for p in parameters if p != "out"], str(schema)
        checked = inspect.signature(record.check).parameters
        variable = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in checked.values())
        text = f"{record.qualified_name}: its check takes {list(checked)}, the op {parameters}"
        assert variable or list(checked) == parameters, text
        if "out" in parameters:
            assert [a.name for a in _torch_op(record, True)._schema.arguments if a.alias_info] == [
                *record.mutates,
                "out",
            ]
    return found
