"""`apply` on every model family of transformers it knows: the logits stay, and `restore` leaves no trace."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from logit_bounds import ROUNDING
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import patch

IDS = torch.tensor([[5, 9, 33, 2, 17, 40, 8, 1, 63, 12, 7], [3, 3, 60, 21, 4, 11, 50, 6, 30, 29, 44]])
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "mixtral", "granite"]
FAMILIES += ["gemma", "gemma2", "gemma3_text", "phi", "phi3"]
LEFT = {"phi": {"2 PhiMLP (without a gate)", "7 LayerNorm (torch's own)"}}


def logits(model, mask=MASK):
    with torch.no_grad():
        found = model(IDS, attention_mask=mask).logits
    return found if mask is None else found[mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_for_prompts_with_and_without_padding(tiny_transformer, family):
    model = tiny_transformer(family)
    whole, padded = logits(model, None), logits(model)
    report = integration.apply(model)
    assert set(report.left) == LEFT.get(family, set())
    torch.testing.assert_close(logits(model, None), whole, **ROUNDING)
    torch.testing.assert_close(logits(model), padded, **ROUNDING)


VARIANTS = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "partial": ("phi3", {"hidden_size": 64, "partial_rotary_factor": 0.5}),
    "gelu": ("mistral", {"hidden_act": "gelu", "head_dim": 24}),
    "swish": ("llama", {"hidden_act": "swish"}),
    "gelu_new": ("gemma", {"hidden_act": "gelu_new"}),
    "two activations": ("gemma2", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 8,
                "partial_rotary_factor": 1.0,
            },
            "original_max_position_embeddings": 8,
        },
    ),
    "no causality": ("llama", {"is_causal": False}),
    "encoder": ("gemma3_text", {"use_bidirectional_attention": True}),
    "one KV head": ("gemma2", {"num_key_value_heads": 1}),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_stay_for_variants(tiny_transformer, name):
    family, changes = VARIANTS[name]
    model = tiny_transformer(family, **changes)
    before = logits(model)
    assert integration.apply(model).left == []
    torch.testing.assert_close(logits(model), before, **ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_near_to_float32_as_the_models_own(tiny_transformer, family):
    exact = logits(tiny_transformer(family))
    model = tiny_transformer(family).bfloat16()
    if family != "gemma2":  # there sdpa leaves the softcap out
        model.set_attn_implementation("sdpa")
    own = (logits(model).float() - exact).norm(dim=-1)
    integration.apply(model)
    ours = (logits(model).float() - exact).norm(dim=-1)
    assert ours.median() <= 1.5 * own.median()  # of the rows: a router's near tie may choose another expert for one


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2"])
@pytest.mark.parametrize("part", ["norms", "rotary", "mlp", "experts", "attention"])
def test_each_part_can_be_applied_alone(tiny_transformer, family, part):
    model = tiny_transformer(family)
    before = logits(model)
    parts = dict.fromkeys(["norms", "rotary", "mlp", "experts", "attention"], False)
    report = integration.apply(model, **{**parts, part: True})
    kinds = {"norms": "RMSNorm", "rotary": "Attention", "mlp": "MLP", "experts": "experts", "attention": "attention"}
    found = any(kinds[part] in name for name in report.replaced)
    assert found or (family, part) in (("qwen3_moe", "mlp"), ("gemma2", "experts"))
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def trace(model):
    """All that apply could change: attributes of modules, settings, parameters and where these lie."""
    modules = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    storages = {name: p.untyped_storage().nbytes() == p.nbytes for name, p in model.named_parameters()}
    settings = {k: v for k, v in vars(model.config).items() if isinstance(v, str | int | float | None)}
    return modules, storages, settings, list(model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_leaves_no_trace(tiny_transformer, family):
    model = tiny_transformer(family)
    before, values, parameters = trace(model), logits(model), [id(p) for p in model.parameters()]
    integration.apply(model)
    assert trace(model) != before
    integration.restore(model)
    assert trace(model) == before
    assert [id(p) for p in model.parameters()] == parameters
    assert torch.equal(logits(model), values)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_a_router_serves_transformers_own_experts(tiny_transformer, family, way):
    model = tiny_transformer(family)
    before = logits(model)
    integration.apply(model)
    model.set_experts_implementation(way)
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_restore_does_nothing_to_an_unchanged_model(tiny_transformer):
    model = tiny_transformer("llama")
    before = trace(model)
    integration.restore(model)
    assert trace(model) == before


def test_applying_again_replaces_the_choice(tiny_transformer):
    model = tiny_transformer("llama")
    before = trace(model)
    integration.apply(model)
    report = integration.apply(model, norms=False, rotary=False, mlp=False, attention=False)
    assert report.replaced == {}
    integration.restore(model)
    assert trace(model) == before


def test_a_deep_copy_is_changed_and_restored_by_itself(tiny_transformer):
    model = tiny_transformer("qwen2")
    before = logits(model)
    integration.apply(model)
    twin = copy.deepcopy(model)
    integration.restore(twin)
    assert not any("forward" in module.__dict__ for module in twin.modules())
    assert all("forward" in layer.__dict__ for layer in model.model.layers)
    assert torch.equal(logits(twin), before)
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_what_it_does_not_know_is_left_and_named(tiny_transformer):
    model = tiny_transformer("olmo2")
    before = logits(model)
    report = integration.apply(model)
    assert report.replaced == {}
    assert {"2 Olmo2Attention (unknown)", "2 Olmo2MLP (unknown)", "9 Olmo2RMSNorm (unknown)"} <= set(report.left)
    assert "2 Olmo2MLP (unknown)" in str(report)
    assert torch.equal(logits(model), before)


def test_an_activation_without_a_gated_form_is_left_and_named(tiny_transformer):
    model = tiny_transformer("llama", hidden_act="relu")
    before = logits(model)
    report = integration.apply(model)
    assert report.left == ["2 LlamaMLP (activation without a gated form)"]
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_wrapped_modules_are_left_and_named(tiny_transformer):
    model = tiny_transformer("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    norm = model.model.norm
    norm.forward = norm.forward  # as libraries that move weights do
    before = logits(model)
    report = integration.apply(model)
    assert report.left == ["1 LlamaMLP (not plain torch.nn.Linear)", "1 LlamaRMSNorm (its forward is replaced already)"]
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_modules_of_other_packages_are_left_and_named(tiny_transformer):
    class OwnAttention(LlamaAttention):
        def forward(self, *args, **options):
            out, weights = super().forward(*args, **options)
            return 2 * out, weights

    model = tiny_transformer("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    before = logits(model)
    assert integration.apply(model).left == ["2 OwnAttention (unknown)"]
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_a_class_whose_forward_was_replaced_keeps_it(tiny_transformer, monkeypatch):
    own = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * own(self, x))
    model = tiny_transformer("llama")
    before = logits(model)
    assert integration.apply(model).left == ["5 LlamaRMSNorm (its class has another forward)"]
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_an_attention_whose_forward_was_replaced_keeps_its_attention_function(tiny_transformer, monkeypatch):
    """What that forward passes to the function is not known: torch's also takes a bias of scores."""
    own = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda self, *given, **options: own(self, *given, **options))
    model = tiny_transformer("llama")
    chosen, before = model.config._attn_implementation, logits(model)
    report = integration.apply(model)
    assert report.left == ["2 LlamaAttention (its class has another forward)"]
    assert model.config._attn_implementation == chosen
    torch.testing.assert_close(logits(model), before, **ROUNDING)


