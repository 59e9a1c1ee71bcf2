"""On a GPU codes and scales are those of a CPU, bit for bit, in a captured graph too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kestrel_quant import fp8_dequant, fp8_quant, int4_dequant, int4_quant, int8_quant
from kestrel_runtime import backend
from kestrel_runtime.testing import fp8_code_distance, graph_replay

pytestmark = pytest.mark.gpu
kernels = pytest.mark.usefixtures("kernels_only")


def sample(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 300, generator=torch.Generator().manual_seed(seed)).bfloat16()


def on_cpu(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The op on CPU tensors, which a test of kernels alone would refuse."""
    with backend("auto"):
        return op(*args, **kwargs)


@kernels
@pytest.mark.parametrize("granularity", ["row", "tensor", "group"])
@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
def test_fp8_codes_and_scales(tokens: int, granularity: str) -> None:
    x = sample(tokens)
    q, scale = fp8_quant(x.cuda(), granularity=granularity)  # type: ignore[arg-type]
    expected, expected_scale = on_cpu(fp8_quant, x, granularity=granularity)
    assert torch.equal(scale.cpu(), expected_scale)
    distance = fp8_code_distance(q.cpu(), expected)
    assert int(distance.sum()) <= x.numel() // 10_000  # one code in at most one of 10 000 elements
    assert torch.equal(fp8_dequant(q, scale).cpu(), on_cpu(fp8_dequant, q.cpu(), scale.cpu()))


@kernels
@pytest.mark.parametrize("tokens", [1, 257])
@pytest.mark.parametrize("op", [int8_quant, int4_quant])
def test_integer_codes_and_scales(op: Callable[..., Any], tokens: int) -> None:
    x = sample(tokens)
    for got, expected in zip(op(x.cuda()), on_cpu(op, x), strict=True):
        assert torch.equal(got.cpu(), expected)


@kernels
@pytest.mark.parametrize("tokens", [1, 257])
def test_integer_values(tokens: int) -> None:
    q, scale = on_cpu(int4_quant, sample(tokens))
    assert torch.equal(int4_dequant(q.cuda(), scale.cuda()).cpu(), on_cpu(int4_dequant, q, scale))


@kernels
def test_a_replayed_graph_sees_new_values() -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return fp8_dequant(*fp8_quant(x, granularity="group"))

    got = graph_replay(there_and_back, [sample(16, 1).cuda()], [sample(16, 2).cuda()])
    assert torch.equal(got.cpu(), on_cpu(there_and_back, sample(16, 2)))
