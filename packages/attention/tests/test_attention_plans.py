"""Plans of calls: how many are kept, and in which order a planned call allocates and writes."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kestrel_attention import decode, flash_attn_with_kvcache, plans
from kestrel_attention.plans import Plans, form
from kestrel_runtime import cute


def test_a_form_tells_tensors_apart_by_what_checks_look_at() -> None:
    x = torch.zeros(2, 3, 4)
    others = (x.transpose(0, 1), x[:1], x.half(), x[..., ::2])
    assert len({form(x), *map(form, others), form(None), form(x, None)}) == 7
    assert form(x, None) == form(torch.ones(2, 3, 4), None)


def test_the_oldest_plan_makes_room_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST", 3)
    kept: Plans[int] = Plans()
    for i in range(5):
        assert kept.keep(i, 10 * i) == 10 * i
    assert list(kept.items()) == [(2, 20), (3, 30), (4, 40)]


def test_an_append_that_finds_no_memory_has_written_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory is allocated first: an engine that frees some and calls again appends once."""
    done: list[str] = []
    kernels = SimpleNamespace(kernel=lambda variant, device: lambda *given: done.append(variant.name))
    monkeypatch.setattr(decode, "_binary", kernels)
    q, new = torch.zeros(1, 1, 8, 128).bfloat16(), torch.zeros(1, 1, 2, 128).bfloat16()
    caches = [torch.zeros(1, 4096, 2, 128).bfloat16() for _ in range(2)]
    rest = (None, None, None, None, False, -1, -1, 0.0, 0, None, 0)
    plan = decode.make_plan("key", q, *caches, *rest, new=(new, new))
    decode.plans.clear()
    lengths = torch.zeros(1, dtype=torch.int32)
    decode.attend(plan, q, *caches, lengths, None, None, None, None, new=(new, new))
    assert done == ["append_bf16_same", "decode_bf16_same_d128_w4", "combine_bf16_w1"]

    def empty(*sizes: int, **how: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    done.clear()
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError):
        decode.attend(plan, q, *caches, lengths, None, None, None, None, new=(new, new))
    assert done == []


class Quotient(int):
    def to(self, kind: type[int]) -> int:
        return kind(self)


def chunk_in_python() -> Callable[..., int]:
    """The kernel's function that cuts, from its source and with Python's integers: compiling would rewrite it."""
    from kestrel_attention.kernels import decode as device

    tree = ast.parse(Path(device.__file__).read_text())
    (function,) = (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == "chunk")
    function.decorator_list.clear()
    names: dict[str, Any] = dict.fromkeys(("Int32", "Int64", "Uint32"), int)
    names["cutlass"] = SimpleNamespace(const_expr=lambda x: x, select_=lambda which, x, y: x if which else y)
    names["ptx"] = SimpleNamespace(div_u32=lambda x, y: Quotient(x // y))
    exec(compile(ast.Module([function], []), device.__file__, "exec"), names)
    return names["chunk"]


def cache_of(kind: str, kv_heads: int, size: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A cache of one page, and what comes with it."""
    dtypes = {"same": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
    cache = torch.empty(1, 64, kv_heads, size // 2 if kind == "int4" else size, dtype=dtypes.get(kind, torch.uint8))
    of_tokens, of_channels = torch.empty(1, 64, kv_heads), torch.empty(1, kv_heads, size)
    tail = torch.empty(1, 64, kv_heads, size), torch.empty(1)
    both = {"int8": (of_tokens, of_tokens), "int4": (of_channels, of_channels, of_tokens, of_tokens, *tail)}
    return cache, both.get(kind, ())


@pytest.mark.skipif(not cute.can_compile(), reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize("cache", ["same", "e4m3", "e5m2", "int8", "int4"])
def test_the_host_cuts_a_sequence_as_the_device_does(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's first page is looked up where the host says it is."""
    from kestrel_attention.kernels import variants

    monkeypatch.setattr(decode, "_binary", SimpleNamespace(kernel=lambda variant, device: None))
    rooms = (64, 512, 576, 1024, 1088, 8192, 8256, 20032, 40000, 131072, 10**6)
    for size in (64, 128) if cache in ("e5m2", "int4") else (64, 128, 256) if cache == "int8" else (64, 128, 256, 512):
        kernel = variants.covering("bf16", cache, size)[0].kernel("90a")[0]
        chunk = functools.partial(chunk_in_python(), kernel)
        for kv_heads, splits, room in itertools.product((1, 3, 8, 200), (0, 1, 5, 16, 100), rooms):
            q = torch.zeros(1, 1, kv_heads, size).bfloat16()
            k_cache, scales = cache_of(cache, kv_heads, size)
            table = torch.zeros(1, 1, dtype=torch.int32).expand(1, room // 64)
            rest = (table, None, None, None, False, -1, -1, 0.0, 0, None, splits)
            plan = decode.make_plan("key", q, k_cache, k_cache, *rest, scales=scales)
            *_, whole, shorter, middle, shortest, most, _, keys, start = plan.numbers
            n = SimpleNamespace(whole=whole, shorter=shorter, middle=middle, shortest=shortest, most=most)
            assert (chunk(room // 64 * 64, n), 0) == (keys, start), (size, kv_heads, splits, room)
    decode.plans.clear()


@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 3])
def test_a_length_near_two_to_the_31_does_not_wrap_with_new_keys(length: int) -> None:
    """All keys that the table has a page for are there, as with any length past them."""
    caches = torch.randn(2, 3, 4, 2, 8)
    given = {"block_table": torch.tensor([[2, 0]], dtype=torch.int32)}
    q, k, v = torch.randn(1, 5, 4, 8), *torch.randn(2, 1, 5, 2, 8)
    before = caches.clone()
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([length], dtype=torch.int32), **given)
    assert torch.equal(caches, before)
    assert torch.equal(out, flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.tensor([8]).int(), **given))
    assert bool(out.any())
