"""transformers' continuous batching: the functions it calls, and its tokens beside generate's (nox -s engines)."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from transformers.utils import is_kernels_available, is_psutil_available

from kestrel_attention import flash_attn_with_kvcache
from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import batching, batching_fp8, flash2
from kestrel_runtime import trace

HAS_KERNELS = is_kernels_available() and is_psutil_available()
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs kernels and psutil, as nox -s engines has them")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_decode_step_stores_and_attends_and_padding_gives_zeros():
    pages, table = random(2, 6, 16, 2, 8), torch.tensor([[3, 0], [1, -1], [-1, -1]], dtype=torch.int32)
    q, k, v = random(3, 1, 4, 8, seed=1), random(3, 1, 2, 8, seed=2), random(3, 1, 2, 8, seed=3)
    lengths, ours = torch.tensor([20, 3, -1]), pages.clone()
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (7, 0)}
    found = flash2.flash_attn_with_kvcache(
        q=q, k_cache=ours[0], v_cache=ours[1], k=k, v=v, cache_seqlens=lengths, block_table=table, **options
    )
    assert torch.equal(ours[0, 0, 4], k[0, 0])
    assert torch.equal(ours[1, 1, 3], v[1, 0])
    now = torch.tensor([21, 4, -1], dtype=torch.int32)
    expected = flash_attn_with_kvcache(q, *ours, cache_seqlens=now, block_table=table, **options)
    assert torch.equal(found, expected)
    assert found[2].eq(0).all()


def test_packed_prompts_see_their_own_keys():
    starts_q, starts_k = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 3, 9], dtype=torch.int32)
    q, k, v = random(5, 4, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2)
    found = flash2.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 3, 6, softmax_scale=0.3, causal=True)
    for queries, keys in ((slice(0, 3), slice(0, 3)), (slice(3, 5), slice(3, 9))):
        alone = flash2.flash_attn_func(q[None, queries], k[None, keys], v[None, keys], softmax_scale=0.3, causal=True)
        torch.testing.assert_close(found[queries], alone[0])


def test_settings_without_a_counterpart_are_refused():
    x = random(1, 2, 2, 8)
    flash2.flash_attn_func(x, x, x, causal=True, deterministic=False, s_aux=None)
    with pytest.raises(ValueError, match="kestrel-flash2: dropout_p: expected 0"):
        flash2.flash_attn_func(x, x, x, dropout_p=0.1)
    with pytest.raises(ValueError, match="kestrel-flash2: expected causal, .*, got alibi_slopes"):
        flash2.flash_attn_func(x, x, x, alibi_slopes=torch.ones(2))


@pytest.mark.skipif(is_kernels_available(), reason="kernels is installed")
def test_without_the_package_kernels_one_line_says_what_is_missing():
    with pytest.raises(ImportError, match="paged_attention: expected the package kernels"):
        batching.paged_attention()


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_batch_gets_the_tokens_of_generate(tiny_transformer, monkeypatch, family):
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    monkeypatch.setenv(batching.VARIABLE, "other/kernel=/nowhere")
    model = tiny_transformer(family, max_position_embeddings=512)
    prompts = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 90, 17, 33)]
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert integration.apply(model, attention=False).left == []
    model.set_attn_implementation(integration.paged_attention())
    assert integration.paged_attention() == "paged|kestrel/kestrel-flash2"
    assert os.environ[batching.VARIABLE].startswith("other/kernel=/nowhere:kestrel/kestrel-flash2=")
    settings = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=48)
    generation = GenerationConfig(**options, eos_token_id=-1, pad_token_id=0)
    with trace() as counts:
        found = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=settings, progress_bar=False
        )
    assert [each.generated_tokens for each in found.values()] == expected
    assert counts["kestrel_attention.flash_attn_varlen_func"]["reference"] > 0


def is_of(series):
    return tuple(int(part) for part in transformers.__version__.split(".")[:2]) == series


@needs_kernels
@pytest.mark.skipif(not is_of(batching_fp8.TESTED), reason="private names of another transformers")
@pytest.mark.parametrize(("batch_tokens", "alike"), [(160, 40), (48, 24)], ids=["whole prompts", "prompts in pieces"])
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("qwen2", None), ("qwen2", 24)])
def test_fp8_pages_give_the_tokens_of_an_fp8_cache(tiny_transformer, family, window, batch_tokens, alike):
    """Prompts in pieces, and later ones that share their pages, read back what was rounded: some tokens differ."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    changes = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    model = tiny_transformer(family, max_position_embeddings=512, **changes)
    prompts = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 90, 17, 33)]
    integration.apply(model)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected += integration.generate(model, ids, max_new_tokens=10, kv_cache="fp8")[0, len(prompt) :].tolist()
    integration.apply(model, attention=False)
    model.set_attn_implementation(integration.paged_attention())
    generation = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=batch_tokens)
    manager = integration.fp8_pages(model, settings, generation)
    runs = []
    for _ in range(2):
        found = model.generate_batch(prompts, progress_bar=False, persistent_manager=True)
        runs.append([token for each in found.values() for token in each.generated_tokens])
    cache = manager.batch_processor.cache
    assert {x.dtype for x in (*cache.key_cache, *cache.value_cache)} == {torch.float8_e4m3fn}
    for run, least in zip(runs, (alike, 24), strict=True):
        assert sum(one == other for one, other in zip(run, expected, strict=True)) >= least


