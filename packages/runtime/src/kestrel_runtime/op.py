"""``@kernel_op``: one Python function becomes an op with three entry paths.

    kestrel_norm.rms_norm(x, weight)
      |- plain CUDA tensors, eager:     the decorated function, which launches the kernel
      |- torch.compile, FakeTensor, meta, any tensor subclass or dispatch mode:   torch.ops.kestrel_norm.rms_norm
      '- CPU tensors, or a launch that raises UnsupportedError:                   the reference

The torch op is registered with the same functions: the launch for CUDA, the reference for the CPU, and the reference on
fake tensors for shapes. Plain CUDA tensors do not go through it, because a call of a torch op that is registered from
Python takes about 3 us more than a direct call.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.autograd import forward_ad as _forward_ad

from . import check as checks
from .errors import KestrelFallbackWarning, UnsupportedError
from .registry import KernelOp, _tracers, count, register
from .state import current_backend

P = ParamSpec("P")
R = TypeVar("R")

_libraries: dict[str, torch.library.Library] = {}
_warned: set[tuple[str, str]] = set()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # types whose tensors nothing intercepts

_is_compiling = torch.compiler.is_dynamo_compiling  # every other tracer has fake tensors or a dispatch mode
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad: their wrappers look like plain tensors
_without_autocast = torch._C._DisableAutocast


def kernel_op(
    *,
    reference: Callable[..., Any],
    check: Callable[..., None],
    kernel: str | None = None,
    mutates: Sequence[str] = (),
    out_may_be: Sequence[str] | None = None,
    out_may_be_columns_of: Sequence[str] = (),
    public: str | None = None,
    shape: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an op of a launch function.

    The decorated function allocates the result (or takes ``out``) and calls an entry point of the family's binary; its
    docstring is the documentation. The family is the function's top-level package, the op's name its name without a
    leading underscore. Parameters are tensors, optional tensors, numbers, bools, strings, dtypes and int lists; the
    result is a tensor, a tuple of tensors or None. With a parameter ``out`` a second overload ``<name>.out`` is
    registered, which writes ``out`` and returns nothing.

    torch.autocast does not change an op. Before a reference runs, the op's own check runs, and each written argument
    (``mutates`` and ``out``) is checked to share memory neither within itself nor with another argument, so that no
    call fails after a write.

    reference: the specification, same parameters without ``out``; returns fresh tensors or writes in place.
    check: same parameters as the op; raises ValueError or TypeError. It runs before every reference, and after a
        launch that raised, so that the message names op, argument, expected and got.
    kernel: "cuda", "cute", or None while there is no kernel: the body is then never run.
    mutates: the tensors written in place.
    out_may_be: the arguments that ``out`` may be the same view of; None: any of them. Partial overlap is refused.
    out_may_be_columns_of: the arguments x of which ``out`` may be a slice x[..., i:j], for ops whose kernel reads all
        of a row's elements before it writes those that share their memory.
    public: the public function that messages name, where that is another one than the op.
    shape: replaces the reference on fake tensors, if the reference needs values on the host.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        family, name = launch.__module__.partition(".")[0], launch.__name__.lstrip("_")
        op = KernelOp(family, name, kernel, tuple(mutates), launch, reference, check)
        register(op)
        signature = inspect.signature(launch, eval_str=True)
        entry = _Entry(op, signature, shape or reference, out_may_be, out_may_be_columns_of, public)
        entry.register_with_torch()
        return cast("Callable[P, R]", entry.public_function())

    return decorate


def launches_directly() -> bool:
    """Whether a call on plain CUDA tensors without gradients launches at once: nothing traces or redirects it."""
    if _is_compiling() or _tracers or _dispatch_modes() or _transforms() is not None:
        return False
    return _forward_ad._current_level < 0 and current_backend() != "reference"


def refuse_capture(op: str, reason: str) -> None:
    """Raise UnsupportedError while a CUDA graph is being captured; for a reference that must read the host."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{op}: the reference cannot be captured in a CUDA graph: {reason}")


