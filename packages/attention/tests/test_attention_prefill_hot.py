"""Prefill calls whose form was launched before: what they skip, what they check, and where they write."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_calls import Recorder, half, ints, recording

from kestrel_attention import flash_attn_func, flash_attn_varlen_func, prefill
from kestrel_attention.hot_calls import HotCalls

op = importlib.import_module(flash_attn_func.__module__)
CALLS = ("dense", "packed", "paged")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Kernels that note their arguments, with launches in place of references for CPU tensors."""
    for name in ("_dense_calls", "_packed_calls"):
        monkeypatch.setattr(op, name, HotCalls())
    for name in ("_flash_attn_func", "_flash_attn_varlen_func"):
        monkeypatch.setattr(op, name, getattr(op, name).kernel_op.launch)
    return recording(monkeypatch, "sm90a")


def given(call: str, **changes: Any) -> dict[str, Any]:
    """Two sequences of 40 queries, four query heads and two KV heads."""
    if call == "dense":
        return {"q": half(2, 40, 4, 64), "k": half(2, 50, 2, 64), "v": half(2, 50, 2, 64)} | changes
    starts = ints(0, 40, 80)
    named: dict[str, Any] = {"q": half(80, 4, 64), "cu_seqlens_q": starts, "max_seqlen_q": 40, "max_seqlen_k": 48}
    if call == "packed":
        return named | {"k": half(80, 2, 64), "v": half(80, 2, 64), "cu_seqlens_k": starts} | changes
    named |= {"k": half(8, 16, 2, 64), "v": half(8, 16, 2, 64), "cu_seqlens_k": None}
    return named | {"block_table": torch.zeros(2, 3, dtype=torch.int32), "seqused_k": ints(40, 44)} | changes


def run(call: str, **named: Any) -> Any:
    return (flash_attn_func if call == "dense" else flash_attn_varlen_func)(**named)


def fail(*_: Any) -> None:
    raise AssertionError("the arguments are checked again")


