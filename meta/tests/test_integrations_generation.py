"""integrations.transformers.generate beside transformers' own generate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, generate, generation, modules

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "mixtral", "granite"]
FAMILIES += ["gemma", "gemma2", "gemma3_text", "phi", "phi3"]
IDS = torch.tensor([[5, 9, 33, 2, 17, 40, 8], [3, 3, 60, 21, 4, 11, 50], [1, 2, 3, 4, 5, 6, 7]])
MASK = torch.ones_like(IDS)
MASK[1, :4], MASK[2, :6] = 0, 0
NEW = {"max_new_tokens": 12}


def greedy(model, **options):
    """transformers' own tokens."""
    options = {"do_sample": False, "pad_token_id": 0, **NEW, **options}
    return model.generate(IDS, attention_mask=MASK, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(applied, family):
    model = applied(family)
    assert torch.equal(generate(model, IDS, MASK, **NEW), greedy(model))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_watched_norm_of_heads_is_heeded_in_decoding(applied, name):
    model, seen = applied("qwen3"), []
    getattr(model.model.layers[0].self_attn, name).register_forward_hook(lambda *of: seen.append(of))
    generate(model, IDS, MASK, max_new_tokens=4, eos_token_id=[])
    assert len(seen) == 4, "the prompt and three steps"


def test_without_a_gpu_nothing_is_captured_and_nothing_is_said(applied, recwarn):
    model = applied("llama")
    if model.device.type == "cuda":
        pytest.skip("the model is on a GPU")
    generate(model, IDS, MASK, **NEW)
    assert [str(each.message) for each in recwarn if "CUDA graph" in str(each.message)] == []


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_quantised_cache_gives_the_tokens_it_gives_in_transformers(applied, kind):
    model = applied("llama")
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=80)
    assert torch.equal(generate(model, IDS, MASK, kv_cache=kind, **NEW), greedy(model, past_key_values=cache))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3"])
def test_the_residual_stream_in_place_changes_nothing(applied, family, monkeypatch):
    model = applied(family)
    assert generation.owns_residuals(model)
    found = generate(model, IDS, MASK, **NEW)
    monkeypatch.setattr(generation, "owns_residuals", lambda model: False)
    assert torch.equal(generate(model, IDS, MASK, **NEW), found)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi", "phi3"])
def test_tables_hold_the_rotation_that_the_module_computes(applied, family):
    model, tables = applied(family), {}
    (module,) = (each for each in model.modules() if type(each).__name__.endswith("RotaryEmbedding"))
    assert isinstance(module.forward, modules.Rotary)
    kinds = [(kind,) for kind in module.rope_type] if family == "gemma3_text" else [()]
    for positions in (torch.tensor([[0, 5, 39], [7, 7, 1]]), torch.tensor([[12], [39]])):
        x = torch.zeros(2, positions.shape[1], 8, dtype=torch.bfloat16)
        for kind in kinds:
            own = module.forward(x, positions, *kind)
            with modules.tabulated(tables, 40):
                found = module.forward(x, positions, *kind)
            for one, other in zip(own, found, strict=True):
                assert torch.equal(one, other)
            (places, table), (exact_places, exact) = modules.rotation(found, 2), modules.rotation(own, 2)
            assert torch.equal(table[places], exact[exact_places])
    assert len(tables) == len(kinds)


def test_a_decode_step_launches_few_kernels_outside_its_layers(applied):
    """Those of torch, by its dispatcher, without views and those of linear layers."""

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(func)
            return func(*args, **(kwargs or {}))

    model = applied("llama", num_hidden_layers=1)
    cache = KestrelCache(model.config, max_tokens=40)
    generate(model, IDS, MASK, past_key_values=cache, **NEW)
    found: list = []
    with torch.inference_mode(), Log():
        cache.decoding[1].advance()
    names = [str(func) for func in found if func.namespace == "aten" and not func.is_view]
    assert len([name for name in names if "linear" not in name and "reshape" not in name]) <= 8, names


def test_sequences_that_cannot_end_have_no_ops_for_it(applied):
    model = applied("llama")
    for more, stops in (({}, False), ({"eos_token_id": 63}, True), ({"stopping_criteria": lambda *_: False}, True)):
        cache = KestrelCache(model.config, max_tokens=40)
        found = generate(model, IDS, MASK, past_key_values=cache, **{"eos_token_id": [], **NEW, **more})
        assert cache.decoding[1].stops is stops
        assert torch.equal(found, generate(model, IDS, MASK, eos_token_id=[], **NEW))


def test_a_watched_layer_keeps_its_hidden_states(applied):
    model = applied("llama")
    seen = []
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    assert not generation.owns_residuals(model)
    assert torch.equal(generate(model, IDS, MASK, **NEW), greedy(model))
    assert torch.equal(seen[0], seen[12])  # the prefills of both


def test_a_part_that_is_not_applied_keeps_the_tokens(tiny_transformer):
    model = tiny_transformer("llama")
    for part in ("norms", "rotary", "mlp"):
        integration.apply(model, **{part: False})
        assert torch.equal(generate(model, IDS, MASK, **NEW), greedy(model))


