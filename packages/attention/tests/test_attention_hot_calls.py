"""Calls whose form was launched before: which tensors they match, and that nothing is skipped for others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import tvm_ffi

from kestrel_attention import decode, flash_attn_with_kvcache, hot_calls
from kestrel_attention.hot_calls import HotCalls
from kestrel_attention.kernels.parameters import DecodeScalars, DecodeTensors
from kestrel_attention.launching import LaunchError
from kestrel_runtime import Binary, UnsupportedError, backend, trace

OUT, LSE = (DecodeTensors._fields.index(name) for name in ("mOut", "mLse"))
op = importlib.import_module("kestrel_attention.flash_attn_with_kvcache")
X = torch.zeros(4, 6, 8)
OPS = {name: getattr(op, name) for name in vars(op) if hasattr(getattr(op, name), "kernel_op")}


@pytest.fixture
def kept() -> HotCalls:
    calls = HotCalls()
    calls.keep("key", (X, X[0]), "launch")
    return calls


def test_a_call_of_the_same_form_is_found(kept: HotCalls) -> None:
    assert kept.find("key", (torch.ones(4, 6, 8), torch.ones(6, 8))) == "launch"
    assert kept.find("another key", (X, X[0])) is None


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("shape", lambda: torch.zeros(4, 6, 9)),
        ("strides", lambda: torch.zeros(6, 4, 8).transpose(0, 1)),
        ("dtype", lambda: X.half()),
        ("device", lambda: X.to("meta")),
        ("requires_grad", lambda: X.clone().requires_grad_()),
        ("type", lambda: torch.nn.Parameter(X, requires_grad=False)),
        ("rank", lambda: X[0]),
    ],
)
def test_a_tensor_of_another_form_is_not_found(kept: HotCalls, what: str, other: Callable[[], torch.Tensor]) -> None:
    assert kept.find("key", (other(), X[0])) is None, what


def test_nothing_is_hot_by_reference_in_a_trace_or_under_a_transform(kept: HotCalls) -> None:
    with backend("reference"):
        assert kept.find("key", (X, X[0])) is None
    with trace():
        assert kept.find("key", (X, X[0])) is None
    found = []
    torch.func.vmap(lambda x: found.append(kept.find("key", (X, X[0]))) or x)(X)
    assert found == [None]
    assert kept.find("key", (X, X[0])) == "launch"


def test_a_tensor_that_is_given_twice_is_not_kept(kept: HotCalls) -> None:
    kept.keep("twice", (X, X), "launch")
    assert kept.find("twice", (X, X)) is None


def test_a_tensor_that_requires_grad_is_not_kept(kept: HotCalls) -> None:
    """Legal under no_grad, refused where gradients are enabled: guards do not tell the two apart."""
    x = X.clone().requires_grad_()
    with torch.no_grad():
        kept.keep("grad", (x,), "launch")
    assert kept.find("grad", (x,)) is None


def test_a_call_that_is_refused_or_kept_already_is_not_bound(kept: HotCalls) -> None:
    bound: list[str] = []
    twice, grad = (X, X), (X.clone().requires_grad_(),)
    with torch.no_grad():
        for key, tensors in (("key", (X, X[0])), ("twice", twice), ("grad", grad)):
            kept.keep(key, tensors, "launch", lambda: bound.append("bound"))
    with trace():
        kept.keep("traced", (X,), "launch", lambda: bound.append("bound"))
    torch.func.vmap(lambda x: kept.keep("mapped", (x,), "launch", lambda: bound.append("bound")) or x)(X)
    assert bound == []
    kept.keep("new", (X,), "launch", lambda: "bound")
    assert kept.find("new", (X,)) == "bound"


def test_a_tensor_with_memory_of_its_own_kind_is_not_kept(kept: HotCalls) -> None:
    class Wrapped(torch.Tensor):
        pass

    x = X.clone().as_subclass(Wrapped)
    kept.keep("wrapped", (x,), "launch")
    assert kept.find("wrapped", (x,)) is None


def test_a_written_tensor_that_may_touch_another_is_not_found(kept: HotCalls) -> None:
    memory = torch.zeros(600)
    x, out = memory[:192].view(4, 6, 8), memory[192:240].view(6, 8)
    for written in (0, 1):
        assert kept.find("key", (x, out), written) == "launch"
        assert kept.find("key", (memory[47:239].view(4, 6, 8), out), written) is None
        assert kept.find("key", (memory[239:431].view(4, 6, 8), out), written) is None
        assert kept.find("key", (memory[240:432].view(4, 6, 8), out), written) == "launch"


def test_a_form_is_kept_once(kept: HotCalls) -> None:
    kept.keep("key", (torch.ones(4, 6, 8), torch.ones(6, 8)), "another")
    assert len(kept._forms["key"]) == 1


def test_the_last_forms_of_a_key_stay(kept: HotCalls) -> None:
    xs = [torch.zeros(i + 1) for i in range(hot_calls.MAX_FORMS + 1)]
    for x in xs:
        kept.keep("many", (x,), x.numel())
    assert [kept.find("many", (x,)) for x in xs] == [None, *range(2, len(xs) + 1)]


class Seen(NamedTuple):
    """A tensor that a kernel was given. C++ gives one that exists during the launch alone."""

    dtype: str
    shape: tuple[int, ...]
    strides: list[int]  # of dimensions of several elements
    address: int

    @classmethod
    def of(cls, x: Any) -> Any:
        if isinstance(x, (int, float)):
            return x
        strides = x.stride() if isinstance(x, torch.Tensor) else x.strides
        used = [stride for size, stride in zip(x.shape, strides, strict=True) if size > 1]
        addressed = x if hasattr(x, "data_ptr") else torch.from_dlpack(x)  # tensors of tvm-ffi 0.1.9 do not tell theirs
        return cls(str(x.dtype).removeprefix("torch."), tuple(x.shape), used, int(addressed.data_ptr()))


def forms(launches: list[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, list[Any]]]:
    """Launches without addresses."""
    return [(name, [x._replace(address=0) if isinstance(x, Seen) else x for x in given]) for name, given in launches]


def without_a_binary(name: str) -> Any:
    raise UnsupportedError(name)


BINDERS = {"by Python": without_a_binary, "by C++": Binary("kestrel_attention").function}


@pytest.fixture(params=BINDERS)
def launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[tuple[str, tuple[Any, ...]]]:
    """The kernels that run and their arguments, with launches in place of references for CPU tensors."""
    binder = BINDERS[request.param]
    if binder is not without_a_binary:
        if not hasattr(tvm_ffi.Tensor, "data_ptr"):
            pytest.skip("tensors of this tvm-ffi do not tell their addresses")
        try:
            binder("bind_launches")
        except UnsupportedError as error:
            pytest.skip(str(error))
    done: list[tuple[str, tuple[Any, ...]]] = []
    kernels = SimpleNamespace(
        kernel=lambda variant, device: lambda *given: done.append((variant.name, tuple(map(Seen.of, given)))),
        arch=lambda device: "sm90a",
        function=binder,
    )
    monkeypatch.setattr(decode, "_binary", kernels)
    monkeypatch.setattr(decode, "launches", type(decode.launches)())
    monkeypatch.setattr(op, "_hot_calls", HotCalls())
    for name, function in OPS.items():
        monkeypatch.setattr(op, name, function.kernel_op.launch)
    return done


def arguments(appends: bool = False, **more: Any) -> dict[str, Any]:
    caches = [torch.zeros(8, 16, 2, 64).bfloat16() for _ in range(2)]
    new = [torch.zeros(3, 1, 2, 64).bfloat16() for _ in range(2)] if appends else [None, None]
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    q = torch.zeros(3, 1, 4, 64).bfloat16()
    named = dict(zip(("q", "k_cache", "v_cache", "k", "v"), (q, *caches, *new), strict=True))
    return {**named, "cache_seqlens": lengths, "block_table": table, **more}


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("more", [{}, {"prefix_len": 3}, {"prefix_len": torch.zeros(3, dtype=torch.int32)}])
def test_a_hot_call_launches_the_kernels_of_the_first_with_its_own_tensors(
    launched: list[tuple[str, tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    appends: bool,
    more: dict[str, Any],
) -> None:
    flash_attn_with_kvcache(**arguments(appends, **more))
    first, again = [name for name, _ in launched], arguments(appends, **more)
    launched.clear()
    monkeypatch.setattr(op, "_check", None)  # a call that is not hot would need the checks again
    monkeypatch.setattr(decode, "launches", None)
    flash_attn_with_kvcache(**again)
    assert [name for name, _ in launched] == first
    *_, (_, given) = launched
    for index, name in enumerate(("q", "k_cache", "v_cache", "cache_seqlens", "block_table")):
        assert given[index].address == again[name].data_ptr()


def cache_of(dtype: torch.dtype, page: int = 16, width: int = 64) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(8, page, 2, width).to(dtype) for name in ("k_cache", "v_cache")}


def int4() -> dict[str, torch.Tensor]:
    channels, tokens = torch.zeros(2, 8, 2, 64).half(), torch.zeros(2, 8, 64, 2).half()
    more = {"k_scale": channels[0], "k_zero": channels[1], "v_scale": tokens[0], "v_zero": tokens[1]}
    tail = torch.zeros(3, 64, 2, 64).half()
    return cache_of(torch.uint8, 64, 32) | more | {"k_tail": tail, "seq_ids": torch.zeros(3, dtype=torch.int32)}


HALF = {"q": torch.zeros(3, 1, 4, 64).half(), **{name: torch.zeros(3, 1, 2, 64).half() for name in "kv"}}
FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "bf16": dict,
    "fp16": lambda: HALF | cache_of(torch.float16),
    "split keys": lambda: {"block_table": torch.zeros(3, 500, dtype=torch.int32)},
    "one block for each sequence": lambda: {
        "block_table": None,
        **{x: arguments()[x][:3] for x in cache_of(torch.int8)},
    },
    "e4m3": lambda: cache_of(torch.float8_e4m3fn) | {"k_scale": torch.ones(1), "v_scale": torch.ones(2)},
    "e4m3 as bytes": lambda: cache_of(torch.uint8),
    "one scale for keys and values": lambda: (
        cache_of(torch.float8_e4m3fn) | dict.fromkeys(("k_scale", "v_scale"), X[0, 0, :1])
    ),
    "e5m2 and fp16": lambda: HALF | cache_of(torch.float8_e5m2),
    "int8": lambda: cache_of(torch.int8) | {name: torch.ones(8, 16, 2) for name in ("k_scale", "v_scale")},
    "int4 and fp16": lambda: HALF | int4(),
    "prefixes and an LSE": lambda: {"prefix_len": torch.zeros(3, dtype=torch.int32), "return_lse": True},
    "out": lambda: {"out": torch.zeros(3, 1, 4, 64).bfloat16()},
    "wider rows": lambda: {"q": torch.zeros(3, 1, 4, 72).bfloat16()[..., :64]},
}


@pytest.mark.parametrize("appends", [False, True], ids=["reads", "appends"])
@pytest.mark.parametrize("form", FORMS)
def test_a_hot_call_gives_kernels_what_the_first_gave(
    launched: list[tuple[str, tuple[Any, ...]]], form: str, appends: bool
) -> None:
    given = arguments(appends) | FORMS[form]()
    if not appends:
        given |= {"k": None, "v": None}
    flash_attn_with_kvcache(**given)
    first = launched.copy()
    again = {name: torch.empty_like(x).copy_(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    if form == "wider rows":
        again["q"] = torch.zeros(3, 1, 4, 72).bfloat16()[..., :64]
    if form == "one scale for keys and values":
        again["v_scale"] = again["k_scale"]
    moved = {x.data_ptr(): again[name].data_ptr() for name, x in given.items() if isinstance(x, torch.Tensor)}
    for _ in range(2):  # found by its key, then as a repetition of the last call
        launched.clear()
        flash_attn_with_kvcache(**again)
        assert forms(launched) == forms(first)
        for (_, one), (_, other) in zip(first, launched, strict=True):
            for x, y in zip(one, other, strict=True):
                if isinstance(x, Seen) and x.address in moved:
                    assert y.address == moved[x.address]


def test_out_may_be_q_in_a_hot_call(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    for turn in range(3):
        given = arguments()
        launched.clear()
        assert flash_attn_with_kvcache(**given, out=given["q"]) is given["q"]
        ((_, used),) = launched
        assert turn == 0 or used[0].address == used[OUT].address == given["q"].data_ptr()


def test_rows_at_an_unaligned_address_are_copied_in_a_hot_call(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    memory = torch.zeros(3 * 4 * 64 + 1).bfloat16()
    for offset in (0, 0, 1, 0):
        launched.clear()
        flash_attn_with_kvcache(**(arguments() | {"q": memory[offset : offset + 768].view(3, 1, 4, 64)}))
        ((_, used),) = launched
        assert (used[0].address == memory.data_ptr()) == (offset == 0)
        assert used[0].address % 16 == 0


def test_a_hot_call_refuses_to_append_keys_and_values_to_the_same_memory(
    launched: list[tuple[str, tuple[Any, ...]]],
) -> None:
    given = arguments(appends=True)
    for _ in range(2):
        flash_attn_with_kvcache(**given)
    launched.clear()
    with pytest.raises(ValueError, match="same memory"):
        flash_attn_with_kvcache(**(given | {"v_cache": given["k_cache"].view_as(given["k_cache"])}))
    assert launched == []


def test_a_window_that_was_changed_in_place_is_seen(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    window, given = [3, 0], arguments()
    index = DecodeScalars._fields.index("window_left") + len(DecodeTensors._fields)
    for left in (3, 3, 3, 5, 3):
        window[0] = left
        launched.clear()
        flash_attn_with_kvcache(**given, window_size=window)
        ((_, used),) = launched
        assert used[index] == left


def test_calls_of_two_forms_in_turn_are_told_apart(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    changes: list[dict[str, Any]] = [{"window_size": (3, 0)}, {"window_size": (5, 0)}, {"softmax_scale": 2.0}]
    changes += [{"block_table": torch.zeros(3, 500, dtype=torch.int32)}, {"k_cache": None}, {"num_splits": 3}]
    changes[-2] = {name: torch.zeros(8, 16, 2, 128).bfloat16()[..., :64] for name in ("k_cache", "v_cache")}
    alone = []
    for change in changes:
        launched.clear()
        flash_attn_with_kvcache(**(arguments() | change))
        alone.append(forms(launched))
    for _ in range(2):
        for change, expected in zip(changes, alone, strict=True):
            launched.clear()
            flash_attn_with_kvcache(**(arguments() | change))
            assert forms(launched) == expected, change


def test_a_hot_call_writes_out_itself_where_it_is_contiguous(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    given = arguments(out=torch.zeros(3, 1, 4, 64).bfloat16())
    assert flash_attn_with_kvcache(**given) is given["out"]
    launched.clear()
    assert flash_attn_with_kvcache(**given) is given["out"]
    ((_, arguments_given),) = launched
    assert arguments_given[OUT].address == given["out"].data_ptr()


def test_a_hot_call_refuses_an_out_on_the_cache(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    given = arguments()
    flash_attn_with_kvcache(**given, out=torch.zeros(3, 1, 4, 64).bfloat16())
    launched.clear()
    with pytest.raises(ValueError, match="'out': expected a tensor to write that shares no memory with 'k_cache'"):
        flash_attn_with_kvcache(**given, out=given["k_cache"].view(-1)[:768].view(3, 1, 4, 64))
    assert launched == []


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_of_another_shape_makes_another_plan(launched: list[tuple[str, tuple[Any, ...]]], name: str) -> None:
    shared, per_head = torch.ones(1), torch.ones(2)
    for scale in (shared, per_head, shared, per_head):
        caches = {key: arguments()[key].to(torch.float8_e4m3fn) for key in ("k_cache", "v_cache")}
        flash_attn_with_kvcache(**arguments(**caches, **{name: scale}))
    index = DecodeScalars._fields.index(f"{name}_heads") + len(DecodeTensors._fields)
    assert [given[index] for _, given in launched] == [1, 2, 1, 2]


def test_a_hot_call_allocates_the_lse_only_where_it_is_wanted(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    unread = set()
    for return_lse in (True, False, True, False):
        launched.clear()
        result = flash_attn_with_kvcache(**arguments(return_lse=return_lse))
        ((_, given),) = launched
        assert given[LSE].shape == (3, 4, 1)
        if return_lse:
            assert result[1].data_ptr() == given[LSE].address
        else:
            unread.add(given[LSE].address)
    assert len(unread) == 1  # memory that nothing reads


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("causal as a number", {"causal": 0}),
        ("a window of floats", {"window_size": (-1.0, -1)}),
        ("splits as a flag", {"num_splits": False}),
        ("a prefix as a flag", {"prefix_len": False}),
        ("return_lse as a number", {"return_lse": 1}),
        ("k alone", {"k": torch.zeros(3, 1, 2, 64).bfloat16()}),
        ("seq_ids alone", {"seq_ids": torch.zeros(3, dtype=torch.int32)}),
    ],
)
def test_a_call_that_equals_a_hot_one_but_for_a_type_is_refused(
    launched: list[tuple[str, tuple[Any, ...]]], what: str, change: dict[str, Any]
) -> None:
    numbers = {"causal": False, "window_size": (-1, -1), "num_splits": 0, "prefix_len": 0, "return_lse": True}
    for _ in range(3):  # the third is found by its objects alone
        flash_attn_with_kvcache(**arguments(**numbers))
    launched.clear()
    with pytest.raises(TypeError, match="flash_attn_with_kvcache"):
        flash_attn_with_kvcache(**arguments(**(numbers | change)))
    assert launched == [], what


def test_a_launch_through_the_torch_op_is_not_kept_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale launch of another form would answer the second call of this one."""
    calls = HotCalls()
    monkeypatch.setattr(op, "_hot_calls", calls)
    hot_calls.ran("stale")
    flash_attn_with_kvcache(**arguments())
    assert not calls._forms


