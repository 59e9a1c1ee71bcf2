"""Models after `apply`, used as people use models of transformers: copied, compiled, saved, misused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from logit_bounds import ROUNDING
from torch import nn
from transformers import AttentionInterface, CompileConfig, LlamaForCausalLM, StaticCache

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, generate, modules, patch

IDS = torch.tensor([[5, 9, 33, 2, 17, 40, 8, 1], [3, 3, 60, 21, 4, 11, 50, 6]])
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
GREEDY = {"do_sample": False, "max_new_tokens": 6}


@torch.no_grad()
def logits(model, **options):
    return model(IDS, **options).logits


# -- copies and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "phi3"])
def test_a_pickled_model_is_changed_and_restored_by_itself(tiny_transformer, monkeypatch, family):
    model = tiny_transformer(family)
    before = logits(model)
    integration.apply(model)
    stored = pickle.dumps(model)
    monkeypatch.delitem(AttentionInterface._global_mapping, "kestrel")  # as in a process that loads it
    twin = pickle.loads(stored)
    torch.testing.assert_close(logits(twin), before, **ROUNDING)
    integration.restore(twin)
    assert not any("forward" in module.__dict__ for module in twin.modules())
    assert torch.equal(logits(twin), before)


def test_a_copy_holds_its_weights_once(applied):
    twin = copy.deepcopy(applied("qwen2"))
    attention = twin.model.layers[0].self_attn
    assert attention.forward.qkv.weight is None
    logits(twin)
    assert attention.forward.qkv.weight.data_ptr() == attention.q_proj.weight.data_ptr()


# -- torch.compile and static caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_changed_model_compiles_into_one_graph(applied, family):
    model = applied(family, num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, expected = (logits(each, attention_mask=MASK)[MASK.bool()] for each in (compiled, model))
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize(
    ("family", "compiles"), [("llama", False), ("mistral", False), ("gemma2", False), ("llama", True)]
)
def test_a_static_cache_of_transformers_gives_its_tokens(tiny_transformer, family, compiles):
    model = tiny_transformer(family)
    whole, padded = (model.generate(IDS, attention_mask=mask, **GREEDY) for mask in (torch.ones_like(IDS), MASK))
    integration.apply(model)
    torch._dynamo.reset()
    options = {**GREEDY, "cache_implementation": "static"}
    if compiles:
        options["compile_config"] = CompileConfig(backend="eager", mode=None)
        options["compile_config"]._compile_all_devices = True
    assert torch.equal(model.generate(IDS, attention_mask=torch.ones_like(IDS), **options), whole)
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **options), padded)
    assert hasattr(model, "_compiled_call") == compiles


def test_a_prompt_into_a_static_cache_keeps_its_logits(applied):
    model = applied()
    cache = StaticCache(config=model.config, max_cache_len=20)
    found = logits(model, attention_mask=MASK, past_key_values=cache)
    torch.testing.assert_close(found[MASK.bool()], logits(model, attention_mask=MASK)[MASK.bool()], **ROUNDING)


# -- dtypes, weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2"])
def test_a_dtype_without_ops_runs_the_models_own_modules(tiny_transformer, family):
    model = tiny_transformer(family).double()
    if family == "mixtral":
        model.set_experts_implementation("eager")  # transformers' others do not take float64 either
    before = logits(model)
    integration.apply(model)
    torch.testing.assert_close(logits(model), before, **ROUNDING)  # its norms compute in float32
    assert not logits(model, attention_mask=MASK).isnan().any()
    with pytest.raises(ValueError, match=r"KestrelCache: keys: expected bfloat16, .*, got torch.float64"):
        generate(model, IDS, max_new_tokens=2)


def test_a_replaced_bias_is_heeded(applied):
    model = applied("qwen2")
    logits(model)
    linear = model.model.layers[0].self_attn.k_proj
    linear.bias = nn.Parameter(linear.bias.data + torch.linspace(-2, 2, len(linear.bias)))
    found = logits(model)
    integration.restore(model)
    torch.testing.assert_close(found, logits(model), **ROUNDING)


def test_4_bit_scales_that_are_loaded_later_are_heeded(tiny_transformer):
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    model, other = tiny_transformer("qwen2", **sizes), tiny_transformer("qwen2", seed=1, **sizes)
    for each in (model, other):
        integration.quantize(each)
    integration.apply(model)
    logits(model)
    held = model.model.layers[0].mlp.forward.gate_up.weight.scales.data_ptr()
    model.load_state_dict(other.state_dict())
    found = logits(model)
    assert model.model.layers[0].mlp.forward.gate_up.weight.scales.data_ptr() == held  # as a CUDA graph knows it
    torch.testing.assert_close(found, logits(other), **ROUNDING)


# -- apply and restore ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["Attention", "Router", "_set_function"])
def test_a_failure_halfway_leaves_the_model_as_it_was(tiny_transformer, monkeypatch, failing):
    model = tiny_transformer("qwen3_moe")
    before, values = {name: dict(m.__dict__) for name, m in model.named_modules()}, logits(model)
    real, calls = getattr(patch, failing), []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no room")
        return real(*args, **options)

    monkeypatch.setattr(patch, failing, fails)
    with pytest.raises(MemoryError):
        integration.apply(model)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert model.config._attn_implementation == "eager"
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert torch.equal(logits(model), values)


def test_projections_without_memory_for_their_fusion_stay(tiny_transformer, monkeypatch):
    model = tiny_transformer("qwen2")
    linears = [model.model.layers[0].self_attn.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]
    places = [p.data_ptr() for linear in linears for p in linear.parameters()]
    real, calls = torch.cat, []

    def fails(tensors, *args):
        calls.append(tensors)
        if len(calls) == 2:  # the biases
            raise torch.OutOfMemoryError("no room")
        return real(tensors, *args)

    monkeypatch.setattr(torch, "cat", fails)
    with pytest.raises(torch.OutOfMemoryError):
        modules.Fused(model.model.layers[0].self_attn, ["q_proj", "k_proj", "v_proj"])
    assert [p.data_ptr() for linear in linears for p in linear.parameters()] == places


def test_restore_keeps_what_was_chosen_since(applied):
    model = applied("qwen3_moe")
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("batched_mm")
    integration.restore(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("sdpa", "batched_mm")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in, first out", "last in, first out"])
def test_two_models_of_one_config_leave_no_trace_of_each_other(tiny_transformer, order):
    first = tiny_transformer("llama")
    models = [first, LlamaForCausalLM(first.config).eval()]
    for model in models:
        integration.apply(model)
    for index in order:
        integration.restore(models[index])
    assert first.config._attn_implementation == "eager"


def test_another_attention_implementation_is_refused_before_anything_runs(applied):
    model = applied()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="expected one after apply.*another attention implementation since"):
        generate(model, IDS, **GREEDY)


# -- what a model is asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_attention_weights_are_those_of_eager(tiny_transformer, family):
    model = tiny_transformer(family)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK, output_attentions=True)
        integration.apply(model)
        found = model(IDS, attention_mask=MASK, output_attentions=True)
    assert len(found.attentions) == 2
    keep = MASK.bool()
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2)[keep], theirs.transpose(1, 2)[keep], **ROUNDING)
    torch.testing.assert_close(found.logits[keep], expected.logits[keep], **ROUNDING)


def test_a_config_that_asks_for_attention_weights_gets_them(tiny_transformer):
    model = tiny_transformer("llama", output_attentions=True)
    integration.apply(model)
    with torch.no_grad():
        assert len(model(IDS).attentions) == 2


def test_positions_with_gaps_keep_their_logits(tiny_transformer):
    model = tiny_transformer("llama")
    positions = torch.tensor([[0, 1, 2, 3, 10, 11, 12, 20]]).expand(2, -1)
    for options in ({}, {"attention_mask": torch.ones_like(IDS)}, {"use_cache": False}):  # the last: packed sequences
        before = logits(model, position_ids=positions, **options)
        integration.apply(model)
        torch.testing.assert_close(logits(model, position_ids=positions, **options), before, **ROUNDING)
        integration.restore(model)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_embeddings_instead_of_ids_give_the_tokens_of_the_dynamic_cache(applied, family):
    model = applied(family)
    embeddings = model.get_input_embeddings()(IDS).detach()
    expected = model.generate(inputs_embeds=embeddings, attention_mask=MASK, **GREEDY)
    cache = KestrelCache(model.config, max_tokens=20)
    found = model.generate(inputs_embeds=embeddings, attention_mask=MASK, past_key_values=cache, **GREEDY)
    assert torch.equal(found, expected)


def test_dropout_in_training_is_refused(applied):
    model = applied(attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"kestrel attention: dropout: expected 0 .*, got 0.1"):
        model(IDS)


# -- generate ------------------------------------------------------------------------------------------------------


def test_top_k_is_that_of_transformers_where_nobody_gives_one(applied):
    model = applied(vocab_size=200)
    options = {"do_sample": True, "temperature": 50.0, "max_new_tokens": 1}
    ids = IDS[:1].expand(400, -1)
    torch.manual_seed(0)
    theirs, ours = (set(of[:, -1].tolist()) for of in (model.generate(ids, **options), generate(model, ids, **options)))
    assert len(theirs) == len(ours) == 50
    assert ours == theirs
    assert len(set(generate(model, ids, top_k=0, **options)[:, -1].tolist())) > 50


def test_negative_padding_is_named_where_rows_may_end_early(applied):
    model = applied()
    eos = int(generate(model, IDS, **GREEDY)[0, 9])
    with pytest.raises(ValueError, match="pad_token_id: expected a token for rows that end early, got -1"):
        generate(model, IDS, eos_token_id=eos, pad_token_id=-1, **GREEDY)
    assert generate(model, IDS[:1], eos_token_id=eos, pad_token_id=-1, **GREEDY).shape[1] == 10


def test_a_model_without_a_head_is_named(applied):
    base = applied().model
    integration.apply(base)
    with pytest.raises(ValueError, match="generate: model: expected a model with a language head, got LlamaModel"):
        generate(base, IDS, **GREEDY)


@pytest.mark.parametrize(
    ("name", "value"),
    [("return_dict_in_generate", True), ("token_healing", True), ("dola_layers", "high")],
)
def test_results_of_another_form_are_refused(applied, name, value):
    model = applied()
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"{name} of the model's generation_config"):
        generate(model, IDS, **GREEDY)


def test_no_sequences_are_refused(applied):
    with pytest.raises(ValueError, match=r"input_ids: expected int64 \[B, S\], not empty, got torch.int64 \(0, 8\)"):
        generate(applied(), IDS[:0], **GREEDY)


# -- caches that were misused --------------------------------------------------------------------------------------


def test_a_cache_serves_calls_with_and_without_inference_mode(applied):
    model = applied()
    expected = generate(model, IDS, max_new_tokens=9, repetition_penalty=1.3)
    cache = KestrelCache(model.config, max_tokens=30)
    with torch.inference_mode():
        first = generate(model, IDS, max_new_tokens=4, repetition_penalty=1.3, past_key_values=cache)
    found = generate(model, first.clone(), max_new_tokens=5, repetition_penalty=1.3, past_key_values=cache)
    assert torch.equal(found, expected)


def test_gradients_are_refused_before_anything_is_stored(applied):
    model = applied()
    cache = KestrelCache(model.config, max_tokens=30)
    with pytest.raises(ValueError, match=r"KestrelCache: keys: expected torch.no_grad\(\)"):
        model(IDS, past_key_values=cache)
    torch.testing.assert_close(logits(model, past_key_values=cache), logits(model), **ROUNDING)


def test_a_refused_call_leaves_the_cache_usable(applied):
    model = applied()
    cache = KestrelCache(model.config, max_tokens=30)
    for options in ({"attention_mask": torch.zeros(2, 1, 8, 8)}, {"output_attentions": True}):
        with pytest.raises(ValueError, match="kestrel attention: .* with a KestrelCache"):
            logits(model, past_key_values=cache, **options)
    torch.testing.assert_close(logits(model, past_key_values=cache), logits(model), **ROUNDING)


def test_attention_weights_of_a_later_token_are_refused_too(applied):
    model = applied()
    cache = KestrelCache(model.config, max_tokens=30)
    logits(model, past_key_values=cache)
    with pytest.raises(ValueError, match="output_attentions: expected False with a KestrelCache"), torch.no_grad():
        model(IDS[:, :1], past_key_values=cache, output_attentions=True)


def test_a_pass_that_failed_in_a_later_layer_is_named(applied):
    model = applied()
    cache = KestrelCache(model.config, max_tokens=30)
    failing = model.model.layers[1].mlp.register_forward_pre_hook(lambda *of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, past_key_values=cache)
    failing.remove()
    logits(model, past_key_values=KestrelCache(model.config, max_tokens=30))
    failing = model.model.layers[0].mlp.register_forward_pre_hook(lambda *of: 1 / 0)
    cache.reset()
    with pytest.raises(ZeroDivisionError):
        logits(model, past_key_values=cache)
    failing.remove()
    with pytest.raises(RuntimeError, match=r"one that failed before layer 1 had its tokens \(reset\(\) starts anew\)"):
        logits(model, past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(logits(model, past_key_values=cache), logits(model), **ROUNDING)
