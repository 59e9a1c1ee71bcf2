"""The ops as torch ops: registration, fake shapes, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kestrel_norm
from kestrel_runtime.testing import LAYOUTS, assert_registered, opcheck

BF16 = torch.bfloat16
WITH_OUT = ("layer_norm", "rms_norm", "rms_norm_linear")


def rows() -> torch.Tensor:
    return torch.randn(3, 4, 64, dtype=BF16)


def arguments(op: str) -> list[torch.Tensor]:
    """Valid tensors for an op, rows first."""
    weight = torch.randn(64, dtype=BF16)
    if op == "rms_norm_linear":
        return [rows(), weight, torch.randn(8, 64, dtype=BF16)]
    return [rows(), rows(), weight] if op.startswith("fused") else [rows(), weight]


def test_every_op_is_registered_documented_and_checked() -> None:
    assert_registered(kestrel_norm)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", kestrel_norm.__all__)
def test_registered_op_is_sound(op: str, layout: str) -> None:
    opcheck(getattr(kestrel_norm, op), arguments(op), layout=layout, views=(0, 1) if op.startswith("fused") else (0,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", WITH_OUT)
def test_registered_out_overload_is_sound(op: str, layout: str) -> None:
    args = arguments(op)
    out = torch.empty(3, 4, 8, dtype=BF16) if op == "rms_norm_linear" else rows()
    opcheck(getattr(kestrel_norm, op), args, {"out": out}, layout=layout, views=(0, "out"))


@pytest.mark.parametrize("op", ["layer_norm", "fused_add_rms_norm"])
def test_registered_op_is_sound_without_rows(op: str) -> None:
    args = [x[:0] if x.ndim > 1 else x for x in arguments(op)]
    opcheck(getattr(kestrel_norm, op), args)


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(6, 64, dtype=BF16),
    "transposed": lambda: torch.randn(3, 4, 64, dtype=BF16).transpose(0, 1),
    "sliced": lambda: torch.randn(6, 100, dtype=BF16)[::2, 20:84],
    "no rows": lambda: torch.randn(0, 64, dtype=BF16),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "rms_norm_fp8"])
def test_fake_tensors_have_the_shape_and_strides_of_the_result(op: str, name: str) -> None:
    function, x = getattr(kestrel_norm, op), INPUTS[name]()
    real = function(x)
    with FakeTensorMode() as mode:
        fake = function(mode.from_tensor(x))
    for a, b in zip(*(result if isinstance(result, tuple) else (result,) for result in (fake, real)), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_compiled_without_a_graph_break() -> None:
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = kestrel_norm.layer_norm(x, weight, weight)
        z = torch.empty_like(y)
        kestrel_norm.rms_norm(y, weight, weight_bias=1.0, out=z)
        kestrel_norm.fused_add_rms_norm(z, residual, weight)
        kestrel_norm.fused_add_layer_norm(z, residual, weight)
        q, scale = kestrel_norm.fused_add_rms_norm_fp8(z, residual, weight)
        p, other = kestrel_norm.rms_norm_fp8(residual)
        return y, z, residual, q.float() * scale, p.float() * other

    x, weight = torch.randn(6, 64, dtype=BF16), torch.randn(64, dtype=BF16)
    want = block(x, torch.ones_like(x), weight)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x, torch.ones_like(x), weight)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", [name for name in kestrel_norm.__all__ if name != "rms_norm_linear"])
def test_eps_may_change_between_calls_of_a_compiled_function(op: str) -> None:
    torch._dynamo.reset()

    def call(args: list[torch.Tensor], eps: float) -> Any:
        result = getattr(kestrel_norm, op)(*args, eps=eps)
        return args[:2] if result is None else result

    compiled, args = torch.compile(call, fullgraph=True, backend="aot_eager"), arguments(op)
    for eps in (1e-6, 0.1, 0.5):
        got, want = (function([x.clone() for x in args], eps) for function in (compiled, call))
        pairs = zip(*(part if isinstance(part, (tuple, list)) else (part,) for part in (got, want)), strict=True)
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs), eps


@pytest.mark.parametrize("op", kestrel_norm.__all__)
def test_inputs_that_require_grad_run_only_without_grad_mode(op: str) -> None:
    args = [x.float() for x in arguments(op)]
    args[0].requires_grad_()
    with pytest.raises(ValueError, match=f"{op}: argument 'x': expected a tensor without requires_grad"):
        getattr(kestrel_norm, op)(*args)
    with torch.no_grad():
        getattr(kestrel_norm, op)(*args)
