"""Shapes of record of fused_experts with bf16 weights: tokens, experts, choices, Hd, I. Targets in us on one H200."""

from __future__ import annotations

import expert_layers as layers
from expert_layers import operations, result

__all__ = ["LAUNCHES", "TARGETS", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS = {
    "T1 E64 k8 h2048 i1024": 26.4,
    "T4 E64 k8 h2048 i1024": 83.4,
    "T8 E64 k8 h2048 i1024": 131.0,
    "T16 E64 k8 h2048 i1024": 176.0,
    "T32 E64 k8 h2048 i1024": 196.0,
    "T64 E64 k8 h2048 i1024": 199.0,
    "T128 E64 k8 h2048 i1024": 201.0,
    "T740 E64 k8 h2048 i1024": 204.92,
    "T2048 E64 k8 h2048 i1024": 316.912,
    "T8192 E64 k8 h2048 i1024": 1260.0,
    "T2 E64 k8 h2048 i1024": 48.3,
    "T256 E64 k8 h2048 i1024": 201.0,
    "T512 E64 k8 h2048 i1024": 202.0,
    "T1024 E64 k8 h2048 i1024": 212.0,
    "T4096 E64 k8 h2048 i1024": 650.0,
    "T16384 E64 k8 h2048 i1024": 2600.0,
    "T1 E8 k2 h4096 i14336": 174.0,
    "T1 E128 k8 h2048 i768": 20.7,
    "T2 E8 k2 h4096 i14336": 302.0,
    "T2 E128 k8 h2048 i768": 37.9,
    "T4 E8 k2 h4096 i14336": 471.0,
    "T4 E128 k8 h2048 i768": 69.2,
    "T8 E8 k2 h4096 i14336": 619.0,
    "T8 E128 k8 h2048 i768": 121.0,
    "T16 E8 k2 h4096 i14336": 680.0,
    "T16 E128 k8 h2048 i768": 192.0,
    "T32 E8 k2 h4096 i14336": 687.0,
    "T32 E128 k8 h2048 i768": 259.0,
    "T64 E8 k2 h4096 i14336": 688.0,
    "T64 E128 k8 h2048 i768": 292.0,
    "T128 E8 k2 h4096 i14336": 690.0,
    "T128 E128 k8 h2048 i768": 298.0,
    "T256 E8 k2 h4096 i14336": 691.0,
    "T256 E128 k8 h2048 i768": 299.0,
    "T1024 E8 k2 h4096 i14336": 1080.0,
    "T1024 E128 k8 h2048 i768": 308.0,
    "T4096 E8 k2 h4096 i14336": 4330.0,
    "T4096 E128 k8 h2048 i768": 496.0,
    "T16384 E8 k2 h4096 i14336": 17300.0,
    "T16384 E128 k8 h2048 i768": 1990.0,
    "T1 E32 k4 h2880 i2880": 50.8,
    "T4 E32 k4 h2880 i2880": 163.0,
    "T16 E32 k4 h2880 i2880": 344.0,
    "T64 E32 k4 h2880 i2880": 390.0,
    "T256 E32 k4 h2880 i2880": 393.0,
    "T1024 E32 k4 h2880 i2880": 403.0,
    "T4096 E32 k4 h2880 i2880": 1240.0,
    "T16384 E32 k4 h2880 i2880": 4980.0,
}
LAUNCHES = 1


def make(shape: str, count: int) -> list[tuple[layers.Argument, ...]]:
    return layers.make(shape, count, fp8=False)


def set_bytes(shape: str) -> int:
    return layers.weight_bytes(shape, 2)


def traffic(shape: str) -> int:
    return layers.weight_bytes(shape, 2) + layers.token_bytes(shape)


def candidates() -> dict[str, layers.Layer]:
    return layers.candidates(fp8=False)
