"""Plans of calls: how many are kept, and in which order a planned call allocates and writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kestrel_attention import decode, flash_attn_with_kvcache, plans
from kestrel_attention.plans import Plans, form


def test_a_form_tells_tensors_apart_by_what_checks_look_at() -> None:
    x = torch.zeros(2, 3, 4)
    others = (x.transpose(0, 1), x[:1], x.half(), x[..., ::2])
    assert len({form(x), *map(form, others), form(None), form(x, None)}) == 7
    assert form(x, None) == form(torch.ones(2, 3, 4), None)


def test_the_oldest_plan_is_dropped_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
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
    launch = decode.make_launch("key", decode.problem_of(q, *caches, *rest, appends=True), q, (new, new))
    decode.launches.clear()
    lengths = torch.zeros(1, dtype=torch.int32)
    launch(q, *caches, lengths, None, None, None, None, (new, new))
    assert done == ["append_bf16_same", "decode_bf16_same_d128_w4", "combine_bf16_w1"]

    def empty(*sizes: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    done.clear()
    monkeypatch.setattr(decode, "empty_strided", empty)
    with pytest.raises(torch.OutOfMemoryError):
        launch(q, *caches, lengths, None, None, None, None, (new, new))
    assert done == []


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
