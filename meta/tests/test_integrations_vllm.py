"""The plugin of vLLM: what its variable names, and greedy tokens of the real vLLM on a CPU (nox -s engines)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kestrel_kernels.integrations import vllm as integration

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 5.0},
    "qwen3_moe": {"moe_intermediate_size": 32},
}
CLASSES = {
    "llama": {"KestrelRMSNorm", "KestrelSiluAndMul", "KestrelRotaryEmbedding"},
    "gemma2": {"KestrelGemmaRMSNorm", "KestrelGeluAndMul"},
}
NEW = 12
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, as above")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, as nox -s engines has it")


def test_the_variable_names_parts():
    assert integration.parts_of("") == ()
    assert integration.parts_of("all") == integration.PARTS
    assert integration.parts_of(" experts ,norms,") == ("norms", "experts")
    with pytest.raises(ValueError, match="KESTREL_VLLM: expected all, or some of norms, .*, got attention, mlp"):
        integration.parts_of("mlp,norms,attention")


def test_the_entry_point_is_a_function():
    from importlib.metadata import entry_points

    found = [each for each in entry_points(group="vllm.general_plugins") if each.name == "kestrel"]
    assert not found or found[0].load() is integration.register  # none where the package runs from its sources


def test_tokens_are_compared_up_to_the_first_that_differs(vllm_results):
    own = [{"tokens": [4, 5, 6], "leads": [1.0, 0.1, 2.0]}, {"tokens": [7, 8, 9], "leads": [0.5, 0.6, 0.7]}]
    ours = [{"tokens": [4, 3, 6], "leads": [1.0, 0.2, 2.0]}, own[1]]
    assert vllm_results.compare(own, ours) == {"compared": 5, "equal": 4, "leads_where_apart": [0.1]}
    assert vllm_results.compare(own, own) == {"compared": 6, "equal": 6, "leads_where_apart": []}


def test_the_model_that_is_written_loads_in_transformers(vllm_results, monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(vllm_results, "SHAPE", {**vllm_results.SHAPE, **small, "head_dim": 16, "vocab_size": 100})
    vllm_results.make_model(tmp_path, 2, weights=True)
    model, found = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert model.dtype == torch.bfloat16


@pytest.fixture
def make(tiny_transformer, tmp_path):
    """Makes a model, and saves it to a folder."""

    def make(family):
        model = tiny_transformer(family, **SIZES, **FAMILIES[family])
        model.save_pretrained(tmp_path / "model")
        return model, tmp_path / "model"

    return make


def prompts():
    """Of 5, 100 and 33 tokens: vLLM reads the second in pieces of 64, beside the others."""
    return [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 100, 33)]


def rehearse(path, disabled="", **changes):
    """What vLLM writes, in a process of its own, without the linear kernels that are disabled."""
    asked = {"model": str(path), "dtype": "float32", "kv_cache": "auto", "block_size": 32, "prompts": prompts()}
    asked |= {"new": NEW, "parts": "all", "compiled": False, "second_runner": False, **changes}
    command = [sys.executable, str(Path(__file__).with_name("vllm_rehearsal.py")), json.dumps(asked)]
    environment = {**os.environ, "VLLM_DISABLED_KERNELS": disabled}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def logprobs(model, prompt, tokens):
    """Of the model's own greedy tokens behind the prompt, and how far each leads the next best one."""
    with torch.no_grad():
        found = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    best = found.topk(2).values
    return found.gather(1, torch.tensor(tokens)[:, None])[:, 0], best[:, 0] - best[:, 1]


