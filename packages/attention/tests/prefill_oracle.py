"""Attention of many queries in float64, with the error that one rounding of weights and results may leave."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Exact(NamedTuple):
    """Of one sequence: out and bound [Lq, H, D], lse [H, Lq], in float64."""

    out: torch.Tensor
    lse: torch.Tensor
    bound: torch.Tensor


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    prefix_len: int = 0,
    sinks: torch.Tensor | None = None,
    exists: torch.Tensor | None = None,
    keys: int | None = None,
    dtype: torch.dtype | None = None,
) -> Exact:
    """One sequence: q [Lq, H, D], k and v [L, Hk, D]. exists [L]; keys: their number for positions, default L.
    dtype: of weights and results, default q's.

    bound: a kernel rounds each weight and each result to the dtype, and computes the rest in float32.
    """
    dtype = dtype or q.dtype
    unit = torch.finfo(dtype).eps / 2
    heads, kv_heads = q.shape[1], k.shape[1]
    if exists is None:
        exists = torch.ones(len(k), dtype=torch.bool, device=q.device)
    k, v = (torch.where(exists[:, None, None], x, 0).double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(k), device=q.device)
    position = (len(k) if keys is None else keys) - len(q) + torch.arange(len(q), device=q.device)[:, None]
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= at >= position - left
    if right >= 0:
        seen &= at <= position + right
    seen = (seen | (at < prefix_len)) & exists
    scores = torch.where(seen, scores, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])[..., : len(k)]
    out = torch.einsum("hqk,khd->qhd", weights, v)
    terms = torch.einsum("hqk,khd->qhd", weights, v.abs())
    return Exact(out, lse, unit * out.abs() + (unit + 2**-17) * terms + torch.finfo(dtype).tiny)


def assert_exact(out: torch.Tensor, lse: torch.Tensor, exact: Exact) -> None:
    """Hold the results of one sequence, out [Lq, H, D] and lse [H, Lq], against float64."""
    error = (out.double() - exact.out).abs()
    worst = float((error / exact.bound).max()) if error.numel() else 0.0
    assert worst <= 1, f"an element is off by {worst:.2f} times its bound"
    empty = exact.lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    error = (lse.double() - exact.lse)[~empty].abs()
    assert bool((error <= 2**-18 * (1 + exact.lse[~empty].abs())).all()), f"the LSE is off by {float(error.max()):.2e}"


def of_sequence(how: dict[str, Any], b: int) -> dict[str, Any]:
    """Arguments of exact_attention for sequence b of a call."""
    prefix = how.get("prefix_len", 0)
    return how | {"prefix_len": int(prefix[b]) if isinstance(prefix, torch.Tensor) else prefix}