class _Entry:
    """The entry paths of one op."""

    def __init__(
        self,
        op: KernelOp,
        signature: inspect.Signature,
        shape: Callable[..., Any],
        out_may_be: Sequence[str] | None = None,
        out_may_be_columns_of: Sequence[str] = (),
        public: str | None = None,
    ) -> None:
        self.op = op
        self.public_name = public or op.name
        self.qualified_name = f"{op.family}.{self.public_name}"
        self.signature = signature
        self.shape = shape
        self.written = [name for name in signature.parameters if name in op.mutates or name == "out"]
        self.out_may_be = set(signature.parameters) if out_may_be is None else set(out_may_be)
        self.out_may_be_columns_of = set(out_may_be_columns_of)
        self.out_position = list(signature.parameters).index("out") if "out" in signature.parameters else None

    # -- the implementations ------------------------------------------------------------------------------------------

    def on_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """The launch; the reference where the launch does not cover the call or the backend forbids it."""
        if current_backend() == "reference":
            return self.on_cpu(*args, **kwargs)
        try:
            if self.op.kernel is None:
                raise UnsupportedError("this op has no kernel yet")
            result = self.op.launch(*args, **kwargs)
        except Exception as error:  # of any kind: a launch reads arguments that are not checked yet
            return self.after_error(error, args, kwargs)
        if _tracers:
            count(self.op, "kernel")
        return result

    def after_error(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a launch that raised: report the caller's mistake, run the reference, or raise the error itself."""
        self.check(args, kwargs)
        if not isinstance(error, UnsupportedError):
            raise error
        if current_backend() == "kernel":
            raise UnsupportedError(f"{self.qualified_name}: {error}") from None
        _warn_once(self.qualified_name, str(error))
        return self._run_reference(args, kwargs)

    def on_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The reference, after its checks."""
        self.check(args, kwargs)
        if current_backend() == "kernel":
            raise UnsupportedError(f"{self.qualified_name}: the backend is 'kernel', and CPU tensors have no kernel")
        return self._run_reference(args, kwargs)

    def on_fake(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and strides of the result."""
        self.op.check(*args, **kwargs)
        args, kwargs, out = self._without_out(args, kwargs)
        if out is not None or self.signature.return_annotation in (None, inspect.Signature.empty):
            return out
        return _contiguous(self.shape(*args, **kwargs))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check everything that can be wrong with a call, before anything is written."""
        name = self.public_name
        self.op.check(*args, **kwargs)
        if not self.written:
            return
        given = dict(zip(self.signature.parameters, args, strict=False)) | kwargs
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        checked = set()
        for key in self.written:
            written = tensors.get(key)
            if written is None:
                continue
            if written.is_inference() and not torch.is_inference_mode_enabled() and checks.has_memory(written):
                expected = "a tensor that may be written outside torch.inference_mode"
                checks.fail(name, key, expected, "an inference tensor")
            checks.disjoint(name, key, written)
            checked.add(key)
            for other, tensor in tensors.items():
                if other not in checked:
                    checks.no_overlap(
                        name,
                        key,
                        written,
                        other,
                        tensor,
                        may_be_same=key == "out" and other in self.out_may_be,
                        may_be_columns=key == "out" and other in self.out_may_be_columns_of,
                    )

    def _run_reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, out = self._without_out(args, kwargs)
        with _without_autocast():
            result = self.op.reference(*args, **kwargs)
        if _tracers:
            count(self.op, "reference")
        if out is None:
            return _contiguous(result)
        return out.copy_(result)

    def _without_out(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        position = self.out_position
        if position is None:
            return args, kwargs, None
        if len(args) > position:
            return args[:position] + args[position + 1 :], kwargs, args[position]
        rest = dict(kwargs)
        out = rest.pop("out", None)
        return args, rest, out

    # -- torch.ops ----------------------------------------------------------------------------------------------------

    def register_with_torch(self) -> None:
        op = self.op
        library = _libraries.get(op.family)
        if library is None:
            library = _libraries[op.family] = torch.library.Library(op.family, "FRAGMENT")
        parameters = [p for p in self.signature.parameters.values() if p.name != "out"]
        prototype = self.signature.replace(parameters=parameters)
        self._define(library, op.name, prototype, op.mutates, self.on_cuda, self.on_cpu, self.on_fake)
        if self.out_position is not None:
            out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, annotation=torch.Tensor)
            prototype = self.signature.replace(parameters=[*parameters, out], return_annotation=None)
            implementations = (_returning_nothing(f) for f in (self.on_cuda, self.on_cpu, self.on_fake))
            self._define(library, f"{op.name}.out", prototype, (*op.mutates, "out"), *implementations)

    def _define(
        self,
        library: torch.library.Library,
        name: str,
        prototype: inspect.Signature,
        mutates: tuple[str, ...],
        on_cuda: Callable[..., Any],
        on_cpu: Callable[..., Any],
        on_fake: Callable[..., Any],
    ) -> None:
        def typed() -> None: ...

        typed.__signature__ = prototype  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(typed, mutates_args=mutates)
        library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        library.impl(name, on_cuda, "CUDA")
        library.impl(name, on_cpu, "CPU")
        library.impl(name, self._below_autograd(name), "Autograd")
        torch.library.register_fake(f"{self.op.family}::{name}", on_fake, lib=library)

    def _below_autograd(self, name: str) -> Callable[..., Any]:
        def below_autograd(*args: Any, **kwargs: Any) -> Any:
            if _grad_enabled():
                self.refuse_grad(args, kwargs)
            if _forward_ad._current_level >= 0:
                self.refuse_tangents(args, kwargs)
            with torch._C._AutoDispatchBelowAutograd():
                return self._overload(name)(*args, **kwargs)

        return below_autograd

    def _overload(self, name: str) -> Any:
        packet, _, overload = name.partition(".")
        return getattr(getattr(getattr(torch.ops, self.op.family), packet), overload or "default")

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in (*zip(self.signature.parameters, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                yield name, value

    def refuse_tangents(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in self._tensors(args, kwargs):
            if _forward_ad.unpack_dual(value).tangent is not None:
                expected = "a tensor without a tangent (ops here have no autograd)"
                checks.fail(self.public_name, name, expected, "a dual tensor")

    def refuse_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in self._tensors(args, kwargs):
            if value.requires_grad:
                expected = "a tensor without requires_grad, or torch.no_grad() (ops here have no autograd)"
                checks.fail(self.public_name, name, expected, "requires_grad=True")

    # -- the public function ------------------------------------------------------------------------------------------

    def public_function(self) -> Callable[..., Any]:
        """A function with the launch's signature, which launches directly if all tensors are plain and on a GPU.

        Its source is generated with the names of the parameters, because the same steps over *args and **kwargs take
        longer.
        """
        parameters = self.signature.parameters.values()
        required = [p.name for p in parameters if p.annotation is torch.Tensor]
        optional = [p.name for p in parameters if p.annotation == torch.Tensor | None]
        plain = [f"type({name}) in _PLAIN" for name in required]
        plain.insert(1, f"{required[0]}.is_cuda")
        plain += [f"({name} is None or type({name}) in _PLAIN)" for name in optional]
        grads = [f"{name}.requires_grad" for name in required]
        grads += [f"{name} is not None and {name}.requires_grad" for name in optional]
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        source = _CALL.format(
            parameters=", ".join([*names, *(["*", *keywords] if keywords else [])]),
            given=", ".join([*names, *(f"{name}={name}" for name in keywords)]),
            packed=f"({', '.join(names)},), {{{', '.join(f'{name!r}: {name}' for name in keywords)}}}",
            plain=" and ".join(plain),
            grads=" or ".join(grads),
        )
        made: dict[str, Any] = {}
        exec(source, globals(), made)
        call = made["make"](self, self.op.launch, self.op.kernel is None)
        functools.update_wrapper(call, self.op.launch)
        call.__defaults__, call.__kwdefaults__ = self.op.launch.__defaults__, self.op.launch.__kwdefaults__
        call.kernel_op = self.op
        return cast("Callable[..., Any]", call)

    def otherwise(self, *args: Any, **kwargs: Any) -> Any:
        """A call with a tensor that is not plain, or not on a GPU."""
        on_gpu = False
        for value in (*args, *kwargs.values()):
            if type(value) in _PLAIN:
                if not on_gpu:  # one tensor on a GPU decides; the launch checks the others
                    on_gpu = value.is_cuda
                    if not on_gpu and not value.is_cpu:
                        return self.dispatched(*args, **kwargs)
            elif isinstance(value, torch.Tensor):
                return self.dispatched(*args, **kwargs)
        if _grad_enabled():
            self.refuse_grad(args, kwargs)
        return self.on_cuda(*args, **kwargs) if on_gpu else self.on_cpu(*args, **kwargs)

    def dispatched(self, *args: Any, **kwargs: Any) -> Any:
        """Through torch's dispatcher."""
        try:
            return self.through_dispatcher(*args, **kwargs)
        except (RuntimeError, TypeError):  # torch's own message about an argument that does not fit the schema
            self.op.check(*args, **kwargs)
            self.refuse_two_subclasses(args, kwargs)
            raise

    def refuse_two_subclasses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report two subclasses of torch.Tensor of which neither handles the other."""
        first: type | None = None
        for name, value in self._tensors(args, kwargs):
            if type(value) not in _PLAIN:
                first = first or type(value)
                if not issubclass(type(value), first) and not issubclass(first, type(value)):
                    expected = f"a plain tensor or a {first.__name__}, as another argument is"
                    checks.fail(self.public_name, name, expected, type(value).__name__, TypeError)

    def through_dispatcher(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, out = self._without_out(args, kwargs)
        if out is None:
            return self._overload(self.op.name)(*args, **kwargs)
        self._overload(f"{self.op.name}.out")(*args, out=out, **kwargs)
        return out


_CALL = """
def make(entry, launch, by_reference):
    after_error, on_cuda, otherwise = entry.after_error, entry.on_cuda, entry.otherwise
    refuse_grad = entry.refuse_grad
    dispatched, through_dispatcher = entry.dispatched, entry.through_dispatcher

    def call({parameters}):
        if _is_compiling():
            return through_dispatcher({given})
        if _dispatch_modes() or _transforms() is not None or _forward_ad._current_level >= 0:
            return dispatched({given})
        if not ({plain}):
            return otherwise({given})
        if _grad_enabled() and ({grads}):
            refuse_grad({packed})
        if by_reference or _tracers or current_backend() == "reference":
            return on_cuda({given})
        try:
            return launch({given})
        except Exception as error:
            return after_error(error, {packed})

    return call
"""


def _warn_once(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        message = f"{name} runs its PyTorch reference: {reason}"
        warnings.warn(message, KestrelFallbackWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The stacklevel for `_warn_once`, its caller, of the first frame outside this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_of_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "torch" or package.startswith("kestrel_")


def _contiguous(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(part.contiguous() for part in result)
    return None if result is None else result.contiguous()


def _returning_nothing(implementation: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        implementation(*args, **kwargs)

    return run
