"""Decode steps of few tokens, whose products take the norm, the gate and the residual: logits, tokens and launches."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from logit_bounds import ROUNDING

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, few_tokens, generate, modules
from kestrel_quant import w4a16_token_covers
from kestrel_runtime import trace

PROMPT = [5, 9, 33, 2, 17, 40, 8]
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
DENSE = ["llama", "qwen2", "qwen3", "mistral", "phi3"]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
WEIGHTS = pytest.mark.parametrize(("w4", "batch"), [(False, 5), (True, 1)], ids=["float32 5", "4 bits 1"])
ATTENTION = {"kestrel_kvcache.rotary_and_cache": 1, "kestrel_attention.flash_attn_with_kvcache": 1}
SEVEN = ATTENTION | {
    "kestrel_norm.rms_norm_linear": 2,
    "kestrel_moe.silu_and_mul": 1,
    "kestrel_moe.fused_linear_residual": 2,
}
SIX = ATTENTION | {"kestrel_quant.w4a16_token": 4}


def as_in_16_bits(monkeypatch):
    """Weights of 4 bits take the kernels that they take with activations of 16 bits."""

    def covers(w, **options):
        return w4a16_token_covers(replace(w, scales=w.scales.bfloat16()), **options)

    monkeypatch.setattr(few_tokens, "w4a16_token_covers", covers)


def as_on_a_gpu(monkeypatch):
    """Steps take the path that they take on a GPU in 16 bits."""
    as_in_16_bits(monkeypatch)
    monkeypatch.setattr(few_tokens, "serves", lambda x: x.shape[1] == 1)


@pytest.fixture
def on_the_cpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


def prompts(batch):
    return torch.tensor(PROMPT) + torch.arange(batch)[:, None]


def made(tiny_transformer, family, *, w4=False, **changes):
    model = tiny_transformer(family, **{**SIZES, **changes})
    if w4:
        integration.quantize(model)
    integration.apply(model)
    return model


def step_logits(model, batch, kv_cache="auto"):
    """Logits of a prompt's last token and of three more, fed one by one."""
    cache, found = KestrelCache(model.config, kv_cache=kv_cache, max_tokens=20), []
    with torch.no_grad(), modules.in_place():
        for ids in (prompts(batch), *torch.tensor([3, 60, 21]).view(3, 1, 1).expand(3, batch, 1)):
            found.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1])
    return torch.cat(found)


@WEIGHTS
@pytest.mark.parametrize("family", DENSE)
def test_logits_stay(tiny_transformer, family, w4, batch, monkeypatch):
    model = made(tiny_transformer, family, w4=w4)
    expected = step_logits(model, batch)
    as_on_a_gpu(monkeypatch)
    found = step_logits(model, batch)
    torch.testing.assert_close(found, expected, **ROUNDING)
    assert torch.equal(found[:batch], expected[:batch])  # the prompt


@WEIGHTS
@pytest.mark.parametrize(
    "changes", [{"attention_bias": True, "mlp_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}]
)
def test_biases_activations_and_copies(tiny_transformer, changes, w4, batch, monkeypatch):
    model = made(tiny_transformer, "llama", w4=w4, **changes)
    expected = step_logits(model, batch)
    as_on_a_gpu(monkeypatch)
    torch.testing.assert_close(step_logits(model, batch), expected, **ROUNDING)
    torch.testing.assert_close(step_logits(copy.deepcopy(model), batch), expected, **ROUNDING)


@WEIGHTS
@pytest.mark.parametrize("family", DENSE)
def test_greedy_tokens_stay(tiny_transformer, family, w4, batch, on_the_cpu):
    model, ids = made(tiny_transformer, family, w4=w4), prompts(batch)
    found = generate(model, ids, **OPTIONS)
    integration.restore(model)
    assert torch.equal(found, model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS))


def launches(model, batch):
    """Ops of one step for each of the two layers; ops of which there is one, such as the sampler, are left out."""
    cache = KestrelCache(model.config, max_tokens=40)
    generate(model, prompts(batch), past_key_values=cache, **OPTIONS)
    with trace() as counts, torch.no_grad():
        cache.decoding[1]._step()
    found = {op: sum(each.values()) for op, each in counts.items()}
    return {op: n / 2 for op, n in found.items() if n > 1}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "phi3"])
def test_a_layer_of_five_sequences_is_seven_launches(tiny_transformer, family, on_the_cpu):
    assert launches(made(tiny_transformer, family), 5) == SEVEN


@pytest.mark.parametrize("family", DENSE)
def test_a_layer_of_4_bits_and_one_sequence_is_six_launches(tiny_transformer, family, on_the_cpu):
    assert launches(made(tiny_transformer, family, w4=True), 1) == SIX


