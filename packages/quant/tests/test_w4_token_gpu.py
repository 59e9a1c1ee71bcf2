"""The kernel of w4a16_token on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from w4_cases import random, weight

from kestrel_quant import pack_w4, reference, w4a16_token, w4a16_token_covers
from kestrel_runtime import UnsupportedError
from kestrel_runtime.testing import (
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

# N, K, G: one group, an odd number of blocks of K, fewer blocks than warps, several tiles of a CTA, shapes of models
SHAPES = [
    *((32, 8, 8), (64, 64, 64), (96, 192, 192), (512, 520, 520), (160, 1024, 256), (9216, 1024, 128)),
    *((6144, 4096, 128), (4096, 14336, 128), (28672, 4096, 128), (4096, 8192, 512), (37888, 3584, 128)),
]
ACTIVATIONS = ("none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_the_result_is_rounded_once(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool) -> None:
    w = weight(n, k, group, dtype, symmetric)
    exact = reference.w4_dequant(w.codes, w.scales, w.zeros, group, torch.float32)[:, :k].double()
    x, eps = random(1, k, dtype=dtype, seed=1), torch.finfo(dtype).eps
    for activation in ACTIVATIONS:
        for with_more in (False, True):
            results = n if activation == "none" else n // 2
            bias = random(n, dtype=dtype, seed=2) if with_more else None
            residual = random(1, results, dtype=dtype, seed=3) if with_more else None
            norm, normed = {}, x.double()
            if with_more and k <= 8192:
                norm = {
                    "norm_weight": 1 + random(k, dtype=dtype, seed=4) / 4,
                    "norm_eps": 1e-5,
                    "norm_weight_bias": 0.5,
                }
                rms = (normed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
                normed = (normed / rms * (norm["norm_weight"].double() + 0.5)).to(dtype).double()
            product = F.linear(normed, exact, None if bias is None else bias.double())
            magnitude = F.linear(normed.abs(), exact.abs(), None if bias is None else bias.double().abs())
            # float32 sums; a norm that rounds an element to its neighbour
            of_product = (2**-20 + (0.05 * eps if norm else 0)) * magnitude
            if activation != "none":  # its slope is at most 1.2; a few float32 roundings of its own
                (a, b), (h, g) = of_product.chunk(2, -1), product.chunk(2, -1)
                of_product = 1.2 * a * g.abs() + b * h.abs() + 2**-19 * h.abs() * g.abs()
                approximate = "tanh" if "tanh" in activation else "none"
                product = (F.silu(h) if activation == "silu_and_mul" else F.gelu(h, approximate=approximate)) * g
            wanted = product if residual is None else product + residual.double()
            assert w4a16_token_covers(w, norm=bool(norm), gated=activation != "none")
            out, assert_intact = canary((1, results), dtype, "cuda")
            assert w4a16_token(x, w, bias, activation=activation, residual=residual, out=out, **norm) is out
            error = (out.double() - wanted).abs() - (0.51 * eps * wanted.abs() + of_product)
            assert float(error.max()) <= 0, (activation, with_more, float(error.max()))
            assert_intact()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 512, 256), (512, 8, 8), (4096, 2048, 128)])
def test_groups_of_zeros_add_nothing(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool) -> None:
    original, half = random(n, k, dtype=dtype), k // 2 if k > group else 0
    original[::3], original[1::3, half:] = 0, 0
    w = pack_w4(original, group, symmetric=symmetric)
    magnitudes = torch.pow(10.0, torch.rand(2, k, device="cuda") * 6 - 3)
    x, bias, residual = (random(2, k, seed=1) * magnitudes).to(dtype), random(n, dtype=dtype), random(1, n, dtype=dtype)
    x[1, :half] = x[0, :half]
    one, two = w4a16_token(x[:1], w), w4a16_token(x[1:], w)
    assert not bool(one[:, ::3].any())
    assert torch.equal(one[:, 1::3], two[:, 1::3])
    assert torch.equal(w4a16_token(x[:1], w, bias)[0, ::3], bias[::3])
    assert torch.equal(w4a16_token(x[:1], w, residual=residual)[:, ::3], residual[:, ::3])


@pytest.mark.parametrize("sms", [1, 2, 3, 17])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_every_row_is_written_where_waves_of_tiles_end(sms: int, more: int) -> None:
    n = 16 * (sms * torch.cuda.get_device_properties(0).multi_processor_count + more)
    w, x = weight(n, 256, 128, torch.bfloat16, True), random(1, 256)
    residual, bias = random(1, n, seed=1), random(n, seed=2)
    exact = reference.w4_dequant(w.codes, w.scales, w.zeros, 128, torch.float32).double()
    out = torch.full((1, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    w4a16_token(x, w, bias, residual=residual, out=out)
    wanted = F.linear(x.double(), exact, bias.double()) + residual.double()
    magnitude = F.linear(x.double().abs(), exact.abs(), bias.double().abs()) + residual.double().abs()
    assert bool(((out.double() - wanted).abs() <= 2**-8 * wanted.abs() + 2**-20 * magnitude).all())


def test_runs_repeat_and_the_residual_may_be_the_result() -> None:
    w, x, residual = weight(4096, 4096, 128, torch.bfloat16, True), random(1, 4096), random(1, 4096, seed=1)
    assert_runs_repeat(w4a16_token, x, w, runs=5)
    want = w4a16_token(x.view(1, 1, -1), w, residual=residual.view(1, 1, -1))
    w4a16_token(x, w, residual=residual, out=residual)
    assert_same_bits(residual, want.view(1, -1))


@pytest.mark.parametrize("lead", [(1,), (1, 1)])
def test_a_residual_elsewhere_or_partly_under_the_result_is_refused(lead: tuple[int, ...]) -> None:
    w, x, memory = weight(64, 256, 128, torch.bfloat16, True), random(*lead, 256), random(128)
    with pytest.raises(ValueError, match="w4a16_token: argument 'residual': expected device cuda"):
        w4a16_token(x, w, residual=torch.ones(*lead, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="w4a16_token: argument 'out': .* shares no memory with 'residual'"):
        w4a16_token(x, w, residual=memory[8:72].view(*lead, 64), out=memory[:64].view(*lead, 64))


def test_graphs_replay_with_new_inputs() -> None:
    w, x, new = weight(512, 1024, 128, torch.bfloat16, True), random(1, 1024), random(1, 1024, seed=1)
    norm = {"norm_weight": random(1024, seed=2)}
    got = graph_replay(lambda x: w4a16_token(x, w, activation="silu_and_mul", **norm), [x], [new])
    assert_same_bits(got, w4a16_token(new, w, activation="silu_and_mul", **norm))


def test_it_waits_for_the_launch_before() -> None:
    w, norm = weight(4096, 4096, 128, torch.bfloat16, True), random(4096, seed=2)
    inputs = [random(1, 4096, seed=i) for i in range(2)]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        first = w4a16_token(inputs[i], w, norm_weight=norm)
        between()
        second = w4a16_token(first, w, residual=inputs[i])
        between()
        return first, second, w4a16_token(second, w, norm_weight=norm, activation="silu_and_mul")

    assert_waits_for_the_launch_before(chain)


@pytest.mark.parametrize(
    ("x", "shape", "reason"),
    [
        ((2, 256), (64, 256, 128), "one token"),
        ((1, 256), (64, 256, 32), "multiples of 128"),
        ((1, 256), (72, 256, 128), "multiple of 16"),
    ],
)
def test_other_calls_have_no_kernel(x: tuple[int, int], shape: tuple[int, int, int], reason: str) -> None:
    w = weight(*shape, torch.bfloat16, True)
    with pytest.raises(UnsupportedError, match=reason):
        w4a16_token(random(*x), w)
    assert w4a16_token_covers(w) == (x[0] > 1)
