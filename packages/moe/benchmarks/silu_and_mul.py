"""Shapes of record of silu_and_mul, bf16: rows x 2 x F. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gated_shapes import entry_point, ours_and_torch, result, set_bytes, sizes, traffic
from gated_shapes import make as rows_and_results

import kestrel_moe
from kestrel_runtime.bench import peer

__all__ = ["TARGETS", "bare", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS = {
    "2048x2x4096": 13.3,
    "2048x2x8192": 25.2,
    "2048x2x11008": 33.8,
    "2048x2x14336": 43.4,
    "2048x2x18944": 57.3,
}
TARGET_OF = dict.fromkeys(TARGETS, "flashinfer")


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    """x, the buffer of the result, and the two halves of x as separate tensors for peers that take them so."""
    return [(x, out, *(half.contiguous() for half in x.chunk(2, -1))) for x, out in rows_and_results(shape, count)]


def operations(shape: str) -> int:
    """About six per element: an exponential, a reciprocal, products."""
    rows, width = sizes(shape)
    return 6 * rows * width // 2


def bare() -> Callable[..., object]:
    return entry_point(silu=True, shift=0.0)


def candidates() -> dict[str, Callable[..., object]]:
    found = ours_and_torch(kestrel_moe.silu_and_mul, torch.nn.functional.silu, shift=0.0)
    if flashinfer := peer("flashinfer.activation"):
        found["flashinfer"] = lambda x, out, *_: flashinfer.silu_and_mul(x, out)
    if peer("vllm._custom_ops"):
        found["vllm"] = lambda x, out, *_: torch.ops._C.silu_and_mul(out, x)
    if liger := peer("liger_kernel.transformers.functional"):
        found["liger"] = lambda x, out, h, g: liger.liger_swiglu(h, g)
    return found