def test_arguments_that_no_tested_version_has_are_not_ignored(tiny_transformer, monkeypatch):
    """transformers 5.24 renamed past_key_values: a forward that ignored the new name would leave out the cache."""
    own = LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, kv_store=None, **kwargs):
        return own(self, hidden_states, position_embeddings, attention_mask, kv_store, **kwargs)

    forward.__module__ = LlamaAttention.__module__
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    report = integration.apply(tiny_transformer("llama"))
    assert report.left == ["2 LlamaAttention (its forward takes kv_store)"]


def test_layers_that_are_wrapped_or_watched_later_are_heeded(tiny_transformer):
    model = tiny_transformer("llama")
    integration.apply(model)
    before = logits(model)
    seen = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *of: seen.append(of))
    torch.testing.assert_close(logits(model), before, **ROUNDING)
    assert len(seen) == 1
    mlp = model.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.Tanh())  # as an adapter would
    assert not torch.allclose(logits(model), before, atol=1e-3)


def test_parameters_stay_parameters_through_moves_and_loads(tiny_transformer):
    model, other = tiny_transformer("qwen2"), tiny_transformer("qwen2", seed=1)
    integration.apply(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), logits(other), **ROUNDING)
    model.to(torch.bfloat16).to(torch.float32)
    rounded = other.to(torch.bfloat16).to(torch.float32)
    torch.testing.assert_close(logits(model), logits(rounded), **ROUNDING)


