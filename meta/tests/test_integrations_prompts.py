"""Prompts of transformers' models through the prefill kernels: what runs where, and the same logits everywhere."""

from __future__ import annotations

import pytest
import torch
from logit_bounds import ROUNDING
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, cache, masks, prompts
from kestrel_runtime import trace

DENSE, PACKED, CACHED = (f"kestrel_attention.flash_attn_{name}" for name in ("func", "varlen_func", "with_kvcache"))
PADDING = {
    "none": (slice(0), slice(0)),
    "left": (slice(0, 4), slice(0, 11)),
    "right": (slice(9, 12), slice(4, 12)),
    "between": (slice(3, 5), slice(7, 10)),
}
"""What of the 12 columns is padding in rows 1 and 2 of three."""


def padded(where):
    ids = torch.randint(1, 64, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, part in enumerate(PADDING[where], start=1):
        mask[row, part] = 0
    return ids, mask


def logits(model, ids, mask, **options):
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, **options).logits


def served(counts):
    return {op for op, of_op in counts.items() if op.startswith("kestrel_attention") and any(of_op.values())}


@pytest.mark.parametrize("where", PADDING)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_prompts_without_a_cache_keep_their_logits(tiny_transformer, family, where):
    model = tiny_transformer(family)
    ids, mask = padded(where)
    keep = mask.bool()
    expected = logits(model, ids, mask, use_cache=False)[keep]
    integration.apply(model)
    with trace() as counts:
        found = logits(model, ids, mask, use_cache=False)[keep]
    torch.testing.assert_close(found, expected, **ROUNDING)
    ran = {DENSE} if where == "none" else {PACKED}
    gaps_in_a_window = where == "between" and family != "llama"  # gemma2 has full attention in its other layer
    assert served(counts) == (ran if not gaps_in_a_window else set() if family == "mistral" else {PACKED})


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize("where", PADDING)
def test_a_first_prompt_attends_to_its_exact_keys(tiny_transformer, kind, where):
    model = tiny_transformer("qwen3")
    ids, mask = padded(where)
    integration.apply(model)
    expected = logits(model, ids, mask, past_key_values=KestrelCache(model.config, max_tokens=12))
    with trace() as counts:
        found = logits(model, ids, mask, past_key_values=KestrelCache(model.config, kv_cache=kind, max_tokens=12))
    assert torch.equal(found[mask.bool()], expected[mask.bool()])
    assert served(counts) == {DENSE if where == "none" else PACKED}


@pytest.mark.parametrize(("kind", "where"), [("auto", "none"), ("auto", "left"), ("fp8", "none"), ("fp8", "right")])
def test_a_long_second_prompt_reads_the_pages(tiny_transformer, kind, where):
    model = tiny_transformer("gemma2")
    integration.apply(model)
    first = torch.randint(1, 64, (3, 5), generator=torch.Generator().manual_seed(2))
    ids, mask = padded(where)
    ids, mask = ids.repeat(1, 2), torch.cat([mask, torch.ones_like(mask)], 1)
    whole = torch.cat([torch.ones_like(first), mask], 1)
    results = []
    for dense in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            if dense:
                patched.setattr(cache, "serves", lambda *tensors: False)
            pages = KestrelCache(model.config, kv_cache=kind, max_tokens=29)
            logits(model, first, torch.ones_like(first), past_key_values=pages)
            with trace() as counts:
                results.append(logits(model, ids, whole, past_key_values=pages)[mask.bool()])
        assert served(counts) == (set() if dense else {CACHED if where == "none" else PACKED})
    torch.testing.assert_close(*results, **ROUNDING)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_long_second_prompt_over_integers_reads_gathered_keys(tiny_transformer, kind):
    model = tiny_transformer("llama", num_hidden_layers=1)  # a second layer would quantise other roundings
    integration.apply(model)
    ids = padded("none")[0].repeat(1, 3)
    results = []
    for dense in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            if dense:
                patched.setattr(cache, "serves", lambda *tensors: False)
            pages = KestrelCache(model.config, kv_cache=kind, max_tokens=36)
            logits(model, ids[:, :6], torch.ones_like(ids[:, :6]), past_key_values=pages)
            with trace() as counts:
                results.append(logits(model, ids[:, 6:], torch.ones_like(ids), past_key_values=pages))
        assert served(counts) == (set() if dense else {DENSE})
    torch.testing.assert_close(*results, **ROUNDING)


def test_gradients_take_pytorchs_attention(tiny_transformer):
    model = tiny_transformer("llama")
    integration.apply(model, rotary=False)
    ids, mask = padded("left")
    with trace() as counts:
        model(ids, attention_mask=mask).logits.sum().backward()
    assert served(counts) == set()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("dtype", "size", "codes", "expected"),
    [
        (torch.bfloat16, 128, None, True),
        (torch.float16, 72, None, True),
        (torch.bfloat16, 256, torch.float8_e4m3fn, True),
        (torch.bfloat16, 72, torch.float8_e4m3fn, False),
        (torch.bfloat16, 20, None, False),
        (torch.bfloat16, 512, None, False),
        (torch.float32, 64, None, False),
    ],
)
def test_on_a_gpu_only_what_has_a_kernel_is_sent_to_it(dtype, size, codes, expected):
    with FakeTensorMode():
        query = torch.empty(1, 5, 2, size, dtype=dtype, device="cuda")
        key = torch.empty(1, 5, 2, size, dtype=codes or dtype, device="cuda")
        assert prompts.serves(query, key) is expected


def test_a_mask_is_read_once_for_all_layers(monkeypatch):
    made = []
    monkeypatch.setattr(prompts.Packing, "of", lambda valid: made.append(valid))
    mask = masks.Mask(padded("left")[1].bool(), {})
    mask.packing(12)
    mask.packing(12)
    assert len(made) == 1
