"""Dense layers, activation(x @ weight.T + bias) + residual: which kernel computes which case.

- one token, and 2 to 4 with few outputs and weights (:func:`choose`): gemv's kernel with an epilogue, but on an H100 or
  H200 for 2 to 4 where it has two waves of CTAs
- other layers of 16 bits on an H100 or H200: by :mod:`kestrel_moe._dense_plan`
- otherwise, and where it is faster: the vendor's product, with its own epilogue (VENDOR_EPILOGUE) or, by
  :func:`by_vendor`, with torch's activation or sum behind it
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kestrel_runtime import Binary, empty

from ._dense_plan import VENDOR, Kernel, Plan, choose_on_hopper
from ._rows import as_rows

kernels = Binary("kestrel_moe")
FEW_TOKENS = 4  # kGemvTokens of gemv.cuh
FEW_ELEMENTS = 2**24  # of the weight, for more than one token
_FEW_OUTPUTS = 4096  # for more than one token
# Of gemv's kernel in one wave on an H200, with 256 threads for each four rows and with 128; of more weights than
# _WAVE_ELEMENTS a second wave takes longer than the streaming kernel (results/h200_dense_choices.json).
_ONE_WAVE, _WAVE_ELEMENTS = (range(1057), range(2048, 2113)), 2**22
_MOST_TOKENS = 262140  # kMaxTokens of linear.h
_FEW = Plan(Kernel.FEW_TOKENS)


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def choose(x: torch.Tensor, outputs: int, width: int, activation: str = "none") -> Plan:
    """The plan of a layer for x [T, K]. Kernels refuse rows that are not aligned to 16 bytes."""
    tokens = x.shape[0]
    few = tokens <= 1 or (tokens <= FEW_TOKENS and outputs <= _FEW_OUTPUTS and outputs * width <= FEW_ELEMENTS)
    waves = tokens > 1 and outputs * width > _WAVE_ELEMENTS and not any(outputs in of for of in _ONE_WAVE)
    if few and not waves:
        return _FEW if width * x.element_size() % 16 == 0 else VENDOR
    if (width | outputs) % 8 or width == 0 or tokens > _MOST_TOKENS or x.element_size() != 2:
        covered = False
    else:
        covered = x.is_cuda and _is_hopper(x.get_device())
    if covered:
        return choose_on_hopper(tokens, outputs, width, activation)
    return _FEW if few and width * x.element_size() % 16 == 0 else VENDOR


def padded(width: int) -> int:
    """The row stride of a hidden layer: rows that begin with a line of 128 bytes are loaded faster."""
    return -(-width // 64) * 64


def by_vendor(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    *,
    out: torch.Tensor,
) -> None:
    """One layer as the vendor's product, then torch's activation and sum, each rounded to x's dtype."""
    product = out if residual is None else empty(x, x.dtype, *out.shape)
    with torch._C._DisableAutocast():
        if bias is None:
            torch.mm(x, weight.T, out=product)
        else:
            torch.addmm(bias, x, weight.T, out=product)
        if activation != "none":
            torch._C._nn.gelu_(product, approximate="tanh" if activation == "gelu_tanh" else "none")
        if residual is not None:
            torch.add(product, residual, out=out)


def prepared(
    x: torch.Tensor,
    outputs: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    check: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """x and the residual as [T, K] and [T, N], the result [..., N], and the tensor [T, N] that a kernel writes.

    ``check`` raises for errors that are invisible after flattening to two dimensions.
    """
    if out is None:
        out = empty(x, x.dtype, *x.shape[:-1], outputs)
    if x.ndim == 2:
        return x, residual, out, out
    if residual is not None and residual.shape != out.shape:
        check()
    rows, into = as_rows(x, out, check)
    return rows, None if residual is None else residual.reshape(into.shape), out, into
