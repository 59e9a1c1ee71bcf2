"""A decode step of one sequence in six launches a layer: the tokens and logits of the other paths, and its launches."""

from __future__ import annotations

import collections
import copy

import pytest
import torch

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, generate, modules, one_token
from kestrel_kernels.integrations.transformers.generation import Decoding
from kestrel_runtime import trace

IDS = torch.tensor([[5, 9, 33, 2, 17, 40, 8]])
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
DENSE = ["llama", "qwen2", "qwen3", "mistral", "phi3"]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
SIX = {
    "kestrel_moe.rms_norm_gemv": 2,
    "kestrel_kvcache.rotary_and_cache": 1,
    "kestrel_attention.flash_attn_with_kvcache": 1,
    "kestrel_moe.fused_linear_residual": 2,
}
SIX_W4 = {
    "kestrel_quant.w4a16_token": 4,
    "kestrel_kvcache.rotary_and_cache": 1,
    "kestrel_attention.flash_attn_with_kvcache": 1,
}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Steps of one token take the path that they take on a GPU."""
    monkeypatch.setattr(one_token, "is_one_token", lambda x: x.numel() == x.shape[-1])


def made(tiny_transformer, family, *, w4=False, **changes):
    model = tiny_transformer(family, **{**SIZES, **changes})
    if w4:
        integration.quantize(model)
    integration.apply(model)
    return model


def step_logits(model, kv_cache="auto"):
    """Logits of a prompt's last token and of three more, fed one by one."""
    cache, found = KestrelCache(model.config, kv_cache=kv_cache, max_tokens=20), []
    with torch.no_grad(), modules.in_place():
        for ids in (IDS, *torch.tensor([[[3]], [[60]], [[21]]])):
            found.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1])
    return torch.cat(found)


@pytest.mark.parametrize("w4", [False, True], ids=["float32", "4 bits"])
@pytest.mark.parametrize("family", DENSE)
def test_logits_stay(tiny_transformer, family, w4, monkeypatch):
    model = made(tiny_transformer, family, w4=w4)
    expected = step_logits(model)
    monkeypatch.setattr(one_token, "is_one_token", lambda x: x.numel() == x.shape[-1])
    found = step_logits(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    assert torch.equal(found[0], expected[0])  # the prompt


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True, "mlp_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}]
)
@pytest.mark.parametrize("w4", [False, True], ids=["float32", "4 bits"])
def test_biases_and_activations(tiny_transformer, changes, w4, monkeypatch):
    model = made(tiny_transformer, "llama", w4=w4, **changes)
    expected = step_logits(model)
    monkeypatch.setattr(one_token, "is_one_token", lambda x: x.numel() == x.shape[-1])
    torch.testing.assert_close(step_logits(model), expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(step_logits(copy.deepcopy(model)), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", DENSE)
def test_greedy_tokens_stay(tiny_transformer, family, on_the_cpu):
    model = made(tiny_transformer, family)
    found = generate(model, IDS, **OPTIONS)
    integration.restore(model)
    assert torch.equal(found, model.generate(IDS, attention_mask=torch.ones_like(IDS), **OPTIONS))


def launches(model):
    """Kernel ops of one step, a layer."""
    cache = KestrelCache(model.config, max_tokens=40)
    generate(model, IDS, past_key_values=cache, **OPTIONS)
    decoding = cache.decoding[1]
    assert isinstance(decoding, Decoding)
    with trace() as counts, torch.no_grad():
        decoding._step()
    found = collections.Counter({op: sum(each.values()) for op, each in counts.items()})
    return {op: n / 2 for op, n in found.items() if n > 1}  # two layers; the last norm and the sampler are one each


@pytest.mark.parametrize(("w4", "expected"), [(False, SIX), (True, SIX_W4)], ids=["float32", "4 bits"])
@pytest.mark.parametrize("family", DENSE)
def test_a_layer_is_six_launches(tiny_transformer, family, w4, expected, on_the_cpu):
    assert launches(made(tiny_transformer, family, w4=w4)) == expected


def test_norms_of_heads_are_part_of_the_rotation(tiny_transformer):
    model = made(tiny_transformer, "qwen3_moe", num_key_value_heads=2)
    assert launches(model)["kestrel_norm.fused_add_rms_norm"] == 2
    assert "kestrel_norm.rms_norm" not in launches(model)


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
def test_layers_with_hooks_or_wrappers_take_the_other_path(tiny_transformer, spoil, on_the_cpu):
    model = made(tiny_transformer, "llama")
    expected = step_logits(model)
    for layer in model.model.layers:
        spoil(layer)
    assert "kestrel_moe.fused_linear_residual" not in launches(model)
    torch.testing.assert_close(step_logits(model), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
def test_caches_that_do_not_rotate_take_the_other_path(tiny_transformer, kv_cache, monkeypatch):
    model = made(tiny_transformer, "llama", head_dim=64)
    expected = step_logits(model, kv_cache)
    monkeypatch.setattr(one_token, "is_one_token", lambda x: x.numel() == x.shape[-1])
    assert torch.equal(step_logits(model, kv_cache), expected)
