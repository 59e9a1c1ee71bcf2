"""Prefill over INT8 and INT4 caches: which kernels are launched, and what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_calls import Recorder, half, ints, recording
from torch.utils._python_dispatch import TorchDispatchMode

from kestrel_attention import flash_attn_with_kvcache, prefill_scratch
from kestrel_attention.kernels.variants import NAMED
from kestrel_attention.launching import LaunchError
from kestrel_runtime import UnsupportedError, backend

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bytes": torch.uint8}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch, "sm90a")


def caches(kind: str, blocks: int = 6, size: int = 64) -> dict[str, torch.Tensor]:
    if kind in FP8:
        return {name: torch.zeros(blocks, 64, 2, size).to(FP8[kind]) for name in ("k_cache", "v_cache")}
    width = size if kind == "int8" else size // 2
    codes = {name: torch.zeros(blocks, 64, 2, width, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    if kind == "int8":
        return codes | {name: torch.ones(blocks, 64, 2) for name in ("k_scale", "v_scale")}
    codes = {name: x.view(torch.uint8) for name, x in codes.items()}
    channels = {name: torch.ones(blocks, 2, size).half() for name in ("k_scale", "k_zero")}
    tokens = {name: torch.ones(blocks, 64, 2).half() for name in ("v_scale", "v_zero")}
    return codes | channels | tokens | {"k_tail": half(4, 64, 2, size), "seq_ids": ints(3, 1, 0)}


def call(kind: str, queries: int = 40, new: bool = False, table: bool = True, **changes: Any) -> Any:
    """Three sequences over six pages, or one block each; four heads and two KV heads of 64."""
    given = caches(kind, 6 if table else 3) | {"cache_seqlens": ints(7, 0, 100)} | changes
    given = {"block_table": ints(0, 1, 2, 3, 4, 5).view(3, 2) if table else None} | given
    q, k, v = half(3, queries, 4, 64), half(3, queries, 2, 64), half(3, queries, 2, 64)
    module = __import__(flash_attn_with_kvcache.__module__, fromlist=["_"])
    op = module._flash_attn_with_kvcache_append_int if new else module._flash_attn_with_kvcache
    scores = {"softmax_scale": None, "causal": True, "window_left": -1, "window_right": -1, "softcap": 0.0}
    scores |= {"prefix_len": 0, "prefix_lens": None, "num_splits": 0, "sinks": None}
    missing = dict.fromkeys(("k_zero", "v_zero", "k_tail", "seq_ids"))
    appended = {"k": k, "v": v} if new else {}
    if kind in FP8 and new:
        op, missing = module._flash_attn_with_kvcache_append, dict.fromkeys(("k_scale", "v_scale"))
    elif kind in FP8:
        missing |= dict.fromkeys(("k_scale", "v_scale"))
    return op.kernel_op.launch(**{"q": q} | appended | missing | scores | given)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_cache_is_dequantised_and_attended_to(recorder, kind):
    out, lse = call(kind)
    (name, first), (attend, second) = recorder.calls
    assert (name, attend) == (f"dequantise_{kind}", "prefill_bf16_same_hopper_d64_boxes")
    assert (out.shape, lse.shape) == ((3, 40, 4, 64), (3, 4, 40))
    assert first["mOutK"].shape == first["mOutV"].shape == (6, 64, 2, 64)
    assert second["mK"].data_ptr() == first["mOutK"].data_ptr()
    assert second["mV"].data_ptr() == first["mOutV"].data_ptr()
    assert second["mTable"].data_ptr() == first["mOutTable"].data_ptr()
    assert second["mLengths"].data_ptr() == first["mOutLengths"].data_ptr()
    assert (second["max_keys"], second["appended"], first["pages"], first["appended"]) == (128, 0, 2, 0)
    assert (first["has_block_table"], second["has_block_table"], first["is_bf16"]) == (1, 2, 1)
    assert second["mK"].shape == second["mV"].shape == (3, 128, 2, 64)  # in order


@pytest.mark.parametrize(("kind", "queries", "appends"), [("int8", 150, 1), ("int4", 64, 1), ("int4", 150, 3)])
def test_new_keys_are_appended_before_in_steps_that_the_kernel_takes(recorder, kind, queries, appends):
    call(kind, queries, new=True, cache_seqlens=ints(7, -1, 100))
    names = [name for name, _ in recorder.calls]
    assert names == [*[f"append_half_{kind}"] * appends, f"dequantise_{kind}", "prefill_bf16_same_hopper_d64_boxes"]
    steps = [given for name, given in recorder.calls if name.startswith("append")]
    assert sum(given["mNewK"].shape[1] for given in steps) == queries
    assert [given["mLengths"].tolist() for given in steps] == [[7 + 64 * i, -1, 100 + 64 * i] for i in range(appends)]
    assert recorder.calls[-2][1]["appended"] == queries


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_large_batches_are_dequantised_in_groups(recorder, monkeypatch, kind, table):
    monkeypatch.setattr(prefill_scratch, "SCRATCH_BYTES", 2 * 4 * (128 if table else 64) * 2 * 64)
    call(kind, table=table)
    names = [name for name, _ in recorder.calls]
    assert names == [f"dequantise_{kind}", "prefill_bf16_same_hopper_d64_boxes"] * 2
    groups = [given for name, given in recorder.calls if name.startswith("dequantise")]
    assert [given["mLengths"].tolist() for given in groups] == [[7, 0], [100]]
    assert [given["batch"] for given in groups] == [2, 1]
    assert groups[0]["mOutK"].data_ptr() == groups[1]["mOutK"].data_ptr()
    if not table:
        assert [len(given["mK"]) for given in groups] == [2, 1]
    if kind == "int4":
        assert [given["mSequences"].tolist() for given in groups] == [[3, 1], [0]]


@pytest.mark.parametrize(("width", "covered"), [(2**18, True), (2**18 + 1, False)])
def test_a_sequence_takes_at_most_8_gib_of_scratch_memory(recorder, monkeypatch, width, covered):
    """64 keys of a page, 2 heads of 64: 2^33 bytes where a table has 2^18 columns, here a 256th of both."""
    monkeypatch.setattr(prefill_scratch, "MAX_SCRATCH_BYTES", prefill_scratch.MAX_SCRATCH_BYTES >> 8)
    width = (width >> 8) + (width & 1)
    table = torch.zeros(3, width, dtype=torch.int32)
    if covered:
        call("int8", block_table=table)
        assert recorder.calls[0][1]["mOutK"].nbytes == 3 * 2**32 >> 8
        return
    with pytest.raises(UnsupportedError, match="too many keys"), backend("kernel"):
        call("int8", block_table=table)
    assert recorder.calls == []


def test_int4_pages_of_another_size_are_refused(recorder):
    given = {name: x[:, :32] for name, x in caches("int4").items() if name in ("k_cache", "v_cache")}
    tokens = {name: torch.ones(6, 32, 2).half() for name in ("v_scale", "v_zero")}
    with pytest.raises(UnsupportedError, match="64 slots"), backend("kernel"):
        call("int4", **given, **tokens, k_tail=half(4, 32, 2, 64))


class AfterKernels(TorchDispatchMode):
    """Notes the operators that run behind a first kernel."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.operators = recorder, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.calls:
            self.operators.add(func._overloadpacket._qualified_op_name)
        return func(*args, **kwargs or {})


