"""The kernel of w4a16_token_mlp on a GPU: its bits are those of single products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kestrel_quant import W4Weight, w4a16_token, w4a16_token_mlp
from kestrel_quant.w4a16 import from_codes
from kestrel_runtime import UnsupportedError
from kestrel_runtime.testing import (
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

# K, I, J, G: fewer tiles than SMs, an odd number of tiles, several steps of a CTA, shapes of models
SHAPES = [
    *((16, 16, 8, 128), (80, 208, 16, 128), (1024, 2816, 1024, 128), (4096, 14336, 4096, 128)),
    *((3584, 18944, 3584, 128), (8192, 28672, 8192, 256), (2048, 8192, 4096, 2048)),
]
ACTIVATIONS = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def weight(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool) -> W4Weight:
    g = torch.Generator("cuda").manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=g, device="cuda")
    scales = ((torch.rand(n, k // group, generator=g, device="cuda") + 0.5) / 4 / k**0.5).to(dtype)
    zeros = None if symmetric else torch.randint(0, 17, (n, k // group), generator=g, device="cuda")
    return from_codes(codes, scales, group, zeros)


def layer(
    k: int, i: int, j: int, group: int, dtype: torch.dtype = torch.bfloat16, *, symmetric: bool = True, more: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of w4a16_token_mlp; more: with an attention and biases."""
    group_of = [group if width % group == 0 else width for width in (k, i, j)]
    weights = weight(2 * i, k, group_of[0], dtype, symmetric), weight(k, i, group_of[1], dtype, symmetric)
    arguments = (random(1, k, dtype=dtype, seed=1), *weights, 1 + random(k, dtype=dtype, seed=2) / 4)
    options: dict[str, Any] = {"norm_eps": 1e-5, "norm_weight_bias": 0.25}
    if more:
        options["gate_up_bias"] = random(2 * i, dtype=dtype, seed=3)
        options["down_bias"], options["attention_bias"] = (random(k, dtype=dtype, seed=s) for s in (4, 5))
        options["attention"] = random(1, j, dtype=dtype, seed=6)
        options["attention_weight"] = weight(k, j, group_of[2], dtype, symmetric)
    return arguments, options


def in_single_products(
    x: torch.Tensor,
    gate_up: W4Weight,
    down: W4Weight,
    norm_weight: torch.Tensor,
    *,
    attention: torch.Tensor | None = None,
    attention_weight: W4Weight | None = None,
    attention_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu_and_mul",
    **norm: float,
) -> torch.Tensor:
    if attention is not None:
        assert attention_weight is not None
        x = w4a16_token(attention, attention_weight, attention_bias, residual=x)
    h = w4a16_token(x, gate_up, gate_up_bias, norm_weight=norm_weight, activation=activation, **norm)
    return w4a16_token(h, down, down_bias, residual=x)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SHAPES)
def test_it_has_the_bits_of_single_products(sizes: tuple[int, ...], dtype: torch.dtype, symmetric: bool) -> None:
    for activation in ACTIVATIONS:
        for more in (False, True):
            arguments, options = layer(*sizes, dtype, symmetric=symmetric, more=more)
            wanted = in_single_products(*arguments, activation=activation, **options)
            out, assert_intact = canary((1, sizes[0]), dtype, "cuda")
            assert w4a16_token_mlp(*arguments, activation=activation, out=out, **options) is out
            assert_same_bits(out, wanted)
            assert_intact()


def test_runs_repeat_in_place_and_in_any_number_of_dimensions() -> None:
    arguments, options = layer(4096, 14336, 4096, 128)
    assert_runs_repeat(w4a16_token_mlp, *arguments, runs=20, **options)
    wanted = w4a16_token_mlp(*arguments, **options)
    x = arguments[0].view(1, 1, -1)
    options["attention"] = options["attention"].view(1, 1, -1)
    assert_same_bits(w4a16_token_mlp(x, *arguments[1:], **options), wanted.view(1, 1, -1))
    assert w4a16_token_mlp(x, *arguments[1:], out=x, **options) is x
    assert_same_bits(x, wanted.view(1, 1, -1))


def test_graphs_replay_with_new_inputs() -> None:
    (x, *rest), options = layer(1024, 2816, 1024, 128)
    new = random(1, 1024, seed=7)
    got = graph_replay(lambda x: w4a16_token_mlp(x, *rest, **options), [x], [new])
    assert_same_bits(got, w4a16_token_mlp(new, *rest, **options))


def test_it_waits_for_the_launch_before() -> None:
    (_, *rest), options = layer(4096, 4096, 4096, 128)
    inputs = [random(1, 4096, seed=i) for i in range(2)]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        first = w4a16_token_mlp(inputs[i], *rest, **options)
        between()
        second = w4a16_token_mlp(first, *rest, **options | {"attention": inputs[i]})
        between()
        return first, second, w4a16_token_mlp(inputs[i], *rest, **options | {"attention": second})

    assert_waits_for_the_launch_before(chain)


def test_two_streams_at_once() -> None:
    """Each grid fills the GPU: neither may wait for CTAs that the other leaves no room for."""
    arguments, options = layer(4096, 14336, 4096, 128)
    wanted = w4a16_token_mlp(*arguments, **options)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(w4a16_token_mlp(*arguments, **options))
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits(result, wanted)


def test_other_calls_have_no_kernel() -> None:
    (x, *rest), options = layer(256, 512, 256, 128, more=False)
    with pytest.raises(UnsupportedError, match="one token"):
        w4a16_token_mlp(random(2, 256), *rest, **options)
    with pytest.raises(UnsupportedError, match="multiples of 128"):
        w4a16_token_mlp(x, weight(1024, 256, 32, torch.bfloat16, True), *rest[1:], **options)