@pytest.mark.parametrize("w4", [False, True])
def test_the_head_of_one_token_is_a_kernel_of_few_tokens(tiny_transformer, w4, monkeypatch):
    model = tiny_transformer("llama", **SIZES)
    if w4:
        integration.quantize(model, head=True)
    integration.apply(model)
    assert model.lm_head.forward.module is model.lm_head
    x = torch.randn(5, 1, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.lm_head(x)
        as_in_16_bits(monkeypatch)
        monkeypatch.setattr(modules, "is_one_row", lambda x: x.numel() == x.shape[-1])
        with trace() as counts:
            found = torch.cat([model.lm_head(each[None]) for each in x])
            several = model.lm_head(x)
    op = "kestrel_quant.w4a16_token" if w4 else "kestrel_moe.gemv"
    assert sum(counts[op].values()) == 5
    assert torch.equal(several, expected)
    torch.testing.assert_close(found, expected, **ROUNDING)
    integration.restore(model)
    assert "forward" not in vars(model.lm_head)


def test_a_head_whose_weight_became_a_subclass_runs_as_its_class_does(tiny_transformer, monkeypatch):
    class Other(torch.Tensor):
        pass

    model = tiny_transformer("llama", **SIZES)
    integration.apply(model)
    weight = model.lm_head.weight.detach().as_subclass(Other)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    monkeypatch.setattr(modules, "is_one_row", lambda x: x.numel() == x.shape[-1])
    with torch.no_grad(), trace() as counts:
        model.lm_head(torch.ones(1, 1, 128))
    assert "kestrel_moe.gemv" not in counts


@pytest.mark.parametrize("w4", [False, True])
def test_a_head_of_one_token_compiles(tiny_transformer, w4, monkeypatch):
    model = tiny_transformer("llama", **SIZES)
    if w4:
        integration.quantize(model, head=True)
    integration.apply(model)
    monkeypatch.setattr(modules, "is_one_row", lambda x: x.numel() == x.shape[-1])
    ids = torch.tensor([[5]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize(("w4", "batch"), [(False, 1), (False, 3), (False, 17), (True, 2), (True, 5)])
def test_other_numbers_of_sequences_take_the_other_path(tiny_transformer, w4, batch, on_the_cpu):
    found = launches(made(tiny_transformer, "llama", w4=w4), batch)
    assert found["kestrel_norm.fused_add_rms_norm"] == 2
    assert not {"kestrel_moe.fused_linear_residual", "kestrel_quant.w4a16_token"} & set(found)


@pytest.mark.parametrize("batch", [1, 5])
def test_norms_of_heads_are_part_of_the_rotation(tiny_transformer, batch):
    found = launches(made(tiny_transformer, "qwen3_moe", num_key_value_heads=2), batch)
    assert found["kestrel_norm.fused_add_rms_norm"] == 2
    assert "kestrel_norm.rms_norm" not in found


@WEIGHTS
@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: layer.self_attn.o_proj.register_forward_hook(lambda *a: None),
        lambda layer: layer.mlp.register_forward_hook(lambda *a: None),
        lambda layer: layer.self_attn.register_forward_pre_hook(lambda *a: None),
        lambda layer: setattr(layer.self_attn, "o_proj", torch.nn.Sequential(layer.self_attn.o_proj)),
        lambda layer: setattr(layer.mlp, "gate_proj", torch.nn.Sequential(layer.mlp.gate_proj)),
    ],
    ids=["hook of o_proj", "hook of the MLP", "hook of attention", "wrapped o_proj", "wrapped gate_proj"],
)
def test_layers_with_hooks_or_wrappers_take_the_other_path(tiny_transformer, spoil, w4, batch, on_the_cpu):
    model = made(tiny_transformer, "llama", w4=w4)
    expected = step_logits(model, batch)
    for layer in model.model.layers:
        spoil(layer)
    assert not {"kestrel_moe.fused_linear_residual", "kestrel_quant.w4a16_token"} & set(launches(model, batch))
    torch.testing.assert_close(step_logits(model, batch), expected, **ROUNDING)


@WEIGHTS
@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
def test_caches_that_do_not_rotate_take_the_other_path(tiny_transformer, kv_cache, w4, batch, monkeypatch):
    model = made(tiny_transformer, "llama", w4=w4, head_dim=64)
    expected = step_logits(model, batch, kv_cache)
    as_on_a_gpu(monkeypatch)
    assert torch.equal(step_logits(model, batch, kv_cache), expected)
