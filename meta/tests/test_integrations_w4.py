"""4-bit weights in models of transformers: quantised while loading, from 4-bit checkpoints, under `apply`."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from logit_bounds import ROUNDING
from safetensors.torch import save_file

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


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "actorder": None}
SCHEME = {"weights": WEIGHTS, "targets": ["Linear"], "input_activations": None, "output_activations": None}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def found_compressed(*, ignore=("lm_head",), weights=None, scheme=None, **changes):
    """A quantization_config as llm-compressor writes it."""
    group = {**SCHEME, "weights": {**WEIGHTS, "dynamic": False, "observer": "minmax", **(weights or {})}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {**group, **(scheme or {})}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "moe_sparsity_config": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        **changes,
    }


def words(values):
    """Values -8..7 plus 8, eight of the last dimension in an int32, lowest nibble first; 0 completes the last."""
    filled = torch.nn.functional.pad(values.long() + 8, (0, -values.shape[-1] % 8)).unflatten(-1, (-1, 8))
    packed = sum(filled[..., i] << (4 * i) for i in range(8))
    return (packed - (packed >= 2**31) * 2**32).int()


def write_compressed(model, folder, found, left=("lm_head",)):
    """Write the model with random 4-bit weights in the layers not in `left`, and put their values into it."""
    options, random = found["config_groups"]["group_0"]["weights"], torch.Generator().manual_seed(5)
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    for name, linear in model.named_modules():
        if type(linear) is not torch.nn.Linear or name in left:
            continue
        rows, columns = linear.weight.shape
        groups = torch.arange(columns) // (options["group_size"] or columns)
        shape = (rows, int(groups[-1]) + 1)
        codes = torch.randint(-8, 8, (rows, columns), generator=random)
        zeros, scales = torch.randint(-8, 8, shape, generator=random), torch.rand(shape, generator=random) / 16
        if options["symmetric"]:
            zeros = torch.zeros_like(zeros)
        else:
            tensors[f"{name}.weight_zero_point"] = words(zeros.t()).t().contiguous()
        if options["actorder"] == "group":
            order = torch.Generator().manual_seed(columns)  # that of the input, which layers share
            groups = groups[torch.randperm(columns, generator=order)]
            tensors[f"{name}.weight_g_idx"] = groups.int()
        linear.weight.data = (codes - zeros[:, groups]) * scales[:, groups]
        tensors |= {f"{name}.weight_packed": words(codes), f"{name}.weight_scale": scales}
        tensors[f"{name}.weight_shape"] = torch.tensor([rows, columns])
        del tensors[f"{name}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": found}))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "weights",
    [{}, {"actorder": "group"}, {"actorder": "weight"}, {"strategy": "channel", "group_size": None}],
    ids=["group", "activation order", "static order", "channel"],
)
def test_a_compressed_tensors_checkpoint_gives_the_logits_of_its_values(make, tmp_path, family, symmetric, weights):
    model = make(family)
    write_compressed(model, tmp_path, found_compressed(weights={"symmetric": symmetric, **weights}))
    loaded = load_w4(tmp_path, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logits(loaded), logits(model), **ROUNDING)
    assert {name.rsplit(".", 1)[1] for name, x in loaded.named_modules() if w4.is_w4(x)} == set(LAYERS)
    assert integration.apply(loaded).left == []
    torch.testing.assert_close(logits(loaded), logits(model), **ROUNDING)
    assert not any(".weight_" in name for name in loaded.state_dict())


def test_layers_that_compressed_tensors_ignores_are_left_alone(make, tmp_path):
    """Names are whole ones; patterns match from the start. The head is a linear layer like others."""
    model = make(tie_word_embeddings=False, intermediate_size=100, vocab_size=67)  # rows and columns in no whole words
    weights = {"symmetric": False, "strategy": "channel", "group_size": None}
    names = [
        "model.layers.0.self_attn.k_proj",
        "re:.*layers\\.1\\.ml",
        "self_attn.v_proj",
        "model.layers.0.mlp",
        "re:q_proj",
    ]
    left = {"model.layers.0.self_attn.k_proj", *(f"model.layers.1.mlp.{name}" for name in LAYERS[4:])}
    write_compressed(model, tmp_path, found_compressed(ignore=names, weights=weights), left)
    loaded = load_w4(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert {name for name, x in loaded.named_modules() if type(x) is torch.nn.Linear} == left
    assert w4.is_w4(loaded.lm_head)
    for name in left:
        assert torch.equal(loaded.get_parameter(f"{name}.weight"), model.get_parameter(f"{name}.weight"))
    torch.testing.assert_close(logits(loaded), logits(model), **ROUNDING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int-quantized"}, "format of the checkpoint: expected 'pack-quantized', got 'int-quantized'"),
        ({"scheme": {"format": "marlin-24"}}, "config_groups.group_0.format of the checkpoint: expected None or 'pack"),
        ({"weights": {"num_bits": 8}}, "group_0.weights.num_bits of the checkpoint: expected 4, got 8"),
        ({"weights": {"type": "float"}}, "group_0.weights.type of the checkpoint: expected 'int', got 'float'"),
        (
            {"weights": {"strategy": "tensor"}},
            "group_0.weights.strategy of the checkpoint: expected 'group' or 'channel'",
        ),
        ({"weights": {"dynamic": True}}, "group_0.weights.dynamic of the checkpoint: expected False, got True"),
        ({"weights": {"actorder": "other"}}, "group_0.weights.actorder of the checkpoint: expected 'group' or"),
        ({"weights": {"group_size": None}}, "group_size: expected -1 or an even number of columns, got None"),
        ({"weights": {"group_size": 48}}, "layers.0.self_attn.q_proj: expected whole groups of 48 columns, got 64"),
        (
            {"scheme": {"input_activations": {"num_bits": 8}}},
            "group_0.input_activations of the checkpoint: expected None",
        ),
        ({"scheme": {"targets": ["re:.*q_proj"]}}, "group_0.targets of the checkpoint: expected ['Linear'], got ['re:"),
        (
            {"config_groups": {"W4A16": ["Linear"]}},
            "config_groups.W4A16 of the checkpoint: expected a scheme of weights",
        ),
        ({"config_groups": {"a": SCHEME, "b": SCHEME}}, "number of config_groups of the checkpoint: expected 1, got 2"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme of the checkpoint: expected None, got {'num_bits': 8}"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format of the checkpoint: expected 'dense'",
        ),
        ({"transform_config": {"config_groups": {}}}, "transform_config of the checkpoint: expected None, got"),
        ({"ignore": ["re:("]}, "ignore of the checkpoint: expected patterns, got 're:('"),
        ({"ignore": ["lm_head", "re:.*z_proj"]}, "q_proj: expected 4-bit weights in every linear layer"),
    ],
)
def test_what_compressed_tensors_has_besides_is_refused_by_name(make, tmp_path, changes, message):
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": found_compressed(**changes)}))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_w4(tmp_path)
    assert "\n" not in str(error.value)


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
        (
            {"quant_method": "bitsandbytes"},
            "quant_method of the checkpoint: expected gptq, awq or .* got 'bitsandbytes'",
        ),
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
