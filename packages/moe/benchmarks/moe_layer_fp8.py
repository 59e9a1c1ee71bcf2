"""Shapes of record of fused_experts with FP8 weights: tokens, experts, choices, Hd and I. Targets in us on one H200."""

from __future__ import annotations

import expert_layers as layers
from expert_layers import operations, result

__all__ = ["LAUNCHES", "PRECISION", "TARGETS", "candidates", "make", "operations", "result", "set_bytes", "traffic"]

TARGETS = {
    "T1 E64 k8 h2048 i1024": 14.6,
    "T4 E64 k8 h2048 i1024": 42.9,
    "T8 E64 k8 h2048 i1024": 66.6,
    "T16 E64 k8 h2048 i1024": 89.4,
    "T32 E64 k8 h2048 i1024": 99.6,
    "T64 E64 k8 h2048 i1024": 101.0,
    "T128 E64 k8 h2048 i1024": 102.529,
    "T740 E64 k8 h2048 i1024": 108.0,
    "T2048 E64 k8 h2048 i1024": 184.0,
    "T8192 E64 k8 h2048 i1024": 737.0,
    "T2 E64 k8 h2048 i1024": 25.3,
    "T256 E64 k8 h2048 i1024": 104.0,
    "T512 E64 k8 h2048 i1024": 105.0,
    "T1024 E64 k8 h2048 i1024": 116.0,
    "T4096 E64 k8 h2048 i1024": 368.0,
    "T16384 E64 k8 h2048 i1024": 1470.0,
    "T1 E8 k2 h4096 i14336": 88.0,
    "T1 E128 k8 h2048 i768": 11.6,
    "T2 E8 k2 h4096 i14336": 152.0,
    "T2 E128 k8 h2048 i768": 20.2,
    "T4 E8 k2 h4096 i14336": 237.0,
    "T4 E128 k8 h2048 i768": 35.8,
    "T8 E8 k2 h4096 i14336": 311.0,
    "T8 E128 k8 h2048 i768": 61.6,
    "T16 E8 k2 h4096 i14336": 341.0,
    "T16 E128 k8 h2048 i768": 97.6,
    "T32 E8 k2 h4096 i14336": 345.0,
    "T32 E128 k8 h2048 i768": 131.0,
    "T64 E8 k2 h4096 i14336": 346.0,
    "T64 E128 k8 h2048 i768": 148.0,
    "T128 E8 k2 h4096 i14336": 349.0,
    "T128 E128 k8 h2048 i768": 152.0,
    "T256 E8 k2 h4096 i14336": 350.0,
    "T256 E128 k8 h2048 i768": 153.0,
    "T1024 E8 k2 h4096 i14336": 583.0,
    "T1024 E128 k8 h2048 i768": 163.0,
    "T4096 E8 k2 h4096 i14336": 2330.0,
    "T4096 E128 k8 h2048 i768": 286.0,
    "T16384 E8 k2 h4096 i14336": 9310.0,
    "T16384 E128 k8 h2048 i768": 1150.0,
    "T1 E256 k8 h7168 i2048": 88.0,
    "T2 E256 k8 h7168 i2048": 171.0,
    "T4 E256 k8 h7168 i2048": 329.0,
    "T8 E256 k8 h7168 i2048": 617.0,
    "T16 E256 k8 h7168 i2048": 1090.0,
    "T32 E256 k8 h7168 i2048": 1750.0,
    "T64 E256 k8 h7168 i2048": 2380.0,
    "T128 E256 k8 h7168 i2048": 2700.0,
    "T256 E256 k8 h7168 i2048": 2750.0,
    "T1024 E256 k8 h7168 i2048": 2820.0,
    "T4096 E256 k8 h7168 i2048": 3070.0,
    "T16384 E256 k8 h7168 i2048": 9750.0,
    "T1 E128 k4 h2880 i2880": 26.6,
    "T4 E128 k4 h2880 i2880": 94.7,
    "T16 E128 k4 h2880 i2880": 311.0,
    "T64 E128 k4 h2880 i2880": 676.0,
    "T256 E128 k4 h2880 i2880": 780.0,
    "T1024 E128 k4 h2880 i2880": 793.0,
    "T4096 E128 k4 h2880 i2880": 878.0,
    "T16384 E128 k4 h2880 i2880": 2730.0,
}
PRECISION = "fp8"
TOLERANCE = 0.05
LAUNCHES = 1


def make(shape: str, count: int) -> list[tuple[layers.Argument, ...]]:
    return layers.make(shape, count, fp8=True)


def set_bytes(shape: str) -> int:
    return layers.weight_bytes(shape, 1)


def traffic(shape: str) -> int:
    return layers.weight_bytes(shape, 1) + layers.token_bytes(shape)


def candidates() -> dict[str, layers.Layer]:
    return layers.candidates(fp8=True)