@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_writes_the_greedy_tokens_of_transformers(make, family):
    model, path = make(family)
    found = rehearse(path)
    assert CLASSES.get(family, set()) <= set(found["classes"])
    expected = {"flash_attn_varlen_func", "flash_attn_with_kvcache", "reshape_and_cache", "rotary_embedding"}
    expected |= {"fused_experts"} if family == "qwen3_moe" else set()
    assert expected <= {op.split(".")[1] for op in found["ops"]}
    for prompt, tokens, given in zip(prompts(), found["tokens"], found["logprobs"], strict=True):
        exact, lead = logprobs(model, prompt, tokens)
        assert float((exact - torch.tensor(given)).abs().max()) < 1e-3
        own = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
        assert own.tolist() == tokens or float(lead.min()) < 1e-3  # but for ties


@needs_vllm
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_models_write_the_tokens_of_eager_ones(make, family):
    _, path = make(family)
    eager, compiled = rehearse(path), rehearse(path, compiled=True)
    assert compiled["tokens"] == eager["tokens"]
    assert set(eager["ops"]) - set(compiled["ops"]) == {"kestrel_rope.rotary_embedding"}  # Inductor's own is fused
    assert compiled["classes"] == eager["classes"]


@needs_vllm
def test_an_fp8_cache_stays_near_exact_keys(make):
    model, path = make("llama")
    found = rehearse(path, kv_cache="fp8", parts="rotary")  # vLLM's own needs its extension for CPUs
    assert [name for name in found["classes"] if name.startswith("Kestrel")] == ["KestrelRotaryEmbedding"]
    apart = [
        (logprobs(model, prompt, tokens)[0] - torch.tensor(given)).abs()
        for prompt, tokens, given in zip(prompts(), found["tokens"], found["logprobs"], strict=True)
    ]
    assert 0 < float(torch.cat(apart).mean()) < 0.2


@needs_vllm
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_int8_cache_stays_nearer_to_exact_keys(tiny_transformer, tmp_path, family):
    model = tiny_transformer(family, **{**SIZES, **FAMILIES[family], "head_dim": 64})
    model.save_pretrained(tmp_path)
    found = rehearse(tmp_path, kv_cache="int8_per_token_head", parts="rotary")
    assert {"int8_cache_write", "gather_cache", "flash_attn_with_kvcache"} <= {op.split(".")[1] for op in found["ops"]}
    apart = [
        (logprobs(model, prompt, tokens)[0] - torch.tensor(given)).abs()
        for prompt, tokens, given in zip(prompts(), found["tokens"], found["logprobs"], strict=True)
    ]
    assert 1e-5 < float(torch.cat(apart).mean()) < 0.01


def prompts_of(*lengths):
    return [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


@needs_vllm
@needs_triton
def test_an_int4_cache_keeps_the_keys_of_an_unfinished_page_with_their_request(tiny_transformer, tmp_path):
    """Six requests for four rows: prompts in pieces, pages that fill while decoding, rows that are used anew.

    Codes move log-probabilities by 0.029 in the mean; a row that is another request's for a while, by 0.059.
    """
    model = tiny_transformer("llama", **{**SIZES, "head_dim": 64})
    model.save_pretrained(tmp_path)
    asked = {"block_size": 64, "parts": "rotary", "second_runner": True, "new": 20}
    given = prompts_of(5, 100, 50, 64, 1, 120)
    found = rehearse(tmp_path, kv_cache="int4_per_token_head", prompts=given, **asked)
    assert {"int4_cache_write", "gather_cache", "flash_attn_with_kvcache"} <= {op.split(".")[1] for op in found["ops"]}
    apart = torch.stack(
        [
            (logprobs(model, prompt, tokens)[0] - torch.tensor(logs)).abs()
            for prompt, tokens, logs in zip(given, found["tokens"], found["logprobs"], strict=True)
        ]
    )
    assert 1e-5 < float(apart.mean()) < 0.045


@needs_vllm
@needs_triton
def test_the_second_runner_writes_the_tokens_of_the_first(make):
    _, path = make("llama")
    first, second = rehearse(path), rehearse(path, second_runner=True)
    assert ("vllm.v1.worker.cpu.model_runner", first["tokens"]) == (second["runner"], second["tokens"])


@needs_vllm
def test_an_int4_cache_needs_the_second_runner(tiny_transformer, tmp_path):
    tiny_transformer("llama", **{**SIZES, "head_dim": 64}).save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="an INT4 cache needs vLLM's second model runner, got the first"):
        rehearse(tmp_path, kv_cache="int4_per_token_head", block_size=64)


