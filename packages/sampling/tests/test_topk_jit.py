"""Kernels compiled on first use: with the DSL (extra ``[jit]``), for any architecture, and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kestrel_sampling
from kestrel_runtime import UnsupportedError, backend, cute
from kestrel_sampling.kernels.variants import VARIANTS, ListVariant, SelectVariant

VARIANT = ListVariant("bf16", 32, lanes=4, warps=1, threads=128)  # in no wheel
needs_dsl = pytest.mark.skipif(not cute.can_compile(), reason="nvidia-cutlass-dsl is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for compiled kernels; nothing is remembered before or after a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for remembered in (cute.compiled, cute._say_once):
        remembered.cache_clear()
    yield tmp_path
    cute.compiled.cache_clear()


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def assert_is_entry_point(function: object) -> None:
    """It checks its tensors and refuses those that are not on a GPU."""
    scores = torch.zeros(4, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"argument #0.*device"):
        function(scores, scores[:, :8], torch.zeros(4, 8, dtype=torch.int32), 0)  # type: ignore[operator]


@needs_dsl
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_a_kernel_is_compiled_once_and_found_on_disk_by_the_next_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    assert_is_entry_point(cute.compiled("kestrel_sampling", VARIANT, arch))
    (file,) = kept(cache)
    assert file.parent == cache / "kestrel-kernels" / "kestrel_sampling"
    assert file.name.startswith(f"{VARIANT.name}_sm{arch}-")
    cute.compiled.cache_clear()
    monkeypatch.setattr(cute, "_compile", None)
    assert_is_entry_point(cute.compiled("kestrel_sampling", VARIANT, arch))


@needs_dsl
def test_a_file_that_is_no_object_is_compiled_again(cache: Path) -> None:
    cute.compiled("kestrel_sampling", VARIANT, "90a")
    (file,) = kept(cache)
    whole = file.stat().st_size
    file.write_bytes(b"half a file")
    cute.compiled.cache_clear()
    with pytest.warns(RuntimeWarning, match="compiled again"):
        assert_is_entry_point(cute.compiled("kestrel_sampling", VARIANT, "90a"))
    assert file.stat().st_size == whole


@needs_dsl
def test_a_cache_that_cannot_be_written_costs_a_warning_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert_is_entry_point(cute.compiled("kestrel_sampling", VARIANT, "90a"))


@needs_dsl
def test_two_processes_may_compile_the_same(cache: Path) -> None:
    code = (
        "from kestrel_runtime import cute; from kestrel_sampling.kernels.variants import ListVariant;"
        f"cute.compiled('kestrel_sampling', {VARIANT!r}, '90a')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [
        subprocess.Popen([sys.executable, "-W", "error::RuntimeWarning", "-c", code], env=environment) for _ in "ab"
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert len(kept(cache)) == 1
    assert_is_entry_point(cute.compiled("kestrel_sampling", VARIANT, "90a"))


@needs_dsl
def test_what_is_kept_belongs_to_sources_variant_and_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ListVariant("bf16", 32, lanes=4, warps=1, threads=192)
    keys = [
        ("kestrel_sampling", VARIANT, "90a"),
        ("kestrel_sampling", other, "90a"),
        ("kestrel_sampling", VARIANT, "80"),
    ]
    found = [cute._digest(*key) for key in keys]
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"# one byte more")
    assert len({*found, cute._digest(*keys[0])}) == 4


def test_without_the_dsl_the_words_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "can_compile", lambda: False)
    with pytest.raises(UnsupportedError, match=r"kestrel-sampling\[jit\]"):
        cute.compiled("kestrel_sampling", VARIANT, "90a")


@pytest.mark.gpu
@needs_dsl
def test_a_gpu_runs_what_was_compiled_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    topk = sys.modules["kestrel_sampling.topk"]
    scores = torch.randn(100, 60, device="cuda").bfloat16()
    with backend("kernel"):
        expected = kestrel_sampling.topk_fwd(scores, 8)
        monkeypatch.setattr(topk, "_entry_points", {})
        monkeypatch.setattr(topk, "covering", lambda *_: ListVariant("bf16", 60, lanes=8, warps=1, threads=128))
        found = kestrel_sampling.topk_fwd(scores, 8)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]


@needs_dsl
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_sm_86_and_sm_89_run_the_kernel_of_sm_80(variant: ListVariant | SelectVariant) -> None:
    kernel, *others = (variant.kernel(arch)[0] for arch in ("80", "86", "89"))
    assert others == [kernel, kernel]