def test_a_call_under_vmap_works_and_is_not_kept(
    launched: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn_with_kvcache(**arguments())
    (launch,) = decode.launches.values()

    def run(*given: Any) -> Any:
        hot_calls.ran(launch)
        return OPS["_flash_attn_with_kvcache"](*given)

    monkeypatch.setattr(op, "_flash_attn_with_kvcache", run)
    monkeypatch.setattr(op, "_hot_calls", HotCalls())
    given = arguments(cache_seqlens=torch.full((3,), 5, dtype=torch.int32))
    given["v_cache"].normal_()
    qs = torch.randn(2, *given.pop("q").shape).bfloat16()
    out = torch.func.vmap(lambda q: flash_attn_with_kvcache(q, **given))(qs)
    assert not op._hot_calls._forms
    for q, result in zip(qs, out, strict=True):
        op._hot_calls = HotCalls()
        assert torch.equal(flash_attn_with_kvcache(q, **given), result)
        assert op._hot_calls._forms


def test_a_call_that_cannot_be_bound_has_run_and_is_launched_by_python(
    launched: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(decode.DecodeLaunch, "bind", fail)
    for _ in range(3):
        launched.clear()
        flash_attn_with_kvcache(**arguments(appends=True))
        assert len(launched) == 2


def test_a_call_whose_second_kernel_fails_does_not_append_again(
    launched: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: list[bool] = []

    def kernel(variant: Any, device: torch.device) -> Callable[..., None]:
        def run(*given: Any) -> None:
            if failing and not variant.name.startswith("append"):
                raise UnsupportedError("the kernel was not launched")
            launched.append((variant.name, ()))

        return run

    monkeypatch.setattr(decode._binary, "kernel", kernel)
    for calls in range(3):  # the first one; found by its key; a repetition of the last call
        op._hot_calls, decode.launches = HotCalls(), type(decode.launches)()
        failing.clear()
        for _ in range(calls):
            flash_attn_with_kvcache(**arguments(appends=True))
        failing.append(True)
        launched.clear()
        with pytest.raises(LaunchError, match="was not launched"):
            flash_attn_with_kvcache(**arguments(appends=True))
        assert len(launched) == 1


def test_a_stream_without_memory_for_a_workspace_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def empty(size: int, **more: Any) -> Any:
        tried.append(size)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(decode, "_workspaces", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "empty", empty)
    for stream in range(2 * decode.MAX_WORKSPACES):
        for _ in range(2):
            assert decode._make_workspace(0, stream) == 0
    assert len(tried) == decode.MAX_WORKSPACES
