"""What the installed distributions declare."""

from __future__ import annotations

import importlib.metadata

import pytest

import kestrel_kernels

FAMILIES = ["attention", "kvcache", "moe", "norm", "quant", "rope", "sampling"]
DISTRIBUTIONS = ["kestrel-kernels", "kestrel-runtime", *(f"kestrel-{name}" for name in FAMILIES)]


def metadata(distribution: str) -> importlib.metadata.PackageMetadata:
    try:
        return importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} runs from its sources")


def requirements(distribution: str) -> list[str]:
    return [value.replace(" ", "") for value in metadata(distribution).get_all("Requires-Dist") or []]


def test_the_meta_package_pins_every_family_to_its_own_version() -> None:
    pins = {f"kestrel-{name}=={kestrel_kernels.__version__}" for name in ["runtime", *FAMILIES]}
    assert pins <= set(requirements("kestrel-kernels"))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_sibling_is_always_pinned_to_one_version(distribution: str) -> None:
    siblings = [each for each in requirements(distribution) if each.startswith("kestrel-")]
    assert all(each.endswith(f"=={kestrel_kernels.__version__}") for each in siblings), siblings


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_distribution_can_be_uploaded_by_mistake(distribution: str) -> None:
    assert "Private :: Do Not Upload" in (metadata(distribution).get_all("Classifier") or [])
    assert metadata(distribution)["Version"] == kestrel_kernels.__version__
