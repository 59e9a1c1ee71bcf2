"""The C++ entry points of the dense ops refuse bad tensors in the words of the Python checks, the device last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kestrel_moe
from kestrel_runtime import Binary, UnsupportedError

X = torch.linspace(-2, 2, 24).view(3, 8)
WEIGHT, BIAS, CHOICES = torch.ones(6, 8), torch.ones(6), torch.ones(4, 12, 8)
Arguments = dict[str, Any]


def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def entry(name: str) -> Callable[..., None]:
    try:
        return Binary("kestrel_moe").function(name)
    except UnsupportedError as error:
        pytest.skip(str(error))


# op -> (good arguments by name, the entry point called with them)
OPS: dict[str, tuple[Arguments, Callable[..., None]]] = {
    "gelu_residual": (
        {"x": X, "approximate": "none", "out": fresh(3, 4)},
        lambda x, approximate, out: entry("gated")(out, x, False, approximate, 1.0),
    ),
    "gelu_and_mul": (
        {"x": X, "approximate": "tanh", "out": fresh(3, 4)},
        lambda x, approximate, out: entry("gated")(out, x, False, approximate, 0.0),
    ),
    "silu_and_mul": (
        {"x": X, "out": fresh(3, 4)},
        lambda x, out: entry("gated")(out, x, True, "none", 0.0),
    ),
    "gelu_residual_fp8": (
        {"x": X, "approximate": "none"},
        lambda x, approximate: entry("gated_fp8")(
            fresh(3, 4, dtype=torch.float8_e4m3fn), fresh(3, 1), x, False, approximate, 1.0
        ),
    ),
    "moe_sum": ({"x": CHOICES, "out": fresh(4, 8)}, lambda x, out: entry("moe_sum")(out, x)),
    "gemv": (
        {"x": X, "weight": WEIGHT, "bias": BIAS, "out": fresh(3, 6)},
        lambda x, weight, bias, out: entry("gemv")(out, x, weight, bias),
    ),
    "router_gemm": (
        {"x": X, "weight": WEIGHT, "out": fresh(3, 6)},
        lambda x, weight, out: entry("router_gemm")(out, x, weight),
    ),
}
BAD = [
    ("gelu_residual", {"x": X.double()}),
    ("gelu_residual", {"x": X[:, :7]}),
    ("gelu_residual", {"x": X[:, :0]}),
    ("gelu_residual", {"x": X.t()[:, :2]}),
    ("gelu_residual", {"approximate": "erf"}),
    ("gelu_residual", {"out": fresh(3, 8)}),
    ("gelu_and_mul", {"x": X.int()}),
    ("gelu_and_mul", {"approximate": ""}),
    ("gelu_and_mul", {"out": fresh(3, 4, dtype=torch.bfloat16)}),
    ("gelu_and_mul", {"out": fresh(3, 8)[:, ::2]}),
    ("gelu_and_mul", {"out": fresh(1, 4).expand(3, 4)}),
    ("silu_and_mul", {"x": X[:, :5]}),
    ("silu_and_mul", {"out": fresh(2, 4)}),
    ("gelu_residual_fp8", {"x": X.long()}),
    ("gelu_residual_fp8", {"x": X[None]}),
    ("gelu_residual_fp8", {"x": X[:, :3]}),
    ("gelu_residual_fp8", {"approximate": "TANH"}),
    ("moe_sum", {"x": X}),
    ("moe_sum", {"x": CHOICES.mT}),
    ("moe_sum", {"x": CHOICES.double()}),
    ("moe_sum", {"out": fresh(4, 12)}),
    ("moe_sum", {"out": fresh(1, 8).expand(4, 8)}),
    ("gemv", {"x": X.int()}),
    ("gemv", {"weight": torch.ones(6, 7)}),
    ("gemv", {"weight": torch.ones(8, 6).t()}),
    ("gemv", {"weight": WEIGHT.half()}),
    ("gemv", {"bias": torch.ones(5)}),
    ("gemv", {"bias": BIAS.half()}),
    ("gemv", {"out": fresh(3, 5)}),
    ("router_gemm", {"x": X.double()}),
    ("router_gemm", {"weight": WEIGHT[0]}),
    ("router_gemm", {"out": fresh(3, 6, dtype=torch.bfloat16)}),
]


@pytest.mark.parametrize(("op", "bad"), BAD, ids=[f"{op}-{next(iter(bad))}-{i}" for i, (op, bad) in enumerate(BAD)])
def test_both_refuse_in_the_same_words(op: str, bad: Arguments) -> None:
    good, by_entry = OPS[op]
    said = []
    for function in (getattr(kestrel_moe, op), by_entry):
        with pytest.raises((ValueError, TypeError)) as raised:
            function(**{**good, **bad})
        said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]
    assert f"{op}: argument '{next(iter(bad))}': expected " in said[0][1]


@pytest.mark.parametrize("op", OPS)
def test_a_good_call_reaches_the_last_check(op: str) -> None:
    good, by_entry = OPS[op]
    with pytest.raises(ValueError, match="expected a CUDA tensor, got cpu"):
        by_entry(**good)


ROWS = torch.ones(2, 3, 8)
BAD_LEADING = [
    (kestrel_moe.gelu_residual, (ROWS,), fresh(6, 4)),
    (kestrel_moe.silu_and_mul, (ROWS,), fresh(3, 2, 4)),
    (kestrel_moe.gemv, (ROWS, WEIGHT), fresh(6, 6)),
    (kestrel_moe.router_gemm, (ROWS, WEIGHT), fresh(3, 2, 6)),
]


@pytest.mark.parametrize(("op", "arguments", "out"), BAD_LEADING, ids=[op.__name__ for op, _, _ in BAD_LEADING])
def test_a_launch_refuses_an_out_whose_leading_dimensions_differ(
    op: Any, arguments: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="argument 'out': expected shape"):
        op.kernel_op.launch(*arguments, out=out)


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 6), (8, 0), (0, 0)])
def test_no_inputs_or_no_outputs_reach_the_last_check(inputs: int, outputs: int) -> None:
    entry("gemv")
    for op in (kestrel_moe.gemv, kestrel_moe.router_gemm):
        with pytest.raises(ValueError, match="expected a CUDA tensor, got cpu"):
            op.kernel_op.launch(torch.ones(1, 3, inputs), torch.ones(outputs, inputs))
