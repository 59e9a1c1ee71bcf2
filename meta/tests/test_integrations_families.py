"""`apply` on models of many families: their logits stay, whether their modules are replaced or left and named."""

from __future__ import annotations

import pytest
import torch
import transformers
from logit_bounds import ROUNDING
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16}
LATENT |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **EXPERTS}
IDS = torch.tensor([[5, 9, 33, 3, 17, 40, 8, 1, 63, 12, 7], [3, 3, 60, 21, 4, 11, 50, 6, 30, 29, 44]])
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
IMAGE = 50
PROMPT = torch.tensor([[5, 9, IMAGE, IMAGE, IMAGE, IMAGE, 8, 1, 3, 12, 7]])

UNKNOWN = {
    "llama4_text": {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16, "attention_chunk_size": 4},
    "ministral3": {},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 16, **EXPERTS},
    "phimoe": {"num_local_experts": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 5},
    "glm4": {"head_dim": 8},
    "cohere": {},
    "cohere2": {"sliding_window": 5},
    "olmo2": {},
    "smollm3": {},
    "falcon": {"alibi": False},
    "starcoder2": {},
}
"""Families whose modules all stay: latent attention, sinks, interleaved rotation, norms of other kinds, no gate, ..."""


def settled(model):
    """Larger weights, so that attention is far from uniform."""
    for parameter in model.parameters():
        parameter.data = parameter * 3 if parameter.ndim > 1 else parameter + 0.1 * torch.randn_like(parameter)
    return model.eval()


def result(model, mask=None, **inputs):
    with torch.no_grad():
        found = model(**inputs, **({} if mask is None else {"attention_mask": mask}))
    values = found.logits if "logits" in found else found.last_hidden_state
    return values if mask is None else values[mask.bool()]


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_family_that_is_not_known_keeps_all_its_modules(family):
    torch.manual_seed(0)
    model = settled(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TEXT, **UNKNOWN[family]})))
    before = result(model, MASK, input_ids=IDS)
    report = integration.apply(model)
    assert report.replaced == {}
    assert any("Attention (unknown)" in each for each in report.left)
    assert torch.equal(result(model, MASK, input_ids=IDS), before)


ENCODERS = {
    "vit": {"pixel_values": torch.ones(1, 3, 8, 8)},
    "siglip_vision_model": {"pixel_values": torch.ones(1, 3, 8, 8)},
    "bert": {"input_ids": IDS},
    "t5": {"input_ids": IDS, "decoder_input_ids": IDS},
    "whisper": {"input_features": torch.ones(1, 8, 16), "decoder_input_ids": IDS[:1]},
}


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_keep_all_their_modules(family):
    torch.manual_seed(0)
    of_t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    of_whisper = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    of_whisper |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64}
    of_whisper |= {"num_mel_bins": 8, "max_source_positions": 8, "pad_token_id": 0}
    of_whisper |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    settings = {"t5": of_t5, "whisper": of_whisper, "bert": TEXT}.get(family, VISION)
    model = settled(AutoModel.from_config(AutoConfig.for_model(family, **settings)))
    before = result(model, **ENCODERS[family])
    report = integration.apply(model)
    assert report.replaced == {}
    assert any("Attention" in each for each in report.left)
    assert torch.equal(result(model, **ENCODERS[family]), before)


CLASSES = {
    "llava": ("Llava", {}),
    "gemma3": ("Gemma3", {"mm_tokens_per_image": 4}),
    "paligemma": ("PaliGemma", {"projection_dim": 32}),
}


def of_images(name, text, **changes):
    """A model that reads images, its text model of another family or its own."""
    prefix, more = CLASSES[name]
    kind = "clip_vision_model" if name == "llava" else "siglip_vision_model"
    vision = {"model_type": kind, **VISION, "projection_dim": 32}
    parts = {"text_config": {"model_type": text, **TEXT, **changes}, "vision_config": vision}
    config = getattr(transformers, f"{prefix}Config")(**parts, image_token_index=IMAGE, **more)
    torch.manual_seed(0)
    return settled(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))


GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}
IMAGES = {
    "llava, llama": ("llava", "llama", {}),
    "llava, mistral": ("llava", "mistral", {"sliding_window": 5}),
    "llava, qwen2": ("llava", "qwen2", {}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA),
    "paligemma, gemma": ("paligemma", "gemma", {"head_dim": 16}),
    "paligemma, gemma2": ("paligemma", "gemma2", GEMMA),
}


@pytest.mark.parametrize("case", IMAGES)
def test_the_text_model_of_one_that_reads_images_is_replaced(case):
    name, text, changes = IMAGES[case]
    model = of_images(name, text, **changes)
    prompt = PROMPT if name != "paligemma" else PROMPT.sort(descending=True).values  # it expects images first
    inputs = {"input_ids": prompt, "pixel_values": torch.linspace(-1, 1, 192).view(1, 3, 8, 8)}
    if name != "llava":
        inputs["token_type_ids"] = (prompt == IMAGE).long() * (name == "gemma3")
    mask = torch.ones_like(prompt)
    before = result(model, mask, **inputs)
    greedy = {**inputs, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    tokens = model.generate(**greedy)
    report = integration.apply(model)
    assert report.replaced["attention function"] == 1
    assert "2 SiglipAttention (unknown)" in report.left or "2 CLIPAttention (unknown)" in report.left
    torch.testing.assert_close(result(model, mask, **inputs), before, **ROUNDING)
    assert torch.equal(model.generate(**greedy), tokens)
    cache = KestrelCache(model.config, max_tokens=20)
    if name == "paligemma":  # its prompts see each other in both directions
        with pytest.raises(ValueError, match="is_causal: expected True with a KestrelCache, got False"):
            model.generate(**greedy, past_key_values=cache)
    else:
        assert torch.equal(model.generate(**greedy, past_key_values=cache), tokens)
    integration.restore(model)
    assert torch.equal(result(model, mask, **inputs), before)
