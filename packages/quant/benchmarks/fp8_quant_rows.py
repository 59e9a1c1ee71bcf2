"""Shapes of record of fp8_quant per row, bf16: rows x N. Targets in us on one H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kestrel_quant
from kestrel_quant import reference
from kestrel_runtime import Binary
from kestrel_runtime.bench import compiled, peer

TARGETS = {
    "8x1024": 1.25,
    "8x2048": 1.25,
    "32x1024": 1.25,
    "32x2048": 1.25,
    "128x1024": 1.26,
    "128x2048": 1.36,
    "5920x1024": 5.81,
    "5920x2048": 10.5,
    "65536x1024": 52.7,
    "65536x2048": 104.0,
}
TOLERANCE = 0.05  # adjacent codes differ by 6 to 12 %


def sizes(shape: str) -> tuple[int, int]:
    rows, n = shape.split("x")
    return int(rows), int(n)


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """x; what keeps a result until the set comes round again, so that it is as cold as x; codes and scales."""
    rows, n = sizes(shape)
    x = [torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    q = torch.empty(count, rows, n, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(count, rows, 1, device="cuda")
    return [(x[i], [None], q[i], scale[i]) for i in range(count)]


def set_bytes(shape: str) -> int:
    rows, n = sizes(shape)
    return rows * n * 2  # x alone: that it is cold must not depend on what is written


def traffic(shape: str) -> int:
    rows, n = sizes(shape)
    return rows * (3 * n + 4)


def operations(shape: str) -> int:
    """Per element: a comparison and a quotient."""
    rows, n = sizes(shape)
    return 2 * rows * n


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_quant").fp8_quant
    return lambda x, kept, q, scale: entry(q, scale, None, x, "row", 128, None, False)


def result(arguments: tuple[Any, ...], returned: None) -> list[torch.Tensor]:
    """The values of codes and scales; peers may round to the adjacent code."""
    codes, scales = arguments[1][0]
    return [codes.float() * scales]


def keeping(op: Callable[[torch.Tensor], object]) -> Callable[..., None]:
    def call(x: torch.Tensor, kept: list[object], *_: object) -> None:
        kept[0] = op(x)

    return call


def candidates() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "kestrel": keeping(kestrel_quant.fp8_quant),
        "torch": keeping(reference.fp8_quant),
        "torch.compile": keeping(compiled(reference.fp8_quant, fullgraph=True, dynamic=False)),
    }
    if vllm := peer("vllm._custom_ops"):
        found["vllm"] = keeping(lambda x: vllm.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    return found