def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on only calls of a known form run."""
    for module, name in ((op, "_check_dense"), (op, "_check_varlen"), (op.arguments, "check_result")):
        monkeypatch.setattr(module, name, fail)
    for name in ("dense_launches", "packed_launches"):
        monkeypatch.setattr(prefill, name, None)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("more", [{}, {"causal": True, "window_size": (5, -1)}, {"prefix_len": ints(3, 4)}], ids=str)
def test_a_second_call_of_a_form_launches_its_own_tensors(recorder, monkeypatch, call, more):
    run(call, **given(call, **more))
    [(first, _)] = recorder.calls
    recorder.calls.clear()
    without_checks(monkeypatch)
    again = given(call, **more)
    out = run(call, **again)
    [(name, launched)] = recorder.calls
    assert name == first
    assert out.shape == again["q"].shape
    places = {"mQ": again["q"], "mK": again["k"], "mV": again["v"], "mOut": out, "mPrefix": again.get("prefix_len")}
    places |= {"mStartQ": again.get("cu_seqlens_q"), "mStartK": again.get("cu_seqlens_k")}
    places |= {"mTable": again.get("block_table"), "mLengths": again.get("seqused_k")}
    for place, x in places.items():
        if x is None:
            assert not isinstance(launched[place], torch.Tensor), place
        else:
            assert launched[place].data_ptr() == x.data_ptr(), place


@pytest.mark.parametrize("call", CALLS)
def test_out_is_written_by_the_kernel_itself(recorder, monkeypatch, call):
    named = given(call)
    out = torch.zeros_like(named["q"])
    run(call, **named, out=out)
    recorder.calls.clear()
    without_checks(monkeypatch)
    assert run(call, **named, out=out) is out
    assert recorder.prefill["mOut"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("call", CALLS)
def test_out_may_be_the_queries(recorder, monkeypatch, call):
    named = given(call)
    run(call, **named, out=named["q"])
    recorder.calls.clear()
    without_checks(monkeypatch)
    assert run(call, **named, out=named["q"]) is named["q"]
    assert recorder.prefill["mOut"].data_ptr() == recorder.prefill["mQ"].data_ptr()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "make", [lambda q: half(*q.shape[:-1], 72)[..., :64], lambda q: half(q.numel() + 1)[1:].view(q.shape)]
)
def test_an_out_that_kernels_cannot_write_is_copied_into(recorder, call, make):
    named = given(call)
    out = make(named["q"])
    for _ in range(2):
        recorder.calls.clear()
        assert run(call, **named, out=out) is out
        assert recorder.prefill["mOut"].data_ptr() != out.data_ptr()
        assert recorder.prefill["mOut"].is_contiguous()


@pytest.mark.parametrize("call", CALLS)
def test_an_out_that_lies_on_the_keys_is_refused_in_a_form_that_ran(recorder, call):
    named = given(call)
    q, k = named["q"], named["k"]
    memory = half(q.numel() + k.numel())
    named["k"], out = memory[: k.numel()].view(k.shape), memory[k.numel() :].view(q.shape)
    run(call, **named, out=out)
    recorder.calls.clear()
    named["k"] = memory[8 : 8 + k.numel()].view(k.shape)
    with pytest.raises(ValueError, match="'out': expected a tensor to write that shares no memory with 'k'"):
        run(call, **named, out=out)
    assert not recorder.calls


def test_an_out_between_the_rows_of_the_keys_is_written(recorder):
    """Their ranges of addresses meet, their elements do not: the call makes the checks of a first one."""
    memory = half(2, 40, 4, 128)
    k, out = memory[..., :64], memory[..., 64:]
    for _ in range(3):
        assert flash_attn_func(half(2, 40, 4, 64), k, half(2, 40, 4, 64), out=out) is out
    assert len(recorder.calls) == 3


@pytest.mark.parametrize("call", CALLS)
def test_the_lse_is_allocated_only_where_it_is_wanted(recorder, call):
    for return_lse in (True, False, True, False):
        recorder.calls.clear()
        result = run(call, **given(call), return_lse=return_lse)
        lse = recorder.prefill["mLse"]
        assert tuple(lse.shape) == ((2, 4, 40) if call == "dense" else (1, 4, 80))
        if return_lse:
            assert result[1].data_ptr() == lse.data_ptr()
    assert not isinstance(lse, torch.Tensor)  # memory that nothing reads


@pytest.mark.parametrize("call", CALLS)
def test_scales_that_are_one_tensor_are_no_scales_that_are_two(recorder, call):
    codes = {name: given(call)[name].to(torch.float8_e4m3fn) for name in ("q", "k", "v")}
    shared, per_head = torch.ones(1), torch.ones(2)
    pairs = [(shared, shared), (shared, per_head), (per_head, per_head), (shared, shared), (per_head, shared)]
    for k_scale, v_scale in pairs:
        recorder.calls.clear()
        run(call, **given(call, **codes), k_scale=k_scale, v_scale=v_scale)
        sizes = tuple(int(scale.numel() > 1) + 1 for scale in (k_scale, v_scale))
        assert (recorder.prefill["k_scale_heads"], recorder.prefill["v_scale_heads"]) == sizes


def test_keys_that_are_the_values_are_read_twice(recorder):
    k = half(2, 50, 2, 64)
    for _ in range(2):
        recorder.calls.clear()
        flash_attn_func(half(2, 40, 4, 64), k, k)
        assert recorder.prefill["mK"].data_ptr() == recorder.prefill["mV"].data_ptr() == k.data_ptr()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("what", "change", "error"),
    [
        ("causal as a number", lambda: {"causal": 0}, TypeError),
        ("a window of floats", lambda: {"window_size": (-1.0, -1)}, TypeError),
        ("no window", lambda: {"window_size": None}, TypeError),
        ("a prefix as a flag", lambda: {"prefix_len": False}, TypeError),
        ("return_lse as a number", lambda: {"return_lse": 1}, TypeError),
        ("queries that are no tensor", lambda: {"q": None}, TypeError),
        ("other queries", lambda: {"q": half(3, 40, 4, 64)}, ValueError),
        ("values of another dtype", lambda: {"v": given("dense")["v"].half()}, TypeError),
    ],
)
def test_a_call_that_equals_a_known_one_but_for_a_mistake_is_refused(
    recorder: Recorder, call: str, what: str, change: Callable[[], dict[str, Any]], error: type[Exception]
) -> None:
    numbers = {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "prefix_len": 0, "return_lse": True}
    run(call, **given(call), **numbers)
    recorder.calls.clear()
    changed = change()
    if call != "dense" and "v" in changed:
        changed = {"v": given(call)["v"].half()}
    with pytest.raises(error, match="flash_attn"):
        run(call, **(given(call) | numbers | changed))
    assert recorder.calls == [], what
