"""4-bit weights in models of transformers: quantised while loading, from GPTQ and AWQ checkpoints, under `apply`."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from logit_bounds import ROUNDING

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import W4Config, generate, load_w4, quantize, w4
from kestrel_quant import pack_w4

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GROUP = 32
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"]
IDS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def make(tiny_transformer):
    return lambda family="llama", **changes: tiny_transformer(family, **{**SIZES, **changes})


def rounded(model, *, head=False, **options):
    """A copy whose linear layers hold the values of their 4-bit codes."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) is torch.nn.Linear and (head or module is not twin.lm_head):
            module.weight.data = pack_w4(module.weight.data, GROUP, **options).dequantize()
    return twin


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_gives_the_logits_of_its_codes_with_and_without_apply(make, family, symmetric):
    model = make(family)
    expected = logits(rounded(model, symmetric=symmetric))
    names = quantize(model, group_size=GROUP, symmetric=symmetric)
    assert names
    assert not any("lm_head" in name for name in names)
    torch.testing.assert_close(logits(model), expected, **ROUNDING)
    assert integration.apply(model).left == []
    torch.testing.assert_close(logits(model), expected, **ROUNDING)
    integration.restore(model)
    torch.testing.assert_close(logits(model), expected, **ROUNDING)
    storages = [x.untyped_storage().nbytes() == x.nbytes for name, x in model.named_buffers() if "codes" in name]
    assert all(storages)


def test_the_head_can_have_4_bits_too(make, tmp_path):
    model = make(tie_word_embeddings=False)
    expected = logits(rounded(model, head=True))
    model.save_pretrained(tmp_path)
    config = W4Config(group_size=GROUP, head=True)
    loaded = load_w4(tmp_path, config=config, dtype=torch.float32, attn_implementation="eager")
    assert "lm_head" in quantize(model, group_size=GROUP, head=True)
    for each in (model, loaded):
        assert isinstance(each.lm_head, w4.W4Linear)
        torch.testing.assert_close(logits(each), expected, **ROUNDING)
        integration.apply(each)
        torch.testing.assert_close(logits(each), expected, **ROUNDING)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": []}
    own = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert torch.equal(generate(model, IDS, **options), own)


def test_a_head_that_is_the_embedding_keeps_its_weight(make):
    with pytest.raises(ValueError, match="head: expected a head of its own"):
        quantize(make(tie_word_embeddings=True), group_size=GROUP, head=True)


def test_a_gptq_checkpoint_says_whether_its_head_has_4_bits():
    assert not W4Config.of_checkpoint({"quant_method": "gptq", "bits": 4}).head
    assert W4Config.of_checkpoint({"quant_method": "gptq", "bits": 4, "lm_head": True}).head


def test_experts_and_what_has_no_whole_groups_stay(make):
    model = make("qwen3_moe", moe_intermediate_size=32)
    names = quantize(model, group_size=GROUP, modules_to_not_convert=["layers.0.self_attn.k_proj"])
    assert {name.rsplit(".", 1)[1] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "model.layers.0.self_attn.k_proj" not in names
    assert "model.layers.1.self_attn.k_proj" in names
    with pytest.raises(ValueError, match="quantize: model: expected linear layers with groups of 34 columns, got none"):
        quantize(make(), group_size=34)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_checkpoint_is_quantised_while_it_is_loaded(make, tmp_path, family):
    model = make(family)
    model.save_pretrained(tmp_path)
    expected = rounded(model)
    loaded = load_w4(tmp_path, config=W4Config(GROUP), dtype=torch.float32, attn_implementation="eager")
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, w4.W4Linear)
    assert "model.layers.0.self_attn.q_proj.weight" not in loaded.state_dict()
    torch.testing.assert_close(logits(loaded), logits(expected), **ROUNDING)
    again = type(model).from_pretrained(tmp_path, quantization_config=W4Config(GROUP), dtype=torch.float32)
    torch.testing.assert_close(logits(again), logits(expected), **ROUNDING)
    with pytest.raises(ValueError, match="not serializable"):
        loaded.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gptq", {}),
        ("gptq", {"checkpoint_format": "gptq_v2"}),
        ("gptq", {"order": "activations"}),
        ("awq", {"zero_point": True, "version": "gemm"}),
    ],
    ids=["gptq", "gptq_v2", "activation order", "awq"],
)
def test_a_4_bit_checkpoint_gives_the_logits_of_its_values(make, w4_checkpoint, tmp_path, family, method, options):
    model = make(family)
    w4_checkpoint(model, tmp_path, method, **options)
    loaded = load_w4(tmp_path, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logits(loaded), logits(model), **ROUNDING)
    assert integration.apply(loaded).left == []
    torch.testing.assert_close(logits(loaded), logits(model), **ROUNDING)
    names = {name.rsplit(".", 1)[1] for name in loaded.state_dict()}
    assert not names & {"qweight", "qzeros", "g_idx"}


