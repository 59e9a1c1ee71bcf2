"""The namespace: lazy, complete, and with the import paths of kestrel-kernels 0.2."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

import kestrel_kernels

FAMILIES = ["attention", "kvcache", "moe", "norm", "quant", "rope", "sampling"]

PATHS_OF_0_2 = [
    ("kestrel_kernels", "kestrel_moe", "invoke_cute_moe_down"),
    ("kestrel_kernels", "kestrel_moe", "invoke_cute_moe_down_fp8"),
    ("kestrel_kernels", "kestrel_moe", "invoke_cute_moe_up"),
    ("kestrel_kernels", "kestrel_moe", "invoke_cute_moe_up_fp8"),
    ("kestrel_kernels.activation", "kestrel_moe", "gelu_residual"),
    ("kestrel_kernels.flash_attn.cute", "kestrel_attention", "flash_attn_func"),
    ("kestrel_kernels.flash_attn.cute", "kestrel_attention", "flash_attn_varlen_func"),
    ("kestrel_kernels.fp8_quant", "kestrel_quant", "fp8_quant"),
    ("kestrel_kernels.fp8_quant_cute", "kestrel_quant", "fp8_quant"),
    ("kestrel_kernels.fused_linear_residual", "kestrel_moe", "fused_linear_residual"),
    ("kestrel_kernels.fused_mlp", "kestrel_moe", "fused_mlp"),
    ("kestrel_kernels.gelu_residual", "kestrel_moe", "gelu_residual"),
    ("kestrel_kernels.kv_cache_write", "kestrel_kvcache", "reshape_and_cache"),
    ("kestrel_kernels.layernorm_cuda", "kestrel_norm", "layer_norm"),
    ("kestrel_kernels.moe_align", "kestrel_moe", "moe_align_block_size"),
    ("kestrel_kernels.moe_sum", "kestrel_moe", "moe_sum"),
    ("kestrel_kernels.rotary_embedding", "kestrel_rope", "rotary_embedding"),
    ("kestrel_kernels.sampling", "kestrel_sampling", "top_p_sampling_from_probs"),
    ("kestrel_kernels.tau_tail", "kestrel_attention", "tau_tail"),
    ("kestrel_kernels.topk", "kestrel_sampling", "topk_fwd"),
]


PROGRAM = f"""
import json, sys
before = set(sys.modules)
import kestrel_kernels
seen = {{"imported": sorted(set(sys.modules) - before)}}
for path in {sorted({path.removesuffix(".cute") for path, _, _ in PATHS_OF_0_2})}:
    eval(path)
for name in {FAMILIES}:
    getattr(kestrel_kernels, name)
from kestrel_kernels.info import collect
collect()
import torch
seen["gpu"] = torch.cuda.is_initialized()
seen["libraries"] = [line.rpartition("/")[2] for line in open("/proc/self/maps").read().split() if line.endswith(".so")]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def fresh_process() -> dict[str, Any]:
    """What a process sees that imports the namespace, every import path of 0.2 as an attribute, and every family."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_namespace_imports_neither_a_family_nor_torch(fresh_process) -> None:
    heavy = {name.partition(".")[0] for name in fresh_process["imported"]} - set(sys.stdlib_module_names)
    assert heavy == {"kestrel_kernels"}
    assert len(fresh_process["imported"]) < 40


def test_importing_every_family_and_info_load_no_binary_and_touch_no_gpu(fresh_process) -> None:
    assert not fresh_process["gpu"]
    assert fresh_process["libraries"]
    ours = {name for name in fresh_process["libraries"] if name.startswith("kestrel_") or "cute_dsl" in name}
    assert not ours


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_under_the_namespace_has_every_public_name(name: str) -> None:
    family = importlib.import_module(f"kestrel_{name}")
    there = getattr(kestrel_kernels, name)
    assert family.__all__
    for public in family.__all__:
        assert getattr(there, public) is getattr(family, public)


def test_from_import_of_an_op_is_the_op_itself() -> None:
    import kestrel_norm
    from kestrel_kernels.norm import rms_norm

    assert rms_norm is kestrel_norm.rms_norm


def test_the_namespace_lists_its_families_and_refuses_other_names() -> None:
    assert set(FAMILIES) <= set(dir(kestrel_kernels))
    with pytest.raises(AttributeError, match="no_such_family"):
        _ = kestrel_kernels.no_such_family


@pytest.mark.parametrize(("path", "family", "op"), PATHS_OF_0_2)
def test_an_import_path_of_0_2_leads_to_the_op(path: str, family: str, op: str) -> None:
    assert getattr(importlib.import_module(path), op) is getattr(importlib.import_module(family), op)
