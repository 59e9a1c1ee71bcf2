"""Attention of many queries in float64, with the error that one rounding of weights and results may leave."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Exact(NamedTuple):
    """Of one sequence: out and bound [Lq, H, D], lse and its bound [H, Lq], in float64."""

    out: torch.Tensor
    lse: torch.Tensor
    bound: torch.Tensor
    lse_bound: torch.Tensor


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

    bound: a kernel rounds each weight and each result to the dtype, and computes the rest in float32, scores too.
    """
    dtype = dtype or q.dtype
    unit = torch.finfo(dtype).eps / 2
    how = {"causal": causal, "window_size": window_size, "softcap": softcap, "prefix_len": prefix_len}
    scores, v = _scores(q, k, v, softmax_scale=softmax_scale, exists=exists, keys=keys, **how)
    weights, lse = _weights(scores, sinks)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    terms = torch.einsum("hqk,khd->qhd", weights, v.abs())
    bound = unit * out.abs() + (unit + 2**-17) * terms + torch.finfo(dtype).tiny
    softmax_scale = abs(_scale(q, softmax_scale))
    of_score, _ = _scores(q.abs(), k.abs(), v, softmax_scale=softmax_scale, exists=exists, keys=keys)
    of_score = of_score.amax(-1).clamp(min=0) if len(k) else lse.new_zeros(lse.shape)
    return Exact(out, lse, bound, 2**-18 * (1 + lse.abs()) + 2**-25 * of_score)


def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    rounded: bool = True,
    **how: Any,
) -> Exact:
    """The same of e4m3 matrix products; q, k and v hold the values of codes, and results are bf16.

    rounded: weights are rounded as in the kernel, to e4m3 relative to 2^-8 times the largest one of the tiles so far;
    in heads of more than 64 to a power of two near that, so that splits do not matter. The bound is that of one weight
    that takes the other code, as wgmma keeps some 14 bits of its score. Else weights are exact, as in a call that
    splits keys, and the bound is that of all roundings.
    """
    scores, v = _scores(q, k, v, **how)
    weights, lse = _weights(scores, sinks)
    of_score, _ = _scores(q.abs(), k.abs(), v, **how | {"softcap": 0.0, "softmax_scale": abs(_scale(q, **how))})
    of_score = of_score.amax(-1).clamp(min=0) if len(k) else lse.new_zeros(lse.shape)
    used = _rounded_to_e4m3(scores, lse, integers=q.shape[2] > 64) if rounded else weights
    out = torch.einsum("hqk,khd->qhd", used, v)
    terms = torch.einsum("hqk,khd->qhd", weights, v.abs())
    spread = torch.einsum("hqk,khd->qhd", weights**2, v**2).sqrt()
    unit = torch.finfo(torch.bfloat16).eps / 2
    bound = unit * (out.abs() + terms) + (2**-3 if rounded else 2**-2) * spread + torch.finfo(torch.bfloat16).tiny
    return Exact(out, lse, bound, 2**-12 * of_score + 2**-18 * (1 + lse.abs()))


def _rounded_to_e4m3(scores: torch.Tensor, lse: torch.Tensor, integers: bool, key_tile: int = 128) -> torch.Tensor:
    """Normalised weights after their rounding. integers: bases are, and a largest score may exceed them by 1.75."""
    keys = scores.shape[-1]
    tiles = torch.nn.functional.pad(scores / math.log(2), (0, -keys % key_tile), value=-math.inf)
    tiles = tiles.unflatten(-1, (-1, key_tile))
    highest = tiles.amax(-1)
    bases = torch.full_like(highest, -math.inf)
    base = torch.full_like(lse, -math.inf)
    for n in range(highest.shape[-1]):
        moved = highest[..., n].round() if integers else highest[..., n]
        base = torch.where(highest[..., n] - base > (1.75 if integers else 0.0), moved, base)
        bases[..., n] = base
    bases = torch.where(bases == -math.inf, 0.0, bases)[..., None]
    exponent = 7 if integers else 8
    codes = torch.exp2(tiles - bases + exponent).float().to(torch.float8_e4m3fn).double()
    total = torch.where(lse == -math.inf, 0.0, lse)[..., None, None] / math.log(2)
    return (codes * torch.exp2(bases - exponent - total)).flatten(-2)[..., :keys]


def _scale(q: torch.Tensor, softmax_scale: float | None = None, **_: Any) -> float:
    return q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    prefix_len: int = 0,
    exists: torch.Tensor | None = None,
    keys: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [H, Lq, L], -inf for keys that a query does not see, and v for each query head."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if exists is None:
        exists = torch.ones(len(k), dtype=torch.bool, device=q.device)
    k, v = (torch.where(exists[:, None, None], x, 0).double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * _scale(q, softmax_scale)
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
    return torch.where(seen, scores, -math.inf), v


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised weights, and the LSE."""
    keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    return torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])[..., :keys], lse


def assert_exact(out: torch.Tensor, lse: torch.Tensor, exact: Exact) -> None:
    """Hold the results of one sequence, out [Lq, H, D] and lse [H, Lq], against float64."""
    error = (out.double() - exact.out).abs()
    worst = float((error / exact.bound).max()) if error.numel() else 0.0
    assert worst <= 1, f"an element is off by {worst:.2f} times its bound"
    empty = exact.lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    error = (lse.double() - exact.lse)[~empty].abs()
    assert bool((error <= exact.lse_bound[~empty]).all()), f"the LSE is off by {float(error.max()):.2e}"


def of_sequence(how: dict[str, Any], b: int) -> dict[str, Any]:
    """Arguments of exact_attention for sequence b of a call."""
    prefix = how.get("prefix_len", 0)
    return how | {"prefix_len": int(prefix[b]) if isinstance(prefix, torch.Tensor) else prefix}


def assert_exact_over_cache(call: Any, got: tuple[torch.Tensor, torch.Tensor], how: Any, scales: Any = None) -> None:
    """A call of decode_oracle over a cache whose codes are dequantised and rounded to q's dtype without ``scales``."""
    out, lse = got
    for b in range(len(call.lengths)):
        held = call.decoded(b, rounded=False)
        k, v = (x.to(call.q.dtype) for x in (held.keys, held.values))
        if scales:
            k, v = (x * scales[name].double()[:, None] for x, name in ((k, "k_scale"), (v, "v_scale")))
        assert_exact(out[b], lse[b], exact_attention(call.q[b], k, v, exists=held.exists, **of_sequence(how, b)))
