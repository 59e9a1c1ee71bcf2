"""Helpers for the tests of every family: poisoned outputs, canaries, distances, bad inputs, graphs, chains of launches.

It is a pytest plugin too, which knows the marker ``gpu`` and skips those tests where there is no GPU. A family's
conftest.py takes it in with one line, so that it works wherever the tests are run from:

    from kestrel_runtime.testing import pytest_collection_modifyitems, pytest_configure  # noqa: F401
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CANARY_ELEMENTS = 256


def pytest_configure(config: Any) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU with a kernel image for it")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip the tests marked gpu where there is no GPU."""
    import pytest

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor no result may equal where it was not written: NaN for floats (0x7F for FP8), a rare pattern else."""
    result = torch.empty(tuple(shape), dtype=dtype, device=device)
    width = result.element_size()
    if dtype.is_floating_point and width > 1:
        return result.fill_(float("nan"))
    if dtype == torch.bool:
        return result.fill_(True)
    result.view(_INTEGER_OF_WIDTH[width]).fill_(0x7F)
    return result


def canary(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A poisoned tensor in the middle of a larger buffer, and a function that asserts the surroundings untouched."""
    count = 1
    for size in shape:
        count *= size
    buffer = torch.empty(count + 2 * _CANARY_ELEMENTS, dtype=dtype, device=device)
    bits = buffer.view(_INTEGER_OF_WIDTH[buffer.element_size()])
    bits.fill_(0x5A)
    middle = buffer[_CANARY_ELEMENTS : _CANARY_ELEMENTS + count].view(tuple(shape))
    middle.copy_(poison(shape, dtype, device))

    def assert_intact() -> None:
        before, after = bits[:_CANARY_ELEMENTS], bits[_CANARY_ELEMENTS + count :]
        assert bool((before == 0x5A).all()), "written before the start of the tensor"
        assert bool((after == 0x5A).all()), "written past the end of the tensor"

    return middle, assert_intact


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, so that neighbours differ by one; both zeros map to 0."""
    width = 8 * x.element_size()
    bits = x.contiguous().view(_INTEGER_OF_WIDTH[x.element_size()]).to(torch.int64) & ((1 << width) - 1)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits >> (width - 1) == 1, -magnitude, magnitude)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values lie between each pair: int64, 0 where both are NaN, huge where one is."""
    assert a.dtype == b.dtype, f"{a.dtype} against {b.dtype}"
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    distance = (_ordered(a) - _ordered(b)).abs()
    nan_a, nan_b = a.isnan(), b.isnan()
    distance = torch.where(nan_a & nan_b, torch.zeros_like(distance), distance)
    return torch.where(nan_a ^ nan_b, torch.full_like(distance, 2**62), distance)


def fp8_code_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """:func:`ulp_distance` for FP8 tensors (of the same float8 dtype)."""
    assert a.dtype == b.dtype, f"{a.dtype} against {b.dtype}"
    distance = (_ordered(a) - _ordered(b)).abs()
    nan_a, nan_b = a.float().isnan(), b.float().isnan()
    distance = torch.where(nan_a & nan_b, torch.zeros_like(distance), distance)
    return torch.where(nan_a ^ nan_b, torch.full_like(distance, 2**62), distance)


def assert_close_to_f64(got: torch.Tensor, exact: torch.Tensor, baseline: torch.Tensor, slack: float = 1.1) -> None:
    """The error of ``got`` against the float64 ``exact`` exceeds that of ``baseline`` by at most 10 %.

    baseline: PyTorch's own composition in the dtype of ``got``. Both the Euclidean and the largest error count; the
    largest may in addition be half a unit in the last place of its element (a result that is rounded once can be that
    far off where the baseline happens to be lucky), and with fewer than 64
    elements so may the Euclidean error. NaN and inf must stand in the same places.
    """
    assert got.dtype == baseline.dtype, f"{got.dtype} against {baseline.dtype}"
    assert got.shape == exact.shape, f"{tuple(got.shape)} against {tuple(exact.shape)}"
    rounded = exact.to(got.dtype)
    finite = rounded.isfinite()
    torch.testing.assert_close(got[~finite], rounded[~finite], rtol=0, atol=0, equal_nan=True)
    exact64 = exact.double()[finite]
    ours = (got.double()[finite] - exact64).abs()
    theirs = torch.nan_to_num((baseline.double()[finite] - exact64).abs(), nan=float("inf"))
    half_ulp = 0.5 * torch.finfo(got.dtype).eps * exact64.abs() + 0.5 * torch.finfo(got.dtype).smallest_normal
    if ours.numel() == 0:
        return
    limit = slack * theirs.norm() + half_ulp.norm() * (ours.numel() < 64)  # few elements: luck decides the baseline
    assert ours.norm() <= limit, f"error {ours.norm():.3e} against {theirs.norm():.3e} of the baseline"
    worst = (ours - half_ulp).max()
    assert worst <= slack * theirs.max(), f"largest error {ours.max():.3e} against {theirs.max():.3e} of the baseline"


