"""The plugin of vLLM: what its variable names, and greedy tokens of the real vLLM on a CPU (nox -s engines)."""

from __future__ import annotations

import importlib.util
import json
import os
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
    asked |= {"new": NEW, "parts": "all", **changes}
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
