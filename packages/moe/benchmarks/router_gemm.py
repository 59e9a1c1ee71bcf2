"""Shapes of router_gemm, bf16: tokens x Hd -> E. The peer is the vendor's GEMM with a cast to float32.

The shapes of record, then the gates of DeepSeek-V3, gpt-oss, Mixtral and Qwen3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import kestrel_moe
from kestrel_moe import linear
from kestrel_runtime import Binary

GATES = ("7168->256", "2880->128", "4096->8", "2048->128")
TARGETS = dict.fromkeys(
    [f"{tokens}x2048->64" for tokens in (1, 4, 16, 64, 256, 740)]
    + [f"{tokens}x{gate}" for gate in GATES for tokens in (1, 16, 64, 256)]
)


def sizes(shape: str) -> tuple[int, int, int]:
    left, experts = shape.split("->")
    tokens, width = left.split("x")
    return int(tokens), int(width), int(experts)


def make(shape: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    tokens, width, experts = sizes(shape)
    sets = []
    for _ in range(count):
        x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(experts, width, dtype=torch.bfloat16, device="cuda")
        sets.append((x, weight, torch.empty(tokens, experts, device="cuda")))
    return sets


def set_bytes(shape: str) -> int:
    tokens, width, experts = sizes(shape)
    return 2 * width * (tokens + experts)


def traffic(shape: str) -> int:
    tokens, width, experts = sizes(shape)
    return 2 * width * (tokens + experts) + 4 * tokens * experts


def operations(shape: str) -> int:
    tokens, width, experts = sizes(shape)
    return 2 * tokens * width * experts


def bare() -> Callable[..., object]:
    entry = Binary("kestrel_moe").router_gemm
    return lambda x, weight, out: entry(out, x, weight, linear._router_cluster(x.shape[1]))


def result(arguments: tuple[torch.Tensor, ...], returned: torch.Tensor) -> list[torch.Tensor]:
    return [returned]


def candidates() -> dict[str, Callable[..., object]]:
    return {
        "kestrel": lambda x, weight, out: kestrel_moe.router_gemm(x, weight, out=out),
        "torch": lambda x, weight, out: torch.mm(x, weight.T).float(),
        "torch.mm float32": lambda x, weight, out: torch.mm(x, weight.T, out_dtype=torch.float32, out=out),
    }
