"""From the tensors of a decode call to its launch, with kernels that only record, and plans by form."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kestrel_attention import decode, flash_attn_with_kvcache, merge_attention_states, plans, prefill, tau_tail
from kestrel_attention.arguments import Cached, Codes, Scores
from kestrel_attention.kernels.parameters import CombineScalars, CombineTensors, DecodeScalars, DecodeTensors
from kestrel_attention.kernels.variants import NAMED
from kestrel_attention.plan import DecodeProblem
from kestrel_attention.plans import Plans, form
from kestrel_runtime import UnsupportedError


class Recorder:
    """In place of the binary: kernels that note their name and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gpu = "sm90a"
        monkeypatch.setattr(decode, "_binary", self)
        monkeypatch.setattr(decode, "launches", type(decode.launches)())

    def arch(self, device: torch.device) -> str:
        return self.gpu

    def numbers(self) -> list[tuple[str, list[float]]]:
        """The calls so far, with their numbers alone; forgets them."""
        found = [(name, [x for x in given if isinstance(x, (int, float))]) for name, given in self.calls]
        self.calls.clear()
        return found

    def kernel(self, variant: Any, device: torch.device) -> Callable[..., None]:
        return lambda *given: self.calls.append((variant.name, given))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def operands(batch: int = 2, queries: int = 1, **how: Any) -> dict[str, torch.Tensor]:
    """q, caches, lengths and a table in bf16, on the CPU."""
    cache = torch.zeros(2, 8, 16, 2, 64, dtype=how.get("storage", torch.bfloat16))
    return {
        "q": torch.zeros(batch, queries, 4, 64).bfloat16(),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "cache_seqlens": torch.zeros(batch, dtype=torch.int32),
        "block_table": torch.zeros(batch, 3, dtype=torch.int32),
    }


def launch_of(**changes: Any) -> Any:
    """The launch function of flash_attn_with_kvcache with CPU tensors, or that of an append with k and v."""
    given = operands() | dict.fromkeys(("k_scale", "v_scale", "k_zero", "v_zero", "k_tail", "seq_ids"))
    scores = {"softmax_scale": None, "causal": True, "window_left": 1, "window_right": -1, "softcap": 0.0}
    given |= scores | {"prefix_len": 0, "prefix_lens": None, "num_splits": 1} | changes
    module = sys.modules[flash_attn_with_kvcache.__module__]
    if given.get("k") is None:
        return module._flash_attn_with_kvcache.kernel_op.launch(**given)
    if given["k_tail"] is not None or given["k_cache"].dtype == torch.int8:
        return module._flash_attn_with_kvcache_append_int.kernel_op.launch(**given)
    given = {name: x for name, x in given.items() if name not in ("k_zero", "v_zero", "k_tail", "seq_ids")}
    return module._flash_attn_with_kvcache_append.kernel_op.launch(**given)


NEW = torch.zeros(2, 1, 2, 64).bfloat16()
INT8 = {"k_cache": torch.zeros(8, 16, 2, 64).char(), "v_cache": torch.zeros(8, 16, 2, 64).char()}
INT8 |= {name: torch.ones(8, 16, 2) for name in ("k_scale", "v_scale")}


PATHS = {"read": {}, "append": {"k": NEW, "v": NEW}, "int8": INT8, "append int8": INT8 | {"k": NEW, "v": NEW}}
EQUAL = [("causal", True, 1), ("window_left", 1, True), ("num_splits", 1, True), ("prefix_len", 1, 1.0)]


