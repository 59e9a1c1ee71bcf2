"""From tensors to the launch of a prefill kernel: what the kernels are given, for dense, packed and cached keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_calls import Recorder, cached, dense, half, ints, packed, recording

from kestrel_attention import decode, prefill
from kestrel_attention.kernels.parameters import AppendScalars
from kestrel_runtime import UnsupportedError


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch, "sm80")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch, "sm90a")


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() * a.element_size() == b.numel() * b.element_size()


FLAGS = ("packed_queries", "key_starts", "has_lengths", "has_block_table", "has_prefix_lens", "has_sinks")
FLAGS += ("q_scale_heads", "k_scale_heads", "v_scale_heads")


def flags(given: dict[str, Any]) -> dict[str, int]:
    """What the kernel is told to read, without what it is not."""
    return {name: given[name] for name in FLAGS if given[name]}


# -- dense ------------------------------------------------------------------------------------------------------------


def test_a_dense_call_gives_the_kernel_its_tensors_and_sizes(recorder):
    q, k, v = half(2, 40, 4, 64), half(2, 50, 2, 64), half(2, 50, 2, 64)
    out, lse = dense(q=q, k=k, v=v, softmax_scale=0.5, window_left=3, window_right=4, softcap=2.0, prefix_len=6)
    given = recorder.prefill
    assert (given["mQ"], given["mK"], given["mV"], given["mOut"], given["mLse"]) == (q, k, v, out, lse)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 40), torch.float32)
    assert flags(given) == {}
    sizes = {"max_queries": 40, "max_keys": 50, "appended": 0, "group_size": 2, "batch": 2}
    scores = {"window_left": 3, "window_right": 4, "softmax_scale": 0.5, "softcap": 2.0, "prefix_len": 6}
    assert {name: given[name] for name in sizes | scores} == sizes | scores
    assert [key * given["page_multiplier"] >> given["page_shift"] for key in (0, 49, 50)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "field", "value", "flag"),
    [
        ("prefix_lens", "mPrefix", ints(3, 4), {"has_prefix_lens": 1}),
        ("sinks", "mSinks", torch.zeros(4), {"has_sinks": 1}),
        ("q_scale", "mQScale", torch.ones(1), {"q_scale_heads": 1}),
        ("k_scale", "mKScale", torch.ones(1), {"k_scale_heads": 1}),
        ("v_scale", "mVScale", torch.ones(2), {"v_scale_heads": 2}),
        ("q_scale", "mQScale", torch.ones(4), {"q_scale_heads": 2}),
    ],
    ids=str,
)
def test_an_optional_tensor_reaches_its_place_and_is_announced(recorder, name, field, value, flag):
    codes = {x: torch.zeros(2, 50, 2, 64).to(torch.float8_e4m3fn) for x in ("k", "v")} if "scale" in name else {}
    if name == "q_scale":
        codes["q"] = torch.zeros(2, 40, 4, 64).to(torch.float8_e4m3fn)
    dense(**codes, **{name: value})
    given = recorder.prefill
    assert same_memory(given[field], value)
    assert flags(given) == flag
    optional = {"mStartQ", "mStartK", "mLengths", "mTable", "mPrefix", "mSinks", "mQScale", "mKScale", "mVScale"}
    assert not any(isinstance(given[other], torch.Tensor) for other in optional - {field})


@pytest.mark.parametrize("call", ["dense", "packed"])
def test_fp8_products_read_queries_keys_and_values_as_bytes(hopper, call):
    q, k, v = (half(*sizes).to(torch.float8_e4m3fn) for sizes in ((2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64)))
    if call == "dense":
        out, _ = dense(q=q, k=k, v=v)
    else:
        out, _ = packed(**{x: y.flatten(0, 1) for x, y in {"q": q, "k": k, "v": v}.items()})
    given = next(given for name, given in hopper.calls if name == "prefill_bf16_e4m3_hopper_d64")
    for name, x in {"mQ": q, "mK": k, "mV": v}.items():
        assert given[name].dtype == torch.uint8
        assert same_memory(given[name], x)
    assert out.dtype == given["mOut"].dtype == torch.bfloat16


def test_fp8_queries_at_an_odd_address_are_copied(hopper):
    codes = torch.randint(0, 100, (2 * 40 * 4 * 64 + 1,), dtype=torch.uint8)
    q = codes[1:].view(torch.float8_e4m3fn).view(2, 40, 4, 64)
    k = half(2, 50, 2, 64).to(torch.float8_e4m3fn)
    dense(q=q, k=k, v=k)
    given = next(given for name, given in hopper.calls if name == "prefill_bf16_e4m3_hopper_d64")
    assert given["mQ"].data_ptr() % 16 == 0
    assert torch.equal(given["mQ"], q.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sinks_of_a_16_bit_model_are_given_in_float32(recorder, dtype):
    sinks = torch.tensor([0.5, -2.0, 0.0, 3.0], dtype=dtype)
    dense(sinks=sinks)
    assert recorder.prefill["mSinks"].dtype == torch.float32
    assert torch.equal(recorder.prefill["mSinks"], sinks.float())


@pytest.mark.parametrize(("code", "e5m2"), [(torch.float8_e4m3fn, 0), (torch.float8_e5m2, 1)])
def test_keys_of_fp8_are_given_as_bytes_and_queries_of_fp8_as_bf16(recorder, code, e5m2):
    q, k, v = (half(*sizes).to(code) for sizes in ((2, 40, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64)))
    out, _ = dense(q=q, k=k, v=v)
    given = recorder.prefill
    assert torch.equal(given["mQ"], q.to(torch.bfloat16))
    assert given["mK"].dtype == given["mV"].dtype == torch.uint8
    assert same_memory(given["mK"], k)
    assert same_memory(given["mV"], v)
    assert given["codes_are_e5m2"] == e5m2
    assert out.dtype == torch.bfloat16
    assert "bf16_fp8" in recorder.calls[0][0]


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(("extra", "copied"), [(0, False), (8, False), (4, True)])
def test_rows_of_a_stride_that_is_no_multiple_of_16_bytes_are_copied(recorder, name, extra, copied):
    x = half(2, 40, 2, 64 + extra)[..., :64]
    dense(**{"q": half(2, 40, 4, 64), "k": half(2, 40, 2, 64), "v": half(2, 40, 2, 64), name: x})
    used = recorder.prefill[f"m{name.upper()}"]
    assert torch.equal(used, x)
    assert (used.data_ptr() != x.data_ptr()) is copied


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("packs", [False, True])
def test_rows_at_an_unaligned_address_are_copied(recorder, packs, name, offset):
    base = half(60 * 2 * 64 + 8)
    assert base.data_ptr() % 16 == 0
    x = base[offset : offset + 60 * 2 * 64].view(60, 2, 64)
    if packs:
        packed(**{"k": half(60, 2, 64), "v": half(60, 2, 64), name: x}, cu_seqlens_k=ints(0, 30, 60))
    else:
        more = {name: x[None]}
        dense(**{"q": half(1, 60, 2, 64), "k": half(1, 60, 2, 64), "v": half(1, 60, 2, 64)} | more)
    used = recorder.prefill[f"m{name.upper()}"]
    assert torch.equal(used[0], x)
    assert used.data_ptr() % 16 == 0
    assert (used.data_ptr() == x.data_ptr()) == (offset != 1)


def test_codes_at_an_odd_address_are_copied(recorder):
    codes = torch.randint(0, 100, (2 * 50 * 2 * 64 + 1,), dtype=torch.uint8).view(torch.float8_e4m3fn)
    k, v = codes[1:].view(2, 50, 2, 64), codes[:-1].view(2, 50, 2, 64)
    dense(k=k, v=v)
    given = recorder.prefill
    assert given["mK"].data_ptr() % 16 == 0
    assert torch.equal(given["mK"], k.view(torch.uint8))
    assert same_memory(given["mV"], v)


@pytest.mark.parametrize(("call", "leading"), [(dense, (2, 0)), (packed, (0,))])
def test_tensors_of_no_key_are_replaced_by_one_row_that_is_not_read(recorder, call, leading):
    starts = {"cu_seqlens_k": ints(0, 0, 0)} if call is packed else {}
    call(k=half(*leading, 2, 64), v=half(*leading, 2, 64), **starts)
    given = recorder.prefill
    assert given["max_keys"] == 0
    assert given["mK"].shape[1:] == given["mV"].shape[1:] == (1, 2, 64)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 8), (torch.float8_e4m3fn, 16)])
@pytest.mark.parametrize("name", ["k", "v"])
def test_offsets_of_keys_are_32_bit_numbers_of_16_bytes(dtype, unit, name):
    def far(stride: int) -> torch.Tensor:
        return torch.empty_strided((2, 256, 2, 64), (stride, 128, 64, 1), dtype=dtype, device="meta")

    near, first_beyond = {"k": far(2**15), "v": far(2**15)}, 2**32 * unit - 255 * 128
    prefill._refuse_uncovered_keys(**near | {name: far(first_beyond - unit)})
    with pytest.raises(UnsupportedError, match="64 GB"):
        prefill._refuse_uncovered_keys(**near | {name: far(first_beyond)})


def test_queries_of_no_row_launch_nothing(recorder):
    out, lse = dense(q=half(2, 0, 4, 64))
    assert (out.shape, lse.shape) == ((2, 0, 4, 64), (2, 4, 0))
    assert recorder.calls == []


# -- packed -----------------------------------------------------------------------------------------------------------


def test_a_packed_call_gives_the_kernel_one_block_and_where_its_sequences_start(recorder):
    q, k, v = half(60, 4, 64), half(80, 2, 64), half(80, 2, 64)
    starts = ints(0, 40, 60), ints(0, 50, 80)
    out, lse = packed(q=q, k=k, v=v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    given = recorder.prefill
    for name, x in (("mQ", q), ("mK", k), ("mV", v), ("mOut", out), ("mLse", lse)):
        assert same_memory(given[name], x), name
        assert given[name].shape == (1, *x.shape), name
    assert given["mStartQ"] is starts[0]
    assert given["mStartK"] is starts[1]
    assert (out.shape, lse.shape) == ((60, 4, 64), (4, 60))
    assert flags(given) == {"packed_queries": 1, "key_starts": 1}
    sizes = {"max_queries": 40, "max_keys": 50, "group_size": 2, "batch": 2}
    assert {name: given[name] for name in sizes} == sizes


@pytest.mark.parametrize(
    ("starts", "used", "expected"),
    [
        (None, ints(7, 48), {"has_lengths": 1}),
        (ints(0, 7, 55), None, {"key_starts": 2}),
    ],
    ids=["seqused_k", "cu_seqlens_k"],
)
def test_pages_have_lengths_of_one_kind(recorder, starts, used, expected):
    caches, table = (half(6, 16, 2, 64), half(6, 16, 2, 64)), ints(2, 0, 1, 3, 4, 5).view(2, 3)
    packed(k=caches[0], v=caches[1], cu_seqlens_k=starts, seqused_k=used, block_table=table, max_seqlen_k=1000)
    given = recorder.prefill
    assert (given["mK"], given["mV"], given["mTable"]) == (*caches, table)
    assert (given["mStartK"] is starts, given["mLengths"] is used) == (starts is not None, used is not None)
    assert flags(given) == {"packed_queries": 1, "has_block_table": 1} | expected
    assert given["max_keys"] == 48  # that a table of three pages holds
    assert [key * given["page_multiplier"] >> given["page_shift"] for key in (15, 16, 47)] == [0, 1, 2]


def test_used_lengths_go_with_packed_keys(recorder):
    used = ints(20, 30)
    packed(seqused_k=used)
    assert recorder.prefill["mLengths"] is used
    assert flags(recorder.prefill) == {"packed_queries": 1, "key_starts": 1, "has_lengths": 1}


@pytest.mark.parametrize(
    ("bounds", "expected"), [((10**6, 10**6), (60, 80)), ((60, 80), (60, 80)), ((59, 79), (59, 79))]
)
def test_bounds_past_the_tensors_are_cut(recorder, bounds, expected):
    packed(max_seqlen_q=bounds[0], max_seqlen_k=bounds[1])
    assert (recorder.prefill["max_queries"], recorder.prefill["max_keys"]) == expected


@pytest.mark.parametrize(
    "how",
    [
        {"cu_seqlens_q": ints(0), "cu_seqlens_k": ints(0)},
        {"max_seqlen_q": 0},
        {"q": half(0, 4, 64), "cu_seqlens_q": ints(0, 0, 0)},
    ],
    ids=["no sequence", "no query of a sequence", "no query"],
)
def test_packed_queries_of_no_sequence_launch_nothing_and_give_zeros(recorder, how):
    out, lse = packed(**how)
    assert recorder.calls == []
    assert not out.any()
    assert bool((lse == float("-inf")).all())
    assert lse.shape == (4, out.shape[0])


def test_pages_at_an_unaligned_address_run_by_reference(recorder):
    pages = torch.zeros(6 * 16 * 2 * 64 + 1).bfloat16()[1:].view(6, 16, 2, 64)
    how = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "seqused_k": ints(7, 48), "cu_seqlens_k": None}
    for name in ("k", "v"):
        caches = {"k": half(6, 16, 2, 64), "v": half(6, 16, 2, 64)} | {name: pages}
        with pytest.raises(UnsupportedError, match="16 bytes"):
            packed(**how, **caches)
    assert recorder.calls == []


# -- over a cache -----------------------------------------------------------------------------------------------------


def test_a_call_over_a_cache_gives_the_kernel_its_tensors_and_sizes(recorder):
    q, caches, lengths = half(2, 40, 4, 64), (half(6, 16, 2, 64), half(6, 16, 2, 64)), ints(7, 48)
    table = ints(2, 0, 1, 3, 4, 5).view(2, 3)
    out, lse = cached(q=q, k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths, block_table=table, causal=True)
    given = recorder.prefill
    tensors = {"mQ": q, "mK": caches[0], "mV": caches[1], "mLengths": lengths, "mTable": table, "mOut": out}
    assert all(given[name] is x for name, x in tensors.items())
    assert same_memory(given["mLse"], lse)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 40))
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert flags(given) == {"has_lengths": 1, "has_block_table": 1}
    sizes = {"max_queries": 40, "max_keys": 48, "appended": 0, "group_size": 2, "batch": 2, "window_right": 0}
    assert {name: given[name] for name in sizes} == sizes
    assert [key * given["page_multiplier"] >> given["page_shift"] for key in (15, 16, 47)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "field", "value", "flag"),
    [
        ("prefix_lens", "mPrefix", ints(3, 4), {"has_prefix_lens": 1}),
        ("sinks", "mSinks", torch.zeros(4), {"has_sinks": 1}),
        ("k_scale", "mKScale", torch.ones(2), {"k_scale_heads": 2}),
        ("v_scale", "mVScale", torch.ones(1), {"v_scale_heads": 1}),
    ],
    ids=["prefix_lens", "sinks", "k_scale", "v_scale"],
)
def test_an_optional_tensor_of_a_call_over_a_cache_reaches_its_place(recorder, name, field, value, flag):
    codes = {x: torch.zeros(6, 16, 2, 64).to(torch.float8_e4m3fn) for x in ("k_cache", "v_cache")}
    cached(**(codes if "scale" in name else {}), **{name: value})
    assert same_memory(recorder.prefill[field], value)
    assert flags(recorder.prefill) == {"has_lengths": 1, "has_block_table": 1} | flag


def test_without_a_table_a_block_of_the_cache_is_a_sequence(recorder):
    caches = half(2, 50, 2, 64), half(2, 50, 2, 64)
    cached(k_cache=caches[0], v_cache=caches[1], block_table=None)
    assert flags(recorder.prefill) == {"has_lengths": 1}
    assert recorder.prefill["max_keys"] == 50


@pytest.mark.parametrize(
    ("storage", "kernel", "rows"),
    [
        (torch.bfloat16, "append_bf16_same", torch.bfloat16),
        (torch.float8_e4m3fn, "append_bf16_e4m3", torch.bfloat16),
        (torch.uint8, "append_bf16_e4m3", torch.bfloat16),
        (torch.float8_e5m2, "append_half_e5m2", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("paged", [True, False])
def test_new_rows_are_appended_before_the_kernel_reads_them(recorder, storage, kernel, rows, paged):
    caches = [torch.zeros(6 if paged else 2, 96, 2, 64).to(storage) for _ in range(2)]
    new, lengths, table = (half(2, 40, 2, 64), half(2, 40, 2, 64)), ints(7, 8), ints(2, 0, 1, 3, 4, 5).view(2, 3)
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(1)} if storage != torch.bfloat16 else {}
    given = {"k_cache": caches[0], "v_cache": caches[1], "k": new[0], "v": new[1], "cache_seqlens": lengths, **scales}
    cached(**given, block_table=table if paged else None)
    (name, append), (_, attend) = recorder.calls
    assert name == kernel
    for field, x in (("mNewK", new[0]), ("mNewV", new[1]), ("mK", caches[0]), ("mV", caches[1])):
        assert same_memory(append[field], x), field
    assert append["mLengths"] is lengths
    assert (append["mTable"] is table) is paged
    assert append["mTable"] is not None
    assert append["mNewK"].dtype == append["mNewV"].dtype == rows
    heads = (2, 1) if scales else (0, 0)
    assert tuple(append[x] for x in AppendScalars._fields) == (int(paged), *heads, 1)
    assert (attend["k_scale_heads"], attend["v_scale_heads"]) == heads
    if scales:
        assert (append["mKScale"], append["mVScale"]) == (scales["k_scale"], scales["v_scale"])
    assert attend["appended"] == 40
    assert attend["mLengths"] is lengths


def test_new_rows_of_fp16_are_announced_to_the_kernel_that_appends_e5m2(recorder):
    caches = [torch.zeros(6, 16, 2, 64).to(torch.float8_e5m2) for _ in range(2)]
    q, new = half(2, 40, 4, 64).half(), half(2, 40, 2, 64).half()
    cached(q=q, k_cache=caches[0], v_cache=caches[1], k=new, v=new.clone())
    name, append = recorder.calls[0]
    assert (name, append["is_bf16"], append["mNewK"].dtype) == ("append_half_e5m2", 0, torch.bfloat16)
    assert same_memory(append["mNewK"], new)


@pytest.mark.parametrize("name", ["k", "v"])
def test_new_rows_at_an_unaligned_address_are_copied(recorder, name):
    x = half(2 * 40 * 2 * 64 + 1)[1:].view(2, 40, 2, 64)
    cached(**({"k": half(2, 40, 2, 64), "v": half(2, 40, 2, 64)} | {name: x}))
    used = recorder.calls[0][1][f"mNew{name.upper()}"]
    assert torch.equal(used, x)
    assert used.data_ptr() % 16 == 0


def test_keys_and_values_in_the_same_memory_are_not_appended(recorder):
    cache = half(6, 16, 2, 64)
    with pytest.raises(ValueError, match="same memory|overlap"):
        cached(k_cache=cache, v_cache=cache, k=half(2, 40, 2, 64), v=half(2, 40, 2, 64))
    assert recorder.calls == []


def test_an_append_without_queries_runs_alone(recorder):
    new = half(2, 0, 2, 64)
    cached(q=half(2, 0, 4, 64), k=new, v=new.clone())
    assert recorder.calls == []


def test_a_cache_at_an_unaligned_address_runs_by_reference(recorder):
    base = torch.zeros(6 * 16 * 2 * 64 + 1).bfloat16()[1:].view(6, 16, 2, 64)
    for name in ("k_cache", "v_cache"):
        for new in ({}, {"k": half(2, 40, 2, 64), "v": half(2, 40, 2, 64)}):
            with pytest.raises(UnsupportedError, match="16 bytes"):
                cached(**{name: base}, **new)
    assert recorder.calls == []


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_of_codes_at_an_odd_address_runs_by_reference(recorder, name):
    codes = torch.zeros(6 * 16 * 2 * 64 + 1, dtype=torch.uint8)
    caches = {"k_cache": codes[:-1].view(6, 16, 2, 64), "v_cache": codes[:-1].view(6, 16, 2, 64)}
    with pytest.raises(UnsupportedError, match="16 bytes"):
        cached(**caches | {name: codes[1:].view(6, 16, 2, 64)})
    assert recorder.calls == []


def test_what_shapes_the_scores_reaches_the_kernel_over_a_cache(recorder):
    how = {"softmax_scale": 0.5, "window_left": 3, "window_right": 4, "softcap": 2.0, "prefix_len": 6}
    cached(**how)
    assert {name: recorder.prefill[name] for name in how} == how


def launch_over_a_cache(**more: Any) -> tuple[Any, tuple[torch.Tensor, Any]]:
    """The launch that an earlier call kept, called with the arguments that only hot calls have."""
    calls = {"q": half(2, 40, 4, 64), "k_cache": half(6, 16, 2, 64), "v_cache": half(6, 16, 2, 64)}
    calls |= {"cache_seqlens": ints(7, 48), "block_table": torch.zeros(2, 3, dtype=torch.int32)}
    cached(**calls)
    (launch,) = decode.launches.values()
    scales = dict.fromkeys(("k_scale", "v_scale", "prefix_lens"))
    return calls, launch(**calls, **scales, **more)


def test_the_lse_is_allocated_only_where_it_is_wanted(recorder):
    assert isinstance(launch_over_a_cache(want_lse=True)[1][1], torch.Tensor)
    decode.launches.clear()
    assert launch_over_a_cache(want_lse=False)[1][1] is None
    assert tuple(recorder.calls[-1][1]["mLse"].shape) == (2, 4, 40)


def test_out_is_written_by_the_kernel_where_it_is_contiguous_and_aligned(recorder):
    wide = half(2, 40, 8, 64)
    for out, direct in (
        (half(2, 40, 4, 64), True),
        (wide[:, :, ::2], False),
        (half(2 * 40 * 4 * 64 + 1)[1:].view(2, 40, 4, 64), False),
    ):
        decode.launches.clear()
        _, (got, _) = launch_over_a_cache(out=out)
        assert got is out
        written = recorder.calls[-1][1]["mOut"]
        assert (written is out) is direct
        assert written.is_contiguous()
        assert written.data_ptr() % 16 == 0


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_sinks", [False, True])
def test_splits_have_scratch_memory_for_every_row_and_are_combined(hopper, with_sinks):
    """Half the multiprocessors have no block without splits: 2 heads, 2 blocks of 128 rows."""
    sinks = half(2) if with_sinks else None
    q, k = half(3, 200, 2, 64), half(3, 2000, 1, 64)
    out, lse = dense(q=q, k=k, v=k.clone(), sinks=sinks)
    (name, attend), (combine_name, combine) = hopper.calls
    splits = attend["num_splits"]
    assert name.startswith("prefill_bf16_same_hopper")
    assert splits > 1
    rows = splits * 3 * 200 * 2
    assert (attend["mPartialOut"].numel(), attend["mPartialLse"].numel()) == (rows * 64, rows)
    assert attend["mNumSplits"].numel() == 3 * 2 * 2
    assert attend["mPartialOut"].dtype == attend["mPartialLse"].dtype == torch.float32
    assert attend["mNumSplits"].dtype == torch.int32
    assert combine_name == "prefill_combine_bf16"
    for field in ("mPartialOut", "mPartialLse", "mNumSplits", "mOut", "mLse"):
        assert combine[field] is attend[field], field
    assert (combine["mOut"], combine["mLse"]) == (out, lse)
    assert (combine["has_sinks"], combine["batch"]) == (int(with_sinks), 3)
    for field in ("packed_queries", "max_queries", "split_blocks", "partials_of_row", "partials_of_sequence"):
        assert combine[field] == attend[field], field
    assert (attend["split_blocks"], attend["partials_of_row"], attend["partials_of_sequence"]) == (2, 0, splits * 200)
    if with_sinks:
        assert combine["mSinks"] is attend["mSinks"]
        assert combine["mSinks"].dtype == torch.float32


@pytest.mark.parametrize(
    ("arch", "kernel"), [("sm80", "d64_short"), ("sm100f", "d64_short"), ("sm90a", "hopper_d64_boxes")]
)
def test_hopper_alone_runs_its_kernels(monkeypatch, arch, kernel):
    recorder = recording(monkeypatch, arch)
    dense()
    assert [name for name, _ in recorder.calls] == [f"prefill_bf16_same_{kernel}"]


@pytest.mark.parametrize("strides", ["expanded heads", "expanded batch", "one sequence"])
def test_tma_needs_strides_that_are_not_zero(hopper, strides):
    """The stride of a dimension of one element does not count."""
    k = half(2, 50, 2, 64)
    if strides == "one sequence":
        k = half(1, 50, 2, 64).as_strided((1, 50, 2, 64), (0, 128, 64, 1))
    else:
        k = k[:1].expand(2, 50, 2, 64) if strides == "expanded batch" else k[:, :, :1].expand(2, 50, 2, 64)
    dense(q=half(len(k), 40, 4, 64), k=k, v=half(*k.shape))
    ((name, _),) = hopper.calls
    assert name.endswith("_boxes") == (strides == "one sequence")


def test_a_counter_of_works_starts_at_zero_in_each_call(hopper):
    for _ in range(2):
        dense(q=half(1, 6000, 16, 8), k=half(1, 10, 16, 8), v=half(1, 10, 16, 8), causal=True)
    first, second = (given for _, given in hopper.calls)
    assert first["has_counter"] == second["has_counter"] == 1
    assert first["mWorks"].tolist() == second["mWorks"].tolist() == [0]
    assert first["mWorks"].data_ptr() != second["mWorks"].data_ptr()
    assert first["mWorks"].dtype == torch.int32


def test_tests_can_choose_the_portable_kernel_on_hopper(hopper, monkeypatch):
    monkeypatch.setattr(prefill, "USE_HOPPER", False)
    dense(q=half(1, 40, 2, 64), k=half(1, 2000, 1, 64), v=half(1, 2000, 1, 64))
    assert hopper.prefill["num_splits"] == 1
    assert not isinstance(hopper.prefill["mPartialOut"], torch.Tensor)


@pytest.mark.parametrize("sinks", [None, half(2)], ids=["plain", "sinks"])
def test_an_append_that_finds_no_memory_has_written_nothing(hopper, monkeypatch, sinks):
    """Scratch memory is allocated first: an engine that frees some and calls again appends once."""
    given = {"q": half(1, 40, 2, 64), "k_cache": half(1, 4096, 1, 64), "v_cache": half(1, 4096, 1, 64)}
    given |= {"k": half(1, 40, 1, 64), "v": half(1, 40, 1, 64), "cache_seqlens": ints(7), "block_table": None}
    given["sinks"] = sinks
    cached(**given)
    assert [name.split("_")[0] for name, _ in hopper.calls] == ["append", "prefill", "prefill"]
    hopper.calls.clear()
    memory = torch.empty

    def fails_for_splits(*sizes: Any, **how: Any) -> torch.Tensor:
        if how.get("dtype") == torch.int32:
            raise torch.OutOfMemoryError
        return memory(*sizes, **how)

    monkeypatch.setattr(torch, "empty", fails_for_splits)
    with pytest.raises(torch.OutOfMemoryError):
        cached(**given)
    assert hopper.calls == []


# -- plans by form ----------------------------------------------------------------------------------------------------

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("causal", {"causal": True}),
    ("a window", {"window_left": 3}),
    ("a window to the right", {"window_right": 3}),
    ("a soft cap", {"softcap": 2.0}),
    ("a scale", {"softmax_scale": 2.0}),
    ("a prefix", {"prefix_len": 3}),
    ("prefixes", {"prefix_lens": ints(1, 2)}),
    ("sinks", {"sinks": torch.zeros(4)}),
]
PACKED_FORMS = [
    ("more queries of a sequence", {"max_seqlen_q": 41}),
    ("fewer keys of a sequence", {"max_seqlen_k": 49}),
    ("lengths", {"seqused_k": ints(20, 30)}),
]
EQUAL = [("causal", True, 1), ("window_left", 1, True), ("prefix_len", 1, 1.0)]


def numbers(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in given.items() if isinstance(x, (int, float))}


@pytest.mark.parametrize(
    ("call", "change"),
    [*((dense, x) for _, x in FORMS), *((packed, x) for _, x in [*FORMS, *PACKED_FORMS])],
    ids=[*(f"dense, {x}" for x, _ in FORMS), *(f"packed, {x}" for x, _ in [*FORMS, *PACKED_FORMS])],
)
def test_a_call_of_another_form_has_a_plan_of_its_own(recorder, call, change):
    """What the kernel is given depends on the call alone, not on the calls before it."""
    call(**change)
    call()
    call(**change)
    alone, usual, again = (numbers(given) for _, given in recorder.calls)
    assert again == alone
    assert usual != alone


@pytest.mark.parametrize("call", [dense, packed])
@pytest.mark.parametrize(
    ("name", "good", "bad"), [("causal", True, 1), ("window_left", 1, True), ("prefix_len", 1, 1.0)]
)
def test_a_plan_is_not_found_by_an_equal_number_of_another_type(recorder, call, name, good, bad):
    call(**{name: good})
    with pytest.raises(TypeError, match="flash_attn"):
        call(**{name: bad})
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("call", [dense, packed])
def test_float32_has_no_kernel(recorder, call):
    sizes = ((2, 40), (2, 50)) if call is dense else ((60,), (80,))
    q, k = (torch.zeros(*leading, heads, 64) for leading, heads in zip(sizes, (4, 2), strict=True))
    with pytest.raises(UnsupportedError, match="bf16, fp16 and FP8"):
        call(q=q, k=k, v=k)
    with pytest.raises(UnsupportedError, match="bf16, fp16 and FP8"):
        call(q=q, k=k.to(torch.float8_e4m3fn), v=k.to(torch.float8_e4m3fn))
    assert recorder.calls == []
