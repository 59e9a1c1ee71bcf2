"""The feed-forward of a decode step of one sequence with 4-bit weights, in one launch."""

from __future__ import annotations

import torch

from kestrel_runtime import UnsupportedError, check, empty, kernel_op

from . import reference
from ._checks import check_weight_parts, check_x_and_weight
from ._launch import kernels
from .w4a16 import W4Weight
from .w4a16_token import ACTIVATIONS

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]


def w4a16_token_mlp(
    x: torch.Tensor,
    gate_up: W4Weight,
    down: W4Weight,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
    activation: str = "silu_and_mul",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    attention: torch.Tensor | None = None,
    attention_weight: W4Weight | None = None,
    attention_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The part of a decoder layer behind its attention, for one token: ``x + down(act(gate_up(norm(x))))``.

    x: [..., K] of the dtype the weights were packed for (bf16, fp16 or float32), the residual stream. gate_up: [2 I, K],
    the activated half first. down: [K, I]. norm_weight: [K] in x's dtype: x / sqrt(mean(x^2) + norm_eps) * (norm_weight
    + norm_weight_bias). gate_up_bias: [2 I], down_bias: [K], in x's dtype.
    activation: "silu_and_mul", "gelu_and_mul" or "gelu_tanh_and_mul".
    attention: [..., J] in x's dtype: ``attention @ attention_weight.T + attention_bias`` is added to x first.
        attention_weight: [K, J]. attention_bias: [K] or None.

    Returns [..., K] in x's dtype, in ``out`` if it is given; ``out`` may be ``x`` and may not overlap other inputs.
    *Constant*: weights, biases, norm_weight. The result has the bits of two or three calls of :func:`w4a16_token`, and
    what that kernel takes this one takes: one token, no permutation. Where a grid of the whole GPU cannot run at once
    there are as many launches.

    Raises ValueError or TypeError for a wrong dtype, shape, name or device. Semantics: Llama's decoder layer.

    >>> import torch
    >>> from kestrel_quant import pack_w4
    >>> gate_up = pack_w4(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 7.0], [7.0, 0.0]]), group_size=2)
    >>> down = pack_w4(torch.tensor([[7.0, 0.0], [0.0, 7.0]]), group_size=2)
    >>> w4a16_token_mlp(torch.tensor([1.0, 1.0]), gate_up, down, torch.ones(2), norm_eps=0.0)  # 1 + 49 silu(1), 1
    tensor([36.8219,  1.0000])
    """
    named = {"gate_up": gate_up, "down": down}
    if attention is not None or attention_weight is not None:
        named["attention_weight"] = attention_weight
    for name, weight in named.items():
        if not isinstance(weight, W4Weight):
            check.fail("w4a16_token_mlp", name, "a W4Weight (see pack_w4)", type(weight).__name__, TypeError)
    up, behind = _parts(gate_up), (None, None, None, None, 0)
    if attention_weight is not None:
        if attention is None:
            check.fail("w4a16_token_mlp", "attention", "a tensor, as there is an attention_weight", "None", TypeError)
        behind = _parts(attention_weight)
    biases, norm = (gate_up_bias, down_bias), (norm_eps, norm_weight_bias)
    return _w4a16_token_mlp(
        x, *up, *_parts(down), norm_weight, *biases, *norm, activation, attention, *behind, attention_bias, out=out
    )


def _parts(w: W4Weight) -> _Parts:
    return w.codes, w.scales, w.zeros, w.permutation, w.group_size


def _check_w4a16_token_mlp(
    x: torch.Tensor,
    up_codes: torch.Tensor,
    up_scales: torch.Tensor,
    up_zeros: torch.Tensor | None,
    up_permutation: torch.Tensor | None,
    up_group_size: int,
    down_codes: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    down_permutation: torch.Tensor | None,
    down_group_size: int,
    norm_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
    activation: str = "silu_and_mul",
    attention: torch.Tensor | None = None,
    attention_codes: torch.Tensor | None = None,
    attention_scales: torch.Tensor | None = None,
    attention_zeros: torch.Tensor | None = None,
    attention_permutation: torch.Tensor | None = None,
    attention_group_size: int = 0,
    attention_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    op = "w4a16_token_mlp"
    up = (up_codes, up_scales, up_zeros, up_permutation)
    down = (down_codes, down_scales, down_zeros, down_permutation)
    rows, columns = check_x_and_weight(op, x, *up, up_group_size, name="gate_up")
    if rows % 2:
        check.fail(op, "gate_up", "an even number of rows", rows)
    found = check_weight_parts(op, "down", *down, down_group_size)
    if found != (columns, rows // 2):
        check.fail(op, "down", f"shape {(columns, rows // 2)}", f"shape {found}")
    check.same(op, "dtype", down=down_scales, x=x)
    vectors = [("gate_up_bias", up_bias, rows), ("down_bias", down_bias, columns)]
    behind = (attention_codes, attention_scales, attention_zeros, attention_permutation)
    if attention is not None and attention_codes is not None and attention_scales is not None:
        weight = (attention_codes, attention_scales, attention_zeros, attention_permutation, attention_group_size)
        check.tensor(op, "attention", attention, dtype=x.dtype)
        found = check_x_and_weight(op, attention, *weight, x_name="attention", name="attention_weight")
        if found[0] != columns:
            check.fail(op, "attention_weight", f"{columns} rows", found[0])
        check.shape(op, "attention", attention, (*x.shape[:-1], found[1]))
        vectors.append(("attention_bias", attention_bias, columns))
    for name, vector, size in (("norm_weight", norm_weight, columns), *vectors):
        if vector is not None or name == "norm_weight":
            check.tensor(op, name, vector, dtype=x.dtype, last_contiguous=True)
            check.shape(op, name, vector, (size,))
    check.number(op, "norm_eps", norm_eps, minimum=0)
    check.number(op, "norm_weight_bias", norm_weight_bias)
    check.choice(op, "activation", activation, ACTIVATIONS[1:])
    if out is not None:
        check.tensor(op, "out", out, dtype=x.dtype, last_contiguous=True)
        check.shape(op, "out", out, x.shape)
        check.disjoint(op, "out", out)
    for name, parts in (("gate_up", up), ("down", down), ("attention_weight", behind)):
        for part in parts:
            check.same(op, "device", **{"x": x, name: part})
    named = {"norm_weight": norm_weight, "gate_up_bias": up_bias, "down_bias": down_bias}
    check.same(op, "device", x=x, **named, attention=attention, attention_bias=attention_bias, out=out)


@kernel_op(
    reference=reference.w4a16_token_mlp,
    check=_check_w4a16_token_mlp,
    kernel="cuda",
    out_may_be=("x",),
    public="w4a16_token_mlp",
)
def _w4a16_token_mlp(
    x: torch.Tensor,
    up_codes: torch.Tensor,
    up_scales: torch.Tensor,
    up_zeros: torch.Tensor | None,
    up_permutation: torch.Tensor | None,
    up_group_size: int,
    down_codes: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    down_permutation: torch.Tensor | None,
    down_group_size: int,
    norm_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_bias: float = 0.0,
    activation: str = "silu_and_mul",
    attention: torch.Tensor | None = None,
    attention_codes: torch.Tensor | None = None,
    attention_scales: torch.Tensor | None = None,
    attention_zeros: torch.Tensor | None = None,
    attention_permutation: torch.Tensor | None = None,
    attention_group_size: int = 0,
    attention_bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """w4a16_token_mlp on the parts of its weights."""
    if up_permutation is not None or down_permutation is not None or attention_permutation is not None:
        raise UnsupportedError("columns in another order")
    result = empty(x, x.dtype, *x.shape) if out is None else out
    into = result
    if x.ndim != 2:
        tokens = x.shape[:-1].numel()
        if tokens > 1:
            raise UnsupportedError("more than one token")
        _check_w4a16_token_mlp(
            x,
            up_codes,
            up_scales,
            up_zeros,
            up_permutation,
            up_group_size,
            down_codes,
            down_scales,
            down_zeros,
            down_permutation,
            down_group_size,
            norm_weight,
            up_bias,
            down_bias,
            norm_eps,
            norm_weight_bias,
            activation,
            attention,
            attention_codes,
            attention_scales,
            attention_zeros,
            attention_permutation,
            attention_group_size,
            attention_bias,
            out,
        )
        x, into = x.reshape(tokens, x.shape[-1]), result.view(tokens, x.shape[-1])
        attention = None if attention is None else attention.reshape(tokens, attention.shape[-1])
    up, down = (up_codes, up_scales, up_zeros, up_group_size), (down_codes, down_scales, down_zeros, down_group_size)
    behind = (attention_codes, attention_scales, attention_zeros, attention_group_size, attention_bias)
    options = (norm_weight, up_bias, down_bias, norm_eps, norm_weight_bias, activation)
    gates = empty(x, x.dtype, x.shape[0], up_scales.shape[1] // 2)
    kernels.w4a16_token_mlp(into, gates, x, *up, *down, *options, attention, *behind)
    return result