@pytest.mark.parametrize("kind", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(("name", "good", "bad"), EQUAL)
def test_a_plan_is_not_found_by_an_equal_number_of_another_type(kind, name, good, bad, recorder):
    launch_of(**kind, **{name: good})
    count = len(recorder.calls)
    with pytest.raises(TypeError, match="flash_attn_with_kvcache"):
        launch_of(**kind, **{name: bad})
    assert len(recorder.calls) == count > 0


SMALL_PAGES = torch.zeros(2, 8, 8, 2, 64).bfloat16()
FORMS = [
    ("q of another stride", {"q": torch.zeros(2, 1, 4, 68).bfloat16()[..., :64]}),
    ("more queries", {"q": torch.zeros(2, 2, 4, 64).bfloat16()}),
    ("more heads", {"q": torch.zeros(2, 1, 8, 64).bfloat16()}),
    ("another page size", {"k_cache": SMALL_PAGES[0], "v_cache": SMALL_PAGES[1]}),
    ("a wider table", {"block_table": torch.zeros(2, 300, dtype=torch.int32)}),
    ("fewer columns of a table", {"block_table": torch.zeros(2, 3, dtype=torch.int32)[:, :2]}),
    ("no window", {"window_left": -1}),
    ("not causal", {"causal": False}),
    ("a soft cap", {"softcap": 2.0}),
    ("a scale", {"softmax_scale": 2.0}),
    ("a prefix", {"prefix_len": 3}),
    ("prefixes", {"prefix_lens": torch.zeros(2, dtype=torch.int32)}),
    ("more splits", {"num_splits": 3}),
    ("sinks", {"sinks": torch.zeros(4)}),
]


@pytest.mark.parametrize("change", [x[1] for x in FORMS], ids=[x[0] for x in FORMS])
def test_a_call_of_another_form_has_a_plan_of_its_own(change, recorder):
    """What the kernel is given depends on the call alone, not on the calls before it."""
    launch_of(**change)
    alone = recorder.numbers()
    decode.launches.clear()
    launch_of()
    usual = recorder.numbers()
    launch_of(**change)
    assert recorder.numbers() == alone
    assert alone != usual or "q" in change


@pytest.mark.parametrize(("gpu", "rows"), [("sm90a", "_r16"), ("sm80", ""), ("sm86", ""), ("sm100f", "")])
def test_wide_kernels_run_where_wheels_hold_them(gpu, rows, recorder):
    recorder.gpu = gpu
    launch_of(q=torch.zeros(2, 8, 4, 64).bfloat16())
    assert [name for name, _ in recorder.calls] == [f"decode_bf16_same_d64_w4{rows}"]
    assert gpu.removeprefix("sm") in NAMED[recorder.calls[0][0]].archs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 0.0, 3.0])], ids=["without sinks", "with sinks"])
def test_sinks_reach_the_decode_and_the_combine_kernel_in_float32(sinks, dtype, recorder):
    table = torch.zeros(2, 300, dtype=torch.int32)
    launch_of(block_table=table, window_left=-1, num_splits=0, sinks=None if sinks is None else sinks.to(dtype))
    for (name, given), tensors, scalars in zip(
        recorder.calls, (DecodeTensors, CombineTensors), (DecodeScalars, CombineScalars), strict=True
    ):
        assert name.split("_")[0] == tensors.__name__.removesuffix("Tensors").lower()
        named = dict(zip((*tensors._fields, *scalars._fields), given, strict=True))
        assert named["has_sinks"] == (sinks is not None)
        assert sinks is None or torch.equal(named["mSinks"], sinks)


