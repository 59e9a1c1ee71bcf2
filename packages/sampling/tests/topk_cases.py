"""Scores for topk_fwd, each kind a way for an order to go wrong, and calls that it refuses."""

from __future__ import annotations

import torch

from kestrel_runtime.testing import (
    BadInput,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Every kernel is compiled for rows up to some N: here is the first length of each, the last one, and one short of it.
SIZES = [1, 2, 8, 9, 60, 64, 65, 111, 256, 257, 512, 1000, 1024, 1025, 2047, 2049, 4095, 4096]
BITS = {2: torch.int16, 4: torch.int32}


def fill(kind: str, rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Scores of one kind: each a way for an order to go wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator)
    if kind == "ties":
        x = (2 * x).round() / 2
    elif kind == "all-equal":
        x = torch.full((rows, n), 0.25)
    elif kind == "zeros":  # of both signs
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "denormal":
        x = x * torch.finfo(dtype).tiny / 4
    elif kind == "large":
        x = x * 1e4
    elif kind == "nan-and-inf":
        x = torch.where(x > 1, float("nan"), x)
        x = torch.where(x < -1, float("-inf"), x)
        x[:, n // 2] = float("inf")
        x[0] = float("nan")
    elif kind == "minus-inf":
        x = torch.full((rows, n), float("-inf"))
        x[:, n // 3] = float("nan")
    elif kind == "ascending":
        x = torch.arange(n).float().expand(rows, n) / n
    elif kind == "few-distinct":  # most of a row ties at the k-th place
        x = torch.where(x > 1.5, 2.0, torch.where(x > -1.5, 1.0, 0.0))
    else:
        assert kind == "random", kind
    x = x.to(dtype)
    if kind == "nan-and-inf":  # NaN of both signs and several payloads
        bits = x.view(BITS[x.element_size()])
        marks = torch.arange(n, dtype=bits.dtype) % 5
        marks = torch.where(marks % 2 == 1, marks | torch.iinfo(bits.dtype).min, marks)
        bits |= torch.where(x.isnan(), marks, 0)
    return x


KINDS = (
    "random",
    "ties",
    "all-equal",
    "zeros",
    "denormal",
    "large",
    "nan-and-inf",
    "minus-inf",
    "ascending",
    "few-distinct",
)


def ks(n: int) -> list[int]:
    return sorted({k for k in (1, 3, 8, 9, 50, 128) if k <= n} | {min(n, 128)})


def by_hand(row: list[float], k: int) -> list[int]:
    """Indices in topk_fwd's order, by Python's sort: numbers descending, NaN behind them, ties by index."""
    return sorted(range(len(row)), key=lambda i: (row[i] != row[i], -row[i] if row[i] == row[i] else 0.0, i))[:k]


def take(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The scores at the indices of each row, bit for bit (torch's gather of 16-bit NaN changes them)."""
    return scores.view(BITS[scores.itemsize]).gather(-1, indices.long()).view(scores.dtype)


BAD = [
    BadInput("k above the row length", "k", lambda: ((torch.zeros(2, 4), 5), {}), fragment="4"),
    BadInput("k of zero", "k", lambda: ((torch.zeros(2, 4), 0), {})),
    BadInput("negative k", "k", lambda: ((torch.zeros(2, 4), -1), {})),
    BadInput("k not an integer", "k", lambda: ((torch.zeros(2, 4), 2.5), {}), TypeError),
    BadInput("float64 scores", "scores", lambda: ((torch.zeros(2, 4, dtype=torch.float64), 2), {}), TypeError),
    BadInput("integer scores", "scores", lambda: ((torch.zeros(2, 4, dtype=torch.int32), 2), {}), TypeError),
    BadInput("a scalar", "scores", lambda: ((torch.zeros(()), 1), {})),
    BadInput("a transposed matrix", "scores", lambda: ((torch.zeros(4, 2).t(), 2), {}), fragment="stride"),
    BadInput("a strided 3-D tensor", "scores", lambda: ((torch.zeros(2, 3, 8)[..., ::2], 2), {}), fragment="stride"),
    BadInput("not a tensor", "scores", lambda: (([[1.0]], 1), {}), TypeError),
    BadInput("softmax as text", "softmax", lambda: ((torch.zeros(2, 4), 2), {"softmax": "no"}), TypeError, "True"),
    BadInput("rows without columns", "k", lambda: ((torch.zeros(3, 0), 1), {})),
]
