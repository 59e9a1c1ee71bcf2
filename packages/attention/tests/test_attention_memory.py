"""On a CPU the references read one sequence at a time: batches of unequal lengths and wide tables cost no padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kestrel_attention import flash_attn_varlen_func, flash_attn_with_kvcache, reference
from kestrel_runtime.testing import assert_same_bits


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


LENGTHS = ([3, 0, 70, 1], [5, 9, 300, 0])  # of queries and of keys


def packed(kind: str) -> dict[str, Any]:
    torch.manual_seed(len(kind))
    starts_q, starts_k = (ints(0, *torch.tensor(lengths).cumsum(0)) for lengths in LENGTHS)
    q, k, v = torch.randn(80, 4, 16), torch.randn(320, 2, 16), torch.randn(320, 2, 16)  # six rows of no sequence
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 64}
    call |= {"max_seqlen_k": 400, "causal": True, "window_size": (290, 3), "prefix_len": ints(2, 0, 9, 1)}
    call |= {"sinks": torch.randn(4), "return_lse": True}
    if kind == "seqused":
        call["seqused_k"] = ints(4, 20, 299, 0)
    if kind == "paged":
        table = torch.randint(-1, 50, (4, 90), dtype=torch.int32)
        call |= {"k": torch.randn(50, 4, 2, 16), "v": torch.randn(50, 4, 2, 16), "block_table": table}
        call |= {"cu_seqlens_k": None, "seqused_k": ints(*LENGTHS[1])}
    return call


@pytest.mark.parametrize("kind", ["packed", "seqused", "paged"])
def test_packed_sequences_are_the_same_padded_and_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = flash_attn_varlen_func(**packed(kind))
    monkeypatch.setattr(reference, "_on_host", lambda q: False)
    assert_same_bits(list(alone), list(flash_attn_varlen_func(**packed(kind))))


def cached(kind: str) -> dict[str, Any]:
    torch.manual_seed(len(kind))
    blocks, page = (4, 140) if "unpaged" in kind else (20, 64 if kind == "int4" else 16)
    call = {"q": torch.randn(4, 2, 4, 64), "cache_seqlens": ints(5, -1, 130, 64), "sinks": torch.randn(4)}
    if "unpaged" not in kind:
        call["block_table"] = torch.randint(-1, blocks, (4, 12), dtype=torch.int32)
    if kind == "int4":
        caches = torch.randint(0, 256, (2, blocks, 64, 2, 32), dtype=torch.uint8)
        call |= {f"{x}_{part}": torch.rand(blocks, 2, 64).half() for x in "k" for part in ("scale", "zero")}
        call |= {f"{x}_{part}": torch.rand(blocks, 64, 2).half() for x in "v" for part in ("scale", "zero")}
        call |= {"k_tail": torch.randn(3, 64, 2, 64), "seq_ids": ints(2, 0, 1, 9)}
    elif "int8" in kind:
        caches = torch.randint(-127, 128, (2, blocks, page, 2, 64), dtype=torch.int8)
        call |= {"k_scale": torch.rand(blocks, page, 2), "v_scale": torch.rand(blocks, page, 2)}
    elif kind == "fp8":
        caches = torch.randn(2, blocks, page, 2, 64).to(torch.float8_e4m3fn)
        call |= {"k_scale": torch.rand(2), "v_scale": torch.rand(1)}
    else:
        caches = torch.randn(2, blocks, page, 2, 64)
    call |= {"k_cache": caches[0], "v_cache": caches[1], "causal": True, "window_size": (100, -1), "return_lse": True}
    return call | {"prefix_len": ints(0, 3, 9, 1)}


@pytest.mark.parametrize("kind", ["float", "unpaged", "fp8", "int8", "int8 unpaged", "int4"])
def test_cached_sequences_are_the_same_padded_and_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = flash_attn_with_kvcache(**cached(kind))
    monkeypatch.setattr(reference, "_on_host", lambda q: False)
    assert_same_bits(list(alone), list(flash_attn_with_kvcache(**cached(kind))))


def test_short_packed_sequences_are_not_padded_to_the_longest() -> None:
    q = torch.zeros(400, 2, 64)
    starts = torch.tensor([*range(64), 400], dtype=torch.int32)
    numbers = (None, False, -1, -1, 0.0, 0)
    with LargestTensor() as largest:
        reference.flash_attn_varlen_func(q, q, q, starts, starts, 400, 400, *numbers, *[None] * 6)
    assert largest.bytes < 8 * q.untyped_storage().nbytes()  # padded, q is 54 times as large


def test_a_table_wider_than_its_sequences_costs_no_memory() -> None:
    q, cache = torch.zeros(2, 1, 2, 64), torch.zeros(4, 16, 2, 64)
    table = torch.zeros(2, 200, dtype=torch.int32)
    numbers = (None, True, -1, -1, 0.0, 0, None, 0, None)
    with LargestTensor() as largest:
        reference.flash_attn_with_kvcache(q, cache, cache, ints(20, 7), table, *[None] * 6, *numbers)
    assert largest.bytes < 8 * cache.untyped_storage().nbytes()  # gathered in whole, K is 100 times as large


def test_memory_grows_with_the_keys_and_not_with_their_square() -> None:
    q = torch.zeros(1, 2048, 1, 8)
    with LargestTensor() as largest:
        reference.flash_attn_func(q, q, q, None, True, 64, -1, 0.0, 0, *[None] * 5)
    assert largest.bytes <= 32 * 2048 * 8  # a square of bools is 8 times as large
