"""KestrelCache in transformers' own generate and in forward passes by hand, beside its dynamic cache."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from logit_bounds import ROUNDING
from transformers import DynamicCache, LlamaConfig

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, masks

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "mixtral", "granite"]
FAMILIES += ["gemma", "gemma2", "gemma3_text", "phi", "phi3"]
KINDS = {"auto": 1e-5, "fp8": 0.1, "int8": 0.02, "int4": 0.4}
"""The formats, with the relative error of logits that they may bring to a random model."""
GREEDY = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}


def prompt(batch, length, *, left=(), right=()):
    """Random ids [batch, length] and a mask with so many padding tokens on the sides of each row."""
    ids = torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(left):
        mask[row, :count] = 0
    for row, count in enumerate(right):
        mask[row, length - count :] = 0
    return ids, mask


def steps(model, cache, ids, mask, sizes):
    """Logits [B, S, V] of the ids given in pieces of these sizes."""
    assert sum(sizes) == ids.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts, start = [], 0
    with torch.no_grad():
        for size in sizes:
            stop = start + size
            part = {"position_ids": positions[:, start:stop], "attention_mask": mask[:, :stop]}
            parts.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **part).logits)
            start = stop
    return torch.cat(parts, 1)


def error(found, expected, mask):
    keep = mask.bool()
    return float((found - expected)[keep].norm() / expected[keep].norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_tokens_of_the_dynamic_cache_with_exact_keys(applied, family, kind):
    model = applied(family)
    ids, mask = prompt(3, 9, left=(0, 3, 8))
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=18)
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert found.shape == (3, 19)
    assert cache.lengths.tolist() == [18, 15, 10]
    assert cache.get_seq_length() == 18
    if kind == "auto":  # codes may choose other tokens: their logits are compared below
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_of_each_format_are_near_those_of_exact_keys(applied, family, kind):
    model = applied(family)
    ids, mask = prompt(2, 90, left=(0, 7))
    sizes = [61] + [1] * 29  # int4: over the end of a page
    expected = steps(model, DynamicCache(config=model.config), ids, mask, sizes)
    found = steps(model, KestrelCache(model.config, kv_cache=kind, max_tokens=90), ids, mask, sizes)
    assert error(found, expected, mask) < KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_alone_is_near_exact_keys(applied, kind):
    model = applied("llama")
    ids, mask = prompt(1, 70)
    expected = steps(model, DynamicCache(config=model.config), ids, mask, [60] + [1] * 10)
    found = steps(model, KestrelCache(model.config, kv_cache=kind, max_tokens=70), ids, mask, [60] + [1] * 10)
    assert error(found, expected, mask) < KINDS[kind]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_any_page_size_gives_the_same_logits(applied, page_size):
    model = applied("mistral")
    ids, mask = prompt(2, 20, left=(2, 0))
    expected = steps(model, DynamicCache(config=model.config), ids, mask, [12, 1, 1, 1, 5])
    cache = KestrelCache(model.config, page_size=page_size, max_tokens=20, max_batch=3)
    torch.testing.assert_close(steps(model, cache, ids, mask, [12, 1, 1, 1, 5])[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 7], [4, 1, 3, 4], [2, 10], [12]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(applied, family, sizes):
    model = applied(family)
    ids, mask = prompt(2, 12)
    whole = steps(model, None, ids, mask, [12])
    found = steps(model, KestrelCache(model.config, max_tokens=12), ids, mask, sizes)
    torch.testing.assert_close(found, whole, **ROUNDING)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_long_second_prompt_sees_the_first(applied, family):
    model = applied(family)
    ids, mask = prompt(2, 40, left=(3, 0))
    whole = steps(model, None, ids, mask, [40])
    found = steps(model, KestrelCache(model.config, max_tokens=40), ids, mask, [8, 1, 31])
    torch.testing.assert_close(found[mask.bool()], whole[mask.bool()], **ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right_takes_no_room(applied, kind):
    model = applied("llama")
    ids, mask = prompt(3, 20, right=(0, 4, 9))
    mask[:, 10:] = 1  # rows 1 and 2 go on after their padding
    mask[1, 7:10], mask[2, 2:10] = 0, 0
    expected = steps(model, DynamicCache(config=model.config), ids, mask, [10] + [1] * 10)
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=20)
    found = steps(model, cache, ids, mask, [10] + [1] * 10)
    assert cache.lengths.tolist() == [20, 17, 12]
    assert error(found, expected, mask) < KINDS[kind]


def test_padding_in_a_later_piece_is_skipped(applied):
    model = applied("llama")
    ids, mask = prompt(2, 16)
    mask[0, 6:9], mask[1, 11] = 0, 0
    expected = steps(model, DynamicCache(config=model.config), ids, mask, [5, 6, 1, 4])
    cache = KestrelCache(model.config, max_tokens=16)
    found = steps(model, cache, ids, mask, [5, 6, 1, 4])
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **ROUNDING)
    assert cache.lengths.tolist() == [13, 15]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_behind_the_last_token_of_a_page_is_skipped(applied, kind):
    model = applied("llama")
    ids, mask = prompt(2, 70)
    mask[1, 63:66] = 0
    expected = steps(model, DynamicCache(config=model.config), ids, mask, [60] + [1] * 10)
    found = steps(model, KestrelCache(model.config, kv_cache=kind, max_tokens=70), ids, mask, [60] + [1] * 10)
    assert error(found, expected, mask) < KINDS[kind]
    assert error(found[1:, 66:], expected[1:, 66:], mask[1:, 66:]) < KINDS[kind]


def test_a_row_does_not_depend_on_the_others(applied):
    model = applied("qwen3")
    ids, mask = prompt(3, 8, left=(0, 5, 2))
    together = model.generate(
        ids, attention_mask=mask, past_key_values=KestrelCache(model.config, max_tokens=20), **GREEDY
    )
    for row, count in enumerate((0, 5, 2)):
        cache = KestrelCache(model.config, max_tokens=20)
        alone = model.generate(ids[row : row + 1, count:], past_key_values=cache, **GREEDY)
        assert torch.equal(alone[0, 8 - count :], together[row, 8:])


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_beam_search_gives_the_beams_of_the_dynamic_cache(applied, kind):
    model = applied("llama")
    ids, mask = prompt(2, 7, left=(0, 2))
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    expected = model.generate(ids, attention_mask=mask, **options)
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=20, max_batch=6)
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert found.shape == expected.shape
    if kind == "auto":
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_reordered_sequences_go_on_as_their_originals(applied, kind):
    model = applied("llama")
    ids, mask = prompt(3, 70, left=(0, 3, 6))
    ids[:, 69] = 9
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=80)
    straight = steps(model, cache, ids, mask, [66, 1, 1, 1, 1])[:, -1]
    order = torch.tensor([2, 0, 2])
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=80)
    steps(model, cache, ids[:, :69], mask[:, :69], [66, 1, 1, 1])
    cache.reorder_cache(order)
    with torch.no_grad():
        options = {"attention_mask": mask[order], "position_ids": mask[order].sum(1, keepdim=True) - 1}
        found = model(ids[:, 69:], past_key_values=cache, **options).logits[:, -1]
    torch.testing.assert_close(found, straight[order], **ROUNDING)


def test_sequences_can_be_selected_and_repeated(applied):
    model = applied("llama")
    ids, mask = prompt(2, 6, left=(0, 2))
    cache = KestrelCache(model.config, max_tokens=10, max_batch=4)
    steps(model, cache, ids, mask, [6])
    cache.batch_repeat_interleave(2)
    assert cache.lengths.tolist() == [6, 6, 4, 4]
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.lengths.tolist() == [4, 6]
    with pytest.raises(ValueError, match="max_batch: expected at least 6 "):
        cache.batch_repeat_interleave(3)


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8"])
def test_cropped_tokens_are_forgotten(applied, kind):
    model = applied("mistral")
    ids, mask = prompt(2, 30, left=(3, 0))
    kept = torch.cat([ids[:, :20], ids[:, 25:]], 1)
    expected = steps(model, KestrelCache(model.config, kv_cache=kind, max_tokens=30), kept, mask[:, :25], [18, 1, 1, 5])
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=30)
    steps(model, cache, ids[:, :25], mask[:, :25], [18, 1, 1, 4, 1])
    cache.crop(-5)
    assert cache.get_seq_length() == 20
    with torch.no_grad():
        options = {"attention_mask": mask[:, :25], "position_ids": mask[:, :25].cumsum(1)[:, 20:] - 1}
        found = model(kept[:, 20:], past_key_values=cache, **options).logits
    torch.testing.assert_close(found, expected[:, 20:], **ROUNDING)


def test_crop_keeps_what_it_cannot_give_back(applied):
    model = applied("llama")
    ids, mask = prompt(2, 70, left=(3, 0))
    cache = KestrelCache(model.config, kv_cache="int4", max_tokens=80)
    steps(model, cache, ids, mask, [66, 1, 1, 1, 1])
    cache.crop(-3)
    with pytest.raises(ValueError, match="crop: expected to remove tokens of unfinished pages of 64"):
        cache.crop(-1)
    with pytest.raises(
        ValueError, match="crop: expected at least 66 tokens to stay, as padding lies before them, got 65"
    ):
        cache.crop(-2)
    assert cache.get_seq_length() == 67


def test_assisted_decoding_gives_the_same_tokens(applied):
    model = applied("llama")
    ids = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]])
    expected = model.generate(ids, **GREEDY)
    cache = KestrelCache(model.config, max_tokens=40)
    assert torch.equal(model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY), expected)


def test_an_image_in_the_prompt_is_seen_in_both_directions():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 64}
    text |= {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    tokens = {"image_token_index": 63, "boi_token_index": 62, "eoi_token_index": 61, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens)).eval()
    for parameter in model.parameters():
        parameter.data = parameter * 3 if parameter.ndim > 1 else parameter + 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 6, 7, 63, 63, 63, 63, 8, 9, 10]])
    image = {"pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 63).long()}
    expected = model.generate(ids, **image, **GREEDY)
    report = integration.apply(model)
    assert set(report.left) == {"1 SiglipAttention (unknown)", "2 SiglipMLP (unknown)", "4 LayerNorm (torch's own)"}
    cache = KestrelCache(model.config, max_tokens=20)
    assert torch.equal(model.generate(ids, **image, past_key_values=cache, **GREEDY), expected)


def test_a_conversation_goes_on_in_one_cache(applied):
    model = applied("gemma2")
    ids, _ = prompt(1, 6)
    cache = KestrelCache(model.config, max_tokens=60)
    exact = DynamicCache(config=model.config)
    for more in (4, 1, 20):
        expected = model.generate(ids, past_key_values=exact, **{**GREEDY, "max_new_tokens": 5})
        assert torch.equal(model.generate(ids, past_key_values=cache, **{**GREEDY, "max_new_tokens": 5}), expected)
        ids = torch.cat([expected, prompt(1, more)[0]], 1)


def test_a_reset_cache_serves_another_batch(applied):
    model = applied("llama")
    cache = KestrelCache(model.config, max_tokens=20, max_batch=3)
    for batch in (2, 3, 1):
        ids, mask = prompt(batch, 7)
        cache.reset()
        found = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **GREEDY))


def test_a_copied_prompt_goes_on_in_both_caches(applied):
    model = applied("llama")
    ids, _ = prompt(2, 9)
    start = KestrelCache(model.config, kv_cache="int8", max_tokens=40)
    integration.generate(model, ids[:, :6], past_key_values=start, max_new_tokens=1)
    twin = copy.deepcopy(start)
    found = [integration.generate(model, ids, past_key_values=cache, max_new_tokens=8) for cache in (twin, start)]
    assert torch.equal(*found)
    assert torch.equal(found[0], integration.generate(model, ids, kv_cache="int8", max_new_tokens=8))


def test_a_cache_that_nobody_uses_is_freed_at_once(applied):
    model = applied("llama")
    cache = KestrelCache(model.config, max_tokens=20)
    integration.generate(model, prompt(1, 6)[0], past_key_values=cache, max_new_tokens=3)
    pages = weakref.ref(cache.layers[0].pages.keys)
    gc.disable()  # by reference counting alone
    try:
        del cache
        assert pages() is None
    finally:
        gc.enable()


def test_a_mask_beyond_causality_is_refused_after_a_context(applied):
    model = applied("llama")
    cache = KestrelCache(model.config, max_tokens=40)
    steps(model, cache, *prompt(1, 6), [6])
    blocks = masks.Mask(None, {"allow_is_causal_skip": False})
    states = torch.zeros(1, 2, 3, 8)
    key, value = cache.update(states, states, 0)
    with pytest.raises(ValueError, match="attention_mask: expected causality after a context"):
        masks.attention(model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 8), key, value, blocks)


def test_quantised_pages_take_the_memory_their_formats_say():
    config = LlamaConfig(num_hidden_layers=1, hidden_size=256, num_attention_heads=2, num_key_value_heads=2)
    sizes = {}
    for kind in KINDS:
        cache = KestrelCache(config, kv_cache=kind, max_tokens=4096)
        key = torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16)
        cache.layers[0].lazy_initialization(key, key)
        sizes[kind] = cache.bytes() / (4096 * 2 * 2 * 128 * 2)
    assert sizes["auto"] == 1
    assert sizes["fp8"] == 0.5
    assert sizes["int8"] < 0.52
    assert sizes["int4"] < 0.29


def refusal(model, match, ids=None, **options):
    with pytest.raises(ValueError, match=match), torch.no_grad():
        model(prompt(2, 6)[0] if ids is None else ids, **options)


def test_a_sequence_beyond_the_capacity_is_refused(applied):
    model = applied("llama")
    cache = KestrelCache(model.config, max_tokens=5)
    refusal(model, "KestrelCache: max_tokens: expected at least 6 per sequence, got 5", past_key_values=cache)


def test_another_batch_is_refused(applied):
    model = applied("llama")
    cache = KestrelCache(model.config, max_tokens=20)
    steps(model, cache, *prompt(2, 6), [6])
    ids = torch.ones(3, 1, dtype=torch.long)
    refusal(model, "batch: expected 2 sequences as before .*, got 3", ids, past_key_values=cache)
    cache = KestrelCache(model.config, max_tokens=20, max_batch=1)
    refusal(model, "max_batch: expected at least 2, got 1", past_key_values=cache)


def test_a_mask_of_four_dimensions_is_refused(applied):
    model = applied("llama")
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    cache = KestrelCache(model.config, max_tokens=20)
    refusal(model, r"attention_mask: expected a padding mask \[B, keys\]", attention_mask=mask, past_key_values=cache)


def test_an_unchanged_model_is_refused_before_it_decodes_wrongly(tiny_transformer):
    model = tiny_transformer("llama")
    cache = KestrelCache(model.config, max_tokens=20)
    with pytest.raises(RuntimeError, match=r"expected a model after apply\(model, attention=True\)"):
        model.generate(prompt(1, 4)[0], past_key_values=cache, **GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "int2"}, "kv_cache: expected one of auto, fp8, int8, int4, got 'int2'"),
        ({"kv_cache": "int4", "page_size": 16}, "page_size: expected 64 for int4, got 16"),
        ({"page_size": 0}, "page_size: expected a positive integer, got 0"),
        ({"max_tokens": -1}, "max_tokens: expected a positive integer, got -1"),
        ({"max_batch": 2.5}, "max_batch: expected a positive integer, got 2.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        KestrelCache(LlamaConfig(num_hidden_layers=1), **{"max_tokens": 8, **options})


def test_layers_without_attention_are_refused():
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="KestrelCache: config: expected layers of"):
        KestrelCache(config, max_tokens=8)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "tokens", "splits"),
    [(4, 1, 128, 1024, -1), (8, 2, 128, 30, -1), (4, 1, 128, 1025, 0), (8, 1, 128, 30, 0), (4, 1, 64, 30, 0)],
)
def test_a_step_over_a_short_cache_asks_for_more_warps(applied, monkeypatch, heads, kv_heads, size, tokens, splits):
    from kestrel_kernels.integrations.transformers import cache as module

    seen, attend = [], module.flash_attn_with_kvcache
    monkeypatch.setattr(
        module, "flash_attn_with_kvcache", lambda *a, **k: seen.append(k["num_splits"]) or attend(*a, **k)
    )
    model = applied("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size)
    cache = KestrelCache(model.config, max_tokens=tokens)
    integration.generate(model, torch.tensor([[5, 9, 33]]), past_key_values=cache, max_new_tokens=3, eos_token_id=[])
    assert set(seen) == {splits}
