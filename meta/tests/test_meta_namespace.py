"""The namespace: lazy, complete, and with the import paths of kestrel-kernels 0.2."""

from __future__ import annotations

import importlib
import subprocess
import sys

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


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_namespace_imports_no_family_and_not_even_torch() -> None:
    program = "import sys, kestrel_kernels; print(sorted(m for m in sys.modules if 'kestrel' in m or m == 'torch'))"
    assert run(program).strip() == "['kestrel_kernels']"


def test_importing_the_namespace_takes_under_20_milliseconds() -> None:
    program = "import time; t = time.perf_counter(); import kestrel_kernels; print(time.perf_counter() - t)"
    assert min(float(run(program)) for _ in range(3)) < 0.020


def test_importing_every_family_loads_no_binary_and_touches_no_gpu() -> None:
    program = f"""
import kestrel_kernels, torch
for name in {FAMILIES}:
    getattr(kestrel_kernels, name)
assert not torch.cuda.is_initialized()
print(open("/proc/self/maps").read())
"""
    libraries = {line.rpartition("/")[2] for line in run(program).splitlines() if line.endswith(".so")}
    assert libraries
    assert not {name for name in libraries if name.startswith("kestrel_") or "cute_dsl" in name}


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


def test_the_import_paths_of_0_2_are_attributes_of_the_package_too() -> None:
    paths = sorted({path.removesuffix(".cute") for path, _, _ in PATHS_OF_0_2})
    run("import kestrel_kernels\n" + "\n".join(paths))
