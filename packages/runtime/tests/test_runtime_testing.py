"""The helpers that the tests of every family share."""

from __future__ import annotations

import inspect
import random
import tempfile
import threading
import types
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kestrel_runtime import Binary, Manifest, UnsupportedError, check, current_backend, kernel_op, registry, testing
from kestrel_runtime.testing import BadInput, RandomCase

FAMILY = "kestrel_testingtest"


def _check_halve(x, by=2.0, *, out=None):
    check.tensor("halve", "x", x, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    check.number("halve", "by", by, above=0)
    if out is not None:
        check.tensor("halve", "out", out, dtype=x.dtype)
        check.shape("halve", "out", out, x.shape)
        check.disjoint("halve", "out", out)
    check.same("halve", "device", x=x, out=out)


def _make_halve() -> Any:
    def halve(x: torch.Tensor, by: float = 2.0, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Divide.

        >>> 1
        1
        """
        if by <= 0:
            raise ValueError(f"halve: argument 'by': expected a number > 0, got {by}")
        raise UnsupportedError("never")

    halve.__module__ = FAMILY
    halve.__globals__.update(torch=torch)
    return kernel_op(reference=lambda x, by=2.0: x / by, check=_check_halve, kernel="cuda")(halve)


halve = _make_halve()
X = torch.ones(3, 8)
BAD = [
    BadInput("float64", "x", lambda: ((X.double(),), {}), TypeError, "float64"),
    BadInput("zero", "by", lambda: ((X, 0.0), {}), ValueError, "> 0"),
    BadInput("out of another shape", "out", lambda: ((X,), {"out": torch.ones(8, 3)}), ValueError, "(3, 8)"),
    BadInput("a list", "x", lambda: (([1.0],), {}), TypeError, "list"),
]


@pytest.mark.parametrize(("function", "case", "path"), testing.refusal_params({halve: BAD}))
def test_bad_input_is_refused_on_every_path(function, case, path) -> None:
    testing.assert_refused(function, case, path)


def test_cases_are_only_sent_along_paths_that_carry_them() -> None:
    def paths(case: BadInput) -> list[str]:
        return [param.values[2] for param in testing.refusal_params({halve: [case]})]

    assert paths(BAD[0]) == ["public", "check", "torch.ops", "launch", "kernel"]
    assert paths(BAD[3]) == ["public", "check", "launch"]
    elsewhere = BadInput("elsewhere", "out", lambda: ((X,), {"out": X.to("meta")}))
    assert paths(elsewhere) == ["public", "check", "torch.ops", "kernel"]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (None, "the launch accepted it"),
        (ValueError("halve: argument 'x': expected a CUDA tensor, got cpu"), "the entry point says"),
    ],
)
def test_an_entry_point_that_accepts_or_differs_from_the_check_fails(raised, said, monkeypatch) -> None:
    def launch(*_: Any, **__: Any) -> None:
        if raised:
            raise raised

    record = registry.KernelOp(FAMILY, "halve", "cuda", (), launch, launch, _check_halve)
    monkeypatch.setattr("kestrel_runtime.testing.contract.skip_without_binary", lambda family: None)
    with pytest.raises(AssertionError, match=said):
        testing.contract._assert_launch_refuses(record, BAD[1])


@pytest.mark.parametrize(("archs", "skips"), [(None, True), ((), True), (("90a",), False)])
def test_entry_points_are_tested_where_a_binary_holds_kernels(archs, skips, monkeypatch) -> None:
    manifest = None if archs is None else Manifest(FAMILY, archs, (), False)
    monkeypatch.setattr(Binary, "manifest", manifest)
    with pytest.raises(pytest.skip.Exception) if skips else nullcontext():
        testing.skip_without_binary(FAMILY)


def test_an_op_that_writes_before_it_refuses_fails() -> None:
    def zero(x: torch.Tensor) -> None:
        x.zero_()
        raise ValueError("zero: argument 'x': expected more, got less")

    with pytest.raises(AssertionError, match="zero wrote before it refused"):
        testing.assert_refused(zero, BadInput("case", "x", lambda: ((torch.ones(2),), {})))


DERIVED = testing.derived_bad_inputs(halve, (X,), {"out": torch.ones(3, 8)})


def test_one_good_call_gives_the_bad_ones_of_every_argument() -> None:
    assert {case.name for case in DERIVED} == {
        *(f"{name} {what}" for name in ("x", "out") for what in ("elsewhere", "sparse", "requires grad")),
        "no x",
        "by beyond 64 bits",
    }


def test_fp8_tensors_have_no_sparse_form() -> None:
    cases = testing.derived_bad_inputs(halve, (X.to(torch.float8_e4m3fn),), {})
    assert {case.name for case in cases} == {"no x", "by beyond 64 bits"}


@pytest.mark.parametrize("case", DERIVED, ids=lambda case: case.name)
def test_derived_bad_inputs_are_refused(case: BadInput) -> None:
    testing.assert_refused(halve, case)


@settings(max_examples=30, deadline=None)
@given(call=testing.odd_calls((X,), {"by": 3.0, "out": None}))
def test_odd_calls_work_or_are_named(call) -> None:
    testing.assert_works_or_is_named(halve, *call)


def test_an_error_that_names_no_argument_fails() -> None:
    with pytest.raises(AssertionError, match="names neither op nor argument"):
        testing.assert_works_or_is_named(torch.zeros, (-1,))
    assert testing.assert_works_or_is_named(halve, (X, -1.0)) is None


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts_keep_the_values_and_a_contiguous_last_dimension(layout: str) -> None:
    for x in (torch.randn(4), torch.randn(3, 8), torch.randn(3, 5, 8)):
        placed = testing.in_layout(x, layout)
        assert torch.equal(placed, x)
        assert placed.stride(-1) == 1
        assert placed.is_contiguous() == (layout == "contiguous" or x.ndim < 2 or (x.ndim < 3 and layout != "sliced"))
        assert (placed.storage_offset() > 0) == (layout == "sliced")


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_opcheck_takes_layouts_and_out(layout: str) -> None:
    testing.opcheck(halve, (X, 3.0), layout=layout, views=[0])
    testing.opcheck(halve, (X,), {"out": torch.ones(3, 8)}, layout=layout, views=[0, "out"])


def test_a_complete_family_passes_and_an_undocumented_function_fails() -> None:
    module = types.SimpleNamespace(__name__=FAMILY, __all__=["halve"], halve=halve)
    assert [op.name for op in testing.assert_registered(module)] == ["halve"]
    module.halve = lambda x: x
    with pytest.raises(AssertionError, match="has no docstring"):
        testing.assert_registered(module)


def test_twins_keep_strides_and_aliasing_and_leave_the_originals_alone() -> None:
    x = torch.randn(4, 6)
    a, b, number = testing.twins([x.t()[1:], x[2], 3])
    assert (a.shape, a.stride(), a.storage_offset()) == (x.t()[1:].shape, (1, 6), 1)
    assert torch.equal(a, x.t()[1:])
    assert number == 3
    a.zero_()
    assert b[1:].eq(0).all()
    assert not x.eq(0).any()


def test_bits_are_compared_part_by_part() -> None:
    x, nan = torch.tensor([0.0, 1.0]), torch.tensor([float("nan")])
    testing.assert_same_bits((x, [nan, 3]), (x.clone(), [nan.clone(), 3]))
    with pytest.raises(AssertionError, match=r"result\[1\]: 1 of 2 elements differ, at \[0\]"):
        testing.assert_same_bits((x, -x), (x, torch.tensor([0.0, -1.0])))
    testing.assert_same_bits(nan[0], nan[0].clone())
    with pytest.raises(AssertionError, match="result: 1 of 1 elements differ"):
        testing.assert_same_bits(x[0], -x[0])
    other = (nan.view(torch.int32) + 1).view(torch.float32)
    testing.assert_same_bits(nan, other, any_nan=True)
    with pytest.raises(AssertionError, match="result: 1 of 1 elements differ"):
        testing.assert_same_bits(nan, other)
    with pytest.raises(AssertionError, match="float32"):
        testing.assert_same_bits(x, x.half())


def test_runs_that_differ_in_result_or_argument_fail() -> None:
    state = [0]

    def grows(x: torch.Tensor) -> torch.Tensor:
        state[0] += 1
        return x + state[0]

    def accumulates(x: torch.Tensor) -> None:
        state[0] += 1
        x.fill_(state[0])

    assert testing.assert_runs_repeat(torch.add, X, X).eq(2).all()
    with pytest.raises(AssertionError, match="run 2: result"):
        testing.assert_runs_repeat(grows, X)
    with pytest.raises(AssertionError, match=r"run 2: arguments\[0\]"):
        testing.assert_runs_repeat(accumulates, X)


def test_kernels_only_refuses_references(kernels_only: None) -> None:
    assert current_backend() == "kernel"
    with pytest.raises(UnsupportedError):
        halve(X)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """In place of torch.cuda: a GPU of 8 GiB, of which a test has taken so many, and what was done to its memory."""
    made = types.SimpleNamespace(taken=3.0, done=[])
    properties = types.SimpleNamespace(total_memory=8 * 2**30, name="a GPU", uuid="0-1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: made.taken * 2**30)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: made.done.append(name))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return made


def test_one_test_at_a_time_holds_a_large_allocation(gpu: types.SimpleNamespace) -> None:
    entered = threading.Event()

    @testing.large_allocation(gib=3)
    def another_test() -> None:
        entered.set()

    other = threading.Thread(target=another_test)
    with testing.large_allocation(gib=3):
        other.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    other.join()
    assert gpu.done == ["empty_cache", "reset_peak_memory_stats", "synchronize", "empty_cache"] * 2


def test_a_large_allocation_is_skipped_where_the_gpu_is_too_small(gpu: types.SimpleNamespace) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs 9 GiB of memory, a GPU has 8.0"):
        testing.large_allocation(gib=9).__enter__()
    assert not gpu.done


def test_a_large_allocation_larger_than_stated_fails(gpu: types.SimpleNamespace) -> None:
    with pytest.raises(AssertionError, match="took 3.00 GiB, not 2.9 at most"), testing.large_allocation(gib=2.9):
        pass


def test_a_failure_does_not_keep_a_large_allocation(gpu: types.SimpleNamespace) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    @testing.large_allocation(gib=3)
    @pytest.mark.parametrize("size", [5])
    def fails(size: int) -> None:
        tensor = torch.zeros(size)
        made.append(weakref.ref(tensor))
        raise ValueError("as it should")

    assert list(inspect.signature(fails).parameters) == ["size"]
    with pytest.raises(ValueError, match="as it should"):
        fails(size=5)
    assert made[0]() is None


def _by_backend(kernel: Any, reference: Any) -> Any:
    def op(*args: Any, **kwargs: Any) -> Any:
        return (kernel if current_backend() == "kernel" else reference)(*args, **kwargs)

    return op


def test_random_comparison_names_the_failing_case_and_its_seed() -> None:
    def wrong_past_six(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) < 6 else x * 3

    def draw(rng: random.Random) -> RandomCase:
        return RandomCase(_by_backend(wrong_past_six, lambda x: x * 2), (torch.ones(rng.randint(1, 8)),))

    seeds = [seed for seed in range(50) if random.Random(seed).randint(1, 8) >= 6]
    with pytest.raises(AssertionError, match=rf"seed {seeds[0]}: op\(float32\[[678]\]\): .*result: . of . elements"):
        testing.compare_at_random(draw, seconds=10)
    assert testing.compare_at_random(draw, 0.0, first_seed=seeds[0] + 1, cases=1) == (seeds[0] + 1 not in seeds)


def test_random_comparison_covers_written_arguments_and_guards_the_others() -> None:
    def draw(writes: tuple[int, ...], kernel: Any) -> Any:
        op = _by_backend(kernel, lambda x, y: x.add_(y))
        return lambda rng: RandomCase(op, (torch.ones(3), torch.ones(3)), writes=writes)

    assert testing.compare_at_random(draw((0,), lambda x, y: x.add_(y)), 0.0, least=3) == 3
    with pytest.raises(AssertionError, match="argument 0, which is not written"):
        testing.compare_at_random(draw((), lambda x, y: x.add_(y)), 0.0)
    with pytest.raises(AssertionError, match="argument 0: 3 of 3"):
        testing.compare_at_random(draw((0,), lambda x, y: x.add_(y).add_(y).sub(1)), 0.0)


def test_random_comparison_counts_only_cases_that_kernels_cover() -> None:
    calls = []

    def some(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 2:
            raise UnsupportedError("odd")
        return x

    def draw(may: bool) -> Any:
        return lambda rng: RandomCase(_by_backend(some, lambda x: x), (X,), may_be_unsupported=may)

    assert testing.compare_at_random(draw(True), 0.0, least=3) == 3
    assert len(calls) == 6
    with pytest.raises(AssertionError, match="UnsupportedError: odd"):
        testing.compare_at_random(draw(False), 0.0, least=2)


def test_canary_notices_a_write_on_either_side() -> None:
    for index in (-1, 12):
        middle, assert_intact = testing.canary((3, 4), torch.bfloat16)
        assert_intact()
        assert middle.isnan().all()
        torch.as_strided(middle, (1,), (1,), middle.storage_offset() + index).zero_()
        with pytest.raises(AssertionError, match="written"):
            assert_intact()


def test_distances_count_representable_values() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    y = torch.tensor([1.0 + 2**-7, -1.0 - 2**-7, -0.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    assert testing.ulp_distance(x, y).tolist() == [1, 1, 0, 0, 0]
    tiny = torch.tensor([torch.finfo(torch.float32).smallest_normal])
    assert testing.ulp_distance(tiny, -tiny).item() == 2 * 2**23
    q = torch.tensor([1.0, -448.0, 0.0]).to(torch.float8_e4m3fn)
    assert testing.fp8_code_distance(q, torch.tensor([1.125, -416.0, -0.0]).to(q.dtype)).tolist() == [1, 1, 0]
    nan = torch.tensor([float("nan")]).to(q.dtype)
    assert testing.fp8_code_distance(nan, q[:1]).item() > 256


def test_error_against_float64_is_judged_by_the_baseline() -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    rounded = exact.to(torch.bfloat16)
    testing.assert_close_to_f64(rounded, exact, rounded)
    testing.assert_close_to_f64(rounded, exact, rounded + 0.01)
    with pytest.raises(AssertionError, match="error"):
        testing.assert_close_to_f64(rounded + 0.01, exact, rounded)
    off = rounded.clone()
    off[7] += 1
    with pytest.raises(AssertionError, match="error"):
        testing.assert_close_to_f64(off, exact, rounded)
    exact[3] = float("nan")
    with pytest.raises(AssertionError):
        testing.assert_close_to_f64(rounded, exact, rounded)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_baseline_that_overflows_excuses_no_other_element(value: float) -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    rounded = exact.half()
    baseline = rounded.clone()
    baseline[3] = value
    testing.assert_close_to_f64(rounded, exact, baseline)
    with pytest.raises(AssertionError, match="error"):
        testing.assert_close_to_f64(rounded + 0.01, exact, baseline)
    with pytest.raises(AssertionError, match="NaN or inf"):
        testing.assert_close_to_f64(baseline, exact, baseline)


def test_bad_input_helper_fails_on_acceptance_wrong_type_and_vague_messages() -> None:
    def accepts(x):
        return x

    def vague(x):
        raise ValueError("no")

    case = testing.BadInput("case", "x", lambda: ((1,), {}))
    with pytest.raises(AssertionError, match="accepted"):
        testing.assert_rejects(accepts, case)
    with pytest.raises(AssertionError, match="missing"):
        testing.assert_rejects(vague, case)
    with pytest.raises(AssertionError, match="instead of TypeError"):
        testing.assert_rejects(vague, testing.BadInput("case", "x", lambda: ((1,), {}), TypeError))


def test_canaries_name_the_buffer_that_was_written_past() -> None:
    (first, second), assert_intact = testing.canaries(((2, 3), torch.float32), ((5,), torch.int8))
    assert_intact()
    assert (first.shape, second.dtype) == ((2, 3), torch.int8)
    torch.as_strided(second, (1,), (1,), second.storage_offset() + 5).zero_()
    with pytest.raises(AssertionError, match=r"buffer 1 of shape \(5,\): written past"):
        assert_intact()