@needs_vllm
@pytest.mark.parametrize("name", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_the_sections_of_int4_pages_cover_every_byte_once(name):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kestrel_kernels.integrations.vllm import int4

    memory, layers = page_views(KVCacheLayout[name].stride_order, page=64, width=int4.bytes_of_a_cell(64))
    for view in layers:
        keys, values, scales = int4.sections(view, 64)
        assert keys.shape == values.shape == (3, 64, 2, 32)
        assert [tuple(scales[name].shape) for name in ("k_scale", "k_zero")] == [(3, 2, 64)] * 2
        assert [tuple(scales[name].shape) for name in ("v_scale", "v_zero")] == [(3, 64, 2)] * 2
        for x in (keys, values, *scales.values()):
            assert x.data_ptr() % 16 == x.stride(0) * x.element_size() % 16 == 0
            x.view(torch.uint8).add_(1)
    assert memory.eq(1).all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 3, 2, 4)], ids=["LBHNC", "BLNHC"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_sections_cover_every_byte_once_without_vllm(kind, order):
    from kestrel_kernels.integrations.vllm import int4, pages

    sections = {"int8": pages.int8_sections, "int4": int4.sections}[kind]
    sizes = {"int8": {}, "int4": {"page": 64, "width": int4.bytes_of_a_cell(64)}}[kind]
    memory, layers = page_views(order, **sizes)
    for view in layers:
        keys, values, scales = sections(view, 64)
        for x in (keys, values, *scales.values()):
            assert x.data_ptr() % 16 == x.stride(0) * x.element_size() % 16 == 0
            bytes_of = x.view(torch.int8)
            bytes_of += 1
    assert memory.eq(1).all()
    with pytest.raises(ValueError, match=r"KESTREL: kv_cache: expected pages \[2, \d+, \d+\] of one run of bytes"):
        sections(page_views((1, 2, 0, 3, 4), **sizes)[1][0], 64)


def page_views(order, blocks=3, layers=2, heads=2, page=16, width=2 * 64 + 8):
    """vLLM's views [B, H, N, C] of INT8 pages, one for each layer, in memory of this order of [L, B, H, N, C]."""
    shape = (layers, blocks, heads, page, width)
    memory = torch.zeros([shape[axis] for axis in order], dtype=torch.int8)
    return memory, memory.permute([order.index(axis) for axis in range(5)])


@needs_vllm
@pytest.mark.parametrize("name", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_the_sections_of_int8_pages_cover_every_byte_once(name):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kestrel_kernels.integrations.vllm.attention import KestrelBackend, int8_sections

    layout = KVCacheLayout[name]
    assert layout.is_block_compact
    assert layout in KestrelBackend.supported_kv_cache_layouts()
    memory, layers = page_views(layout.stride_order)
    for view in layers:
        keys, values, scales = int8_sections(view, 64)
        for x in (keys, values, *scales.values()):
            assert x.shape[:3] == (3, 16, 2)
            assert x.data_ptr() % 16 == x.stride(0) * x.element_size() % 16 == 0
            codes = x if x.dtype == torch.int8 else x.view(torch.int8)
            codes += 1
    assert memory.eq(1).all()


@needs_vllm
def test_views_of_a_cache_are_kept_until_another_cache_or_other_scales_come():
    from types import SimpleNamespace

    from kestrel_kernels.integrations.vllm.attention import Impl

    impl = Impl(4, 64, 0.1, 2, kv_cache_dtype="fp8")
    layer = SimpleNamespace(_k_scale=torch.tensor(2.0), _v_scale=torch.tensor(3.0))
    cache, another = (torch.zeros(3, 2, 16, 128, dtype=torch.uint8) for _ in range(2))
    keys, _, scales = impl._cache(layer, cache)
    assert impl._cache(layer, cache)[0] is keys
    assert impl._cache(layer, another)[0].data_ptr() == another.data_ptr()
    layer._k_scale.fill_(5.0)
    assert scales["k_scale"].item() == 5.0
    layer._k_scale = torch.tensor(7.0)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl._cache(layer, another)[2]["k_scale"].item() == 7.0


@needs_vllm
@pytest.mark.parametrize("kind", ["int8_per_token_head", "int4_per_token_head"])
def test_sinks_count_in_steps_and_prompts_over_codes(kind, monkeypatch):
    """One new token behind 69 others, and a prompt of 40: float64 over the keys and values as they are stored."""
    from types import SimpleNamespace

    from kestrel_kernels.integrations.vllm import attention, int4
    from kestrel_kvcache import gather_cache

    assert attention.KestrelBackend.supports_combination(64, torch.float16, kind, 64, has_sink=True) is None
    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cpu")))
    config.scheduler_config = SimpleNamespace(max_num_seqs=2)
    monkeypatch.setattr(attention, "get_current_vllm_config", lambda: config)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    impl = attention.Impl(4, 64, 0.125, 2, kv_cache_dtype=kind, sinks=sinks)
    impl.process_weights_after_loading(torch.float32)

    is_int4, lengths, table = kind == attention.INT4, [70, 40], torch.tensor([[0, 2], [1, 1]], dtype=torch.int32)
    width = {"width": int4.bytes_of_a_cell(64)} if is_int4 else {}
    cache = page_views((0, 1, 2, 3, 4), page=64, **width)[1][0]
    tail_rows = torch.tensor([1, 0], dtype=torch.int32)
    rows = {"rows": tail_rows, "token_rows": tail_rows.repeat_interleave(torch.tensor(lengths))} if is_int4 else {}
    batch = attention.Metadata(
        tokens=41,
        decodes=1,
        starts=torch.tensor([0, 40], dtype=torch.int32),
        decode_lengths=torch.tensor(lengths[:1], dtype=torch.int32),
        prompt_lengths=torch.tensor(lengths[1:], dtype=torch.int32),
        decode_table=table[:1],
        prompt_table=table[1:],
        max_queries=40,
        max_keys=70,
        prompts=lengths[1:],
        key_starts=torch.tensor([0, 40], dtype=torch.int32),
        **rows,
    )
    layer = SimpleNamespace(layer_name="layer")
    monkeypatch.setattr(attention, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer": batch}))
    torch.manual_seed(0)
    query, key, value = torch.randn(41, 4, 64) * 2, torch.randn(110, 2, 64), torch.randn(110, 2, 64)
    slots = torch.tensor([*range(64), *range(128, 134), *range(64, 104)])  # of pages 0 and 2, and of page 1
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    out = impl.forward(layer, query, key, value, cache, batch, torch.empty(41, 4, 64))

    k_codes, v_codes, scales = impl._cache(layer, cache)
    for b, (length, new) in enumerate(zip(lengths, (slice(0, 1), slice(1, 41)), strict=True)):
        of_row = {"seq_ids": tail_rows[b : b + 1]} if is_int4 else {}
        stored = gather_cache(k_codes, v_codes, table[b], length, dtype=torch.float32, **of_row, **scales)
        k, v = (x.double().repeat_interleave(2, dim=1) for x in stored)
        scores = torch.einsum("qhd,khd->hqk", query[new].double(), k) / 8
        queries = scores.shape[1]
        later = torch.ones(queries, length, dtype=torch.bool).triu(length - queries + 1)
        of_sinks = sinks.double()[:, None, None].expand(-1, queries, 1)
        weights = torch.cat((scores.masked_fill(later, -torch.inf), of_sinks), dim=-1).softmax(-1)[..., :-1]
        assert float((out[new] - torch.einsum("hqk,khd->qhd", weights, v)).abs().max()) < 1e-4


@needs_vllm
@pytest.mark.parametrize(("hidden", "inner", "is_ours"), [(64, 48, True), (40, 48, False), (64, 24, False)])
def test_experts_of_sizes_that_no_kernel_takes_stay_vllm_s(hidden, inner, is_ours, monkeypatch):
    from types import SimpleNamespace

    from kestrel_kernels.integrations.vllm import layers

    loaded = []
    monkeypatch.setattr(layers.UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda *_: loaded.append(1))
    method = object.__new__(layers.KestrelFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.moe = SimpleNamespace(
        activation=layers.MoEActivation.SILU,
        has_bias=False,
        is_lora_enabled=False,
        moe_parallel_config=SimpleNamespace(use_all2all_kernels=False),
    )
    weights = {"w13_weight": torch.empty(2, 2 * inner, hidden), "w2_weight": torch.empty(2, hidden, inner)}
    method.process_weights_after_loading(SimpleNamespace(apply_router_weight_on_input=False, **weights))
    assert method.is_ours is is_ours
    assert loaded == [1]


@needs_vllm
def test_int8_pages_in_pieces_are_refused():
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kestrel_kernels.integrations.vllm.attention import KestrelBackend, int8_sections

    _, layers = page_views(KVCacheLayout.BHLNC.stride_order)
    with pytest.raises(ValueError, match=r"KESTREL: kv_cache: expected pages \[2, 16, 136\] of one run of bytes"):
        int8_sections(layers[0], 64)
    reason = KestrelBackend.supports_combination(80, torch.bfloat16, "int8_per_token_head")
    assert reason == "an INT8 cache needs heads of 64, 128 or 256, got 80"
    assert KestrelBackend.supports_combination(128, torch.bfloat16, "int8_per_token_head") is None
    reason = KestrelBackend.supports_combination(128, torch.bfloat16, "int4_per_token_head", 16)
    assert reason == "an INT4 cache needs --block-size 64, got 16"
    assert KestrelBackend.supports_combination(128, torch.bfloat16, "int4_per_token_head", 64) is None


@needs_vllm
def test_the_recipe_runs_as_it_stands_in_engines_md(tmp_path):
    page = (Path(__file__).resolve().parents[1] / "ENGINES.md").read_text(encoding="utf-8")
    [code] = [code for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "from vllm" in code]
    command = [sys.executable, str(Path(__file__).with_name("vllm_rehearsal.py")), json.dumps({"recipe": code})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found["tokens"]) == 8
    assert {"kestrel_kvcache.int8_cache_write", "kestrel_norm.fused_add_rms_norm"} <= set(found["ops"])


@needs_vllm
@pytest.mark.parametrize(
    ("method", "options"),
    [("gptq", {"symmetric": True, "sym": True}), ("awq", {"zero_point": True, "version": "gemm"})],
    ids=["gptq", "awq"],
)
def test_a_4_bit_checkpoint_runs_our_linear_kernel(tiny_transformer, w4_checkpoint, tmp_path, method, options):
    model = tiny_transformer("llama", **SIZES, architectures=["LlamaForCausalLM"])
    w4_checkpoint(model, tmp_path, method, **options)
    others = "Dynamic4bitLinearKernel,ZentorchWNA16LinearKernel,CPUWNA16LinearKernel"
    found = rehearse(tmp_path, others, dtype="float16", parts="all")
    assert "kestrel_quant.w4a16_linear" in found["ops"]
    for prompt, tokens, given in zip(prompts(), found["tokens"], found["logprobs"], strict=True):
        exact, _ = logprobs(model, prompt, tokens)
        assert float((exact - torch.tensor(given)).abs().max()) < 0.05