def of_two_groups(monkeypatch: pytest.MonkeyPatch, kind: str) -> dict[str, Any]:
    """Arguments of a call with steps, splits, sinks and queries that are copied."""
    monkeypatch.setattr(prefill_scratch, "SCRATCH_BYTES", 2 * 4 * 4096 * 2 * 64)
    table = torch.arange(192, dtype=torch.int32).view(3, 64)
    return caches(kind, 192) | {"sinks": half(4), "block_table": table, "q": half(3, 150, 4, 68)[..., :64]}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_all_memory_is_allocated_before_the_first_kernel_runs(recorder, monkeypatch, kind):
    """An INT4 page is quantised anew by each append: a call that finds no memory must not have appended."""
    given = of_two_groups(monkeypatch, kind)
    with AfterKernels(recorder) as behind:
        call(kind, 150, new=True, **given)
    names = [name for name, _ in recorder.calls]
    assert names.count(f"dequantise_{kind}") == names.count("prefill_combine_bf16") == 2
    views = {"slice", "select", "view", "alias", "detach", "unbind", "as_strided", "_unsafe_view"}
    assert behind.operators <= {f"aten::{name}" for name in views}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_call_that_fails_behind_its_first_kernel_does_not_run_again(recorder, monkeypatch, kind):
    """Neither by the reference nor by a second launch; one whose first kernel fails may."""
    given = of_two_groups(monkeypatch, kind)
    call(kind, 150, new=True, **given)
    total = len(recorder.calls)
    for at in range(total):
        recorder.calls, fails = FailsAt(at), UnsupportedError if at == 0 else LaunchError
        with pytest.raises(fails), backend("kernel"):
            call(kind, 150, new=True, **given)
        assert len(recorder.calls) == at


