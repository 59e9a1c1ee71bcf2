"""The other quantisations and their inverses, bf16: case, rows x N. The aim is 10 % above the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kestrel_quant
from kestrel_quant import reference


@dataclass(frozen=True)
class Case:
    """One op; the bits of an element that it reads and writes."""

    ours: Callable[..., Any]
    torch: Callable[..., Any]
    read: float
    written: float
    arguments: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda x: (x,)


SCALE = 8 * 4 / 128  # bits of a scale per element of its group
CASES = {
    "fp8 group": Case(
        lambda x: kestrel_quant.fp8_quant(x, granularity="group"),
        lambda x: reference.fp8_quant(x, "group"),
        16,
        8 + SCALE,
    ),
    "fp8 tensor": Case(
        lambda x: kestrel_quant.fp8_quant(x, granularity="tensor"), lambda x: reference.fp8_quant(x, "tensor"), 16, 8
    ),
    "fp8 given": Case(
        kestrel_quant.fp8_quant,
        lambda x, scale: reference.fp8_quant_static(x, scale),
        16,
        8,
        lambda x: (x, torch.full((1,), 0.01, device="cuda")),
    ),
    "int8 row": Case(kestrel_quant.int8_quant, reference.int8_quant, 16, 8),
    "int8 tensor": Case(
        lambda x: kestrel_quant.int8_quant(x, granularity="tensor"), lambda x: reference.int8_quant(x, "tensor"), 16, 8
    ),
    "int4 group": Case(kestrel_quant.int4_quant, reference.int4_quant, 16, 4 + SCALE),
    "fp8 row back": Case(kestrel_quant.fp8_dequant, reference.fp8_dequant, 8, 16, lambda x: kestrel_quant.fp8_quant(x)),
    "fp8 group back": Case(
        kestrel_quant.fp8_dequant,
        reference.fp8_dequant,
        8 + SCALE,
        16,
        lambda x: kestrel_quant.fp8_quant(x, granularity="group"),
    ),
    "int8 row back": Case(
        kestrel_quant.int8_dequant, reference.int8_dequant, 8, 16, lambda x: kestrel_quant.int8_quant(x)
    ),
    "int4 group back": Case(
        kestrel_quant.int4_dequant, reference.int4_dequant, 4 + SCALE, 16, lambda x: kestrel_quant.int4_quant(x)
    ),
}
TARGETS = dict.fromkeys([f"{case} {shape}" for case in CASES for shape in ("32x2048", "740x2048", "5920x2048")])


def sizes(shape: str) -> tuple[Case, int, int]:
    case, _, size = shape.rpartition(" ")
    rows, n = size.split("x")
    return CASES[case], int(rows), int(n)


def make(shape: str, count: int) -> list[tuple[Any, ...]]:
    """The case; what keeps a result until the set comes round again, so that it is as cold as x; arguments."""
    case, rows, n = sizes(shape)
    x = (torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(count))
    return [(case, [None], *case.arguments(one)) for one in x]


def set_bytes(shape: str) -> int:
    case, rows, n = sizes(shape)
    return int(rows * n * case.read / 8)


def traffic(shape: str) -> int:
    case, rows, n = sizes(shape)
    return int(rows * n * (case.read + case.written) / 8)


def operations(shape: str) -> int:
    _, rows, n = sizes(shape)
    return 2 * rows * n


def ours(case: Case, kept: list[Any], *arguments: torch.Tensor) -> None:
    kept[0] = case.ours(*arguments)


def by_torch(case: Case, kept: list[Any], *arguments: torch.Tensor) -> None:
    kept[0] = case.torch(*arguments)


def candidates() -> dict[str, Callable[..., object]]:
    return {"kestrel": ours, "torch": by_torch}
