"""Shapes of record of layer_norm, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from row_shapes import elements, keeping, matrices, sizes, vectors

import kestrel_norm
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled, peer

TARGETS = {
    "729x1152": 2.01,
    "1458x1152": 2.87,
    "2916x1152": 4.59,
    "5832x1152": 8.03,
    "9477x1152": 12.3,
    "1x2048": 1.25,
    "16x2048": 1.25,
    "740x2048": 2.71,
}


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    weight, bias = vectors(shape, 2)
    return [(one, weight, bias, torch.empty_like(one), []) for one in matrices(shape, count)]


def set_bytes(shape: str) -> int:
    return elements(shape) * 2  # x alone, so that it is cold whatever is written


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return 2 * rows * n * 2 + 2 * n * 2


def operations(shape: str) -> int:
    """Per element: two sums of differences to a pivot, one of them squared; the difference, two products, a sum."""
    return 8 * elements(shape)


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").layer_norm
    return lambda x, weight, bias, out, _: entry(out, x, weight, bias, 1e-5)


def result(arguments: tuple[Any, ...], returned: torch.Tensor | None) -> list[torch.Tensor]:
    return [arguments[3] if returned is None else returned]


def torch_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": lambda x, weight, bias, out, _: kestrel_norm.layer_norm(x, weight, bias, out=out),
        "torch": keeping(torch_layer_norm),
        "torch.compile": keeping(compiled(torch_layer_norm, fullgraph=True, dynamic=False)),
    }
    wide = functools.lru_cache(2)(lambda vector: vector.float())  # some take weight and bias in float32
    if flashinfer := peer("flashinfer.norm"):
        found["flashinfer"] = keeping(
            lambda x, weight, bias, out: flashinfer.layernorm(x, wide(weight), wide(bias), 1e-5)
        )
    if quack := peer("quack.rmsnorm"):
        found["quack"] = keeping(lambda x, weight, bias, out: quack.layernorm_fwd(x, wide(weight), wide(bias), 1e-5))
    if liger := peer("liger_kernel.transformers.functional"):
        found["liger"] = keeping(lambda x, weight, bias, out: liger.liger_layer_norm(x, weight, bias, 1e-5))
    return found
