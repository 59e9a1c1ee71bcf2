"""The ops as torch ops: registration, fake shapes, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kestrel_norm
from kestrel_runtime.testing import opcheck

INPUTS = {
    "contiguous": lambda: torch.randn(6, 64, dtype=torch.bfloat16),
    "transposed": lambda: torch.randn(3, 4, 64, dtype=torch.bfloat16).transpose(0, 1),
    "sliced": lambda: torch.randn(6, 100, dtype=torch.bfloat16)[::2, 20:84],
    "no rows": lambda: torch.randn(0, 64, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", INPUTS)
def test_opcheck(name: str) -> None:
    x, weight = INPUTS[name](), torch.randn(64, dtype=torch.bfloat16)
    opcheck(kestrel_norm.layer_norm, (x, weight, weight))
    opcheck(kestrel_norm.rms_norm, (x, weight))
    opcheck(torch.ops.kestrel_norm.layer_norm.out, (x, weight, weight), {"out": torch.empty_like(x)})
    opcheck(torch.ops.kestrel_norm.rms_norm.out, (x, weight), {"out": torch.empty_like(x)})
    for op in (kestrel_norm.fused_add_rms_norm, kestrel_norm.fused_add_layer_norm):
        opcheck(op, (INPUTS[name](), INPUTS[name](), weight))


@pytest.mark.parametrize("name", INPUTS)
def test_fake_tensors_have_the_result_s_shape_and_strides(name: str) -> None:
    x = INPUTS[name]()
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        real = op(x)
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(x))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


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

    x, weight = torch.randn(6, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    want = block(x, torch.ones_like(x), weight)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x, torch.ones_like(x), weight)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_inputs_that_require_grad_are_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="rms_norm: argument 'x'"):
        kestrel_norm.rms_norm(x)
    with torch.no_grad():
        assert not kestrel_norm.rms_norm(x).requires_grad
