"""Calls whose form was launched before: which tensors they match, and that nothing is skipped for others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kestrel_attention import decode, flash_attn_with_kvcache, hot_calls
from kestrel_attention.hot_calls import HotCalls
from kestrel_attention.kernels.parameters import DecodeScalars, DecodeTensors
from kestrel_runtime import backend, trace

op = importlib.import_module("kestrel_attention.flash_attn_with_kvcache")
X = torch.zeros(4, 6, 8)


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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The kernels that run and their arguments, with launches in place of references for CPU tensors."""
    done: list[tuple[str, tuple[Any, ...]]] = []
    kernels = SimpleNamespace(
        kernel=lambda variant, device: lambda *given: done.append((variant.name, given)), arch=lambda device: "sm90a"
    )
    monkeypatch.setattr(decode, "_binary", kernels)
    monkeypatch.setattr(decode, "launches", type(decode.launches)())
    monkeypatch.setattr(op, "_hot_calls", HotCalls())
    for name in ("_flash_attn_with_kvcache", "_flash_attn_with_kvcache_append", "_flash_attn_with_kvcache_append_int"):
        monkeypatch.setattr(op, name, getattr(op, name).kernel_op.launch)
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
        assert given[index] is again[name]


def test_a_hot_call_writes_out_itself_where_it_is_contiguous(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    given = arguments(out=torch.zeros(3, 1, 4, 64).bfloat16())
    assert flash_attn_with_kvcache(**given) is given["out"]
    launched.clear()
    assert flash_attn_with_kvcache(**given) is given["out"]
    ((_, arguments_given),) = launched
    assert arguments_given[8] is given["out"]


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
    for return_lse in (True, False, True, False):
        launched.clear()
        result = flash_attn_with_kvcache(**arguments(return_lse=return_lse))
        ((_, given),) = launched
        assert tuple(given[9].shape) == (3, 4, 1)
        if return_lse:
            assert result[1] is given[9]
    assert not isinstance(given[9], torch.Tensor)  # memory that nothing reads


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