class FailsAt(list[Any]):
    """Calls of kernels, of which one fails."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def append(self, x: Any) -> None:
        if len(self) == self.index:
            raise UnsupportedError("no kernel")
        super().append(x)


@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize(("queries", "size", "first"), [(2047, 64, False), (2048, 64, True), (17, 320, True)])
def test_an_fp8_cache_is_dequantised_first_for_many_queries_and_large_heads(recorder, kind, queries, size, first):
    """4096 rows of a KV head: queries times the query heads of it."""
    q = half(3, queries, 4, size)
    call(kind, q=q, **caches(kind, size=size))
    names = [name for name, _ in recorder.calls]
    assert ("dequantise_fp8" in names) == first
    assert any("fp8_hopper" in name for name in names) != first
    if first:
        (_, given), (_, attend) = recorder.calls[:2]
        assert given["codes_are_e5m2"] == (kind == "e5m2")
        assert given["mK"].dtype is torch.uint8
        assert attend["mK"].data_ptr() == given["mOutK"].data_ptr()
        assert (attend["has_device_numbers"], attend["k_scale_heads"]) == (1, 0)


def test_scales_of_an_fp8_cache_are_those_of_the_attention(recorder):
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(1)}
    call("e4m3", q=half(3, 4096, 4, 64), **scales)
    (_, _), (name, given) = recorder.calls
    assert name == "prefill_bf16_same_hopper_d64_boxes"  # three consumers have no registers for scales
    assert (given["k_scale_heads"], given["v_scale_heads"]) == (2, 1)
    assert given["mKScale"].data_ptr() == scales["k_scale"].data_ptr()


@pytest.mark.parametrize("kind", FP8)
def test_new_keys_are_appended_to_an_fp8_cache_before(recorder, kind):
    call(kind, queries=4096, new=True)
    names = [name for name, _ in recorder.calls]
    appender = "append_half_e5m2" if kind == "e5m2" else "append_bf16_e4m3"
    assert names[:2] == [appender, "dequantise_fp8"]
    assert recorder.calls[1][1]["appended"] == 4096


@pytest.mark.parametrize(
    ("changes", "arch"),
    [
        ({"block_table": torch.zeros(3, 2**16, dtype=torch.int32)}, "sm90a"),  # more than SCRATCH_BYTES
        ({"window_left": 64}, "sm90a"),  # which hides most keys
        ({}, "sm89"),
    ],
)
def test_an_fp8_cache_is_read_in_place_where_that_is_better(monkeypatch, changes, arch):
    found = recording(monkeypatch, arch)
    call("e4m3", q=half(3, 4096, 4, 64), **changes)
    assert found.calls[0][0].startswith("prefill_bf16_fp8")


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90a", "sm100f", "sm120f"])
def test_keys_are_copied_only_where_the_kernel_that_copies_them_is_built(monkeypatch, arch):
    found, given = recording(monkeypatch, arch), {name: half(6, 1, 2, 64) for name in ("k_cache", "v_cache")}
    call("e4m3", q=half(3, 2048, 4, 64), **given)
    copied = found.calls[0][0] == "dequantise_same"
    assert copied == (arch.removeprefix("sm") in NAMED["dequantise_same"].archs) == (arch == "sm90a")


@pytest.mark.parametrize(
    ("page", "queries", "copied"), [(1, 2048, True), (24, 2048, True), (16, 4096, False), (8, 2047, False)]
)
@pytest.mark.parametrize("new", [False, True])
def test_a_cache_of_the_queries_dtype_is_copied_first_for_many_queries_where_tma_cannot_load_it(
    recorder, page, queries, copied, new
):
    given = {name: half(6, page, 2, 64) for name in ("k_cache", "v_cache")} | dict.fromkeys(("k_scale", "v_scale"))
    call("e4m3" if new else "int8", q=half(3, queries, 4, 64), queries=queries, new=new, **given)
    names = [name for name, _ in recorder.calls if not name.startswith("append")]
    assert (names[0] == "dequantise_same") == copied
    assert names[-1].endswith("_boxes") == (copied or page == 16)
    if new:
        assert recorder.calls[0][0] == "append_bf16_same"
    if copied:
        given, attend = recorder.calls[-2][1], recorder.calls[-1][1]
        assert given["appended"] == (queries if new else 0)
        assert (attend["mK"].data_ptr(), attend["has_block_table"]) == (given["mOutK"].data_ptr(), 2)