def test_a_changed_model_can_be_saved_and_loaded(tiny_transformer, tmp_path):
    model = tiny_transformer("qwen2")
    before = logits(model)
    integration.apply(model)
    model.save_pretrained(tmp_path)
    integration.restore(model)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(logits(loaded), before)


def test_gradients_flow_through_the_models_own_modules(tiny_transformer):
    model = tiny_transformer("llama")
    model(IDS, labels=IDS).loss.backward()
    expected = model.model.layers[0].mlp.gate_proj.weight.grad.clone()
    model.zero_grad()
    integration.apply(model)
    model(IDS, labels=IDS).loss.backward()
    found = model.model.layers[0].mlp.gate_proj.weight.grad
    assert (found - expected).norm() < 1e-5 * expected.norm()  # attention's sums have another order


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_first_router_can_be_trained_alone(tiny_transformer, family):
    model = tiny_transformer(family)
    gate = model.model.layers[0].mlp.gate.weight
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is gate)
    model(IDS, labels=IDS).loss.backward()
    expected, gate.grad = gate.grad, None
    integration.apply(model)
    model(IDS, labels=IDS).loss.backward()
    assert (gate.grad - expected).norm() < 1e-4 * expected.norm()  # attention's sums have another order


def test_hidden_states_can_be_captured(tiny_transformer):
    model = tiny_transformer("llama")
    with torch.no_grad():
        expected = model(IDS, output_hidden_states=True).hidden_states
        integration.apply(model)
        found = model(IDS, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_experts_of_other_devices_are_skipped(tiny_transformer):
    model = tiny_transformer("mixtral")
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [1, 4], [4, 4], [2, 0], [3, 1]])  # 4 is no expert here
    with torch.no_grad():
        expected = experts(x, ids.clamp(max=3), weights * (ids < 4))
        integration.apply(model)
        torch.testing.assert_close(experts(x, ids, weights), expected, **ROUNDING)


def test_a_changed_model_compiles(tiny_transformer):
    model = tiny_transformer("llama", num_hidden_layers=1)
    integration.apply(model)
    before = logits(model, None)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(IDS).logits, before, **ROUNDING)


@pytest.mark.parametrize("shape", [(32,), (1, 2, 1, 2, 32), (32, 5)], ids=str)
def test_a_norm_takes_inputs_of_any_rank_and_stride(tiny_transformer, shape):
    model = tiny_transformer("gemma2")
    x = torch.randn(shape).movedim(shape.index(32), -1)
    with torch.no_grad():
        expected = model.model.norm(x)
        integration.apply(model)
        torch.testing.assert_close(model.model.norm(x), expected, **ROUNDING)


def test_only_a_model_of_transformers_is_taken():
    with pytest.raises(TypeError, match="apply: model: expected a transformers model, got Linear"):
        integration.apply(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["5.16.2", "5.25.0", "6.0.0.dev0"])
def test_a_version_outside_the_tested_range_warns_once(monkeypatch, tiny_transformer, version):
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.setattr(patch, "_warned", False)
    model = tiny_transformer("llama")
    with pytest.warns(integration.VersionWarning, match=f"5.17 to 5.24, found {version}"):
        integration.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", integration.VersionWarning)
        integration.apply(model)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.1"])
def test_a_tested_version_is_silent(monkeypatch, tiny_transformer, version):
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.setattr(patch, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", integration.VersionWarning)
        integration.apply(tiny_transformer("llama"))