def test_a_row_ends_at_its_end_of_sequence_token(applied):
    model = applied("llama")
    plain = greedy(model)
    eos = [int(plain[0, 9]), int(plain[1, 12])]
    expected = greedy(model, eos_token_id=eos, pad_token_id=63)
    found = generate(model, IDS, MASK, eos_token_id=eos, pad_token_id=63, **NEW)
    assert torch.equal(found, expected)
    assert (expected == 63).sum() > (plain == 63).sum()


def test_generation_stops_when_every_row_has_ended(applied):
    model = applied("llama")
    eos = int(greedy(model)[0, 9])
    found = generate(model, IDS[:1], eos_token_id=eos, **NEW)
    assert found.shape[1] < 12 + 7
    assert int(found[0, -1]) == eos


def test_a_repetition_penalty_gives_the_tokens_of_transformers(applied):
    model = applied("qwen2")
    expected = model.generate(IDS, do_sample=False, pad_token_id=0, repetition_penalty=1.7, **NEW)
    assert torch.equal(generate(model, IDS, repetition_penalty=1.7, **NEW), expected)
    assert not torch.equal(generate(model, IDS, **NEW), expected)


def test_padding_counts_for_no_penalty(applied):
    model = applied("qwen2")
    other = IDS.clone()
    other[MASK == 0] = 9
    found = [generate(model, ids, MASK, repetition_penalty=1.7, **NEW)[:, 7:] for ids in (IDS, other)]
    assert torch.equal(*found)


def test_settings_come_from_the_generation_config(applied):
    model = applied("qwen2")
    expected = generate(model, IDS, MASK, repetition_penalty=1.7, max_new_tokens=5)
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.max_new_tokens = 5
    assert torch.equal(generate(model, IDS, MASK), expected)
    model.generation_config.max_new_tokens = None
    model.generation_config.max_length = 12
    assert torch.equal(generate(model, IDS, MASK), expected)


SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


def test_a_seed_gives_the_same_tokens_in_any_batch(applied):
    model = applied("llama")
    found = generate(model, IDS, MASK, seed=5, **SAMPLED, **NEW)
    assert torch.equal(generate(model, IDS, MASK, seed=5, **SAMPLED, **NEW), found)
    assert not torch.equal(generate(model, IDS, MASK, seed=6, **SAMPLED, **NEW), found)
    alone = generate(model, IDS[1:2, 4:], seed=6, **SAMPLED, **NEW)
    assert torch.equal(alone[0, 3:], found[1, 7:])


def test_without_a_seed_the_default_generator_decides(applied):
    model = applied("llama")
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(generate(model, IDS, MASK, **SAMPLED, **NEW))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_first_tokens_are_drawn_with_the_models_probabilities(applied):
    model = applied("llama")
    with torch.no_grad():
        kept = model(IDS[:1]).logits[0, -1].topk(4)
    expected = torch.zeros(64).scatter(0, kept.indices, (kept.values / 0.7).softmax(0))
    ids = IDS[:1].expand(4000, -1)
    drawn = generate(model, ids, do_sample=True, temperature=0.7, top_k=4, seed=0, max_new_tokens=1)[:, -1]
    found = torch.bincount(drawn, minlength=64) / 4000
    torch.testing.assert_close(found, expected, rtol=0, atol=0.04)  # five standard deviations


def test_a_streamer_gets_prompt_and_tokens(applied):
    class Streamer:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            assert value.device.type == "cpu"
            self.got.append(value)

        def end(self):
            self.ended = True

    model, streamer = applied("llama"), Streamer()
    found = generate(model, IDS[:1], streamer=streamer, **NEW)
    assert torch.equal(streamer.got[0], IDS[:1])
    assert torch.equal(torch.cat(streamer.got[1:]), found[0, 7:])
    assert streamer.ended


def test_stopping_criteria_see_all_tokens(applied):
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    model = applied("llama")
    found = generate(model, IDS, MASK, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(11)]), **NEW)
    assert torch.equal(found, generate(model, IDS, MASK, max_new_tokens=4))
    found = generate(model, IDS, MASK, stopping_criteria=lambda ids, scores: ids.shape[1] >= 9, **NEW)
    assert found.shape == (3, 9)
    plain = generate(model, IDS, MASK, **NEW)
    first = generate(model, IDS, MASK, stopping_criteria=lambda ids, scores: torch.tensor([True, False, False]), **NEW)
    assert torch.equal(first[1:], plain[1:])
    assert torch.equal(first[0, :8], plain[0, :8])
    assert (first[0, 8:] == 0).all()  # the padding token


