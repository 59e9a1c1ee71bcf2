"""The gated activations with an FP8 result, one scale per row: the operand of an FP8 down projection."""

from __future__ import annotations

import torch

from kestrel_runtime import check, kernel_op

from . import _gated, reference
from ._checks import APPROXIMATIONS, check_gated_input


def _check(op: str, x: torch.Tensor, approximate: str = "none") -> None:
    check_gated_input(op, x)
    check.tensor(op, "x", x, ndim=2)
    check.choice(op, "approximate", approximate, APPROXIMATIONS)


def _check_gelu_residual_fp8(x: torch.Tensor, approximate: str = "none") -> None:
    _check("gelu_residual_fp8", x, approximate)


def _check_silu_and_mul_fp8(x: torch.Tensor) -> None:
    _check("silu_and_mul_fp8", x)


def _check_gelu_and_mul_fp8(x: torch.Tensor, approximate: str = "none") -> None:
    _check("gelu_and_mul_fp8", x, approximate)


@kernel_op(reference=reference.gelu_residual_fp8, check=_check_gelu_residual_fp8, kernel="cuda")
def gelu_residual_fp8(x: torch.Tensor, *, approximate: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """``GELU(h) * (g + 1)`` quantised to FP8 with one dynamic scale per row, in one pass.

    x: [T, 2F] bf16, fp16 or float32, any row stride; h = x[:, :F], g = x[:, F:]. approximate: "none" or "tanh".
    The activation is formed in float32 and quantised as kestrel_quant.fp8_quant does, with no rounding in between.

    Returns (q float8_e4m3fn [T, F], scale float32 [T, 1]), activation ≈ q * scale. A row does not depend on the batch.

    Raises ValueError or TypeError for a wrong dtype, rank, odd last dimension or unknown ``approximate``.
    Semantics: gelu_residual, then kestrel_quant.fp8_quant by row (vLLM's dynamic per-token scaled_fp8_quant).

    >>> q, scale = gelu_residual_fp8(torch.tensor([[100.0, 50.0, 0.0, 1.0]]))
    >>> q.float().tolist(), (q.float() * scale).tolist()
    ([[448.0, 448.0]], [[100.0, 100.0]])
    """
    return _gated.launch_fp8("gelu_residual", x, approximate)


@kernel_op(reference=reference.silu_and_mul_fp8, check=_check_silu_and_mul_fp8, kernel="cuda")
def silu_and_mul_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``SiLU(h) * g`` quantised to FP8 with one dynamic scale per row, in one pass.

    x: [T, 2F] bf16, fp16 or float32, any row stride; h = x[:, :F], g = x[:, F:].
    The activation is formed in float32 and quantised as kestrel_quant.fp8_quant does, with no rounding in between.

    Returns (q float8_e4m3fn [T, F], scale float32 [T, 1]), activation ≈ q * scale. A row does not depend on the batch.

    Raises ValueError or TypeError for a wrong dtype, rank or odd last dimension.
    Semantics: silu_and_mul, then kestrel_quant.fp8_quant by row (vLLM's dynamic per-token scaled_fp8_quant).

    >>> q, scale = silu_and_mul_fp8(torch.tensor([[100.0, 50.0, 1.0, 4.0]]))
    >>> q.float().tolist(), (q.float() * scale).tolist()
    ([[224.0, 448.0]], [[100.0, 200.0]])
    """
    return _gated.launch_fp8("silu_and_mul", x)


@kernel_op(reference=reference.gelu_and_mul_fp8, check=_check_gelu_and_mul_fp8, kernel="cuda")
def gelu_and_mul_fp8(x: torch.Tensor, *, approximate: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """``GELU(h) * g`` quantised to FP8 with one dynamic scale per row, in one pass.

    x: [T, 2F] bf16, fp16 or float32, any row stride; h = x[:, :F], g = x[:, F:]. approximate: "none" or "tanh".
    The activation is formed in float32 and quantised as kestrel_quant.fp8_quant does, with no rounding in between.

    Returns (q float8_e4m3fn [T, F], scale float32 [T, 1]), activation ≈ q * scale. A row does not depend on the batch.

    Raises ValueError or TypeError for a wrong dtype, rank, odd last dimension or unknown ``approximate``.
    Semantics: gelu_and_mul, then kestrel_quant.fp8_quant by row (vLLM's dynamic per-token scaled_fp8_quant).

    >>> q, scale = gelu_and_mul_fp8(torch.tensor([[100.0, 50.0, 1.0, 4.0]]))
    >>> q.float().tolist(), (q.float() * scale).tolist()
    ([[224.0, 448.0]], [[100.0, 200.0]])
    """
    return _gated.launch_fp8("gelu_and_mul", x, approximate)
