"""build_cos_sin_cache against the rope tables of transformers and against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from kestrel_rope import build_cos_sin_cache
from kestrel_runtime.testing import ulp_distance

SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear by its old name": {"type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn with all its keys": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn with a given attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.5,
    },
}


def of_transformers(rotary_dim: int, max_position: int, base: float, scaling: dict | None):
    """Frequencies and attention factor as transformers computes them (in float32)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(scaling or {"rope_type": "default"})
    kind = scaling.setdefault("rope_type", scaling.pop("type", "default"))
    if kind == "default":
        return base ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim), 1.0
    context = scaling.pop("original_max_position_embeddings") if kind == "dynamic" else max_position
    config = LlamaConfig(
        hidden_size=rotary_dim * 2,
        num_attention_heads=2,
        head_dim=rotary_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_theta": base, **scaling},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_position)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("rotary_dim", "base"), [(64, 10000.0), (128, 500000.0), (32, 1e6)])
def test_table_is_that_of_transformers(name, rotary_dim, base):
    positions = 2048
    frequencies, factor = of_transformers(rotary_dim, positions, base, SCALINGS[name])
    angles = torch.arange(positions).double()[:, None] * frequencies.double()
    wanted = torch.cat((angles.cos(), angles.sin()), dim=1) * factor
    got = build_cos_sin_cache(rotary_dim, positions, base, scaling=SCALINGS[name])
    assert got.shape == (positions, rotary_dim)
    assert got.dtype == torch.float32
    # Their frequencies are float32 results of a power: each may be off by some 8 units of 2^-24.
    tolerance = (8 * 2**-24 * angles.abs().repeat(1, 2) + 2**-23) * factor
    assert bool(((got.double() - wanted).abs() <= tolerance).all())


PUBLISHED = {  # as in the config.json of the models
    "Llama 3.1": (128, 500000.0, 131072, {**SCALINGS["llama3"], "original_max_position_embeddings": 8192}),
    "Llama 3.2": (
        64,
        500000.0,
        131072,
        {**SCALINGS["llama3"], "factor": 32.0, "original_max_position_embeddings": 8192},
    ),
    "Qwen 2.5": (128, 1e6, 131072, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "gpt-oss": (
        64,
        150000.0,
        131072,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "DeepSeek V3": (
        64,
        10000.0,
        163840,
        {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "Vicuna 16k": (128, 10000.0, 16384, {"type": "linear", "factor": 4.0}),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_what_the_rotary_module_of_transformers_multiplies_by(model):
    """Cosines and sines of LlamaRotaryEmbedding, at the start of the context and at its end."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary_dim, base, context, scaling = PUBLISHED[model]
    parameters = {"rope_theta": base, "rope_type": scaling.get("type"), **scaling}
    config = LlamaConfig(
        hidden_size=4 * rotary_dim,
        num_attention_heads=4,
        head_dim=rotary_dim,
        max_position_embeddings=context,
        rope_parameters=parameters,
    )
    module = LlamaRotaryEmbedding(config)
    ours = build_cos_sin_cache(rotary_dim, context, base, scaling=scaling)
    for positions in (torch.arange(512), torch.arange(context - 64, context)):
        cos, sin = module(torch.zeros(1), positions[None])
        for half, theirs in zip(ours[positions].chunk(2, 1), (cos, sin), strict=True):
            assert theirs.shape == (1, len(positions), rotary_dim)
            frequencies = module.inv_freq.double().expand(len(positions), -1)
            # Their angle is a float32 product of a float32 frequency.
            tolerance = (9 * 2**-24 * positions[:, None] * frequencies + 2**-22) * module.attention_scaling
            assert bool(((half.double() - theirs[0, :, : rotary_dim // 2].double()).abs() <= tolerance).all())


def test_dynamic_scaling_is_what_transformers_does_when_a_sequence_outgrows_the_context():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}
    for length in (100, 512, 513, 2048):
        cos, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        ours = build_cos_sin_cache(64, length, scaling=scaling)[:, :32]
        torch.testing.assert_close(ours, cos[0, :, :32], rtol=0, atol=8 * 2**-24 * length + 2**-23)


def test_plain_table_is_rounded_once():
    got = build_cos_sin_cache(64, 300, 10000.0)
    for position in (0, 1, 7, 299):
        for pair in range(32):
            angle = position / 10000.0 ** (2 * pair / 64)
            exact = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
            row = got[position, [pair, 32 + pair]]
            assert int(ulp_distance(row, exact.float()).max()) <= 1, (position, pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_tables_are_the_wide_one_rounded(dtype):
    narrow = build_cos_sin_cache(64, 300, dtype=dtype)
    assert narrow.dtype == dtype
    wide = build_cos_sin_cache(64, 300).to(dtype)
    assert int(ulp_distance(narrow, wide).max()) <= 1  # the wide one was rounded twice
    assert float((narrow != wide).float().mean()) < 1e-3


def test_dynamic_scaling_does_nothing_within_the_original_context():
    scaling = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert torch.equal(build_cos_sin_cache(64, 100, scaling=scaling), build_cos_sin_cache(64, 100))


def test_every_frequency_of_llama3_is_kept_divided_or_between():
    scaling = SCALINGS["llama3"]
    plain = of_transformers(64, 8, 1e4, None)[0].double()
    angles = torch.atan2(*build_cos_sin_cache(64, 2, 1e4, scaling=scaling)[1].double().chunk(2)[::-1])
    turns = 512 * plain / (2 * math.pi)
    torch.testing.assert_close(angles[turns > 4], plain[turns > 4], rtol=1e-6, atol=0)
    torch.testing.assert_close(angles[turns < 1], plain[turns < 1] / 8, rtol=1e-6, atol=0)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert bool(((angles < plain) & (angles > plain / 8))[between].all())


def test_the_parameters_of_a_transformers_config_are_taken_as_they_are():
    scaling = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [8, 4, 4]}
    assert torch.equal(build_cos_sin_cache(32, 9, 1e6, scaling=scaling), build_cos_sin_cache(32, 9, 1e6))


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_table_is_made_on_its_device_alone(kind):
    table = build_cos_sin_cache(32, 9, scaling=SCALINGS[kind], device="meta")
    assert (table.device.type, table.shape) == ("meta", (9, 32))


def test_empty_table():
    assert build_cos_sin_cache(64, 0).shape == (0, 64)


def test_a_large_dynamic_factor_leaves_a_short_context_as_it_is():
    scaling = {"type": "dynamic", "factor": 2.0**62, "original_max_position_embeddings": 16}
    assert torch.equal(build_cos_sin_cache(8, 9, scaling=scaling), build_cos_sin_cache(8, 9))


def test_smallest_table_under_dynamic_scaling():
    scaling = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 2}
    assert torch.equal(build_cos_sin_cache(2, 9, scaling=scaling), build_cos_sin_cache(2, 9))