def test_a_cache_goes_on_where_it_was(applied):
    model = applied("gemma2")
    cache = KestrelCache(model.config, max_tokens=60)
    first = generate(model, IDS, MASK, past_key_values=cache, max_new_tokens=4)
    more = torch.cat([first, torch.tensor([[9, 8], [7, 6], [5, 4]])], 1)
    mask = torch.cat([MASK, torch.ones(3, 6, dtype=torch.long)], 1)
    found = generate(model, more, mask, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(found, generate(model, more, mask, max_new_tokens=6))
    assert cache.get_seq_length() == 18


def test_a_cache_keeps_what_a_call_prepared(applied):
    model = applied("qwen2")
    cache = KestrelCache(model.config, max_tokens=40, max_batch=3)
    settings = {**SAMPLED, **NEW, "repetition_penalty": 1.3, "eos_token_id": list(range(0, 64, 9))}  # rows end early
    prepared = []
    for seed in (1, 2):
        cache.reset()
        found = generate(model, IDS, MASK, seed=seed, past_key_values=cache, **settings)
        assert torch.equal(found, generate(model, IDS, MASK, seed=seed, **settings))
        prepared.append(cache.decoding[1])
    assert prepared[0] is prepared[1]
    for change in (lambda: integration.apply(model), lambda: settings.update(top_k=3)):
        change()
        cache.reset()
        found = generate(model, IDS, MASK, seed=3, past_key_values=cache, **settings)
        assert torch.equal(found, generate(model, IDS, MASK, seed=3, **settings))
        prepared.append(cache.decoding[1])
    assert len(set(map(id, prepared))) == 3


def test_logits_with_nan_are_an_error(applied):
    model = applied("llama")
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(RuntimeError, match="the model: expected finite logits, got NaN"):
        generate(model, IDS, **NEW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "generate: num_beams: expected 1 .*, got 4"),
        ({"logits_processor": [print]}, "generate: logits_processor: expected"),
        ({"temperature": 0.0, "do_sample": True}, r"temperature: expected a positive number .*, got 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty: expected a positive number, got -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a positive integer, got 0"),
        ({"attention_mask": MASK[:, 1:]}, r"attention_mask: expected shape \(3, 7\), got \(3, 6\)"),
        ({"attention_mask": MASK.flip(1)}, "attention_mask: expected padding on the left"),
        ({"kv_cache": "fp4"}, "kv_cache: expected one of auto, fp8, int8, int4, got 'fp4'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_do_is_named(applied, options, message):
    with pytest.raises(ValueError, match=message):
        generate(applied("llama"), IDS, **{**NEW, **options})


def test_settings_of_the_generation_config_that_it_does_not_do_are_named(applied):
    model = applied("llama")
    model.generation_config.no_repeat_ngram_size = 3
    with pytest.raises(ValueError, match=r"no_repeat_ngram_size of the model's generation_config.* got 3"):
        generate(model, IDS, **NEW)
    generate(model, IDS, no_repeat_ngram_size=0, **NEW)


def test_an_unknown_argument_is_named(applied):
    with pytest.raises(TypeError, match="expected an argument that the docstring names, got max_tokens"):
        generate(applied("llama"), IDS, max_tokens=3)


def test_ids_of_another_form_are_named(applied):
    with pytest.raises(ValueError, match=r"input_ids: expected int64 \[B, S\], not empty, got torch.int64 \(7,\)"):
        generate(applied("llama"), IDS[0], **NEW)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids: expected a tensor, got list"),
        ({"attention_mask": [[1, 1]]}, TypeError, "attention_mask: expected a tensor, got list"),
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens: expected an integer, got float"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected a positive integer, got 0"),
        ({"eos_token_id": "</s>"}, TypeError, "eos_token_id: expected an integer, got str"),
        ({"pad_token_id": "<pad>"}, TypeError, "pad_token_id: expected an integer, got str"),
        ({"seed": 0.5}, TypeError, "seed: expected an integer, got float"),
        ({"seed": 2**63}, ValueError, "seed: expected an integer of 64 bits, got one of 64"),
        ({"past_key_values": DynamicCache()}, TypeError, "past_key_values: expected a KestrelCache, got DynamicCache"),
    ],
)
def test_arguments_of_another_type_are_named(applied, options, error, message):
    with pytest.raises(error, match=f"generate: {message}"):
        generate(applied("llama"), **{"input_ids": IDS, "do_sample": True, **NEW, **options})


@pytest.mark.parametrize("of", [np.int64, torch.tensor, lambda value: torch.tensor([value])])
def test_integers_may_be_of_any_type(applied, of):
    model = applied("llama")
    options = {"do_sample": True, "max_new_tokens": 6}
    tokens = generate(model, IDS, seed=3, eos_token_id=[], **options)
    eos = int(tokens[0, -3])
    found = generate(model, IDS[:1], seed=of(3), eos_token_id=of(eos), **{**options, "max_new_tokens": of(6)})
    assert found[0].tolist() == tokens[0, : len(found[0])].tolist()
    assert found[0, -1] == eos


def test_an_unchanged_model_is_refused(tiny_transformer):
    model = tiny_transformer("llama")
    with pytest.raises(ValueError, match="expected one after apply"):
        generate(model, IDS, **NEW)
    integration.apply(model, attention=False)
    with pytest.raises(ValueError, match="expected one after apply"):
        generate(model, IDS, **NEW)


def test_too_small_a_cache_is_refused(applied):
    model = applied("llama")
    cache = KestrelCache(model.config, max_tokens=17)
    with pytest.raises(ValueError, match="past_key_values: expected fewer than 7 tokens and room for 18, got 0 and 17"):
        generate(model, IDS, past_key_values=cache, **NEW)