@pytest.mark.parametrize("new", [{}, {"k": NEW, "v": NEW}], ids=["reading", "appending"])
def test_without_a_decode_kernel_that_of_prefill_runs(new, recorder, monkeypatch):
    def kernel(variant: Any, device: torch.device) -> Callable[..., None]:
        if variant.name.startswith("decode"):
            raise UnsupportedError("not in the wheel")
        return lambda *given: recorder.calls.append((variant.name, given))

    monkeypatch.setattr(recorder, "kernel", kernel)
    monkeypatch.setattr(prefill, "_binary", recorder)
    for _ in range(2):  # planned, and found
        recorder.calls.clear()
        launch_of(**new)
        names = [name.split("_")[0] for name, _ in recorder.calls]
        assert names == (["append", "prefill"] if new else ["prefill"])


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values with heads of a stride that is no multiple of 16 bytes."""
    return torch.zeros(*x.shape[:-1], 68, dtype=x.dtype)[..., :64].copy_(x)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"v_cache": unaligned(operands()["v_cache"])}, UnsupportedError),
        ({"k_cache": unaligned(operands()["k_cache"])}, UnsupportedError),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32).t()}, ValueError),
        ({"cache_seqlens": torch.zeros(4, dtype=torch.int32)[::2]}, ValueError),
    ],
    ids=["v_cache", "k_cache", "block_table", "cache_seqlens"],
)
def test_strides_that_are_refused_are_refused_after_a_usual_call_too(change, error, recorder):
    with pytest.raises(error):
        launch_of(**change)
    launch_of()
    count = len(recorder.calls)
    with pytest.raises(error):
        launch_of(**change)
    assert len(recorder.calls) == count > 0


@pytest.mark.parametrize(("extra", "copied"), [(0, False), (8, False), (4, True), (3, True)])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_of_a_stride_that_is_no_multiple_of_16_bytes_are_copied(name, extra, copied, recorder):
    given = {"q": torch.randn(2, 1, 4, 64).bfloat16(), "k": NEW + 1, "v": NEW + 2}
    wide = torch.zeros(*given[name].shape[:-1], 64 + extra).bfloat16()[..., :64].copy_(given[name])
    launch_of(**given)  # a usual call, whose plan does not fit
    recorder.calls.clear()
    launch_of(**(given | {name: wide}))
    (_, append), (_, attend) = recorder.calls[:2]
    used = {"q": attend[0], "k": append[0], "v": append[1]}
    for which, x in used.items():
        assert torch.equal(x, given[which]), which
        assert all(stride % 8 == 0 for stride in x.stride()[:-1]), which
    assert (used[name].data_ptr() != wide.data_ptr()) is copied


@pytest.mark.parametrize("offset", [0, 1])
def test_rows_at_an_unaligned_address_are_copied(offset, recorder):
    base = torch.randn(2 * 4 * 64 + 1).bfloat16()
    assert base.data_ptr() % 16 == 0
    q = base[offset : offset + 512].view(2, 1, 4, 64)
    launch_of(q=q)
    used = recorder.calls[0][1][0]
    assert torch.equal(used, q)
    assert used.data_ptr() % 16 == 0
    assert (used.data_ptr() == q.data_ptr()) == (offset == 0)


def test_a_cache_at_an_unaligned_address_runs_by_reference(recorder):
    base = torch.zeros(8 * 16 * 2 * 64 + 1).bfloat16()
    for name in ("k_cache", "v_cache"):
        with pytest.raises(UnsupportedError, match="16 bytes"):
            launch_of(**{name: base[1:].view(8, 16, 2, 64)})
    assert recorder.calls == []


PLAIN = Scores(None, False, -1, -1, 0.0, 0, None)


def arguments(table: torch.Tensor | None, *codes: Any, scores: Scores = PLAIN, num_splits: int = 0) -> Cached:
    """What problem_of takes beside q and the caches."""
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    return Cached(lengths, table, Codes(*codes) if codes else Codes(None, None), scores, num_splits)


def far_cache(dtype: torch.dtype, block_stride: int, page: int = 1) -> torch.Tensor:
    return torch.empty_strided((2, page, 2, 64), (block_stride, 128, 64, 1), dtype=dtype, device="meta")


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 8), (torch.float8_e4m3fn, 16), (torch.int8, 16)])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("page", [1, 5])
def test_kernels_reach_64_gb_of_cache(dtype, unit, name, page):
    """Offsets are unsigned 32-bit numbers of 16 bytes."""
    q, table = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2, device="meta")
    given = arguments(table, *[torch.empty(2, page, 2, device="meta")] * 2 if dtype == torch.int8 else ())
    last = 2**32 * unit - (page - 1) * 128
    near = {which: far_cache(dtype, 1024, page) for which in ("k_cache", "v_cache")}
    decode.problem_of(q, *(near | {name: far_cache(dtype, last - unit, page)}).values(), given)
    with pytest.raises(UnsupportedError, match="64 GB"):
        decode.problem_of(q, *(near | {name: far_cache(dtype, last, page)}).values(), given)


@pytest.mark.parametrize("name", ["k_scale", "k_zero", "v_scale", "v_zero"])
def test_kernels_reach_64_gb_of_int4_scales(name):
    """Of channels in units of 16 bytes, of tokens in elements."""
    q, table = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2, device="meta")
    caches = [torch.empty(2, 64, 2, 32, dtype=torch.uint8, device="meta")] * 2

    def codes(block_stride: int) -> Cached:
        of_channels, of_tokens = torch.empty(2, 2, 64, device="meta"), torch.empty(2, 64, 2, device="meta")
        tail = {"k_tail": torch.empty(3, 64, 2, 64, device="meta"), "seq_ids": torch.empty(1, device="meta")}
        near = Codes(of_channels, of_tokens, of_channels, of_tokens, **tail)
        shape = getattr(near, name).shape
        far = torch.empty_strided(shape, (block_stride, shape[2], 1), dtype=torch.float16, device="meta")
        return arguments(table, *near._replace(**{name: far}))

    last = 2**35 if name.startswith("k") else 2**32 - 63 * 2
    decode.problem_of(q, *caches, codes(last - 8))
    with pytest.raises(UnsupportedError, match=r"64 GB|2\^32"):
        decode.problem_of(q, *caches, codes(last))


@pytest.mark.parametrize(("add", "fits"), [(8, True), (4, False)])
@pytest.mark.parametrize("name", ["k_scale", "k_zero", "k_tail"])
def test_int4_scales_and_tails_of_unaligned_strides_run_by_reference(name, add, fits):
    q, table = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2, device="meta")
    caches = [torch.empty(2, 64, 2, 32, dtype=torch.uint8, device="meta")] * 2
    of_channels, of_tokens = torch.empty(2, 2, 64, device="meta"), torch.empty(2, 64, 2, device="meta")
    tail = {"k_tail": torch.empty(3, 64, 2, 64, device="meta"), "seq_ids": torch.empty(1, device="meta")}
    codes = Codes(of_channels, of_tokens, of_channels, of_tokens, **tail)
    x = getattr(codes, name)
    strides = (x.stride(0) + add, *x.stride()[1:])
    codes = codes._replace(**{name: torch.empty_strided(x.shape, strides, dtype=torch.float16, device="meta")})
    given = arguments(table, *codes)
    if fits:
        assert decode.problem_of(q, *caches, given).cache == "int4"
    else:
        with pytest.raises(UnsupportedError, match="16 bytes"):
            decode.problem_of(q, *caches, given)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 8), (torch.float8_e5m2, 16)])
def test_caches_of_unaligned_strides_run_by_reference(dtype, unit, dim):
    q, table = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2, device="meta")
    for add, fits in ((unit, True), (unit // 2, False)):
        strides = [4096, 256, 128, 1]
        strides[dim] += add
        cache = torch.empty_strided((2, 8, 2, 64), strides, dtype=dtype, device="meta")
        if fits:
            assert decode.problem_of(q, cache, cache, arguments(table)).page_size == 8
        else:
            with pytest.raises(UnsupportedError, match="16 bytes"):
                decode.problem_of(q, cache, cache, arguments(table))


def test_a_problem_says_what_the_tensors_are():
    q = torch.empty(5, 3, 12, 128, dtype=torch.float16, device="meta")
    cache = torch.empty(7, 16, 4, 128, dtype=torch.uint8, device="meta")
    table, one, each = torch.empty(5, 9, device="meta"), torch.empty(1, device="meta"), torch.empty(4, device="meta")
    scores = Scores(0.5, True, 3, 4, 2.0, 6, prefix_lens=each)
    given = arguments(table, one, each, scores=scores, num_splits=8)
    found = decode.problem_of(q, cache, cache, given, appends=True)
    assert found == DecodeProblem(
        batch=5, queries=3, heads=12, kv_heads=4, head_dim=128, page_size=16, pages=9, dtype="fp16", cache="e4m3",
        softmax_scale=0.5, causal=True, window_left=3, window_right=4, softcap=2.0, prefix_len=6, has_prefix_lens=True,
        num_splits=8, k_scale_heads=1, v_scale_heads=2, appends=True,
    )  # fmt: skip
    assert (found.group_size, found.capacity, found.row_blocks) == (3, 144, 8)
    found = decode.problem_of(q[:7], cache[:5], cache[:5], arguments(None, each, one))
    assert (found.pages, found.k_scale_heads, found.v_scale_heads, found.has_prefix_lens) == (None, 2, 1, False)
    found = decode.problem_of(q[:7], cache[:5], cache[:5], arguments(None))
    assert (found.k_scale_heads, found.v_scale_heads, found.appends) == (0, 0, False)


def test_an_append_that_finds_no_memory_has_written_nothing(recorder, monkeypatch):
    """Scratch memory is allocated first: an engine that frees some and calls again appends once."""
    big = {name: torch.zeros(1, 4096, 2, 128).bfloat16() for name in ("k_cache", "v_cache")}
    new = torch.zeros(1, 1, 2, 128).bfloat16()
    given = {"q": torch.zeros(1, 1, 8, 128).bfloat16(), **big, "k": new, "v": new, "block_table": None}
    given |= {"cache_seqlens": torch.zeros(1, dtype=torch.int32), "causal": False, "window_left": -1, "num_splits": 0}
    launch_of(**given)
    assert [name for name, _ in recorder.calls] == ["append_bf16_same", "decode_bf16_same_d128_w4", "combine_bf16_w1"]

    def fails(*sizes: Any, **how: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    recorder.calls.clear()
    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, fails)
        monkeypatch.setattr(decode, name, fails, raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        launch_of(**given)
    assert recorder.calls == []


@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 3])
def test_a_length_near_two_to_the_31_does_not_wrap_with_new_keys(length):
    """All keys that the table has a page for exist, as with any length past them."""
    caches = torch.randn(2, 3, 4, 2, 8)
    given = {"block_table": torch.tensor([[2, 0]], dtype=torch.int32)}
    q, k, v = torch.randn(1, 5, 4, 8), *torch.randn(2, 1, 5, 2, 8)
    before = caches.clone()
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([length], dtype=torch.int32), **given)
    assert torch.equal(caches, before)
    assert torch.equal(out, flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.tensor([8]).int(), **given))
    assert bool(out.any())


# -- plans by form ----------------------------------------------------------------------------------------------------


def test_a_form_tells_tensors_apart_by_what_checks_read():
    x = torch.zeros(2, 3, 4)
    others = (x.transpose(0, 1), x[:1], x.half(), x[..., ::2], torch.zeros(2, 4, 3).transpose(1, 2))
    assert len({form(x), *map(form, others), form(None), form(x, None)}) == 8
    assert form(x, None) == form(torch.ones(2, 3, 4), None)
    on_gpus = [SimpleNamespace(shape=x.shape, stride=x.stride, dtype=x.dtype, get_device=lambda n=n: n) for n in (0, 1)]
    assert form(on_gpus[0]) != form(on_gpus[1])


def test_the_oldest_plan_is_dropped_and_the_others_stay(monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    kept: Plans[int] = Plans()
    for i in range(5):
        assert kept.keep(i, 10 * i) == 10 * i
    assert list(kept.items()) == [(2, 20), (3, 30), (4, 40)]
    assert kept.keep(3, 31) == 31
    assert list(kept.items()) == [(2, 20), (3, 31), (4, 40)]


@pytest.mark.parametrize("bad", [{"num_heads": 2.0}, {"head_size": 8.0}, {"num_heads": True, "head_size": 16}], ids=str)
def test_tau_tail_does_not_find_a_plan_by_an_equal_number_of_another_type(bad, monkeypatch):
    module, done = sys.modules[tau_tail.__module__], []
    monkeypatch.setattr(module, "_binary", SimpleNamespace(kernel=lambda *_: lambda *given: done.append(given)))
    monkeypatch.setattr(module, "_launches", Plans())
    good = {name: int(x) for name, x in ({"num_heads": 2, "head_size": 8} | bad).items()}
    qkv = torch.zeros(3, 64 * good["head_size"] // 8 - 16 * (good["num_heads"] == 1)).bfloat16()
    tok = torch.zeros(3, (qkv.shape[1] // good["head_size"] + good["num_heads"]) // 2).bfloat16()
    given = {"qkv": qkv, "tok_qv_linear": tok, "tau_pos_table": torch.zeros(4, tok.shape[1])}
    given["positions"] = torch.zeros(3, dtype=torch.int32)
    tau_tail.kernel_op.launch(**given, **good)
    assert len(done) == 1
    with pytest.raises(TypeError, match="tau_tail"):
        tau_tail.kernel_op.launch(**given, **(good | bad))
    assert len(done) == 1


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls of the kernels of tau_tail and merge_attention_states, which do nothing."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    binary = SimpleNamespace(kernel=lambda variant, _: lambda *given: calls.append((variant.name, given)))
    for op in (tau_tail, merge_attention_states):
        monkeypatch.setattr(sys.modules[op.__module__], "_binary", binary)
        monkeypatch.setattr(sys.modules[op.__module__], "_launches", Plans())
    return calls


def tau_arguments(size: int = 8, wide: int = 0, offset: int = 0, tokens: int = 3, **more: Any) -> dict[str, Any]:
    """Two query and two KV heads in bf16; rows are ``wide`` elements longer, and begin ``offset`` later."""
    row = 6 * size + wide
    qkv = torch.zeros(tokens * row + offset).bfloat16()[offset:].view(tokens, row)[:, : 6 * size]
    given = {"qkv": qkv, "tok_qv_linear": torch.zeros(tokens, 4).bfloat16(), "tau_pos_table": torch.zeros(5, 4)}
    return given | {"positions": torch.arange(tokens), "num_heads": 2, "head_size": size} | more


def test_tau_tail_gives_its_kernel_positions_as_words(entries):
    given = tau_arguments()
    tau_tail.kernel_op.launch(**given)
    tau_tail.kernel_op.launch(**given | {"positions": given["positions"].int()})
    tau_tail.kernel_op.launch(**tau_arguments(tokens=1, positions=torch.tensor([7, 0, 0])[::3]))
    (name, of_words), (_, of_int32), (_, of_one) = entries
    assert name == "tau_tail_bf16_fp32"
    assert all(x is y for x, y in zip(of_words[:3], given.values(), strict=False))
    assert of_words[3].tolist() == [0, 0, 1, 0, 2, 0]  # little-endian
    assert of_one[3].tolist() == [7, 0]
    assert of_int32[3].tolist() == [0, 1, 2]
    assert [x[4:] for x in (of_words, of_int32, of_one)] == [(True, 2, 8), (False, 2, 8), (True, 2, 8)]


@pytest.mark.parametrize("changed", [{"size": 4}, {"wide": 4}, {"offset": 4}], ids=str)
def test_tau_tail_of_heads_that_are_not_aligned_runs_by_reference(entries, changed):
    tau_tail.kernel_op.launch(**tau_arguments())
    with pytest.raises(UnsupportedError, match="aligned to 16 bytes"):
        tau_tail.kernel_op.launch(**tau_arguments(**changed))
    assert len(entries) == 1


def test_tau_tail_refuses_another_head_size_after_a_usual_call_too(entries):
    tau_tail.kernel_op.launch(**tau_arguments())
    with pytest.raises(ValueError, match="tau_tail: argument 'qkv'"):
        tau_tail.kernel_op.launch(**tau_arguments() | {"head_size": 16})
    assert len(entries) == 1


@pytest.mark.parametrize("changed", [{"tokens": 0}, {"tau_pos_table": torch.zeros(0, 4)}], ids=["tokens", "table"])
def test_tau_tail_of_nothing_launches_nothing(entries, changed):
    tau_tail.kernel_op.launch(**tau_arguments(**changed))
    assert entries == []


def parts(size: int = 8, wide: int = 0, offset: int = 0, tokens: int = 3) -> list[torch.Tensor]:
    """Outputs and LSEs of two heads in fp16; rows of the second are longer, and begin later."""
    row = size + wide
    second = torch.zeros(tokens * 2 * row + offset).half()[offset:].view(tokens, 2, row)[..., :size]
    return [torch.zeros(tokens, 2, size).half(), torch.zeros(2, tokens), second, torch.zeros(2, tokens)]


def test_merging_gives_its_kernel_the_parts_and_results(entries):
    given = parts()
    results = merge_attention_states.kernel_op.launch(*given)
    ((name, got),) = entries
    assert name == "merge_fp16"
    assert all(x is y for x, y in zip(got, (*given, *results), strict=True))
    assert [(x.dtype, x.shape) for x in results] == [(torch.float16, (3, 2, 8)), (torch.float32, (2, 3))]


@pytest.mark.parametrize("changed", [{"size": 4}, {"wide": 4}, {"offset": 4}], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_merging_rows_that_are_not_aligned_runs_by_reference(entries, changed, swapped):
    merge_attention_states.kernel_op.launch(*parts())
    given = parts(**changed)
    with pytest.raises(UnsupportedError, match="aligned to 16 bytes"):
        merge_attention_states.kernel_op.launch(*(given[2:] + given[:2] if swapped else given))
    assert len(entries) == 1


@pytest.mark.parametrize("which", range(4))
def test_merging_refuses_other_shapes_after_a_usual_call_too(entries, which):
    given = parts()
    merge_attention_states.kernel_op.launch(*given)
    given[which] = given[which][:1]
    with pytest.raises(ValueError, match="merge_attention_states: argument"):
        merge_attention_states.kernel_op.launch(*given)
    assert len(entries) == 1


def test_merging_nothing_launches_nothing(entries):
    assert merge_attention_states.kernel_op.launch(*parts(tokens=0))[0].shape == (0, 2, 8)
    assert entries == []
