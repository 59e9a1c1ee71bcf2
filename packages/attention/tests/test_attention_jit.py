"""Which kernel a head dimension finds: in the wheel, compiled on first use with the DSL (extra ``[jit]``), or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kestrel_attention.kernels.dtypes import DTYPES
from kestrel_attention.kernels.variants import ARCHS, NAMED, compilable, covering
from kestrel_runtime import cute

CODES = ("e4m3", "int8", "e5m2", "int4")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", ["same", *CODES])
@pytest.mark.parametrize("size", [16, 64, 80, 128, 160, 256, 512])
def test_a_variant_that_is_found_computes_the_whole_head(dtype: str, cache: str, size: int) -> None:
    for variant in (*covering(dtype, cache, size), *compilable(dtype, cache, size)):
        assert variant.cache == cache
        assert variant.head_dim == size or (variant.padded and variant.head_dim > size)


@pytest.mark.parametrize("cache", ["int8", "e5m2"])
def test_other_codes_of_8_bits_lack_no_head_size_up_to_256(cache: str) -> None:
    for size in range(16, 257, 16):
        assert covering("bf16", cache, size) or compilable("bf16", cache, size)
    assert compilable("bf16", cache, 272) == compilable("bf16", cache, 512) == ()


@pytest.mark.skipif(not cute.can_compile(), reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize("name", [name for name, variant in NAMED.items() if "80" in getattr(variant, "archs", ARCHS)])
def test_sm_86_and_sm_89_run_the_kernel_of_sm_80_unless_it_converts_fp8(name: str) -> None:
    kernels = {arch: NAMED[name].kernel(arch)[0] for arch in ("80", "86", "89")}
    assert kernels["86"] == kernels["80"]
    assert (kernels["89"] != kernels["80"]) is getattr(NAMED[name], "converts_fp8", False)


@pytest.mark.skipif(not cute.can_compile(), reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize(("cache", "size", "arch"), [("int8", 80, "90a"), ("int8", 80, "80"), ("e5m2", 256, "90a")])
def test_what_the_table_lacks_compiles_for_any_architecture(
    cache: str, size: int, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (variant,) = compilable("bf16", cache, size)
    launch = cute.compiled("kestrel_attention", variant, arch)
    (kept,) = (path.name for path in tmp_path.rglob("*.o"))
    assert kept.startswith(f"{variant.name}_sm{arch}-")
    with pytest.raises(TypeError, match=r"Expects \d+ parameters"):
        launch(torch.zeros(1, 1, 1, size).bfloat16())
    cute.compiled.cache_clear()
