"""Shapes of record of fused_add_rms_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
from row_shapes import elements, matrices, sizes, vectors

import kestrel_norm
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled, peer

TARGETS = {
    "1x2048": 1.25,
    "16x4096": 1.29,
    "740x2048": 4.26,
    "2048x896": 4.91,
    "2048x1536": 7.59,
    "2048x2048": 9.74,
    "2048x3072": 14.0,
    "2048x4096": 18.3,
    "16384x4096": 131.0,
    "65536x8192": 1051.0,
}
TARGET_OF = {"16384x4096": "vllm", "65536x8192": "flashinfer"}


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    (weight,) = map(torch.ones_like, vectors(shape, 1))  # ones: calls in place keep the magnitude of x
    return [(one, torch.randn_like(one), weight) for one in matrices(shape, count)]


def set_bytes(shape: str) -> int:
    return 2 * elements(shape) * 2


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return 4 * rows * n * 2 + n * 2


def operations(shape: str) -> int:
    """Per element: the sum, a square and a sum, two products."""
    return 5 * elements(shape)


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").fused_add_rms_norm
    return lambda x, residual, weight: entry(x, residual, weight, 1e-6, 0.0)


def result(arguments: tuple[torch.Tensor, ...], returned: None) -> list[torch.Tensor]:
    return list(arguments[:2])


def torch_composition(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.rms_norm(residual, weight.shape, weight, 1e-6))


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": kestrel_norm.fused_add_rms_norm,
        "torch": torch_composition,
        "torch.compile": compiled(torch_composition, fullgraph=True, dynamic=False),
    }
    if flashinfer := peer("flashinfer.norm"):
        found["flashinfer"] = lambda x, residual, weight: flashinfer.fused_add_rmsnorm(x, residual, weight, 1e-6)
    if vllm := peer("vllm._custom_ops"):
        found["vllm"] = lambda x, residual, weight: vllm.fused_add_rms_norm(x, residual, weight, 1e-6)
    return found