@dataclass(frozen=True)
class BadInput:
    """One call that an op must refuse, with what its message must name."""

    name: str
    argument: str
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    """Returns (args, kwargs) of the call."""
    error: type[Exception] = ValueError
    fragment: str = ""
    """Text the message must hold besides op, argument, ``expected`` and ``got``."""


def assert_rejects(function: Callable[..., Any], case: BadInput, op: str | None = None) -> None:
    """``function`` raises the case's error, and the message names op, argument, expected and got."""
    args, kwargs = case.make()
    name = (op or function.__name__).lstrip("_")
    raised: Exception | None = None
    try:
        function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raised = error
    assert raised is not None, f"{case.name}: {name} accepted it"
    kind, text = type(raised), str(raised)
    assert kind is case.error, f"{case.name}: {kind.__name__} instead of {case.error.__name__}: {text}"
    for part in (name, f"'{case.argument}'", "expected", "got", case.fragment):
        assert part in text, f"{case.name}: {part!r} is missing in: {text}"


def graph_replay(function: Callable[..., Any], args: Sequence[Any], new_args: Sequence[Any]) -> Any:
    """Capture ``function(*args)`` in a CUDA graph, write ``new_args`` into the same tensors, replay, return the result.

    The tensors in ``args`` are overwritten. The result must equal ``function(*new_args)`` if nothing was baked in.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        saved = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
        function(*args)
        _overwrite(args, saved)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*args)
    _overwrite(args, new_args)
    graph.replay()
    torch.cuda.synchronize()
    return result


def _overwrite(args: Sequence[Any], values: Sequence[Any]) -> None:
    for target, value in zip(args, values, strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(value)


def assert_waits_for_the_launch_before(
    chain: Callable[[int, Callable[[], None]], Sequence[torch.Tensor]], contents: int = 2, repetitions: int = 1000
) -> None:
    """A launch that may start before the one before it has ended reads what that one wrote.

    ``chain(i, between)`` writes the i-th contents of an input by a launch that lets the next one start early, launches
    what reads it, and returns its results; wherever a launch reads what the one before wrote it calls ``between()``.
    What it must give is found with a synchronisation there. Then it runs ``repetitions`` times in a CUDA graph without,
    the contents in turn, and every result must be the same, bit for bit.
    """
    wanted = [[_as_bytes(x).clone() for x in chain(i, torch.cuda.synchronize)] for i in range(contents)]
    for i in range(contents):
        same = all(map(torch.equal, wanted[i], wanted[i - 1]))
        assert not same, f"contents {i - 1 if i else contents - 1} and {i} give the same: nothing would be noticed"
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    turns = contents * -(-20 // contents)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            results = chain(turn % contents, lambda: None)
            for got, want in zip(results, wanted[turn % contents], strict=True):
                wrong.add_((_as_bytes(got) != want).any())
    replays = -(-repetitions // turns)
    for _ in range(replays):
        graph.replay()
    assert int(wrong) == 0, f"{int(wrong)} results of {replays * turns} repetitions differ"


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


OPCHECK_TESTS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


def opcheck(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> None:
    """``torch.library.opcheck`` on a public function made by ``@kernel_op`` (or on a torch op)."""
    record = getattr(op, "kernel_op", None)
    if record is not None:
        op = getattr(getattr(torch.ops, record.family), record.name).default
    torch.library.opcheck(op, tuple(args), kwargs or {}, test_utils=OPCHECK_TESTS)