@pytest.mark.skipif(is_of(batching_fp8.TESTED), reason="private names of this transformers")
def test_fp8_pages_are_for_one_transformers_alone(tiny_transformer):
    with pytest.raises(NotImplementedError, match=r"fp8_pages: transformers: expected 5.17, .* found"):
        integration.fp8_pages(tiny_transformer("llama"), None)


@pytest.mark.skipif(not is_of(batching_fp8.TESTED), reason="private names of another transformers")
def test_fp8_pages_need_their_number(tiny_transformer, monkeypatch):
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"fp8_pages: continuous_batching_config.num_blocks: expected a number"):
        integration.fp8_pages(tiny_transformer("llama"), ContinuousBatchingConfig(max_batch_tokens=8))


@pytest.mark.skipif(not is_of(batching_fp8.TESTED), reason="private names of another transformers")
def test_fp8_pages_need_our_attention(tiny_transformer, monkeypatch):
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    settings = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=8)
    with pytest.raises(ValueError, match=r"fp8_pages: model: expected the .* paged\|kestrel/kestrel-flash2, got eager"):
        integration.fp8_pages(tiny_transformer("llama"), settings)


@needs_kernels
@pytest.mark.skipif(not is_of(batching_fp8.TESTED), reason="private names of another transformers")
def test_fp8_pages_serve_default_calls_and_a_new_manager_destroys_the_old(tiny_transformer, monkeypatch):
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache, continuous_api

    model = tiny_transformer("llama", max_position_embeddings=512)
    model.set_attn_implementation(integration.paged_attention())
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=160)
    manager = integration.fp8_pages(model, settings, generation)
    warmups, made = [], []
    warmup, handler = continuous_api.ContinuousBatchProcessor.warmup, cache.PagedAttentionMemoryHandler
    peak = handler._check_footprint
    monkeypatch.setattr(
        continuous_api.ContinuousBatchProcessor,
        "warmup",
        lambda self, of: (warmups.append(self.cache.key_cache[0].dtype), warmup(self, of)),
    )
    monkeypatch.setattr(handler, "_check_footprint", lambda self, *sizes: (made.append(self), peak(self, *sizes))[1])
    runs = [model.generate_batch([[5, 9, 33]], progress_bar=False) for _ in range(2)]
    tokens = [[each.generated_tokens for each in run.values()] for run in runs]
    assert tokens[0] == tokens[1]
    assert len(tokens[0][0]) == 4
    assert warmups == [torch.float8_e4m3fn] * 2
    assert [(each.cache_dtype, each.activation_dtype) for each in made] == [(torch.float8_e4m3fn, model.dtype)] * 2
    plain = handler.activation_peak.fget(made[0])["attention"]  # of activations in the model's dtype, without the codes
    assert made[0].activation_peak["attention"][1] == plain[1] + made[0].page_size
    monkeypatch.setattr(type(manager), "destroy", lambda self: made.append("destroyed"))
    assert integration.fp8_pages(model, settings, generation) is not manager
    assert made[-1] == "destroyed"
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="got sdpa"):
        model.generate_batch([[5, 9, 33]], progress_bar=False)
