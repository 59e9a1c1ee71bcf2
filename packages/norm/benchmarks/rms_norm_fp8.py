"""Shapes of rms_norm_fp8, bf16 to e4m3: rows x N, of those of rms_norm, and long rows; no targets are set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from row_shapes import Written, elements, matrices, sizes, vectors

import kestrel_norm
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled, peer

TARGETS: dict[str, float | None] = {
    "1x2048": None,
    "16x4096": None,
    "740x2048": None,
    "2048x2048": None,
    "2048x4096": None,
    "16384x4096": None,
    "512x18944": None,
    "16x65536": None,
}
TOLERANCE = 0.05  # codes are 6 to 12 % apart, and peers round intermediate results


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    (weight,) = vectors(shape, 1)
    return [(one, weight) for one in matrices(shape, count)]


def set_bytes(shape: str) -> int:
    return elements(shape) * 2  # x alone, so that it is cold whatever is written


def traffic(shape: str) -> int:
    """x, the codes, the scales and the weight."""
    rows, n = sizes(shape)
    return rows * n * 3 + rows * 4 + n * 2


def operations(shape: str) -> int:
    """Per element: those of rms_norm, the largest magnitude, a quotient."""
    return 6 * elements(shape)


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_norm").rms_norm_fp8
    written = Written()
    return lambda x, weight: entry(*written.like(x), x, weight, 1e-6, 0.0, None)


def result(arguments: tuple[torch.Tensor, ...], returned: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """The dequantised values: codes of two implementations may differ by one."""
    codes, scales = returned
    return [codes.float() * scales]


def torch_composition(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6).float()
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (y / scale).to(torch.float8_e4m3fn), scale


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": kestrel_norm.rms_norm_fp8,
        "torch": torch_composition,
        "torch.compile": compiled(torch_composition, fullgraph=True, dynamic=False),
    }
    if vllm := peer("vllm._custom_ops"):
        found["vllm"] = lambda x, weight: vllm.rms_norm_dynamic_per_token_quant(x, weight, 1e-6, torch.float8_e4m3fn)
    return found
