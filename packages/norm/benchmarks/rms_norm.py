"""Shapes of record of rms_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from row_shapes import elements, keeping, matrices, sizes, vectors

import kestrel_norm
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled, peer

TARGETS = {
    "1x2048": 1.25,
    "16x4096": 1.25,
    "740x2048": 2.71,
    "2048x896": 3.03,
    "2048x1536": 4.37,
    "2048x2048": 5.45,
    "2048x3072": 7.59,
    "2048x4096": 9.74,
    "16384x4096": 66.4,
    "65536x8192": 525.0,
}
TARGET_OF = {"16384x4096": "liger", "65536x8192": "quack"}


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    (weight,) = vectors(shape, 1)
    return [(one, weight, torch.empty_like(one), []) for one in matrices(shape, count)]


def set_bytes(shape: str) -> int:
    return elements(shape) * 2  # x alone, so that it is cold whatever is written


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return 2 * rows * n * 2 + n * 2


def operations(shape: str) -> int:
    """Per element: a square and a sum, two products."""
    return 4 * elements(shape)


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").rms_norm
    return lambda x, weight, out, _: entry(out, x, weight, 1e-6, 0.0)


def result(arguments: tuple[Any, ...], returned: torch.Tensor | None) -> list[torch.Tensor]:
    return [arguments[2] if returned is None else returned]


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": lambda x, weight, out, _: kestrel_norm.rms_norm(x, weight, out=out),
        "torch": keeping(torch_rms_norm),
        "torch.compile": keeping(compiled(torch_rms_norm, fullgraph=True, dynamic=False)),
    }
    if flashinfer := peer("flashinfer.norm"):
        found["flashinfer"] = lambda x, weight, out, _: flashinfer.rmsnorm(x, weight, 1e-6, out=out)
    if vllm := peer("vllm._custom_ops"):
        found["vllm"] = lambda x, weight, out, _: vllm.rms_norm(out, x, weight, 1e-6)
    if quack := peer("quack.rmsnorm"):
        found["quack"] = keeping(lambda x, weight, out: quack.rmsnorm(x, weight, eps=1e-6))
    if liger := peer("liger_kernel.transformers.functional"):
        found["liger"] = keeping(lambda x, weight, out: liger.liger_rms_norm(x, weight, 1e-6))
    return found