def test_generate_draws_the_tokens_of_the_models_own(make):
    model = make("qwen3")
    quantize(model, group_size=GROUP)
    own = model.generate(IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=8)
    integration.apply(model)
    assert torch.equal(generate(model, IDS, max_new_tokens=8, eos_token_id=[]), own)


def test_layers_follow_the_model_to_another_dtype(make):
    model = make("llama")
    quantize(model, group_size=GROUP)
    integration.apply(model)
    model.bfloat16()
    found = logits(model)
    assert found.dtype == torch.bfloat16
    integration.restore(model)
    own = logits(model).float()
    assert (found.float() - own).norm() < 16 * 2**-9 * own.norm()  # roundings to bf16 in two layers


def test_a_layer_that_is_watched_later_is_heeded(make):
    model = make("llama")
    quantize(model, group_size=GROUP)
    integration.apply(model)
    before, seen = logits(model), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *of: seen.append(of))
    torch.testing.assert_close(logits(model), before, **ROUNDING)
    assert len(seen) == 1


def test_a_module_with_both_kinds_of_layers_is_left_and_named(make):
    model = make("llama")
    quantize(model, group_size=GROUP, modules_to_not_convert=["layers.0.self_attn.v_proj", "layers.1.mlp.gate_proj"])
    expected = logits(model)
    report = integration.apply(model)
    assert report.left == ["1 LlamaAttention (not plain W4Linear)", "1 LlamaMLP (not plain torch.nn.Linear)"]
    torch.testing.assert_close(logits(model), expected, **ROUNDING)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method of the checkpoint: expected gptq or awq, got 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 8}, "bits of the checkpoint: expected 4, got 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version of the AWQ checkpoint: expected gemm, got"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint: expected one of .*'marlin'"),
    ],
)
def test_other_checkpoints_are_refused(make, tmp_path, found, message):
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": found}))
    with pytest.raises(ValueError, match=message):
        load_w4(tmp_path)


def test_a_checkpoint_without_some_weights_is_refused(make, w4_checkpoint, tmp_path):
    model = make()
    w4_checkpoint(model, tmp_path, "gptq", modules_to_not_convert=["k_proj"])
    loaded = json.loads((tmp_path / "config.json").read_text())
    del loaded["quantization_config"]["modules_to_not_convert"]
    model.save_pretrained(tmp_path)  # weights in full
    (tmp_path / "config.json").write_text(json.dumps(loaded))
    with pytest.raises(ValueError, match=r"q_proj: expected 4-bit weights in every linear layer .* \(qweight, qzeros"):
        load_w4(tmp_path)


def test_a_4_bit_checkpoint_with_routed_experts_is_refused(make, tmp_path):
    model = make("qwen3_moe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    found = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": found}))
    with pytest.raises(ValueError, match="load_w4: expected a model of linear layers alone, got one with routed exp"):
        load_w4(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 3}, "W4Config: group_size: expected -1 or an even number of columns, got 3"),
        ({"checkpoint": "exl2"}, "W4Config: checkpoint: expected one of .*, got 'exl2'"),
        ({"quant_method": "awq"}, "W4Config: quant_method: expected 'kestrel_w4', got 'awq'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        W4Config(**options)


def test_only_an_unchanged_model_is_quantised(make):
    model = make()
    integration.apply(model)
    with pytest.raises(ValueError, match=r"quantize: model: expected one before apply\(model\)"):
        quantize(model, group_size=GROUP)
    with pytest.raises(TypeError, match="quantize: model: expected a transformers model, got Linear"):
        quantize(torch.nn.Linear(2, 2))
